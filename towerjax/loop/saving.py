"""Save a run between steps, write in a thread, and resume it from a checkpoint."""

import concurrent.futures
import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Mapping
from typing import Any

import jax

from towerjax.data.ledger import Ledger
from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.checkpointer import ARRAYS, Checkpointer
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.options import RunOptions, reaches_multiple
from towerjax.loop.stopping import sign_of
from towerjax.mesh.cluster import heartbeat
from towerjax.mesh.interrupt import Terminated
from towerjax.mesh.processes import call_on_first_process, is_preempted, require_same
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.state import TrainState, step_number
from towerjax.types.options import is_one_real

# Orbax counts the saves of a process, and takes two at once for one.
_ONE_AT_ONCE = threading.Lock()


class Saving:
    """Saves and resumes one run; ``stack`` closes its thread, files and lock."""

    def __init__(
        self,
        options: Checkpointer,
        step: CompiledStep,
        state: TrainState,
        ledger: Ledger,
        stack: contextlib.ExitStack,
    ) -> None:
        self._options, self._step, self._ledger = options, step, ledger
        self.directory = str(options.path)
        self._is_first = jax.process_index() == 0
        self._several = step.strategy.placement.num_processes > 1
        self._refuse_what_cannot_be_saved()
        needed = sum(x.nbytes for x in record.arrays_by_name(state).values())
        call_on_first_process(
            lambda: stack.enter_context(folder.lock(options.path, needed))
        )
        require_same(
            "Who has locked the folder of the checkpoints",
            folder.owner(options.path),
            f"Here it is in {self.directory!r}. Name one that all processes see.",
        )
        self._files = stack.enter_context(
            contextlib.closing(record.array_checkpointer())
        )
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="towerjax-checkpoint"
        )
        stack.callback(self._thread.shutdown)  # called first: no write comes after it
        self._writing: concurrent.futures.Future[None] | None = None
        # The newest saved step, and its evaluation.
        self._saved: tuple[int, Mapping[str, float]] = (-1, {})
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self.resumed: record.CheckpointRecord | None = None
        self._before = step_number(state)
        self._is_best = False

    def _refuse_what_cannot_be_saved(self) -> None:
        if jax.process_count() > 1 and not self._several:
            raise CheckpointError(
                "A Checkpointer saves what all processes of a job train together, but"
                " the towers here are one process's own: use save_safetensors."
            )
        is_known = self._ledger.has_cursor or self._ledger.is_reproducible
        if self._options.batches == "cursor" and not is_known:
            raise CheckpointError(
                "Checkpointer(batches='cursor') saves the position of the batches, but"
                " these have no get_state and set_state. Say batches='count' if they"
                " come in the same order each time, or 'anew'; or pass"
                " tj.batches(...) itself or a list."
            )
        record.encode_cursor(self._ledger.cursor)

    def resume(
        self, state: TrainState, options: RunOptions
    ) -> tuple[TrainState, RunOptions]:
        """Restore the newest checkpoint if it is of a later step than ``state``."""
        start = step_number(state)
        newest = call_on_first_process(lambda: max(self._options.steps, default=-1))
        if newest < 0:
            return state, options
        saved = self._options.record(newest)
        where = folder.path_of(self._options.path, newest)
        record.check_same_model(saved.leaves, state, where)
        if newest >= start:
            self._saved = newest, saved.evaluation
        if newest <= start:
            return state, options
        left = None if options.steps is None else start + options.steps - newest
        if left is not None and left < 0:
            raise CheckpointError(
                f"steps={options.steps} from step {start} end at {newest + left}, but"
                f" the newest checkpoint is of step {newest}. Name another folder."
            )
        state = self._options.restore(self._step, state, number=newest)
        self._seek(saved)
        self._step.expect_batch_rows(saved.batch_rows)
        self.resumed, self._before = saved, newest
        return state, dataclasses.replace(options, steps=left, may_end=True)

    def _seek(self, saved: record.CheckpointRecord) -> None:
        used, cursor = saved.batches["used"], saved.batches["cursor"]
        if self._options.batches == "anew":
            return
        uses_cursor = self._options.batches == "cursor" and self._ledger.has_cursor
        if uses_cursor and cursor is None:
            raise CheckpointError(
                "These batches have get_state and set_state, which those of the"
                f" checkpoint of step {saved.step} had not. Pass those, or say"
                f" batches='count', to skip the first {used}."
            )
        self._ledger.go_to(used, record.decode_cursor(cursor) if uses_cursor else None)

    @property
    def exit_code(self) -> int | None:
        """With which SIGTERM ends a lone process; several end at the same step."""
        return None if self._several else self._options.exit_code

    def is_due(self, number: int) -> bool:
        """Whether a multiple of ``every`` is reached or the last evaluation is best."""
        before, self._before = self._before, number
        return reaches_multiple(self._options.every, before, number) or self._is_best

    def add_evaluation(self, number: int, values: Mapping[str, Any]) -> None:
        """Keep an evaluation, and whether it is the best so far."""
        numbers, name = record.finite_scalars(values), self._options.best
        self._evaluated, self._is_best = (number, numbers), False
        if name is None:
            return
        if name not in values or not is_one_real(values[name]):
            raise ValueError(
                f"Checkpointer(best={name!r}): the evaluation has no such scalar, but"
                f" {sorted(values)}."
            )
        if name not in numbers:
            return
        self.wait()
        best = call_on_first_process(lambda: self._options.best_step)
        before = None if best is None else self._options.record(best).evaluation[name]
        sign = sign_of(self._options.mode)
        self._is_best = before is None or sign * numbers[name] < sign * before

    def save(
        self,
        state: TrainState,
        number: int,
        stopping: Mapping[str, Any],
        *,
        evaluation_due: bool = False,
    ) -> None:
        """Begin to save, unless this step and its evaluation, if any, are saved.

        Once this returns a step may donate the state's buffers.
        """
        self._is_best = False
        (at, values), ledger = self._evaluated, self._ledger
        evaluation = values if at == number else {}
        newest, known = self._saved
        if number == newest and evaluation in ({}, known):
            return
        self.wait()
        cursor = record.encode_cursor(ledger.cursor) if ledger.has_cursor else None
        strategy, seen = self._step.strategy, state.seen
        new = record.CheckpointRecord(
            step=number,
            strategy=repr(strategy),
            towers=strategy.placement.num_towers,
            devices=strategy.placement.devices,
            leaves=tuple(record.leaves_of(state)),
            batches={"used": ledger.used, "cursor": cursor},
            batch_rows=tuple(sorted(self._step.batch_rows)),
            evaluation=evaluation,
            evaluation_due=evaluation_due,
            stopping=stopping,
            fingerprint=None if seen is None else f"{seen.fingerprint:016x}",
            versions=record.library_versions(),
        )
        with contextlib.ExitStack() as held, self._explaining(number):
            if number != newest:  # else only the record changes
                held.enter_context(_ONE_AT_ONCE)
                path = folder.partial_path_of(self._options.path, number)
                if self._is_first:
                    shutil.rmtree(path, ignore_errors=True)
                    path.mkdir()
                self._files.save(path / ARRAYS, record.arrays_by_name(state))
            finish = self._finish, new, number != newest, held.pop_all()
            self._writing = self._thread.submit(*finish)
        self._saved = number, evaluation

    def _finish(
        self, new: record.CheckpointRecord, is_new: bool, held: contextlib.ExitStack
    ) -> None:
        """In the thread: wait for the arrays, then commit the checkpoint."""
        directory, number = self._options.path, new.step
        with self._explaining(number):
            with held:
                self._files.wait_until_finished()
            if not self._is_first:
                return
            fields = dataclasses.asdict(new)
            if is_new:
                folder.write_manifest(folder.partial_path_of(directory, number), fields)
                folder.commit(directory, number)
            else:
                folder.replace_record(folder.path_of(directory, number), fields)
        steps, best = self._options.steps, self._options.best_step
        for number in steps[: -self._options.keep]:
            if number != best:
                folder.remove(directory, number)

    @contextlib.contextmanager
    def _explaining(self, number: int) -> Any:
        try:
            yield
        except Exception as error:
            self._saved = -1, {}
            if self._is_first:
                path = folder.partial_path_of(self._options.path, number)
                shutil.rmtree(path, ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint of step {number} could not be written to"
                f" {self.directory!r}; those before it are whole."
                f" {error!s:.400}"  # TensorStore's has its whole configuration
            ) from error

    def wait(self) -> None:
        """Wait until the last checkpoint is committed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def check_preempted(self, number: int) -> None:
        """Raise on all of several processes if one of them was sent SIGTERM.

        Also report a step to the launcher, which waits for one before it regrows.
        """
        heartbeat.notify_launcher(heartbeat.STEP)
        if self._several and is_preempted(number):
            raise Terminated(self._options.exit_code)
