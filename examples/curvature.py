"""The largest eigenvalue of a loss's Hessian, by power iteration over all towers.

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


def tower_fn(state, batch, tower):
    (loss, grads), (_, tangent) = jax.jvp(
        lambda params: tj.value_and_grad(loss_fn)(params, batch, tower),
        (state.params,),
        (state.extra,),
    )
    product = tj.Weighted(tangent.sum, grads.weight)
    return {"loss": loss, "grads": grads, "product": product}


def update_fn(state, merged):
    params = state.params - 0.0 * merged["grads"].value  # your rate or optimizer
    product = merged["product"].value
    along, size = state.extra @ product, jnp.linalg.norm(product)
    after = dataclasses.replace(state, params=params, extra=product / size)
    return after, {"loss": merged["loss"], "eigenvalue": along}


strategy = tj.Mirrored(towers=4, local="scan")
step = tj.build_step(tower_fn, update_fn, strategy, micro_batches=2, remainder="pad")
state = step.init(params, extra=np.array([1, 0, 0], np.float32))
for _ in range(50):
    state, metrics = step(state, batch)
hessian = jax.hessian(lambda params: losses(params, batch).mean())(params)
values = np.linalg.eigvalsh(hessian)
print(f"{metrics['eigenvalue']:.4f}, of all rows {max(values, key=abs):.4f}")
