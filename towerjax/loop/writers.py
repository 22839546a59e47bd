"""Write a run's metrics while it trains: to files, TensorBoard, or a function."""

import csv
import dataclasses
import io
import json
import math
import os
import pathlib
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from etils import epath

from towerjax.loop.files import (
    StoredFile,
    absolute_path,
    append_bytes,
    as_line,
    checked_path,
    is_on_disk,
    is_torn,
    opened_after,
    read_lines,
    telling_of_line,
    whole_at_least_0,
)
from towerjax.mesh.placement import Placement
from towerjax.types.boundary import api_boundaries
from towerjax.types.options import (
    check_flag,
    check_function,
    check_list,
    check_methods,
    check_whole,
    opening,
    require,
)
from towerjax.types.refusals import printable

# How many seconds of output a killed process may lose: of a file that can only be
# replaced as a whole, and of curves.
_STORED_EVERY_S = _FLUSHED_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True)
class Record:
    """The metrics of one step, or of one evaluation."""

    kind: Literal["train", "eval"]
    step: int  # the number of the step; for an evaluation, of the last step before it
    time_s: float  # seconds since 1970 when the metrics reached the host
    metrics: Mapping[str, Any]  # name -> number or array, on the host
    # The rates over the last steps, by name, for a step's record; see `RunSummary`.
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)


class OpenWriter(Protocol):
    """A writer that has been opened for one run."""

    def write(self, record: Record, /) -> None:
        """Write one record."""

    def close(self) -> None:
        """Write buffered records, and close files; called once."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """An `OpenWriter` that is made of two functions."""

    write: Callable[[Record], None]
    close: Callable[[], None]


class Writer(Protocol):
    """The options of a writer, from which each run opens an `OpenWriter`."""

    def open(self, start: int) -> OpenWriter:
        """Open for a run whose state has done ``start`` steps."""
        ...


class Writers:
    """The open writers of a run; each gets every record, even if another one fails."""

    def __init__(self) -> None:
        self._failures: list[Exception] = []
        self._open: list[OpenWriter] = []

    def open(self, writers: Iterable[Writer], start: int, placement: Placement) -> None:
        """Open the writers; only the first process opens them."""

        def open_each() -> None:
            for writer in writers:
                self._open.append(writer.open(start))

        processes = placement.processes
        first = processes.numbers[0]
        says = f"A writer could not be opened on process {first}"
        processes.call_on_first(open_each, says)

    @property
    def are_open(self) -> bool:
        """Whether any writer is open."""
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
        """Raise the first failure of a writer, once."""
        failures = self._failures
        self._failures = []
        if failures:
            raise failures[0]

    def explain(self, error: BaseException) -> None:
        """Add the first failure as a note to another exception that ends the run."""
        for failure in self._failures[:1]:
            text = f"{type(failure).__name__}: {failure}"
            error.add_note(f"A writer failed, too: {text}.")


def check_writers(writers: Any) -> tuple[Writer, ...]:
    """Make a tuple of the writers; raise if one cannot be opened."""
    of_path = f"[tj.JsonLines({writers!r})]" if isinstance(writers, str) else None
    writers = check_list("writers", writers, of_path)
    example = (
        "tj.JsonLines(path), tj.TensorBoard(logdir), tj.loop.Curves(function), or your"
        " own object whose open(start) returns an object with write(record) and close()"
    )
    for writer in writers:
        check_methods("one of writers", writer, "open", example)
    files = [x for x in writers if isinstance(x, JsonLines | Csv)]
    paths = [absolute_path(x.path) for x in files]
    if twice := [path for path in paths if paths.count(path) > 1]:
        kinds = dict.fromkeys(
            type(x).__name__
            for x, path in zip(files, paths, strict=True)
            if path == twice[0]
        )
        raise ValueError(
            f"writers: two {' and '.join(kinds)} write to {str(twice[0])!r}, so that"
            " each step would have two lines. Leave one out, or give it another path."
        )
    return writers


def as_json(value: Any) -> Any:
    """Write a value for JSON, with non-finite floats as text.

    ``float`` reads this text.
    """
    if isinstance(value, Mapping):
        return {str(name): as_json(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@api_boundaries
@dataclasses.dataclass(frozen=True)
class JsonLines:
    """A file with one line of JSON for each step and each evaluation.

    ``{"kind": "train", "step": 3, "time_s": 1.7e9, "metrics": {"loss": 0.25}}``;
    ``kind`` is ``"train"`` or ``"eval"``. In a run, a step's line ends with ``"rates":
    {"steps_per_second": 45.6, ...}``, the rates over the last 20 steps, named as in
    `tj.loop.RunSummary`. Numbers are exact. Non-finite numbers are the strings
    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which ``float`` reads. A process that
    is killed at any time leaves complete lines. An object store cannot append, so there
    the whole file is stored every 10 s, with each evaluation and at the end.

    A run that starts at step ``n`` cuts off the lines of later steps, so that no step
    has two lines. A run that starts at step 0 refuses a file that already has lines.

    Attributes:
      path: The file, local or like ``"gs://bucket/run.jsonl"``; its folder is created.
      replace: Whether a run that starts at step 0 may cut off the lines of an earlier
        run.

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
        """Open the file for writing after the lines of the first ``start`` steps.

        It raises a ``ValueError`` if ``path`` holds something else, or an earlier run.
        """
        return _open_lines(self, start, _Lines(b"", _as_json_line, _json_lines))


