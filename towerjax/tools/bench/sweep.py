"""Run the trials of a grid, each in its own process, and record them in a file."""

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
from typing import Any

from towerjax.loop.checkpoint.record import library_versions
from towerjax.loop.progress import choose_display
from towerjax.tools.bench.protocol import Grid, TimingProtocol, Trial
from towerjax.tools.bench.results import Result, Results
from towerjax.tools.sweep.result import RecordFile, show_counts


def describe_machine() -> dict[str, Any]:
    """The processor, the number of cores that this process may use, the system."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return {
        "processor": _processor(),
        "cores": cores,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Name -> version of Python and of installed packages."""
    others = library_versions("keras", "tensorflow", "torch")
    return {"python": platform.python_version(), **others}


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


_WORKER = (sys.executable, "-m", "towerjax.tools.bench.trials")
_KEPT_BYTES = 2000  # of a failed worker's output in its record


def sweep(
    grid: Grid,
    path: str | os.PathLike[str],
    timing: TimingProtocol | None = None,
    *,
    retry_failed: bool = False,
    trial_timeout_s: float = 1800.0,
    progress: bool | None = None,
) -> Results:
    """Run the trials of a grid that the file does not have; return all results.

    Each trial runs in its own process, in which JAX has ``D`` CPU devices, or all
    accelerators; one that dies or takes too long is recorded as failed. Programs are
    kept in JAX's persistent cache, so that each compiles once.

    Args:
      grid: The grid to measure.
      path: A file of JSON lines, written as trials end. Trials that it has are not
        run again, so that an interrupted sweep can be continued.
      timing: How trials are timed; None is ``TimingProtocol()``.
      retry_failed: Run trials again that the file has as failed or not available.
      trial_timeout_s: A trial that takes longer is killed and recorded as failed.
      progress: None shows a bar on a terminal, else lines; True always a bar; False
        nothing.

    Returns:
      A list of `Result`, in the grid's order, which prints as a table.

    Raises:
      ValueError: The file holds other lines, or was measured on another machine, with
        other versions or another protocol.

    Example:
      >>> grid = Grid(("mlp",), towers=(2,), batches=(8,))
      >>> timing = TimingProtocol(rounds=6, seconds_per_round=0.01)
      >>> folder = tempfile.TemporaryDirectory()
      >>> path = folder.name + "/results.jsonl"
      >>> [result] = sweep(grid, path, timing, progress=False)
      >>> result.status, result.interval("over_hand").median > 0
      ('ok', True)
      >>> folder.cleanup()
    """
    timing = timing or TimingProtocol()
    about = {
        "machine": describe_machine(),
        "versions": versions(),
        "timing": dataclasses.asdict(timing),
    }
    file = RecordFile(path, "trial", about)
    trials = grid.trials()
    known = {trial: file.get(dataclasses.asdict(trial)) for trial in trials}
    todo = [
        trial
        for trial, record in known.items()
        if record is None or (retry_failed and record["status"] != "ok")
    ]
    # Without `job`, which starts JAX's devices: the workers need them.
    with contextlib.closing(choose_display(progress, job=False)) as display:
        done = len(trials) - len(todo)
        show = show_counts(display, "trial", len(trials), done)
        for number, trial in enumerate(todo, done):
            show(number, trial.describe())
            known[trial] = found = file.add(_measure(trial, timing, trial_timeout_s))
            if error := str(found.get("error", "")).partition("\n")[0]:
                display.note(f"{trial.describe()}: {found['status']}: {error}")
        show(len(trials), "done")
    return Results(Result.of(record) for record in known.values() if record)


def _measure(trial: Trial, timing: TimingProtocol, timeout_s: float) -> dict[str, Any]:
    """Run a trial in its own process; return its record."""
    job = {"trial": dataclasses.asdict(trial), "timing": dataclasses.asdict(timing)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        record = pathlib.Path(folder, "record")
        try:
            done = subprocess.run(
                [*_WORKER, record],
                input=json.dumps(job).encode(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=worker_environ(dict(os.environ), trial),
                timeout=timeout_s,
            )
            if done.returncode == 0:
                return {"trial": job["trial"], **json.loads(record.read_text())}
            why = f"ended with exit code {done.returncode}"
            if done.returncode < 0:
                why = f"was ended by {signal.Signals(-done.returncode).name}"
        except subprocess.TimeoutExpired:
            why = f"took longer than {timeout_s:g} s and was ended"
        output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT_BYTES))
        last = output.read().decode(errors="replace").strip()
    error = f"{why}. Last it said: {last}"
    return {"trial": job["trial"], "status": "failed", "error": error}


# glibc returns large blocks to the system at once or not, by chance; fresh pages can
# then cost more than the step, and are not the contender's time.
_MALLOC_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc's maximum
}


def worker_environ(environ: dict[str, str], trial: Trial) -> dict[str, str]:
    """The environment of a worker: CPU devices, compilation cache, memory."""
    caches = environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(caches, "towerjax", "bench"),
        **_MALLOC_SETTINGS,
        **environ,
        "JAX_NUM_CPU_DEVICES": str(trial.devices),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
