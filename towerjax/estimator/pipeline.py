"""What does one device do for a model function? Its towers, and their values merged."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.collectives.sparse_rows import num_rows
from towerjax.data.placer import BATCH_LAYOUT
from towerjax.data.shard import rows_of_towers, with_shared
from towerjax.estimator.arguments import ModelFn
from towerjax.estimator.in_turn import Meeting, met_in_turn
from towerjax.estimator.losses import LossReduction, TowersOfStep
from towerjax.estimator.optimizer import in_towers
from towerjax.estimator.rows import checked_rows, joined_rows
from towerjax.estimator.spec import Mode, ModelSpec
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.over_towers import merged_over_towers
from towerjax.metrics.state import check
from towerjax.metrics.weighted import Weighted
from towerjax.step.recipe import Recipe, Stage
from towerjax.step.state import TrainState
from towerjax.step.update import checked_like
from towerjax.towers.local_towers import over_local_towers_sharing
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import TowerInputs
from towerjax.towers.tower_local import (
    is_local,
    layouts_of,
    local_values,
    read_local_over_towers,
)
from towerjax.types import Layout, PyTree

WRAP = """Please wrap optimizers with TowerOptimizer:
tj.estimator.TowerOptimizer(optax.sgd(0.1)), with its state among the variables,
reduces gradients over towers before it updates.
Other variables that towers change on their own: make them tj.TowerLocal, or reduce them
with tower.reduce(tj.Reduction.MEAN, value)."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Hooks:
    """The hooks of a traced spec, as a pytree node without leaves."""

    hooks: tuple[Callable[..., Any], ...]


@dataclasses.dataclass(frozen=True)
class ModelPass:
    """A model function in one mode, before it is compiled.

    Attributes:
      model_fn: The user's function.
      mode: The mode.
      given: ``params`` and ``config``.
      strategy: Which towers, where, and how they reduce.
      loss_reduction: What the one loss is.
      compat: None, or ``"tf1"``.
      wanted: The parts of the spec that are returned; others are not computed.
    """

    model_fn: ModelFn
    mode: Mode
    given: Mapping[str, Any]
    strategy: Strategy
    loss_reduction: LossReduction
    compat: str | None
    wanted: tuple[str, ...]

    def on_device(self, axes: TowerAxes) -> Callable[..., Any]:
        """The pass as each device runs it."""

        def run(variables: PyTree, *batch: PyTree) -> Any:
            towers = self._of(axes)
            own, mirrored, spec = self._towers(towers, variables, *batch, reuse=True)
            merged = merged_over_towers(towers.ops, own.sums, axes)
            total = mirrored.total
            if "loss" in merged:
                total = towers.one(merged["loss"])
            loss = total if isinstance(spec.loss, Weighted) else total and total.value
            train_op = mirrored.variables
            if train_op is not None:
                train_op = _joined(train_op, own.local or [])
            outputs = joined_rows(own.outputs, stacked_classes=self.compat == "tf1")
            return (
                train_op,
                loss,
                merged.get("eval_metrics"),
                outputs.get("predictions"),
                outputs.get("export_outputs"),
                Hooks(spec.hooks),
            )

        return run

    def counted(self, axes: TowerAxes) -> Callable[..., Any]:
        """A device's values in which padded rows would count."""

        def run(*args: PyTree) -> Any:
            own, mirrored, _ = self._towers(self._of(axes), *args, reuse=False)
            train_op = jax.tree.map(lambda x: x[None], mirrored.variables)
            if train_op is not None:
                train_op = _joined(train_op, own.local or [])
            sums = {**own.sums, "train_op": train_op}
            return {name: part for name, part in sums.items() if part is not None}

        return run

    def _of(self, axes: TowerAxes) -> TowersOfStep:
        ops = self.strategy.cross_tower_ops
        return TowersOfStep(axes, ops, self.loss_reduction, self.compat)

    def _towers(
        self,
        towers: TowersOfStep,
        variables: PyTree,
        batch: PyTree,
        num_valid: jax.Array,
        shared: list[PyTree],
        *,
        reuse: bool,
    ) -> tuple["_Own", "_Mirrored", ModelSpec]:
        """What this device's towers have of their own, and in common, ``[k, ...]``."""
        axes, traced = towers.axes, []
        inputs, local = self._inputs(axes, variables), self._local(variables, towers)
        rows = rows_of_towers(batch, axes.num_local)

        def tower_fn(
            tower_id: jax.Array, own: PyTree, meeting: Meeting | None
        ) -> tuple[PyTree, PyTree]:
            rows, num_valid, local = own
            reduced = [] if reuse else None
            here = dataclasses.replace(towers, meeting=meeting, reduced=reduced)
            seen = in_towers(variables, here if axes.num_towers > 1 else None)
            seen = _joined(seen, local)
            size = num_rows(rows)
            values = local_values(seen.local) if isinstance(seen, TrainState) else None
            tower = inputs.tower(tower_id, values, num_valid, size)
            rows = with_shared(rows, shared)
            spec = self.model_fn.call(seen, rows, self.mode, tower, self.given)
            traced[:] = [spec]
            train_op, local = self._next(spec, seen)
            total = here.total_of(spec.loss)
            sums = self._sums(spec, towers, loss_too=total is None)
            return _Own(sums, local, self._outputs(spec, size)), _Mirrored(
                train_op, total
            )

        own = (rows, num_valid, local)
        if axes.in_turn and axes.num_towers > 1:
            kept, mirrored = met_in_turn(tower_fn, towers.ops, axes, own)
        else:
            _, kept, mirrored = over_local_towers_sharing(
                lambda tower_id, own: ((), *tower_fn(tower_id, own, None)), axes, own
            )
        return kept, mirrored, traced[0]

    def _inputs(self, axes: TowerAxes, variables: PyTree) -> TowerInputs:
        if isinstance(variables, TrainState):
            return TowerInputs(
                self.strategy, axes, variables.step, variables.rng, variables.extra
            )
        return TowerInputs(self.strategy, axes)

    def _local(self, variables: PyTree, towers: TowersOfStep) -> list[Any]:
        """Each tower's own tower-local variables; what they are together, if read."""
        nodes = [x for x in jax.tree.leaves(variables, is_leaf=is_local) if is_local(x)]
        if self.mode is Mode.TRAIN or not nodes:
            return nodes
        values = read_local_over_towers(nodes, towers.ops, towers.axes)
        k = towers.axes.num_local
        return [
            dataclasses.replace(
                x,
                value=jax.tree.map(lambda v: jnp.broadcast_to(v, (k, *v.shape)), value),
            )
            for x, value in zip(nodes, values, strict=True)
        ]

    def _sums(
        self, spec: ModelSpec, towers: TowersOfStep, *, loss_too: bool
    ) -> dict[str, Any]:
        sums: dict[str, Any] = {}
        if "loss" in self.wanted and loss_too:
            sums["loss"] = towers.addend(spec.loss)
        if "eval_metrics" in self.wanted and spec.eval_metrics is not None:
            sums["eval_metrics"] = {
                name: check(f"eval_metrics[{name!r}]", metric)
                for name, metric in spec.eval_metrics.items()
            }
        return sums

    def _outputs(self, spec: ModelSpec, rows: int) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for name in ("predictions", "export_outputs"):
            part = getattr(spec, name)
            if name in self.wanted and part is not None:
                outputs[name] = dict(part)
        return checked_rows(outputs, rows, stacked_classes=self.compat == "tf1")

    def _next(self, spec: ModelSpec, seen: PyTree) -> tuple[PyTree, list[Any] | None]:
        """The next variables that towers share, and each tower's own."""
        if "train_op" not in self.wanted:
            return None, None
        train_op = spec.train_op
        if isinstance(seen, TrainState) and isinstance(train_op, TrainState):
            # One call is one step, whatever the function did to the counter.
            train_op = dataclasses.replace(train_op, step=seen.step + 1)
        train_op = checked_like(seen, train_op, "train_op", "model_fn's train_op")
        local = [x for x in jax.tree.leaves(train_op, is_leaf=is_local) if is_local(x)]
        return _without_local(in_towers(train_op, None)), local


