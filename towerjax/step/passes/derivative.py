"""Differentiate a loss: add the losses first, and then take one derivative.

``of_micro_batch(trained, zeros)`` returns the results of one micro-batch and the ids of
its lookups. It computes one tower, or all towers of a device and the sum of their
losses. So the gradient of these towers together costs one derivative.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from towerjax.collectives.sparse_rows import map_values
from towerjax.metrics.rows import ratio
from towerjax.metrics.weighted import Means, Weighted, one_mean
from towerjax.step.passes.accumulators import values_of
from towerjax.types import PyTree, Sum
from towerjax.types.trees import map_parts, widen_dtype

Zeros: TypeAlias = Sequence[jax.Array]
Ids: TypeAlias = list[jax.Array]
OfMicroBatch: TypeAlias = Callable[[PyTree, Zeros], tuple[Any, Ids]]
"""``(trained, zeros) -> (results, ids)``, of one micro-batch."""


class Tables(Protocol):
    """The tables whose gradient has only some rows; `Lookups` implements it."""

    def zeros(self) -> tuple[jax.Array, ...]:
        """Zeros that are added to the rows of lookups, one array for each lookup.

        The gradient by these zeros is the gradient by the rows.
        """
        ...

    def gradients(
        self, grads: PyTree, rows: Zeros, ids: Ids, reads: set[int]
    ) -> PyTree:
        """Return the gradients; that of a table has only the rows that were looked up.

        ``grads`` and ``rows`` are the gradients by the trained values and by the zeros.
        ``reads`` are the numbers of those leaves of both, trained values first, that
        the loss depends on. Raises if the loss also uses a table in another way.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LossSums:
    """The sums of a loss that are differentiated, and their divisors."""

    sums: list[jax.Array]  # () each
    # One for each sum; none where the loss is a total, which is not divided.
    weights: list[Any]
    # The term that is the same on all towers, if it is not part of ``sums``.
    shared: list[jax.Array]

    @classmethod
    def of(cls, loss: Weighted | Means | Sum) -> "LossSums":
        """Return the sums of a loss that towers returned."""
        if isinstance(loss, Sum):
            return cls([loss.value], [], [])
        if isinstance(loss, Means):
            # Each tower of a device returns a row of it, and all rows are the same.
            penalty = jnp.ravel(loss.penalty)[0]
            loss = dataclasses.replace(loss, penalty=penalty)
        if (mean := one_mean(loss)) is not None:
            return cls([mean.sum], [mean.weight], [])
        assert isinstance(loss, Means)
        return cls.of_terms(loss)

    @classmethod
    def of_terms(cls, loss: Means) -> "LossSums":
        """Return the sums of all terms, with the shared term apart."""
        sums = [term.sum for term in loss.terms]
        weights = [term.weight for term in loss.terms]
        return cls(sums, weights, [jnp.asarray(loss.penalty)])

    @classmethod
    def each(cls, loss: Any) -> "list[LossSums]":
        """Return the sums of a loss, or of each loss in a list: always a list."""
        return [cls.of(x) for x in (loss if isinstance(loss, list) else [loss])]

    @property
    def is_of_several(self) -> bool:
        """Whether there are several denominators, so that one division cannot do."""
        return len(self.weights) > 1

    @property
    def denominators(self) -> list[jax.Array]:
        """The weights that divide before the derivative: those of several means."""
        return self.weights if self.is_of_several else []

    def factors(self, total: list[jax.Array], share: float) -> list[jax.Array]:
        """Return the sums' factors; ``total`` is the `denominators`, added over towers.

        ``share`` is the factor of the shared term.
        """
        factors = [jnp.ones_like(x) for x in self.sums]
        if self.is_of_several:
            factors = [ratio(jnp.ones_like(w), w) for w in total]
        return factors + [jnp.full_like(x, share) for x in self.shared]

    def with_gradients(self, grads: list[PyTree]) -> PyTree:
        """Return the gradients of the sums; a single sum is merged as it is."""
        if self.is_of_several:
            return grads
        [grad] = grads
        return Weighted(grad, self.weights[0]) if self.weights else Sum(grad)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of the sums of a loss, and what it is divided by."""

    grads: PyTree  # a list, if there are several losses
    # That of a single mean, which is divided after all towers are added.
    weight: jax.Array | None

    def returned(self, *, as_sums: bool = False) -> Weighted | Sum:
        """Pair the gradient with its weight, as towers return it; or give bare sums."""
        grads = map_values(lambda g: g.astype(widen_dtype(g.dtype)), self.grads)
        if self.weight is None or as_sums:
            return Sum(grads)
        return Weighted(grads, self.weight)


def vjp(
    fn: Callable[[PyTree, Zeros], tuple[PyTree, Any, Ids]],
    trained: PyTree,
    tables: Tables,
) -> tuple[PyTree, Callable[[PyTree], tuple[PyTree, set[int]]], Any]:
    """``(values, pull_back, aux)`` of ``fn(trained, zeros) -> (values, aux, ids)``.

    ``pull_back(cotangents)`` returns the gradient, in which a table has only its rows,
    and the numbers of the leaves that the values depend on.
    """
    reads: set[int] = set()

    def of_given(inputs: tuple[PyTree, Any]) -> tuple[PyTree, tuple[Any, Any]]:
        values, aux, ids = fn(*watched(inputs, reads))
        return values, (aux, ids)

    inputs = trained, tables.zeros()
    values, pull, (aux, ids) = jax.vjp(of_given, inputs, has_aux=True)

    def pull_back(cotangents: PyTree) -> tuple[PyTree, set[int]]:
        reads.clear()
        [(grads, rows)] = pull(cotangents)
        return tables.gradients(grads, rows, ids, reads), {*reads}

    return values, pull_back, aux


def gradient_of(
    of_micro_batch: OfMicroBatch,
    trained: PyTree,
    tables: Tables,
    *,
    loss: str,
    denominators: Callable[[list[jax.Array]], list[jax.Array]],
    share: float,
) -> tuple[dict[str, PyTree], Gradient]:
    """Differentiate the loss that a micro-batch returns in a dict by ``trained``.

    ``loss`` is the key of the loss, or of a list of losses. ``denominators(weights)``
    adds the weights of several means over all towers and micro-batches. ``share`` is
    the part of the shared term that one call counts, so that all calls count it once.
    """

    def sums_of(
        trained: PyTree, zeros: Zeros
    ) -> tuple[list[list[jax.Array]], tuple[Any, PyTree], Ids]:
        tree, ids = of_micro_batch(trained, zeros)
        losses = LossSums.each(with_fixed_weights(values_of(tree[loss]), trained))
        return [[*x.sums, *x.shared] for x in losses], (losses, tree), ids

    sums, pull_back, (losses, tree) = vjp(sums_of, trained, tables)
    denominators_of_tower = [w for x in losses for w in x.denominators]
    totals = denominators(denominators_of_tower) if denominators_of_tower else []
    factors = []
    for loss_sums in losses:
        number = len(loss_sums.denominators)
        factors.append(loss_sums.factors(totals[:number], share))
        totals = totals[number:]
    grads, reads = pull_back(
        jax.tree.map(lambda c, x: c.astype(x.dtype), factors, sums)
    )
    if jax.tree.leaves(trained) and not reads:
        raise ValueError(_NO_GRADIENT)
    weights = losses[0].weights if len(losses) == 1 else []
    weight = weights[0] if len(weights) == 1 else None
    return tree, Gradient(grads, weight)


def gradients_of_terms(
    of_micro_batch: Callable[[PyTree], dict[str, PyTree]], trained: PyTree, loss: str
) -> tuple[dict[str, PyTree], PyTree]:
    """What ``of_micro_batch(trained)`` returns, and the gradient of each single sum."""

    def sums_of(trained: PyTree) -> tuple[list[jax.Array], tuple[Any, PyTree]]:
        tree = of_micro_batch(trained)
        losses = LossSums.each(values_of(tree[loss]))
        return [total for x in losses for total in x.sums], (losses, tree)

    sums, pull, (losses, tree) = jax.vjp(sums_of, trained, has_aux=True)
    zeros = [jnp.zeros_like(x) for x in sums]
    is_list = isinstance(tree[loss], list)

    def of_sum(number: int) -> PyTree:
        ones = [*zeros]
        ones[number] = jnp.ones_like(sums[number])
        (grads,) = pull(ones)
        return grads

    gradients = []
    number = 0
    for at, loss_sums in enumerate(losses):
        numbers = range(number, number + len(loss_sums.sums))
        number += len(loss_sums.sums)
        grads = [of_sum(i)[at] if is_list else of_sum(i) for i in numbers]
        gradients.append(loss_sums.with_gradients(grads))
    return tree, gradients if is_list else gradients[0]


def with_fixed_weights(loss: PyTree, trained: PyTree) -> PyTree:
    """Let the loss's derivative by ``trained`` raise where a weight depends on it."""

    def fixed(mean: Weighted) -> Weighted:
        weight = jnp.asarray(mean.weight)
        weight = refuse_derivative(weight, trained, _MOVING_WEIGHTS)
        return Weighted(mean.sum, weight)

    return map_parts(Weighted, fixed, loss)


