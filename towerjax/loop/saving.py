"""How is a run saved, and where does it go on? What the loop asks of checkpoints."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from towerjax.data.ledger import Ledger
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.checkpoint.record import (
    CheckpointRecord,
    decoded_cursor,
    encoded_cursor,
)
from towerjax.loop.checkpoint.saver import Checkpointer, Saver, left_of
from towerjax.loop.options import LoopOptions
from towerjax.mesh.cluster import heartbeat
from towerjax.mesh.interrupt import Terminated
from towerjax.mesh.processes import asked_to_end
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.state import TrainState


class Saving:
    """The checkpoints of a run, and the one it began with; ``stack`` ends them."""

    def __init__(
        self,
        options: Checkpointer,
        step: CompiledStep,
        state: TrainState,
        ledger: Ledger,
        stack: contextlib.ExitStack,
    ) -> None:
        self._options, self._step, self._ledger = options, step, ledger
        self._check_batches()
        encoded_cursor(ledger.cursor)
        self._saver = Saver(options, step, state, stack)
        self.resumed: CheckpointRecord | None = None
        self._before = int(state.step)
        self._is_best = False

    def _check_batches(self) -> None:
        ledger, way = self._ledger, self._options.batches
        if way == "cursor" and not (ledger.has_cursor or ledger.can_be_counted):
            raise CheckpointError(
                "Checkpointer(batches='cursor'): these batches cannot say where they"
                " are, so that a resumed run could go on there, and those that"
                " distribute_dataset has of a function never can. Say batches='count'"
                " if they come in the same order each time, or 'anew'; or pass"
                " tj.batches(...) itself, an iterator with get_state and set_state, or"
                " a list."
            )

    def resume(
        self, state: TrainState, options: LoopOptions
    ) -> tuple[TrainState, LoopOptions]:
        """The state of the newest checkpoint, if it is beyond the one passed."""
        start = int(state.step)
        record = self._saver.newest_after(state)
        if record is None:
            return state, options
        left = left_of(options.steps, start, record)
        state = self._options.restore(self._step, state, number=record.step)
        self._move(record)
        self._step.expect_batch_rows(record.batch_rows)
        self.resumed, self._before = record, record.step
        return state, dataclasses.replace(options, steps=left, may_end=True)

    def _move(self, record: CheckpointRecord) -> None:
        used, cursor = record.batches["used"], record.batches["cursor"]
        if self._options.batches == "anew":
            return
        told = self._options.batches == "cursor" and self._ledger.has_cursor
        if told and cursor is None:
            raise CheckpointError(
                f"These batches can be told where to go on, but the checkpoint of step"
                f" {record.step} was saved with others, which could not. Pass those; or"
                f" say batches='count', to leave out the first {used}."
            )
        self._ledger.go_to(used, decoded_cursor(cursor) if told else None)

    def is_due(self, number: int) -> bool:
        """Is it time to save?"""
        every, before = self._options.every or number + 1, self._before
        self._before = number
        return number // every > before // every or self._is_best

    def saw(self, number: int, values: Mapping[str, Any]) -> None:
        """Note an evaluation."""
        self._is_best = self._saver.saw(number, values)

    def save(self, state: TrainState, number: int, stopping: Mapping[str, Any]) -> None:
        """Begin to save, unless this step was saved; see `Saver`."""
        step, ledger = self._step, self._ledger
        cursor = ledger.cursor if ledger.has_cursor else None
        place = {
            "used": ledger.used,
            "cursor": None if cursor is None else encoded_cursor(cursor),
        }
        self._saver.save(
            state,
            number,
            batches=place,
            batch_rows=tuple(step.batch_rows),
            stopping=stopping,
        )
        self._is_best = False

    def check_asked_to_end(self, number: int) -> None:
        """Raise on all of several processes if one of them was sent SIGTERM.

        A launcher is told that a step was begun, and that the run can be asked to end.
        """
        heartbeat.tell(heartbeat.STEP)
        if self._step.strategy.placement.num_processes > 1 and asked_to_end(number):
            raise Terminated(self._options.exit_code)

    def may_stop(self, error: BaseException) -> bool:
        """Are all processes after the same step?"""
        return isinstance(error, Terminated) or jax.process_count() == 1

    def describe(self, number: int) -> str:
        """The checkpoint in words."""
        where = str(self._options.path)
        return f"step {number} in {where!r}. The same run again goes on from there."

    def wait(self) -> None:
        """Until the last checkpoint counts."""
        self._saver.wait()
