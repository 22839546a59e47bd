"""Compute the sum over towers of an operation's results as one operation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from towerjax.collectives.reduce import join_rows

FusedSum = tuple[Callable[..., jax.Array], list[Any]]

# Linear in one operand: the result for a sum is the sum of the results.
_LINEAR = frozenset("transpose reshape squeeze broadcast_in_dim neg reduce_sum".split())


def fused_sum(
    eqn: JaxprEqn, is_own: Callable[[Any], bool], made: dict[Any, JaxprEqn]
) -> FusedSum | None:
    """The one operation that sums an equation's results over towers, and its operands.

    ``is_own(x)`` says if x differs between towers; ``made[x]`` is the equation of x.
    """
    name, given = eqn.primitive.name, list(eqn.invars)
    if name == "scatter-add" and _are_zeros(given[0], made):
        return _sum_of_scatters, given[1:]
    if not all(map(is_own, given)):
        return None  # a value that all towers share would be copied ``k`` times
    if name == "dot_general":
        return _sum_of_products, given
    if name == "conv_general_dilated" and eqn.params["feature_group_count"] == 1:
        return _sum_of_convolutions, given
    return None


def is_linear(eqn: JaxprEqn) -> bool:
    """Whether an equation gives for a sum the sum of its results.

    A conversion does not: a sum would be rounded to 16 bits once, and not the value of
    each tower, so that the result would depend on how many towers share a device.
    """
    if eqn.primitive.name == "pad":
        return _is_zero(eqn.invars[1])
    return eqn.primitive.name in _LINEAR


def apply_linear(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """The result of a linear equation for ``x``."""
    numbers = [y.val for y in eqn.invars[1:] if isinstance(y, Literal)]
    return eqn.primitive.bind(x, *numbers, **eqn.params)


def _are_zeros(value: Any, made: dict[Any, JaxprEqn]) -> bool:
    eqn = made.get(value) if isinstance(value, Var) else None
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    return _is_zero(eqn.invars[0])


def _is_zero(value: Any) -> bool:
    return isinstance(value, Literal) and value.val == 0


def _sum_of_products(eqn: JaxprEqn, a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over dim 0 of products, as one product that also contracts dim 0."""
    contracted, batch = eqn.params["dimension_numbers"]
    within = tuple((0, *(dim + 1 for dim in dims)) for dims in contracted)
    beside = tuple(tuple(dim + 1 for dim in dims) for dims in batch)
    params = eqn.params | {"dimension_numbers": (within, beside)}
    return eqn.primitive.bind(a, b, **params)


def _sum_of_convolutions(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The sum over dim 0 of convolutions, as one with ``k`` times the features."""
    dims = eqn.params["dimension_numbers"]
    x, kernel = join_rows(x, dims.lhs_spec[1]), join_rows(kernel, dims.rhs_spec[1])
    return eqn.primitive.bind(x, kernel, **eqn.params)


def _sum_of_scatters(eqn: JaxprEqn, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum over dim 0 of scatters into zeros, as one scatter of all rows."""
    dims = eqn.params["dimension_numbers"]
    batching = dims.scatter_indices_batching_dims
    dims = dims._replace(
        update_window_dims=tuple(i + 1 for i in dims.update_window_dims),
        scatter_indices_batching_dims=tuple(i + 1 for i in batching),
    )
    params = eqn.params | {"dimension_numbers": dims}
    params |= {"indices_are_sorted": False, "unique_indices": False}
    table: Any = eqn.outvars[0].aval
    zeros = jnp.zeros(table.shape, table.dtype)
    return eqn.primitive.bind(zeros, indices, rows, **params)
