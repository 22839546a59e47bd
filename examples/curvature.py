"""Find the largest eigenvalue of a loss's Hessian, by power iteration over all towers.

A second pass differentiates the slope of the loss along a vector, so no tower holds the
Hessian. The output is the eigenvalue after 50 steps, and that of NumPy from the Hessian
of all rows.

    python examples/curvature.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices

rng = np.random.default_rng(0)
batch = {"x": rng.normal(size=(50, 3)), "y": rng.normal(size=50)}
batch = jax.tree.map(np.float32, batch)
params = np.array([0.5, 1, -1], np.float32)


def losses(params, batch):
    return (jnp.sin(batch["x"] @ params) - batch["y"]) ** 2


def loss_fn(params, batch, tower):
    return tj.Weighted.mean(losses(params, batch), tower.weight)


def slope_fn(params, batch, tower, merged):
    """Return the slope along a vector, whose gradient is the Hessian-vector product."""
    loss, slope = jax.jvp(
        lambda params: loss_fn(params, batch, tower), (params,), (tower.extra,)
    )
    return tj.Weighted(slope.sum, loss.weight)


def update_fn(state, merged):
    before = merged["before"]
    product = merged["grads"].value
    params = state.params - 0.0 * before["grads"].value  # your rate or optimizer
    eigenvalue = state.extra @ product
    vector = product / jnp.linalg.norm(product)
    after = dataclasses.replace(state, params=params, extra=vector)
    return after, {"loss": before["loss"], "eigenvalue": eigenvalue}


strategy = tj.Mirrored(towers=4, tower_loop="scan")
passes = tj.of_loss(loss_fn), tj.of_loss(slope_fn)
step = tj.build_step(passes, update_fn, strategy, micro_batches=2, remainder="pad")
state = step.init(params, extra=np.array([1, 0, 0], np.float32))
for _ in range(50):
    state, metrics = step(state, batch)
hessian = jax.hessian(lambda params: losses(params, batch).mean())(params)
values = np.linalg.eigvalsh(hessian)
print(f"{metrics['eigenvalue']:.4f}, of all rows {max(values, key=abs):.4f}")
