"""Compare a training run that was stopped and resumed with one that was not."""

import dataclasses
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from towerjax.loop.checkpoint.checkpointer import Checkpointer
from towerjax.loop.history import History
from towerjax.loop.run import run
from towerjax.prover.comparison import NotAudited, Refuted, SplitError, gaps
from towerjax.prover.programs.child import FORM
from towerjax.prover.programs.compare import check_rtol
from towerjax.prover.programs.processes import (
    NamedFunction,
    ToldError,
    call_in_process,
    find_function,
    name_function,
)
from towerjax.prover.programs.traced import NUMBER_TYPES
from towerjax.step.step import Step
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_whole, check_wholes
from towerjax.types.refusals import types_of
from towerjax.types.trees import key_data, named_leaves

_Leaves: TypeAlias = dict[str, np.ndarray]
_AS_MADE = (
    "It has the value that make() returns, so it was not saved or not restored, as"
    " often happens to a key or a step number beside the parameters."
)
_OTHER_BATCHES = (
    "The resumed process reads other batches. Save the iterator's position, or skip the"
    " batches that were used."
)
_ONE_EPOCH = (
    "no batch came twice in {steps} steps, so a restart in a second epoch was not"
    " tried. Pass steps=(n, m) with n larger than an epoch: a shuffling that depends on"
    " the epoch, or its number, may not be saved."
)
_ELSEWHERE = (
    "The restored state and the batches are the same, so something else is not saved,"
    " such as a generator or a counter that the step holds."
)


@dataclasses.dataclass(frozen=True)
class ResumedReport:
    """The leaves that are the same with a restart as without one.

    Attributes:
      steps: The numbers of steps before and after the restart.
      compared: Names of the leaves.
      notes: Notes on what was not seen, such as a second epoch.
    """

    steps: tuple[int, int]
    compared: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        before, after = self.steps
        are = "value is" if len(self.compared) == 1 else "values are"
        text = (
            f"{len(self.compared)} {are} the same after {before} + {after} steps, with"
            f" a restart between, as after {before + after} at once"
        )
        return "\n".join([text, *(f"note: {note}" for note in self.notes)])


class _Stages(NamedTuple):
    """The named arrays of each stage of a process; a stage not seen is empty."""

    initial: _Leaves  # the state that ``make`` returned
    between: _Leaves  # the state where training is stopped, or resumed
    batches: _Leaves  # the batches of the steps after ``between``
    results: _Leaves  # what these steps returned
    end: _Leaves  # the state at the end
    # Whether a batch was seen twice; None if no batch was seen.
    came_twice: bool | None = None


class _Training(NamedTuple):
    """The parts of a training run that ``make`` returned."""

    step: Any
    state: PyTree
    batches: Any
    save: Callable[[str, PyTree, Any], Any]
    restore: Callable[[str, PyTree, Any], tuple[PyTree, Any]]


@api_boundary
def same_resumed(
    make: Callable[[], Any],
    steps: Sequence[int] = (3, 4),
    *,
    devices: int = 1,
    rtol: float = 0.0,
    timeout_s: float | None = None,
) -> ResumedReport:
    """Raise if training that is resumed goes on differently from training that is not.

    One process does ``n + m`` steps at once. A second does ``n`` steps and saves. A
    third restores and does ``m`` steps. The restored state is compared with the saved
    one. The batches, the steps' results and the final state are compared with those of
    the first process.

    ``make()`` is called in each process. It returns one of these:

    * ``(step, state, batches)``, with a step of towerjax, which `tj.run` trains and a
      `Checkpointer` saves;
    * ``(step, state, batches, save, restore)``, with any step. ``step(state, batch)``
      returns the new state, or a tuple that begins with it. ``save(folder, state,
      batches)`` gets the iterator at its position. ``restore(folder, state, batches)``
      gets the initial state and batches, and returns both as they must go on;
    * ``train``, a function ``train(folder, steps)`` that trains up to that total number
      of steps, resumes from the folder, and returns the state.

    Args:
      make: A function without arguments, at the top level of a file.
      steps: The numbers ``(n, m)``, each >= 1.
      devices: The number of CPU devices of each process.
      rtol: The largest allowed difference, divided by the leaf's largest value; 0
        demands equal bits.
      timeout_s: The seconds after which a process is killed; None waits for ever.

    Returns:
      A `ResumedReport`.

    Raises:
      SplitError: A leaf depends on the restart; its ``findings`` are `Refuted`.
      ProgramDied: A process ended without a result, or did not end in time. The error
        has its last lines.
      ValueError: ``make`` or its result has another form; or training is not
        deterministic.

    Example:
      >>> import inspect
      >>> [*inspect.signature(same_resumed).parameters][:2]
      ['make', 'steps']

    For a complete example see
    <https://github.com/towerjax/towerjax/blob/main/docs/check.md>.
    """
    named = name_function(FORM, make, or_devices=False)
    check_whole("devices", devices)
    check_rtol(rtol)
    numbers = check_wholes("steps", steps)
    if len(numbers) != 2:
        raise ValueError(
            f"steps={steps!r} must be two numbers, the steps before and after the"
            " restart."
        )
    before, after = numbers

    def called(label: str, *args: Any) -> _Stages:
        return call_in_process(label, devices, *args, timeout_s=timeout_s)

    with tempfile.TemporaryDirectory() as folder:
        for name in ("at_once", "stopped", "again"):
            os.makedirs(f"{folder}/{name}")
        whole = f"{before + after} steps at once"
        at_once = called(whole, _at_once, named, numbers, f"{folder}/at_once")
        label = f"{before} steps"
        stopped = called(label, _stopped, named, numbers, f"{folder}/stopped")
        label = f"{after} more steps"
        resumed = called(label, _resumed, named, numbers, f"{folder}/stopped")
        findings, advice = _differences(at_once, stopped, resumed, numbers, rtol)
        if findings and not at_once.between:
            again = called(whole, _at_once, named, numbers, f"{folder}/again")
            _refuse_random(at_once.end, again.end)
    if findings:
        of = f"a restart after step {before}"
        raise SplitError([dataclasses.replace(x, of=of) for x in findings], advice)
    names = [*at_once.end, *at_once.batches, *at_once.results]
    is_one_epoch = at_once.came_twice is False
    note = _ONE_EPOCH.format(steps=before + after)
    return ResumedReport((before, after), tuple(names), (note,) * is_one_epoch)


