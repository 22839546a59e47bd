"""The loop: batches in, steps dispatched, metrics kept, evaluated now and then."""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from typing import Any, TypeAlias

import jax

from towerjax.input import feed
from towerjax.input.ledger import Ledger
from towerjax.input.placer import PlacedBatch
from towerjax.loop.evaluate import Batches, evaluate_all
from towerjax.loop.history import History, HistoryLog, RunSummary
from towerjax.loop.interrupt import InterruptGuard
from towerjax.loop.keep import KeptState, is_whole
from towerjax.loop.options import Evaluation, LoopOptions
from towerjax.loop.progress import Progress, choose_display
from towerjax.loop.records import Record, Writer, Writers, check_writers, opened
from towerjax.loop.steps import EvaluationStep, LoopStep
from towerjax.loop.stopping import Best, EarlyStopping, Watch
from towerjax.placement import Placement
from towerjax.processes import require_same
from towerjax.state import TrainState
from towerjax.types import PyTree
from towerjax.update import NonFiniteError, is_refused

Hook: TypeAlias = Callable[[int, dict[str, Any]], None]
"""``(step number, metrics)``: called for every step, with host values."""


def run(
    step: LoopStep,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int | None = None,
    evaluate: EvaluationStep | None = None,
    eval_batches: Batches | None = None,
    eval_every: int | None = None,
    early_stopping: EarlyStopping | None = None,
    best: Best | None = None,
    steps_per_call: int = 1,
    prefetch: int = 2,
    in_flight: int = 2,
    keep_every: int | None = None,
    progress: bool | None = None,
    hooks: Sequence[Hook] = (),
    writers: Sequence[Writer] = (),
) -> tuple[TrainState, History]:
    """The state after the steps, and the history of every one of them.

    Batches are placed by a thread while the devices work, and calls are dispatched
    without waiting for their results, up to ``in_flight`` of them. Step numbers
    count the steps that the state has done, so that they go on where a restored
    state stopped.

    Args:
      step: As `build_train_step` returns it, or another `LoopStep`.
      state: Where to start; donated, unless the step was built otherwise.
      batches: Global batches, e.g. of `batches`, or a `DistributedDataset`; may be
        endless with ``steps``. No more than ``steps`` are taken (a distributed data
        set takes some in advance from its source).
      steps: How many steps to do; None goes to the end of the data.
      evaluate: As `build_eval_step` returns it, or another `EvaluationStep`.
      eval_batches: The data to evaluate on, all of it each time: something that can
        be gone through again, or a function that returns an iterable.
      eval_every: Evaluate after each step whose number is a multiple of this, and
        at the end; None only at the end. With several steps a call, after the call
        that reaches the multiple.
      early_stopping: Ends the run when evaluations stop getting better.
      best: Keeps the state of the best evaluation, as ``history.best``.
      steps_per_call: ``K`` optimizer steps in one program, for small models whose
        steps are shorter than a call; a shorter last call needs no other program.
      prefetch: How many placed batches may wait; 0 places them in line.
      in_flight: How many calls may run without being waited for.
      keep_every: Copy the state on the devices every so many steps, so that it can be
        made anew where a step fails that has taken it over; see
        ``docs/all_or_nothing.md``.
      progress: None shows a bar on a terminal and in a notebook, else plain lines;
        True is always a bar, False is silence.
      hooks: Each called as ``hook(step number, metrics)`` with host values, for every
        step in order, once its metrics are there: some calls later.
      writers: Such as `JsonLines`; each is given every step and every evaluation.
        Of several processes that share the towers the first one writes.

    Returns:
      ``(state, history)``.

    Raises:
      ValueError: An option is wrong, a batch is malformed, there is no batch, or
        there are fewer than ``steps``; the evaluation lacks a metric that is named.
      NonFiniteError: With ``on_nonfinite="raise"``: a loss or gradient was not
        finite. That step changed nothing; steps then in flight are done.

    Any exception on the way (also of the loader, a hook, a writer, or Ctrl-C) carries
    what there is: ``run(step, error.state, error.batches, ...)`` goes on as if nothing
    had been, and ``error.history`` is what the run saw. Writers have every step of that
    history, and are closed. See ``docs/all_or_nothing.md``.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.25), tj.Mirrored(towers=2))
      >>> data = feed.batches(np.full(64, 2.0, np.float32), 8, epochs=None)
      >>> state = step.init(jnp.float32(0))
      >>> state, history = run(step, state, data, steps=3, progress=False)
      >>> float(state.params), history.metrics["loss"].tolist()
      (1.75, [4.0, 1.0, 0.25])
    """
    options = LoopOptions(
        steps, eval_every, steps_per_call, prefetch, in_flight, keep_every
    )
    evaluation = Evaluation(evaluate, eval_batches, eval_every, early_stopping, best)
    writers = check_writers(writers)
    placement = step.strategy.placement
    step.check_state(state)
    if isinstance(batches, Mapping | PlacedBatch):
        raise ValueError(
            "batches is one batch, but run goes through an iterable of them. Pass"
            " [batch], or tj.batches(data, batch_size)."
        )
    start = int(state.step)
    _require_same_length(placement, batches, options, evaluation, start)
    display = choose_display(progress)
    ledger = Ledger(batches, copies=steps_per_call > 1)
    shown = Progress(display, start, steps)
    loop = _Loop(step, state, options, evaluation, shown, tuple(hooks), ledger)
    try:
        with contextlib.closing(shown), loop.guard.installed():
            loop.writers = opened(writers, start, placement)
            loop.run()
        return loop.state, loop.history()
    except BaseException as error:
        loop.hand_over(error)
        raise


