"""N towers equal one tower: against the NumPy float64 oracle, on every executor."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from layouts import mirrored
from oracle import CLASSES, FEATURES, TOLERANCE, close
from oracle import params as start

import towerjax as tj

DECAY, RATE = 0.9, 0.5
SIZES = (24, 19, 3)  # divisible, ragged and fewer than towers: one program for all
EXECUTORS = {
    "shard_map": dict(executor="shard_map", local="vmap"),
    "pmap": dict(executor="pmap", local="vmap"),
    "shard_map scan": dict(executor="shard_map", local="scan"),
    "pmap scan": dict(executor="pmap", local="scan"),
    "groups": dict(cross_tower_ops=tj.collectives.Hierarchical(2)),
}
KINDS = {"weighted": None, "sum": tj.Reduction.SUM, "mean": tj.Reduction.MEAN}


def data(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(num_rows, FEATURES)).astype(np.float32),
        "y": rng.normal(size=(num_rows, CLASSES)).astype(np.float32),
        "weight": rng.uniform(0.05, 1, size=num_rows).astype(np.float32),
    }


def loss_fn(kind, params, batch, tower):
    logits = batch["x"] @ params["w"] + params["b"][None]
    losses = (jnp.tanh(logits - batch["y"]) ** 2).sum(-1) / 2
    weight = tower.weight * batch["weight"]
    loss = tj.Weighted.mean(losses, weight)
    hits = logits.argmax(-1) == batch["y"].argmax(-1)
    inputs = tj.Weighted(weight @ batch["x"], weight.sum())
    mean = DECAY * tower.local["mean"] + (1 - DECAY) * inputs.value
    mean = jnp.where(inputs.weight > 0, mean, tower.local["mean"])
    return tj.TowerOutput(
        loss=loss if kind == "weighted" else loss.sum,
        metrics={
            "accuracy": tj.Weighted.mean(hits, weight),
            "weight_norm": jnp.sqrt((params["w"] ** 2).sum()),
        },
        local={"mean": mean},
    )


def trainer(executor, towers, devices, kind, wrapped):
    names = tuple(f"cpu:{i}" for i in range(devices))
    strategy = tj.Mirrored(devices=names, towers=towers, **EXECUTORS[executor])
    return tj.build_train_step(
        wrapped(functools.partial(loss_fn, kind)),
        optax.sgd(RATE),
        strategy,
        loss_reduction=KINDS[kind],
        remainder="pad",
    )


def check(executor, towers, devices, kind, wrapped):
    step = trainer(executor, towers, devices, kind, wrapped)
    params = start()
    local = {"mean": np.zeros(FEATURES, np.float32)}
    local = {"mean": tj.TowerLocal(local["mean"], tj.Reduction.MEAN)}
    state = step.init(params, local=local)
    model = oracle.Model(
        params["w"].astype(np.float64),
        params["b"].astype(np.float64),
        np.zeros((towers, FEATURES)),
    )
    # The full batch comes first: the others are padded up to its size.
    for number, rows in enumerate(SIZES):
        batch = data(rows, seed=number)
        before = jax.device_get(state.params)
        state, metrics = step(state, batch)
        wide = {name: x.astype(np.float64) for name, x in batch.items()}
        model, grads, expected = oracle.step(
            model, wide, num_towers=towers, shares=SIZES[0], kind=kind,
            learning_rate=RATE, decay=DECAY,
        )  # fmt: skip
        for name in ("w", "b"):
            moved = (before[name] - jax.device_get(state.params)[name]) / RATE
            assert np.abs(grads[name]).max() > 0.01, "the test would prove nothing"
            close(moved, grads[name], f"gradient of {name}, step {number}")
            close(state.params[name], getattr(model, name), name)
        close(state.local["mean"].value, model.mean, "tower-local means")
        for name, value in expected.items():
            close(metrics[name], value, name)
    assert int(state.step) == 3


# Each layout, and each executor with each kind of loss.
LAYOUTS = [
    ("shard_map", 3, 3, "weighted"),
    ("shard_map", 8, 4, "sum"),
    ("pmap", 8, 2, "mean"),
    ("shard_map scan", 8, 1, "weighted"),
    ("pmap scan", 4, 2, "mean"),
    ("groups", 8, 4, "weighted"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "towers", "devices", "kind"), LAYOUTS)
def test_towers_equal_one_tower(executor, towers, devices, kind):
    """On pmap the loss function is under ``jit`` and ``checkpoint``."""
    wrapped = (lambda fn: jax.jit(jax.checkpoint(fn))) if executor == "pmap" else None
    check(executor, towers, devices, kind, wrapped or (lambda fn: fn))


@pytest.mark.parametrize(
    ("towers", "devices", "local", "kind"),
    [(2, 2, "vmap", "weighted"), (4, 2, "scan", "mean")],
)
@pytest.mark.slow
def test_micro_batches_are_sums_over_weights(towers, devices, local, kind):
    names = tuple(f"cpu:{i}" for i in range(devices))
    strategy = tj.Mirrored(devices=names, towers=towers, local=local)
    step = tj.build_train_step(
        functools.partial(loss_fn_without_local, kind), optax.sgd(RATE), strategy,
        loss_reduction=KINDS[kind], remainder="pad", micro_batches=3,
    )  # fmt: skip
    for rows in (24, 21):
        check_micro_batches(step, towers, kind, rows)


@pytest.mark.slow
def test_complex_parameters_get_the_gradient_that_jax_gives():
    rng = np.random.default_rng(3)

    def drawn(*shape):
        return rng.normal(size=shape) + 1j * rng.normal(size=shape)

    x, y, weight = drawn(22, 3), drawn(22, 6), rng.uniform(0.05, 1, 22)
    w, b = drawn(3, 6), rng.normal(size=6)

    def loss_fn(params, batch, tower):
        found = batch["x"] @ params["w"] + params["b"][None] - batch["y"]
        losses = (found.real**2 + 2 * found.imag**2).sum(-1)
        return tj.Weighted.mean(losses, tower.weight * batch["weight"])

    strategy = mirrored(4, 2, "scan", cross_tower_ops=tj.PinnedTree())
    options = {"remainder": "pad", "guard": "gradients", "micro_batches": 2}
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)
    narrow = lambda v: v.astype("c8" if np.iscomplexobj(v) else "f4")  # noqa: E731
    state = step.init({"w": narrow(w), "b": narrow(b)})
    batch = {"x": narrow(x), "y": narrow(y), "weight": narrow(weight)}
    for _ in range(2):
        state, metrics = step(state, batch)
        error = x @ w + b - y
        losses = (error.real**2 + 2 * error.imag**2).sum(1)
        np.testing.assert_allclose(
            metrics["loss"], weight @ losses / weight.sum(), rtol=TOLERANCE
        )
        # d/dRe - i d/dIm, as jax.grad has it.
        slope = (2 * error.real - 4j * error.imag) * weight[:, None] / weight.sum()
        w, b = w - 0.1 * x.T @ slope, b - 0.1 * slope.sum(0).real
        close_to(state.params["w"], w)
        close_to(state.params["b"], b)


def close_to(got, expected):
    atol = TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def check_micro_batches(step, towers, kind, rows):
    params, batch = start(), data(rows)
    state, metrics = step(step.init(params), batch)
    model = oracle.Model(params["w"], params["b"], np.zeros((towers, FEATURES)))
    wide = {name: x.astype(np.float64) for name, x in batch.items()}
    model, grads, expected = oracle.step(
        model, wide, num_towers=towers, shares=3 * towers, kind=kind,
        learning_rate=RATE, decay=DECAY,
    )  # fmt: skip
    if kind == "mean":  # of the values of all micro-batches that have examples
        parts = oracle.tower_rows(rows, 3 * towers, 3 * towers)
        share = towers / sum(part.size > 0 for part in parts)
        grads = {name: grad * share for name, grad in grads.items()}
        expected["loss"] *= share
    for name in ("w", "b"):
        moved = (params[name] - jax.device_get(state.params)[name]) / RATE
        assert np.abs(grads[name]).max() > 0.01
        close(moved, grads[name], name)
    close(metrics["loss"], expected["loss"], "loss")
    close(metrics["accuracy"], expected["accuracy"], "accuracy")


def loss_fn_without_local(kind, params, batch, tower):
    class Stateless:
        weight, local = tower.weight, {"mean": jnp.zeros(FEATURES)}

    out = loss_fn(kind, params, batch, Stateless)
    metrics = {"accuracy": out.metrics["accuracy"]}
    return tj.TowerOutput(loss=out.loss, metrics=metrics)


def test_evaluation_and_prediction_are_exact_for_any_size():
    strategy = mirrored(8, 4)

    def metric_fn(params, batch, tower):
        out = loss_fn_without_local("weighted", params, batch, tower)
        return {"loss": out.loss, **out.metrics}

    evaluate = tj.build_eval_step(metric_fn, strategy)
    predict = tj.build_predict_step(
        lambda p, b, tower: {"logits": b["x"] @ p["w"] + p["b"][None]}, strategy
    )
    for rows in (24, 1):
        check_inference(evaluate, predict, rows)


def check_inference(evaluate, predict, rows):
    params, batch = start(), data(rows)
    metrics = evaluate(params, batch)
    wide = {name: x.astype(np.float64) for name, x in batch.items()}
    losses, _, _ = oracle.losses_and_gradients(
        params["w"].astype(np.float64), params["b"], wide["x"], wide["y"]
    )
    weight = wide["weight"]
    close(metrics["loss"].value, (weight * losses).sum() / weight.sum(), "loss")
    close(metrics["loss"].weight, weight.sum(), "weight")
    logits = predict(params, batch)["logits"]
    expected = wide["x"] @ params["w"].astype(np.float64) + params["b"]
    assert logits.shape == (rows, CLASSES)
    close(logits, expected, "logits, in row order")


@pytest.mark.slow
def test_predictions_may_be_keys_where_a_batch_is_padded():
    keys = jax.random.split(jax.random.key(0), 3)
    strategy = tj.Mirrored(devices=("cpu:0",), towers=2)
    predict = tj.build_predict_step(lambda params, keys, tower: keys, strategy)
    out = predict(np.float32(0), keys)
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))


@pytest.mark.slow
def test_evaluation_reads_tower_local_values_by_their_reduction():
    towers, ops = 3, tj.PinnedTree()
    strategy = tj.Mirrored(towers=towers, cross_tower_ops=ops)
    kinds = {
        "sum": tj.Reduction.SUM,
        "mean": tj.Reduction.MEAN,
        "first": tj.Reduction.ONLY_FIRST_TOWER,
        "none": tj.Reduction.NONE,
    }
    own = np.float32([2, 3, 4])
    zero = np.zeros((), np.float32)
    local = {name: tj.TowerLocal(zero, kind) for name, kind in kinds.items()}
    loss_fn = functools.partial(loss_fn_without_local, "weighted")
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    state = step.init(start(), local=local)
    local = {name: tj.TowerLocal(own, kind) for name, kind in kinds.items()}
    state = step.place(dataclasses.replace(state, local=local))

    def metric_fn(params, batch, tower):
        assert "none" not in tower.local  # which has no one value
        rows = tower.weight.sum()
        return {
            name: tj.Weighted(tower.local[name] * rows, rows)
            for name in ("sum", "mean", "first")
        }

    metrics = tj.build_eval_step(metric_fn, strategy)(state, data(2 * towers - 1))
    read = tj.towers.read_local(
        {name: state.local[name] for name in kinds if name != "none"}
    )
    for name, expected in {"sum": own.sum(), "mean": own.mean(), "first": 2}.items():
        close(metrics[name].value, np.float64(expected), name)
        close(read[name], np.float64(expected), f"{name}, outside of towers")
    with pytest.raises(ValueError, match="Reduction.NONE"):
        tj.towers.read_local(state.local)


@pytest.mark.slow
def test_local_values_of_any_dtype_are_read_alike_inside_and_outside():
    strategy = mirrored(4, 2)
    values = [np.int8(100), True, np.float16(0.1)]
    kinds = (tj.Reduction.SUM, tj.Reduction.MEAN, tj.Reduction.ONLY_FIRST_TOWER)
    local = {
        f"{i} {kind.name}": tj.TowerLocal(value, kind)
        for i, value in enumerate(values)
        for kind in kinds
    }
    first = tj.Reduction.ONLY_FIRST_TOWER
    local["key"] = tj.TowerLocal(jax.random.key(7), first)
    step = tj.build_train_step(
        lambda p, b, t: tj.Weighted.mean(b["x"] @ p["w"], t.weight),
        optax.sgd(0.1),
        strategy,
    )
    state = step.init({"w": np.ones((FEATURES, 1), np.float32)}, local=local)
    seen = {}

    def metric_fn(params, batch, tower):
        seen.update({name: x.dtype for name, x in tower.local.items()})
        read = {k: x.astype(jnp.float32) for k, x in tower.local.items() if k != "key"}
        draw = jax.random.key_data(tower.local["key"])
        return {**read, "draw": draw, "n": tj.Weighted(tower.weight.sum(), 1.0)}

    metrics = tj.build_eval_step(metric_fn, strategy)(state, data(8))
    outside = tj.towers.read_local({k: v for k, v in state.local.items() if k != "key"})
    for name, value in outside.items():
        assert seen[name] == value.dtype, name
        np.testing.assert_array_equal(metrics[name], np.asarray(value, np.float32))
    np.testing.assert_array_equal(metrics["draw"], [0, 7])
