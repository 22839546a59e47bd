"""What replicated model functions must compute, in NumPy float64, written by hand.

The model is that of `oracle`: linear, with a running mean of its inputs on each tower.
Nothing here uses JAX or towerjax.
"""

import dataclasses

import numpy as np
import oracle


def divisor(reduction, weight):
    """What a sum over examples of these weights is divided by."""
    return {
        "SUM": 1.0,
        "SUM_BY_NONZERO_WEIGHTS": float((weight != 0).sum()),
        "SUM_OVER_BATCH_SIZE": float(weight.size),
    }[reduction]


def quotient(total, by):
    return total / by if by else total * 0.0


def sum_of_towers(reduction, compat, weights):
    """Each tower's factor in ``one value = sum_t factor_t * sum_t``."""
    if reduction == "SUM" or compat == "tf1":
        towers = sum(w.size > 0 for w in weights)  # those that have examples
        each = 1.0 if reduction == "SUM" else 1.0 / towers
        return [quotient(each, divisor(reduction, w)) for w in weights]
    whole = divisor(reduction, np.concatenate(weights))
    return [quotient(1.0, whole)] * len(weights)


def norm(tree):
    return np.sqrt(sum((x**2).sum() for x in tree.values()))


def clipped(tree, largest):
    factor = min(1.0, largest / norm(tree))
    return {name: x * factor for name, x in tree.items()}


@dataclasses.dataclass
class Sgd:
    """``clip`` bounds the one gradient, ``clip_tower`` each tower's, by global norm."""

    rate: float
    momentum: float = 0.0
    clip: float = np.inf
    clip_tower: float = np.inf

    def init(self, params):
        return {"trace": {name: 0.0 * x for name, x in params.items()}}

    def step(self, params, slots, grads):
        grads = clipped(grads, self.clip)
        trace = {k: grads[k] + self.momentum * slots["trace"][k] for k in grads}
        return {k: params[k] - self.rate * trace[k] for k in params}, {"trace": trace}


@dataclasses.dataclass
class Model:
    """``params`` ``w [F, C]``, ``b [C]``; ``mean [T, F]``; the optimizer's slots."""

    params: dict
    mean: np.ndarray
    slots: dict
    steps: int = 0


def forward(model, batch, *, num_towers, shares, reduction, compat):
    """``(loss, each tower's gradient of its sum, factors, accuracy, rows)``."""
    x, y, weight = batch["x"], batch["y"], batch["weight"]
    w, b = model.params["w"], model.params["b"]
    losses, grad_w, grad_b = oracle.losses_and_gradients(w, b, x, y)
    rows = oracle.tower_rows(len(x), num_towers, shares)
    factors = sum_of_towers(reduction, compat, [weight[r] for r in rows])
    own = [
        {
            "w": (weight[r, None, None] * grad_w[r]).sum(0),
            "b": (weight[r, None] * grad_b[r]).sum(0),
        }
        for r in rows
    ]
    sums = [(weight[r] * losses[r]).sum() for r in rows]
    loss = sum(f * s for f, s in zip(factors, sums, strict=True))
    hits = (x @ w + b).argmax(-1) == y.argmax(-1)
    accuracy = (weight * hits).sum() / weight.sum()
    return loss, own, factors, accuracy, rows


def train(model, batch, optimizer, decay, **how):
    """The model after one step, the loss, and the accuracy."""
    x, weight = batch["x"], batch["weight"]
    loss, own, factors, accuracy, rows = forward(model, batch, **how)
    own = [clipped(one, optimizer.clip_tower) if norm(one) else one for one in own]
    grads = {
        name: sum(f * one[name] for f, one in zip(factors, own, strict=True))
        for name in model.params
    }
    params, slots = optimizer.step(model.params, model.slots, grads)
    mean = model.mean.copy()
    for tower, r in enumerate(rows):
        if weight[r].sum() > 0:
            inputs = (weight[r, None] * x[r]).sum(0) / weight[r].sum()
            mean[tower] = decay * mean[tower] + (1 - decay) * inputs
    return Model(params, mean, slots, model.steps + 1), loss, accuracy