def _require_same_length(
    placement: Placement,
    batches: Iterable[PyTree],
    options: LoopOptions,
    evaluation: Evaluation,
    start: int,
) -> None:
    """Raise, on every process, unless all of them will do the same steps."""
    if placement.num_processes == 1:
        return
    length = len(batches) if isinstance(batches, Sized) else "no known number of"
    text = f"steps={options.steps}, {length} batches, from step {start}"
    for name in ("every", "early_stopping", "best"):
        if getattr(evaluation, name) is not None:
            text += f", {name}={getattr(evaluation, name)}"
    require_same(
        "How long tj.run goes", text, "Give every process the same steps and batches."
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """A dispatched call, which may still be running."""

    metrics: dict[str, jax.Array]
    guarded: jax.Array
    num_examples: tuple[int, ...]


class _Loop:
    """A run under way: its state, the calls in flight, and what came of the others."""

    def __init__(
        self,
        step: LoopStep,
        state: TrainState,
        options: LoopOptions,
        evaluation: Evaluation,
        progress: Progress,
        hooks: tuple[Hook, ...],
        ledger: Ledger,
    ) -> None:
        self.state, self.guard = state, InterruptGuard()
        self.writers = Writers((), int(state.step))
        self._step, self._options, self._evaluation = step, options, evaluation
        self._progress, self._hooks, self._ledger = progress, hooks, ledger
        self._kept = KeptState(step, options.keep_every, ledger)
        self._watch = Watch(
            evaluation.early_stopping, evaluation.best, step.strategy.placement
        )
        self._log = HistoryLog(int(state.step))
        self._dispatched = self._log.number
        self._in_flight: collections.deque[_Call] = collections.deque()
        self._compiled: set[Any] = set()
        self._compile_s = self._evaluate_s = 0.0
        self._start_s = time.perf_counter()

    def run(self) -> None:
        """All steps, and the evaluations between and after them."""
        with contextlib.closing(self._placed()) as placed_batches:
            while self._watch.stopped is None:
                if (placed := self._next(placed_batches)) is None:
                    break
                before = self._dispatched
                self._dispatch(placed)
                every = self._evaluation.every or self._dispatched + 1
                if self._dispatched // every > before // every:
                    self._evaluate()
        self._fetch(0)
        self._check_enough()
        self._ledger.settle()
        evaluations = self._log.evaluations
        if not evaluations or evaluations[-1][0] != self._log.number:
            self._evaluate()
        self.writers.close()
        self.writers.check()
        with self.guard:
            self.state = self._watch.to_return(self.state)

    def _placed(self) -> Generator[PlacedBatch, None, None]:
        size, ledger = self._options.steps_per_call, self._ledger
        depth = 0 if ledger.prefetches else self._options.prefetch
        batches = itertools.islice(ledger, self._options.steps)
        if size == 1:
            place = ledger.placing(self._step.place_batch)
            return feed.prefetch(batches, place, depth=depth)
        return feed.prefetch(
            feed.in_groups(batches, size, copies=False),
            lambda group: self._step.place_batches(group, size),
            depth=depth,
        )

    def _next(self, placed_batches: Iterator[PlacedBatch]) -> PlacedBatch | None:
        try:
            return next(placed_batches, None)
        except Exception:
            # The steps before the broken batch are whole: hooks shall see them.
            self._fetch(0)
            raise

    def _dispatch(self, placed: PlacedBatch) -> None:
        self._fetch(self._options.in_flight - 1)
        if placed.signature not in self._compiled:
            start_s = time.perf_counter()
            self._step.program(self.state, placed)
            self._compile_s += time.perf_counter() - start_s
            self._compiled.add(placed.signature)
        self._kept.see(self.state, self._dispatched)
        number = len(placed.num_examples)
        with self.guard:
            self.state, metrics, guarded = self._step.dispatch(self.state, placed)
            self._in_flight.append(_Call(metrics, guarded, placed.num_examples))
            self._dispatched += number
            taken = self._ledger.use(number if self._options.steps_per_call > 1 else 1)
            self._kept.add(placed, taken)

    def _fetch(self, allowed: int) -> None:
        """Wait for the oldest calls until so many are in flight; look at each step."""
        while len(self._in_flight) > allowed:
            number = self._log.number
            rows, refused = self._record_oldest()
            self.writers.check()
            for row, was_refused in zip(rows, refused, strict=True):
                number += 1
                if was_refused and self._step.options.on_nonfinite == "raise":
                    raise NonFiniteError(number - 1)
                for hook in self._hooks:
                    hook(number, row)
            self._progress.step(number, rows[-1], self._rate())

    def _record_oldest(self) -> tuple[list[dict[str, Any]], list[bool]]:
        call = self._in_flight[0]
        metrics, guarded = jax.device_get((call.metrics, call.guarded))
        # One step gives scalars, several give a dim of steps, not all of them used.
        indices = range(len(call.num_examples)) if guarded.ndim else [()]
        rows = [{name: x[i] for name, x in metrics.items()} for i in indices]
        refused = [is_refused(guarded[i]) for i in indices]
        time_s, first = time.time(), self._log.number + 1
        records = [Record("train", first + i, time_s, x) for i, x in enumerate(rows)]
        with self.guard:  # what is in the history is in the files, and once
            self._in_flight.popleft()
            for step in zip(rows, refused, call.num_examples, strict=True):
                self._log.add(*step)
            self.writers.write(records)
        return rows, refused

    def _evaluate(self) -> None:
        evaluate, batches = self._evaluation.step, self._evaluation.batches
        if evaluate is None or batches is None:
            return
        self._fetch(0)
        start_s = time.perf_counter()
        values = evaluate_all(
            evaluate,
            self.state,
            batches,
            prefetch=self._options.prefetch,
            in_flight=self._options.in_flight,
        )
        number = self._log.number
        with self.guard:
            self._log.evaluations.append((number, values))
            self.writers.write([Record("eval", number, time.time(), values)])
        self.writers.check()
        self._watch.see(number, values, self.state)
        self._evaluate_s += time.perf_counter() - start_s
        watch = self._watch
        in_short = watch.describe(number, values)
        self._progress.evaluation(number, values, in_short, watch.stopped)

    def _check_enough(self) -> None:
        done, steps = self._log.num_steps, self._options.steps
        if done == 0:
            raise ValueError(
                "batches is empty. An iterator that was gone through before is; make"
                " it anew."
            )
        if steps is not None and done < steps and self._watch.stopped is None:
            raise ValueError(
                f"steps={steps} were asked for, but batches ended after {done}. Use"
                " tj.batches(..., epochs=None) for endless data, or leave steps out to"
                " stop where the data ends."
            )

    def _rate(self) -> float:
        seconds = time.perf_counter() - self._start_s
        seconds -= self._compile_s + self._evaluate_s
        return self._log.num_steps / max(seconds, 1e-9)

    def history(self) -> History:
        """What there is so far."""
        steps_per_second, steps = self._rate(), self._log.num_steps
        summary = RunSummary(
            towers=self._step.strategy.placement.num_towers,
            devices=self._step.strategy.placement.num_devices,
            steps=steps,
            examples=self._log.examples,
            compile_seconds=self._compile_s,
            steps_per_second=steps_per_second,
            examples_per_second=steps_per_second * self._log.examples / max(steps, 1),
        )
        return self._log.history(summary, self._watch.best, self._watch.stopped)

    def hand_over(self, error: Any) -> None:
        """Give what there is to an exception: the caller's state was donated."""
        self._record_all()
        error.state = self.state if is_whole(self.state) else self._rebuilt()
        self.writers.close()
        self.writers.explain(error)
        error.history = self.history()
        error.batches = self._ledger.rest() if error.state else self._ledger.settle()
        if error.state is None:
            note = (
                "The state is lost: the devices failed in it. Go on from a checkpoint;"
                " keep_every=... keeps a copy for this"
            )
        else:
            note = f"error.state is the state after step {self._dispatched}; go on"
            note += " from it, with error.batches"
        if self._step.strategy.placement.num_processes > 1:
            note += (
                ". Each process stops where it is: their states may be of different"
                " steps, and a state may need a process that has gone"
            )
        error.add_note(f"{note}. error.history is what the run saw.")

    def _record_all(self) -> None:
        with contextlib.suppress(Exception):
            while self._in_flight:
                self._record_oldest()

    def _rebuilt(self) -> TrainState | None:
        """The state before the step that failed, where a copy was kept."""
        self._in_flight.clear()
        rebuilt = self._kept.rebuild()
        if rebuilt is None:
            return None
        state, done = rebuilt
        number = self._dispatched = int(state.step)
        for placed, metrics, guarded in reversed(done):
            if number <= self._log.number:
                break
            call = _Call(metrics, guarded, placed.num_examples)
            self._in_flight.appendleft(call)
            number -= len(placed.num_examples)
        self._record_all()
        return state
