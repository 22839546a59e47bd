"""Measure what the audit of a step costs beside its first call: seconds of CPU time.

Each model's step is built for four towers on one device. Timed are its first call with
``audit=False``, and by default; the audit that a first call makes of leaves that are
not proved, which runs the loss alone where it can; and ``step.audit``, with gradients.
Each follows ``jax.clear_caches()``. ResNet-50 normalises its batches over all towers,
of images of so many pixels.

Run: ``python -m benchmarks.audit [--rounds 3] [--pixels 64] [--only mlp ...]``
"""

import argparse
import functools
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
from towerjax.check.audit.audit import run_audit
from towerjax.check.audit.comparison import AuditReport
from towerjax.metrics.weighted import Weighted
from towerjax.step.make.train import build_train_step
from towerjax.step.step import Step
from towerjax.towers.strategies import Mirrored
from towerjax.towers.tower import Tower

TOWERS = 4


def of_model(factory: Factory, rows: int, audit: bool | None) -> tuple[Step, Any, Any]:
    """The step, its parameters and a batch of a model of `benchmarks.models`."""
    model = factory(np.float32)

    def loss_fn(params: Any, batch: Any, tower: Tower) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    strategy = Mirrored(towers=TOWERS, devices=(jax.devices()[0],))
    step = build_train_step(loss_fn, optax.adam(1e-3), strategy, audit=audit)
    return step, model.init(0), model.make_batch(0, rows)


def resnet50(pixels: int, audit: bool | None) -> tuple[Step, Any, Any]:
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
    step = build_train_step(loss_fn, optimizer, strategy, audit=audit)
    return step, params, batch


def seconds(make: Callable[..., tuple[Step, Any, Any]]) -> list[float]:
    """CPU seconds of two first calls, the second by default, and of two audits."""
    step, params, batch = make(audit=False)
    by_default, _, _ = make(audit=None)
    state = step.init(params)
    sample = functools.partial(
        run_audit,
        step.plan,
        step.strategy,
        state,
        batch,
        calls=step.num_calls,
        pads=False,
    )
    calls: list[Callable[[], Any]] = [
        lambda: sample(gradients=False),
        lambda: sample(gradients=True),
        lambda: step(step.init(params), batch),
        lambda: by_default(by_default.init(params), batch),
    ]
    found = []
    for call in calls:
        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        out = call()
        jax.block_until_ready(jax.tree.leaves(out))
        found.append(time.process_time() - start)
        if isinstance(out, AuditReport):
            print(f"  {out}", flush=True)
    alone, with_gradients, first, default = found
    return [first, default / first, alone / first, with_gradients / first]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[])
    options = options_of(parser, rounds=1, only=["mlp", "cnn"])
    makes: dict[str, Callable[..., Any]] = {
        "mlp": functools.partial(of_model, mlp, 64),
        "cnn": functools.partial(of_model, cnn, 64),
        "gpt": functools.partial(of_model, transformer, 64),
        "resnet50": functools.partial(resnet50, options.pixels),
    }
    makes = {k: x for k, x in makes.items() if not options.only or k in options.only}
    seconds(functools.partial(of_model, mlp, 64))  # what a process does once
    columns = "first call, CPU s", "by default", "audit", "audit with gradients"
    print(f"\n| model | {' | '.join(columns)} |")
    print("|---|---|---|---|---|")
    for name, make in makes.items():
        rounds = [seconds(make) for _ in range(options.rounds)]
        first, *ratios = np.median(rounds, axis=0)
        shown = " | ".join(f"{x:.2f}" for x in ratios)
        print(f"| {name} | {first:.2f} | {shown} |", flush=True)
    print("All but the first are over the first call without an audit.")


if __name__ == "__main__":
    main()
