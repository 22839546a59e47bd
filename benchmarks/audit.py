"""Measure what the audit of a step costs beside its first call: seconds of CPU time.

Each model's step is built for four towers on one device; ``step.audit`` is timed, and
the first call without it, each after ``jax.clear_caches()``, in turns. ResNet-50
normalises its batches over all towers, of images of so many pixels.

Run: ``python -m benchmarks.audit [--rounds 3] [--pixels 64] [--only mlp ...]``
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from benchmarks import options_of
from benchmarks.absent import ResNet50
from benchmarks.models import Factory, cnn, mlp, transformer
from towerjax.metrics.weighted import Weighted
from towerjax.step.build.step import Step
from towerjax.step.build.train import build_train_step
from towerjax.towers.strategies import Mirrored
from towerjax.towers.tower import Tower

TOWERS = 4


def of_model(factory: Factory, rows: int) -> tuple[Step, Any, Any]:
    """The step, its parameters and a batch of a model of `benchmarks.models`."""
    model = factory(np.float32)

    def loss_fn(params: Any, batch: Any, tower: Tower) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    strategy = Mirrored(towers=TOWERS, devices=(jax.devices()[0],))
    step = build_train_step(loss_fn, optax.adam(1e-3), strategy, audit=False)
    return step, model.init(0), model.make_batch(0, rows)


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

    optimizer = optax.sgd(0.1, 0.9)
    step = build_train_step(loss_fn, optimizer, strategy, audit=False)
    return step, params, batch


def seconds(make: Callable[[], tuple[Any, Any, Any]]) -> list[float]:
    """CPU seconds of the first call and of the audit, and both by the clock."""
    step, params, batch = make()
    state, found = step.init(params), []
    for call in (step.audit, step):
        jax.clear_caches()
        gc.collect()
        start = time.process_time(), time.perf_counter()
        out = call(state, batch)
        jax.block_until_ready(jax.tree.leaves(out))
        found.append((time.process_time() - start[0], time.perf_counter() - start[1]))
        if call is not step:
            print(f"  {out}", flush=True)
    (audit, audit_clock), (first, first_clock) = found
    return [first, audit, audit / first, first_clock, audit_clock]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[])
    options = options_of(parser, rounds=1, only=["mlp", "cnn"])
    makes: dict[str, Callable[[], Any]] = {
        "mlp": lambda: of_model(mlp, 64),
        "cnn": lambda: of_model(cnn, 64),
        "gpt": lambda: of_model(transformer, 64),
        "resnet50": lambda: resnet50(options.pixels),
    }
    makes = {k: x for k, x in makes.items() if not options.only or k in options.only}
    seconds(lambda: of_model(mlp, 64))  # what a process does once
    rows = []
    for name, make in makes.items():
        found = np.median([seconds(make) for _ in range(options.rounds)], axis=0)
        rows.append((name, *found))
    print("\n| model | first call, CPU s | audit, CPU s | ratio | by the clock |")
    print("|---|---|---|---|---|")
    for name, first, audit, ratio, *clock in rows:
        times = " and ".join(f"{x:.1f}" for x in clock)
        print(f"| {name} | {first:.2f} | {audit:.2f} | {ratio:.2f} | {times} |")
    print(f"median of the ratios: {np.median([row[3] for row in rows]):.2f}")


if __name__ == "__main__":
    main()
