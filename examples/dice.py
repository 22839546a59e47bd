"""Train on a Dice loss, a function of sums over the whole batch, in micro-batches.

A first pass adds up three sums over all rows. A second pass differentiates the loss at
these sums. The output is the loss and the gradient of 4 towers, and those of the whole
batch at once, which are the same.

    python examples/dice.py
"""

import dataclasses

import jax
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices

rng = np.random.default_rng(0)
x = rng.normal(size=(50, 3)).astype(np.float32)
batch = {"x": x, "y": np.float32(x[:, 0] > 0.5)}
params = np.array([0.5, 1, -1], np.float32)


def sums_of(params, batch, weight):
    said = weight * jax.nn.sigmoid(batch["x"] @ params)
    both = {"said": said.sum(), "true": weight @ batch["y"]}
    return {"hits": said @ batch["y"], **both}


def dice(sums):
    return 1 - 2 * sums["hits"] / (sums["said"] + sums["true"])


def add_up(state, batch, tower):
    return tj.Sum(sums_of(state.params, batch, tower.weight))


def along(params, batch, tower, merged):
    """Return a sum whose gradient is that of the Dice loss of all rows."""
    slopes = jax.grad(dice)(merged.value)
    return optax.tree.vdot(slopes, sums_of(params, batch, tower.weight))


def update_fn(state, merged):
    params = state.params - merged["grads"].value
    metrics = {"loss": dice(merged["before"].value)}
    return dataclasses.replace(state, params=params), metrics


strategy = tj.Mirrored(towers=4, tower_loop="scan")
passes = add_up, tj.of_loss(along, loss_reduction=tj.Reduction.SUM)
step = tj.build_step(passes, update_fn, strategy, micro_batches=2, remainder="pad")
state, metrics = step(step.init(params), batch)
ones = np.ones(50, np.float32)
loss, grads = jax.value_and_grad(lambda p: dice(sums_of(p, batch, ones)))(params)
print(f"{metrics['loss']:.5f}", *[f"{x:.4f}" for x in params - state.params])
print(f"{loss:.5f}", *[f"{x:.4f}" for x in grads])
