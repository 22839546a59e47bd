"""Let towers meet in every step, or only in every eighth.

It trains by plain SGD, by local SGD and by DiLoCo on the same data. The output is the
final loss of each.

    python examples/synchronise_less.py
"""

import jax
import numpy as np
import optax

import towerjax as tj
from towerjax.contrib import DiLoCo, LocalSGD

jax.config.update("jax_num_cpu_devices", 8)
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 64, 10)).astype(np.float32)
noise = rng.normal(size=(64, 64)).astype(np.float32)
data = [
    {"x": rows, "y": rows @ np.arange(10, dtype=np.float32) + n}
    for rows, n in zip(x, noise, strict=True)
]


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


measure = tj.build_eval_step(
    lambda *args: {"loss": loss_fn(*args)}, tj.Mirrored(towers=8)
)
for extend in (
    None,
    LocalSGD(every=8),
    DiLoCo(every=8, outer=optax.sgd(0.7, momentum=0.5, nesterov=True)),
):
    audit = None if extend is None else False  # of towers alone, nothing is merged
    strategy = tj.Mirrored(towers=8)
    optimizer = optax.sgd(0.05)
    step = tj.build_train_step(loss_fn, optimizer, strategy, extend=extend, audit=audit)
    state = step.init({"w": np.zeros(10, np.float32)})
    state, history = tj.run(step, state, data, progress=False)
    found = tj.evaluate(measure, state, data)
    print(f"{type(extend).__name__:10} {found['loss']:.3f}")
