"""A pass for a loss: towers return their losses, which are added and differentiated."""

import dataclasses
from collections.abc import Callable
from typing import Any

from towerjax.make.gradient import (
    as_loss,
    call_refusing_writes,
    refusing_tangents,
    value_and_grad,
)
from towerjax.step.passes.one_pass import Pass, TowerFn
from towerjax.step.plan import StepOptions, training_pass
from towerjax.step.state.train_state import TrainState
from towerjax.step.state.trainable import (
    Trainable,
    check_trainable,
    trained_part,
    with_trained,
)
from towerjax.towers.outputs import check_local, check_metrics
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Tower
from towerjax.towers.variables import with_local_values
from towerjax.types import PyTree, Reduction, TowerOutput
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_choice, check_function


@dataclasses.dataclass(frozen=True)
class LossPass:
    """A loss function as a pass of `build_step`, which `of_loss` makes."""

    loss_fn: Callable[..., PyTree]
    params: Callable[..., PyTree] | None = None
    trainable: Trainable | None = None
    loss_reduction: Reduction | None = None

    def params_of(self, state: TrainState, *merged: PyTree) -> PyTree:
        """Choose the parameters at which the loss is differentiated."""
        return state.params if self.params is None else self.params(state, *merged)

    def trained(self, state: TrainState, *merged: PyTree) -> PyTree:
        """Keep the parameters that train, with None for each other leaf."""
        return trained_part(self.params_of(state, *merged), self.trainable)

    def tower(
        self,
        trained: PyTree,
        state: TrainState,
        rows: PyTree,
        tower: Tower,
        *merged: PyTree,
    ) -> dict[str, Any]:
        """Run the loss of one tower; the pass itself computes the gradient."""
        params = with_trained(trained, self.params_of(state, *merged))
        out = call_refusing_writes(self.loss_fn, params, rows, tower, *merged)
        out = as_loss(out, self.loss_reduction, tower)
        return _by_name(state, tower, out, merged)

    def with_own_gradient(
        self, state: TrainState, rows: PyTree, tower: Tower, *merged: PyTree
    ) -> dict[str, Any]:
        """Run the loss of one tower, and differentiate it."""
        params = self.params_of(state, *merged)

        def loss_fn(trained: PyTree, *args: Any) -> Any:
            return call_refusing_writes(
                self.loss_fn, with_trained(trained, params), *args
            )

        of_tower = value_and_grad(loss_fn, loss_reduction=self.loss_reduction)
        part = trained_part(params, self.trainable)
        out, grads = of_tower(part, rows, tower, *merged)
        out = out if isinstance(out, TowerOutput) else TowerOutput(out)
        return _by_name(state, tower, out, merged) | {"grads": grads}


def _by_name(
    state: TrainState, tower: Tower, out: TowerOutput, merged: tuple[PyTree, ...]
) -> dict[str, Any]:
    """Name a loss function's results by the keys that updates read."""
    local = tower.local if out.local is None else out.local
    local = check_local(tower.local, local)
    returned = {
        "loss": out.loss,
        "metrics": check_metrics(out.metrics, trains=True),
        "local": with_local_values(state.local, local),
    }
    if out.extra is not None:
        returned["extra"] = out.extra
    if merged:
        returned["before"] = merged[0]
    return returned


def pass_of(
    tower_fn: TowerFn | LossPass,
    strategy: Strategy,
    options: StepOptions,
    **fields: Any,
) -> Pass:
    """Make a training step's pass from a `LossPass` or from a plain tower function.

    ``fields`` are further fields of the pass.
    """
    if isinstance(tower_fn, LossPass):
        fields["trained"] = tower_fn.trained
        fields["loss_reduction"] = tower_fn.loss_reduction
        return training_pass(tower_fn.tower, strategy, options, **fields)
    return training_pass(refusing_tangents(tower_fn), strategy, options, **fields)


@api_boundary
def of_loss(
    loss_fn: Callable[..., PyTree],
    params: Callable[..., PyTree] | None = None,
    *,
    trainable: Trainable | None = None,
    loss_reduction: Reduction | None = None,
) -> LossPass:
    """Make a pass of `build_step` that gives the loss of all towers and its gradient.

    The towers return their losses. The step adds them and differentiates the sum once,
    so a device holds one gradient, however many towers it has. The loss may be a sum of
    several means. `value_and_grad`, called in a tower function, gives each tower's own
    gradient instead, so a device holds one gradient for each tower. With 8 towers and a
    gradient of 6 MiB that needs 48 MiB of temporary memory, and 6.4 MiB here.

    Args:
      loss_fn: ``(params, batch, tower) -> Weighted | TowerOutput``, as for
        `build_train_step`. In a later pass it is ``(params, batch, tower, merged)``,
        with the merged result of the pass before.
      params: ``(state) -> params``, the parameters at which the loss is differentiated;
        in a later pass ``(state, merged) -> params``. None takes ``state.params``.
      trainable: The parameters by which it is differentiated, as for
        `build_train_step`; the gradient has None for the others.
      loss_reduction: The meaning of a bare scalar loss, as for `build_train_step`.

    Returns:
      A pass. It merges ``"loss"``, ``"grads"``, ``"metrics"`` and ``"local"``, and
      ``"extra"`` if the loss function returns it; in a later pass also ``"before"``,
      the merged result of the pass before. ``merged["grads"].value`` is the gradient of
      ``merged["loss"].value``.

    Raises:
      ValueError: An argument is of another type.

    Example:
      >>> import dataclasses, numpy as np, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> def ahead(state, merged):  # sharpness-aware: the gradient a step uphill
      ...     return state.params + 0.5 * merged["grads"].value
      >>> def second(w, batch, tower, merged):
      ...     return loss_fn(w, batch, tower)
      >>> def update_fn(state, merged):
      ...     params = state.params - 0.1 * merged["grads"].value
      ...     metrics = {"loss": merged["before"]["loss"]}
      ...     return dataclasses.replace(state, params=params), metrics
      >>> passes = tj.of_loss(loss_fn), tj.of_loss(second, ahead)
      >>> step = tj.build_step(passes, update_fn, tj.Mirrored(towers=2))
      >>> state, metrics = step(step.init(0.0), np.array([1, 5], np.float32))
      >>> round(float(state.params), 6), float(metrics["loss"])
      (1.2, 13.0)
    """
    form = "loss_fn(params, batch, tower)"
    check_function("of_loss: loss_fn", loss_fn, form, takes=False)
    if params is not None:
        check_function("of_loss: params", params, "params(state)", takes=False)
    check_trainable(trainable)
    reductions = None, Reduction.SUM, Reduction.MEAN
    check_choice("loss_reduction", loss_reduction, reductions)
    return LossPass(loss_fn, params, trainable, loss_reduction)
