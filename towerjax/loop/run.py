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

from towerjax.inference import InferenceStep
from towerjax.input import feed
from towerjax.input.distribute import DistributedDataset
from towerjax.input.placer import PlacedBatch
from towerjax.loop.evaluate import Batches, evaluate_all
from towerjax.loop.history import History, HistoryLog, RunSummary
from towerjax.loop.interrupt import InterruptGuard
from towerjax.loop.progress import Progress, choose_display
from towerjax.processes import require_same
from towerjax.state import TrainState
from towerjax.step import TrainStep
from towerjax.types import PyTree
from towerjax.update import NonFiniteError, is_refused

Hook: TypeAlias = Callable[[int, dict[str, Any]], None]
"""``(step number, metrics)``: called for every step, with host values."""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How the loop goes; see `run`."""

    steps: int | None
    eval_every: int | None
    steps_per_call: int
    prefetch: int
    in_flight: int

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("steps", "eval_every"):
            if getattr(self, name) is not None:
                feed.check_whole(name, getattr(self, name), 1)
        feed.check_whole("steps_per_call", self.steps_per_call, 1)
        feed.check_whole("prefetch", self.prefetch, 0)
        feed.check_whole("in_flight", self.in_flight, 1)
        if self.eval_every is not None and self.eval_every % self.steps_per_call:
            raise ValueError(
                f"eval_every={self.eval_every} must be a multiple of steps_per_call="
                f"{self.steps_per_call}: there is no state between the steps of a call."
            )


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """What to evaluate, on what."""

    step: InferenceStep | None
    batches: Batches | None
    every: int | None

    def __post_init__(self) -> None:
        if (self.step is None) != (self.batches is None):
            raise ValueError(
                "evaluate and eval_batches belong together, but only"
                f" {'eval_batches' if self.step is None else 'evaluate'} was given."
            )
        if self.step is None and self.every is not None:
            raise ValueError(
                f"eval_every={self.every} was given without anything to evaluate. Pass"
                " evaluate=tj.build_eval_step(...) and eval_batches=..."
            )
        if isinstance(self.batches, Iterator):
            raise ValueError(
                f"eval_batches is a {type(self.batches).__name__}, which can be gone"
                " through only once, but every evaluation needs all of it. Pass a list"
                " of batches, or a function that gives them anew:"
                " eval_batches=lambda: tj.batches(data, batch_size)."
            )


def run(
    step: TrainStep,
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int | None = None,
    evaluate: InferenceStep | None = None,
    eval_batches: Batches | None = None,
    eval_every: int | None = None,
    steps_per_call: int = 1,
    prefetch: int = 2,
    in_flight: int = 2,
    progress: bool | None = None,
    hooks: Sequence[Hook] = (),
) -> tuple[TrainState, History]:
    """The state after the steps, and the history of every one of them.

    Batches are placed by a thread while the devices work, and calls are dispatched
    without waiting for their results, up to ``in_flight`` of them. Step numbers
    count the steps that the state has done, so that they go on where a restored
    state stopped.

    Args:
      step: As `build_train_step` returns it.
      state: Where to start; donated, unless the step was built otherwise.
      batches: Global batches, e.g. of `batches`, or a `DistributedDataset`; may be
        endless with ``steps``. No more than ``steps`` are taken (a distributed data
        set takes some in advance from its source).
      steps: How many steps to do; None goes to the end of the data.
      evaluate: As `build_eval_step` returns it.
      eval_batches: The data to evaluate on, all of it each time: something that can
        be gone through again, or a function that returns an iterable.
      eval_every: Evaluate after each step whose number is a multiple of this, and
        at the end; None only at the end. With several steps a call, after the call
        that reaches the multiple.
      steps_per_call: ``K`` optimizer steps in one program, for small models whose
        steps are shorter than a call; a shorter last call needs no other program.
      prefetch: How many placed batches may wait; 0 places them in line.
      in_flight: How many calls may run without being waited for.
      progress: None shows a bar on a terminal and in a notebook, else plain lines;
        True is always a bar, False is silence.
      hooks: Each called as ``hook(step number, metrics)`` with host values, for every
        step in order, once its metrics are there: some calls later.

    Returns:
      ``(state, history)``.

    Raises:
      ValueError: An option is wrong, a batch is malformed, there is no batch, or
        there are fewer than ``steps``.
      NonFiniteError: With ``on_nonfinite="raise"``: a loss or gradient was not
        finite. That step changed nothing; steps then in flight are done.

    Any exception on the way (also of the loader, of a hook, or Ctrl-C) carries what
    there is as ``error.state``, to go on with, and ``error.history``.

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
    options = LoopOptions(steps, eval_every, steps_per_call, prefetch, in_flight)
    evaluation = _Evaluation(evaluate, eval_batches, eval_every)
    step.check_state(state)
    if isinstance(batches, Mapping | PlacedBatch):
        raise ValueError(
            "batches is one batch, but run goes through an iterable of them. Pass"
            " [batch], or tj.batches(data, batch_size)."
        )
    start = int(state.step)
    if step.strategy.placement.num_processes > 1:
        length = len(batches) if isinstance(batches, Sized) else "no known number of"
        require_same(
            "How long tj.run goes",
            f"steps={steps}, {length} batches, from step {start}",
            "Give every process the same steps and batches.",
        )
    display = choose_display(progress)
    with contextlib.closing(Progress(display, start, steps)) as shown:
        loop = _Loop(step, state, options, evaluation, shown, tuple(hooks))
        try:
            with loop.guard.installed():
                loop.run(batches)
        except BaseException as error:
            loop.hand_over(error)
            raise
    return loop.state, loop.history()


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
        step: TrainStep,
        state: TrainState,
        options: LoopOptions,
        evaluation: _Evaluation,
        progress: Progress,
        hooks: tuple[Hook, ...],
    ) -> None:
        self.state, self.guard = state, InterruptGuard()
        self._step, self._options, self._evaluation = step, options, evaluation
        self._progress, self._hooks = progress, hooks
        self._log = HistoryLog(int(state.step))
        self._dispatched = self._log.number
        self._in_flight: collections.deque[_Call] = collections.deque()
        self._compiled: set[Any] = set()
        self._compile_s = self._evaluate_s = 0.0
        self._start_s = time.perf_counter()

    def run(self, batches: Iterable[PyTree]) -> None:
        """All steps, and the evaluations between and after them."""
        placed_batches = self._placed(batches)
        with contextlib.closing(placed_batches):
            while (placed := self._next(placed_batches)) is not None:
                before = self._dispatched
                self._dispatch(placed)
                every = self._evaluation.every or self._dispatched + 1
                if self._dispatched // every > before // every:
                    self._evaluate()
        self._fetch(0)
        self._check_enough()
        evaluations = self._log.evaluations
        if not evaluations or evaluations[-1][0] != self._log.number:
            self._evaluate()

    def _placed(self, batches: Iterable[PyTree]) -> Generator[PlacedBatch, None, None]:
        size, depth = self._options.steps_per_call, self._options.prefetch
        if isinstance(batches, DistributedDataset):
            depth = 0  # it has a thread of its own
        batches = itertools.islice(batches, self._options.steps)
        if size == 1:
            return feed.prefetch(batches, self._step.place_batch, depth=depth)
        return feed.prefetch(
            feed.in_groups(batches, size),
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
        with self.guard:
            self.state, metrics, guarded = self._step.dispatch(self.state, placed)
            self._in_flight.append(_Call(metrics, guarded, placed.num_examples))
            self._dispatched += len(placed.num_examples)

    def _fetch(self, allowed: int) -> None:
        """Wait for the oldest calls until so many are in flight; look at each step."""
        while len(self._in_flight) > allowed:
            number = self._log.number
            rows, refused = self._record_oldest()
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
        with self.guard:
            self._in_flight.popleft()
            for step in zip(rows, refused, call.num_examples, strict=True):
                self._log.add(*step)
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
        self._evaluate_s += time.perf_counter() - start_s
        self._log.evaluations.append((self._log.number, values))
        self._progress.evaluation(self._log.number, values)

    def _check_enough(self) -> None:
        done, steps = self._log.num_steps, self._options.steps
        if done == 0:
            raise ValueError(
                "batches is empty. An iterator that was gone through before is; make"
                " it anew."
            )
        if steps is not None and done < steps:
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
        return self._log.history(summary)

    def hand_over(self, error: Any) -> None:
        """Give what there is to an exception: the caller's state was donated."""
        with contextlib.suppress(Exception):
            while self._in_flight:
                self._record_oldest()
        error.state = self.state if _is_usable(self.state) else None
        error.history = self.history()
        if error.state is None:
            note = (
                "The state is lost: the devices failed in it. Go on from a checkpoint"
            )
        else:
            note = f"error.state is the state after step {self._dispatched}; go on with"
            note += " tj.run(step, error.state, ...)"
        if self._step.strategy.placement.num_processes > 1:
            note += (
                ". Each process stops where it is: their states may be of different"
                " steps, and a state may need a process that has gone"
            )
        error.add_note(f"{note}. error.history is what the run saw.")


def _is_usable(state: TrainState) -> bool:
    try:
        jax.block_until_ready(state)
    except (RuntimeError, ValueError):  # a failed computation, or a donated array
        return False
    return not any(x.is_deleted() for x in jax.tree.leaves(state))
