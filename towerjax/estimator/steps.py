"""How do the loops call a replicated model? As a train, eval or predict step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.data.placer import PlacedBatch
from towerjax.estimator.pipeline import ModelEngine
from towerjax.estimator.spec import Mode, ModelSpec
from towerjax.estimator.whereabouts import VariablePlacement, kept, spread
from towerjax.metrics.weighted import Weighted
from towerjax.step.given_state import check_is_state
from towerjax.step.state import TrainState
from towerjax.step.step import Step
from towerjax.types import PyTree


class ModelTrainStep(Step):
    """A train step of a replicated model: ``(state, batch) -> (state, metrics)``.

    Made by the model's ``train_step``. The state is a ``TrainState``, which lies where
    the model's ``variable_placement`` says; a batch is ``{"features": ..., "labels":
    ...}``.
    """

    def __init__(self, engine: ModelEngine) -> None:
        step: Any = engine  # which makes an engine for each kind of batch
        super().__init__(step, engine.strategy, engine.options)
        self._hooks, self._policy = engine.hooks, engine.how.variable_placement

    def start(self, state: TrainState) -> TrainState:
        """The state to start a loop from, where the step wants it."""
        check_is_state(
            state,
            "model.init(tj.TrainState.create(params, optimizer)); a model called by"
            " itself takes any tree.",
        )
        return kept(self._spread(state), self.strategy.placement, self._policy)

    @property
    def hooks(self) -> tuple[Callable[[int, dict[str, Any]], None], ...]:
        """The hooks that the model function returned, once a step is traced."""
        return tuple(self._hooks)

    def program(self, state: TrainState, batch: PyTree) -> Any:
        """The compiled program for such a batch; compiles it if need be."""
        is_absent = self.strategy.placement.absent is not None
        return super().program(state if is_absent else self._spread(state), batch)

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], Any]:
        """The step, without looking at whether its loss was finite."""
        if self._policy is VariablePlacement.MIRRORED:
            return super().dispatch(state, batch)
        after, metrics, guarded = super().dispatch(self._spread(state), batch)
        return kept(after, self.strategy.placement, self._policy), metrics, guarded

    def _spread(self, state: TrainState) -> TrainState:
        return spread(state, self.strategy, self._policy)


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A model in one mode, for batches ``{"features": ..., "labels": ...}``.

    Attributes:
      place: Makes a batch a placed one.
      run: ``(variables, placed batch)`` -> the parts of the spec that are wanted.
    """

    place: Callable[[PyTree], PlacedBatch]
    run: Callable[[PyTree, PlacedBatch], ModelSpec]

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers."""
        return self.place(batch)

    def __call__(self, variables: PyTree, batch: PyTree) -> dict[str, Any]:
        """The metrics with the loss, mergeable; or the predictions."""
        spec = self.run(variables, self.place_batch(batch))
        if spec.mode is Mode.PREDICT:
            return dict(spec.predictions or {})
        loss = spec.loss
        if not isinstance(loss, Weighted):  # the mean over batches, as the original
            loss = Weighted(loss, jnp.float32(1))
        return {"loss": loss, **(spec.eval_metrics or {})}
