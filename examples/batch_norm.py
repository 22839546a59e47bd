"""Normalise over the whole batch: 9 rows on 8 towers, of which three have no row.

It trains for three steps on 1, 3 and 8 towers. The output is a line for each: the loss
and the running mean, which are the same on all of them.

    python examples/batch_norm.py
"""

import jax
import numpy as np
import optax
from flax import linen as nn

import towerjax as tj
from towerjax.layers.batch_norm.linen import TowerBatchNorm

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

rng = np.random.default_rng(0)
x = (rng.normal(size=(9, 3)) + np.arange(9)[:, None]).astype(np.float32)
batch = {"x": x, "y": x.sum(1)}


class Network(nn.Module):
    """A batch norm and a layer."""

    @nn.compact
    def __call__(self, x, tower, train):
        """``[b]``."""
        x = TowerBatchNorm(momentum=0.9)(x, tower, use_running_average=not train)
        return nn.Dense(1)(nn.relu(x))[:, 0]


network = Network()
init = jax.jit(network.init, static_argnums=(2, 3))
variables = init(jax.random.key(0), x, None, True)  # None: one tower


def loss_fn(params, rows, tower):
    prediction, updated = network.apply(
        {"params": params, "batch_stats": tower.local},
        rows["x"],
        tower,
        True,
        mutable=["batch_stats"],
    )
    loss = tj.Weighted.mean((prediction - rows["y"]) ** 2, tower.weight)
    return tj.TowerOutput(loss, local=updated["batch_stats"])


def train(strategy):
    step = tj.build_train_step(loss_fn, optax.sgd(0.001), strategy, remainder="pad")
    local = tj.TowerLocal(variables["batch_stats"], tj.Reduction.MEAN)
    state = step.init(variables["params"], local=local)
    for _ in range(3):
        state, metrics = step(state, batch)
    mean = tj.towers.read_local(state.local)["TowerBatchNorm_0"]["mean"]
    return round(float(metrics["loss"]), 2), np.asarray(mean).round(3)


# 9 rows on 8 towers: four have 2, one has 1, and three have none.
for towers in (1, 3, 8):
    print(towers, *train(tj.Mirrored(towers=towers)))
