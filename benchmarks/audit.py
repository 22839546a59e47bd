"""Measure what the audit of a step costs beside its first call, in CPU seconds.

Each model's step is built for four towers on one device. Four calls are timed: the
first call with ``audit=False``; the first call by default; the audit that a first call
makes of leaves that are not proved, which runs the loss alone if it can; and
``step.audit``, with gradients. All except the first are shown over the first call
without an audit. Each follows ``jax.clear_caches()``. ResNet-50 normalises its batches
over all towers; ``--pixels`` is the size of its images.

Run: ``python -m benchmarks.audit [--rounds 3] [--pixels 64] [--only mlp ...]``
"""

import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import numpy as np
import optax

from benchmarks.absent import ResNet50
from benchmarks.harness import Rounds, begin, options_of, parser_of, turns
from benchmarks.models import Factory, cnn, mlp, transformer
from towerjax.check.audit.audit import run_audit
from towerjax.make.train import build_train_step
from towerjax.metrics.weighted import Weighted
from towerjax.prover.comparison import AuditReport
from towerjax.step.step import Step
from towerjax.towers.strategies import Mirrored
from towerjax.towers.tower import Tower

TOWERS = 4
COLUMNS = {
    "model": "",
    "first call, CPU s": ".2f",
    "by default": ".2f",
    "audit": ".2f",
    "audit with gradients": ".2f",
}
Make: TypeAlias = Callable[..., tuple[Step, Any, Any]]
"""``audit -> step, parameters, batch``."""


def of_model(factory: Factory, rows: int, audit: bool | None) -> tuple[Step, Any, Any]:
    """Return the step, parameters and a batch of a model of `benchmarks.models`."""
    model = factory(np.float32)

    def loss_fn(params: Any, batch: Any, tower: Tower) -> Weighted:
        return Weighted.mean(model.losses(params, batch), tower.weight)

    strategy = Mirrored(towers=TOWERS, devices=(jax.devices()[0],))
    step = build_train_step(loss_fn, optax.adam(1e-3), strategy, audit=audit)
    return step, model.init(0), model.make_batch(0, rows)


def resnet50(pixels: int, audit: bool | None) -> tuple[Step, Any, Any]:
    """Return ResNet-50 with batch norm over all towers, for four images a tower."""
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


def contenders(make: Make) -> list[Callable[[], Callable[[], Any]]]:
    """Return functions that prepare each timed call, in the order of `COLUMNS`."""

    def first_call(audit: bool | None) -> Callable[[], Any]:
        step, params, batch = make(audit=audit)
        return lambda: step(step.init(params), batch)

    def audit(gradients: bool) -> Callable[[], Any]:
        step, params, batch = make(audit=False)
        return functools.partial(
            run_audit,
            step.plan,
            step.strategy,
            step.init(params),
            batch,
            calls=step.num_calls,
            pads=False,
            gradients=gradients,
        )

    return [
        functools.partial(first_call, audit=False),
        functools.partial(first_call, audit=None),
        functools.partial(audit, gradients=False),
        functools.partial(audit, gradients=True),
    ]


def seconds(prepare: Callable[[], Callable[[], Any]]) -> float:
    """Return the CPU seconds of a call for which nothing was compiled before."""
    call = prepare()
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    out = call()
    jax.block_until_ready(jax.tree.leaves(out))
    found = time.process_time() - start
    if isinstance(out, AuditReport):
        print(f"  {out}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[])
    options = options_of(parser, rounds=1, only=["mlp", "cnn"])
    makes: dict[str, Make] = {
        "mlp": functools.partial(of_model, mlp, 64),
        "cnn": functools.partial(of_model, cnn, 64),
        "gpt": functools.partial(of_model, transformer, 64),
        "resnet50": functools.partial(resnet50, options.pixels),
    }
    # A first turn, which is not counted, does what a process does only once.
    turns(contenders(makes["mlp"]), seconds, rounds=1, warm=0)
    table = begin(f"{options.rounds} rounds", COLUMNS, options)
    for name, make in makes.items():
        if options.only and name not in options.only:
            continue
        rounds = turns(contenders(make), seconds, rounds=options.rounds, warm=0)
        times = Rounds(rounds)
        ratios = [times.ratio(other, 0) for other in (1, 2, 3)]
        table.row(name, times.medians()[0], *ratios)


if __name__ == "__main__":
    main()
