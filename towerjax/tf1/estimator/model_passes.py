"""The passes of a model function: the first traces it, the others compute it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import towerjax as tj
from towerjax.metrics.weighted import Weighted
from towerjax.step.passes.one_pass import Pass, TowerFn
from towerjax.step.plan import StepOptions, run_in_turn, training_pass
from towerjax.tf1.estimator.losses import (
    LossReduction,
    one_loss,
    reduction_of_scalars,
)
from towerjax.tf1.estimator.model_fn import Mode, ModelOptions
from towerjax.tf1.split_program import LOSSES, SplitProgram
from towerjax.tf1.values import AnyStrategy
from towerjax.types import PyTree, Sum
from towerjax.types.trees import map_parts, parts_of

WRAP = """Please wrap optimizers with TowerOptimizer:
tj.estimator.TowerOptimizer(optax.sgd(0.1)), with its state among the variables,
reduces gradients over towers before it updates.
If each tower changes another variable on its own, make it a tj.TowerLocal, reduce it
with tower.reduce(tj.Reduction.MEAN, value), or return it as tj.Weighted(sum, weight) or
tj.Sum(x) in train_op.extra."""

_AS_IN_TF1 = "compat='tf1' divides by the number of towers, as the original did"


@dataclasses.dataclass(frozen=True, eq=False)
class PassesOfModel:
    """The `Passes` of a model function, which are found while it is traced.

    Attributes:
      first: Traces the model function, and returns its `SplitProgram` as ``split``.
      loss_reduction: How an audit reduces the losses that it compares.
      why_not_compared: Why one tower differs from several on purpose; "" if it does
        not.
    """

    first: Pass
    loss_reduction: LossReduction
    why_not_compared: str
    hold_update = True
    is_of_one_loss = False

    run = run_in_turn

    @property
    def each(self) -> tuple[Pass, ...]:
        """The pass that is known before the model function is traced."""
        return (self.first,)

    @property
    def why_not_proved(self) -> str:
        """The reason why one tower differs from several on purpose, or ""."""
        return self.why_not_compared

    @property
    def why_not_audited(self) -> str:
        """The reason why one tower differs from several on purpose, or ""."""
        return self.why_not_compared

    def changed(self, **fields: Any) -> "PassesOfModel":
        """Change these fields in each of the passes."""
        first = dataclasses.replace(self.first, **fields)
        return dataclasses.replace(self, first=first)

    def in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        """Yield the pass that traces the model function, and then its other passes.

        A pass ends wherever the model function needs a sum over all towers.
        """
        # The pass that traces has no results that a guard could check.
        yield dataclasses.replace(self.first, looks_at=None)
        split = merged[0]["split"]
        for number in range(split.num_passes):
            trained = split.trained(number)
            run = _pass_of_model if trained is None else _pass_with_trained
            tower_fn = functools.partial(run, split)
            yield dataclasses.replace(self.first, tower_fn=tower_fn, trained=trained)

    def given(self, merged: list[PyTree]) -> PyTree:
        """Give the results of all passes so far."""
        return [*merged]

    def compared(self, merged: list[PyTree]) -> list[PyTree]:
        """Give the reduced loss and the divided gradients of each pass."""
        return [_reduced(of_pass, self.loss_reduction) for of_pass in merged[1:]]


def model_passes(
    tower_fn: TowerFn,
    of_model: ModelOptions,
    mode: Mode,
    strategy: AnyStrategy,
    options: StepOptions,
) -> PassesOfModel:
    """Make the passes of a model function that ``tower_fn`` traces."""
    first = training_pass(
        tower_fn,
        strategy,
        options,
        reads_local=mode is not Mode.TRAIN,
        of_state=True,
        advice=WRAP,
        loss=LOSSES,
        merges_sums=True,
        loss_reduction=reduction_of_scalars(of_model.loss_reduction),
    )
    # In PREDICT nothing is divided by the number of towers, so ``compat`` makes no
    # difference between one tower and several.
    divides = of_model.compat is not None and mode is not Mode.PREDICT
    return PassesOfModel(
        first, of_model.loss_reduction, why_not_compared=_AS_IN_TF1 if divides else ""
    )


def minimized(merged: list[PyTree]) -> list[Weighted]:
    """List the losses that the optimizers minimize, if there are several updates.

    Like the spec's loss, each of them must be finite for the step to be accepted. With
    one update the list is empty.
    """
    losses = parts_of(Weighted, [of_pass[LOSSES] for of_pass in merged[1:]])
    return losses if len(losses) > 1 else []


def _pass_of_model(split: SplitProgram, *args: PyTree) -> PyTree:
    """Run one tower in a pass that does not differentiate."""
    return _pass_with_trained(split, None, *args)


def _pass_with_trained(
    split: SplitProgram,
    trained: PyTree,
    state: tj.TrainState,
    rows: PyTree,
    tower: tj.Tower,
    merged: PyTree,
) -> PyTree:
    """Run one tower in a pass that differentiates by ``trained``."""
    return split.run(state, rows, tower, merged[1:], trained)


def _reduced(merged: dict[str, PyTree], reduction: LossReduction) -> dict[str, PyTree]:
    """Reduce a pass's losses and gradients as an audit compares them.

    The losses are reduced, and the gradients are divided by the weights of the losses.
    """

    def one(loss: Any) -> Any:
        # A loss without a denominator is a ``Weighted`` here, too.
        is_pair = isinstance(loss, Weighted)
        return one_loss(reduction, loss, is_split=True) if is_pair else loss

    def as_mean(grads: PyTree, loss: Any) -> PyTree:
        if not isinstance(loss, Weighted):
            return grads
        return Weighted(map_parts(Sum, lambda x: x.value, grads), loss.weight)

    losses = merged[LOSSES]
    grads = merged["grads"]
    if isinstance(losses, list):  # one for each optimizer
        losses = [*map(one, losses)]
        grads = [*map(as_mean, grads, losses)]
    else:
        losses = one(losses)
        grads = as_mean(grads, losses)
    reduced = {**merged, LOSSES: losses, "grads": grads}
    if "loss" in merged:
        reduced["loss"] = one(merged["loss"])
    return reduced
