"""What do the towers say without training? Evaluation and prediction steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.executors import over_local_towers
from towerjax.input.placer import PlacedBatch, Placer
from towerjax.metrics.over_towers import merged_over_towers
from towerjax.metrics.state import is_metric
from towerjax.outputs import check_metrics, check_rows
from towerjax.placement import TowerAxes, on_every_process, place
from towerjax.program import Program, Recipe, Runner
from towerjax.report.dispatch import timed
from towerjax.report.step_report import StepReport, report_of
from towerjax.shard import Remainder, check_remainder
from towerjax.sparse import num_rows
from towerjax.state import TrainState, check_state
from towerjax.strategies import Strategy
from towerjax.tower import TowerInputs, branches_explained
from towerjax.tower_local import read_local_over_towers
from towerjax.types import Layout, MetricFn, PredictFn, PyTree

_MODEL_LAYOUT = {
    "params": Layout.MIRRORED,
    "local": Layout.PER_TOWER,
    "step": Layout.MIRRORED,
    "rng": Layout.MIRRORED,
}


def _model_of(state: Any, placement: Any) -> dict[str, Any]:
    """What of a state an evaluation reads; parameters alone will do."""
    if isinstance(state, TrainState):
        return {
            "params": state.params,
            "local": state.local,
            "step": state.step,
            "rng": state.rng,
        }
    alone = {
        "params": state,
        "local": {},
        "step": jnp.int32(0),
        "rng": jax.random.key(0),
    }
    return place(alone, placement, _MODEL_LAYOUT)


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over a batch before it is compiled.

    Attributes:
      fn: The user's function of ``(params, batch, tower)``.
      strategy: Which towers, where.
      finish: ``(what it returned, rows) -> (states, kept)``.
      combine: ``(merged states, kept [k, ...]) -> result``.
    """

    fn: Callable[..., Any]
    strategy: Strategy
    finish: Callable[..., tuple[PyTree, PyTree]]
    combine: Callable[..., Any]

    def on_device(self, axes: TowerAxes) -> Callable[..., Any]:
        """The pass as each device runs it.

        Args:
          axes: The axes that the towers meet over.

        Returns:
          ``(model, batch, num_valid) -> (result,)``.
        """
        ops = self.strategy.cross_tower_ops

        def run(model: dict[str, Any], batch: PyTree, num_valid: jax.Array) -> Any:
            states, kept = self._towers(axes, model, batch, num_valid)
            return (self.combine(merged_over_towers(ops, states, axes), kept),)

        return run

    def counted(self, axes: TowerAxes) -> Callable[..., Any]:
        """A device's metric states, before they are merged.

        Args:
          axes: One tower a device.

        Returns:
          ``(model, batch, num_valid) -> {"metrics": ...}``, leaves ``[1, ...]``.
        """

        def run(model: dict[str, Any], batch: PyTree, num_valid: jax.Array) -> Any:
            return {"metrics": self._towers(axes, model, batch, num_valid)[0]}

        return run

    def _towers(
        self,
        axes: TowerAxes,
        model: dict[str, Any],
        batch: PyTree,
        num_valid: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        inputs = TowerInputs(self.strategy, axes, model["step"], model["rng"])
        ops = self.strategy.cross_tower_ops
        local = read_local_over_towers(model["local"], ops, axes)
        rows = jax.tree.map(
            lambda x: x.reshape((axes.num_local, -1) + x.shape[1:]), batch
        )

        def tower_fn(tower_id: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
            rows, num_valid = own
            size = num_rows(rows)
            tower = inputs.tower(tower_id, local, num_valid, size)
            with branches_explained():
                out = self.fn(model["params"], rows, tower)
            return self.finish(out, size)

        return over_local_towers(tower_fn, axes, (rows, num_valid), stack_sums=True)


class InferenceStep:
    """A pure step ``(state, batch) -> result``; see the builders.

    Made by `build_eval_step` and `build_predict_step`.
    """

    def __init__(
        self,
        one_pass: Pass,
        result_layout: Layout,
        remainder: Remainder,
        max_programs: int,
    ) -> None:
        check_remainder(remainder)
        self.strategy = strategy = one_pass.strategy
        in_layouts = {
            "state": _MODEL_LAYOUT,
            "batch": Layout.PER_TOWER,
            "num_valid": Layout.PER_TOWER,
        }
        recipe = Recipe(
            one_pass.on_device,
            in_layouts,
            {"result": result_layout},
            donate=False,
            counted=one_pass.counted if result_layout is Layout.MIRRORED else None,
        )
        self._runner = Runner(recipe, strategy.placement, max_programs=max_programs)
        self._placer = Placer(
            strategy.placement, shares=strategy.num_towers, remainder=remainder
        )
        self._cuts_padding = result_layout is Layout.PER_TOWER

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """The batch checked, padded or cut, and placed with its towers.

        Args:
          batch: A pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          A ``PlacedBatch``, which the step takes as it takes a batch.

        Raises:
          ValueError: The batch is malformed, or does not divide.
        """
        if not isinstance(batch, PlacedBatch):
            return self._placer.place(batch)
        batch.check(self.strategy.placement)
        if batch.num_steps is not None:
            raise ValueError(
                f"The placed batch holds {batch.num_steps} steps' batches for a train"
                " step; evaluation and prediction take one. Use place_batch."
            )
        return batch

    def program(self, state: Any, batch: PyTree) -> Program:
        """The compiled program for such a batch; compiles it if need be.

        Args:
          state: As for a call.
          batch: A global batch.

        Returns:
          A ``Program``: ``.call.as_text()`` is the compiler's own text.
        """
        model = _model_of(state, self.strategy.placement)
        return self._runner.program((model,), self.place_batch(batch))

    def report(self, state: Any, batch: PyTree, *, timed_calls: int = 0) -> StepReport:
        """What the compiler made of the step for such a batch.

        Args:
          state: As for a call.
          batch: A global batch.
          timed_calls: So many calls are timed; 0 times none.

        Returns:
          A ``StepReport``.

        Raises:
          ValueError: As a step's call.
        """
        if timed_calls < 0:
            raise ValueError(f"timed_calls={timed_calls} must be 0 or more.")
        batch, placement = self.place_batch(batch), self.strategy.placement
        program, timing = self.program(state, batch), None
        if timed_calls:
            model = _model_of(state, placement)

            def call(model: Any) -> Any:
                return model, program.call(model, *batch.args)

            timing = timed(call, model, timed_calls)
        recipe = self._runner.recipe
        return report_of(program, recipe, placement, keeps=False, timing=timing)

    def __call__(self, state: Any, batch: PyTree) -> Any:
        """The result for one global batch.

        Args:
          state: A ``TrainState``, which is kept, or parameters alone.
          batch: A global batch, a pytree of NumPy or JAX arrays ``[B, ...]``.

        Returns:
          For evaluation the metric states, which merge; for prediction the outputs
          of the ``B`` examples.

        Raises:
          ValueError: A malformed batch, before anything is compiled.
        """
        batch = self.place_batch(batch)
        model = _model_of(state, self.strategy.placement)
        try:
            (result,) = self._runner((model,), batch)
        except (TypeError, ValueError) as error:
            # JAX refuses a wrong state before it runs; say it in our words.
            if isinstance(state, TrainState):
                check_state(state, self.strategy.placement)
            error.add_note(
                "This step compiles for one kind of state: give it a TrainState each"
                " time or parameters alone each time, of the same tree and shapes."
            )
            raise
        if not self._cuts_padding:
            return result
        result = on_every_process(result, self.strategy.placement)
        if batch.padded:
            # By way of the host: a slice on the devices compiles for every new size.
            kept = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)
            result = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[kept]), result)
        return result