def watched(values: PyTree, reads: set[int]) -> PyTree:
    """Let a derivative of the values note the leaves it needs in ``reads``."""
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


def refuse_derivative(x: jax.Array, by: PyTree, message: str) -> jax.Array:
    """Return the value, whose derivative by ``by`` raises a ``ValueError``.

    ``by`` are arguments of the rule below, so that it runs in the derivative by them.
    """
    first = jax.tree.leaves(by)[:1]
    if not first:
        return x

    @jax.custom_jvp
    def same(x: jax.Array, by: list[Any]) -> jax.Array:
        return x

    def refuse(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        tangent, _ = tangents
        if not isinstance(tangent, SymbolicZero):
            raise ValueError(message)
        return primals[0], tangent

    same.defjvp(refuse, symbolic_zeros=True)
    return same(x, first)


def held(x: jax.Array) -> jax.Array:
    """Hold the value: no derivative goes through it, its tangent is a symbolic zero."""

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x

    def hold(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        [x] = primals
        return x, zero_from_primal(x, symbolic_zeros=True)

    same.defjvp(hold, symbolic_zeros=True)
    return same(x)


_MOVING_WEIGHTS = (
    "The weights of the loss depend on the parameters, but the gradient of a mean is"
    " taken with constant weights. Write tj.Weighted.mean(losses,"
    " jax.lax.stop_gradient(weight)). To train the weights as well, compute the mean in"
    " a first pass of tj.build_step, and differentiate"
    " tj.Weighted(loss.sum - mean * loss.weight, jax.lax.stop_gradient(loss.weight))"
    " in a second one."
)
_NO_GRADIENT = (
    "The loss depends on no parameter, so that every gradient is 0. Call the model with"
    " the params that the loss function is given, and not with those that it closes"
    " over. A count of hits (argmax, >, rounding) and jax.lax.stop_gradient have no"
    " gradient. If you mean a loss without a gradient, add 0 * a parameter."
)
