"""Losses of tunix and maxtext, which are a sum and a weight under other names."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

PARAMS = {"w": np.float32([0.5, -1.0, 2.0])}
DRAW = np.random.default_rng(0)
BATCH = {
    "x": DRAW.normal(size=(8, 3)).astype(np.float32),
    "mask": np.float32([1, 0, 0, 1, 1, 1, 0, 1]),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedMetric:
    unreduced_sum: Any
    denominator: Any
    eps: float = dataclasses.field(default=1e-8, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossOutput:
    primary_loss: WeightedMetric
    aux_metrics: dict[str, Any]


def errors_of(params, batch):
    return (batch["x"] @ params["w"] - 1) ** 2


def weighted_metric(params, batch, tower):
    mask = batch["mask"] * tower.weight
    return WeightedMetric(errors_of(params, batch) @ mask, mask.sum())


def loss_output(params, batch, tower):
    mask = batch["mask"] * tower.weight
    counted = WeightedMetric((errors_of(params, batch) > 1) @ mask, mask.sum())
    return LossOutput(weighted_metric(params, batch, tower), {"large": counted})


def expected():
    """The loss, gradient and share of large errors, in NumPy's float64."""
    x = BATCH["x"].astype(np.float64)
    w = PARAMS["w"].astype(np.float64)
    mask = BATCH["mask"] / BATCH["mask"].sum()
    gaps = x @ w - 1
    return mask @ gaps**2, 2 * (mask * gaps) @ x, mask @ (gaps**2 > 1)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("loss_fn", [weighted_metric, loss_output])
def test_a_loss_of_another_library_is_one_of_ours(loss_fn, micro_batches):
    strategy = tj.Mirrored(("cpu:0",), towers=4)
    step = tj.build_train_step(
        loss_fn, optax.sgd(1.0), strategy, micro_batches=micro_batches
    )
    state, metrics = step(step.init(PARAMS), BATCH)
    assert step.unproved == {}
    loss, gradient, large = expected()
    np.testing.assert_allclose(metrics["loss"], loss, 1e-5)
    np.testing.assert_allclose(PARAMS["w"] - state.params["w"], gradient, 1e-5)
    if loss_fn is loss_output:
        np.testing.assert_allclose(metrics["large"], large, 1e-6)


class Pair(NamedTuple):
    unreduced_sum: Any
    denominator: Any


def named_pair(params, batch, tower):
    metric = weighted_metric(params, batch, tower)
    return Pair(metric.unreduced_sum, metric.denominator)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [weighted_metric, loss_output, named_pair])
def test_its_loss_is_scaled_as_ours_is(loss_fn):
    scale = tj.contrib.LossScale(2.0**10)
    strategy = tj.Mirrored(("cpu:0",), towers=4)
    sgd = optax.sgd(1.0)
    step = tj.contrib.train_step(loss_fn, sgd, strategy, loss_scale=scale)
    state, metrics = step(step.init(PARAMS), BATCH)
    loss, gradient, large = expected()
    np.testing.assert_allclose(metrics["loss"], loss, 1e-5)
    np.testing.assert_allclose(PARAMS["w"] - state.params["w"], gradient, 1e-5)
    assert metrics["loss_scale"] == 2.0**10
    if loss_fn is loss_output:
        np.testing.assert_allclose(metrics["large"], large, 1e-6)


class Opaque:
    def __init__(self, unreduced_sum, denominator):
        self.unreduced_sum = unreduced_sum
        self.denominator = denominator


def test_a_loss_that_cannot_be_scaled_is_told_what_to_return():
    def loss_fn(params, batch, tower):
        return Opaque(*named_pair(params, batch, tower))

    scale = tj.contrib.LossScale()
    strategy = tj.Mirrored(("cpu:0",), towers=4)
    step = tj.contrib.train_step(loss_fn, optax.sgd(1.0), strategy, loss_scale=scale)
    with pytest.raises(ValueError, match=r"'unreduced_sum'.*Return tj\.Weighted"):
        step(step.init(PARAMS), BATCH)


@pytest.mark.slow
def test_value_and_grad_takes_it_too():
    def tower_fn(state, batch, tower):
        out, grads = tj.value_and_grad(loss_output)(state.params, batch, tower)
        return {"loss": out.loss, "large": out.metrics["large"], "grads": grads}

    def update_fn(state, merged):
        values = {name: merged[name].value for name in ("loss", "large")}
        return state, values | {"grads": merged["grads"].value["w"]}

    step = tj.build_step(tower_fn, update_fn, tj.Mirrored(("cpu:0",), towers=2))
    _, metrics = step(step.init(PARAMS), BATCH)
    loss, gradient, large = expected()
    np.testing.assert_allclose(metrics["loss"], loss, 1e-5)
    np.testing.assert_allclose(metrics["grads"], gradient, 1e-5)
    np.testing.assert_allclose(metrics["large"], large, 1e-6)


def test_a_sum_of_several_numbers_is_refused_as_ours_is():
    def loss_fn(params, batch, tower):
        return WeightedMetric(errors_of(params, batch), jnp.float32(8))

    step = tj.build_train_step(loss_fn, optax.sgd(1.0), tj.Mirrored(towers=2))
    with pytest.raises(ValueError, match="Weighted"):
        step(step.init(PARAMS), BATCH)
