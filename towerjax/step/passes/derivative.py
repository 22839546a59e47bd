"""The gradient of a loss: the losses are added first, and then differentiated once.

``of_micro_batch(trained, zeros)`` gives the results of one micro-batch, of one tower or
of all towers of a device, whose losses it has added; and the ids of its lookups. So one
derivative is the sum of the gradients of these towers, and no program of gradients is
added up.
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
from towerjax.step.state.accumulators import values_of
from towerjax.types import PyTree, Sum
from towerjax.types.trees import map_parts, widen_dtype

Zeros: TypeAlias = Sequence[jax.Array]
Ids: TypeAlias = list[jax.Array]
OfMicroBatch: TypeAlias = Callable[[PyTree, Zeros], tuple[Any, Ids]]
"""``(trained, zeros) -> (results, ids)``, of one micro-batch."""


class Tables(Protocol):
    """Tables of which rows have a gradient; `Lookups` are these."""

    def zeros(self) -> tuple[jax.Array, ...]:
        """Zeros to add to the rows of each lookup, for a derivative by them."""
        ...

    def gradients(
        self, grads: PyTree, rows: Zeros, ids: Ids, reads: set[int]
    ) -> PyTree:
        """The gradients, of tables the rows of those lookups that have one.

        ``reads`` are the numbers, of all that is trained and then of the zeros, of what
        has a gradient. Raises where a table has one of all rows.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LossSums:
    """The sums of a loss that are differentiated, and their divisors."""

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

    def factors(self, total: list[jax.Array], share: float) -> list[jax.Array]:
        """What the sums are multiplied by; ``total`` has the `denominators` of all."""
        factors = [jnp.ones_like(x) for x in self.sums]
        if self.is_of_several:
            factors = [ratio(jnp.ones_like(w), w) for w in total]
        return factors + [jnp.full_like(x, share) for x in self.shared]

    def with_gradients(self, grads: list[PyTree]) -> PyTree:
        """The gradients of the sums; a single sum is merged as it is."""
        if self.is_of_several:
            return grads
        [grad] = grads
        return Weighted(grad, self.weights[0]) if self.weights else Sum(grad)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of the sums of a loss, and what it is divided by."""

    grads: PyTree  # of several losses a list
    weight: jax.Array | None  # of a lone mean, which is divided when all is added

    def returned(self, *, as_sums: bool = False) -> Weighted | Sum:
        """As towers return it, or as sums without the weight."""
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

    ``pull_back(cotangents)`` gives the gradient, which is of tables the rows, and the
    numbers of those leaves that the values depend on.
    """
    reads: set[int] = set()

    def of_given(given: tuple[PyTree, Any]) -> tuple[PyTree, tuple[Any, Any]]:
        values, aux, ids = fn(*watched(given, reads))
        return values, (aux, ids)

    given = trained, tables.zeros()
    values, pull, (aux, ids) = jax.vjp(of_given, given, has_aux=True)

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
    """What a micro-batch returns, a dict, and the gradient of its loss by ``trained``.

    ``loss`` is the key of the loss, or of a list of losses. ``denominators(weights)``
    are those of several means, over all towers and micro-batches. ``share``: which
    part of a shared term each of all calls counts.
    """

    def sums_of(
        trained: PyTree, zeros: Zeros
    ) -> tuple[list[list[jax.Array]], tuple[Any, PyTree], Ids]:
        tree, ids = of_micro_batch(trained, zeros)
        losses = LossSums.each(with_fixed_weights(values_of(tree[loss]), trained))
        return [[*x.sums, *x.shared] for x in losses], (losses, tree), ids

    sums, pull_back, (losses, tree) = vjp(sums_of, trained, tables)
    own = [w for x in losses for w in x.denominators]
    totals = denominators(own) if own else []
    factors = []
    for each in losses:
        number = len(each.denominators)
        factors.append(each.factors(totals[:number], share))
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
    """What ``of_micro_batch(trained)`` returns, and the gradient of each sum alone."""

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
    for at, each in enumerate(losses):
        numbers = range(number, number + len(each.sums))
        number += len(each.sums)
        grads = [of_sum(i)[at] if is_list else of_sum(i) for i in numbers]
        gradients.append(each.with_gradients(grads))
    return tree, gradients if is_list else gradients[0]


def with_fixed_weights(loss: PyTree, trained: PyTree) -> PyTree:
    """The loss; raises if the derivative by ``trained`` is taken of a weight in it."""

    def fixed(mean: Weighted) -> Weighted:
        weight = jnp.asarray(mean.weight)
        weight = refuse_derivative(weight, trained, _MOVING_WEIGHTS)
        return Weighted(mean.sum, weight)

    return map_parts(Weighted, fixed, loss)


def watched(values: PyTree, reads: set[int]) -> PyTree:
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


def refuse_derivative(x: jax.Array, by: PyTree, message: str) -> jax.Array:
    """The value; taking its derivative raises a ``ValueError``.

    ``by`` are values by which that derivative is taken. So the rule below runs in this
    derivative, and in none by other values.
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
    """A value by which a derivative is taken; of what is made of it, none is."""

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x

    def hold(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        [x] = primals
        return x, zero_from_primal(x, symbolic_zeros=True)

    same.defjvp(hold, symbolic_zeros=True)
    return same(x)


_MOVING_WEIGHTS = (
    "The weights of the loss depend on the parameters, and a mean's gradient is taken"
    " with weights that stay. Write tj.Weighted.mean(losses,"
    " jax.lax.stop_gradient(weight)); where weights learn too, differentiate in a"
    " second pass of tj.build_step tj.Weighted(loss.sum - mean * loss.weight,"
    " jax.lax.stop_gradient(loss.weight)), of the first's mean."
)
_NO_GRADIENT = (
    "The loss depends on no parameter, so that every gradient is 0. Call the model with"
    " the params that the loss function is given, and not with those that it closes"
    " over; a count of hits (argmax, >, rounding) and jax.lax.stop_gradient have no"
    " gradient. Where none is meant, add 0 * a parameter."
)