def _as_json_line(record: Record) -> bytes:
    metrics = {name: json_value(name, x) for name, x in record.metrics.items()}
    fields = {**vars(record), "metrics": metrics}
    if not record.rates:
        del fields["rates"]
    return as_line(fields)


def _json_lines(path: epath.Path) -> Iterator[tuple[str, int, int]]:
    """Yield the kind, the step number and the size of each line of a `JsonLines`."""
    lines = read_lines(path, "kind", "a run")
    for number, (line, length) in enumerate(lines, 1):
        with telling_of_line(path, number, json.dumps(line).encode(), "a run"):
            step = whole_at_least_0(line, "step")
        yield line["kind"], step, length


class _Lines(NamedTuple):
    """How a file stores records as lines.

    ``head`` is its first line, ``of_record`` makes the lines of a record, and ``read``
    yields the kind, the step number and the size of each line.
    """

    head: bytes
    of_record: Callable[[Record], bytes]
    read: Callable[[epath.Path], Iterable[tuple[str, int, int]]]


def _open_lines(options: "JsonLines | Csv", start: int, lines: _Lines) -> OpenWriter:
    """Open a file for writing after the lines of the first ``start`` steps."""
    name = f"{type(options).__name__}.path"
    path = absolute_path(options.path)
    with opening(name, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        num_kept, repeated = _kept(options, path, start, lines.read)
        file = opened_after(path, num_kept, _STORED_EVERY_S)
        if not num_kept:
            append_bytes(file, lines.head)

    def write(record: Record) -> None:
        nonlocal repeated
        # A resumed run may evaluate before its first step. That repeats the earlier
        # run's last evaluation, whose line is replaced.
        if record.kind == "eval" and repeated is not None:
            file.truncate(repeated)
        repeated = None
        content = lines.of_record(record)
        with opening(name, path):
            append_bytes(file, content)
            if record.kind == "eval":
                file.flush()

    return Opened(write, _explained(name, path, file.close))


def _explained(
    name: str, path: epath.Path, close: Callable[[], Any]
) -> Callable[[], None]:
    """Make a function that closes a file, and names it if that fails."""

    def close_it() -> None:
        with opening(name, path):
            close()

    return close_it


def _kept(
    options: "JsonLines | Csv",
    path: epath.Path,
    start: int,
    lines: Callable[[epath.Path], Iterable[tuple[str, int, int]]],
) -> tuple[int | None, int | None]:
    """Count the bytes of the file to keep.

    Also returns where an evaluation after step ``start`` begins, or None. Raises if a
    run that starts at step 0 would cut off the lines of another run.
    """
    if not path.exists() or is_on_disk(path) and not pathlib.Path(path).is_file():
        return None, None  # a pipe or a device has no earlier lines
    num_kept = last = 0
    repeated = None
    for kind, step, length in lines(path):
        last = max(last, step)
        if last <= start:
            is_last = (step, kind) == (start, "eval")
            repeated = (num_kept if repeated is None else repeated) if is_last else None
            num_kept += length
    if start == 0 and last > 0 and not options.replace:
        writer = type(options).__name__
        raise _earlier(writer, path, f"an earlier run up to step {last}")
    return num_kept, repeated


def _earlier(writer: str, path: epath.Path, content: str) -> ValueError:
    return ValueError(
        f"{writer}: {str(path)!r} holds {content}, but this run starts at step 0. Use"
        f" another path, go on with that run's state, or write {writer}(path,"
        " replace=True)."
    )


def json_value(name: str, value: Any) -> Any:
    """Write a metric as numbers and lists for JSON."""
    return as_json(real_numbers("JSON", name, value).tolist())


def real_numbers(writer: str, name: str, value: Any) -> np.ndarray:
    """Make an array of a metric, floats in float64; raise unless it is real."""
    array = np.asarray(value)
    if array.dtype.kind in "biu":
        return array
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{writer}: the metric {name!r} is {type(value).__name__},"
            f" {array.dtype}{list(array.shape)}, but must have real numbers. Return its"
            " .value, or its real and imaginary parts."
        )
    return array.astype(np.float64)


