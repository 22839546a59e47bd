"""Evaluation and prediction steps, which run towers and update nothing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.data.placer import BATCH_LAYOUT, PlacedBatch, Placer
from towerjax.data.shard import Remainder, check_remainder
from towerjax.mesh.transfer import on_every_process
from towerjax.step.caller import Caller
from towerjax.step.engine import Engine
from towerjax.step.one_pass import Pass
from towerjax.step.proving import Recipe, Run
from towerjax.step.returned import fill_holes, without_padding
from towerjax.step.state import (
    TrainState,
    join_state,
    make_state,
    split_state,
    state_layout,
)
from towerjax.step.state_checks import check_not_donated, check_num_towers, place_others
from towerjax.towers.outputs import check_metrics, check_rows
from towerjax.towers.strategies import Strategy, check_roles, with_specs
from towerjax.towers.tower import Tower
from towerjax.towers.variables import is_never_read
from towerjax.types import Layout, MetricFn, PredictFn, PyTree, Rows
from towerjax.types.door import door
from towerjax.types.leaves import refuse_traced, refuse_unheld
from towerjax.types.options import check_flag, check_whole


def _model_part(state: TrainState) -> TrainState:
    """The state without what evaluation never reads."""
    local = state.local
    if local and type(local) is dict:
        local = {k: x for k, x in local.items() if not is_never_read(x)}
    return join_state(vars(state), {"opt_state": (), "local": local})


class InferenceStep(Caller):
    """A pure step of `build_eval_step` or `build_predict_step`."""

    def __init__(
        self,
        tower_fn: Callable[..., dict[str, PyTree]],
        strategy: Strategy,
        remainder: Remainder,
        max_programs: int | None,
        audit: bool = False,
    ) -> None:
        check_remainder(remainder)
        check_flag("audit", audit)
        check_whole("max_programs", max_programs, or_none=True)
        one = Pass(tower_fn, strategy, reads_local=True)
        engine = Engine((one,), _no_update, "ignore", "loss")

        def towers(run: Run, of_model: Any, counters: Any, *batch: PyTree) -> Any:
            out = run(one, TrainState(**of_model, **counters), *batch, ())
            return out.merged, out.own

        # Not "kept", whose state is updated.
        names = "state", "counters"
        ins = dict(zip(names, split_state(state_layout(strategy)), strict=True))
        out_layouts = (Layout.MIRRORED, Layout.PER_TOWER)
        recipe = Recipe(towers, ins | BATCH_LAYOUT, out_layouts, donate=False)
        placer = Placer(strategy.placement, remainder=remainder)
        how = {"engine": engine, "audits": audit}
        super().__init__(recipe, strategy, placer, max_programs, **how)

    def start(self, state: Any) -> TrainState:
        """What evaluation reads of a state or of bare parameters, on the devices."""
        refuse_traced(state)
        if not isinstance(state, TrainState):
            refuse_unheld("params", state)
            step, rng = self._counters
            state = TrainState(step, state, (), {}, rng)
        model, strategy = _model_part(state), self.strategy
        check_not_donated(model)
        check_num_towers(model, strategy.num_towers)
        where = strategy.placement, state_layout(strategy)
        return place_others(model, *where, "state", model.params)

    place = start

    def _shapes_of(self, state: Any) -> TrainState:
        is_state = isinstance(state, TrainState)
        return _model_part(state if is_state else make_state(1, state, (), shapes=True))

    @property
    def fn(self) -> Callable[[Any, PyTree], Any]:
        """The step as a JAX function of global arrays, as a train step's ``fn``."""

        def fn(state: Any, batch: PyTree) -> Any:
            if not isinstance(state, TrainState):
                step, rng = jnp.int32(0), jax.random.key(0)
                state = TrainState(step, jax.tree.map(jnp.asarray, state), (), {}, rng)
            placed = self._placer.fit_traced(batch)
            first = split_state(_model_part(state))
            tree, own = self._runner.trace(first, placed)
            return _result(tree, own, placed)

        return door(fn)

    def __call__(self, state: Any, batch: PyTree) -> Any:
        """The result for one global batch."""
        placed, is_state = self.place_batch(batch), isinstance(state, TrainState)
        model = _model_part(state) if is_state else self.start(state)
        _, (tree, own) = self._call(model, placed)
        return _result(tree, on_every_process(own, self.strategy.placement), placed)


