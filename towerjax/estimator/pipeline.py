"""How is a model function a step? Passes and an update of the one engine."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from towerjax.collectives.reduce import reduce_stacked
from towerjax.collectives.sparse_rows import in_parts, num_rows
from towerjax.data.placer import BATCH_LAYOUT, PlacedBatch
from towerjax.data.shard import rows_of_towers, with_shared
from towerjax.estimator.arguments import ModelFn, ModelOptions
from towerjax.estimator.losses import TowersOfStep, is_of_means, one_loss
from towerjax.estimator.meeting import Cut
from towerjax.estimator.optimizer import in_towers
from towerjax.estimator.spec import Mode, ModelSpec, typed_rows
from towerjax.estimator.variables import (
    VariablePlacement,
    as_state,
    as_variables,
    spread,
    stored,
)
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.state import check
from towerjax.metrics.weighted import Means, Weighted
from towerjax.step.compiled_step import StepOptions
from towerjax.step.engine import Engine
from towerjax.step.given_state import check_is_state
from towerjax.step.one_pass import Pass
from towerjax.step.program import Runner
from towerjax.step.proving import Recipe, Run
from towerjax.step.state import (
    KEPT_LAYOUT,
    TrainState,
    donated_layout,
    split_state,
)
from towerjax.step.step import Step
from towerjax.step.train import next_extra
from towerjax.step.update import checked_like
from towerjax.towers.executors import shapes_of
from towerjax.towers.one_axis import axes_in_tower
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Tower, told, tower_of
from towerjax.towers.variables import TowerLocal, plain
from towerjax.types import Layout, PyTree, Reduction
from towerjax.types.leaves import map_parts

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

_first = partial(jax.tree.map, lambda x: x[0])
"""One of the values that lie side by side."""


def _as_read(local: PyTree) -> PyTree:
    """Tower-local variables as an evaluation sees them."""

    def one(x: TowerLocal) -> TowerLocal:
        is_read = x.reduction is not Reduction.NONE
        value = reduce_stacked(x.reduction, x.value) if is_read else None
        return dataclasses.replace(x, value=value)

    return map_parts(TowerLocal, one, local)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What a trace of a model function told besides arrays: a node without leaves."""

    hooks: tuple[Callable[..., Any], ...]
    is_weighted: bool  # does its loss say what it is divided by?


