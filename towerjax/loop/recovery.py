"""Go on with a run in the processes that are left, from the last copy of its state."""

import contextlib
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.data.distribute import DistributedDataset
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.checkpoint.record import CheckpointRecord
from towerjax.loop.checkpoint.resume import go_on
from towerjax.loop.history import LogMark
from towerjax.loop.loop import Loop
from towerjax.loop.meetings import AgreedLossError, Meetings, Pace, PeerFailedError
from towerjax.loop.options import RunOptions
from towerjax.loop.stopping import Point
from towerjax.loop.writers import as_json
from towerjax.mesh import live
from towerjax.mesh.devices import owners_of
from towerjax.mesh.interrupt import InterruptGuard, Terminated
from towerjax.mesh.lines import print_line
from towerjax.mesh.live import named
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import copy_to_host
from towerjax.step.state.train_state import TrainState, state_layout
from towerjax.step.step import Step
from towerjax.towers.strategies import Strategy, on_those_left
from towerjax.types import PyTree
from towerjax.types.refusals import a_type
from towerjax.types.tables import number_of


@dataclasses.dataclass(frozen=True)
class RunCopy:
    """A run as it was after a step: a checkpoint whose folder is memory.

    Attributes:
      record: The record that a checkpoint has.
      state: The state, on the host; None if it is in the newest checkpoint alone.
      is_saving_due: Whether a checkpoint was due.
    """

    record: CheckpointRecord
    state: TrainState | None
    is_saving_due: bool


