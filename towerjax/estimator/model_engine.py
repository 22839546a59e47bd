"""Run a model function by the step engine, as passes and an update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from towerjax.data.placer import PlacedBatch, Placer
from towerjax.data.shard import batch_signature
from towerjax.estimator.losses import TowersOfStep, has_denominator, one_loss
from towerjax.estimator.model_fn import (
    Mode,
    ModelFn,
    ModelOptions,
    ModelSpec,
    concat_outputs,
    typed_rows,
)
from towerjax.estimator.optimizer import set_towers
from towerjax.estimator.split_program import SplitProgram
from towerjax.estimator.variables import (
    VariablePlacement,
    as_state,
    as_variables,
    spread,
    store,
)
from towerjax.mesh.placement import TowerAxes
from towerjax.mesh.transfer import on_every_process
from towerjax.metrics.state import check_metric
from towerjax.metrics.weighted import Means, Weighted
from towerjax.step.accumulators import as_own, owned
from towerjax.step.engine import Engine, state_ins, training_engine
from towerjax.step.next_state import join_metrics
from towerjax.step.one_pass import Pass
from towerjax.step.options import StepOptions
from towerjax.step.policies import Read, Trained
from towerjax.step.state import TrainState, split_state
from towerjax.step.state_checks import check_is_state
from towerjax.step.step import Step
from towerjax.step.train import next_extra
from towerjax.step.update import check_types
from towerjax.towers.executors import shapes_of, trace_one_tower
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Tower, context_args, tower_of
from towerjax.towers.tower_axis import axes_in_tower
from towerjax.towers.variables import plain
from towerjax.types import Layout, PyTree, Sum
from towerjax.types.leaves import map_parts, parts_of

WRAP = """Please wrap optimizers with TowerOptimizer:
tj.estimator.TowerOptimizer(optax.sgd(0.1)), with its state among the variables,
reduces gradients over towers before it updates.
Other variables that towers change on their own: make them tj.TowerLocal, reduce them
with tower.reduce(tj.Reduction.MEAN, value), or return them as tj.Weighted(sum, weight)
or tj.Sum(x) in train_op.extra."""

MAKE_STATE = (
    "model.init(tj.TrainState.create(params, optimizer)), in which steps are counted; a"
    " model called by itself takes any tree."
)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelEngine:
    """A model function in one mode, uncompiled: one `Engine` a batch signature."""

    model_fn: ModelFn
    strategy: Strategy
    model_options: ModelOptions
    mode: Mode
    wanted: tuple[str, ...]  # the parts of the spec to compute
    given: Mapping[str, Any]  # params and config
    options: StepOptions
    gives_spec: bool = False  # the spec's parts, and not a state and metrics
    hooks: list[Callable[..., Any]] = dataclasses.field(default_factory=list)
    _cache: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it returns a next state."""
        return "train_op" in self.wanted

    def on(self, strategy: Strategy) -> "ModelEngine":
        """The model on other towers, without checks and without micro-batches."""
        if self.model_options.compat is not None:
            raise ValueError(
                f"compat={self.model_options.compat!r} divides by the number of towers"
                " as the original did, so there is nothing to audit. Leave out audit="
                " or compat=."
            )
        changes: Any = {"micro_batches": 1, "guard": "loss"}
        options = dataclasses.replace(self.options, **changes)
        of_other: Any = {"strategy": strategy, "hooks": [], "_cache": {}}
        return dataclasses.replace(self, options=options, **of_other)

    def at(self, args: Sequence[PyTree]) -> Engine:
        """The engine for arguments of these shapes; a trace tells its passes."""
        donated, kept, *batch = shapes_of(tuple(args))
        args = TrainState(**donated, **kept), *batch, ()
        key = batch_signature(args)
        if key not in self._cache:
            reads_local = self.mode is not Mode.TRAIN
            how: Any = {"reads_local": reads_local}
            how["micro_batches"] = self.options.micro_batches
            first = Pass(lambda *args: self._split(*args)[0], self.strategy, **how)
            axes = self.strategy.placement.abstract_axes
            layouts = (*first.ins.values(),)
            _, out = trace_one_tower(first.on_device(axes), axes, layouts, args)
            self._cache[key] = self._build_engine(out[0], reads_local)
        return self._cache[key]

    def _build_engine(self, split: SplitProgram, reads_local: bool) -> Engine:
        def update(state: TrainState, merged: list[Any]) -> tuple[TrainState, Any]:
            after, parts = self._update(split, state, merged)
            return after, _with_loss(parts["loss"], parts.get("eval_metrics"))

        def minimized(merged: list[Any]) -> list[Weighted]:
            losses = parts_of(Weighted, [x["minimized"] for x in merged])
            return losses if len(losses) > 1 else []

        def finish(
            donated: Any, kept: Any, merged: list[Any], _: Any
        ) -> tuple[Any, ...]:
            state = TrainState(**donated, **kept)
            after, parts = self._update(split, state, merged)
            own = as_own(parts)
            return (*split_state(after), own) if self.trains else (own,)

        engine = training_engine(
            (self._tower,) * split.num_passes,
            update,
            self.strategy,
            self.options,
            keeps_all=True,
            other_losses=minimized,
            reads_local=reads_local,
            of_state=True,
            advice=WRAP,
        )
        engine = dataclasses.replace(engine, compared=_with_means)
        if not self.gives_spec:
            return engine
        ins = state_ins(self.strategy, ("state", "kept" if self.trains else "counters"))
        outs = (ins["state"], ins["kept"]) if self.trains else ()
        how: Any = {"donate": engine.donate and self.trains, "accepts": False}
        parts = {"finish": finish, "ins": ins, "outs": (*outs, Layout.MIRRORED)}
        return dataclasses.replace(engine, **parts, **how)

    def _tower(
        self, state: TrainState, rows: PyTree, tower: Tower, *merged: Any
    ) -> PyTree:
        """One tower's results in the pass after those that ``merged`` has."""
        split, args = self._split(state, rows, tower)
        return split.run(args, [*merged[0]] if merged else [])

    def _split(
        self, state: TrainState, rows: PyTree, tower: Tower
    ) -> tuple[SplitProgram, PyTree]:
        """One tower's program and its arguments; traced once for these shapes."""
        axes, context = context_args(tower)
        args = dataclasses.replace(state, local=None), (state.local, rows, context)
        shapes = shapes_of(args)
        key = axes, tower.rows, batch_signature(shapes)
        if key not in self._cache:
            fn = functools.partial(self._one_tower, axes, tower.rows)
            env = axes_in_tower(axes)
            make = jax.make_jaxpr(fn, axis_env=env, return_shape=True)
            counts = [len(jax.tree.leaves(x)) for x in (args[0], state.local)]
            self._cache[key] = split = SplitProgram(*make(*shapes), *counts)
            if self.options.micro_batches > 1:
                split.refuse_changed_local()
        return self._cache[key], args

    def _one_tower(
        self, axes: TowerAxes, size: int, mirrored: TrainState, own: PyTree
    ) -> dict[str, Any]:
        """Call the model function; its results in the types that a `Pass` merges."""
        local, rows, context = own
        state = dataclasses.replace(mirrored, local=local)
        variables, context = as_variables(state), {**context, "rows": size}
        if isinstance(variables, TrainState):
            context |= {"state": state, "local": plain(local)}
        tower = tower_of(self.strategy, axes, **context)
        trace = get_opaque_trace_state()
        how, parts = self.model_options, tower.num_towers * self.options.micro_batches
        towers = TowersOfStep(tower, how.loss_reduction, how.compat, trace, parts)
        variables = set_towers(variables, towers)
        spec = self.model_fn.call(variables, rows, self.mode, tower, self.given)
        self.hooks[:] = spec.hooks
        return self._typed_parts(spec, variables, towers, size)

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
                stacked = self.model_options.compat == "tf1"
                parts[name] = typed_rows(name, part, rows, stacked_classes=stacked)
        if "train_op" in self.wanted:
            parts["train_op"] = _check_train_op(spec.train_op, variables)
        return parts

    def _update(
        self, split: SplitProgram, state: TrainState, merged: list[Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state, and the other parts of the merged spec."""
        parts, after = split.results(state, merged), state
        if "loss" in parts:
            is_split = self.strategy.num_towers * self.options.micro_batches > 1
            reduction = self.model_options.loss_reduction
            loss = one_loss(reduction, parts["loss"], is_split=is_split)
            is_scalar = parts.pop("loss_is_scalar", None) is not None
            parts["loss"] = loss.value if is_scalar else loss
        if "train_op" in parts:
            after = as_state(parts.pop("train_op"), state.step, state.rng)
            extra = next_extra(state.extra, after.extra, "the train_op's extra")
            after = dataclasses.replace(after, extra=extra)
        return after, parts


def _with_means(merged: dict[str, Any]) -> dict[str, Any]:
    """What a pass merged, with the sums of its gradients as means over the loss."""
    loss, grads = merged["minimized"], merged["grads"]
    if not isinstance(loss, Weighted):
        return merged
    sums = map_parts(Sum, lambda x: x.value, grads)
    return {**merged, "grads": Weighted(sums, loss.weight)}


def _check_train_op(train_op: PyTree, before: PyTree) -> PyTree:
    """The next variables; raise unless they have the types of those before."""
    rest = train_op
    if isinstance(before, TrainState) and isinstance(train_op, TrainState):
        # One call is one step, whatever the function did to the counter. extra may hold
        # leaves to be merged, so it is checked after the merge.
        rest = dataclasses.replace(train_op, step=before.step + 1, extra=before.extra)
    rest = check_types(before, rest, "train_op", "model_fn's train_op")
    if isinstance(rest, TrainState):
        rest = dataclasses.replace(rest, extra=train_op.extra)
    return set_towers(rest, None)


def _with_loss(loss: Any, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The metrics of a step, with its loss and the terms of that."""
    terms = loss.by_name() if isinstance(loss, Means) else {}
    return join_metrics({"loss": loss, **terms}, dict(metrics or {}))


@dataclasses.dataclass(frozen=True)
class _TrainedModel(Trained):
    """A `TrainState` that is kept where the model's ``variable_placement`` says."""

    kept_at: VariablePlacement = VariablePlacement.MIRRORED

    def start(self, step: Step, state: Any) -> TrainState:
        """As of any training; variables that are kept elsewhere are copied first."""
        check_is_state(state, MAKE_STATE)
        return super().start(step, spread(state, step.strategy, self.kept_at))

    def take(self, step: Step, state: Any) -> Any:
        """The state on all devices."""
        if self.kept_at is not VariablePlacement.MIRRORED:
            state = spread(state, step.strategy, self.kept_at)
        return super().take(step, state)

    def result(
        self, step: Step, state: TrainState, out: Any, batch: PlacedBatch
    ) -> tuple[Any, Any]:
        """``((state, metrics), guarded)``."""
        (after, metrics), guarded = super().result(step, state, out, batch)
        after = store(after, step.strategy.placement, self.kept_at)
        return (after, metrics), guarded


@dataclasses.dataclass(frozen=True)
class _Variables(Read):
    """A model's variables, any tree, for a call in one mode."""

    kept_at: VariablePlacement

    def start(self, step: Step, state: Any) -> TrainState:
        """The variables as a state, on all devices."""
        return spread(as_state(state, *step.counters), step.strategy, self.kept_at)

    def take(self, step: Step, state: Any) -> Any:
        """The same."""
        return self.start(step, state)

    def kind(self, state: Any) -> Any:
        """The types of the variables."""
        return batch_signature(state)

    def in_trace(self, step: Step, state: Any) -> TrainState:
        """The variables as a state."""
        return as_state(state, jnp.int32(0), jax.random.key(0))

    def shapes(self, step: Step, state: Any) -> TrainState:
        """The shapes of a state."""
        return state

    def result(
        self, step: Step, state: TrainState, out: Any, batch: PlacedBatch
    ) -> tuple[Any, None]:
        """The loss and the metrics, as states to merge; in PREDICT the predictions."""
        spec = self.spec(step, out, batch)
        if spec.mode is Mode.PREDICT:
            return dict(spec.predictions or {}), None
        loss = spec.loss
        if not has_denominator(loss):  # averaged over batches, as TensorFlow did
            loss = Weighted(loss, jnp.float32(1))
        return _with_loss(loss, spec.eval_metrics), None

    def spec(self, step: Step, out: Any, batch: PlacedBatch) -> ModelSpec:
        """The wanted parts of the spec of all towers."""
        (*after, parts), placement = out, step.strategy.placement
        engine: Any = step.engine
        parts = owned(parts, lambda own: on_every_process(own, placement))
        parts = concat_outputs(parts, batch)
        if after:
            after = as_variables(TrainState(**after[0], **after[1]))
            parts["train_op"] = store(after, placement, self.kept_at)
        return ModelSpec(engine.mode, hooks=tuple(engine.hooks), **parts)


def model_train_step(engine: ModelEngine) -> Step:
    """A train step of a replicated model: ``(state, batch) -> (state, metrics)``.

    The state is a ``TrainState``; a batch is ``{"features": ..., "labels": ...}``.
    """
    policy = _TrainedModel(kept_at=engine.model_options.variable_placement)
    return Step(engine, engine.strategy, engine.options, policy)


def model_step(engine: ModelEngine, placer: Placer) -> Step:
    """A model in one mode, for batches ``{"features": ..., "labels": ...}``."""
    engine = dataclasses.replace(engine, gives_spec=True)
    policy = _Variables(engine.model_options.variable_placement)
    how: Any = {"placer": placer}
    return Step(engine, engine.strategy, engine.options, policy, **how)


def model_spec(step: Step, variables: PyTree, batch: PyTree) -> ModelSpec:
    """The parts of the spec that a `model_step` wants, of all towers."""
    placed = step.place_batch(batch)
    _, out = step.outputs(variables, placed)
    policy: Any = step.policy
    return policy.spec(step, out, placed)
