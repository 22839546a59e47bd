"""Averaged parameters, learning rate and gradient norm, against NumPy in float64."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.contrib import ema_params, train_step, with_ema

T = 4
STEPS = 6
DECAY = 0.75
EXACT = {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()}
START = {"w": np.array([0.5, -1, 2, 0.25], np.float32), "b": np.float32(0.25)}
BOTH = ("learning_rate", "gradient_norm")


def errors_of(params, batch):
    return batch["x"] @ params["w"] + params["b"] - batch["y"]


def loss_fn(params, batch, tower):
    weight = tower.weight * batch["weight"]
    return tj.Weighted.mean(errors_of(params, batch) ** 2, weight)


def batches(count=STEPS, rows=14):
    """So many rows: four towers share them unevenly."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {
            "x": rng.normal(size=(rows, 4)).astype(np.float32),
            "y": rng.normal(size=rows).astype(np.float32),
            "weight": rng.uniform(0.05, 1, rows).astype(np.float32),
        }


def rate_after(count):
    return 0.1 / (1 + count)


OPTIMIZER = optax.inject_hyperparams(optax.sgd)(rate_after)


def build(devices=1, *, how=None, **options):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(devices)], towers=T, **how or {})
    options = {"ema": DECAY, "log": BOTH, "remainder": "pad", **options}
    return train_step(loss_fn, OPTIMIZER, strategy, **options)


@functools.cache
def oracle(steps=STEPS):
    """``(params, average, rates, norms)`` of gradient descent in float64."""
    params = {k: np.float64(x) for k, x in START.items()}
    average = dict(params)
    rates, norms = [], []
    for number, batch in enumerate(batches(steps)):
        x, y, weight = (np.float64(batch[k]) for k in ("x", "y", "weight"))
        slope = 2 * weight * (x @ params["w"] + params["b"] - y) / weight.sum()
        grads = {"w": x.T @ slope, "b": slope.sum()}
        norms.append(np.sqrt((grads["w"] ** 2).sum() + grads["b"] ** 2))
        rates.append(rate_after(number))
        params = {k: params[k] - rates[-1] * grads[k] for k in params}
        average = {k: DECAY * average[k] + (1 - DECAY) * params[k] for k in params}
    return params, average, rates, norms


def same(found, expected):
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-6)


