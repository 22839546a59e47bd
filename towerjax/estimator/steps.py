"""How do the loops call a replicated model? As a train, eval or predict step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from towerjax.data.placer import PlacedBatch
from towerjax.estimator.pipeline import WRAP, ModelPass
from towerjax.estimator.spec import Mode, ModelSpec
from towerjax.estimator.whereabouts import VariablePlacement, kept, spread
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.state import compute
from towerjax.metrics.weighted import Weighted
from towerjax.step.checking import Check, checked
from towerjax.step.compiled_step import CompiledStep, StepOptions
from towerjax.step.engine import IN_LAYOUTS, OUT_LAYOUTS, OnNonfinite
from towerjax.step.given_state import check_is_state
from towerjax.step.recipe import Recipe, Stage
from towerjax.step.state import TrainState, split_state
from towerjax.step.update import accept_or_keep
from towerjax.types import Layout, PyTree


@dataclasses.dataclass(frozen=True)
class ModelPipeline:
    """A model function's train step before it is compiled.

    Attributes:
      model_pass: The model function in ``Mode.TRAIN``.
      on_nonfinite: Is a step refused whose loss is not finite?
      traced_hooks: Where the hooks go that the model function returned.
    """

    model_pass: ModelPass
    on_nonfinite: OnNonfinite
    traced_hooks: list[Callable[..., Any]] = dataclasses.field(compare=False)

    def on_device(self, axes: TowerAxes) -> Callable[..., Any]:
        """The step as each device runs it."""
        whole = self.model_pass.on_device(axes)

        def step(
            carry: dict[str, Any],
            clock: dict[str, Any],
            *batch: PyTree,
        ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], jax.Array]:
            def judged(carry: dict[str, Any]) -> tuple[Any, Any, Any]:
                state = TrainState(**carry, **clock)
                after, loss, metrics, _, _, hooks = whole(state, *batch)
                self.traced_hooks[:] = hooks.hooks
                weight = loss.weight if isinstance(loss, Weighted) else jnp.float32(1)
                value = loss.value if isinstance(loss, Weighted) else loss
                finite = jnp.isfinite(value)
                named = {name: compute(m) for name, m in (metrics or {}).items()}
                carry, now = split_state(after)
                rest = now, {"loss": value, **named}, finite
                return finite & (weight != 0), carry, rest

            if self.on_nonfinite == "ignore":
                _, after, rest = judged(carry)
            else:
                after, rest = accept_or_keep(judged, carry)
            return after, *rest

        return step

    def counted(self, axes: TowerAxes) -> Callable[..., Any]:
        """A device's values in which padded rows would count."""
        of_state = self.model_pass.counted(axes)

        def run(carry: Any, clock: Any, *batch: PyTree) -> Any:
            return of_state(TrainState(**carry, **clock), *batch)

        return run


class ModelTrainStep(CompiledStep):
    """A train step of a replicated model: ``(state, batch) -> (state, metrics)``.

    Made by the model's ``train_step``. The state is a ``TrainState``, which lies where
    the model's ``variable_placement`` says; a batch is ``{"features": ..., "labels":
    ...}``.
    """

    def __init__(
        self, model_pass: ModelPass, policy: VariablePlacement, options: StepOptions
    ) -> None:
        self._hooks: list[Callable[..., Any]] = []
        pipeline = ModelPipeline(model_pass, options.on_nonfinite, self._hooks)
        _refuse_nonfinite_check(options)
        recipe = Recipe.of(_stage(pipeline, options.check), donate=options.donate)
        super().__init__(recipe, model_pass.strategy, options)
        self._policy = policy

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
        return super().program(self._spread(state), batch)

    def dispatch(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, jax.Array], Any]:
        """The step, without looking at whether its loss was finite."""
        if self._policy is VariablePlacement.MIRRORED:
            return super().dispatch(state, batch)
        after, metrics, guarded = super().dispatch(self._spread(state), batch)
        return kept(after, self.strategy.placement, self._policy), metrics, guarded

    def _spread(self, state: TrainState) -> TrainState:
        return spread(state, self.strategy.placement, self._policy)


def _stage(pipeline: ModelPipeline, check: Check | None) -> Stage:
    out_layouts, on_device = dict(OUT_LAYOUTS), pipeline.on_device
    if check is not None:
        out_layouts["found"] = Layout.MIRRORED

        def on_device(axes: TowerAxes) -> Callable[..., Any]:
            return checked(pipeline.on_device(axes), check, axes)

    return Stage(
        on_device,
        IN_LAYOUTS,
        out_layouts,
        counted=pipeline.counted,
        advice=WRAP,
        proved_alone=False,
    )


def _refuse_nonfinite_check(options: StepOptions) -> None:
    if options.check is not None and options.check.nonfinite:
        raise ValueError(
            f"check={options.check!r}, but a model function makes its gradients itself,"
            " where the step cannot look at them. Say tj.Check(..., nonfinite=False)."
        )


class RunsModes(Protocol):
    """A replicated model, as far as its steps call it."""

    def place_batch(self, batch: PyTree, mode: Mode) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers."""
        ...

    def run(
        self,
        variables: PyTree,
        batch: PlacedBatch,
        mode: Mode,
        wanted: Sequence[str],
        params: Any = None,
        config: Any = None,
    ) -> ModelSpec:
        """The wanted parts of the global spec."""
        ...


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A model in one mode, for batches ``{"features": ..., "labels": ...}``.

    Attributes:
      model: The model.
      mode: ``EVAL`` or ``PREDICT``.
      wanted: The parts of the spec that are computed.
      params: Hyperparameters, where the model function asks for them.
      config: What else it asks for.
    """

    model: RunsModes
    mode: Mode
    wanted: tuple[str, ...]
    params: Any
    config: Any

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers."""
        return self.model.place_batch(batch, self.mode)

    def __call__(self, variables: PyTree, batch: PyTree) -> dict[str, Any]:
        """The metrics with the loss, mergeable; or the predictions."""
        placed = self.place_batch(batch)
        spec = self.model.run(
            variables, placed, self.mode, self.wanted, self.params, self.config
        )
        if self.mode is Mode.PREDICT:
            return dict(spec.predictions or {})
        loss = spec.loss
        if not isinstance(loss, Weighted):  # the mean over batches, as the original
            loss = Weighted(loss, jnp.float32(1))
        return {"loss": loss, **(spec.eval_metrics or {})}
