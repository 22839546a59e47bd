"""`Loop`: place batches, dispatch calls, record their results, evaluate and save."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import jax

from towerjax.data.batch_rows import Signature
from towerjax.data.feed import Batches
from towerjax.data.placer import PlacedBatch
from towerjax.data.stream import Source, Stream
from towerjax.jaxprs.flops import Flops
from towerjax.loop.checkpoint.record import CheckpointRecord
from towerjax.loop.checkpoint.resume import record_of
from towerjax.loop.checkpoint.saving import Saving
from towerjax.loop.evaluate import evaluate
from towerjax.loop.history import History, HistoryLog, LogMark
from towerjax.loop.options import RunOptions, WithState
from towerjax.loop.progress import Progress
from towerjax.loop.replays import Replays
from towerjax.loop.stopping import Point, Watch, rules_of
from towerjax.loop.throughput import Done, Throughput
from towerjax.loop.writers import Record, Writers
from towerjax.mesh.interrupt import InterruptGuard, Terminated
from towerjax.mesh.peaks import peak_flops_of_all
from towerjax.step.run.step_flags import send_to_host
from towerjax.step.state.checks import is_computed, place_others
from towerjax.step.state.next_state import NONE
from towerjax.step.state.nonfinite import (
    NonFiniteError,
    explain_params,
    integers_text,
    nonfinite_leaves,
)
from towerjax.step.state.train_state import TrainState, state_layout, step_number
from towerjax.step.step import Step
from towerjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Call:
    """A dispatched call of the step, which may still be running."""

    metrics: dict[str, jax.Array]
    step_flag: jax.Array  # see `Step.dispatch`
    placed: PlacedBatch
    wait_s: float = 0.0


class Loop:
    """A run in progress: its position, calls in flight, and log of finished calls."""

    def __init__(
        self,
        step: Step,
        options: RunOptions,
        point: Point,
        batches: Iterable[PyTree],
        guard: InterruptGuard,
        *,
        recovery: Any = None,
        after: "Loop | None" = None,
    ) -> None:
        """Prepare a run, or with ``after`` the next attempt of one.

        ``recovery`` is the run's `Recovery`, if it goes on without lost processes.
        """
        self.guard = guard
        self.point = point
        self._batches = batches
        self._step = step
        self._options = options
        self._recovery = recovery
        self._after = after
        # The number of the run's last step. It stays the same if a checkpoint is
        # resumed.
        self._end = None if options.steps is None else point.number + options.steps
        self._raises = step.options.on_nonfinite == "raise"
        self._saving: Saving | None = None
        every = options.replay_every
        self._replays = None if every is None else Replays(step, every)
        self._writers = Writers()
        self._has_begun = False
        self._source: Any = None  # a `Source`, once the loop has begun
        self._log = HistoryLog()
        if after is not None:
            self._end = after._end
            self._log = after._log
        self._in_flight: collections.deque[Call] = collections.deque()
        # The number of recorded steps whose hooks have not been called.
        self._without_hooks = 0
        # Of each compiled program, by its batch's signature.
        self._flops: dict[Signature, Flops] = {}

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Restore the newest checkpoint, if there is one, and show the progress."""
        options = self._options
        point = self.point
        batches = self._batches
        self._source = Source(batches)
        self._first = point.number
        if self._recovery is not None:
            self._recovery.begin()
        if options.checkpointer is not None:
            self._saving = Saving(
                options.checkpointer,
                self._step,
                point.state,
                self._source,
                stack,
                alone=self._recovery is not None and self._recovery.saves_alone,
            )
            is_again = self._after is not None
            is_elsewhere = is_again and not self._saving.is_alone
            self._saving.resume(point, or_equal=is_elsewhere, is_again=is_again)
        if self._recovery is not None:
            self._recovery.cut_history()
        placement = self._step.strategy.placement
        peak = peak_flops_of_all(placement, options.peak_flops)
        throughput = Throughput(options.per_second, peak)
        if self._after is None:
            self._log = HistoryLog(throughput)  # its clock starts here
        with self.guard:
            self._progress = stack.enter_context(
                contextlib.closing(
                    Progress(options.progress, point.number, self._end, self._source)
                )
            )
        is_endless = isinstance(batches, Batches) and not batches.epochs
        if options.steps is None and is_endless:
            self._progress.note(
                "endless: tj.batches(..., epochs=None) without steps=...; Ctrl-C"
                " ends it, with error.state"
            )
        self._after = None
        if self._saving is not None and self._saving.is_resumed:
            text = f"goes on after step {point.number}, from its checkpoint"
            self._progress.note("; ".join([text, *self._saving.differs]))
        if self._saving is not None and self._saving.note:
            self._progress.note(self._saving.note)
        self._has_begun = True

    def again(
        self, step: Step, options: RunOptions, batches: Iterable[PyTree], state: Any
    ) -> "Loop":
        """Make the loop of the next attempt of this run, on other devices."""
        point = Point(state, Watch(rules_of(options.early_stopping)))
        return Loop(
            step,
            options,
            point,
            batches,
            self.guard,
            recovery=self._recovery,
            after=self,
        )

    def leave(self) -> None:
        """Drop the state and calls in flight, and close writers.

        The run goes on in another loop, whose state needs the memory.
        """
        self.point.state = None  # type: ignore[assignment]
        self._in_flight.clear()
        self._writers.close()
        if self._source is not None:
            self._source.restart()

    def wait(self) -> None:
        """Wait for the steps so far."""
        self._fetch(0)

    def record(self) -> CheckpointRecord:
        """Return the record of the run after the steps so far."""
        return record_of(self._step, self.point, self._source)

    def mark(self) -> LogMark:
        """Mark how far the history has come."""
        return self._log.mark()

    def cut(self, mark: LogMark | None) -> None:
        """Forget what was added to the history after a mark; None forgets all."""
        self._log.cut(mark or LogMark(0, 0, 0, Done()))

    @property
    def is_resumed(self) -> bool:
        """Whether this attempt began with a checkpoint."""
        return self._saving is not None and self._saving.is_resumed

    @property
    def step(self) -> Step:
        """The step that the loop calls."""
        return self._step

    @property
    def source(self) -> Source:
        """The batches of the run."""
        return self._source

    @property
    def _recorded(self) -> int:
        """The number of the last step in the history."""
        return self.point.number - len(self._in_flight)

    def run(self) -> None:
        """Do all steps and evaluations; save at the end, at SIGTERM and at Ctrl-C."""
        try:
            self._run()
        except BaseException as error:
            if self._recovery is not None and isinstance(error, Exception):
                raise  # the run may go on
            self.guard.finish()
            try:
                self._save_at_stop(error)
            finally:
                self.guard.ended = True
            raise

    def _run(self) -> None:
        placement = self._step.strategy.placement
        point = self.point
        self._writers.open(self._options.writers, point.number, placement)
        depth = 0 if self._source.prefetches else self._options.prefetch
        place = self._step.place_batch
        end = self._end
        most = None if end is None else max(end - point.number, 0)
        with contextlib.closing(self._source.stream(place, depth, most=most)) as stream:
            while True:
                self._do_what_is_due()
                # A rule of early stopping may end the run even before its first step,
                # if a checkpoint was resumed.
                if point.watch.stopped is not None:
                    break
                placed, wait_s = self._next_batch(stream)
                if placed is None:
                    break
                self._dispatch(placed, wait_s, stream)
                self.guard.raise_missed()
                if self._saving is not None:
                    self._saving.check_preempted(point.number)
        self._fetch(0)
        self.guard.raise_missed()
        self._check_enough()
        self._check_params()
        self._source.settle()
        if self._log.evaluated(point.number) is None:
            self._evaluate()
        self._save(last=True)
        self._writers.close()
        self._writers.raise_failure()

    def _do_what_is_due(self) -> None:
        """Evaluate and save if one is due; an evaluation may stop the run.

        This is called before the first step, too.
        """
        if self.point.is_evaluation_due:
            self._evaluate()
        if self._recovery is not None:
            self._recovery.at_step()
        if self.point.is_saving_due:
            self._save()

    def _next_batch(self, stream: Stream) -> tuple[PlacedBatch | None, float]:
        """Take the next batch, and measure the seconds that it was waited for.

        The batch is None at the end of the data.
        """
        start_s = time.perf_counter()
        try:
            placed = next(stream, None)
        except Exception:  # raised again, after the steps before it are recorded
            self._fetch(0)
            raise
        return placed, time.perf_counter() - start_s

    def _dispatch(self, placed: PlacedBatch, wait_s: float, stream: Stream) -> None:
        point = self.point
        options = self._options
        after = self.point.number + 1
        self._fetch(options.in_flight - 1)
        if placed.signature not in self._flops:
            self._compile(placed)
        if self._replays is not None and self._replays.is_due(after):
            self._replay(self._replays, placed)
        with jax.profiler.StepTraceAnnotation("train", step_num=after), self.guard:
            point.state, metrics, step_flag = self._step.dispatch(point.state, placed)
            self._in_flight.append(Call(metrics, step_flag, placed, wait_s))
            send_to_host((metrics, step_flag), placed.placement)
            every = None if self._saving is None else self._saving.options.every
            point.advance(options.eval_every, every)
            self._source.use(stream.get_state())
        if any(after % hook.every == 0 for hook in options.with_state):
            self._fetch(0)

    def _compile(self, placed: PlacedBatch) -> None:
        start_s = time.perf_counter()
        self._progress.phase(self.point.number + 1, "compiling")
        folder = None if self._saving is None else self._saving.directory
        asked = {"audit": self._options.audit, "folder": folder}
        prepared = self._step.prepare(self.point.state, placed, **asked)
        if self._recovery is not None:
            self._recovery.after_compiling()
        if self._saving is not None and (other := self._saving.compare_programs()):
            self._progress.note(f"goes on as another experiment: {other}")
        if prepared.note:
            self._progress.note(prepared.note)
        self._log.aside_s += prepared.seconds
        self._log.compile_s += time.perf_counter() - start_s - prepared.seconds
        self._flops[placed.signature] = prepared.program.flops

    def _replay(self, replays: Replays, placed: PlacedBatch) -> None:
        """Replay the next step; raise if devices disagree."""
        self._fetch(0)
        start_s = time.perf_counter()
        self._progress.phase(self.point.number + 1, "replaying")
        report = replays.replay(self.point.state, placed)
        self._log.aside_s += time.perf_counter() - start_s
        if not report.agrees:
            if self._saving is not None:
                self._saving.wait()
            raise replays.error(report, self._options.checkpointer)

    def _save(self, *, last: bool = False) -> None:
        """Begin to save the state; with ``last`` wait until it is saved."""
        if self._saving is None:
            return
        self._fetch(0)  # records all steps so far, and raises if one was refused
        self._saving.wait()
        copy = None if self._recovery is None else self._recovery.agree_on_copy()
        with self.guard:
            self.point.is_saving_due = False
            evaluation = self._log.evaluated(self.point.number)
            self._saving.save(self.point, evaluation or {}, copy and copy.state)
        if last:
            self._saving.wait()

    def _save_at_stop(self, error: BaseException) -> None:
        """Save the state if SIGTERM or Ctrl-C ends the run; raise if saving fails."""
        # After Ctrl-C nothing is saved by several processes, because they may have
        # stopped at different steps.
        is_one = self._step.strategy.placement.num_processes == 1
        is_ctrl_c = isinstance(error, KeyboardInterrupt) and is_one
        if self._saving is None or not (is_ctrl_c or isinstance(error, Terminated)):
            return
        try:
            if self._raises and self._log.skipped:
                raise self._step.refused(self._log.skipped[0])
            self._save(last=True)
        except Exception as failure:
            failure.add_note(f"The run was ending because of {error!r}.")
            raise failure from error
        where = f"step {self.point.number} in {self._saving.directory!r}"
        error.add_note(
            f"The state after {where} is saved. Start the same run again to go on from"
            " there."
        )

    def _fetch(self, allowed: int) -> None:
        """Wait for the oldest calls and record them, until ``allowed`` are left."""
        while len(self._in_flight) > allowed:
            with self.guard.holding_sigterm():
                self._process_oldest()

    def _process_oldest(self) -> None:
        placed = self._in_flight[0].placed
        row, refused = self._record_oldest()
        self._writers.raise_failure()
        number = self._recorded
        if refused is not None and self._raises:
            raise self._located(refused, placed)
        for hook in self._options.hooks:
            if not isinstance(hook, WithState):
                hook(number, row)
            elif number % hook.every == 0:
                after = hook.function(number, self.point.state, row)
                if isinstance(after, TrainState):
                    raise ValueError(
                        f"{hook} returned a state, but a hook cannot change the state"
                        " of a run. Run in pieces and change the state in between:"
                        f" state, _ = tj.run(step, state, batches, steps={hook.every})."
                    )
        self._without_hooks = 0
        if self._recovery is not None:
            self._recovery.after_step(number)
        self._progress.step(number, row, self._log.steps_per_second)

    def _located(self, number: int, placed: PlacedBatch) -> NonFiniteError:
        """Make the error of a refused step, with the tower and leaf at fault.

        The step's batch is run again with the present parameters. The refused step did
        not change them, but later steps may have. If towers train alone between merges,
        the error is found when the batch is no longer there, and nothing is located.
        """
        state = self.point.state
        if number != self._recorded:
            return self._step.refused(number)
        try:
            locations = self._step.locate(state, placed, number=number)
            outcome = "" if locations else ": all values were finite"
            after = f"after step {step_number(state)}{outcome}"
            note = f"To find this, the batch was run again {after}."
            of_loss = [x.kind for x in locations if x.part == "loss"]
            has_nan = any(kind != "infinity" for kind in of_loss)
            if has_nan and (integers := integers_text(placed.arrays)):
                why = "a label that is not a class makes the loss NaN"
                note += f" Its integers: {integers}; {why}."
        except RuntimeError as failure:  # such as too little memory
            locations = ()
            note = f"The search for the location failed: {failure}"
        error = self._step.refused(number, locations)
        error.add_note(note)
        explain_params(error, state)
        return error

    def _record_oldest(self) -> tuple[dict[str, Any], int | None]:
        """Wait for the oldest call and record its results.

        Returns its metrics, and its step number if the step was refused.
        """
        call = self._in_flight[0]
        metrics, step_flag = jax.device_get((call.metrics, call.step_flag))
        # [()] makes a NumPy scalar of an array ().
        row = {name: x[()] for name, x in metrics.items()}
        is_told = self._step.options.on_nonfinite != "ignore" and step_flag != NONE
        refused = int(step_flag) % 2**32 if is_told else None
        time_s = time.time()
        with self.guard:  # a signal between these lines would lose a record
            number = self._recorded + 1
            examples = call.placed.num_examples
            flops = self._flops[call.placed.signature]
            self._log.add(number, row, refused, examples, call.wait_s, flops)
            self._in_flight.popleft()
            self._without_hooks += 1
            rates = self._log.throughput.now() if self._writers.are_open else {}
            self._writers.write(Record("train", number, time_s, row, rates))
        return row, refused

    def _evaluate(self) -> None:
        options = self._options
        point = self.point
        if options.evaluate is None or options.eval_batches is None:
            return
        self._fetch(0)
        start_s = time.perf_counter()
        number = point.number
        values = evaluate(
            options.evaluate,
            self._state_to_evaluate(),
            options.eval_batches,
            prefetch=options.prefetch,
        )
        with self.guard:
            self._log.evaluations.append((number, values))
            self._writers.write(Record("eval", number, time.time(), values))
            point.watch.add(number, values)
            point.is_evaluation_due = False
            if self._saving is not None and self._saving.is_best(number, values):
                point.is_saving_due = True
        self._writers.raise_failure()
        self._log.aside_s += time.perf_counter() - start_s
        self._progress.evaluation(number, values, point.watch.stopped)

    def _state_to_evaluate(self) -> TrainState:
        """Choose the run's state, or what ``eval_params`` makes of it."""
        state = self.point.state
        if self._options.eval_params is None:
            return state
        other_params = self._options.eval_params(state)
        if isinstance(other_params, TrainState):
            return other_params
        placement = self._step.strategy.placement
        at = state_layout(self._step.strategy)
        params = place_others(
            other_params, placement, at.params, "params", other_params
        )
        return dataclasses.replace(state, params=params)

    def _check_enough(self) -> None:
        done = self._log.num_steps
        end = self._end
        number = self.point.number
        if self.point.watch.stopped is not None:
            return
        is_resumed = self._saving is not None and self._saving.is_resumed
        if is_resumed and not done and (end is None or end <= number):
            passed = end is not None and end < number
            later = f", and this run ends after step {end}" if passed else ""
            finished = f"nothing was left to do: finished after step {number}"
            self._progress.note(finished + later)
            return
        if done == 0:
            raise ValueError(
                "batches is empty. An iterator is empty after its first use, so make a"
                " new one. error.batches is empty if the run had done all its steps, or"
                " if the error had ended a generator."
            )
        if end is not None and number < end:
            raise ValueError(
                f"The run should end after step {end}, but batches ended after step"
                f" {number}. Use tj.batches(..., epochs=None) for endless data, or"
                " leave steps out to stop when the data ends."
            )

    def _check_params(self) -> None:
        """Raise if the last update made parameters that are not finite.

        The next step would find it, but there is none. A `Checkpointer` looks itself.
        """
        options = self._step.options
        if not self._raises or self._saving is not None:
            return
        if names := nonfinite_leaves("params", self.point.state.params):
            number = self.point.number
            raise NonFiniteError(number, guard=options.guard, updated=names)

    def history(self) -> History:
        """Make the history so far."""
        placement = self._step.strategy.placement
        watch = self.point.watch
        return self._log.history(self._recorded, placement, watch.stopped)

    def attach_results(self, error: Any) -> None:
        """Attach state, batches and history to an exception that ends the run."""
        if not self._has_begun:
            error.state = self.point.state
            error.batches = self._batches
            error.history = self.history()
            return
        with contextlib.suppress(Exception):
            while self._in_flight:
                self._record_oldest()
        state = self.point.state
        error.state = state if is_computed(state) else None
        self._writers.close()
        self._writers.explain(error)
        error.history = self.history()
        is_lost = error.state is None
        error.batches = self._source.settle() if is_lost else self._source.rest()
        has_begun = is_lost or self.point.number != self._first
        sentences = self._about_state(is_lost=is_lost) if has_begun else []
        sentences += [
            f"{hook} was due, but was not called or did not finish"
            for hook in self._hooks_left_out()
        ]
        if sentences:
            sentences += ["error.history has the run's metrics."]
            error.add_note(". ".join(sentences))

    def _about_state(self, *, is_lost: bool) -> list[str]:
        """Write sentences for an exception's note: which state it holds."""
        is_last = self._recorded == self._end
        goes_on = ", the last" if is_last else "; go on from it, with error.batches"
        about = f"error.state is the state after step {self.point.number}{goes_on}"
        if is_lost:
            about = (
                "The state is lost, because the devices failed in a step to which it"
                " was donated (donate=False keeps it). Go on from a checkpoint"
            )
        if self._step.strategy.placement.num_processes > 1:
            return [about, "Processes may have stopped after different steps"]
        return [about]

    def _hooks_left_out(self) -> list[WithState]:
        """List the `WithState` hooks that were due but have not been called."""
        first = self._recorded - self._without_hooks + 1
        unhooked = range(first, self.point.number + 1)
        return [
            hook
            for hook in self._options.with_state
            if any(number % hook.every == 0 for number in unhooked)
        ]
