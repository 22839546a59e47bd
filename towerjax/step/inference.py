"""Evaluation and prediction steps, which run towers and update nothing."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.data.placer import BATCH_LAYOUT, PlacedBatch, Placer
from towerjax.data.shard import Remainder, check_remainder
from towerjax.mesh.placement import are_placed, on_every_process, place
from towerjax.step import state_checks
from towerjax.step.one_pass import Pass
from towerjax.step.program import Program, Runner, prepare
from towerjax.step.proving import Recipe, Run
from towerjax.step.report.step_report import StepReport, report_on
from towerjax.step.returned import fill_holes, without_padding
from towerjax.step.state import TrainState, make_state, state_layout
from towerjax.towers.outputs import check_metrics, check_rows
from towerjax.towers.strategies import Strategy, check_roles
from towerjax.towers.tower import Tower
from towerjax.types import Layout, MetricFn, PredictFn, PyTree, Rows
from towerjax.types.leaves import refuse_traced, refuse_unheld
from towerjax.types.options import check_whole


def _model_part(state: TrainState) -> TrainState:
    """The state without the fields that evaluation never reads."""
    return dataclasses.replace(state, opt_state=(), seen=None, own=None)


def place_params(params: PyTree, strategy: Strategy) -> PyTree:
    """Place parameters as in a state; they are not copied if they lie there already."""
    refuse_traced(params)
    refuse_unheld("params", params)
    placement, layout = strategy.placement, state_layout(strategy).params
    if are_placed(params, placement, layout):
        return params
    return place(params, placement, layout)


class InferenceStep:
    """A pure step of `build_eval_step` or `build_predict_step`."""

    def __init__(
        self,
        tower_fn: Callable[..., dict[str, PyTree]],
        strategy: Strategy,
        remainder: Remainder,
        max_programs: int | None,
    ) -> None:
        check_remainder(remainder)
        check_whole("max_programs", max_programs, or_none=True)
        self.strategy, placement = strategy, strategy.placement
        one = Pass(tower_fn, strategy, reads_local=True)

        def towers(run: Run, state: TrainState, *batch: PyTree) -> tuple[Any, Any]:
            out = run(one, state, *batch, ())
            return out.merged, out.own

        in_layouts = {"state": state_layout(strategy), **BATCH_LAYOUT}
        out_layouts = (Layout.MIRRORED, Layout.PER_TOWER)
        recipe = Recipe(towers, in_layouts, out_layouts, donate=False)
        self._runner = Runner(recipe, placement, max_programs=max_programs)
        self._placer = Placer(placement, remainder=remainder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.strategy})"

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers."""
        placed = self._placer.place(batch)
        placed.refuse_several()
        return placed

    def place(self, state: Any) -> TrainState:
        """What evaluation reads of a state or of bare parameters, on the devices."""
        return self._place(self._model_of(state))

    def _place(self, model: TrainState) -> TrainState:
        """The model itself if it lies there already."""
        refuse_traced(model)
        state_checks.check_not_donated(model)
        state_checks.check_num_towers(model, self.strategy.num_towers)
        placement, layout = self.strategy.placement, state_layout(self.strategy)
        here = are_placed(model, placement, layout)
        return model if here else place(model, placement, layout)

    def _model_of(self, state: Any) -> TrainState:
        """What evaluation reads of a state; bare parameters are made a state."""
        if isinstance(state, TrainState):
            return _model_part(state)
        step, rng = self._counters
        return TrainState(step, place_params(state, self.strategy), (), {}, rng)

    @property
    def fn(self) -> Callable[[Any, PyTree], Any]:
        """The step as a JAX function of global arrays, as a train step's ``fn``."""

        def fn(state: Any, batch: PyTree) -> Any:
            if not isinstance(state, TrainState):
                step, rng = jnp.int32(0), jax.random.key(0)
                state = TrainState(step, jax.tree.map(jnp.asarray, state), (), {}, rng)
            placed = self._placer.fit_traced(batch)
            tree, own = self._runner.trace((_model_part(state),), placed)
            return _result(tree, own, placed)

        return fn

    @functools.cached_property
    def _counters(self) -> PyTree:
        """The step number and the key that go with bare parameters."""
        # The value is cached, so it must not be traced. A key has no explicit transfer.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            counters = (np.int32(0), jax.random.key(0))
            return place(counters, self.strategy.placement, Layout.MIRRORED)

    def program(self, state: Any, batch: PyTree) -> Program:
        """The compiled program for such a batch; compiles it if need be."""
        if self.strategy.placement.absent is not None:
            if not isinstance(state, TrainState):
                state = make_state(1, state, (), shapes=True)
            args = (_model_part(state), *self._placer.shapes(batch))
            return prepare(self._runner.recipe, self.strategy.placement, args)[1]()
        model = self.place(state)
        return self._runner.program((model,), self.place_batch(batch))

    def report(self, state: Any, batch: PyTree, *, timed_calls: int = 0) -> StepReport:
        """What the compiler made of the step for such a batch."""
        return report_on(self, state, batch, timed_calls, split=lambda model: (model,))

    def __call__(self, state: Any, batch: PyTree) -> Any:
        """The result for one global batch."""
        batch = self.place_batch(batch)
        model = self._model_of(state)
        try:
            tree, own = self._runner((model,), batch)
        except (RuntimeError, TypeError, ValueError, IndexError):
            # JAX refuses a donated state, and one of other devices or leaves.
            placed = self._place(model)
            if (program := self._runner.programs.get(batch.signature)) is not None:
                state_checks.check_like(placed, program.call.args_info[0][0])
            if placed is model:
                raise
            return self(placed, batch)
        return _result(tree, on_every_process(own, self.strategy.placement), batch)


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

    return InferenceStep(tower_fn, strategy, remainder, max_programs)


def build_predict_step(
    predict_fn: PredictFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int | None = None,
) -> InferenceStep:
    """A step that computes one output row for each example, in their order.

    Args:
      predict_fn: ``(params, batch, tower) -> outputs``, leaves ``[b, ...]``.
      strategy: Which towers, where.
      remainder: For a batch that ``T`` does not divide; padding is cut off again.
      max_programs: How many kinds of batch may compile; None is 8, with a warning
        at the second.

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

    return InferenceStep(tower_fn, strategy, remainder, max_programs)
