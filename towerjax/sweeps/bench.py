"""Time the steps of a grid, each in a process of its own, in turns with peers."""

import dataclasses
import json
import os
import pathlib
import pkgutil
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.loop.checkpoint.record import library_versions
from towerjax.loop.files import checked_path, read_lines, telling_of_line
from towerjax.step.step import Step
from towerjax.sweeps import grid as of_grid
from towerjax.sweeps.grid import Config, Grid, Line, RowTable
from towerjax.sweeps.turns import Interval, calls_in, in_turns, interval_of_median
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_number, check_text, check_whole
from towerjax.types.refusals import printable, types_of

Builder: TypeAlias = Callable[..., Any] | str
_WORKER = (sys.executable, "-m", "towerjax.sweeps.bench")
_KEPT_BYTES = 2000  # so much of a failed worker's output is recorded
_NUM_LOSSES = 3
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@api_boundary
def bench(
    build: Builder,
    grid: Grid,
    *,
    peers: Mapping[str, Builder] | None = None,
    results: str | os.PathLike[str] | None = None,
    rounds: int = 11,
    seconds_per_round: float = 0.25,
    rtol: float | None = 1e-4,
    retry_failed: bool = False,
    timeout_s: float = 1800.0,
    progress: bool | None = None,
) -> "Timings":
    """Time a step of every configuration of a grid, in turns with peers.

    Each configuration runs in its own process. On CPUs its JAX has as many devices as
    the configuration's ``devices``, or else ``towers``, says. On accelerators it has
    all of them. A configuration that dies or takes too long is recorded as failed. In
    every round each contender has a turn, and every second round has the reversed
    order. A time is the median over the rounds, with a 95% interval. A ratio is taken
    in each round.

    Args:
      build: ``build(**config) -> (call, state, batch)``: a step of towerjax, or any
        ``call(state, batch) -> (state, loss or metrics)``. It is a function at the top
        level of a module, or its name, ``"module:function"``. It may also return times
        that it measured itself, ``{"rounds_s": seconds of a call in each round}``.
      grid: ``{name: values}`` or a list of configurations, as for `sweep`.
      peers: A dict with a name and a ``build`` for each contender that is timed in the
        same rounds.
      results: A file of results, as for `sweep`; a later call continues it.
      rounds: The number of rounds, at least 6, because fewer give no 95% interval.
      seconds_per_round: The approximate length of a turn. A turn is 1 to 1,000 awaited
        calls, and its time is their mean without the fastest and the slowest tenth.
      rtol: The largest relative difference between a peer's first three losses and
        those of the step. If it is exceeded, the configuration fails. None compares
        nothing.
      retry_failed: Whether to time again the configurations that the file records as
        failed or not available.
      timeout_s: The time limit of a configuration in seconds; a slower one fails.
      progress: None shows a bar on a terminal and in a notebook, and otherwise a plain
        line now and then. True always shows a bar, False nothing.

    Returns:
      A `towerjax.tools.Timings`, in the grid's order.

    Raises:
      ValueError: The grid is malformed, or the file holds another sweep. A sweep is
        another one if its machine, versions, functions or rounds are others.

    Example:
      >>> import tempfile, towerjax as tj
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     options = {"results": folder + "/times.jsonl", "progress": False}
      ...     found = tj.tools.bench("no:build", {"towers": [2]}, **options)
      >>> found.rows()[0]["status"]
      'not available'
    """
    check_whole("rounds", rounds, 6)
    check_number("seconds_per_round", seconds_per_round, "seconds >= 0")
    configs = of_grid.configs_of(grid)
    names = {"": build, **(peers or {})}
    work: Line = {"builders": {name: _importable(x) for name, x in names.items()}}
    work |= {"rounds": rounds, "seconds_per_round": seconds_per_round, "rtol": rtol}
    about = {"machine": describe_machine(), "versions": library_versions()}
    file = of_grid.RecordFile(results, about | {"work": work}, _check_record)
    stay = {"ok"} if retry_failed else {"ok", "failed", "not available"}
    todo = [x for x in configs if (file.get(x) or {"status": ""})["status"] not in stay]
    done = len(configs) - len(todo)
    counter = of_grid.counted(progress, "configuration", done, len(configs))
    with counter as (show, note):
        for number, config in enumerate(todo, done):
            show(number, text := of_grid.describe(config))
            measured = _measured(work, config, timeout_s)
            if measured["status"] == "mistyped":
                raise ValueError(measured["error"])
            record = file.add({"config": config, **measured})
            if error := str(record.get("error", "")).partition("\n")[0]:
                note(printable(f"{text}: {record['status']}: {error}"))
    return Timings(tuple(map(file.get, configs)))


