"""Write the scalars of a run to a TensorBoard event file."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from towerjax.loop.writers import Record, real_numbers
from towerjax.types.options import (
    check_flag,
    check_number,
    check_path,
    check_whole,
    require,
)


@dataclasses.dataclass(frozen=True)
class TensorBoard:
    """Event files in a folder: ``train/loss`` and ``eval/loss`` over the step number.

    Needs ``tensorboardX``. Values are float32. A metric that is an array has a curve
    for each element, ``eval/confusion/1/2``.

    Each run writes its own file, which begins with a mark that the steps from its
    start are done again, so that TensorBoard hides those that a lost run wrote. A run
    that starts at step 0 refuses a folder that has event files.

    Attributes:
      logdir: The folder; it is made.
      max_elements: The most curves of one metric.
      flush_s: How many seconds of curves a killed process may lose.
      replace: Whether a run that starts at step 0 may hide earlier runs.

    Example:
      >>> TensorBoard("logs", flush_s=1.0)
      TensorBoard(logdir='logs', max_elements=64, flush_s=1.0, replace=False)
    """

    logdir: str | os.PathLike[str]
    max_elements: int = 64
    flush_s: float = 10.0
    replace: bool = False

    def __post_init__(self) -> None:
        check_path("TensorBoard.logdir", self.logdir, "a folder")
        check_whole("max_elements", self.max_elements, 1)
        check_number("flush_s", self.flush_s, "seconds >= 0")
        check_flag("TensorBoard.replace", self.replace)

    def open(self, start: int) -> "OpenTensorBoard":
        """A new event file.

        Args:
          start: Steps that the state had done before.

        Returns:
          The open file.

        Raises:
          ValueError: No ``tensorboardX``; ``logdir`` holds other runs.
        """
        logdir = pathlib.Path(self.logdir)
        needs = "TensorBoard, other than tj.JsonLines(path),", "'towerjax[tensorboard]'"
        writer = require("tensorboardX.event_file_writer", *needs)
        proto = require("tensorboardX.proto.event_pb2", *needs)
        logdir.mkdir(parents=True, exist_ok=True)
        if start == 0 and not self.replace and any(logdir.glob("*tfevents*")):
            raise ValueError(
                f"TensorBoard: {str(logdir)!r} holds event files of an earlier run, but"
                " this one starts at step 0. Use another folder, go on with that run's"
                " state, or say TensorBoard(logdir, replace=True)."
            )
        # tensorboardX puts the second into the name, which two runs may share.
        suffix = f".{os.getpid()}.{time.time_ns()}"
        events = writer.EventsWriter(str(logdir / "events"), suffix)
        return OpenTensorBoard(self, events, proto, start)


class OpenTensorBoard:
    """An event file that is being written.

    ``tensorboardX.SummaryWriter`` is not used: after an error of the disk its thread
    raises nothing and the run waits for ever.
    """

    def __init__(
        self, options: TensorBoard, events: Any, proto: Any, start: int
    ) -> None:
        self._options, self._events, self._proto = options, events, proto
        self._flush_at_s = time.monotonic() + options.flush_s
        mark = proto.SessionLog(status=proto.SessionLog.START)
        event = proto.Event(wall_time=time.time(), step=start + 1, session_log=mark)
        self._events.write_event(event)

    def write(self, record: Record) -> None:
        """Append an event with all scalars of a record."""
        event = self._proto.Event(wall_time=record.time_s, step=record.step)
        for name, value in record.metrics.items():
            for tag, number in self._scalars(f"{record.kind}/{name}", value):
                event.summary.value.add(tag=tag, simple_value=number)
        self._events.write_event(event)
        if record.kind == "eval" or time.monotonic() >= self._flush_at_s:
            self._events.flush()
            self._flush_at_s = time.monotonic() + self._options.flush_s

    def _scalars(self, tag: str, value: Any) -> Iterator[tuple[str, float]]:
        array = real_numbers("TensorBoard", tag, value)
        most = self._options.max_elements
        if array.size > most:
            raise ValueError(
                f"TensorBoard: the metric {tag!r} has {array.size} elements, each a"
                f" curve; max_elements={most}. Raise it, or use tj.JsonLines(path)."
            )
        with np.errstate(over="ignore"):  # values beyond float32 become infinite
            numbers = array.astype(np.float64).astype(np.float32)
        for index, number in np.ndenumerate(numbers):
            yield "/".join([tag, *map(str, index)]), float(number)

    def close(self) -> None:
        """Write the rest, and close the file."""
        self._events.close()
