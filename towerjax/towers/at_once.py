"""Of what is the sum over towers one operation? Of those that add up by themselves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from towerjax.collectives.reduce import join_rows

AtOnce = tuple[Callable[..., jax.Array], list[Any]]

# They move values, add them up, change their sign: of a sum as of each of its parts.
_MOVES = frozenset("transpose reshape squeeze broadcast_in_dim neg reduce_sum".split())


def at_once(
    eqn: JaxprEqn, is_own: Callable[[Any], bool], made: dict[Any, JaxprEqn]
) -> AtOnce | None:
    """How the sum over towers of what it gives is done at once, and of what.

    ``made`` says by which equation each value is made.
    """
    name, given = eqn.primitive.name, list(eqn.invars)
    if name == "scatter-add" and _are_zeros(given[0], made):
        return _added_rows, given[1:]
    if not all(map(is_own, given)):
        return None  # what all towers share would be held ``k`` times
    if name == "dot_general":
        return _product, given
    if name == "conv_general_dilated" and eqn.params["feature_group_count"] == 1:
        return _convolution, given
    return None


def hands_on(eqn: JaxprEqn) -> bool:
    """Is what it makes of a sum the sum of what it makes of each?

    Of a conversion it is not: what towers rounded to 16 bits would be rounded once, and
    the sum depend on how many share a device.
    """
    if eqn.primitive.name == "pad":
        return _is_zero(eqn.invars[1])
    return eqn.primitive.name in _MOVES


def handed_on(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """What such an equation makes of a value."""
    numbers = [y.val for y in eqn.invars[1:] if isinstance(y, Literal)]
    return eqn.primitive.bind(x, *numbers, **eqn.params)


def _are_zeros(value: Any, made: dict[Any, JaxprEqn]) -> bool:
    eqn = made.get(value) if isinstance(value, Var) else None
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return False
    return _is_zero(eqn.invars[0])


def _is_zero(value: Any) -> bool:
    return isinstance(value, Literal) and value.val == 0


def _product(eqn: JaxprEqn, a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum over dim 0 of products, as one that contracts it too."""
    contracted, batch = eqn.params["dimension_numbers"]
    within = tuple((0, *(dim + 1 for dim in dims)) for dims in contracted)
    beside = tuple(tuple(dim + 1 for dim in dims) for dims in batch)
    params = eqn.params | {"dimension_numbers": (within, beside)}
    return eqn.primitive.bind(a, b, **params)


def _convolution(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The sum over dim 0 of convolutions, as one of ``k`` times as many features."""
    dims = eqn.params["dimension_numbers"]
    x, kernel = join_rows(x, dims.lhs_spec[1]), join_rows(kernel, dims.rhs_spec[1])
    return eqn.primitive.bind(x, kernel, **eqn.params)


def _added_rows(eqn: JaxprEqn, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum over dim 0 of rows added into zeros: all of them into the same."""
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
