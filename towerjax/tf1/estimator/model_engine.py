"""Run a model function as passes and an update."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from towerjax.check.audit.comparison import NotAudited
from towerjax.data.batch_rows import batch_signature
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.loop.options import Hook
from towerjax.lowering.tower_axis import axes_in_tower
from towerjax.mesh.private_jax import bind_axis
from towerjax.mesh.transfer import on_every_process
from towerjax.metrics.state import check_metric
from towerjax.metrics.weighted import Weighted
from towerjax.step.make.train import next_extra
from towerjax.step.passes.one_pass import Pass
from towerjax.step.plan import (
    Passes,
    Plan,
    StepOptions,
    state_ins,
    training_pass,
    training_plan,
)
from towerjax.step.state.accumulators import mark_per_tower, unmark_per_tower
from towerjax.step.state.checks import check_is_state
from towerjax.step.state.next_state import with_loss
from towerjax.step.state.policies import Read, StatePolicy
from towerjax.step.state.train_state import TrainState, split_state
from towerjax.step.state.update import check_types
from towerjax.step.step import Step, TrainStep
from towerjax.tf1.estimator.losses import (
    LossReduction,
    TowersOfStep,
    has_denominator,
    is_of_scalars,
    one_loss,
)
from towerjax.tf1.estimator.model_fn import (
    Mode,
    ModelFn,
    ModelOptions,
    ModelSpec,
    concat_outputs,
    typed_rows,
)
from towerjax.tf1.estimator.optimizer import refuse_met_sums
from towerjax.tf1.estimator.split_program import LOSSES, SplitProgram
from towerjax.tf1.estimator.variables import (
    VariablePlacement,
    as_state,
    as_variables,
    spread,
    store,
)
from towerjax.towers.executors import Static
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Tower, context_args, tower_of
from towerjax.towers.variables import plain
from towerjax.types import Layout, PyTree, Sum
from towerjax.types.trees import map_parts, parts_of, shapes_of

WRAP = """Please wrap optimizers with TowerOptimizer:
tj.estimator.TowerOptimizer(optax.sgd(0.1)), with its state among the variables,
reduces gradients over towers before it updates.
Other variables that towers change on their own: make them tj.TowerLocal, reduce them
with tower.reduce(tj.Reduction.MEAN, value), or return them as tj.Weighted(sum, weight)
or tj.Sum(x) in train_op.extra."""

MAKE_STATE = (
    "model.init(tj.TrainState.create(params, optimizer)), which counts the steps. With"
    " several optimizers its params and opt_state are dicts of their parts. A call of"
    " the model by itself takes any tree."
)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTower:
    """A model function in one mode, as the tower function of passes."""

    model_fn: ModelFn
    options: ModelOptions
    mode: Mode
    wanted: tuple[str, ...]  # the parts of the spec to compute
    given: Mapping[str, Any]  # params and config
    _programs: dict[Hashable, SplitProgram] = dataclasses.field(default_factory=dict)

    def __call__(self, state: TrainState, rows: PyTree, tower: Tower) -> PyTree:
        """The program of one tower, as a pytree without leaves; nothing is computed."""
        axes, _ = context_args(tower)
        shapes = shapes_of(_args_of_tower(state, rows, tower))
        key = tower.strategy, tower.num_towers, tower.micro_batches, tower.rows
        key = (*key, batch_signature(shapes))
        if key not in self._programs:
            fn = functools.partial(self._one_tower, tower)
            env = axes_in_tower(axes)
            make = jax.make_jaxpr(fn, axis_env=env, return_shape=True)
            counts = [len(jax.tree.leaves(x)) for x in (shapes[0], state.local)]
            parts = *make(*shapes), *counts
            if self.options.compat == "tf1" and tower.num_towers > 1:
                refuse_met_sums(parts[0], axes.tower_axis)
            self._programs[key] = split = SplitProgram(*parts, axis=axes.tower_axis)
            if tower.micro_batches > 1:
                split.refuse_changed_local()
        return {"split": self._programs[key]}

    def _one_tower(
        self, known: Tower, mirrored: TrainState, own: PyTree
    ) -> dict[str, Any]:
        """The model function's results, in the types that a `Pass` merges.

        ``known`` is a tower whose static fields are read.
        """
        local, rows, context = own
        state = dataclasses.replace(mirrored, local=local)
        variables = as_variables(state)
        context = {**context, "rows": known.rows}
        if isinstance(variables, TrainState):
            context |= {"state": state, "local": plain(local)}
        tower = tower_of(known.strategy, context_args(known)[0], **context)
        trace = get_opaque_trace_state()
        how = self.options
        parts = tower.num_towers * known.micro_batches
        towers = TowersOfStep(tower, how.loss_reduction, how.compat, trace, parts)
        with bind_axis(towers):  # where TowerOptimizer finds them
            spec = self.model_fn.call(variables, rows, self.mode, tower, self.given)
        parts = self._typed_parts(spec, variables, towers, known.rows)
        return {**parts, "hooks": Static(spec.hooks)}

    def _typed_parts(
        self, spec: ModelSpec, variables: PyTree, towers: TowersOfStep, rows: int
    ) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if "loss" in self.wanted:
            parts["loss"] = towers.addend(spec.loss)
            if not has_denominator(spec.loss):
                parts["loss_is_scalar"] = ()  # a mark without leaves
        if "eval_metrics" in self.wanted and spec.eval_metrics is not None:
            parts["eval_metrics"] = {
                name: check_metric(f"eval_metrics[{name!r}]", metric)
                for name, metric in spec.eval_metrics.items()
            }
        for name in ("predictions", "export_outputs"):
            part = getattr(spec, name)
            if name in self.wanted and part is not None:
                stacked = self.options.compat == "tf1"
                parts[name] = typed_rows(name, part, rows, stacked_classes=stacked)
        if "train_op" in self.wanted:
            parts["train_op"] = _check_train_op(spec.train_op, variables)
        return parts


def _args_of_tower(state: TrainState, rows: PyTree, tower: Tower) -> PyTree:
    """A tower's arguments: the replicated ones, and its own."""
    _, context = context_args(tower)
    return dataclasses.replace(state, local=None), (state.local, rows, context)


