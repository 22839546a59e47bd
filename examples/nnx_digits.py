"""The digits of ``digits.py`` with a ``flax.nnx`` model, split and merged in a tower.

nnx modules hold their arrays, but a tower function is pure. So the module is split
once: parameters are mirrored and batch statistics tower-local. Each tower merges it
again, and reseeds the dropout's stream from ``tower.rng``.

    python examples/nnx_digits.py
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import towerjax as tj
from towerjax.layers.batch_norm.nnx import TowerBatchNorm

jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices

LEAST_ACCURACY = 0.95


class Network(nnx.Module):
    """One convolution and two dense layers: ``[b, 8, 8, 1]`` -> ``[b, 10]``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Make the layers with their arrays."""
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.norm = TowerBatchNorm(16, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 16, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.logits = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array, tower: tj.Tower) -> jax.Array:
        """Return the logits."""
        x = nnx.relu(self.norm(self.conv(x), tower))
        x = nnx.relu(self.hidden(x.reshape((x.shape[0], -1))))
        return self.logits(self.dropout(x))


def load_splits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    image, label = load_digits(return_X_y=True)
    image = (image / 16).astype(np.float32).reshape((-1, 8, 8, 1))
    order = np.random.default_rng(0).permutation(len(label))
    shuffled = {"image": image[order], "label": label[order].astype(np.int32)}
    train_split = {name: rows[:1440] for name, rows in shuffled.items()}
    test_split = {name: rows[1440:] for name, rows in shuffled.items()}
    return train_split, test_split


def main() -> None:
    key = jax.random.key(0, impl="rbg")  # its draws compile fast
    model = Network(nnx.Rngs(params=key, dropout=1))
    graph, params, batch_stats, streams = nnx.split(
        model, nnx.Param, nnx.BatchStat, nnx.RngState
    )

    def merge(params: Any, tower: tj.Tower) -> Network:
        # A copy: a tower may not write into variables from outside its trace.
        return nnx.merge(graph, params, tower.local, streams, copy=True)

    def loss_fn(params: Any, batch: Any, tower: tj.Tower) -> tj.TowerOutput:
        model = merge(params, tower)
        model.train()
        # The name must be that of the stream: another name reseeds nothing.
        nnx.reseed(model, dropout=tower.rng)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch["image"], tower), batch["label"]
        )
        loss = tj.Weighted.mean(losses, tower.weight)
        return tj.TowerOutput(loss, local=nnx.state(model, nnx.BatchStat))

    def metric_fn(params: Any, batch: Any, tower: tj.Tower) -> dict[str, tj.Weighted]:
        model = merge(params, tower)
        model.eval()
        right = model(batch["image"], tower).argmax(-1) == batch["label"]
        return {"accuracy": tj.Weighted.mean(right, tower.weight)}

    train_split, test_split = load_splits()
    strategy = tj.Mirrored(towers=8)
    step = tj.build_train_step(loss_fn, optax.adam(3e-3), strategy)
    state = step.init(params, local=tj.TowerLocal(batch_stats, tj.Reduction.MEAN))
    state, history = tj.run(
        step,
        state,
        tj.batches(train_split, 96, epochs=8, seed=0),
        steps=8 * 15,
        evaluate=tj.build_eval_step(metric_fn, strategy),
        eval_batches=lambda: tj.batches(test_split, 96),
        eval_every=15,
    )

    print(history.summary)
    accuracy = history.evaluations[-1][1]["accuracy"]
    print(f"test accuracy {accuracy:.4f} ({accuracy * 357:.0f} of 357)")
    if accuracy < LEAST_ACCURACY:
        raise SystemExit(f"The accuracy should be at least {LEAST_ACCURACY}.")


if __name__ == "__main__":
    main()