def _importable(build: Builder) -> str:
    """Name a function so that a worker's process finds it."""
    if isinstance(build, str):
        return build
    name = f"{build.__module__}:{build.__qualname__}"
    if build.__module__ == "__main__" or "<" in name:
        raise ValueError(
            f"{name} must be importable by other processes. Write it at the top level"
            " of a module of its own."
        )
    return name


class NoSuchName(ValueError):
    """The module exists but lacks the name, or the text is not a name."""


def resolve(name: str, example: str) -> Any:
    """Find the object that ``module:name`` names, such as the example."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name) or ".py:" in name:
        raise NoSuchName(f"{name!r} is not of the form module:name, such as {example}.")
    try:
        return pkgutil.resolve_name(name)
    except AttributeError as error:
        raise NoSuchName(f"{name}: {error}.") from error
    except ModuleNotFoundError as error:
        if not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise ValueError(f"{name}: {error}; set PYTHONPATH.") from error


def describe_machine() -> Line:
    """Describe the processor, the number of usable cores, and the system."""
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    names = re.findall(r"model name\s*: (.*)", text)
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    system = f"{platform.system()} {platform.machine()}"
    return {"processor": [*names, ""][0], "cores": len(usable), "system": system}


def _measured(work: Line, config: Config, timeout_s: float) -> Line:
    """Time a configuration in a process of its own, and return its record."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        record = pathlib.Path(folder, "record")
        try:
            done = subprocess.run(
                [*_WORKER, record],
                input=json.dumps({**work, "config": config}).encode(),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=worker_environ(dict(os.environ), config),
                timeout=timeout_s,
            )
            if done.returncode == 0:
                return json.loads(record.read_text())
            why = f"ended with exit code {done.returncode}"
            if done.returncode < 0:
                why = f"was ended by {signal.Signals(-done.returncode).name}"
        except subprocess.TimeoutExpired:
            why = f"took longer than {timeout_s:g} s and was ended"
        output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT_BYTES))
        last = output.read().decode(errors="replace").strip()
    return {"status": "failed", "error": f"{why}. Last it said: {last}"}


