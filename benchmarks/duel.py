"""Kill processes of a long job again and again, and measure how it recovers.

A small model of 32 towers trains in two processes under ``towerjax launch``. Some
seconds after the job has done steps again, a process is killed, again and again. The
table shows the share of the steps run that the job kept, its time over that of an
undisturbed job, how long recovering takes, and whether the last bits are those of the
undisturbed job. A step is mostly a sleep of 0.1 s, so that two cores suffice.

Run: ``python -m benchmarks.duel [--steps 1500] [--apart 12] [--plain]``
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

import towerjax as tj
from benchmarks.faults import DoneStep, Launched, steps_of, train
from benchmarks.harness import begin, options_of, parser_of

TOWERS = 32
# Each part of a start has an event at its end, and words on what happens before it. The
# parts are in order.
PARTS = {
    "began": "the launcher ends and starts processes",
    "imported": "imports",
    "connected": "connecting",
    "restored": "building the step, restoring",
    "compiled": "audit, tracing, compiling",
    "stepped": "first step",
}
_EVENTS = {
    "/jax/orbax/read/total_duration_secs": "restored",
    "/jax/core/compile/backend_compile_duration": "compiled",
}
_IMPORTED = time.time()


class Kill(NamedTuple):
    """The time at which a job lost a process, and which run of the job it was."""

    at: float
    job: str


def _began() -> float:
    """Return the time at which this process was started."""
    stat = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    after_boot_s = int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot_s


def _note_start(folder: pathlib.Path) -> str:
    """Let this process write down when each part of its start ends; return its job."""
    times = {"began": _began(), "imported": _IMPORTED}
    cluster = tj.cluster.initialize()
    times["connected"] = time.time()

    def note(event: str, duration_secs: float, **of: str | int) -> None:
        del duration_secs
        name = _EVENTS.get(event)
        if name == "restored" or (name and of.get("fun_name") == "jit(step)"):
            times[name] = time.time()
        if name == "compiled" and name in times:
            file = folder / f"starts.{cluster.coordinator}.{cluster.process_id}"
            file.write_text(json.dumps(times))

    jax.monitoring.register_event_duration_secs_listener(note)
    return str(cluster.coordinator)


def _launch(folder: pathlib.Path, steps: int, plain: bool) -> Launched:
    how: Any = {"towers": None, "restarts": 1000, "module": "benchmarks.duel"}
    return Launched(folder, steps, **how, options=["--plain"] * plain)


def disturbed(
    folder: pathlib.Path, steps: int, apart_s: float, plain: bool
) -> list[Kill]:
    """Run the job and kill processes of it; return the kills."""
    draw = random.Random(0)
    job = _launch(folder, steps, plain)
    kills = list[Kill]()
    until = float("inf")
    lost = ""
    while job.popen.poll() is None:
        time.sleep(0.05)
        if until == float("inf"):
            done = steps_of(folder)
            if done and done[-1].job != lost:  # not the last steps of the killed run
                until = time.time() + draw.uniform(0.5, 1.5) * apart_s
        elif time.time() >= until:
            until = float("inf")
            with contextlib.suppress(OSError, IndexError):  # the process has just ended
                pid, lost = draw.choice([*job.workers().values()])
                os.kill(pid, signal.SIGKILL)
                kills.append(Kill(time.time(), lost))
    if job.wait():
        raise RuntimeError("The job failed: " + "".join(x for _, x in job.said)[-2000:])
    return kills


def undisturbed(steps: int) -> tuple[float, str]:
    """Return the seconds from the first step to the last, and a digest of the bits."""
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        if _launch(folder, steps, False).wait():
            raise RuntimeError("The undisturbed job failed.")
        return _seconds(steps_of(folder)), (folder / "digest").read_text()


def _seconds(done: Sequence[DoneStep]) -> float:
    return done[-1].ended - done[0].ended


def recoveries(
    folder: pathlib.Path, kills: Sequence[Kill]
) -> list[Mapping[str, float]]:
    """Return, for each kill that was recovered from, the seconds of each part."""
    done = steps_of(folder)
    found = []
    for kill in kills:
        new = next((x for x in done if x.ended > kill.at and x.job != kill.job), None)
        if new is None:
            continue
        starts = [json.loads(x.read_text()) for x in folder.glob(f"starts.{new.job}.*")]
        times = [kill.at]  # a part ends once both processes ended it
        for name in [*PARTS][:-1]:
            times.append(max(times[-1], *(x.get(name, 0) for x in starts)))
        times.append(new.ended)
        took = (b - a for a, b in zip(times, times[1:], strict=False))
        found.append(dict(zip(PARTS, took, strict=True)))
    return found


def report(
    folder: pathlib.Path, kills: Sequence[Kill], whole_s: float
) -> dict[str, str]:
    """Return the figures of a disturbed job, by name."""
    done = steps_of(folder)
    took = recoveries(folder, kills)
    seconds = _seconds(done)
    middle = statistics.median(sum(x.values()) for x in took)
    parts = {
        f"of it: {what}": f"{statistics.median(x[name] for x in took):.1f} s"
        for name, what in PARTS.items()
    }
    return {
        "kills": f"{len(kills)} in {seconds / 60:.1f} min",
        "steps kept of those run": f"{max(x.number for x in done) / len(done):.1%}",
        "time over the undisturbed job's": f"{seconds / whole_s:.2f}",
        "from a kill to the next step, median": f"{middle:.1f} s",
        **parts,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if the last bits are those of the undisturbed job."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--apart", type=float, default=12.0, help="seconds of steps")
    help_ = "without a compilation cache, and with an audit at every start"
    parser.add_argument("--plain", action="store_true", help=help_)
    parser.add_argument("--train", type=pathlib.Path, help=argparse.SUPPRESS)
    options = options_of(parser, argv, steps=60, apart=3.0)
    if (folder := options.train) is not None:
        resumes = (folder / "saved").exists()
        audit = False if resumes and not options.plain else None
        job = _note_start(folder)
        train(folder, job, steps=options.steps, towers=TOWERS, audit=audit)
        return 0
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as path:
        if not options.plain:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        whole_s, digest = undisturbed(options.steps)
        folder = pathlib.Path(path)
        kills = disturbed(folder, options.steps, options.apart, options.plain)
        told = report(folder, kills, whole_s)
        same = (folder / "digest").read_text() == digest
    told["last bits"] = "the undisturbed job's" if same else "**OTHERS**"
    columns = {"figure": "", "value": ""}
    table = begin(f"{TOWERS} towers, two processes", columns, options)
    for name, value in told.items():
        table.row(name, value)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
