"""What must a step be able to do, so that the loop can drive it?"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from towerjax.data.placer import PlacedBatch
from towerjax.step.compiled_step import StepOptions
from towerjax.step.nonfinite import Place
from towerjax.step.state import TrainState
from towerjax.towers.strategies import Strategy
from towerjax.types import PyTree


class LoopStep(Protocol):
    """A train step as `run` drives it; `build_train_step` makes one.

    Attributes:
      strategy: Says on which devices the towers are.
      options: Says what a loss that is not finite does.
    """

    @property
    def strategy(self) -> Strategy:
        """Where the step runs."""
        ...

    @property
    def options(self) -> StepOptions:
        """How the step goes."""
        ...

    def start(self, state: TrainState) -> TrainState:
        """The state to start from, or a ``ValueError`` where there is none."""
        ...

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """A batch on the devices of its towers; called by a thread."""
        ...

    def place_batches(self, batches: Sequence[PyTree], steps: int) -> PlacedBatch:
        """Several batches for one call; called by a thread."""
        ...

    def program(self, state: TrainState, batch: PlacedBatch) -> Any:
        """Compile for such a batch, unless that is done; how long is measured."""
        ...

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], Any]:
        """Start the step, and wait for nothing."""
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
        """Which towers' values of a step are not finite."""
        ...


@runtime_checkable
class PadsAlike(Protocol):
    """A train step that pads smaller batches to the sizes of those before."""

    @property
    def batch_rows(self) -> frozenset[int]:
        """How many rows the batches so far had once they were padded."""
        ...

    def expect_batch_rows(self, sizes: Iterable[int]) -> None:
        """Pad smaller batches as if batches of these sizes had been placed before."""
        ...


class EvaluationStep(Protocol):
    """An evaluation as `evaluate` drives it; `build_eval_step` makes one."""

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """A batch on the devices of its towers; called by a thread."""
        ...

    def __call__(self, state: Any, batch: PlacedBatch, /) -> Any:
        """Metrics by name, mergeable by ``+``; the state is kept."""
        ...