def _pass_of_model(split: SplitProgram, *args: PyTree) -> PyTree:
    """One tower's results in a pass that does not differentiate."""
    return _pass_with_trained(split, None, *args)


def _pass_with_trained(
    split: SplitProgram,
    trained: PyTree,
    state: TrainState,
    rows: PyTree,
    tower: Tower,
    merged: PyTree,
) -> PyTree:
    """One tower's results in a pass that differentiates losses by ``trained``."""
    return split.run(_args_of_tower(state, rows, tower), merged[1:], trained)


def _passes_of(first: Pass, merged: list[PyTree]) -> Iterator[Pass]:
    """A pass that traces the model function, and one for each time that towers meet."""
    yield dataclasses.replace(first, looks_at=None)  # which merges nothing
    split = merged[0]["split"]
    for number in range(split.num_passes):
        trained = split.trained(number)
        run = _pass_of_model if trained is None else _pass_with_trained
        fn = functools.partial(run, split)
        yield dataclasses.replace(first, tower_fn=fn, trained=trained)


def _compared(options: ModelOptions, merged: list[PyTree]) -> list[PyTree]:
    """The merged results to compare: reduced losses, and gradients as means."""
    if options.compat is not None:
        raise NotAudited(_AS_IN_TF1)
    return [_with_means(x, options.loss_reduction) for x in merged[1:]]


def _why_not_proved(options: ModelOptions, mode: Mode) -> str:
    """The reason why one tower computes something else than several; "" if none."""
    if options.compat is not None:
        return _AS_IN_TF1
    if mode is not Mode.PREDICT and is_of_scalars(options.loss_reduction):
        return f"loss_reduction={options.loss_reduction} reduces scalars"
    return ""