_HEAD = ("kind", "step", "time_s", "name", "value")


@api_boundaries
@dataclasses.dataclass(frozen=True)
class Csv:
    """A file with one line for each number: its kind, step, time, name and value.

    The first line is ``kind,step,time_s,name,value``. ``kind`` is ``train``, ``eval``
    or ``rate``; rates are named as in `tj.loop.RunSummary`. An element of an array is
    named like ``confusion/1/2``. Numbers are exact. Pandas makes a table with a column
    for each metric of it: ``pd.read_csv(path).query("kind == 'train'").pivot(
    index="step", columns="name", values="value")``.

    The file is local or in an object store, and a resumed run cuts off later lines, as
    with `JsonLines`.

    Attributes:
      path: The file; its folder is created.
      replace: Whether a run that starts at step 0 may cut off the lines of an earlier
        run.

    Example:
      >>> import tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> options = Csv(folder.name + "/run.csv")
      >>> writer = options.open(0)
      >>> writer.write(Record("train", 1, 2.5, {"loss": np.float32(0.25)}))
      >>> writer.close()
      >>> print(pathlib.Path(options.path).read_text().strip())
      kind,step,time_s,name,value
      train,1,2.5,loss,0.25
      >>> folder.cleanup()
    """

    path: str | os.PathLike[str]
    replace: bool = False

    def __post_init__(self) -> None:
        checked_path("Csv.path", self.path, "a file")
        check_flag("Csv.replace", self.replace)

    def open(self, start: int) -> OpenWriter:
        """Open the file for writing after the lines of the first ``start`` steps.

        It raises a ``ValueError`` if ``path`` holds something else, or an earlier run.
        """
        head = _as_csv([_HEAD])
        return _open_lines(self, start, _Lines(head, _as_csv_lines, _csv_lines))


def _as_csv_lines(record: Record) -> bytes:
    rows = []
    for tag, value in curves("Csv", record).items():
        kind, _, name = tag.partition("/")
        # A record ends where its line ends.
        rows.append((kind, record.step, record.time_s, printable(name), repr(value)))
    return _as_csv(rows)


