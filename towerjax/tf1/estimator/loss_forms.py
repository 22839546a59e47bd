"""The forms of a tower's loss: as towers add it, and as it is differentiated."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.jaxprs import tags
from towerjax.metrics.weighted import Means, Weighted, one_mean
from towerjax.step.passes.derivative import LossSums, with_fixed_weights
from towerjax.step.passes.looked_up import TracedLoss
from towerjax.step.state.trainable import OF_MODELS, trainable_flags
from towerjax.towers.outputs import as_tower_output
from towerjax.towers.tower import Tower
from towerjax.types import PyTree, Reduction


def has_denominator(loss: Any) -> bool:
    """Return whether the loss is a `Weighted` or `Means`, and so is divided."""
    return isinstance(loss, Weighted | Means)


def is_sum_of_means(loss: Any) -> bool:
    """Return whether the loss is a `Means`, of one term or of several."""
    return isinstance(loss, Means)


def addend_of(
    loss: Any, loss_reduction: Reduction | None = None, tower: Tower | None = None
) -> Weighted | Means:
    """Bring one tower's loss into the form in which it is added over towers."""
    return as_tower_output(loss, loss_reduction, tower).loss


def as_one_mean(loss: Any) -> Any:
    """Make a ``Weighted`` of a loss that is one mean; None for several means.

    A `Means` of one term becomes a ``Weighted``. Losses of other types are returned
    unchanged.
    """
    return one_mean(addend_of(loss)) if is_sum_of_means(loss) else loss


def sum_of_loss(loss: Weighted | jax.Array) -> jax.Array:
    """Take the sum out of a ``Weighted``; a scalar loss is its own sum."""
    reduction = None if isinstance(loss, Weighted) else Reduction.SUM
    addend: Any = addend_of(loss, reduction)
    return jnp.asarray(addend.sum)


def sums_of_terms(loss: Means) -> LossSums:
    """Take the sum and weight of each mean of ``loss``, and the shared terms."""
    addend: Any = addend_of(loss)
    return LossSums.of_terms(addend)


def pull_back(
    loss_fn: Callable[[PyTree], PyTree],
    params: PyTree,
    differentiated: Callable[[Any], PyTree],
    *,
    has_aux: bool,
) -> tuple[PyTree, Callable[..., PyTree], PyTree]:
    """Differentiate ``loss_fn``; return ``(values, pull, result of loss_fn)``.

    ``values`` are the numbers ``differentiated(loss)``. ``pull(factors, of_sum=False)``
    returns the gradient of the sum of the values times the factors. ``of_sum=True``
    marks it in the program, for the proof, as the gradient of a mean's sum.
    """
    traced = TracedLoss.of(loss_fn, params)

    def of_results(out: PyTree, params: PyTree) -> PyTree:
        loss = out[0] if has_aux else out
        return differentiated(with_fixed_weights(loss, params))

    values, pull_values, out = traced.vjp(params, of_results)

    def pull(factors: PyTree, *, of_sum: bool = False) -> PyTree:
        cast = jax.tree.map(lambda c, x: jnp.asarray(c, x.dtype), factors, values)
        with jax.named_scope(tags.OF_A_SUM if of_sum else "gradient"):
            return pull_values(cast)

    return values, pull, out


def check_params_of_model(params: PyTree) -> None:
    """Raise for parameters that can have no gradient.

    A model function has no option ``trainable`` to leave them out.
    """
    trainable_flags(params, True, advice=OF_MODELS)
