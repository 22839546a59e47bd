"""What must a step be able to do, so that the loop can drive it?"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from towerjax.input.placer import PlacedBatch
from towerjax.nonfinite import Place
from towerjax.placement import Placement
from towerjax.state import TrainState
from towerjax.types import PyTree


class HasPlacement(Protocol):
    """A strategy, as far as the loop looks at it."""

    @functools.cached_property
    def placement(self) -> Placement:
        """Which towers, on which devices."""
        ...


class HasPolicy(Protocol):
    """A step's options, as far as the loop looks at them."""

    @property
    def on_nonfinite(self) -> str:
        """``"raise"`` ends the run at a step whose loss is not finite."""
        ...


class LoopStep(Protocol):
    """A train step as `run` drives it; `build_train_step` makes one.

    Attributes:
      strategy: Says on which devices the towers are.
      options: Says what a loss that is not finite does.
    """

    @property
    def strategy(self) -> HasPlacement:
        """Where the step runs."""
        ...

    @property
    def options(self) -> HasPolicy:
        """How the step goes."""
        ...

    def check_state(self, state: Any) -> None:
        """Raise a ``ValueError`` unless the step can start from it.

        Args:
          state: What `run` was given.
        """
        ...

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """A batch on the devices of its towers; called by a thread.

        Args:
          batch: A global batch, or one that is placed already.
        """
        ...

    def place_batches(self, batches: Sequence[PyTree], steps: int) -> PlacedBatch:
        """Several batches for one call; called by a thread.

        Args:
          batches: One to ``steps`` batches.
          steps: ``K``, the most steps of a call.
        """
        ...

    def program(self, state: TrainState, batch: PlacedBatch) -> Any:
        """Compile for such a batch, unless that is done; how long is measured.

        Args:
          state: The state, which is kept.
          batch: The first placed batch of its kind.
        """
        ...

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], Any]:
        """Start the step, and wait for nothing.

        Args:
          state: The state; may be donated.
          batch: A placed batch, or several stacked.

        Returns:
          ``(state, metrics, guarded)``, as ``TrainStep.dispatch``.
        """
        ...


@runtime_checkable
class Locates(Protocol):
    """A train step that can tell where a value was not finite."""

    def locate(
        self,
        state: TrainState,
        batch: PlacedBatch,
        *,
        number: int | None = None,
        index: int = 0,
    ) -> tuple[Place, ...]:
        """Which towers' values of a step are not finite.

        Args:
          state: The state, which is kept.
          batch: The step's batch, or several stacked.
          number: Which step it was.
          index: Of several batches, which one.
        """
        ...


@runtime_checkable
class PadsAlike(Protocol):
    """A train step that pads smaller batches to the sizes of those before."""

    @property
    def batch_rows(self) -> frozenset[int]:
        """How many rows the batches so far had once they were padded."""
        ...

    def expect_batch_rows(self, sizes: Iterable[int]) -> None:
        """Pad smaller batches as if batches of these sizes had been placed before.

        Args:
          sizes: Numbers of rows.
        """
        ...


class EvaluationStep(Protocol):
    """An evaluation as `evaluate_all` drives it; `build_eval_step` makes one."""

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """A batch on the devices of its towers; called by a thread.

        Args:
          batch: A global batch, or one that is placed already.
        """
        ...

    def __call__(self, state: Any, batch: PlacedBatch, /) -> Any:
        """Metrics by name, mergeable by ``+``; the state is kept."""
        ...
