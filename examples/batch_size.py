"""The noise scale of a gradient while a training goes on.

python examples/batch_size.py
"""

import jax
import numpy as np
import optax

import towerjax as tj
from towerjax import contrib

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(16384, 32)).astype(np.float32)}
data["y"] = (data["x"] @ rng.normal(size=32)).astype(np.float32)
data["y"] += rng.normal(size=16384).astype(np.float32)


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


step = tj.build_train_step(
    loss_fn, optax.sgd(0.02), tj.Mirrored(towers=8), extend=contrib.TowerStatistics()
)
state, batches = step.init(np.zeros(32, np.float32)), tj.batches(data, 64)
state, history = tj.run(step, state, batches, progress=False)
scale = contrib.TowerStatistics.noise_scale(history.metrics, smoothing=0.9)
for number in (0, 31, 63, 127, 255):
    print(f"step {number + 1:3}: {scale[number]:6.0f} rows")
print(history.metrics["towers/cosine"][0].round(2))
