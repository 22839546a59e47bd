"""Measure what the audit of a step costs: seconds, once, before the first step.

Each model's step is built for four towers; ``step.audit`` is timed, and the first call
without it, each after ``jax.clear_caches()``. ResNet-50 normalises its batches over all
towers, of images of so many pixels.

Run: ``python -m benchmarks.audit [--rounds 3] [--pixels 64]``
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from benchmarks.absent import ResNet50
from benchmarks.overhead import MODELS
from towerjax.metrics.weighted import Weighted
from towerjax.step.step import Step
from towerjax.step.train import build_train_step
from towerjax.towers.strategies import Mirrored
from towerjax.towers.tower import Tower

TOWERS = 4


def perceptron(model: Any) -> tuple[Step, Any, Any]:
    """The step, its parameters and a batch of a model of `benchmarks.overhead`."""
    work = model.work()

    def loss_fn(params: Any, batch: Any, tower: Tower) -> Weighted:
        return Weighted.mean(work.model.losses(params, batch), tower.weight)

    strategy = Mirrored(towers=TOWERS, devices=(jax.devices()[0],))
    step = build_train_step(loss_fn, optax.adam(1e-3), strategy, remainder="pad")
    return step, work.params, work.batch


def resnet50(pixels: int) -> tuple[Step, Any, Any]:
    """ResNet-50 with batch norm over all towers, of four images a tower."""
    strategy = Mirrored(towers=TOWERS, devices=(jax.devices()[0],))
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4 * TOWERS, pixels, pixels, 3)).astype(np.float32)
    batch = {"image": images, "label": rng.integers(0, 1000, len(images))}
    batch["label"] = batch["label"].astype(np.int32)
    model: nn.Module = ResNet50(axis_name=strategy.axis_name, dtype=np.float32)
    params = ResNet50(dtype=np.float32).init(jax.random.key(0), images[:2])["params"]

    def loss_fn(params: Any, batch: Any, tower: Tower) -> Weighted:
        logits, _ = model.apply(
            {"params": params}, batch["image"], mutable=["batch_stats"]
        )
        label = batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return Weighted.mean(losses, tower.weight)

    step = build_train_step(loss_fn, optax.sgd(0.1, 0.9), strategy)
    return step, params, batch


def seconds(make: Callable[[], tuple[Any, Any, Any]]) -> tuple[float, float]:
    """Of the first call, and of the audit."""
    step, params, batch = make()
    state = step.init(params)
    jax.clear_caches()
    start = time.perf_counter()
    report = step.audit(state, batch)
    audit_s = time.perf_counter() - start
    print(f"  {report}", flush=True)
    jax.clear_caches()
    start = time.perf_counter()
    jax.block_until_ready(step(state, batch))
    return time.perf_counter() - start, audit_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=64)
    options = parser.parse_args()
    makes: dict[str, Callable[[], Any]] = {
        model.name: lambda model=model: perceptron(model) for model in MODELS
    }
    name = f"ResNet-50, 16 images of {options.pixels} x {options.pixels}"
    makes[name] = lambda: resnet50(options.pixels)
    rows = []
    for name, make in makes.items():
        found = np.median([seconds(make) for _ in range(options.rounds)], axis=0)
        rows.append((name, *found))
    print("\n| model | first call, s | audit, s |\n|---|---|---|")
    for name, first, audit in rows:
        print(f"| {name} | {first:.1f} | {audit:.1f} |")


if __name__ == "__main__":
    main()