def _differences(
    at_once: _Stages,
    stopped: _Stages,
    resumed: _Stages,
    steps: tuple[int, ...],
    rtol: float,
) -> tuple[list[Refuted], list[str]]:
    """Find the leaves that differ, each at its first stage that does, and advise."""
    before, after = steps
    _refuse_random(at_once.between, stopped.between)
    saved = stopped.between
    restored = resumed.between
    findings = dict[str, Refuted]()
    advice = list[str]()
    for name, reason in _unlike(restored, saved, "restored", "saved", rtol):
        findings[name] = Refuted(name, reason)
        if _same_bits(restored.get(name), resumed.initial.get(name)):
            advice.append(f"{name}: {_AS_MADE}")
    other_batches = _unlike(
        resumed.batches, at_once.batches, "after the restart", "without it", rtol
    )
    for name, why in other_batches:
        findings[name] = Refuted(name, why)
    if any(name in at_once.batches for name in findings):
        advice.append(_OTHER_BATCHES)
    has_seen = bool(at_once.between)
    is_elsewhere = has_seen and not findings
    in_two = f"after {before} + {after} steps"
    in_one = f"after {before + after} at once"
    for stage in ("end", "results"):
        ends = getattr(resumed, stage)
        for name, reason in _unlike(
            ends, getattr(at_once, stage), in_two, in_one, rtol
        ):
            findings.setdefault(name, Refuted(name, reason))
    if is_elsewhere and findings:
        advice.append(_ELSEWHERE)
    return [*findings.values()], advice