def bits(tree):
    return [x.tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


@pytest.mark.slow
@pytest.mark.parametrize("how", [
    {}, {"state": "sharded"}, {"state": "sharded_optimizer"}], ids=str)  # fmt: skip
def test_the_average_and_the_metrics_are_those_of_one_tower(how):
    step = build(2, how=how, micro_batches=2)
    state, history = tj.run(step, step.init(START), batches(), progress=False)
    params, average, rates, norms = oracle()
    same(jax.device_get(state.params), params)
    same(jax.device_get(ema_params(state)), average)
    np.testing.assert_allclose(history.metrics["learning_rate"], rates, rtol=1e-6)
    np.testing.assert_allclose(history.metrics["gradient_norm"], norms, rtol=2e-6)
    assert not np.allclose(average["w"], params["w"], rtol=1e-2)
    if how:
        shardings = {x.sharding for x in jax.tree.leaves(state.opt_state.ema)}
        assert not all(x.is_fully_replicated for x in shardings)


@pytest.mark.slow
def test_their_bits_are_the_same_on_any_devices_and_in_shards():
    ends = set()
    for devices, state in ((1, "mirrored"), (2, "mirrored"), (4, "sharded")):
        step = build(devices, how={**EXACT, "state": state})
        end, history = tj.run(step, step.init(START), batches(), progress=False)
        logged = [history.metrics[name] for name in BOTH]
        ends.add((*bits(end.params), *bits(ema_params(end)), *bits(logged)))
    assert len(ends) == 1


@pytest.mark.slow
def test_the_average_is_evaluated_saved_and_resumed(tmp_path):
    def metric_fn(params, batch, tower):
        return {"mse": loss_fn(params, batch, tower)}

    held_out = [*batches(2)]

    def run(steps, **options):
        step = build(2, how=EXACT)
        evaluate = tj.build_eval_step(metric_fn, step.strategy, remainder="pad")
        options |= {"evaluate": evaluate, "eval_batches": held_out, "eval_every": 2}
        options |= {"eval_params": ema_params, "progress": False}
        data = [*batches()]
        return tj.run(step, step.init(START), data, steps=steps, **options)

    whole, history = run(STEPS)
    saving = tj.Checkpointer(tmp_path, every=1)
    run(3, checkpointer=saving)
    resumed, later = run(STEPS, checkpointer=saving)
    assert later.steps.tolist() == [4, 5, 6]
    for part in ("params", "opt_state"):
        assert bits(getattr(resumed, part)) == bits(getattr(whole, part))
    assert later.evaluations == tuple(x for x in history.evaluations if x[0] > 3)
    # Of the average, and not of the parameters.
    for number, values in history.evaluations:
        _, average, *_ = oracle(number)
        sums = np.zeros(2)
        for batch in held_out:
            errors = errors_of(average, {k: np.float64(x) for k, x in batch.items()})
            sums += (batch["weight"] * errors**2).sum(), batch["weight"].sum()
        np.testing.assert_allclose(values["mse"], sums[0] / sums[1], rtol=1e-5)


@pytest.mark.slow
def test_a_refused_step_leaves_the_average():
    step = build(on_nonfinite="skip")
    data = [*batches(3)]
    data[1] = {**data[1], "y": np.full_like(data[1]["y"], np.nan)}
    state, history = tj.run(step, step.init(START), data, progress=False)
    assert history.skipped == (2,)
    step = build()
    without, _ = tj.run(step, step.init(START), [data[0], data[2]], progress=False)
    assert bits(ema_params(state)) == bits(ema_params(without))


def test_what_does_not_train_is_as_it_is_and_floats_of_16_bits_have_32():
    params = {"a": jnp.ones(2, jnp.bfloat16), "fixed": jnp.int32(3)}

    def of_a(params, batch, tower):
        return tj.Weighted.mean(params["a"].astype(jnp.float32).sum() * batch)

    how = {"ema": 0.5, "trainable": lambda name, x: name == "a", "audit": False}
    step = train_step(of_a, optax.sgd(1 / 64), tj.OneDevice(), **how)
    state = step.init(params)
    state, _ = step(state, np.full(2, 1.0, np.float32))
    assert state.opt_state.ema["a"].dtype == jnp.float32
    assert state.opt_state.ema["a"].tolist() == [1 - 1 / 128] * 2
    read = ema_params(state)
    assert read["a"].dtype == jnp.bfloat16 and int(read["fixed"]) == 3


def test_an_average_of_a_split_module_has_none_where_it_has():
    """As of `eqx.partition`, which leaves None where a leaf is no array."""
    params = {"activation": None, "w": jnp.float32(1), "last": None}
    state = tj.TrainState.create(params, with_ema(optax.sgd(0.5), 0.5))
    assert ema_params(state) == params
    state = dataclasses.replace(state, params={"w": jnp.float32(1)})
    with pytest.raises(ValueError, match="does not have the structure"):
        ema_params(state)


@pytest.mark.slow
def test_extensions_and_optimizers_that_take_the_loss_go_on():
    seen = []

    def update(updates, state, params=None, *, value, **extra):
        seen.append(value.shape)
        return updates, state

    takes_loss = optax.GradientTransformationExtraArgs(optax.sgd(0.1).init, update)

    def named(fns):
        def update_fn(state, merged):
            after, metrics = fns.update(state, merged)
            return after, {**metrics, "mine": metrics["loss"] * 2}

        return fns._replace(update=update_fn)

    how = {"ema": DECAY, "log": "gradient_norm", "extend": named, "audit": False}
    step = train_step(loss_fn, takes_loss, tj.OneDevice(), **how)
    _, metrics = step(step.init(START), next(batches(1)))
    assert metrics["mine"] == 2 * metrics["loss"] and metrics["gradient_norm"] > 0
    assert seen and set(seen) == {()}


def with_a_metric(params, batch, tower):
    metrics = {"learning_rate": tj.Sum(jnp.float32(1))}
    return tj.TowerOutput(loss_fn(params, batch, tower), metrics=metrics)


def of_rows(params, batch, tower):
    rows = tj.sparse.take(params, jnp.arange(2))
    return tj.Weighted.mean(rows.sum() + 0 * batch["y"], tower.weight)


def several():
    rate = optax.inject_hyperparams(optax.sgd)(0.1)
    return optax.chain(rate, rate)


BAD = {
    "a decay of 1": (lambda: build(ema=1), "ema=1 must be a number in (0, 1)"),
    "a flag": (lambda: build(ema=True), "ema=True must be a number in (0, 1)"),
    "no optimizer": (lambda: with_ema(print, 0.9), "must be an optax transformation"),
    "no such name": (lambda: build(log=["lr"]), "names 'lr', and may name learning_r"),
    "no rate": (lambda: train_step(loss_fn, optax.sgd(0.1), tj.OneDevice(),
        log=BOTH).init(START), "the optimizer's state has no learning rates, but must"),
    "two rates": (lambda: train_step(loss_fn, several(), tj.OneDevice(), ema=0.5,
        log=BOTH).init(START), "the optimizer's state has 2 learning rates, but must"),
    "no average": (lambda: ema_params(build(ema=None).init(START)),
        "state.opt_state has no averages of the parameters, but must have one"),
    "a gradient of rows": (lambda: (step := train_step(of_rows, OPTIMIZER,
        tj.OneDevice(), log=BOTH, audit=False))(step.init(np.ones((4, 1), np.float32)),
        next(batches(1))),
        "a table has a gradient of rows, which may name a row twice"),
    "a metric of that name": (lambda: (step := train_step(with_a_metric, OPTIMIZER,
        tj.OneDevice(), log=BOTH, audit=False))(step.init(START), next(batches(1))),
        "both have ['learning_rate']"),
    "towers alone": (lambda: (step := build(log=["gradient_norm"], ema=None,
        extend=tj.contrib.LocalSGD(2)))(step.init(START), next(batches(1))),
        "a merged gradient, but these towers train alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.few_fast(3)
def test_what_cannot_be_done_is_refused(name):
    call, told = BAD[name]
    with pytest.raises(ValueError, match=re.escape(told)):
        call()
