"""The gradient's noise scale, measured in a step of one's own.

python examples/noise_scale.py
"""

import dataclasses

import jax
import numpy as np

import towerjax as tj
from towerjax import contrib

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices

rng = np.random.default_rng(0)
x = rng.normal(size=(2200, 3)).astype(np.float32)
data = {
    "x": x,
    "y": x @ np.array([1, -2, 3], np.float32) + np.float32(rng.normal(size=2200)),
}
statistics = contrib.TowerStatistics()


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def tower_fn(state, batch, tower):
    loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
    told = statistics.of_tower(loss, grads)
    return {"loss": loss, "grads": grads, "told": told}


def update_fn(state, merged):
    metrics = statistics.metrics(merged["told"], merged["grads"])
    params = state.params - 0.0 * merged["grads"].value  # your rate or optimizer
    after = dataclasses.replace(state, params=params)
    return after, {"loss": merged["loss"], **metrics}


step = tj.build_step(tower_fn, update_fn, tj.Mirrored(towers=4), remainder="pad")
params = np.array([0.8, -1.8, 2.7], np.float32)
batches = tj.batches(data, 22)  # the statistics depend on the towers: no audit
state, history = tj.run(step, step.init(params), batches, audit=False, progress=False)
print(f"noise scale {statistics.noise_scale(history.metrics, smoothing=1)[-1]:.1f}")
