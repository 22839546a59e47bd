"""What is left when a step fails? Its error and place, and the state before it."""

import collections
import contextlib
from typing import Any, TypeAlias

import jax

from towerjax.data.ledger import Ledger
from towerjax.data.placer import PlacedBatch
from towerjax.loop.steps import Locates, LoopStep
from towerjax.loop.stopping import copied
from towerjax.step.checking import error_of
from towerjax.step.nonfinite import NonFiniteError
from towerjax.step.state import TrainState


def fault_of(
    step: LoopStep, guarded: Any, number: int, placed: PlacedBatch, index: int
) -> Exception | None:
    """What is to be raised about a step of a call. Waits for it."""
    refusals = step.options.on_nonfinite == "raise"
    at = () if placed.num_steps is None else index
    return error_of(
        guarded, number, step.strategy.placement, refusals=refusals, index=at
    )


def with_place(
    error: Exception, step: LoopStep, state: TrainState, placed: PlacedBatch, index: int
) -> Exception:
    """The error, with the tower and the leaf where a refused step was not finite.

    The step's batch is run again, with the present parameters: the step changed none,
    but others may have come after it.
    """
    if not isinstance(error, NonFiniteError) or error.places:
        return error
    if not isinstance(step, Locates):
        return error
    try:
        places = step.locate(state, placed, number=error.step, index=index)
    except RuntimeError as failure:  # such as too little memory
        error.add_note(f"Looking for the place failed: {failure}")
        return error
    located = NonFiniteError(error.step, places)
    again = "The place was looked for by running the batch again with the parameters"
    again += f" after step {int(state.step)}"
    located.add_note(again + ("." if places else ": there all was finite."))
    return located


Redone: TypeAlias = tuple[PlacedBatch, dict[str, jax.Array], jax.Array]
"""``(batch, metrics, guarded)`` of a call that was made again."""


def is_whole(state: TrainState) -> bool:
    """Has a state been computed, and its buffers not been taken over?"""
    try:
        jax.block_until_ready(state)
    except (RuntimeError, ValueError):  # a failed computation, or a donated array
        return False
    return not any(x.is_deleted() for x in jax.tree.leaves(state))


class KeptState:
    """A copy of the state now and then, and the calls since."""

    def __init__(self, step: LoopStep, every: int | None, ledger: Ledger) -> None:
        self._step, self._every, self._ledger = step, every, ledger
        self._state: TrainState | None = None
        self._number = 0
        self._cursor: Any = None
        self._calls: collections.deque[tuple[PlacedBatch, Any]] = collections.deque()

    def see(self, state: TrainState, number: int) -> None:
        """Copy the state, where it is time to."""
        if self._every is None:
            return
        if self._state is not None and number - self._number < self._every:
            return
        # It is there and whole, so the old copy may go first: both may not fit.
        jax.block_until_ready(state)
        self._calls.clear()
        self._state, self._number, self._cursor = None, number, self._ledger.cursor
        self._state = copied(state, "devices", self._step.strategy.placement)

    def add(self, placed: PlacedBatch, used: Any) -> None:
        """Note a call."""
        if self._state is not None:
            self._calls.append((placed, used))

    def rebuild(self) -> tuple[TrainState, list[Redone]] | None:
        """The state after as many calls since the copy as succeed."""
        state, self._state = self._state, None
        if state is None:
            return None
        done: list[Redone] = []
        cursor = self._cursor
        with contextlib.suppress(RuntimeError, ValueError):
            while self._calls:
                before = copied(state, "devices", self._step.strategy.placement)
                placed, used = self._calls[0]
                after, metrics, guarded = self._step.dispatch(state, placed)
                state = before
                jax.block_until_ready(after)
                state = after
                self._calls.popleft()
                cursor = used[-1].cursor
                done.append((placed, metrics, guarded))
        if not is_whole(state):
            state = before
        left = [taken for _, used in self._calls for taken in used]
        self._ledger.give_back(left, cursor)
        return state, done
