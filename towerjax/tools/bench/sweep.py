"""How does a whole grid run? A worker for each number of devices, one line a trial."""

import dataclasses
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from towerjax.loop.progress import Display, display_here, format_seconds
from towerjax.tools.bench.grid import Grid, Trial
from towerjax.tools.bench.machine import (
    PEER_PACKAGES,
    describe_machine,
    versions,
    why_not,
)
from towerjax.tools.bench.protocol import TimingProtocol
from towerjax.tools.bench.results import Result, ResultFile
from towerjax.tools.bench.table import Results

_WORKER = (sys.executable, "-m", "towerjax.tools.bench.worker")
_STDERR_KEPT = 2000
_SECONDS_TO_END = 30


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

    Trials of the same number of devices run in one process, a worker that shows JAX
    so many CPU devices, or all accelerators; another number has a worker of its own,
    as has each trial of a peer that is not JAX. So does what follows a trial that
    ended its worker: that is recorded as failed, with the signal and the last it said.
    Programs are kept in JAX's persistent cache, so that each compiles once:
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
      RuntimeError: A worker cannot start.

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
    file = ResultFile(path, about)
    trials = grid.trials()
    done = file.done(trials, retry_failed=retry_failed)
    todo = [trial for trial in trials if trial not in done]
    display = Display() if progress is False else display_here(bar=bool(progress))
    news = _News(display, len(trials), len(done))
    try:
        for trial, record in _records(todo, timing, trial_timeout_s, news):
            news.ended(trial, file.add(record))
    finally:
        display.close()
    return Results(file.found[trial] for trial in trials)


def _records(
    todo: list[Trial], timing: TimingProtocol, timeout_s: float, news: "_News"
) -> Iterator[tuple[Trial, dict[str, Any]]]:
    groups: dict[Any, list[Trial]] = {}
    for trial in todo:
        if (why := why_not(trial.by, trial.model, trial.dtype)) is not None:
            yield trial, _unmeasured(trial, "not available", why)
            continue
        # TensorFlow's collectives of one program are in the way of the next one's.
        alone = trial.by in PEER_PACKAGES
        groups.setdefault(trial if alone else trial.devices, []).append(trial)
    for group in groups.values():
        while group:
            for trial, record in _by_worker(group, timing, timeout_s, news):
                group.remove(trial)
                yield trial, record


def _by_worker(
    group: Sequence[Trial], timing: TimingProtocol, timeout_s: float, news: "_News"
) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Trials by one worker, until all are done or one has ended it."""
    started: Trial | None = None
    with tempfile.TemporaryFile() as errors:
        with _Worker(group, timing, errors) as worker:
            while (line := worker.next_line(timeout_s)) is not None:
                if "started" in line:
                    started = Trial(**line["started"])
                    news.started(started)
                else:
                    yield Trial(**line["trial"]), line
                    started = None
        why = worker.how_it_ended(timeout_s)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _STDERR_KEPT))
        said = errors.read().decode(errors="replace").strip()
    if started is not None:
        yield started, _unmeasured(started, "failed", f"{why}. Last it said: {said}")
    elif why is not None:
        raise RuntimeError(f"A worker of the sweep {why}, in no trial: {said}")


def _unmeasured(trial: Trial, status: str, error: str) -> dict[str, Any]:
    return {"trial": dataclasses.asdict(trial), "status": status, "error": error}


class _Worker:
    """A process that runs trials; a context that ends it."""

    def __init__(
        self, group: Sequence[Trial], timing: TimingProtocol, errors: Any
    ) -> None:
        job = {
            "trials": [dataclasses.asdict(trial) for trial in group],
            "timing": dataclasses.asdict(timing),
        }
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            _WORKER,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            env=worker_environ(dict(os.environ), group[0]),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode())
        self._process.stdin.close()
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._late = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def next_line(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._late = True
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._late or kind is not None:
            self._process.kill()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def how_it_ended(self, timeout_s: float) -> str | None:
        """None where it ended well."""
        code = self._process.returncode
        if self._late:
            return f"took longer than {timeout_s:g} s and was ended"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}" if code else None


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
    # JAX takes most of a GPU's memory, which another framework needs.
    others = {"JAX_PLATFORMS": "cpu"} if trial.by in ("tensorflow", "torch") else {}
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        **_KEEPS_MEMORY,
        **environ,
        **others,
        "JAX_NUM_CPU_DEVICES": str(trial.devices),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


class _News:
    """What a person sees of a sweep."""

    def __init__(self, display: Display, total: int, done: int) -> None:
        self._display, self._total, self._before = display, total, done
        self._done, self._start_s = done, time.monotonic()
        if done:
            display.note(f"{done} of {total} trials were done before")

    def started(self, trial: Trial) -> None:
        self._show(trial.describe())

    def ended(self, trial: Trial, result: Result) -> None:
        self._done += 1
        if result.status != "ok":
            error = str(result.record["error"]).splitlines()[0]
            self._display.note(f"{trial.describe()}: {result.status}: {error}")
        if self._done == self._total:
            self._show("done")

    def _show(self, text: str) -> None:
        here = self._done - self._before
        words = [f"trial {min(self._done + 1, self._total)}/{self._total}  {text}"]
        if 0 < here and self._done < self._total:
            each_s = (time.monotonic() - self._start_s) / here
            left_s = each_s * (self._total - self._done)
            words.append(f"{format_seconds(left_s)} left")
        self._display.show(self._done, self._total, "  ".join(words))