def _as_csv(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _csv_lines(path: epath.Path) -> Iterator[tuple[str, int, int]]:
    """Yield the kind, the step number and the size of each line of a `Csv`."""
    head = _as_csv([_HEAD])
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            is_first = number == 1
            is_ours = not is_first or head.startswith(line.rstrip(b"\0"))
            if is_torn(line) and is_ours:
                return
            with telling_of_line(path, number, line, "tj.loop.Csv"):
                if is_first and line != head:
                    raise ValueError(f"the first one is {head.decode().strip()}")
                kind, step, *_ = line.decode().split(",")
                if not (is_first or step.isdecimal()):
                    raise ValueError(f"{step!r} is no step number")
                step = 0 if is_first else int(step)
            yield kind, step, len(line)


@api_boundaries
@dataclasses.dataclass(frozen=True)
class Curves:
    """A function of yours that gets the numbers of each step and each evaluation.

    It is called as ``function(3, {"train/loss": 0.25})``, on process 0, a few steps
    later. Names are those of `TensorBoard`: ``eval/accuracy``,
    ``rate/examples_per_second``, and ``eval/confusion/1/2`` for an element of an array.
    The run waits for the function.

    Attributes:
      function: ``(step, {name: value}) -> None``. Values are floats.
      every: Only steps whose number is a multiple of this are passed on. Evaluations
        always are.
      max_elements: The largest number of curves of one metric.

    Example:
      >>> writer = Curves(lambda step, values: print(step, values), every=2).open(0)
      >>> for step in (1, 2):
      ...     writer.write(Record("train", step, 2.5, {"loss": np.float32(0.25)}))
      2 {'train/loss': 0.25}
    """

    function: Callable[[int, dict[str, float]], Any]
    every: int = 1
    max_elements: int = 64

    def __post_init__(self) -> None:
        form = "function(step, values)"
        check_function("Curves.function", self.function, form)
        check_whole("every", self.every, 1)
        check_whole("max_elements", self.max_elements, 1)

    def open(self, start: int) -> OpenWriter:
        """Make a writer that calls the function; ``start`` is not used."""

        def write(record: Record) -> None:
            if record.kind == "eval" or record.step % self.every == 0:
                self.function(record.step, curves("Curves", record, self.max_elements))

        return Opened(write, lambda: None)


@api_boundaries
@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Event files in a folder: ``train/loss`` and ``eval/loss`` over the step number.

    They also hold rates over the last 20 steps, such as ``rate/examples_per_second``,
    with the names of `tj.loop.RunSummary`. Values are float32. A metric that is an
    array has a curve for each element, such as ``eval/confusion/1/2``. A killed process
    loses up to 10 s of curves. The package ``tensorboardX`` must be installed.

    Each run writes its own file. The file begins with a mark, which makes TensorBoard
    hide later steps that an earlier, killed run wrote. A run that starts at step 0
    refuses a folder that has event files.

    Attributes:
      logdir: The folder, local or like ``"gs://bucket/logs"``; it is created.
      max_elements: The largest number of curves of one metric.
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
        """Open a new event file for a run whose state has done ``start`` steps.

        It raises a ``ValueError`` without ``tensorboardX``, or if ``logdir`` holds
        other runs.
        """
        logdir = absolute_path(self.logdir)
        # The SummaryWriter of tensorboardX waits for ever once its disk is full, so a
        # lower layer is used.
        files = _tensorboardx("event_file_writer")
        proto = _tensorboardx("proto.event_pb2")
        with opening("TensorBoard.logdir", logdir):
            logdir.mkdir(parents=True, exist_ok=True)
        there = logdir.iterdir() if logdir.exists() else ()
        has_events = any("tfevents" in path.name for path in there)
        if start == 0 and not self.replace and has_events:
            raise _earlier("TensorBoard", logdir, "event files of an earlier run")
        path = os.fspath(logdir / "events")
        if not is_on_disk(logdir):
            # tensorboardX chooses a store by the prefix of the path. Its own stores
            # need other packages, so this one is registered.

            def stored(at: str) -> StoredFile:
                return StoredFile(epath.Path(at.partition(":")[2]))

            store = types.SimpleNamespace(open=stored)
            stores = _tensorboardx("record_writer")
            stores.register_writer_factory("towerjax", store)
            path = "towerjax:" + path
        # The package tensorboardX names a file by the current second, and two runs may
        # start in one second.
        mark = proto.SessionLog(status=proto.SessionLog.START)
        is_redone = {"step": start + 1, "session_log": mark}
        with opening("TensorBoard.logdir", logdir):
            events = files.EventsWriter(path, f".{os.getpid()}.{time.time_ns()}")
            events.write_event(proto.Event(wall_time=time.time(), **is_redone))
        flush_at_s = time.monotonic() + _FLUSHED_EVERY_S

        def write(record: Record) -> None:
            nonlocal flush_at_s
            event = proto.Event(wall_time=record.time_s, step=record.step)
            # A number too large for float32 becomes infinite.
            with np.errstate(over="ignore"):
                for tag, number in curves(
                    "TensorBoard", record, self.max_elements
                ).items():
                    event.summary.value.add(tag=tag, simple_value=np.float32(number))
            with opening("TensorBoard.logdir", logdir):
                events.write_event(event)
                if record.kind == "eval" or time.monotonic() >= flush_at_s:
                    events.flush()
                    flush_at_s = time.monotonic() + _FLUSHED_EVERY_S

        return Opened(write, _explained("TensorBoard.logdir", logdir, events.close))


def _tensorboardx(module: str) -> Any:
    """Import a module of tensorboardX; say what to install if it is missing."""
    needs = "TensorBoard, other than tj.JsonLines(path),"
    return require(f"tensorboardX.{module}", needs, "tensorboard")


def curves(writer: str, record: Record, most: int | None = None) -> dict[str, float]:
    """Take a number for each curve of a record, by the curve's name.

    An array has a curve for each element; ``most`` is the largest number of them.
    """
    numbers: dict[str, float] = {}
    for name, value in record.metrics.items():
        tag = f"{record.kind}/{name}"
        array = real_numbers(writer, tag, value)
        if most is not None and array.size > most:
            raise ValueError(
                f"{writer}: the metric {tag!r} has {array.size} elements, which"
                f" would each be a curve, but max_elements is {most}. Use"
                f" tj.JsonLines(path), or give {writer} a larger max_elements."
            )
        for place, x in np.ndenumerate(array.astype(np.float64)):
            numbers["/".join([tag, *map(str, place)])] = float(x)
    return numbers | {f"rate/{name}": float(x) for name, x in record.rates.items()}
