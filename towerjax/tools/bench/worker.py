"""Who runs the trials of one number of devices? A process of its own.

It reads a job from its input, one JSON object, and writes a line of JSON when a trial
starts and when it is done. What else is printed goes to the errors' stream.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.machine import PEER_PACKAGES, load
from towerjax.tools.bench.protocol import TimingProtocol


def main() -> None:
    """Run the job of the standard input."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print, from C++ too, is not ours to read
    job = json.load(sys.stdin)
    trials = [Trial(**trial) for trial in job["trials"]]
    timing = TimingProtocol(**job["timing"])
    work_off(trials, timing, lines)


def work_off(trials: list[Trial], timing: TimingProtocol, lines: TextIO) -> None:
    """Run trials, and write what comes of each."""
    run = device = None
    for trial in trials:
        _write(lines, {"started": dataclasses.asdict(trial)})
        if run is None:
            run, device = _runner(trial.by)
        _write(lines, {**run_and_note(run, trial, timing), "device": device})


def run_and_note(
    run: Callable[[Trial, TimingProtocol], dict[str, Any]],
    trial: Trial,
    timing: TimingProtocol,
) -> dict[str, Any]:
    """What came of a trial, whatever it was."""
    start, load_before = time.perf_counter(), load()
    try:
        found = {"status": "ok", **run(trial, timing)}
    except Exception as error:  # of any kind: it is recorded, and the sweep goes on
        found = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    seconds = round(time.perf_counter() - start, 3)
    about = {"seconds": seconds, "load": load_before}
    return {"trial": dataclasses.asdict(trial), **found, **about}


def _runner(by: str) -> tuple[Callable[..., dict[str, Any]], str]:
    """What measures the trials, and on what device."""
    if by not in PEER_PACKAGES:
        import jax

        from towerjax.tools.bench.trials import CacheHits, run_trial

        hits = CacheHits()
        device = jax.devices()[0].device_kind
        return lambda trial, timing: run_trial(trial, timing, hits), device
    from towerjax.tools.bench.peers import runner

    return runner(by)


def _write(lines: TextIO, value: dict[str, Any]) -> None:
    lines.write(json.dumps(value) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