def one_call_recipe(
    model_pass: ModelPass, variables: PyTree, *, donate: bool
) -> Recipe:
    """The recipe of one call of a replicated model."""
    layouts, trains = layouts_of(variables), "train_op" in model_pass.wanted
    outputs = dict.fromkeys(("predictions", "export_outputs"), Layout.PER_TOWER)
    stage = Stage(
        model_pass.on_device,
        {
            "variables": layouts,
            **BATCH_LAYOUT,
        },
        {
            "train_op": layouts if trains else Layout.MIRRORED,
            "loss": Layout.MIRRORED,
            "eval_metrics": Layout.MIRRORED,
            **outputs,
            "hooks": Layout.MIRRORED,
        },
        counted=None if model_pass.mode is Mode.PREDICT else model_pass.counted,
        advice=WRAP,
        proved_alone=False,
    )
    return Recipe.of(stage, donate=donate and trains)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Own:
    """What a tower has of its own: addends, tower-local variables, output rows."""

    sums: dict[str, Any]
    local: list[Any] | None
    outputs: dict[str, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Mirrored:
    """What towers have in common: the other variables, and the loss if it is known."""

    variables: PyTree
    total: Weighted | None


def _without_local(variables: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: dataclasses.replace(x, value=None) if is_local(x) else x,
        variables,
        is_leaf=is_local,
    )


def _joined(variables: PyTree, local: list[Any]) -> PyTree:
    """The variables with these tower-local ones in the places of their own."""
    pool = iter(local)
    return jax.tree.map(
        lambda x: next(pool) if is_local(x) else x, variables, is_leaf=is_local
    )
