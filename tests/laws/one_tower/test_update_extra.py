"""An extra state that follows merged rows, sums and the new parameters."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import data, mirrored

import towerjax as tj

KEYS = 20
RATE = 0.1
OPTIMIZER = optax.sgd(0.05)
W = np.float32([0.5, -1, 2, 0.3, -0.2])
CENTRES = np.float32([[1, 1, 0, 0, 0], [-1, 0, 1, 0, 0], [0, -1, -1, 0.5, 0.5]])


def first_extra():
    return {
        "target": -W,
        "keys": np.tile(W, (KEYS, 1)),
        "counts": np.ones(3, np.float32),
        "sums": CENTRES,
    }


def nearest(x, extra, lib):
    """The centres, and for each row of x 1 at the one nearest to it, ``[n, 3]``."""
    centres = extra["sums"] / extra["counts"][:, None]
    distances = ((x[:, None] - centres[None]) ** 2).sum(-1)
    return centres, lib.eye(3, dtype=x.dtype)[distances.argmin(1)]


def aims_of(x, y, extra, lib):
    centres, chosen = nearest(x, extra, lib)
    rows = (x * (chosen @ centres)).sum(1)
    return [y, x @ extra["target"], rows, (x @ extra["keys"].T).mean(1)]


def loss_fn(w, batch, tower):
    x = batch["x"]
    weight = batch["weight"] * tower.weight
    extra = tower.extra
    aims = aims_of(x, batch["y"], extra, jnp)
    losses = sum(0.3 * (x @ w - aim) ** 2 for aim in aims)
    _, chosen = nearest(x, extra, jnp)
    more = {
        "keys": tj.Rows({"key": x * extra["target"][None], "weight": tower.weight}),
        "counts": tj.Sum(weight @ chosen),
        "sums": tj.Sum((weight[:, None] * chosen).T @ x),
    }
    return tj.TowerOutput(tj.Weighted.mean(losses, weight), extra=more)


def update_extra(state, merged):
    old = state.extra
    rows = merged["keys"].value
    is_key = jnp.concatenate([rows["weight"], jnp.ones(KEYS)]) > 0  # padding: last
    keys = jnp.concatenate([rows["key"], old["keys"]])
    return {
        "target": optax.incremental_update(state.params, old["target"], RATE),
        "keys": keys[jnp.argsort(~is_key, stable=True)][:KEYS],
        "counts": (1 - RATE) * old["counts"] + RATE * merged["counts"].value,
        "sums": (1 - RATE) * old["sums"] + RATE * merged["sums"].value,
    }


def oracle(w, extra, batch):
    """The same in NumPy float64, of the whole batch."""
    x, y, weight = (batch[name].astype(float) for name in ("x", "y", "weight"))
    _, chosen = nearest(x, extra, np)
    slopes = sum(0.6 * (x @ w - aim) for aim in aims_of(x, y, extra, np))
    w = w - 0.05 * (weight * slopes) @ x / weight.sum()
    sums = {"counts": weight @ chosen, "sums": (weight[:, None] * chosen).T @ x}
    after = {name: (1 - RATE) * extra[name] + RATE * sums[name] for name in sums}
    after["target"] = (1 - RATE) * extra["target"] + RATE * w
    keys = np.concatenate([x * extra["target"], extra["keys"]])
    return w, {**after, "keys": keys[:KEYS]}


def build(strategy=None, **options):
    options = {"remainder": "pad", "update_extra": update_extra, **options}
    return tj.build_train_step(loss_fn, OPTIMIZER, strategy or mirrored(4), **options)


LAYOUTS = [
    (mirrored(4, 2, "scan", cross_tower_ops=tj.PinnedTree()), {"micro_batches": 3}),
    (mirrored(4, 4, state="sharded"), {"micro_batches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options"), LAYOUTS)
def test_queue_target_and_centres_follow_those_of_one_tower(strategy, options):
    step = build(strategy, **options)
    state = step.init(W, extra=first_extra())
    w = W.astype(float)
    extra = jax.tree.map(lambda x: x.astype(float), first_extra())
    batches = [data(11, seed=i) for i in range(3)]  # fewer rows than keys, and padded
    for batch in batches:
        state, _ = step(state, batch)
        w, extra = oracle(w, extra, batch)
    for name, x in {"w": w, **extra}.items():
        got = state.params if name == "w" else state.extra[name]
        np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-6, err_msg=name)
    if options["micro_batches"] == 2:
        return  # the function of the step, by the layout with most in it
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    again = jax.lax.scan(step.fn, step.init(W, extra=first_extra()), stacked)[0]
    np.testing.assert_allclose(again.extra["keys"], extra["keys"], atol=1e-6)


def test_rows_of_a_queue_say_which_are_padding():
    def without_weight(w, batch, tower):
        out = loss_fn(w, batch, tower)
        out.extra["keys"].value["weight"] = jnp.ones(tower.rows)
        return out

    how = {"remainder": "pad", "update_extra": update_extra}
    step = tj.build_train_step(without_weight, OPTIMIZER, mirrored(2), **how)
    with pytest.raises(ValueError, match=r"extra\['keys'\].* not\s+depend on tower.w"):
        step(step.init(W, extra=first_extra()), data(11))


@pytest.mark.slow
def test_what_it_is_given_and_returns_is_told_of():
    with pytest.raises(ValueError, match=r"update_extra\(state, merged\)"):
        build(update_extra=lambda state: state.extra)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data(12))
    refused = [
        (lambda s, m: {**s.extra, "target": m["sums"].value}, r"target.*\[3, 5\].*\[5"),
        (lambda s, m: None, r"state.extra\['counts'\] .*absent.*Look at what update"),
        (lambda s, m: {**s.extra, "counts": 0.9 * m["counts"]}, r"merged\[...\].value"),
    ]
    for fn, text in refused:
        with pytest.raises((ValueError, TypeError)) as error:
            build(update_extra=fn).check(W, spec, extra=first_extra())
        told = [str(error.value), *getattr(error.value, "__notes__", [])]
        assert re.search(text, "\n".join(told)), told


@pytest.mark.slow
def test_what_an_update_of_ones_own_is_given_is_told_of():
    params = {"w": jnp.bfloat16(W), "scale": jnp.float32(2.0), "fixed": jnp.int32(3)}
    trainable = {"w": True, "scale": True, "fixed": False}
    optimizer = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())
    step = tj.build_train_step(loss_fn, optimizer, mirrored(2), trainable=trainable)
    state = step.init(params)
    refused = [
        ({"grads": {"w": jnp.ones(4)}}, r"grads\['scale'\] is absent, expected"),
        ({"loss": None}, r"as tj.apply_gradients\(..., loss=merged\['loss'\]\)"),
        ({"state": params}, "The state is a dict, not a tj.TrainState"),
    ]
    for change, text in refused:
        given = {"state": state, "grads": params, "loss": 1.0, **change}
        with pytest.raises(ValueError, match=text):
            tj.apply_gradients(optimizer, **given, trainable=trainable)
