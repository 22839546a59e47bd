"""Run a model function as passes and an update."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

import towerjax as tj
from towerjax.data.placer import PlacedBatch
from towerjax.make.checked import step_of
from towerjax.make.train import next_extra, with_loss
from towerjax.metrics.weighted import Weighted
from towerjax.step.plan import StepOptions, training_plan, unguarded_plan
from towerjax.step.state.policies import Read, StatePolicy
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import Step, TrainStep
from towerjax.tf1.estimator.loss_forms import has_denominator
from towerjax.tf1.estimator.losses import (
    TowersOfStep,
    one_loss,
)
from towerjax.tf1.estimator.model_fn import (
    Mode,
    ModelFn,
    ModelHook,
    ModelOptions,
    ModelSpec,
    joined_outputs,
    typed_rows,
)
from towerjax.tf1.estimator.model_passes import PassesOfModel, minimized, model_passes
from towerjax.tf1.estimator.variables import (
    VariablePlacement,
    as_state,
    as_variables,
    is_plain,
    spread,
    store,
)
from towerjax.tf1.meets import bound
from towerjax.tf1.split_program import SplitProgram
from towerjax.tf1.values import AnyStrategy
from towerjax.types import PyTree
from towerjax.types.refusals import a_type, check_types
from towerjax.types.trees import shapes_of


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Hooks:
    """The hooks of a spec, as a pytree without leaves, so that JAX can return it."""

    value: tuple[ModelHook, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTower:
    """A model function in one mode, as the tower function of passes."""

    model_fn: ModelFn
    options: ModelOptions
    mode: Mode
    wanted: tuple[str, ...]  # the parts of the spec to compute
    params_and_config: Mapping[str, Any]
    _programs: dict[Hashable, SplitProgram] = dataclasses.field(default_factory=dict)

    def __call__(self, state: TrainState, rows: PyTree, tower: tj.Tower) -> PyTree:
        """Trace the model function for one tower, and return its `SplitProgram`.

        Nothing is computed. The result is a pytree without leaves. A program is traced
        once for each kind of arguments.
        """
        leaves, treedef = jax.tree.flatten(shapes_of((state, rows)))
        key = tower.strategy, tower.num_towers, tower.micro_batches, tower.rows
        key = (*key, treedef, *((x.shape, x.dtype) for x in leaves))
        if key not in self._programs:
            fn = functools.partial(self._one_tower, tower.micro_batches)
            shows_state = not is_plain(state)
            split = SplitProgram.of(fn, state, rows, tower, shows_state=shows_state)
            if self.options.compat == "tf1" and tower.num_towers > 1:
                _refuse_met_sum(split)
            _refuse_own_parameters(split)
            if tower.micro_batches > 1:
                _refuse_changed_local(split)
            self._programs[key] = split
        return {"split": self._programs[key]}

    def passes(self, strategy: AnyStrategy, options: StepOptions) -> PassesOfModel:
        """Make the passes of the model function in this mode."""
        return model_passes(self, self.options, self.mode, strategy, options)

    def _one_tower(
        self, micro_batches: int, state: TrainState, rows: PyTree, tower: tj.Tower
    ) -> dict[str, Any]:
        """Call the model function, and give its results the types of a `Pass`."""
        variables = as_variables(state)
        trace = get_opaque_trace_state()
        options = self.options
        parts = tower.num_towers * micro_batches
        towers = TowersOfStep(
            tower, options.loss_reduction, options.compat, trace, parts
        )
        with bound(towers):  # TowerOptimizer asks for the bound towers
            spec = self.model_fn.call(
                variables, rows, self.mode, tower, self.params_and_config
            )
        typed = self._typed_parts(spec, variables, towers, tower.rows)
        return {**typed, "hooks": _Hooks(spec.hooks)}

    def _typed_parts(
        self, spec: ModelSpec, variables: PyTree, towers: TowersOfStep, rows: int
    ) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if "loss" in self.wanted:
            parts["loss"] = towers.addend(spec.loss)
            if not has_denominator(spec.loss):
                # Tells by its presence that the loss is a scalar.
                parts["loss_is_scalar"] = ()
        if "eval_metrics" in self.wanted and spec.eval_metrics is not None:
            _check_metrics(spec.eval_metrics)
            parts["eval_metrics"] = dict(spec.eval_metrics)
        for name in ("predictions", "export_outputs"):
            part = getattr(spec, name)
            if name in self.wanted and part is not None:
                stacked = self.options.compat == "tf1"
                parts[name] = typed_rows(name, part, rows, stacked_classes=stacked)
        if "train_op" in self.wanted:
            parts["train_op"] = _check_train_op(spec.train_op, variables)
        return parts


def _check_metrics(eval_metrics: Mapping[str, Any]) -> None:
    """Raise unless each metric is a state that merges."""
    for name, metric in eval_metrics.items():
        if tj.metrics.is_metric(metric) or has_denominator(metric):
            continue
        is_class = isinstance(metric, type)
        kind = f"the class {metric.__name__}" if is_class else a_type(metric)
        raise ValueError(
            f"eval_metrics[{name!r}] is {kind}, but must be a metric state, an object"
            " made from the tower's rows: tj.Weighted.mean(hits, tower.weight), another"
            " state of tj.metrics, or a metric of clu or metrax. A Collection of clu is"
            " several: write eval_metrics={**tj.metrics.from_clu(collection)}."
        )


def _refuse_met_sum(split: SplitProgram) -> None:
    """Raise if towers communicate in a loss whose sum is differentiated by tower.

    TensorFlow 1 differentiates each tower's own mean. The gradient of a sum is later
    divided by the tower's own weight. That would also divide what other towers' losses
    add to this gradient.
    """
    if (line := split.line_of_met_sum()) is not None:
        raise ValueError(
            "compat='tf1' cannot be kept for a loss in which towers communicate, at"
            f" {line}, because compute_gradients differentiates each tower's sum. Write"
            " optimizer.minimize(loss_fn, variables), which differentiates each tower's"
            " mean; return a scalar loss; or leave compat= out."
        )


def _refuse_own_parameters(split: SplitProgram) -> None:
    """Raise if the parameters by which a loss is differentiated differ by tower."""
    if (line := split.line_of_own_parameters()) is not None:
        raise ValueError(
            f"TowerOptimizer.minimize at {line} got parameters that are computed from"
            " one tower's rows, draws or variables. They differ from tower to tower, so"
            " the sum of all towers' losses has no gradient with respect to them. Write"
            " optimizer.compute_gradients(loss_fn, params), which differentiates one"
            " tower's loss, and then apply_gradients."
        )


def _refuse_changed_local(split: SplitProgram) -> None:
    """Raise if micro-batches would not see the variables that earlier ones changed."""
    if split.changes_local:
        raise ValueError(
            "model_fn changes tower-local variables and computes more after an"
            " optimizer's update. With several micro-batches the later part would not"
            " see what the micro-batches before have changed. Write micro_batches=1."
        )


def _results_of(
    tower_fn: ModelTower,
    strategy: AnyStrategy,
    options: StepOptions,
    hooks: list[ModelHook],
) -> Callable[[TrainState, list[PyTree]], tuple[TrainState, dict[str, PyTree]]]:
    """Build a function that makes the next state and the rest of the merged spec.

    While it is traced, the function also replaces the items of ``hooks`` by the spec's
    hooks.
    """
    is_split = strategy.num_towers * options.micro_batches > 1
    reduction = tower_fn.options.loss_reduction

    def results(
        state: TrainState, merged: list[PyTree]
    ) -> tuple[TrainState, dict[str, PyTree]]:
        parts = merged[0]["split"].results(state, merged[1:])
        after = state
        hooks[:] = parts.pop("hooks").value
        if "loss" in parts:
            loss = one_loss(reduction, parts["loss"], is_split=is_split)
            is_scalar = parts.pop("loss_is_scalar", None) is not None
            parts["loss"] = loss.value if is_scalar else loss
        if "train_op" in parts:
            after = as_state(parts.pop("train_op"), state.step, state.rng)
            extra = next_extra(state.extra, after.extra, "the train_op's extra")
            after = dataclasses.replace(after, extra=extra)
        return after, parts

    return results


def _check_train_op(train_op: PyTree, before: PyTree) -> PyTree:
    """Take the next variables; raise unless their types are those of ``before``."""
    rest = train_op
    if isinstance(before, TrainState) and isinstance(train_op, TrainState):
        # One call is one step, whatever the function did to the counter. ``extra`` may
        # hold leaves that are still to be merged, so it is checked after the merge.
        rest = dataclasses.replace(train_op, step=before.step + 1, extra=before.extra)
    rest = check_types(before, rest, "train_op", "model_fn's train_op")
    if isinstance(rest, TrainState):
        rest = dataclasses.replace(rest, extra=train_op.extra)
    return rest


@dataclasses.dataclass(frozen=True)
class _TrainedModel(StatePolicy):
    """How a train step of a model takes and returns a `TrainState`.

    Between steps the state is stored as ``variable_placement`` says.
    """

    kept_at: VariablePlacement = VariablePlacement.MIRRORED
    hooks: list[ModelHook] = dataclasses.field(default_factory=list)  # of the last spec

    advice = (
        "model.init(tj.TrainState.create(params, optimizer)). With several optimizers"
        " make its params and opt_state dicts, with an entry for each optimizer. Only a"
        " call of the model itself, model(variables, features, labels, mode), takes"
        " other trees."
    )

    def start(self, state_or_params: PyTree, expected: TrainState | None) -> TrainState:
        """Check the state to start from, and spread it over all devices."""
        return super().start(spread(state_or_params, self, self.kept_at), expected)

    def take(self, state_or_params: PyTree) -> TrainState | None:
        """Take the state, copied to all devices if it is stored on one."""
        if self.kept_at is not VariablePlacement.MIRRORED:
            state_or_params = spread(state_or_params, self, self.kept_at)
        return super().take(state_or_params)

    def result(
        self, state: TrainState, out: PyTree, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, PyTree]]:
        """Make ``(state, metrics)``, with the state stored where the options say."""
        after, metrics = super().result(state, out, batch)
        return store(after, self.strategy, self.kept_at), metrics


@dataclasses.dataclass(frozen=True)
class _Variables(Read):
    """How a call of a model in one mode takes its variables, which may be any tree."""

    kept_at: VariablePlacement
    mode: Mode
    hooks: list[ModelHook] = dataclasses.field(default_factory=list)  # of the last spec

    def start(self, state_or_params: PyTree, expected: TrainState | None) -> TrainState:
        """Wrap the variables in a state, on all devices."""
        return spread(as_state(state_or_params, *self.counters), self, self.kept_at)

    def kind(self, state: TrainState) -> Hashable:
        """Give the types of the variables: each needs a program of its own."""
        leaves, treedef = jax.tree.flatten(state)
        return treedef, tuple((x.shape, x.dtype) for x in leaves)

    def as_state(self, state_or_params: PyTree) -> TrainState:
        """Wrap the variables in a state."""
        return as_state(state_or_params, jnp.int32(0), jax.random.key(0))

    def take(self, state_or_params: PyTree) -> None:
        """Take nothing, so that `start` checks the variables at each call."""

    def result(
        self, state: TrainState, out: PyTree, batch: PlacedBatch
    ) -> dict[str, PyTree]:
        """Give the loss and metrics as states to merge over batches.

        In PREDICT return the predictions.
        """
        spec = self.spec(out, batch)
        if spec.mode is Mode.PREDICT:
            return dict(spec.predictions or {})
        loss = spec.loss
        # A scalar is averaged over batches, as in TensorFlow.
        if not has_denominator(loss):
            loss = Weighted(loss, jnp.float32(1))
        return with_loss(loss, spec.eval_metrics or {})

    def spec(self, out: PyTree, batch: PlacedBatch) -> ModelSpec:
        """Put the parts of the merged spec that were asked for in a `ModelSpec`."""
        (*after, parts) = out
        parts = joined_outputs(self.returned(parts, batch))
        if after:
            after = as_variables(TrainState(**after[0], **after[1]))
            parts["train_op"] = store(after, self.strategy, self.kept_at)
        return ModelSpec(self.mode, hooks=tuple(self.hooks), **parts)


def model_train_step(
    tower_fn: ModelTower, strategy: AnyStrategy, options: StepOptions
) -> TrainStep:
    """Build the train step of a replicated model.

    The step maps ``(state, batch)`` to ``(state, metrics)``. The state is a
    ``TrainState``; a batch is ``{"features": ..., "labels": ...}``.
    """
    policy = _TrainedModel(strategy, kept_at=tower_fn.options.variable_placement)
    passes = tower_fn.passes(strategy, options)
    results = _results_of(tower_fn, strategy, options, policy.hooks)

    def update(state: TrainState, merged: list[PyTree]) -> tuple[PyTree, ...]:
        after, parts = results(state, merged)
        return after, with_loss(parts["loss"], parts.get("eval_metrics", {}))

    return step_of(
        training_plan(strategy, options, passes, update, policy, other_losses=minimized)
    )


def model_step(
    tower_fn: ModelTower, strategy: AnyStrategy, like: Step | None = None
) -> Step:
    """Build the step of a model in one mode, for batches of features and labels.

    The step pads to the batch sizes of ``like``, a step of the same mode.
    """
    options = tower_fn.options
    policy = _Variables(strategy, options.variable_placement, tower_fn.mode)
    results = _results_of(tower_fn, strategy, options.step, policy.hooks)
    passes = tower_fn.passes(strategy, options.step)
    trains = "train_op" in tower_fn.wanted
    plan = unguarded_plan(
        strategy, options.step, passes, results, policy, changes_state=trains
    )
    return step_of(plan, placer=None if like is None else like.placer)


def spec_of(step: Step, variables: PyTree, batch: PlacedBatch) -> ModelSpec:
    """Call a step that `model_step` made, and give the merged spec."""
    _, out = step.outputs(variables, batch)
    return cast(_Variables, step.plan.states).spec(out, batch)


def hooks_of(step: Step) -> list[ModelHook]:
    """List the hooks of the last spec of a step that `model_train_step` made."""
    return cast(_TrainedModel, step.plan.states).hooks
