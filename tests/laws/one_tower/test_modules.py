"""Modules of Flax in a tower: what they write is returned, or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_norms import CLOSE, EPSILON, IN, OPTIONS, RATE, batch, moments
from flax import linen, nnx
from layouts import mirrored as towers

import towerjax as tj
from towerjax.layers.batch_norm.linen import TowerBatchNorm as LinenNorm
from towerjax.layers.batch_norm.nnx import TowerBatchNorm as NnxNorm


class Model(nnx.Module):
    def __init__(self, rngs):
        self.norm = NnxNorm(IN, rngs=rngs, **OPTIONS)
        self.last = nnx.Linear(IN, 1, rngs=rngs)

    @nnx.remat
    def __call__(self, x, tower):
        return self.last(jnp.tanh(self.norm(x, tower)))[:, 0]


def split_model():
    """The parameters, the statistics, and the loss of both."""
    graph, params, stats = nnx.split(Model(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss_fn(params, rows, tower):
        model = nnx.merge(graph, params, tower.local)
        losses = model(rows["x"], tower) ** 2
        local = nnx.state(model, nnx.BatchStat)
        return tj.TowerOutput(tj.Weighted.mean(losses, tower.weight), local=local)

    return params, tj.TowerLocal(stats, tj.Reduction.MEAN), loss_fn


@pytest.mark.slow
def test_a_module_of_nnx_is_split_and_merged_in_a_tower():
    params, stats, loss_fn = split_model()
    step = tj.build_train_step(loss_fn, optax.sgd(RATE), towers(4, 2), remainder="pad")
    state, metrics = step(step.init(params, local=stats), batch(11))
    x = batch(11)["x"].astype(np.float64)
    weight = np.ones(11)
    mean, var = moments(x, weight)
    last = jax.tree.map(np.float64, nnx.to_pure_dict(params)["last"])
    y = np.tanh((x - mean) / np.sqrt(var + EPSILON)) @ last["kernel"]
    np.testing.assert_allclose(metrics["loss"], (y**2).mean(), **CLOSE)
    found = nnx.to_pure_dict(tj.towers.read_local(state.local))["norm"]
    np.testing.assert_allclose(found["mean"], 0.1 * mean, **CLOSE)
    np.testing.assert_allclose(found["var"], 0.9 + 0.1 * var, **CLOSE)
    moved = nnx.to_pure_dict(state.params)["norm"]["scale"] - 1
    assert (np.abs(np.asarray(moved)) > 1e-3).all()


@pytest.mark.slow
def test_a_step_of_ones_own_writes_into_the_modules_of_its_tower():
    params, stats, loss_fn = split_model()

    def tower_fn(state, rows, tower):
        out, grads = tj.value_and_grad(loss_fn)(state.params, rows, tower)
        local = dataclasses.replace(state.local, value=out.local)
        return {"loss": out.loss, "grads": grads, "local": local}

    def update_fn(state, merged):
        after = dataclasses.replace(state, local=merged["local"])
        return after, {"loss": merged["loss"]}

    step = tj.build_step(tower_fn, update_fn, towers(2, 1))
    step.check(jax.eval_shape(lambda p: step.init(p, local=stats), params), batch(4))


class WithDropout(nnx.Module):
    """A module that keeps what it learned of one batch for the next."""

    def __init__(self, norm):
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(0))])
        if norm:
            self.norm = nnx.BatchNorm(IN, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = self.layers[0](x)
        return self.norm(x) if hasattr(self, "norm") else x


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_module_as_params_keeps_nothing_that_the_loss_writes(norm, seeded, copied):
    def loss_fn(model, rows, tower):
        model = nnx.clone(model) if copied else model
        if seeded:
            nnx.reseed(model, default=tower.rng)
        return model(rows["x"]).sum(-1)

    def mean(params, rows, tower):
        values = params["scale"] * loss_fn(params["model"], rows, tower)
        return tj.Weighted.mean(values, tower.weight)

    params = {"scale": jnp.ones(()), "model": WithDropout(norm)}
    step = tj.build_train_step(
        mean, optax.sgd(RATE), towers(2, 1), trainable=lambda name, _: name == "scale"
    )
    state = jax.eval_shape(step.init, params)
    if copied or (seeded and not norm):
        step.check(state, batch(4))
        return
    with pytest.raises(ValueError, match="nnx.split") as found:
        step.check(state, batch(4))
    names = ["norm.mean", "norm.var"] * norm + ["rngs.count"] * (not seeded)
    assert all(f"{name}.value" in str(found.value) for name in names), found.value
    assert str(found.value).count(".value") == len(names)


class Scales(nnx.Module):
    """Three scales, and how often each was used."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones((3, IN)))
        self.uses = nnx.Variable(jnp.zeros(3))


def in_turn(fn):
    return nnx.scan(nnx.remat(fn), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)


@pytest.mark.slow
@pytest.mark.parametrize("through", [nnx.jit, nnx.remat, in_turn])
@pytest.mark.parametrize("counts", [False, True])
def test_what_flax_only_puts_back_is_not_written(through, counts):
    def used(model, x):
        if counts:
            model.uses[...] += 1.0
        return x * model.scale[...].reshape(-1, IN).prod(axis=0, keepdims=True)

    def loss_fn(model, rows, tower):
        return tj.Weighted.mean(through(used)(model, rows["x"]).sum(-1), tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(RATE), towers(2, 1))
    state = jax.eval_shape(step.init, Scales())
    if not counts:
        step.check(state, batch(4))
        return
    with pytest.raises(ValueError, match=r"wrote into params.uses.value, but"):
        step.check(state, batch(4))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local", "extra"])
def test_what_a_loss_writes_into_a_module_of_the_tower_is_returned(place):
    def loss_fn(params, rows, tower, returns=True):
        model = getattr(tower, place)
        losses = params * model(rows["x"]).sum(-1)
        values = {place: model} if returns else {}
        return tj.TowerOutput(tj.Weighted.mean(losses, tower.weight), **values)

    def check(loss_fn):
        step = tj.build_train_step(loss_fn, optax.sgd(RATE), towers(2, 1))
        model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        given = {"extra": model}
        if place == "local":
            given = {"local": tj.TowerLocal(model, tj.Reduction.ONLY_FIRST_TOWER)}
        step.check(jax.eval_shape(step.init, jnp.ones(()), **given), batch(4))

    check(loss_fn)
    with pytest.raises(ValueError, match=f"wrote into {place}.rngs.count.value, but"):
        check(functools.partial(loss_fn, returns=False))


@pytest.mark.slow
def test_under_remat_the_tower_may_be_a_static_argument():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, tower):
            return LinenNorm(use_running_average=False)(x, tower) ** 3

    rows = batch(6)
    static = linen.remat(Block, static_argnums=(2,))
    blocks = {"plain": Block(), "remat": linen.remat(Block)(), "static": static()}
    variables = jax.jit(lambda x: Block().init(jax.random.key(0), x, None))(rows["x"])

    def loss_fn(params, rows, tower):
        total = 0.0
        for name, block in blocks.items():
            values = {**variables, "params": params[name]}
            y, _ = block.apply(values, rows["x"], tower, mutable=["batch_stats"])
            total += (y * rows["x"]).sum(-1)
        return tj.Weighted.mean(total, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(RATE), towers(3, 1))
    params = {name: variables["params"] for name in blocks}
    step.check(params, rows)  # the numbers are JAX's matter
