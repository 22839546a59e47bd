"""What is written down of a run, step by step, and by whom?"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.mesh.processes import from_first_process


@dataclasses.dataclass(frozen=True)
class Record:
    """The metrics of one step, or of one evaluation.

    Attributes:
      kind: ``"train"`` or ``"eval"``.
      step: The step's number; of an evaluation that of the step before it.
      time_s: Seconds since 1970 when the metrics reached the host.
      metrics: Name -> number or array, on the host.
    """

    kind: Literal["train", "eval"]
    step: int
    time_s: float
    metrics: Mapping[str, Any]


class OpenWriter(Protocol):
    """Something under way that takes records."""

    def write(self, record: Record) -> None:
        """Write one record down."""
        ...

    def close(self) -> None:
        """Write what is left, and let go of files. Called once."""
        ...


class Writer(Protocol):
    """Where records go: options, of which each run opens an `OpenWriter`."""

    def open(self, start: int) -> OpenWriter:
        """Begin, or go on."""
        ...


class Writers:
    """The open writers of a run. Each gets every record, whatever the others do."""

    def __init__(self, writers: Iterable[Writer], start: int) -> None:
        self.failure: Exception | None = None
        self._open: list[OpenWriter] = []
        self._raised = False
        try:
            for writer in writers:
                self._open.append(writer.open(start))
        except BaseException:
            self.close()
            raise

    def write(self, records: Sequence[Record]) -> None:
        """Give them to each writer; one that fails gets no more, and is noted."""
        for writer in tuple(self._open):
            try:
                for record in records:
                    writer.write(record)
            except Exception as failure:
                self._drop(writer, failure)

    def close(self) -> None:
        """Close each writer, once; a failure is kept in mind."""
        for writer in tuple(self._open):
            self._drop(writer, None)

    def _drop(self, writer: OpenWriter, failure: Exception | None) -> None:
        self._open.remove(writer)
        try:
            writer.close()
        except Exception as error:
            failure = failure or error
        self.failure = self.failure or failure

    def check(self) -> None:
        """Raise the first failure, once."""
        if self.failure is not None and not self._raised:
            self._raised = True
            raise self.failure

    def explain(self, error: BaseException) -> None:
        """Tell of a failure in an exception that ends the run anyway."""
        if self.failure is not None and not self._raised:
            self._raised = True
            error.add_note(
                f"Besides, a writer failed: {type(self.failure).__name__}:"
                f" {self.failure}."
            )


def check_writers(writers: Any) -> tuple[Writer, ...]:
    """The writers, once they are some."""
    if not isinstance(writers, Iterable) or isinstance(writers, str | bytes):
        raise ValueError(
            f"writers={writers!r} must be a list, such as [tj.JsonLines('run.jsonl')]."
        )
    writers = tuple(writers)
    for writer in writers:
        if not callable(getattr(writer, "open", None)) or isinstance(writer, type):
            raise ValueError(
                f"writers holds {writer!r}, which has no open(start). Use"
                " tj.JsonLines(path), tj.TensorBoard(logdir), or an object of your own"
                " whose open(start) returns one with write(record) and close()."
            )
    return writers


def opened(writers: Iterable[Writer], start: int, placement: Placement) -> Writers:
    """The writers of a run, open on the first of the processes that share it."""
    if placement.num_processes == 1:
        return Writers(writers, start)
    failure, made = None, Writers((), start)
    if jax.process_index() == 0:
        try:
            made = Writers(writers, start)
        except Exception as error:  # the others would wait for this one's steps
            failure = error
    failed = from_first_process(np.array(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise ValueError("A writer could not be opened on process 0, which says why.")
    return made
