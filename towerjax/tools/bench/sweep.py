"""How does a whole grid run? Each trial in a process of its own, and a line for it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
from typing import Any

from towerjax.loop.checkpoint.record import library_versions
from towerjax.loop.progress import Display, display_here
from towerjax.tools.bench.grid import Grid, Trial
from towerjax.tools.bench.protocol import TimingProtocol
from towerjax.tools.bench.results import Result, Results
from towerjax.tools.sweep.record_file import News, RecordFile


def describe_machine() -> dict[str, Any]:
    """The processor, its cores that this process may use, and the system."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Name -> version, of Python and of the packages that are installed."""
    others = library_versions("keras", "tensorflow", "torch")
    return {"python": platform.python_version(), **others}


def load() -> float | None:
    """How many programs ran or waited here in the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


_WORKER = (sys.executable, "-m", "towerjax.tools.bench.trials")
_KEPT = 2000  # of what a worker that died has said


def sweep(
    grid: Grid,
    path: str | os.PathLike[str],
    timing: TimingProtocol | None = None,
    *,
    retry_failed: bool = False,
    trial_timeout_s: float = 1800.0,
    progress: bool | None = None,
) -> Results:
    """The results of all trials of a grid, from the file and from those still to run.

    Each trial runs in a process of its own, which shows JAX ``D`` CPU devices, or all
    accelerators; one that dies or takes too long is recorded as failed, with what it
    said last. Programs are kept in JAX's persistent cache, so that each compiles once:
    ``JAX_COMPILATION_CACHE_DIR``, or a folder of the user's cache.

    Args:
      grid: What is measured.
      path: A file of JSON lines, written as trials end. Trials that it has are not
        run again, so that an interrupted sweep goes on.
      timing: How trials are timed; None is ``TimingProtocol()``.
      retry_failed: Run trials again that the file has as failed or not available.
      trial_timeout_s: A trial that takes longer is ended and recorded as failed.
      progress: None shows a bar on a terminal, else lines; True always a bar; False
        nothing.

    Returns:
      A list, one for each trial, in the grid's order; a table in a notebook.

    Raises:
      ValueError: The file holds something else, or was measured on another machine,
        with other versions or another protocol.

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
    trials = {trial: dataclasses.asdict(trial) for trial in grid.trials()}
    known = {trial: file.get(key) for trial, key in trials.items()}
    todo = [
        trial
        for trial, record in known.items()
        if record is None or (retry_failed and record["status"] != "ok")
    ]
    # Asks for no device, which a worker is to have.
    display = Display() if progress is False else display_here(bar=bool(progress))
    done = len(trials) - len(todo)
    with contextlib.closing(News(display, len(trials), done, "trial")) as news:
        for trial in todo:
            news.starts(trial.describe())
            found = _measured(trial, timing, trial_timeout_s)
            known[trial] = file.add({"trial": trials[trial], **found})
            note = f"{trial.describe()}: {found['status']}: "
            error = str(found.get("error", "")).partition("\n")[0]
            news.ends(note + error if error else "")
    return Results(Result.of(record) for record in known.values() if record)


def _measured(trial: Trial, timing: TimingProtocol, timeout_s: float) -> dict[str, Any]:
    """What came of a trial in a process of its own."""
    job = {"trial": dataclasses.asdict(trial), "timing": dataclasses.asdict(timing)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        record = pathlib.Path(folder, "record")
        try:
            done = subprocess.run(
                [*_WORKER, record],
                input=json.dumps(job).encode(),
                stdout=said,
                stderr=subprocess.STDOUT,
                env=worker_environ(dict(os.environ), trial),
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            why = f"took longer than {timeout_s:g} s and was ended"
        else:
            if done.returncode == 0:
                return json.loads(record.read_text())
            why = f"ended with exit code {done.returncode}"
            if done.returncode < 0:
                why = f"was ended by {signal.Signals(-done.returncode).name}"
        said.seek(max(0, said.seek(0, os.SEEK_END) - _KEPT))
        last = said.read().decode(errors="replace").strip()
    return {"status": "failed", "error": f"{why}. Last it said: {last}"}


# glibc gives large blocks back at once, or not, as it happens; what a step then pays
# for fresh pages can be more than the step, and is not of the contender.
_KEEPS_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most it takes
}


def worker_environ(environ: dict[str, str], trial: Trial) -> dict[str, str]:
    """The environment of a worker: CPU devices, compilation cache, memory."""
    caches = environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    folder = str(pathlib.Path(caches) / "towerjax" / "bench")
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        **_KEEPS_MEMORY,
        **environ,
        "JAX_NUM_CPU_DEVICES": str(trial.devices),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
