"""Measure what checkpoints cost.

Run: ``python -m benchmarks.safety [--rounds 6]``
"""

import argparse
import contextlib
import functools
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj
from benchmarks import options_of
from towerjax.data.stream import Source
from towerjax.loop.checkpoint.checkpointer import Saving
from towerjax.loop.stopping import Point


def _loss_fn(params: Any, batch: Any, tower: Any) -> Any:
    hidden = batch["x"]
    for name in sorted(params):
        hidden = jnp.tanh(hidden @ params[name])
    return tj.Weighted.mean((hidden**2).sum(-1), tower.weight)


def _params(layers: int, width: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    scale = width**-0.5
    return {
        f"w{i}": np.float32(scale * rng.normal(size=(width, width)))
        for i in range(layers)
    }


def _batch(rows: int, width: int) -> dict[str, Any]:
    x = np.random.default_rng(1).normal(size=(rows, width))
    return {"x": np.float32(x)}


def save_seconds(devices: int, rounds: int, epochs: int) -> dict[str, float]:
    """The least time of a step of a run, as often as it is saved."""
    strategy = tj.Mirrored(devices=tuple(jax.devices()[:devices]))
    step = tj.build_train_step(_loss_fn, optax.adam(1e-3), strategy)
    best: dict[str, float] = {}

    def timed(name: str, call: Any) -> None:
        start_s = time.perf_counter()
        call()
        seconds = time.perf_counter() - start_s
        best[name] = min(best.get(name, seconds), seconds)

    for _ in range(rounds):  # the first compiles
        for every in (None, 100, 25):
            with tempfile.TemporaryDirectory() as folder:
                saving = tj.Checkpointer(folder, every=every) if every else None
                cut = tj.batches(_batch(64, 256), 64, epochs=epochs)
                state = step.init(_params(8, 256))
                state, history = tj.run(
                    step, state, cut, checkpointer=saving, progress=False
                )
            name = f"every={every}"
            seconds = 1 / history.summary.steps_per_second
            best[name] = min(best.get(name, seconds), seconds)
        with tempfile.TemporaryDirectory() as folder:
            stack = contextlib.ExitStack()
            source = Source([])
            saver = Saving(tj.Checkpointer(folder), step, state, source, stack)
            jax.block_until_ready(state)
            begin = functools.partial(saver.save, Point(state))
            timed("pause", begin)
            timed("then", stack.close)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=200)
    options = options_of(parser, rounds=1, epochs=30)
    jax.config.update("jax_num_cpu_devices", 2)
    for devices in (1, 2):
        timed = save_seconds(devices, options.rounds, options.epochs)
        text = "  ".join(f"{name} {s * 1e3:.2f} ms" for name, s in timed.items())
        print(f"{devices} devices, saved: {text}", flush=True)


if __name__ == "__main__":
    main()
