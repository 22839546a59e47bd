"""`build_step`, and the builders of steps that evaluate or predict."""

from collections.abc import Sequence
from typing import Any

from towerjax.data.batch_rows import Remainder
from towerjax.make.checked import step_of
from towerjax.make.of_loss import LossPass, pass_of
from towerjax.step.passes.one_pass import Pass, TowerFn
from towerjax.step.plan import (
    PassesInOrder,
    Plan,
    StepOptions,
    training_plan,
    unguarded_plan,
)
from towerjax.step.state.next_state import Guard, OnNonfinite, Update
from towerjax.step.state.policies import Read, StatePolicy
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import EvalStep, Step, TrainStep
from towerjax.towers.outputs import check_metrics, check_rows
from towerjax.towers.strategies import Strategy, check_roles, with_specs
from towerjax.towers.tower import Tower
from towerjax.types import MetricFn, PredictFn, PyTree, Rows
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_function


@api_boundary
def build_step(
    tower_fn: TowerFn | LossPass | Sequence[TowerFn | LossPass],
    update_fn: Update,
    strategy: Strategy,
    *,
    micro_batches: int = 1,
    remainder: Remainder = "error",
    on_nonfinite: OnNonfinite = "raise",
    guard: Guard = "gradients",
    donate: bool = True,
    max_programs: int = 1,
    audit: bool | None = None,
    specs: Any = None,
) -> TrainStep:
    """Build a step of your own: towers compute, their results merge, the state changes.

    The type of a leaf that a tower returns says how it is merged. ``Weighted`` and
    other metric states are merged over micro-batches and towers, and divided once.
    ``Sum`` is added. ``Rows`` become the rows of the global batch. ``PerTower`` and
    ``TowerLocal`` keep each tower's own value, ``[T, ...]``;
    ``PerTower(Weighted(...))`` is merged over the tower's micro-batches only. A bare
    array must be proved to be the same on every tower, or the step is refused. Each
    later pass gets the merged result of the pass before.

    Args:
      tower_fn: ``(state, batch, tower) -> tree``, called for one tower with its own
        rows. Or a tuple of passes, of which the second and later ones are ``(state,
        batch, tower, merged) -> tree``. A pass may be ``of_loss(loss_fn)``, which gives
        a loss and its gradient.
      update_fn: ``(state, merged) -> (state, metrics)``, called once with global
        values. ``merged`` holds the types that towers returned, such as
        ``merged["grads"].value``; ``metrics`` maps names to arrays or metric states.
        The step adds 1 to ``state.step`` by itself. If it returns ``(state, metrics,
        fine)``, the state is taken as it is; if the bool ``fine`` is False,
        ``on_nonfinite="raise"`` raises.
      strategy: The towers, their devices, and how values are reduced over them.
      micro_batches: As for `build_train_step`.
      remainder: As for `build_train_step`.
      on_nonfinite: As for `build_train_step`.
      guard: The values that must be finite. ``"loss"`` looks at ``metrics["loss"]``, or
        at all metrics if none has that name. ``"gradients"`` looks also at every sum
        over towers, except those under ``"metrics"``.
      donate: As for `build_train_step`.
      max_programs: As for `build_train_step`.
      audit: As for `build_train_step`; every leaf of what towers return is compared.
      specs: As for `build_train_step`.

    Returns:
      A `Step`.

    Raises:
      ValueError: An option has an unknown value, or a function takes other arguments.

    Example:
      >>> import dataclasses, numpy as np, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> def tower_fn(state, batch, tower):
      ...     loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
      ...     return {"loss": loss, "grads": grads, "own": tj.PerTower(grads.sum)}
      >>> def update_fn(state, merged):
      ...     params = state.params - 0.5 * merged["grads"].value
      ...     metrics = {"loss": merged["loss"], "own": merged["own"]}
      ...     return dataclasses.replace(state, params=params), metrics
      >>> step = build_step(tower_fn, update_fn, tj.Mirrored(towers=2))
      >>> state, metrics = step(step.init(0.0), np.array([1, 5], np.float32))
      >>> float(state.params), float(metrics["loss"]), metrics["own"].tolist()
      (3.0, 13.0, [-2.0, -10.0])
    """
    tower_fns = tuple(tower_fn) if isinstance(tower_fn, Sequence) else (tower_fn,)
    first = next(iter(tower_fns), None)
    first = first.loss_fn if isinstance(first, LossPass) else first
    check_roles("build_step", tower_fn=first, update_fn=update_fn, strategy=strategy)
    for i, each_fn in enumerate(tower_fns):
        later = ", merged" * (i > 0)
        if isinstance(each_fn, LossPass):
            form = f"loss_fn(params, batch, tower{later})"
            check_function("loss_fn", each_fn.loss_fn, form)
        else:
            check_function("tower_fn", each_fn, f"tower_fn(state, batch, tower{later})")
    check_function("update_fn", update_fn, "update_fn(state, merged)")

    def planned(strategy: Strategy, options: StepOptions) -> Plan:
        fields: dict[str, Any] = {"rows_used_later": True}
        passes = tuple(pass_of(fn, strategy, options, **fields) for fn in tower_fns)
        # A step whose batch has no examples is not refused: update_fn decides what it
        # does.
        states = StatePolicy(strategy)
        return training_plan(
            strategy,
            options,
            PassesInOrder(passes),
            update_fn,
            states,
            needs_examples=False,
            remade=planned,
            moved=planned,
        )

    options = StepOptions(
        micro_batches, remainder, on_nonfinite, guard, donate, max_programs, audit
    )
    return step_of(planned(with_specs(strategy, specs), options))


def _reading_step(tower_fn: TowerFn, strategy: Strategy, **options: Any) -> Step[Any]:
    """Build a step of one pass, which changes no state."""

    def results(state: TrainState, merged: list[PyTree]) -> tuple[TrainState, PyTree]:
        return state, merged[0]

    passes = PassesInOrder((Pass(tower_fn, strategy, reads_local=True),))
    of_step = StepOptions(**options, donate=False, on_nonfinite="ignore")
    return step_of(unguarded_plan(strategy, of_step, passes, results, Read(strategy)))


@api_boundary
def build_eval_step(
    metric_fn: MetricFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int | None = None,
    audit: bool | None = None,
    specs: Any = None,
) -> EvalStep:
    """Build a step that computes metrics over a global batch.

    Merge the states of several batches and then compute the metric: it is exact for the
    whole data set, whatever the batches are (`evaluate` does both). Tower-local
    variables are read by their own reduction.

    Args:
      metric_fn: ``(params, batch, tower) -> {name: state}``, called for one tower.
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


@api_boundary
def build_predict_step(
    predict_fn: PredictFn,
    strategy: Strategy,
    *,
    remainder: Remainder = "pad",
    max_programs: int | None = None,
    audit: bool | None = None,
    specs: Any = None,
) -> Step[PyTree]:
    """Build a step that computes one output row for each example, in their order.

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
