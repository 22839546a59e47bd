"""How is a run saved while it goes on? Begun between steps, finished in a thread."""

import concurrent.futures
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from towerjax.loop.checkpoint import folder
from towerjax.loop.checkpoint.folder import CheckpointError, write_manifest
from towerjax.loop.checkpoint.options import ARRAYS, Checkpointer
from towerjax.loop.checkpoint.record import (
    CheckpointRecord,
    array_files,
    check_same_model,
    described,
    library_versions,
    plain_arrays,
    scalars,
)
from towerjax.loop.steps import LoopStep
from towerjax.loop.stopping import sign_of
from towerjax.mesh.processes import first_process_says
from towerjax.step.state import TrainState


class Saver:
    """Writes the checkpoints of one run; a context, which waits for the last one."""

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
        self._files = array_files()
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="towerjax-checkpoint"
        )
        self._writing: concurrent.futures.Future[None] | None = None
        self._saved: int | None = None
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})

    def newest_after(self, state: TrainState) -> CheckpointRecord | None:
        """The newest checkpoint, if it is of a later step."""
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
        """Note an evaluation."""
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
        sign = sign_of(self.options.mode)
        return sign * numbers[name] < sign * before

    def save(
        self,
        state: TrainState,
        number: int,
        *,
        batches: Mapping[str, Any],
        batch_rows: Sequence[int] = (),
        stopping: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to save a state; once this returns a step may take its buffers over."""
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
            self._files.save(path / ARRAYS, plain_arrays(state))
        self._writing = self._thread.submit(self._finish, record)
        self._saved = number

    def _finish(self, record: CheckpointRecord) -> None:
        """In the thread: wait for the arrays, then let the checkpoint count."""
        directory, number = self.options.path, record.step
        with self._explained(number):
            self._files.wait_until_finished()
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
        """Until the last checkpoint counts."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the thread, whatever came of it; let go of the directory."""
        self._thread.shutdown()
        self._files.close()
        self._stack.close()


def left_of(steps: int | None, start: int, record: CheckpointRecord) -> int | None:
    """How many steps a resumed run has to do."""
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