_AS_IN_TF1 = "compat='tf1' divides by the number of towers, as the original did"


def model_passes(
    tower_fn: ModelTower, strategy: Strategy, options: StepOptions
) -> Passes:
    """The passes of a model function."""
    reads_local = tower_fn.mode is not Mode.TRAIN
    how = {"reads_local": reads_local, "of_state": True, "advice": WRAP}
    how |= {"loss": LOSSES, "merges_sums": True}
    each = training_pass(tower_fn, strategy, options, **how)
    return Passes(
        (each,),
        found=_passes_of,
        compared=functools.partial(_compared, tower_fn.options),
        why_not_proved=_why_not_proved(tower_fn.options, tower_fn.mode),
        hold_update=True,
    )


def _results_of(
    tower_fn: ModelTower, strategy: Strategy, options: StepOptions, hooks: list[Hook]
) -> Callable[[TrainState, list[PyTree]], tuple[TrainState, dict[str, PyTree]]]:
    """A function of the next state and the rest of the spec; it fills ``hooks``."""
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


def _minimized(merged: list[PyTree]) -> list[Weighted]:
    """The losses of several updates, which guard the step like the spec's loss."""
    losses = parts_of(Weighted, [x[LOSSES] for x in merged[1:]])
    return losses if len(losses) > 1 else []


def _with_means(
    merged: dict[str, PyTree], reduction: LossReduction
) -> dict[str, PyTree]:
    """The merged results with one loss, and with gradients as means over it."""
    # Towers return a pair even for a sum that has no weight.
    if isinstance(merged.get("loss"), Weighted):
        loss = one_loss(reduction, merged["loss"], is_split=True)
        merged = {**merged, "loss": loss}
    loss = merged[LOSSES]
    grads = merged["grads"]
    if not isinstance(loss, Weighted):
        return merged
    sums = map_parts(Sum, lambda x: x.value, grads)
    return {**merged, "grads": Weighted(sums, loss.weight)}


def _check_train_op(train_op: PyTree, before: PyTree) -> PyTree:
    """The next variables; raise unless they have the types of the current ones."""
    rest = train_op
    if isinstance(before, TrainState) and isinstance(train_op, TrainState):
        # One call is one step, whatever the function did to the counter. extra may hold
        # leaves to be merged, so it is checked after the merge.
        rest = dataclasses.replace(train_op, step=before.step + 1, extra=before.extra)
    rest = check_types(before, rest, "train_op", "model_fn's train_op")
    if isinstance(rest, TrainState):
        rest = dataclasses.replace(rest, extra=train_op.extra)
    return rest


@dataclasses.dataclass(frozen=True)
class _TrainedModel(StatePolicy):
    """The policy for a `TrainState` that is kept as ``variable_placement`` says."""

    kept_at: VariablePlacement = VariablePlacement.MIRRORED
    hooks: list[Hook] = dataclasses.field(default_factory=list)  # of the last spec

    def start(self, given: PyTree, expected: TrainState | None) -> TrainState:
        """The state to start from, copied first if it is kept elsewhere."""
        check_is_state(given, MAKE_STATE)
        return super().start(spread(given, self.strategy, self.kept_at), expected)

    def take(self, given: PyTree) -> TrainState | None:
        """The state on all devices."""
        if self.kept_at is not VariablePlacement.MIRRORED:
            given = spread(given, self.strategy, self.kept_at)
        return super().take(given)

    def result(
        self, state: TrainState, out: PyTree, batch: PlacedBatch
    ) -> tuple[TrainState, dict[str, PyTree]]:
        """``(state, metrics)``."""
        after, metrics = super().result(state, out, batch)
        return store(after, self.strategy.placement, self.kept_at), metrics


