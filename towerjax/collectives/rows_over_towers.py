"""Join the towers' values, and reduce their IndexedRows one list at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import check_reduction, share_of_rows
from towerjax.collectives.sparse_rows import (
    IndexedRows,
    all_rows_of,
    end_to_end,
    flatten_stack,
    is_rows,
    widen_indices,
)
from towerjax.types import PyTree, Reduction, named_leaves
from towerjax.types.options import is_whole


def reduce_rows(reduction: Reduction, towers: list[Any]) -> IndexedRows:
    """As `one_of`, for ``IndexedRows`` of unequally many rows, one of each tower."""
    check_reduction(reduction)
    rows = _as_indexed_rows(towers, 0)
    if reduction is Reduction.ONLY_FIRST_TOWER:
        rows = rows[:1]
    joined = end_to_end(rows, rows[0].dense_shape)
    return share_of_rows(reduction, joined, len(rows))


def _as_indexed_rows(towers: list[Any], first_dim: int) -> list[IndexedRows]:
    """Each tower's ``IndexedRows``; an array becomes all its rows."""
    for tower, x in enumerate(towers):
        is_array = isinstance(x, jax.Array | np.ndarray) and np.ndim(x)
        if not (is_rows(x) or is_array):
            raise ValueError(
                f"Tower {tower} has a {type(x).__name__} where others have IndexedRows."
                " Give IndexedRows, or an array [N, ...] for all its rows."
            )
    rows = [x if is_rows(x) else all_rows_of(x) for x in towers]
    for tower, x in enumerate(rows):
        if x.dense_shape[first_dim:] != rows[0].dense_shape[first_dim:]:
            raise ValueError(
                f"Tower {tower} has rows of an array of shape {x.dense_shape} and tower"
                f" 0 of {rows[0].dense_shape}; they must be the same from dim"
                f" {first_dim} on."
            )
    return rows


def check_joins(value: PyTree, axis: Any) -> None:
    """Raise unless the towers' values can be joined along the one dim ``axis``."""
    if not is_whole(axis):
        raise ValueError(f"axis={axis!r} must be an int, one dim of a tower's value.")
    for name, x in named_leaves("value", value, is_leaf=is_rows):
        shape = x.dense_shape if is_rows(x) else jnp.shape(x)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"axis={axis} is not a dim of {name} of shape {shape}. Name one of a"
                " tower's own dims; a number gets one by x[None]."
            )
        if is_rows(x) and axis % len(shape):
            raise ValueError(
                f"axis={axis} of IndexedRows of an array of shape {shape}: rows are"
                " joined along dim 0 alone. Give rows.to_dense() for another dim."
            )


def join_rows(rows: Any, axis: int) -> Any:
    """Concatenate the rows of ``[T, ...]``, or stacked ``IndexedRows``, along a dim."""
    if is_rows(rows):
        (count, _), (size, *rest) = rows.indices.shape, rows.dense_shape
        first = size * jnp.arange(count)[:, None]
        indices = _shift_indices(rows, first, count * size)
        return flatten_stack(IndexedRows(rows.values, indices, (count * size, *rest)))
    axis %= rows.ndim - 1
    shape = list(rows.shape[1:])
    shape[axis] *= rows.shape[0]
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


def join_tower_rows(towers: list[Any]) -> IndexedRows:
    """The ``IndexedRows`` of all towers' arrays joined along dim 0."""
    rows = _as_indexed_rows(towers, 1)
    ends = np.cumsum([x.dense_shape[0] for x in rows]).tolist()
    shape = (ends[-1], *rows[0].dense_shape[1:])
    shifted = []
    for x, end in zip(rows, ends, strict=True):
        x.check_range()
        indices = _shift_indices(x, end - x.dense_shape[0], ends[-1])
        shifted.append(IndexedRows(x.values, indices, shape))
    return end_to_end(shifted, shape)


def _shift_indices(rows: IndexedRows, first: Any, size: int) -> jax.Array:
    """Indices in an array of ``size`` rows, where this tower's rows begin at ``first``.

    An index out of range becomes ``size``, so that it names no row of another tower.
    """
    indices = widen_indices(rows.indices)
    exist = (indices >= 0) & (indices < rows.dense_shape[0])
    return jnp.where(exist, indices + jnp.asarray(first, indices.dtype), size)