def worker_environ(environ: dict[str, str], config: Config) -> dict[str, str]:
    """Set the environment variables of a worker's process.

    They choose the number of CPU devices, the compilation cache and how memory is kept.
    """
    caches = environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    devices = config.get("devices", config.get("towers"))
    return {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(caches, "towerjax", "bench"),
        # Without these settings glibc may or may not return large blocks to the system
        # at once. New pages can then cost more time than the step, and say nothing
        # about the contender.
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc's maximum
        **environ,
        **({"JAX_NUM_CPU_DEVICES": str(devices)} if devices else {}),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def main() -> None:
    """Run the job that the standard input describes; write its record to a file."""
    sys.path.insert(0, "")
    pathlib.Path(sys.argv[1]).write_text(json.dumps(recorded(json.load(sys.stdin))))


def recorded(job: Line) -> Line:
    """Do a job and return its record; if it fails, the record says so."""
    start = time.perf_counter()
    load = round(os.getloadavg()[0], 2)
    try:
        record = {"status": "ok", **_timed(job)}
    except NoSuchName as error:
        record = {"status": "mistyped", "error": str(error)}
    # Any error is recorded, and the next configuration goes on.
    except Exception as error:
        cause = error.__cause__ or error  # the cause may be a missing module
        is_there = not isinstance(cause, ModuleNotFoundError | NotImplementedError)
        status = "failed" if is_there else "not available"
        record = {"status": status, "error": f"{type(error).__name__}: {error}"}
    return {**record, "seconds": round(time.perf_counter() - start, 3), "load": load}


@dataclasses.dataclass
class Contender:
    """One of the implementations that are timed: a step, its state and its batch."""

    call: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # like a step
    state: PyTree
    batch: PyTree
    out: PyTree = None  # the last call's loss or metrics

    def run(self) -> PyTree:
        """Dispatch one call, and return its results."""
        self.state, self.out = self.call(self.state, self.batch)
        return self.state, self.out

    def loss(self) -> float:
        """Run one call and return its loss; NaN if its results have none."""
        jax.block_until_ready(self.run())
        loss = self.out.get("loss") if isinstance(self.out, Mapping) else self.out
        return float("nan") if loss is None else float(np.mean(np.asarray(loss, float)))


def _timed(job: Line) -> Line:
    config = job["config"]
    contenders = {}
    measured = {}
    events = []

    def listen(event: str, **_: Any) -> None:
        events.append(event)

    for name, builder in job["builders"].items():
        built = resolve(builder, "mine:build")(**config)
        if isinstance(built, Mapping):
            return {**built, **_figures({name: np.asarray(built["rounds_s"])[:, None]})}
        if not isinstance(built, tuple) or len(built) != 3:
            raise ValueError(
                f"{builder} must return (call, state, batch), but it returned"
                f" {types_of(built)}. Write return step, step.init(params), batch."
            )
        call, state, batch = built
        place = getattr(call, "place_batch", lambda x: x)
        start = time.perf_counter()
        contenders[name] = new = Contender(call, state, place(batch))
        jax.monitoring.register_event_listener(listen)
        try:
            if isinstance(call, Step):
                call.prepare(state, new.batch, audit=False)
            losses = [new.loss()]
        finally:
            jax.monitoring.unregister_event_listener(listen)
        if not name:
            measured["first_call_s"] = time.perf_counter() - start
            measured["from_cache"] = _CACHE_HIT in events
            rows = [*np.shape(jax.tree.leaves(batch)[0]), None][0]
            measured["examples"] = config.get("batch", rows)
        losses += [new.loss() for _ in range(_NUM_LOSSES - 1)]
        check_losses(name, losses, measured.setdefault("losses", losses), job["rtol"])
    measured["device"] = jax.devices()[0].device_kind
    timed = [contender.run for contender in contenders.values()]
    measured["calls"] = calls_in(job["seconds_per_round"], timed)
    table = in_turns(timed, rounds=job["rounds"], calls=measured["calls"], trim=0.1)
    return measured | _figures({name: table[:, i] for i, name in enumerate(contenders)})


def check_losses(
    name: str, losses: Sequence[float], losses_here: Sequence[float], rtol: float | None
) -> None:
    """Raise unless both contenders have the same losses, and so compute the same."""
    if rtol is not None and not np.allclose(
        losses, losses_here, rtol, 0, equal_nan=True
    ):
        raise ValueError(
            f"{name} has the first losses {list(losses)}, and the step"
            f" {list(losses_here)}: not the same computation within {rtol:g}. Their"
            " times are not compared."
        )


def _figures(seconds: Mapping[str, np.ndarray]) -> Line:
    """Make medians and ratios of each contender's seconds.

    The seconds are ``[rounds, 1 or 2]``: the time until a call's results are there, and
    if known the time until the call returns.
    """
    own_seconds = seconds[""]
    values = {"step_s": own_seconds[:, 0], "return_s": own_seconds[:, -1]}
    peers = {f"over {name}": x for name, x in seconds.items() if name}
    values |= {name: own_seconds[:, 0] / x[:, 0] for name, x in peers.items()}
    figures = {name: vars(interval_of_median(x)) for name, x in values.items()}
    return {"rounds_s": own_seconds[:, 0].tolist(), "figures": figures}


@dataclasses.dataclass(frozen=True)
class Timings(RowTable):
    """The times of a `bench`, in the grid's order; they print as a table.

    Attributes:
      records: A mapping for each configuration with ``config``, ``status`` (``"ok"``,
        ``"failed"`` or ``"not available"``), ``figures`` or ``error``, and more.
    """

    records: tuple[Line, ...]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Timings":
        """Read the times in a file of `bench`.

        If the file has a configuration several times, the last record counts.
        """
        file = checked_path("path", path, "a file")
        records = {}
        lines = read_lines(file, "config", "a sweep")
        for number, (record, _) in enumerate(lines, 1):
            text = json.dumps(record).encode()
            with telling_of_line(file, number, text, "a sweep"):
                _check_record(record)
            records[of_grid.key_text(record["config"])] = record
        return cls(tuple(records.values()))

    def _rows(self) -> list[Line]:
        rows = []
        for record in self.records:
            row = dict(record["config"])
            figures = record.get("figures", {})
            times = {name: Interval(**ends) for name, ends in figures.items()}
            if (step := times.pop("step_s", None)) is None:
                error = " ".join(record["error"].split())[:200]
                rows.append({**row, "status": record["status"], "error": error})
                continue
            row |= {"ms": step.times(1e3), "returns": times.pop("return_s").times(1e3)}
            if (examples := record.get("examples")) is not None:
                row["examples/s"] = round(examples / step.median)
            rows.append(row | times)
        return rows


def _check_record(record: Line) -> None:
    """Raise unless a record can be shown."""
    Timings((record,)).tables()
    check_text("status", record["status"], "a text such as 'ok'")


if __name__ == "__main__":
    main()