@dataclasses.dataclass(frozen=True, eq=False)
class ModelEngine:
    """A model function in one mode, uncompiled: an `Engine` for each kind of batch."""

    model_fn: ModelFn
    strategy: Strategy
    how: ModelOptions
    mode: Mode
    wanted: tuple[str, ...]  # parts of the spec; others are not computed
    given: Mapping[str, Any]  # params and config
    options: StepOptions
    of_state: bool = True  # are the variables a TrainState?
    hooks: list[Callable[..., Any]] = dataclasses.field(default_factory=list)
    _made: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def step(
        self, run: Run, donated: Any, kept: Any, *batch: PyTree
    ) -> tuple[Any, ...]:
        """The whole step, of global values."""
        return self._engine(donated, kept, batch)[0].step(run, donated, kept, *batch)

    def located(self, run: Run, donated: Any, kept: Any, *args: PyTree) -> tuple[Any]:
        """The towers alone, of which is told what is not finite."""
        batch, at = args[:3], args[3:]
        for _ in at:
            batch = jax.eval_shape(_first, batch)
        engine, _, _ = self._engine(donated, kept, batch)
        return engine.located(run, donated, kept, *args)

    def run(
        self, on_devices: Run, donated: Any, kept: Any, *batch: PyTree
    ) -> tuple[Any, ...]:
        """The parts of the one spec, without a verdict on them; and the next state."""
        engine, cut, traced = self._engine(donated, kept, batch)
        state = TrainState(**donated, **kept)
        merged, *_ = engine.merged(on_devices, engine.passes, state, batch)
        after, parts = self._updated(cut, traced, state, merged)
        names = ("loss", "eval_metrics", "predictions", "export_outputs")
        out = (*(parts.get(name) for name in names), traced)
        return (*split_state(after), *out) if "train_op" in self.wanted else out

    def _engine(
        self, donated: Any, kept: Any, batch: tuple[PyTree, ...]
    ) -> tuple[Engine, Cut, Traced]:
        """The engine for a batch of these shapes, made once."""
        state: TrainState = shapes_of(TrainState(**donated, **kept))
        rows, _, shared = shapes_of(batch)
        key = _key("engine", (state, rows, shared))
        if key not in self._made:
            seen = _first if self.mode is Mode.TRAIN else _as_read
            state = dataclasses.replace(state, local=jax.eval_shape(seen, state.local))
            rows = jax.eval_shape(self._rows_of_one, rows)
            size, rows = num_rows(rows), with_shared(rows, shared)
            axes = self.strategy.placement.abstract_axes
            number = jax.ShapeDtypeStruct((), jnp.int32)
            own = dict.fromkeys(("tower_id", "num_valid", "first_row"), number)
            several = self.options.micro_batches > 1
            own |= {"micro_batch": number if several else None}
            cut, traced = self._cut(axes, size, state, rows, own)
            if several:
                cut.refuse_moved(len(jax.tree.leaves(state)))
            self.hooks[:] = traced.hooks
            self._made[key] = (self._passes(cut, traced), cut, traced)
        return self._made[key]

    def _passes(self, cut: Cut, traced: Traced) -> Engine:
        options, last = self.options, cut.num_passes - 1
        passes = tuple(
            Pass(
                partial(self._tower, number),
                self.strategy,
                micro_batches=options.micro_batches,
                reads_local=self.mode is not Mode.TRAIN,
                finite=options.guard == "gradients",
                check=options.check if number == last else None,
                of_state=True,
                advice=WRAP,
            )
            for number in range(cut.num_passes)
        )

        def update(
            state: TrainState, merged: list[Any]
        ) -> tuple[TrainState, dict[str, Any]]:
            after, parts = self._updated(cut, traced, state, merged)
            return after, _with_loss(parts["loss"], parts.get("eval_metrics"))

        return Engine(
            passes, update, options.on_nonfinite, options.guard, keeps_all=True
        )

    def _rows_of_one(self, batch: PyTree) -> PyTree:
        """The rows that one tower works on at a time."""
        rows = _first(rows_of_towers(batch, self.strategy.num_towers))
        if self.options.micro_batches > 1:
            rows = _first(in_parts(rows, self.options.micro_batches))
        return rows

    def _tower(
        self, number: int, state: TrainState, rows: PyTree, tower: Tower, *merged: Any
    ) -> PyTree:
        """What one tower returns in a pass."""
        axes, own = told(tower)
        cut, _ = self._cut(axes, tower.rows, state, rows, own)
        return cut.towers(number, (state, rows, own), [*merged[0]] if merged else [])

    def _cut(
        self,
        axes: TowerAxes,
        size: int,
        state: TrainState,
        rows: PyTree,
        own: dict[str, Any],
    ) -> tuple[Cut, Traced]:
        """One tower's program, cut where towers meet; traced once for such shapes."""
        args = shapes_of((state, rows, own))
        key = _key((axes, size), args)
        if key not in self._made:
            told: list[Traced] = []
            env, fn = axes_in_tower(axes), partial(self._one_tower, axes, size, told)
            make = jax.make_jaxpr(fn, axis_env=env, return_shape=True)
            closed, tree = make(*args)
            mirrored = jax.tree.map(lambda _: False, args[0])
            local = jax.tree.map(lambda _: True, args[0].local)
            flags = dataclasses.replace(mirrored, local=local)
            flags = jax.tree.leaves((flags, jax.tree.map(lambda _: True, args[1:])))
            self._made[key] = (Cut(closed, tree, flags), told[0])
        return self._made[key]

    def _one_tower(
        self,
        axes: TowerAxes,
        size: int,
        told: list[Traced],
        state: TrainState,
        rows: PyTree,
        own: dict[str, Any],
    ) -> dict[str, Any]:
        """The model function, and what it returns by what becomes of it."""
        own = {**own, "rows": size}
        if self.of_state:
            own |= {"state": state, "local": plain(state.local)}
        tower = tower_of(self.strategy, axes, **own)
        trace = get_opaque_trace_state()
        how, parts = self.how, self.options.micro_batches
        towers = TowersOfStep(tower, how.loss_reduction, how.compat, trace, parts)
        seen = in_towers(as_variables(state, of_state=self.of_state), towers)
        spec = self.model_fn.call(seen, rows, self.mode, tower, self.given)
        told[:] = [Traced(spec.hooks, is_of_means(spec.loss))]
        return self._parts(spec, seen, towers, size)

    def _parts(
        self, spec: ModelSpec, seen: PyTree, towers: TowersOfStep, rows: int
    ) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if "loss" in self.wanted:
            total = towers.total_of(spec.loss)
            if total is None:
                parts["loss"] = towers.addend(spec.loss)
            else:
                parts["total"] = (total.sum, total.weight)
        if "eval_metrics" in self.wanted and spec.eval_metrics is not None:
            parts["eval_metrics"] = {
                name: check(f"eval_metrics[{name!r}]", metric)
                for name, metric in spec.eval_metrics.items()
            }
        for name in ("predictions", "export_outputs"):
            part = getattr(spec, name)
            if name in self.wanted and part is not None:
                stacked = self.how.compat == "tf1"
                parts[name] = typed_rows(name, part, rows, stacked_classes=stacked)
        if "train_op" in self.wanted:
            parts["train_op"] = _next(spec.train_op, seen)
        return parts

    def _updated(
        self, cut: Cut, traced: Traced, state: TrainState, merged: list[Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state, and the other parts of the one spec."""
        parts, after = cut.results(state, merged), state
        if "total" in parts:
            parts["loss"] = Weighted(*parts.pop("total"))
        if "loss" in parts:
            is_split = self.strategy.num_towers * self.options.micro_batches > 1
            reduction = self.how.loss_reduction
            loss = one_loss(reduction, parts["loss"], is_split=is_split)
            parts["loss"] = loss if traced.is_weighted else loss.value
        if "train_op" in parts:
            counters = {"step": state.step, "rng": state.rng}
            after = as_state(parts.pop("train_op"), counters)
            extra = next_extra(state.extra, after.extra, "the train_op's extra")
            after = dataclasses.replace(after, extra=extra)
        return after, parts


def call_runner(engine: ModelEngine) -> Runner:
    """The programs of one call of a replicated model."""
    trains = "train_op" in engine.wanted
    donated = donated_layout(engine.strategy)
    in_layouts = {"state": donated, "kept": KEPT_LAYOUT, **BATCH_LAYOUT}
    out_layouts = {"state": donated, "kept": KEPT_LAYOUT} if trains else {}
    out_layouts |= dict.fromkeys(("loss", "eval_metrics"), Layout.MIRRORED)
    out_layouts |= dict.fromkeys(("predictions", "export_outputs"), Layout.PER_TOWER)
    out_layouts["traced"] = Layout.MIRRORED
    donate = engine.options.donate and trains
    recipe = Recipe(engine.run, in_layouts, out_layouts, donate=donate)
    placement, most = engine.strategy.placement, engine.how.max_programs
    return Runner(recipe, placement, max_programs=most)


def _next(train_op: PyTree, seen: PyTree) -> PyTree:
    """The next variables, once they are like those that the function was given."""
    rest = train_op
    if isinstance(seen, TrainState) and isinstance(train_op, TrainState):
        # One call is one step, whatever the function did to the counter. Of extra the
        # leaves' types say what they become, which is looked at then.
        rest = dataclasses.replace(train_op, step=seen.step + 1, extra=seen.extra)
    rest = checked_like(seen, rest, "train_op", "model_fn's train_op")
    if isinstance(rest, TrainState):
        rest = dataclasses.replace(rest, extra=train_op.extra)
    return in_towers(rest, None)


def _with_loss(loss: Any, metrics: dict[str, Any] | None) -> dict[str, Any]:
    """The metrics of a step, the terms of its loss among them."""
    terms = loss.told() if isinstance(loss, Means) else {}
    return {"loss": loss, **terms, **(metrics or {})}


def _key(root: Any, shapes: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(shapes)
    return root, treedef, tuple((x.shape, x.dtype) for x in leaves)


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
        check_is_state(state, MAKE_STATE)
        return stored(self._spread(state), self.strategy.placement, self._policy)

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
        return stored(after, self.strategy.placement, self._policy), metrics, guarded

    def _spread(self, state: TrainState) -> TrainState:
        return spread(state, self.strategy, self._policy)


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A model in one mode, for batches ``{"features": ..., "labels": ...}``."""

    model: Any  # the ReplicatedModel
    mode: Mode
    wanted: tuple[str, ...]  # the parts of the spec that it tells
    given: dict[str, Any]  # params and config

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers."""
        return self.model.place_batch(batch, self.mode)

    def __call__(self, variables: PyTree, batch: PyTree) -> dict[str, Any]:
        """The metrics with the loss, mergeable; or the predictions."""
        batch = self.place_batch(batch)
        spec = self.model.run(variables, batch, self.mode, self.wanted, **self.given)
        if self.mode is Mode.PREDICT:
            return dict(spec.predictions or {})
        loss = spec.loss
        if not is_of_means(loss):  # the mean over batches, as the original
            loss = Weighted(loss, jnp.float32(1))
        return _with_loss(loss, spec.eval_metrics)
