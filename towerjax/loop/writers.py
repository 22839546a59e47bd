"""Write a run's metrics while it is under way: `JsonLines` and `TensorBoard`."""

import dataclasses
import math
import os
import pathlib
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import jax.numpy as jnp
import numpy as np
from etils import epath

from towerjax.loop.files import (
    StoredFile,
    absolute_path,
    append_line,
    checked_path,
    is_on_disk,
    opened_after,
    read_lines,
)
from towerjax.mesh.placement import Placement
from towerjax.mesh.processes import call_on_first_process
from towerjax.types.options import (
    check_flag,
    check_list,
    check_methods,
    check_whole,
    opening,
    require,
)

# What a killed process may lose: lines of steps, where a file is replaced as a whole,
# and curves.
_STORED_EVERY_S = _FLUSHED_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True)
class Record:
    """The metrics of one step, or of one evaluation."""

    kind: Literal["train", "eval"]
    step: int  # the step's number; for an evaluation that of the last step before it
    time_s: float  # seconds since 1970 when the metrics reached the host
    metrics: Mapping[str, Any]  # name -> number or array, on the host
    # Of a step: name -> how much a second, over the last steps; see `RunSummary`.
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)


class OpenWriter(Protocol):
    """A writer that has been opened for one run."""

    def write(self, record: Record, /) -> None:
        """Write one record."""

    def close(self) -> None:
        """Write what is buffered, and close files. Called once."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """An `OpenWriter` of two functions."""

    write: Callable[[Record], None]
    close: Callable[[], None]


class Writer(Protocol):
    """The options of a writer, from which each run opens an `OpenWriter`."""

    def open(self, start: int) -> OpenWriter:
        """Open for a run whose state has done ``start`` steps."""
        ...


class Writers:
    """The open writers of a run. Each gets every record, even if another fails."""

    def __init__(self) -> None:
        self._failures: list[Exception] = []
        self._open: list[OpenWriter] = []

    def open(self, writers: Iterable[Writer], start: int, placement: Placement) -> None:
        """Open the writers, on process 0 alone of those that share the run."""

        def open_each() -> None:
            for writer in writers:
                self._open.append(writer.open(start))

        if placement.num_processes == 1:
            open_each()
        else:
            says = "A writer could not be opened on process 0"
            call_on_first_process(open_each, says)

    @property
    def are_open(self) -> bool:
        """Whether any writer is given records."""
        return bool(self._open)

    def write(self, record: Record) -> None:
        """Give the record to each writer; one that fails is closed and dropped."""
        for writer in tuple(self._open):
            try:
                writer.write(record)
            except Exception as failure:
                self._failures.append(failure)
                self._close(writer)

    def close(self) -> None:
        """Close each writer, once."""
        for writer in tuple(self._open):
            self._close(writer)

    def _close(self, writer: OpenWriter) -> None:
        self._open.remove(writer)
        try:
            writer.close()
        except Exception as failure:
            self._failures.append(failure)

    def raise_failure(self) -> None:
        """Raise the first failure, once."""
        failures = self._failures
        self._failures = []
        if failures:
            raise failures[0]

    def explain(self, error: BaseException) -> None:
        """Note the first failure in another exception that ends the run."""
        for failure in self._failures[:1]:
            text = f"{type(failure).__name__}: {failure}"
            error.add_note(f"Besides, a writer failed: {text}.")


def check_writers(writers: Any) -> tuple[Writer, ...]:
    """Return the writers as a tuple, or raise if one cannot be opened."""
    writers = check_list("writers", writers)
    example = (
        "tj.JsonLines(path), tj.TensorBoard(logdir), or an object of your own whose"
        " open(start) returns one with write(record) and close()"
    )
    for writer in writers:
        check_methods("one of writers", writer, "open", example)
    return writers


def as_json(value: Any) -> Any:
    """Replace each float that is not finite by its name, which ``float`` reads."""
    if isinstance(value, Mapping):
        return {str(name): as_json(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """A file with one line of JSON for each step and each evaluation.

    ``{"kind": "train", "step": 3, "time_s": 1.7e9, "metrics": {"loss": 0.25}}``;
    ``kind`` is ``"train"`` or ``"eval"``. In a run, a step's line ends with
    ``"rates": {"steps_per_second": 45.6, ...}``, those of the last 20 steps, named as
    in `tj.loop.RunSummary`. Numbers are exact; those that are not finite
    are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float``
    reads. A process killed at any time leaves whole lines. An object store cannot
    append: there the file is stored anew every 10 s, with each evaluation and at the
    end.

    A run that starts at step ``n`` cuts off later lines, so that no step has two lines.
    A run that starts at step 0 refuses a file that has lines.

    Attributes:
      path: The file, local or such as ``"gs://bucket/run.jsonl"``; its folder is made.
      replace: Whether a run that starts at step 0 may cut off the lines of another.

    Example:
      >>> import tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> options = JsonLines(folder.name + "/run.jsonl")
      >>> writer = options.open(0)
      >>> writer.write(Record("train", 1, 2.5, {"loss": np.float32(np.nan)}))
      >>> writer.close()
      >>> print(pathlib.Path(options.path).read_text().strip())
      {"kind": "train", "step": 1, "time_s": 2.5, "metrics": {"loss": "NaN"}}
      >>> folder.cleanup()
    """

    path: str | os.PathLike[str]
    replace: bool = False

    def __post_init__(self) -> None:
        checked_path("JsonLines.path", self.path, "a file")
        check_flag("JsonLines.replace", self.replace)

    def open(self, start: int) -> OpenWriter:
        """The file, open after the lines of the ``start`` steps done before.

        A ``ValueError`` where ``path`` holds something else or an earlier run.
        """
        path = absolute_path(self.path)
        with opening("JsonLines.path", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            kept, repeated = self._kept(path, start)
            file = opened_after(path, kept, _STORED_EVERY_S)

        def write(record: Record) -> None:
            nonlocal repeated
            # An evaluation that comes before any step is that of the start.
            if record.kind == "eval" and repeated is not None:
                file.truncate(repeated)
            repeated = None
            metrics = {name: json_value(name, x) for name, x in record.metrics.items()}
            line = {**vars(record), "metrics": metrics}
            if not line["rates"]:
                del line["rates"]
            append_line(file, line)
            if record.kind == "eval":
                file.flush()

        return Opened(write, file.close)

    def _kept(self, path: epath.Path, start: int) -> tuple[int | None, int | None]:
        """How many bytes to keep, and whether their last line evaluates ``start``."""
        if not path.exists() or is_on_disk(path) and not pathlib.Path(path).is_file():
            return None, None  # a pipe or a device has no earlier lines
        kept = last = 0
        repeated = None
        for line, length in read_lines(path, "kind", "a run"):
            last = max(last, line["step"])
            if last <= start:
                is_last = (line["step"], line["kind"]) == (start, "eval")
                repeated = kept if is_last else None
                kept += length
        if start == 0 and last > 0 and not self.replace:
            raise _earlier("JsonLines", path, f"an earlier run up to step {last}")
        return kept, repeated


def _earlier(writer: str, path: epath.Path, what: str) -> ValueError:
    return ValueError(
        f"{writer}: {str(path)!r} holds {what}, but this one starts at step 0. Use"
        " another path, go on with that run's state, or say"
        f" {writer}(path, replace=True)."
    )


def json_value(name: str, value: Any) -> Any:
    """Convert a metric to numbers and lists for JSON."""
    return as_json(real_numbers("JSON", name, value).tolist())


def real_numbers(writer: str, name: str, value: Any) -> np.ndarray:
    """A metric as an array, floats in float64; raise unless they are real numbers."""
    array = np.asarray(value)
    if array.dtype.kind in "biu":
        return array
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{writer}: the metric {name!r} is {type(value).__name__}, {array.dtype}"
            f"{list(array.shape)}, not real numbers. Return its .value or its parts."
        )
    return array.astype(np.float64)


@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Event files in a folder: ``train/loss`` and ``eval/loss`` over the step number.

    Besides ``rate/examples_per_second`` and others, over the last 20 steps, named as in
    `tj.loop.RunSummary`. Needs ``tensorboardX``. Values are float32. A metric that is
    an array has a curve for each element, ``eval/confusion/1/2``. A killed process
    loses 10 s of curves.

    Each run writes its own file, which begins with a mark that the steps from its
    start are done again, so that TensorBoard hides those that a lost run wrote. A run
    that starts at step 0 refuses a folder that has event files.

    Attributes:
      logdir: The folder, local or such as ``"gs://bucket/logs"``; it is made.
      max_elements: The most curves of one metric.
      replace: Whether a run that starts at step 0 may hide earlier runs.
    """

    logdir: str | os.PathLike[str]
    max_elements: int = 64
    replace: bool = False

    def __post_init__(self) -> None:
        checked_path("TensorBoard.logdir", self.logdir, "a folder")
        check_whole("max_elements", self.max_elements, 1)
        check_flag("TensorBoard.replace", self.replace)

    def open(self, start: int) -> OpenWriter:
        """A new event file, of a state that had done ``start`` steps before.

        A ``ValueError`` without ``tensorboardX``, or where ``logdir`` holds other runs.
        """
        logdir = absolute_path(self.logdir)
        # Its SummaryWriter waits for ever, and raises nothing, once its disk is full.
        needs = "TensorBoard, other than tj.JsonLines(path),", "'towerjax[tensorboard]'"
        files = require("tensorboardX.event_file_writer", *needs)
        proto = require("tensorboardX.proto.event_pb2", *needs)
        with opening("TensorBoard.logdir", logdir):
            logdir.mkdir(parents=True, exist_ok=True)
        there = logdir.iterdir() if logdir.exists() else ()
        has_events = any("tfevents" in path.name for path in there)
        if start == 0 and not self.replace and has_events:
            raise _earlier("TensorBoard", logdir, "event files of an earlier run")
        path = os.fspath(logdir / "events")
        if not is_on_disk(logdir):
            # By this name tensorboardX opens a file; its own take other packages.
            stored = lambda at: StoredFile(epath.Path(at.partition(":")[2]))  # noqa: E731
            made = types.SimpleNamespace(open=stored)
            stores = require("tensorboardX.record_writer", *needs)
            stores.register_writer_factory("towerjax", made)
            path = "towerjax:" + path
        # tensorboardX puts the second into the name, which two runs may share.
        events = files.EventsWriter(path, f".{os.getpid()}.{time.time_ns()}")
        mark = proto.SessionLog(status=proto.SessionLog.START)
        is_redone = {"step": start + 1, "session_log": mark}
        events.write_event(proto.Event(wall_time=time.time(), **is_redone))
        flush_at_s = time.monotonic() + _FLUSHED_EVERY_S

        def write(record: Record) -> None:
            nonlocal flush_at_s
            event = proto.Event(wall_time=record.time_s, step=record.step)
            with np.errstate(over="ignore"):  # beyond float32 they become infinite
                for tag, number in curves(record, self.max_elements).items():
                    event.summary.value.add(tag=tag, simple_value=np.float32(number))
            events.write_event(event)
            if record.kind == "eval" or time.monotonic() >= flush_at_s:
                events.flush()
                flush_at_s = time.monotonic() + _FLUSHED_EVERY_S

        return Opened(write, events.close)


def curves(record: Record, most: int) -> dict[str, float]:
    """The number of each curve; a metric has one for each of its elements."""
    numbers = {}
    for name, value in record.metrics.items():
        tag = f"{record.kind}/{name}"
        array = real_numbers("TensorBoard", tag, value)
        if array.size > most:
            raise ValueError(
                f"TensorBoard: the metric {tag!r} has {array.size} elements, each a"
                f" curve, and may have {most}. Use tj.JsonLines(path), or give"
                " TensorBoard a larger max_elements."
            )
        for place, x in np.ndenumerate(array.astype(np.float64)):
            numbers["/".join([tag, *map(str, place)])] = float(x)
    return numbers | {f"rate/{name}": float(x) for name, x in record.rates.items()}
