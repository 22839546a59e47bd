"""The gradient of a loss: the losses are added first, and then differentiated once.

``of_part(trained)`` gives the results of one part of a batch: of one tower, or of all
towers of a device, whose losses it has added. So one derivative is the sum of the
gradients of these towers, and no program of gradients is added up.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from towerjax.collectives.sparse_rows import map_values
from towerjax.metrics.rows import ratio
from towerjax.metrics.weighted import Means, Weighted, one_mean
from towerjax.step.state.accumulators import as_returned, values_of
from towerjax.types import PyTree, Sum
from towerjax.types.leaves import widen_dtype


@dataclasses.dataclass(frozen=True)
class LossSums:
    """What of a loss is differentiated, and what its terms are divided by."""

    sums: list[jax.Array]  # () each
    # One for each sum; none where the loss is a total, which nothing divides.
    weights: list[Any]
    shared: list[jax.Array]  # the term that all towers share, if it stands by itself

    @classmethod
    def of(cls, loss: Weighted | Means | Sum) -> "LossSums":
        """Those of a loss that towers returned."""
        if isinstance(loss, Sum):
            return cls([loss.value], [], [])
        if isinstance(loss, Means):
            # A device's towers return a row of it each, which are the same.
            penalty = jnp.ravel(loss.penalty)[0]
            loss = dataclasses.replace(loss, penalty=penalty)
        if (mean := one_mean(loss)) is not None:
            return cls([mean.sum], [mean.weight], [])
        assert isinstance(loss, Means)
        return cls.of_terms(loss)

    @classmethod
    def of_terms(cls, loss: Means) -> "LossSums":
        """Those of each term, with the shared term by itself."""
        sums = [term.sum for term in loss.terms]
        weights = [term.weight for term in loss.terms]
        return cls(sums, weights, [jnp.asarray(loss.penalty)])

    @classmethod
    def each(cls, loss: Any) -> "list[LossSums]":
        """Those of a loss, or of each in a list of losses."""
        return [cls.of(x) for x in (loss if isinstance(loss, list) else [loss])]

    @property
    def is_of_several(self) -> bool:
        """Whether there are several denominators, which no one division serves."""
        return len(self.weights) > 1

    @property
    def denominators(self) -> list[jax.Array]:
        """The weights that divide before the derivative: those of several means."""
        return self.weights if self.is_of_several else []

    def fixed(self) -> "LossSums":
        """The same; raises a ``ValueError`` where a weight is differentiated."""
        weights = [without_derivative(x, MOVING_WEIGHTS) for x in self.weights]
        return dataclasses.replace(self, weights=weights)

    def factors(self, total: list[jax.Array], share: float) -> list[jax.Array]:
        """What the sums are multiplied by; ``total`` has the `denominators` of all."""
        factors = [jnp.ones_like(x) for x in self.sums]
        if self.is_of_several:
            factors = [ratio(jnp.ones_like(w), w) for w in total]
        return factors + [jnp.full_like(x, share) for x in self.shared]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of the sums of a loss, and what it is divided by."""

    grads: PyTree  # of several losses a list
    weight: jax.Array | None  # of a lone mean, which is divided when all is added
    reads: set[int]  # the numbers of those trained leaves that a loss depends on

    def returned(self, *, as_sums: bool = False) -> PyTree:
        """As the `Returned` of what towers return, or as sums without the weight."""
        grads = map_values(lambda g: g.astype(widen_dtype(g.dtype)), self.grads)
        if self.weight is None or as_sums:
            return as_returned(Sum(grads))
        return as_returned(Weighted(grads, self.weight))