class Recovery:
    """A run that goes on if a process is lost, in one attempt after another.

    Attributes:
      loop: The loop of the attempt that runs, or has run.
      last: The last copy on which all processes have agreed.
    """

    def __init__(
        self,
        step: Step,
        options: RunOptions,
        batches: Iterable[PyTree],
        point: Point,
        guard: InterruptGuard,
    ) -> None:
        self._given = step, options, batches
        self._guard = guard
        self._shapes = jax.eval_shape(lambda x: x, point.state)
        placement = step.strategy.placement
        # What is split over devices would take the memory of each to copy.
        self._is_in_memory = step.strategy.state == "mirrored" and not placement.specs
        self._meetings = Meetings(placement.processes.numbers)
        self._active = self._meetings.members
        self._pace = Pace(options.copy_every)
        self._next = point.number
        self._copies_next = True
        self.last: RunCopy | None = None
        # By the number of a saved or copied step: how far the history had come.
        self._marks = dict[int, LogMark]()
        # When the last loss was noticed, and whether a line has told how long it took.
        self._noticed_s: float | None = None
        self._is_told = True
        self._is_told_to_end = False  # whether one of the processes got SIGTERM
        self._is_ending = False  # whether all save because of it
        self.loop = Loop(step, options, point, batches, guard, recovery=self)

    # What the driver does.

    def run(self) -> None:
        """Run to the end, in the processes that are left."""
        self._guard.hold_sigterm()
        moves = False
        while True:
            try:
                if moves:
                    self._move()
                with contextlib.ExitStack() as stack:
                    self.loop.begin(stack)
                    self.loop.run()
                    of_all = self._meet({"is_done": True})
                live.leave_out(set(of_all) - {*self._active})
                return
            except Exception as error:
                self._noticed_s = time.monotonic()
                self._is_told = False
                self._is_ending = False
                self._agree_on_loss(error)
                moves = True

    def _agree_on_loss(self, error: Exception) -> None:
        """Meet after an error; raise it unless all agree that a process was lost."""
        if isinstance(error, AgreedLossError):
            return
        cause = None
        if not isinstance(error, PeerFailedError):  # of which all have heard
            text = f"{type(error).__name__}: {error!s:.400}"
            try:
                self._meet({"failed": text, "follows": _may_follow(error)})
            except AgreedLossError:
                return
            except PeerFailedError as failure:
                if _may_follow(error):
                    cause = error
                    error = failure
        self._guard.finish()
        self._guard.ended = True
        raise error from cause

    def _meet(self, told: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Meet the others; raise on all if one was lost, has failed, or is to end."""
        ends = self._guard.is_told_to_end or self._is_told_to_end
        told |= {"ends": ends and not self._is_ending}
        if self._active and jax.process_index() == self._active[0]:
            at = self.loop.point.number
            told |= {"next": self._pace.next_meeting(at, time.monotonic())}
        of_all = self._meetings.meet(told)
        if lost := set(self._active) - of_all.keys():
            raise AgreedLossError(lost)
        me = jax.process_index()
        failed = {p: x for p, x in of_all.items() if "failed" in x and p != me}
        for process in sorted(failed, key=lambda p: failed[p]["follows"])[:1]:
            text = failed[process]["failed"]
            raise PeerFailedError(
                f"process {process} failed with {text.rstrip('.')}. If a process came"
                " too late to a step, because of its loader or its compiler, give the"
                " others more time: tj.cluster.initialize(recoverable=True,"
                " collective_timeout_s=...)."
            )
        self._next, self._copies_next = of_all[self._active[0]]["next"]
        if any(x["ends"] for x in of_all.values()) and "failed" not in told:
            self._is_told_to_end = True
            self._is_ending = True
            self._guard.forget_sigterm()
            raise Terminated(self._exit_code)
        return of_all

    @property
    def _exit_code(self) -> int:
        saving = self._given[1].checkpointer
        return 1 if saving is None else saving.exit_code

    def _move(self) -> None:
        """Make the loop of the next attempt, on the devices that are left."""
        self.loop.leave()
        placement = on_those_left(self._given[0].strategy).placement
        lost = {*self._active} - {*live.numbers_left()}
        self._active = tuple(sorted(owners_of(placement.devices)))
        if jax.process_index() not in self._active:
            self._wait_as_spare()
        if placement.processes.is_first:
            self._tell(lost, placement)
        step, options, batches = on_devices_left(*self._given)
        # If the run goes back to its start, the lines of its files are its own.
        writers = tuple(map(_replacing, options.writers))
        options = dataclasses.replace(options, writers=writers)
        state = self._state_to_fill(step.strategy)
        self.loop = self.loop.again(step, options, batches, state)

    def _tell(self, lost: Iterable[int], placement: Placement) -> None:
        """Print who was lost, and where the others go on."""
        spares = {*self._meetings.members} - {*self._active}
        waiting = f"; {named(spares)} left over and waits" if spares else ""
        store = "the newest checkpoint"
        if self._is_in_memory and self.last is not None:
            store = f"the copy after step {self.last.record.step}"
        print_line(
            f"{named(lost)} lost; goes on from {store} on"
            f" {number_of(len(placement.devices), 'device')}{waiting}"
        )

    def _wait_as_spare(self) -> None:
        """Come to the meetings of the others, until they are done or lose a process."""
        while True:
            of_all = self._meet({"is_spare": True})
            if all("is_done" in of_all[process] for process in self._active):
                print_line(
                    f"process {jax.process_index()} was left over, and ends with the"
                    " run of the others"
                )
                raise SystemExit(0)

    def _state_to_fill(self, strategy: Strategy) -> TrainState:
        """Make a state on the strategy's devices, whose values do not matter."""
        if self.last is not None and self.last.state is not None:
            return self.last.state
        shardings = strategy.placement.shardings(
            state_layout(strategy), self._shapes, self._shapes.params
        )

        def zeros() -> TrainState:
            return jax.tree.map(jnp.zeros_like, self._shapes)

        return jax.jit(zeros, out_shardings=shardings)()

    # What the loop asks.

    @property
    def saves_alone(self) -> bool:
        """Whether the first process alone writes checkpoints, from the last copy."""
        return self._is_in_memory

    def begin(self) -> None:
        """Make the first copy; or go on from the last one, if it is in memory."""
        loop = self.loop
        last = self.last
        if last is None:
            self._refuse_what_cannot_go_on()
            self.agree_on_copy()
            loop.point.is_saving_due |= not self._is_in_memory
        elif last.state is not None:
            step = loop.step
            told = step.strategy.placement.processes.call_on_first(
                lambda: [as_json(dataclasses.asdict(last.record)), last.is_saving_due]
            )
            record = CheckpointRecord.of_fields(told[0])
            go_on(step, loop.point, loop.source, step.place(last.state), record)
            loop.point.is_saving_due = told[1]

    def cut_history(self) -> None:
        """Forget what the history has after the point from which the loop goes on."""
        if self._noticed_s is None:
            return
        if not self._is_in_memory and not self.loop.is_resumed:
            raise CheckpointError(
                "A process was lost before the first checkpoint was complete, and the"
                " state was split over devices. Start the job again."
            )
        self.loop.cut(self._marks.get(self.loop.point.number))

    def _refuse_what_cannot_go_on(self) -> None:
        """Raise, before the first step, if the run could not go on after a loss."""
        step, options, batches = self._given
        problem = ""
        source = self.loop.source
        if self._active[0] != 0:
            problem = "its towers must be on devices of process 0, too"
        elif not self._is_in_memory and options.checkpointer is None:
            problem = (
                "its state is split over devices, so a lost process takes its shards"
                " with it. Pass a tj.Checkpointer, from which the others go on"
            )
        elif not (source.has_cursor or source.is_reproducible):
            problem = (
                "its batches cannot go back. Pass tj.batches(...), a list, or an"
                " iterator with get_state and set_state. If"
                " strategy.distribute_dataset takes a function of the context, that"
                " must return Grain's ElasticIterator, whose global batches do not"
                " depend on the number of processes"
            )
        for name, x in (("step", step), ("evaluate", options.evaluate)):
            try:
                if isinstance(x, Step):
                    x.plan.on(x.strategy)
                elif x is not None:
                    raise ValueError(f"{name} is {a_type(x)}, which cannot be moved")
            except ValueError as error:
                problem = problem or f"{error}"
        if problem:
            raise ValueError(
                f"The job is recoverable, but this run could not go on without a lost"
                f" process: {problem}. Or leave recoverable out, and start lost jobs"
                " again with towerjax launch --restarts."
            )

    def at_step(self) -> None:
        """Meet the others and copy the state, if that is due before the next step."""
        point = self.loop.point
        is_due = point.number >= self._next
        copies = self._copies_next and len(self._meetings.members) > 1
        if point.is_saving_due or (is_due and copies):
            self.agree_on_copy()
        elif is_due:
            self._meet({})

    def agree_on_copy(self) -> RunCopy:
        """Copy the run as it is now, and agree with the others that all have done so.

        Return the last copy if it is of this step.
        """
        loop = self.loop
        number = loop.point.number
        if self.last is not None and self.last.record.step == number:
            return self.last
        loop.wait()
        start_s = time.monotonic()
        record = loop.record()
        state = None
        if self._is_in_memory:
            state = jax.tree.map(copy_to_host, loop.point.state)
        self._pace.copied_s = time.monotonic()
        self._pace.copy_s = self._pace.copied_s - start_s
        new = RunCopy(record, state, loop.point.is_saving_due)
        mark = loop.mark()
        self._meet({})
        self.last = new
        self._marks[number] = mark
        return new

    def after_compiling(self) -> None:
        """Wait for the others: a collective does not wait as long as compilers take."""
        self._meet({})

    def after_step(self, number: int) -> None:
        """Print how long it took after a loss until a step was done."""
        if self._noticed_s is not None and not self._is_told:
            self._is_told = True
            if jax.process_index() == self._active[0]:
                took_s = time.monotonic() - self._noticed_s
                print_line(
                    f"step {number} was done {took_s:.1f} s after the loss was noticed"
                )


def _replacing(writer: Any) -> Any:
    """Let a writer cut off the lines of an earlier run."""
    if not hasattr(writer, "replace"):
        return writer
    return dataclasses.replace(writer, replace=True)


def _may_follow(error: Exception) -> bool:
    """Return whether an error may only follow from that of another process."""
    return isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)


def on_devices_left(
    step: Step, options: RunOptions, batches: Iterable[PyTree]
) -> tuple[Step, RunOptions, Iterable[PyTree]]:
    """Put what `run` was given on the devices that are left."""
    evaluate = options.evaluate
    if isinstance(evaluate, Step):
        evaluate = _moved_step(evaluate)
    moved = _moved_step(step)
    if moved is step and evaluate is options.evaluate:
        return step, options, batches
    placement = moved.strategy.placement
    eval_batches = _moved_source(options.eval_batches, placement)
    options = dataclasses.replace(options, evaluate=evaluate, eval_batches=eval_batches)
    return moved, options, _moved_source(batches, placement)


def _moved_step(step: Step) -> Step:
    strategy = on_those_left(step.strategy)
    return step if strategy is step.strategy else step.on(strategy)


def _moved_source(source: Any, placement: Placement) -> Any:
    """Put batches on other devices, or let a function make such batches."""
    if isinstance(source, DistributedDataset):
        return source.on(placement)
    if callable(source) and not isinstance(source, Iterable):
        return lambda: _moved_source(source(), placement)
    return source
