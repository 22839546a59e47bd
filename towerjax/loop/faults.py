"""What is left when a step fails? Its error and place, and the state before it."""

from typing import Any

import jax

from towerjax.data.placer import PlacedBatch
from towerjax.loop.steps import Locates, LoopStep
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


def is_whole(state: TrainState) -> bool:
    """Has a state been computed, and its buffers not been taken over?"""
    try:
        jax.block_until_ready(state)
    except (RuntimeError, ValueError):  # a failed computation, or a donated array
        return False
    return not any(x.is_deleted() for x in jax.tree.leaves(state))