def _unlike(
    got: _Leaves, want: _Leaves, got_is: str, want_is: str, rtol: float
) -> Iterator[tuple[str, str]]:
    """Yield each leaf that differs: its name, and a text that says how."""
    for name in {**want, **got}:
        if name not in got or name not in want:
            missing = got_is if name not in got else want_is
            yield name, f"there is none {missing}"
            continue
        x = got[name]
        y = want[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            kinds = [f"{a.dtype}{list(a.shape)}" for a in (x, y)]
            yield name, f"{kinds[0]} {got_is}, and {kinds[1]} {want_is}"
        elif not _same_bits(x, y):
            gap = gaps(_wide(x), _wide(y))
            at = np.unravel_index(np.argmax(gap), gap.shape)
            largest = float(np.abs(_wide(y)).max(initial=0.0))
            if not gap[at] <= rtol * largest or not rtol:
                here, there = (f"{float(_wide(a)[at]):.6g}" for a in (x, y))
                yield name, f"{here} {got_is}, and {there} {want_is}"


def _wide(x: np.ndarray) -> np.ndarray:
    return np.abs(x) if x.dtype.kind == "c" else x.astype(np.float64)


def _same_bits(x: np.ndarray | None, y: np.ndarray | None) -> bool:
    if x is None or y is None:
        return False
    return (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())


def _refuse_random(first: _Leaves, again: _Leaves) -> None:
    for name, why in _unlike(first, again, "in one process", "in another", 0.0):
        raise NotAudited(
            f"training is not deterministic even without a restart: {name} is {why}."
            " Draw from a key or a seed that make() sets"
        )


def _at_once(named: NamedFunction, steps: tuple[int, int], folder: str) -> _Stages:
    """Do all steps in one process, and keep its stages."""
    before, after = steps
    training = _made(named)
    if not isinstance(training, _Training):
        return _ended(training(folder, before + after), before)
    loop = _Loop(training, iter(training.batches))
    loop.run(range(before))
    between = _arrays("state", loop.state)
    stages = loop.seen(range(before, before + after), {}, between)
    return stages._replace(came_twice=loop.came_twice)


def _stopped(named: NamedFunction, steps: tuple[int, int], folder: str) -> _Stages:
    """Do the first steps in a process, and save."""
    before, _ = steps
    training = _made(named)
    if not isinstance(training, _Training):
        training(folder, before)
        return _NOTHING
    loop = _Loop(training, iter(training.batches))
    loop.run(range(before))
    between = _arrays("state", loop.state)
    training.save(folder, loop.state, loop.batches)
    return _NOTHING._replace(between=between)


def _resumed(named: NamedFunction, steps: tuple[int, int], folder: str) -> _Stages:
    """Restore in a new process, and do the last steps."""
    before, after = steps
    training = _made(named)
    if not isinstance(training, _Training):
        return _ended(training(folder, before + after), before)
    first_state = _arrays("state", training.state)
    restored = training.restore(folder, training.state, training.batches)
    match restored:
        case (state, batches):
            loop = _Loop(training._replace(state=state), iter(batches))
        case _:
            fault = f"returned {types_of(restored)}"
            raise ToldError(
                ValueError(f"restore must return (state, batches), but {fault}.")
            )
    between = _arrays("state", loop.state)
    return loop.seen(range(before, before + after), first_state, between)


class _Loop:
    """A training loop: its state, and its iterator of batches."""

    def __init__(self, training: _Training, batches: Iterator[Any]) -> None:
        self.state = training.state
        self.batches = batches
        self.came_twice = False
        self._step = training.step
        self._digests = set[bytes]()

    def run(self, numbers: range) -> None:
        """Do the steps with these numbers."""
        for _ in numbers:
            self.next()

    def next(self) -> tuple[Any, Any]:
        """Do one step, and return its batch and its result."""
        batch = next(self.batches)
        digest = hashlib.sha256()
        for name, x in _arrays("batch", batch).items():
            digest.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
        self.came_twice |= digest.digest() in self._digests
        self._digests.add(digest.digest())
        gave = self._step(self.state, batch)
        self.state = self._state_in(gave)
        return batch, gave

    def seen(self, numbers: range, initial: _Leaves, between: _Leaves) -> _Stages:
        """Do these steps, and return what is known of the process by stages."""
        batches = _Leaves()
        results = _Leaves()
        for number in numbers:
            batch, gave = self.next()
            batches |= _arrays(f"batches[{number}]", batch)
            if gave is not self.state:
                results |= _arrays(f"metrics of step {number + 1}", gave[1:])
        return _Stages(initial, between, batches, results, _arrays("state", self.state))

    def _state_in(self, gave: Any) -> PyTree:
        structure = jax.tree.structure(self.state)
        if jax.tree.structure(gave) == structure:
            return gave
        if isinstance(gave, tuple) and jax.tree.structure(gave[0]) == structure:
            return gave[0]
        fault = f"returned {types_of(gave)}"
        raise ToldError(
            ValueError(
                "step(state, batch) must return the new state, with the same structure,"
                f" or a tuple that begins with it, but {fault}."
            )
        )


def _made(named: NamedFunction) -> "_Training | Callable[[str, int], Any]":
    """Call ``make``; return the parts of a loop, or ``train(folder, steps)``."""
    training = find_function(named, jax.device_count())()
    match training:
        case (step, state, batches, save, restore) if callable(save):
            return _Training(step, state, batches, save, restore)
        case (Step() as step, state, batches):
            return functools.partial(_train, step, state, batches)
        case _ if callable(training) and not isinstance(training, Step):
            return training
    fault = f"returned {types_of(training)}"
    raise ToldError(
        ValueError(
            f"{FORM} must return (step, state, batches), if the step is towerjax's; or"
            " (step, state, batches, save, restore); or a function train(folder,"
            f" steps). But {fault}."
        )
    )


def _train(
    step: Step, state: PyTree, batches: Any, folder: str, steps: int
) -> tuple[PyTree, History]:
    """Train with `tj.run`, with checkpoints in the folder."""
    saving = Checkpointer(folder)
    options: Any = {"steps": steps, "checkpointer": saving, "progress": False}
    return run(step, state, batches, **options)


def _ended(gave: Any, before: int) -> _Stages:
    """Collect the final state of training, and the metrics of the last steps."""
    results = _Leaves()
    match gave:
        case (state, History() as history):
            for number, *values in zip(
                history.steps, *history.metrics.values(), strict=True
            ):
                if number > before:
                    metrics = dict(zip(history.metrics, values, strict=True))
                    results |= _arrays(f"metrics of step {number}", metrics)
        case state:
            pass
    return _NOTHING._replace(results=results, end=_arrays("state", state))


def _arrays(root: str, tree: PyTree) -> _Leaves:
    """Copy the numeric leaves to the host, by name."""
    leaves = [
        (n, x) for n, x in named_leaves(root, tree) if isinstance(x, NUMBER_TYPES)
    ]
    return {name: np.array(key_data(x)) for name, x in leaves}


_NOTHING = _Stages({}, {}, {}, {}, {})
