"""Train a Flax NNX module, split once by kind and merged again in each tower.

The module has batch norm, dropout and ``nnx.remat``. The output says whether the
trained module's squared error is below 0.1.

    python examples/nnx_split.py
"""

import jax
import numpy as np
import optax
from flax import nnx

import towerjax as tj

jax.config.update("jax_num_cpu_devices", 4)  # a laptop as 4 devices


class Network(nnx.Module):
    """A layer, a batch norm, dropout, a layer."""

    def __init__(self, rngs):
        """From streams of random numbers."""
        self.hidden = nnx.Linear(3, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        """``[b]``."""
        return self.last(self.dropout(nnx.relu(self.norm(self.hidden(x)))))[:, 0]


kinds = nnx.Param, nnx.BatchStat, nnx.RngState
graph, params, stats, streams = nnx.split(Network(nnx.Rngs(0)), *kinds)


def loss_fn(params, batch, tower):
    model = nnx.merge(graph, params, tower.local, streams, copy=True)
    nnx.reseed(model, default=tower.rng)  # the stream's name, nnx.Rngs(dropout=...)
    errors = model(batch["x"]) - batch["y"]
    loss = tj.Weighted.mean(errors**2, tower.weight)
    return tj.TowerOutput(loss, local=nnx.state(model, nnx.BatchStat))


x = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
data = {"x": x, "y": np.sin(x.sum(1))}
step = tj.build_train_step(loss_fn, optax.adam(0.02), tj.Mirrored(towers=4))
state = step.init(params, local=tj.TowerLocal(stats, tj.Reduction.MEAN))
batches = tj.batches(data, 40, epochs=40, seed=0)
# The statistics are each tower's own, which an audit refuses.
state, history = tj.run(step, state, batches, audit=False, progress=False)

state = jax.device_get(state)
trained = nnx.merge(graph, state.params, tj.towers.read_local(state.local), streams)
trained.eval()
print("error below 0.1:", bool(np.mean((trained(x) - data["y"]) ** 2) < 0.1))