def gradient_of(
    of_part: Callable[[PyTree], dict[str, PyTree]],
    trained: PyTree,
    *,
    loss: str,
    denominators: Callable[[list[jax.Array]], list[jax.Array]],
    share: float,
) -> tuple[dict[str, PyTree], Gradient]:
    """What ``of_part(trained)`` returns, and the gradient of its loss by ``trained``.

    ``loss`` is the key of the loss, or of a list of losses. ``denominators(weights)``
    are those of several means, over all towers and micro-batches. ``share``: which
    part of a shared term each of all calls counts.
    """
    reads: set[int] = set()

    def sums_of(trained: PyTree) -> tuple[list[list[jax.Array]], tuple[Any, PyTree]]:
        tree = of_part(_watched(trained, reads))
        losses = [x.fixed() for x in LossSums.each(values_of(tree[loss]))]
        return [[*x.sums, *x.shared] for x in losses], (losses, tree)

    sums, pull, (losses, tree) = jax.vjp(sums_of, trained, has_aux=True)
    own = [w for x in losses for w in x.denominators]
    total = iter(denominators(own) if own else own)
    factors = [x.factors([next(total) for _ in x.denominators], share) for x in losses]
    (grads,) = pull(jax.tree.map(lambda c, x: c.astype(x.dtype), factors, sums))
    if jax.tree.leaves(trained) and not reads:
        raise ValueError(NO_GRADIENT)
    weights = losses[0].weights if len(losses) == 1 else []
    weight = weights[0] if len(weights) == 1 else None
    return tree, Gradient(grads, weight, reads)


def gradients_of_terms(
    of_part: Callable[[PyTree], dict[str, PyTree]], trained: PyTree, loss: str
) -> tuple[dict[str, PyTree], PyTree]:
    """What ``of_part(trained)`` returns, and the gradient of each sum by itself."""

    def sums_of(trained: PyTree) -> tuple[list[jax.Array], tuple[Any, PyTree]]:
        tree = of_part(trained)
        losses = LossSums.each(values_of(tree[loss]))
        return [total for x in losses for total in x.sums], (losses, tree)

    sums, pull, (losses, tree) = jax.vjp(sums_of, trained, has_aux=True)
    zeros, is_list = [jnp.zeros_like(x) for x in sums], isinstance(tree[loss], list)
    numbers = iter(range(len(sums)))

    def of_loss(at: int, loss: LossSums) -> PyTree:
        each = []
        for _, i in zip(loss.sums, numbers, strict=False):
            (grads,) = pull([*zeros[:i], jnp.ones_like(sums[i]), *zeros[i + 1 :]])
            each.append(grads[at] if is_list else grads)
        if loss.is_of_several:
            return each
        return Weighted(each[0], loss.weights[0]) if loss.weights else Sum(each[0])

    gradients = [of_loss(at, x) for at, x in enumerate(losses)]
    return tree, gradients if is_list else gradients[0]


def without_derivative(x: jax.Array, message: str) -> jax.Array:
    """The value; raises a ``ValueError`` where it is differentiated."""

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x

    def refuse(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        (x,), (tangent,) = primals, tangents
        if not isinstance(tangent, SymbolicZero):
            raise ValueError(message)
        return x, tangent

    same.defjvp(refuse, symbolic_zeros=True)
    return same(x)


def _watched(values: PyTree, reads: set[int]) -> PyTree:
    """The values; the numbers of leaves that have a derivative go into ``reads``."""
    leaves, treedef = jax.tree.flatten(values)

    @jax.custom_vjp
    def same(leaves: list[Any]) -> list[Any]:
        return leaves

    def first(leaves: list[Any]) -> tuple[list[Any], None]:
        return [x.value for x in leaves], None

    def note(_: None, grads: list[Any]) -> tuple[list[Any]]:
        known = [None if isinstance(g, SymbolicZero) else g for g in grads]
        reads.update(i for i, g in enumerate(known) if g is not None)
        return (known,)

    same.defvjp(first, note, symbolic_zeros=True)
    return treedef.unflatten(same(leaves))


MOVING_WEIGHTS = (
    "The weights of the loss depend on the parameters, and a mean's gradient is taken"
    " with weights that stay. Write tj.Weighted.mean(losses,"
    " jax.lax.stop_gradient(weight)); where weights learn too, differentiate in a"
    " second pass of tj.build_step tj.Weighted(loss.sum - mean * loss.weight,"
    " jax.lax.stop_gradient(loss.weight)), of the first's mean."
)
NO_GRADIENT = (
    "The loss depends on no parameter, so that every gradient is 0. Call the model with"
    " the params that the loss function is given, and not with those that it closes"
    " over; a count of hits (argmax, >, rounding) and jax.lax.stop_gradient have no"
    " gradient. Where none is meant, add 0 * a parameter."
)
