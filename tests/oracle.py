"""The one-tower oracle: the same training in NumPy float64, written by hand.

A linear model with a per-feature running mean as tower-local state. Nothing here
uses JAX or towerjax.
"""

import dataclasses

import numpy as np

FEATURES, CLASSES = 5, 3
# The longest sum has 24 examples; each of the handful of operations on the way to a
# result rounds once, and 3 steps compound: 24 * 3 roundings, with a factor 2 for tanh.
TOLERANCE = 2 * 24 * 3 * np.finfo(np.float32).eps


def rows(count, *width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, *width)).astype(np.float32)


def data(size=24, seed=0, features=5):
    """Examples of unequal weights, of one number each."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, features)).astype(np.float32),
        "y": rng.normal(size=size).astype(np.float32),
        "weight": rng.uniform(0.05, 1, size=size).astype(np.float32),
    }


def params():
    rng = np.random.default_rng(7)
    return {
        "w": rng.normal(size=(FEATURES, CLASSES)).astype(np.float32),
        "b": rng.normal(size=CLASSES).astype(np.float32),
    }


def close(got, expected, what):
    scale = max(np.abs(expected).max(), 1.0)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=0, atol=TOLERANCE * scale,
        err_msg=what,
    )  # fmt: skip


@dataclasses.dataclass
class Model:
    """Parameters and each tower's running mean.

    Attributes:
      w: ``[F, C]``.
      b: ``[C]``.
      mean: ``[T, F]``, each tower's running mean of its weighted inputs.
    """

    w: np.ndarray
    b: np.ndarray
    mean: np.ndarray


def losses_and_gradients(w, b, x, y):
    """Per-example losses ``[n]`` and gradients ``[n, F, C]``, ``[n, C]``.

    loss_i = sum_c tanh(p_ic - y_ic)^2 / 2 with p = x w + b.
    """
    error = np.tanh(x @ w + b - y)
    slope = error * (1 - error**2)
    return (error**2).sum(-1) / 2, x[:, :, None] * slope[:, None, :], slope


def tower_rows(num_rows, num_towers, shares):
    """Which examples each tower sees: contiguous rows, the last towers fewer."""
    padded = -(-num_rows // shares) * shares
    each = padded // num_towers
    return [
        np.arange(t * each, min((t + 1) * each, num_rows)) for t in range(num_towers)
    ]


def step(model, batch, *, num_towers, shares, kind, learning_rate, decay):
    """One SGD step of T towers, as sums over examples; returns model and metrics.

    kind: "weighted" (sum of w_i l_i / sum of w_i), "sum" (sum over towers of the
    towers' weighted sums) or "mean" (mean of these over the towers that have rows).
    """
    x, y, weight = batch["x"], batch["y"], batch["weight"]
    losses, grad_w, grad_b = losses_and_gradients(model.w, model.b, x, y)
    total = (weight * losses).sum()
    total_w = (weight[:, None, None] * grad_w).sum(0)
    total_b = (weight[:, None] * grad_b).sum(0)
    rows_of_towers = tower_rows(len(x), num_towers, shares)
    with_rows = float(sum(map(bool, map(len, rows_of_towers))))
    divisor = {"weighted": weight.sum(), "sum": 1.0, "mean": with_rows}[kind]
    grads = {"w": total_w / divisor, "b": total_b / divisor}
    mean = model.mean.copy()
    for tower, rows in enumerate(rows_of_towers):
        if len(rows) and weight[rows].sum() > 0:
            inputs = (weight[rows, None] * x[rows]).sum(0) / weight[rows].sum()
            mean[tower] = decay * mean[tower] + (1 - decay) * inputs
    after = Model(
        model.w - learning_rate * grads["w"], model.b - learning_rate * grads["b"], mean
    )
    hits = (x @ model.w + model.b).argmax(-1) == y.argmax(-1)
    metrics = {
        "loss": total / divisor,
        "accuracy": (weight * hits).sum() / weight.sum(),
        "weight_norm": np.sqrt((model.w**2).sum()),
    }
    return after, grads, metrics
