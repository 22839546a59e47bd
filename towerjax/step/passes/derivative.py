"""Differentiate a loss: add the losses first, and then take one derivative.

Here ``of_micro_batch(trained, zeros)`` is a function that computes one micro-batch, of
one tower or of all towers of a device. It returns the results and the ids of the rows
that were looked up. For all towers together it adds their losses, so that their
gradient costs one derivative.
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
    """Tables (embeddings) whose gradient has only the rows that were looked up."""

    def zeros(self) -> tuple[jax.Array, ...]:
        """Make zeros to add to the rows of lookups, an array for each lookup.

        The gradient by these zeros is the gradient by the rows.
        """
        ...

    def gradients(
        self, grads: PyTree, rows: Zeros, ids: Ids, reads: set[int]
    ) -> PyTree:
        """Cut a table's gradient down to the rows that were looked up.

        ``grads`` are the gradients by the trained values, and ``rows`` those by the
        zeros. ``reads`` has the indices of the leaves on which the loss depends:
        trained values first, zeros after them. Raises if the loss also uses a table
        without a lookup.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LossSums:
    """The sums of a loss that are differentiated, and their divisors."""

    sums: list[jax.Array]  # () each
    # One weight for each sum. There is none if the loss is a total, because a total is
    # not divided.
    weights: list[Any]
    # The penalty term, which is the same on all towers; empty if ``sums`` include it.
    shared: list[jax.Array]

    @classmethod
    def of(cls, loss: Weighted | Means | Sum) -> "LossSums":
        """Split a loss that towers returned into its sums and their weights."""
        if isinstance(loss, Sum):
            return cls([loss.value], [], [])
        if isinstance(loss, Means):
            # Here ``penalty`` has a row for each tower of the device. All rows are the
            # same, so the first is taken.
            penalty = jnp.ravel(loss.penalty)[0]
            loss = dataclasses.replace(loss, penalty=penalty)
        if (mean := one_mean(loss)) is not None:
            return cls([mean.sum], [mean.weight], [])
        assert isinstance(loss, Means)
        return cls.of_terms(loss)

    @classmethod
    def of_terms(cls, loss: Means) -> "LossSums":
        """Collect the sums of all mean terms of a loss, with its penalty set apart."""
        sums = [term.sum for term in loss.terms]
        weights = [term.weight for term in loss.terms]
        return cls(sums, weights, [jnp.asarray(loss.penalty)])

    @classmethod
    def each(cls, loss: Any) -> "list[LossSums]":
        """Make a list of `LossSums`: of a single loss, or of each loss in a list."""
        return [cls.of(x) for x in (loss if isinstance(loss, list) else [loss])]

    @property
    def is_of_several(self) -> bool:
        """Whether the loss adds means that have different denominators."""
        return len(self.weights) > 1

    @property
    def denominators(self) -> list[jax.Array]:
        """The weights to divide by before the derivative, if there are several."""
        return self.weights if self.is_of_several else []

    def factors(self, total: list[jax.Array], share: float) -> list[jax.Array]:
        """Compute the factor of each sum's derivative, from its denominator.

        ``total`` are the `denominators`, added over towers. ``share`` is the factor of
        the penalty term.
        """
        factors = [jnp.ones_like(x) for x in self.sums]
        if self.is_of_several:
            factors = [ratio(jnp.ones_like(w), w) for w in total]
        return factors + [jnp.full_like(x, share) for x in self.shared]

    def with_gradients(self, grads: list[PyTree]) -> PyTree:
        """Pair the sums' gradients with their weight.

        Several means need no weight, because each was divided before the derivative.
        """
        if self.is_of_several:
            return grads
        [grad] = grads
        return Weighted(grad, self.weights[0]) if self.weights else Sum(grad)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of a loss's sums, and the weight to divide it by."""

    grads: PyTree  # a list, if there are several losses
    # The weight of a loss that is a single mean. The gradient is divided by it after
    # all towers' gradients are added. It is None for other losses, whose gradient is
    # not divided.
    weight: jax.Array | None

    def returned(self, *, as_sums: bool = False) -> Weighted | Sum:
        """Pair the gradient with its weight, in the types that towers return.

        With ``as_sums`` return bare sums in place of a ``Weighted``.
        """
        grads = map_values(lambda g: g.astype(widen_dtype(g.dtype)), self.grads)
        if self.weight is None or as_sums:
            return Sum(grads)
        return Weighted(grads, self.weight)


def vjp(
    fn: Callable[[PyTree, Zeros], tuple[PyTree, Any, Ids]],
    trained: PyTree,
    tables: Tables,
) -> tuple[PyTree, Callable[[PyTree], tuple[PyTree, set[int]]], Any]:
    """Differentiate ``fn(trained, zeros) -> (values, aux, ids)``; see `jax.vjp`.

    Returns ``(values, pull_back, aux)``. ``pull_back(cotangents)`` returns the
    gradient, in which a table has only the rows that were looked up, and the numbers of
    the leaves that the values depend on.
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
    """Differentiate the loss of a micro-batch by ``trained``.

    ``loss`` is the key of the loss, or of a list of losses, in the dict that the
    micro-batch returns. ``denominators(weights)`` adds the weights of several means
    over all towers and micro-batches. ``share`` is the factor of the loss's penalty
    term, 1 divided by the number of calls: this function runs on many towers and
    micro-batches, and together they must add the penalty once.
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
    """Differentiate each term of a loss by itself.

    Returns ``of_micro_batch(trained)``, and a gradient for each term.
    """

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
    """Refuse a derivative of the loss if a weight depends on ``trained``."""

    def fixed(mean: Weighted) -> Weighted:
        weight = jnp.asarray(mean.weight)
        weight = refuse_derivative(weight, trained, _MOVING_WEIGHTS)
        return Weighted(mean.sum, weight)

    return map_parts(Weighted, fixed, loss)


def watched(values: PyTree, reads: set[int]) -> PyTree:
    """Record in ``reads`` which of the values were used, and change none.

    When the result is differentiated, the index of each leaf that it depends on is
    added to ``reads``.
    """
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
    """Leave ``x`` as it is, but raise if it is differentiated by ``by``.

    ``by`` is an argument of a custom derivative rule, because JAX runs such a rule only
    for derivatives by its arguments.
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
    """Give ``x`` a derivative of zero, like `jax.lax.stop_gradient`.

    The tangent is a symbolic zero, so that `watched` sees no use of the value.
    """

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