def build_eval_step(
    metric_fn: MetricFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int = 1,
) -> InferenceStep:
    """A step that computes metrics over a global batch.

    The result holds metric states, ``Weighted`` or others of ``tj.metrics``: merge
    those of several batches, then compute; so a metric over a data set is exact
    however it is cut (`evaluate_all` does both). Tower-local variables are read by
    their own reduction.

    Args:
      metric_fn: ``(params, batch, tower) -> {name: state}``.
      strategy: Which towers, where.
      remainder: For a batch that ``T`` does not divide, as in `build_train_step`.
      max_programs: How many kinds of batch may compile.

    Returns:
      ``evaluate(state, batch) -> {name: state}``.

    Raises:
      ValueError: An option is not one that there is.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def metric_fn(params, batch, tower):
      ...     return {"mean": tj.Weighted.mean(params * batch["x"], tower.weight)}
      >>> evaluate = build_eval_step(metric_fn, tj.Mirrored(towers=2))
      >>> x = np.array([1, 2, 6], np.float32)
      >>> float(evaluate(jnp.float32(2.0), {"x": x})["mean"].value)
      6.0
    """

    def finish(metrics: Any, rows: int) -> tuple[PyTree, PyTree]:
        metrics = check_metrics(metrics, loss_is_free=True)
        states = {name: x for name, x in metrics.items() if is_metric(x)}
        return states, {name: x for name, x in metrics.items() if name not in states}

    def combine(states: PyTree, mirrored: PyTree) -> PyTree:
        return {**states, **jax.tree.map(lambda x: x[0], mirrored)}

    one_pass = Pass(metric_fn, strategy, finish, combine)
    return InferenceStep(one_pass, Layout.MIRRORED, remainder, max_programs)


def build_predict_step(
    predict_fn: PredictFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int = 1,
) -> InferenceStep:
    """A step that computes one output row for each example, in their order.

    Args:
      predict_fn: ``(params, batch, tower) -> outputs``, leaves ``[b, ...]``.
      strategy: Which towers, where.
      remainder: For a batch that ``T`` does not divide; padding is cut off again.
      max_programs: How many kinds of batch may compile.

    Returns:
      ``predict(state, batch) -> outputs``, leaves ``[B, ...]``.

    Raises:
      ValueError: An option is not one that there is.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> predict = build_predict_step(
      ...     lambda params, batch, tower: params * batch["x"], tj.Mirrored(towers=2))
      >>> predict(jnp.float32(2.0), {"x": np.array([1, 2, 6], np.float32)}).tolist()
      [2.0, 4.0, 12.0]
    """

    def finish(outputs: PyTree, rows: int) -> tuple[PyTree, PyTree]:
        return (), check_rows(outputs, rows)

    def combine(summed: PyTree, outputs: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), outputs)

    one_pass = Pass(predict_fn, strategy, finish, combine)
    return InferenceStep(one_pass, Layout.PER_TOWER, remainder, max_programs)
