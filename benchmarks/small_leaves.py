"""Measure what the guard costs a model of small leaves, and two ways around it.

A flag that needs all gradients makes all small updates ready at once, and XLA's CPU
executor wakes its threads for them. Steps go in turns on one CPU device, each awaited.

Run: ``python -m benchmarks.small_leaves [--calls 3000] [--small]``
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj
from benchmarks import options_of

LEAVES = 18
WIDTH = 16
ROWS = 8


def loss_fn(
    params: Mapping[str, jax.Array], batch: jax.Array, tower: tj.Tower
) -> tj.Weighted:
    """The mean square of what a chain of small layers gives."""
    for name in sorted(params):
        batch = jnp.tanh(batch @ params[name])
    return tj.Weighted.mean((batch**2).sum(-1), tower.weight)


def main() -> None:
    """Print microseconds a call."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_leaves")
    parser.add_argument("--calls", type=int, default=3000)
    calls = options_of(parser, calls=20).calls
    draw = np.random.default_rng(0)
    shape = (LEAVES, WIDTH, WIDTH)
    layers = (draw.normal(size=shape) / 4).astype(np.float32)
    params = {f"w{i:02}": x for i, x in enumerate(layers)}
    batch = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    adam = optax.adam(1e-3)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "Adam": (adam, {}),
        'guard="loss"': (adam, {"guard": "loss"}),
        "optax.flatten": (optax.flatten(adam), {}),
        'on_nonfinite="ignore"': (adam, {"on_nonfinite": "ignore"}),
    }
    steps = {}
    states = {}
    times = {}
    for name, (optimizer, options) in ways.items():
        strategy = tj.OneDevice()
        steps[name] = tj.build_train_step(loss_fn, optimizer, strategy, **options)
        states[name] = steps[name].init(params)
        times[name] = []
    placed = next(iter(steps.values())).place_batch(batch)
    for call in range(calls + 10):
        for name, step in steps.items():
            start = time.perf_counter()
            states[name], metrics = step(states[name], placed)
            jax.block_until_ready(metrics)
            if call >= 10:
                times[name].append(1e6 * (time.perf_counter() - start))
    print("| way | least, us | median, us |\n|---|---|---|")
    for name, each in times.items():
        print(f"| {name} | {min(each):.0f} | {statistics.median(each):.0f} |")


if __name__ == "__main__":
    main()
