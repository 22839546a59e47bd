"""Losses and states of towers of several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import towerjax as tj

CPUS = [f"cpu:{i}" for i in range(8)]
SPECS = {"w1": P(None, "model"), "w2": P("model"), "b": None}
CLIP = 0.3
RATE = 0.1
ADAM = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(RATE))
constrain = jax.lax.with_sharding_constraint


def start():
    rng = np.random.default_rng(0)
    sizes = {"w1": (8, 16), "w2": (16, 8), "b": (8,)}
    return {name: rng.normal(size=size) for name, size in sizes.items()}


def rows(size=16):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, size, 8))
    return {"x": x, "y": y, "w": rng.uniform(0.05, 1, size) * (rng.random(size) < 0.7)}


def loss_by(two_layers):
    """The loss of a residual block, whose two matrices a function applies."""

    def loss_fn(params, batch, tower):
        out = batch["x"] + two_layers(params, batch["x"]) + params["b"][None]
        losses = ((out - batch["y"]) ** 2).sum(-1)
        return tj.Weighted.mean(losses, batch["w"] * tower.weight)

    return loss_fn


@loss_by
def loss_fn(params, x):
    return constrain(jnp.tanh(x @ params["w1"]), P(None, "model")) @ params["w2"]


@loss_by
def plain_loss_fn(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def wide(towers, devices=None, **options):
    options = {"within": {"model": 2}, "specs": SPECS} | options
    names = None if devices is None else CPUS[:devices]
    return tj.Mirrored(names, towers=towers, **options)


def trained(step, state=None, steps=3, size=16):
    state = step.init(start()) if state is None else state
    for _ in range(steps):
        state, metrics = step(state, rows(size))
    return state, metrics