@dataclasses.dataclass(frozen=True)
class _Variables(Read):
    """The policy for a model's variables, any tree, in a call of one mode."""

    kept_at: VariablePlacement
    mode: Mode
    hooks: list[Hook] = dataclasses.field(default_factory=list)  # of the last spec

    def start(self, given: PyTree, expected: TrainState | None) -> TrainState:
        """The variables as a state, on all devices."""
        return spread(as_state(given, *self.counters), self.strategy, self.kept_at)

    def kind(self, state: TrainState) -> Hashable:
        """The types of the variables."""
        return batch_signature(state)

    def as_state(self, given: PyTree) -> TrainState:
        """The variables as a state."""
        return as_state(given, jnp.int32(0), jax.random.key(0))

    def take(self, given: PyTree) -> None:
        """None, because each call checks the variables."""

    def result(
        self, state: TrainState, out: PyTree, batch: PlacedBatch
    ) -> dict[str, PyTree]:
        """The loss and metrics as states to merge; in PREDICT the predictions."""
        spec = self.spec(out, batch)
        if spec.mode is Mode.PREDICT:
            return dict(spec.predictions or {})
        loss = spec.loss
        if not has_denominator(loss):  # averaged over batches, as TensorFlow did
            loss = Weighted(loss, jnp.float32(1))
        return with_loss(loss, spec.eval_metrics or {})

    def spec(self, out: PyTree, batch: PlacedBatch) -> ModelSpec:
        """The wanted parts of the spec of all towers."""
        (*after, parts) = out
        placement = self.strategy.placement
        parts = unmark_per_tower(parts, lambda own: on_every_process(own, placement))
        parts = concat_outputs(parts, batch)
        if after:
            after = as_variables(TrainState(**after[0], **after[1]))
            parts["train_op"] = store(after, placement, self.kept_at)
        return ModelSpec(self.mode, hooks=tuple(self.hooks), **parts)


def model_train_step(
    tower_fn: ModelTower, strategy: Strategy, options: StepOptions
) -> TrainStep:
    """The train step of a replicated model, ``(state, batch) -> (state, metrics)``.

    The state is a ``TrainState``; a batch is ``{"features": ..., "labels": ...}``.
    """
    policy = _TrainedModel(strategy, kept_at=tower_fn.options.variable_placement)
    passes = model_passes(tower_fn, strategy, options)
    results = _results_of(tower_fn, strategy, options, policy.hooks)

    def update(state: TrainState, merged: list[PyTree]) -> tuple[PyTree, ...]:
        after, parts = results(state, merged)
        return after, with_loss(parts["loss"], parts.get("eval_metrics", {}))

    given = strategy, options, passes, update, policy
    return Step(training_plan(*given, other_losses=_minimized))


def model_step(tower_fn: ModelTower, strategy: Strategy, placer: Placer) -> Step:
    """The step of a model in one mode, for batches of ``features`` and ``labels``."""
    how = tower_fn.options
    options = tower_fn.options.step
    policy = _Variables(strategy, how.variable_placement, tower_fn.mode)
    trains = "train_op" in tower_fn.wanted
    results = _results_of(tower_fn, strategy, options, policy.hooks)

    def finish(
        donated: PyTree, kept: PyTree, merged: list[PyTree], _: PyTree
    ) -> tuple[PyTree, ...]:
        after, parts = results(TrainState(**donated, **kept), merged)
        own = mark_per_tower(parts)
        return (*split_state(after), own) if trains else (own,)

    ins = state_ins(strategy)
    after = (ins["state"], ins["kept"]) if trains else ()
    passes = model_passes(tower_fn, strategy, options)
    outs = (*after, Layout.MIRRORED)
    donate = options.donate and trains
    given = strategy, options, passes, finish, policy
    return Step(Plan(*given, ins, outs, donates=donate), placer=placer)


def spec_of(step: Step, variables: PyTree, batch: PlacedBatch) -> ModelSpec:
    """The merged spec of a call of a step that `model_step` made."""
    _, out = step.outputs(variables, batch)
    return cast(_Variables, step.plan.states).spec(out, batch)


def hooks_of(step: Step) -> list[Hook]:
    """The hooks of the last spec of a step that `model_train_step` made."""
    return cast(_TrainedModel, step.plan.states).hooks
