"""Measure one trial, its contenders in turns, in the process of a worker."""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from towerjax.collectives.choose import parse_ops
from towerjax.tools.bench.baseline import (
    CHAIN,
    Contender,
    Work,
    bare_reduction,
    by_hand,
    by_jit,
    by_pmap,
    by_towerjax,
)
from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.models import find_model
from towerjax.tools.bench.protocol import (
    TimingProtocol,
    calls_in,
    in_turns,
    interval_of_median,
)
from towerjax.tools.shell import resolve
from towerjax.towers.strategies import Mirrored, OneDevice, Strategy

NUM_LOSSES = 3
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def run_trial(trial: Trial, timing: TimingProtocol) -> dict[str, Any]:
    """Measure one trial of towerjax, of plain ``jit`` or of ``pmap``."""
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    strategy, work = strategy_of(trial), work_of(trial, timing.seed)
    if trial.by == "towerjax":
        own = by_towerjax(work, strategy)
    else:
        own = {"jit": by_jit, "pmap": by_pmap}[trial.by](work, strategy.placement)
    contenders, from_cache = {trial.by: own}, _CACHE_HIT in events
    contenders["hand"] = by_hand(work, strategy.placement)
    if trial.by == "towerjax" and trial.devices > 1:
        contenders["communication"] = bare_reduction(work, strategy)
    losses = first_losses(own)
    check_losses(losses, first_losses(contenders["hand"]), trial)
    timed = list(contenders.values())
    calls = calls_in(timing.seconds_per_round, timed, timing.warmup_calls)
    table = in_turns(timed, rounds=timing.rounds, calls=calls, trim=timing.trim)
    names = ["own", *list(contenders)[1:]]
    return {
        "device": jax.devices()[0].device_kind,
        "compile_s": own.compile_seconds,
        "from_cache": from_cache,
        "calls": calls,
        "losses": losses,
        **figures(table, names, trial.steps_per_call, timing),
    }


def figures(
    table: np.ndarray, names: Sequence[str], steps: int, timing: TimingProtocol
) -> dict[str, Any]:
    """The figures of a trial, from the seconds ``[rounds, contenders, 2]``."""
    own = table[:, 0] / steps
    values = {"step_s": own[:, 0], "return_s": own[:, 1]}
    if "hand" in names:
        hand = table[:, names.index("hand")] / steps
        values |= {"hand_s": hand[:, 0], "over_hand": own[:, 0] / hand[:, 0]}
    if "communication" in names:
        bare = table[:, names.index("communication"), 0] / CHAIN
        values["communication"] = bare / own[:, 0]
    found: dict[str, Any] = {
        name: dataclasses.asdict(interval_of_median(list(x), timing.confidence))
        for name, x in values.items()
    }
    return {**found, "rounds_s": own[:, 0].tolist()}


def strategy_of(trial: Trial) -> Strategy:
    """The strategy that a trial names, on the first devices of this process."""
    found = jax.devices()
    if trial.devices > len(found):
        raise ValueError(
            f"The trial needs {trial.devices} devices; there are {len(found)} of"
            f" {found[0].platform!r}."
        )
    names = tuple(f"{found[0].platform}:{i}" for i in range(trial.devices))
    if trial.strategy == "one_device":
        return OneDevice(names[0])
    return Mirrored(
        devices=names,
        towers=trial.towers,
        local="scan" if trial.strategy == "mirrored_scan" else "vmap",
        executor="pmap" if trial.strategy == "mirrored_pmap" else "shard_map",
        cross_tower_ops=parse_ops(trial.cross_tower_ops),
    )


def work_of(trial: Trial, seed: int) -> Work:
    """The `Work` of a trial's step."""
    shares = trial.towers * trial.micro_batches
    if trial.batch % shares:
        raise ValueError(
            f"A batch of {trial.batch} examples cannot be shared by {trial.towers}"
            f" towers with {trial.micro_batches} micro-batches each. Use a multiple of"
            f" {shares}."
        )
    model = find_model(trial.model, trial.dtype)
    params, batch = model.init(seed), model.make_batch(seed + 1, trial.batch)
    return Work(model, params, batch, trial.micro_batches, trial.steps_per_call)


def first_losses(contender: Contender) -> list[float]:
    """The losses of the first steps from the initial parameters."""
    losses: list[float] = []
    while len(losses) < NUM_LOSSES:
        jax.block_until_ready(contender.run())
        loss = np.asarray(contender.loss, np.float64).ravel()
        # Several steps a call have one loss each; pmap has one, the same, a device.
        is_of_steps = contender.loss.sharding.is_fully_replicated
        losses += loss.tolist() if is_of_steps else [float(loss[0])]
    return losses


_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


def check_losses(
    losses: Sequence[float], expected: Sequence[float], trial: Trial
) -> None:
    """Raise unless both have the same losses, and so the same computation."""
    rtol = _TOLERANCE[trial.dtype]
    first = list(zip(losses, expected, strict=False))[:NUM_LOSSES]
    if not np.allclose(*np.array(first).T, rtol=rtol, atol=0):
        raise ValueError(
            f"{trial.by} has the losses {losses[:NUM_LOSSES]} in its first steps, and"
            f" the hand-written step {list(expected)[:NUM_LOSSES]}: not the same"
            f" computation within {rtol}, so their times are not compared."
        )


def main() -> None:
    """Run the job on the standard input; write its record to a file."""
    job = json.load(sys.stdin)
    record = run_recorded(Trial(**job["trial"]), TimingProtocol(**job["timing"]))
    pathlib.Path(sys.argv[1]).write_text(json.dumps(record))


def run_recorded(trial: Trial, timing: TimingProtocol) -> dict[str, Any]:
    """Run a trial; return its record, also if it failed."""
    start, load_before = time.perf_counter(), round(os.getloadavg()[0], 2)
    try:
        if ":" in trial.by:
            found = {"status": "ok", **resolve(trial.by)(trial, timing)}
        else:
            found = {"status": "ok", **run_trial(trial, timing)}
    except Exception as error:  # any error is recorded, and the sweep continues
        is_there = not isinstance(error, ModuleNotFoundError | NotImplementedError)
        status = "failed" if is_there else "not available"
        found = {"status": status, "error": f"{type(error).__name__}: {error}"}
    seconds = round(time.perf_counter() - start, 3)
    return {**found, "seconds": seconds, "load": load_before}


if __name__ == "__main__":
    main()
