"""Give a step more than rows: a mean from the step before, a weight, a shared key.

All towers flip signs alike with a shared random key, and the loss has a weight that
falls from step to step. The output is the mean of all 10 rows as the towers add it up,
the mean of NumPy, and the number of rows.

    python examples/besides_rows.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices

rng = np.random.default_rng(0)
x = rng.normal(2.0, 3.0, size=(10, 3)).astype(np.float32)
data = {"x": x, "y": x.sum(axis=1)}


def loss_fn(params, batch, tower):
    seen = tower.extra
    mean = tj.Weighted(tower.weight @ batch["x"], jnp.sum(tower.weight))
    flip = jax.random.rademacher(tower.shared_rng, (), jnp.float32)
    centred = (batch["x"] - seen["mean"][None]) * flip
    errors = centred @ params["w"] - flip * batch["y"]
    loss = tj.Weighted.mean(errors**2, tower.weight)
    penalty = tj.penalty(batch["beta"] * (params["w"] ** 2).sum())
    rows = tj.Sum(jnp.sum(tower.weight))
    return tj.TowerOutput(loss + penalty, extra={"mean": mean, "rows": rows})


step = tj.build_train_step(
    loss_fn, optax.sgd(0.01), tj.Mirrored(towers=4), remainder="pad"
)
first = {"mean": np.zeros(3, np.float32), "rows": np.float32(0)}
state = step.init({"w": np.zeros(3, np.float32)}, extra=first)
for number in range(3):
    beta = tj.Whole(0.1 * 0.5**number)  # another number, the same program
    state, metrics = step(state, {**data, "beta": beta})
step.settle()
means = [np.asarray(mean).round(4) for mean in (state.extra["mean"], x.mean(axis=0))]
print(*means, float(state.extra["rows"]))
