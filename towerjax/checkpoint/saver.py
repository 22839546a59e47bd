"""How is a run saved while it goes on? Begun between steps, finished in a thread."""

import concurrent.futures
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from towerjax.checkpoint import folder
from towerjax.checkpoint.errors import CheckpointError
from towerjax.checkpoint.files import ArrayFiles
from towerjax.checkpoint.leaves import check_same_model, described, plain_arrays
from towerjax.checkpoint.manifest import write_manifest
from towerjax.checkpoint.options import ARRAYS, Checkpointer
from towerjax.checkpoint.record import (
    CheckpointRecord,
    library_versions,
    scalars,
)
from towerjax.loop.steps import LoopStep
from towerjax.processes import first_process_says
from towerjax.state import TrainState


class Saver:
    """Writes the checkpoints of one run; a context, which waits for the last one.

    Args:
      options: Where, how often, how many.
      step: What is trained.
      state: Such a state, for its size.

    Raises:
      CheckpointError: The directory cannot be written to, or is used by another run.
    """

    def __init__(
        self, options: Checkpointer, step: LoopStep, state: TrainState
    ) -> None:
        self.options = options
        self._step, self._is_first = step, jax.process_index() == 0
        self._stack = contextlib.ExitStack()
        needed = sum(x.nbytes for x in plain_arrays(state).values())

        def prepare() -> None:
            folder.prepare(options.path, needed)
            self._stack.enter_context(folder.held(options.path))

        first_process_says(prepare)
        self._files = ArrayFiles()
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="towerjax-checkpoint"
        )
        self._writing: concurrent.futures.Future[None] | None = None
        self._saved: int | None = None
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})

    def newest_after(self, state: TrainState) -> CheckpointRecord | None:
        """The newest checkpoint, if it is of a later step.

        Args:
          state: The present state.

        Returns:
          Its record, or None.

        Raises:
          CheckpointError: It is one of another model, of whatever step.
        """
        number = int(state.step)
        newest = first_process_says(lambda: max(self.options.steps, default=-1))
        if newest < 0:
            return None
        record = self.options.record(newest)
        where = folder.folder_of(self.options.path, newest)
        check_same_model(record.leaves, state, f"The checkpoint {str(where)!r}")
        if newest >= number:
            self._saved = newest
        return record if newest > number else None

    def saw(self, number: int, values: Mapping[str, Any]) -> bool:
        """Note an evaluation.

        Args:
          number: The number of the step before it.
          values: Its metrics.

        Returns:
          Is it the best, and to be saved?

        Raises:
          ValueError: It has no metric of the name, or not as a scalar.
        """
        numbers, name = scalars(values), self.options.best
        self._evaluated = number, numbers
        if name is None:
            return False
        if name not in values or getattr(values[name], "ndim", 0):
            raise ValueError(
                f"Checkpointer(best={name!r}): the evaluation has no such scalar, but"
                f" {sorted(values)}."
            )
        if name not in numbers:
            return False
        self.wait()
        best = first_process_says(lambda: self.options.best_step)
        if best is None:
            return True
        before = self.options.record(best).evaluation[name]
        less = numbers[name] < before
        return less if self.options.mode == "min" else numbers[name] > before

    def save(
        self,
        state: TrainState,
        number: int,
        *,
        batches: Mapping[str, Any],
        batch_rows: Sequence[int] = (),
        stopping: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to save a state; once this returns a step may take its buffers over.

        Args:
          state: The state.
          number: After how many steps it is; nothing happens if that was saved.
          batches: Where the batches are.
          batch_rows: How many rows they had once they were padded.
          stopping: What early stopping has counted.

        Raises:
          CheckpointError: It, or the one before it, could not be written.
        """
        if number == self._saved:
            return
        self.wait()
        at, values = self._evaluated
        placement, seen = self._step.strategy.placement, state.seen
        record = CheckpointRecord(
            step=number,
            strategy=repr(self._step.strategy),
            towers=placement.num_towers,
            devices=placement.devices,
            leaves=tuple(described(state)),
            batches=batches,
            batch_rows=tuple(sorted(batch_rows)),
            evaluation=values if at == number else {},
            stopping=stopping or {},
            fingerprint=None if seen is None else f"{seen.fingerprint:016x}",
            versions=library_versions(),
        )
        path = folder.making(self.options.path, number)
        with self._explained(number):
            if self._is_first:
                folder.begin(self.options.path, number)
            self._files.start(path / ARRAYS, plain_arrays(state))
        self._writing = self._thread.submit(self._finish, record)
        self._saved = number

    def _finish(self, record: CheckpointRecord) -> None:
        """In the thread: wait for the arrays, then let the checkpoint count."""
        directory, number = self.options.path, record.step
        with self._explained(number):
            self._files.wait()
            if not self._is_first:
                return
            path = folder.making(directory, number)
            record.write(path)
            write_manifest(path)
            folder.commit(directory, number)
            self._remove_old()

    def _remove_old(self) -> None:
        steps, best = self.options.steps, self.options.best_step
        for number in steps[: -self.options.keep]:
            if number != best:
                folder.remove(self.options.path, number)

    @contextlib.contextmanager
    def _explained(self, number: int) -> Any:
        try:
            yield
        except Exception as error:
            self._saved = None
            path = folder.making(self.options.path, number)
            if self._is_first:
                folder.discard(path)
            why = str(error)  # TensorStore's has its whole configuration
            why = why if len(why) <= 400 else why[:400] + " ..."
            raise CheckpointError(
                f"The checkpoint of step {number} could not be written to"
                f" {str(self.options.path)!r}; those before it are whole. {why}"
            ) from error

    def wait(self) -> None:
        """Until the last checkpoint counts.

        Raises:
          CheckpointError: It could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the thread, whatever came of it; let go of the directory."""
        self._thread.shutdown()
        self._files.close()
        self._stack.close()


def left_of(steps: int | None, start: int, record: CheckpointRecord) -> int | None:
    """How many steps a resumed run has to do.

    Args:
      steps: How many the whole run has, from the state that was passed.
      start: How many that state had done.
      record: Where it goes on.

    Returns:
      The number; None goes to the end of the data.

    Raises:
      CheckpointError: The checkpoint is beyond the end.
    """
    if steps is None:
        return None
    left = start + steps - record.step
    if left < 0:
        raise CheckpointError(
            f"steps={steps} from step {start} end at {start + steps}, but the newest"
            f" checkpoint is of step {record.step}. Name another folder for another"
            " training, or do more steps."
        )
    return left
