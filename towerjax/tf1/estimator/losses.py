"""Reduce the towers' losses and gradients, exactly over the global batch."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

import towerjax as tj
from towerjax.metrics.rows import as_floats, element_weights
from towerjax.metrics.weighted import Weighted
from towerjax.tf1.estimator.loss_forms import (
    addend_of,
    has_denominator,
    is_sum_of_means,
)
from towerjax.tf1.meets import (
    bound_here,
    differentiate,
    map_gradients,
    meet,
    sum_inside,
)
from towerjax.types import PyTree, Reduction, Sum


class LossReduction(enum.Enum):
    """How the losses of several towers are reduced to one.

    With ``SUM`` and ``MEAN`` a tower's loss is a scalar: ``SUM`` adds the towers'
    scalars, and ``MEAN`` takes the mean over those towers that have examples. With
    ``SUM_BY_NONZERO_WEIGHTS`` and ``SUM_OVER_BATCH_SIZE`` it is a ``Weighted``: sums
    and weights are added over the global batch, and divided once. ``NONE`` is refused.

    Source:
      ``tf.losses.Reduction`` of TensorFlow 1.
    """

    SUM = "sum"
    MEAN = "mean"
    SUM_BY_NONZERO_WEIGHTS = "sum_by_nonzero_weights"
    SUM_OVER_BATCH_SIZE = "sum_over_batch_size"
    NONE = "none"

    __repr__ = enum.Enum.__str__


_OF_SCALARS = {LossReduction.SUM: Reduction.SUM, LossReduction.MEAN: Reduction.MEAN}


def reduction_of_scalars(reduction: LossReduction) -> Reduction | None:
    """Look up how scalar losses are reduced; None if losses have weights."""
    return _OF_SCALARS.get(reduction)


def check_loss_reduction(reduction: Any) -> None:
    """Raise unless ``reduction`` is a `LossReduction` other than NONE."""
    if not isinstance(reduction, LossReduction) or reduction is LossReduction.NONE:
        why = f"loss_reduction={reduction!r} is not a tj.estimator.LossReduction"
        if reduction is LossReduction.NONE:
            # This sentence is TensorFlow's own message.
            why = "Tower losses need to be reduced in some way, yet none reduction is"
            why += " specified"
        raise ValueError(
            f"{why}. Write tj.estimator.LossReduction.SUM_BY_NONZERO_WEIGHTS, which is"
            " exact over the global batch, SUM_OVER_BATCH_SIZE, SUM or MEAN. Pass a"
            " strategy as devices=..."
        )


def compute_weighted_loss(
    losses: jax.typing.ArrayLike,
    weights: jax.typing.ArrayLike | None = None,
    *,
    reduction: LossReduction = LossReduction.SUM_BY_NONZERO_WEIGHTS,
    valid: jax.typing.ArrayLike | None = None,
) -> Weighted | jax.Array:
    """Weight and reduce the losses of one tower's elements.

    Args:
      losses: The losses of the elements, ``[b, ...]``.
      weights: Weights >= 0. Their shape is ``[b]``, or that of any leading dims of
        ``losses``; or it has as many dims, some of which may be 1, such as ``[1, k]``.
        None counts every element once. An element of weight 0 is left out even if its
        loss is NaN.
      reduction: The reduction, which sets the divisor. ``SUM_BY_NONZERO_WEIGHTS``
        divides by the number of elements whose weight is not 0, ``SUM_OVER_BATCH_SIZE``
        by the number of elements, ``MEAN`` by the sum of the weights. ``SUM`` does not
        divide.
      valid: 1 for each row that is an example and 0 for padding, ``[b]``; pass
        ``tower.weight``. Padding counts neither in the numerator nor in the
        denominator.

    Returns:
      A ``Weighted`` for the two reductions that are exact over the global batch; a
      scalar for SUM and MEAN.

    Raises:
      ValueError: Shapes do not fit, a weight is known to be negative, or the
        reduction is NONE.

    Example:
      >>> float(compute_weighted_loss([2.0, 4.0, 6.0], [1.0, 0.5, 0.0]).value)
      2.0

    Source:
      ``tf.losses.compute_weighted_loss`` of TensorFlow 1.
    """
    check_loss_reduction(reduction)
    losses = as_floats(losses)
    weights = _like_losses(weights, losses, repeats=True)
    rows = _like_losses(valid, losses)
    weighted = Weighted.mean(losses, weights * rows)
    match reduction:
        case LossReduction.SUM:
            return jnp.asarray(weighted.sum)
        case LossReduction.MEAN:
            return weighted.value
        case LossReduction.SUM_BY_NONZERO_WEIGHTS:
            counted = jnp.where(weights != 0, rows, 0)
        case LossReduction.SUM_OVER_BATCH_SIZE:
            counted = rows
        case LossReduction.NONE:
            raise AssertionError("refused above")
        case _:
            assert_never(reduction)
    return Weighted(weighted.sum, counted.sum())


def _like_losses(
    weights: Any, losses: jax.Array, *, repeats: bool = False
) -> jax.Array:
    """Check ``weights`` and broadcast them to the shape of ``losses``; None is 1."""
    name = "compute_weighted_loss"
    shape = losses.shape
    weights = element_weights(name, shape, weights, "losses", repeats=repeats)
    return weights.astype(losses.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class TowersOfStep:
    """The towers of one step, over which losses and gradients are reduced."""

    tower: tj.Tower
    reduction: LossReduction
    compat: str | None  # "tf1": divide by T always, as TensorFlow 1 did
    trace: Any  # JAX's trace of the model function, to notice a jit or scan in it
    num_calls: int  # towers times micro-batches

    @property
    def is_alone(self) -> bool:
        """Whether a single tower has all rows at once, so that any loss is exact."""
        return self.num_calls == 1

    @property
    def takes_scalars(self) -> bool:
        """Whether a tower's loss may be a scalar, which has no denominator."""
        return self._is_of_scalars or self.is_alone

    @property
    def _is_of_scalars(self) -> bool:
        """Whether several towers must return scalar losses.

        The loss of a single tower is then reduced in the same way.
        """
        return self.compat == "tf1" or self.reduction in _OF_SCALARS

    @property
    def differentiates(self) -> bool:
        """Whether the losses of all towers are added up and differentiated once.

        Otherwise each tower's loss is differentiated by itself. That is so for a mean
        of the towers' means, in which a tower without examples is left out, and inside
        a jit, scan or cond, where no pass can end.
        """
        is_of_means = self.compat == "tf1" or self.reduction is LossReduction.MEAN
        return get_opaque_trace_state() == self.trace and not is_of_means

    def differentiate(
        self, of_params: Callable[[PyTree], PyTree], params: PyTree, has_aux: bool
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Differentiate the sum of all towers' losses once.

        Return ``(result of of_params, gradient, loss)``. The gradient and the loss are
        those of all towers together.
        """

        def of_loss(params: PyTree) -> tuple[Any, PyTree]:
            out = of_params(params)
            return self.addend(out[0] if has_aux else out), out

        total, grads, out = differentiate(of_loss, params, self.num_calls)
        if is_sum_of_means(total):  # its terms are already divided
            return out, grads, total.value
        total = one_loss(self.reduction, total, is_split=not self.is_alone)
        return out, divided(grads, total.weight), total.value

    def addend(self, loss: Any) -> Any:
        """Bring one tower's loss into the form in which it is added over towers.

        Raise if the form of ``loss`` does not fit the loss reduction. See `addend_of`.
        """
        scalar = _OF_SCALARS.get(self.reduction)
        is_weighted = has_denominator(loss)
        if self.is_alone:
            scalar = None if is_weighted else scalar or Reduction.MEAN
        elif self.compat == "tf1":
            loss = loss.value if is_weighted else loss
            scalar = scalar or Reduction.MEAN
        elif is_weighted == (scalar is not None):
            form = _WEIGHTED if is_weighted else _BARE
            raise ValueError(form.format(type(loss).__name__, self.reduction))
        return addend_of(loss, scalar, self.tower)

    def meet(self, loss: Any, grads: PyTree) -> tuple[Weighted, PyTree]:
        """Reduce the loss and sum the gradients, the same on all towers.

        A loss that is a ``Sum`` is one tower's share of a loss that has been divided
        already. It holds a ``Weighted``, whose weight only tells whether there are
        examples.
        """
        reduction = self.reduction
        is_split = not self.is_alone
        is_part = isinstance(loss, Sum)
        if is_part:
            reduction = LossReduction.SUM
            addend = loss.value
        else:
            addend: Any = self.addend(jnp.float32(0) if loss is None else loss)
        if self._is_of_scalars:  # leave out the gradients of towers without examples
            counts = jnp.asarray(addend.weight) > 0
            grads = map_gradients(lambda g: jnp.where(counts, g, 0), grads)
        total, grads = self._sum_towers(addend, grads)
        return one_loss(reduction, total, is_split=is_split or is_part), grads

    def sum_weights(self, weights: list[PyTree]) -> tuple[list[PyTree], int]:
        """Add the weights over all towers; return sums, and the number of addends."""
        _, weights = self._sum_towers(None, weights)
        return weights, self.num_calls

    def _sum_towers(
        self, loss: Weighted | None, grads: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Sum the losses and gradients over towers.

        Raise inside a jit, scan or cond if towers cannot communicate there.
        """
        if get_opaque_trace_state() == self.trace:
            return meet(loss, grads, self.num_calls)
        in_turn = self.tower.strategy.placement.axes.in_turn
        if not self.is_alone and (in_turn or self.num_calls > self.tower.num_towers):
            raise ValueError(_INSIDE)
        return sum_inside(self.tower, (loss, grads))


def towers_here() -> TowersOfStep | None:
    """Find the towers of the step whose model function is being traced, or None."""
    return bound_here(TowersOfStep)


def one_loss(reduction: LossReduction, total: Any, *, is_split: bool) -> Any:
    """Make the reduced loss of the towers' losses, added up.

    Under SUM it is not divided: its weight is 1.
    """
    if reduction is LossReduction.SUM and is_split:
        return Weighted(total.sum, jnp.ones_like(total.sum))
    return total


def divided(grads: PyTree, weight: Any) -> PyTree:
    """Divide the gradients by a weight; 0 if the weight is 0."""
    # The gradients are divided as one tree, so that one reciprocal scales every leaf.
    return Weighted([grads], weight).value[0]


_INSIDE = (
    "TowerOptimizer.update was called inside a jit, scan or cond, where towers cannot"
    " communicate with tower_loop='scan' or several micro-batches. Call it outside. If"
    " another optimizer calls it there, make TowerOptimizer the outer one:"
    " TowerOptimizer(optax.apply_if_finite(...)). Or use tower_loop='vmap' and one"
    " micro-batch."
)
_WEIGHTED = (
    "model_fn returned a tj.{}, but loss_reduction={!r} needs a scalar loss. Return a"
    " scalar, or use tj.estimator.LossReduction.SUM_BY_NONZERO_WEIGHTS."
)
_BARE = (
    "model_fn returned a bare scalar ({}), which does not say what it was divided by,"
    " but loss_reduction={!r} needs that. Return tj.Weighted.mean(losses, tower.weight)"
    " or tj.estimator.compute_weighted_loss(losses, weights, valid=tower.weight), or"
    " use tj.estimator.LossReduction.SUM or MEAN, or compat='tf1'."
)