def _no_update(state: TrainState, merged: PyTree) -> tuple[TrainState, dict[str, Any]]:
    return state, {}


def _result(tree: dict[str, PyTree], own: PyTree, batch: PlacedBatch) -> PyTree:
    """What towers returned under one name, without padding."""
    (result,) = fill_holes(tree, own=without_padding(own, batch)).values()
    return result


def build_eval_step(
    metric_fn: MetricFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int | None = None,
    audit: bool = False,
    specs: Any = None,
) -> InferenceStep:
    """A step that computes metrics over a global batch.

    Merge the states of several batches, then compute: the metric of a data set is
    exact however it is cut (`evaluate` does both). Tower-local variables are read by
    their own reduction.

    Args:
      metric_fn: ``(params, batch, tower) -> {name: state}``.
      strategy: Which towers, where.
      remainder: For a batch that ``T`` does not divide, as in `build_train_step`.
      max_programs: How many kinds of batch may compile; None is 8, with a warning
        at the second.
      audit: As for `build_train_step`: the metrics are compared.
      specs: As for `build_train_step`.

    Returns:
      ``evaluate(state, batch) -> {name: state}``.

    Raises:
      ValueError: An option has no such value, or arguments are swapped.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def metric_fn(params, batch, tower):
      ...     return {"mean": tj.Weighted.mean(params * batch["x"], tower.weight)}
      >>> evaluate = build_eval_step(metric_fn, tj.Mirrored(towers=2))
      >>> x = np.array([1, 2, 6], np.float32)
      >>> float(evaluate(np.float32(2.0), {"x": x})["mean"].value)
      6.0
    """
    check_roles("build_eval_step", metric_fn=metric_fn, strategy=strategy)

    def tower_fn(state: TrainState, batch: PyTree, tower: Tower) -> dict[str, Any]:
        metrics = metric_fn(state.params, batch, tower)
        return {"metrics": check_metrics(metrics, trains=False)}

    strategy = with_specs(strategy, specs)
    return InferenceStep(tower_fn, strategy, remainder, max_programs, audit)


def build_predict_step(
    predict_fn: PredictFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int | None = None,
    specs: Any = None,
) -> InferenceStep:
    """A step that computes one output row for each example, in their order.

    Args:
      predict_fn: ``(params, batch, tower) -> outputs``, leaves ``[b, ...]``.
      strategy: Which towers, where.
      remainder: For a batch that ``T`` does not divide; padding is cut off again.
      max_programs: How many kinds of batch may compile; None is 8, with a warning
        at the second.
      specs: As for `build_train_step`.

    Returns:
      ``predict(state, batch) -> outputs``, leaves ``[B, ...]``.

    Raises:
      ValueError: An option has no such value, or arguments are swapped.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> predict = build_predict_step(
      ...     lambda params, batch, tower: params * batch["x"], tj.Mirrored(towers=2))
      >>> predict(np.float32(2.0), {"x": np.array([1, 2, 6], np.float32)}).tolist()
      [2.0, 4.0, 12.0]
    """
    check_roles("build_predict_step", predict_fn=predict_fn, strategy=strategy)

    def tower_fn(state: TrainState, batch: PyTree, tower: Tower) -> dict[str, Any]:
        outputs = predict_fn(state.params, batch, tower)
        return {"predictions": Rows(check_rows(outputs, tower.rows))}

    strategy = with_specs(strategy, specs)
    return InferenceStep(tower_fn, strategy, remainder, max_programs)
