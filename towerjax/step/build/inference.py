"""Evaluation and prediction steps, which run towers and update nothing."""

from collections.abc import Callable, Sequence
from typing import Any

from towerjax.data.shard import Remainder
from towerjax.step.build.step import Step
from towerjax.step.run.engine import Engine, Passes, StepOptions, state_ins
from towerjax.step.run.one_pass import Pass
from towerjax.step.run.policies import Read
from towerjax.step.state.accumulators import as_own
from towerjax.step.state.train_state import TrainState
from towerjax.towers.outputs import check_metrics, check_rows
from towerjax.towers.strategies import Strategy, check_roles, with_specs
from towerjax.towers.tower import Tower
from towerjax.types import Layout, MetricFn, PredictFn, PyTree, Rows
from towerjax.types.door import door


def _reading_step(
    tower_fn: Callable[..., dict[str, PyTree]], strategy: Strategy, **options: Any
) -> Step:
    """A step of one pass that reads a state, and returns what is merged."""

    def finish(_: Any, __: Any, merged: Sequence[PyTree], ___: Any) -> tuple[PyTree]:
        return (as_own(merged[0]),)

    passes = Passes((Pass(tower_fn, strategy, reads_local=True),))
    ins = state_ins(strategy, ("state", "counters"))
    engine = Engine(passes, finish, ins, (Layout.MIRRORED,))
    of_step = StepOptions(**options, donate=False, on_nonfinite="ignore")
    return Step(engine, strategy, of_step, Read(strategy))


@door
def build_eval_step(
    metric_fn: MetricFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int | None = None,
    audit: bool | None = None,
    specs: Any = None,
) -> Step:
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

    options = {"remainder": remainder, "max_programs": max_programs, "audit": audit}
    return _reading_step(tower_fn, with_specs(strategy, specs), **options)


@door
def build_predict_step(
    predict_fn: PredictFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int | None = None,
    audit: bool | None = None,
    specs: Any = None,
) -> Step:
    """A step that computes one output row for each example, in their order.

    Args:
      predict_fn: ``(params, batch, tower) -> outputs``, leaves ``[b, ...]``.
      strategy: Which towers, where.
      remainder: For a batch that ``T`` does not divide; padding is cut off again.
      max_programs: How many kinds of batch may compile; None is 8, with a warning
        at the second.
      audit: As for `build_train_step`: the rows are compared.
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

    options = {"remainder": remainder, "max_programs": max_programs, "audit": audit}
    return _reading_step(tower_fn, with_specs(strategy, specs), **options)
