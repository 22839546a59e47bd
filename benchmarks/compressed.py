"""Measure compressed sums: bytes a step, and the loss that training reaches.

A network of two layers learns noisy labels on 4 devices, by the same batches, summed
exactly and in codes. The bytes are those of the compiled step's collectives, on each
device.

Run: ``python -m benchmarks.compressed``
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax import Mirrored, Weighted, batches, build_train_step, run
from towerjax.contrib import Compressed
from towerjax.types import PyTree

ROWS, STEPS, DEVICES = 8192, 1000, 4
OPS = (
    None,
    Compressed(8),
    Compressed(8, error_feedback=False),
    Compressed(4),
    Compressed(4, error_feedback=False),
)


def data() -> dict[str, np.ndarray]:
    """Rows of very different sizes, and labels of which some are wrong."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 256)) * np.geomspace(0.01, 10, 256)
    hidden = np.tanh(
        x @ (rng.normal(size=(256, 32)) / np.geomspace(0.1, 100, 256)[:, None])
    )
    logits = 2 * hidden @ rng.normal(size=(32, 10)) + rng.gumbel(size=(ROWS, 10))
    return {"x": x.astype(np.float32), "y": logits.argmax(-1)}


def params() -> dict[str, np.ndarray]:
    """Of which two leaves are large."""
    rng = np.random.default_rng(1)
    w, v = rng.normal(size=(256, 512)) / 64, rng.normal(size=(512, 128)) / 23
    out = rng.normal(size=(128, 10)) / 11
    return {k: x.astype(np.float32) for k, x in {"w": w, "v": v, "out": out}.items()}


def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
    """Cross entropy."""
    hidden = jax.nn.relu(jnp.tanh(batch["x"] @ params["w"]) @ params["v"])
    logits = hidden @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return Weighted.mean(losses, tower.weight)


def main() -> None:
    """Print the table."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rows = data()
    print("| op | bytes sent a step | loss, last 50 steps | largest error |")
    print("|---|---|---|---|")
    for ops in OPS:
        strategy = Mirrored(towers=DEVICES)
        step = build_train_step(loss_fn, optax.sgd(0.1), strategy, extend=ops)
        state = step.init(params())
        first = next(iter(batches(rows, 64)))
        sent = step.report(state, first).bytes_sent
        feed = batches(rows, 64, epochs=None, seed=0)
        _, history = run(step, state, feed, steps=STEPS, progress=False)
        loss = history.metrics["loss"][-50:].mean()
        error = history.metrics.get("compression/error", np.zeros(1)).max()
        name = f"`{ops!r}`" if ops else "exact"
        print(f"| {name} | {sent:,} | {loss:.4f} | {error:.2g} |", flush=True)


if __name__ == "__main__":
    main()
