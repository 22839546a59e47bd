"""Reduce and join the towers' IndexedRows without adding rows to each other."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import (
    check_dim,
    check_reduction,
    from_total,
    gather_over_towers,
    reduce_over_towers,
)
from towerjax.collectives.sparse_rows import (
    IndexedRows,
    all_rows_of,
    is_rows,
    widen_indices,
)
from towerjax.mesh.placement import TowerAxes
from towerjax.types import PyTree, Reduction


def reduce_rows(reduction: Reduction, towers: list[Any]) -> IndexedRows:
    """Reduce the towers' ``IndexedRows`` to one."""
    check_reduction(reduction)
    rows = _as_indexed_rows(towers)
    for tower, x in enumerate(rows):
        if x.dense_shape != rows[0].dense_shape:
            raise ValueError(
                f"Tower {tower} has rows of an array of shape {x.dense_shape} and tower"
                f" 0 of {rows[0].dense_shape}; rows add up only in one array."
            )
    if reduction is Reduction.ONLY_FIRST_TOWER:
        rows = rows[:1]
    values = jnp.concatenate([jnp.asarray(x.values) for x in rows])
    indices = jnp.concatenate([jnp.asarray(x.indices) for x in rows])
    joined = IndexedRows(values, indices, rows[0].dense_shape)
    return _take_mean(reduction, joined, len(rows))


def _as_indexed_rows(towers: list[Any]) -> list[IndexedRows]:
    """Each tower's ``IndexedRows``; an array becomes all its rows."""
    for tower, x in enumerate(towers):
        if not isinstance(x, IndexedRows | jax.Array | np.ndarray):
            raise ValueError(
                f"Tower {tower} has a {type(x).__name__} where others have IndexedRows."
                " Give IndexedRows, or an array [N, ...] for all its rows."
            )
    return [x if is_rows(x) else all_rows_of(x) for x in towers]


def check_joins(value: PyTree, axis: int) -> None:
    """Raise unless the towers' values can be joined along dim ``axis``."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_rows)
    shapes = [
        jax.ShapeDtypeStruct(x.dense_shape, np.int32) if is_rows(x) else x
        for x in leaves
    ]
    check_dim(jax.tree.unflatten(treedef, shapes), axis)
    for x in filter(is_rows, leaves):
        if axis % len(x.dense_shape):
            raise ValueError(
                f"axis={axis} of IndexedRows of an array of shape {x.dense_shape}: rows"
                " are joined along dim 0 alone. Give rows.to_dense() for another dim."
            )


def join_tower_rows(towers: list[Any]) -> IndexedRows:
    """The ``IndexedRows`` of all towers' arrays joined along dim 0."""
    rows = _as_indexed_rows(towers)
    for tower, x in enumerate(rows):
        if x.dense_shape[1:] != rows[0].dense_shape[1:]:
            raise ValueError(
                f"gather along axis 0: tower {tower} has rows of an array of shape"
                f" {x.dense_shape} and tower 0 of {rows[0].dense_shape}; only dim 0 may"
                " differ."
            )
        x.check_range()
    ends = np.cumsum([x.dense_shape[0] for x in rows]).tolist()
    indices = [
        _shift_indices(x, end - x.dense_shape[0], ends[-1])
        for x, end in zip(rows, ends, strict=True)
    ]
    values = jnp.concatenate([jnp.asarray(x.values) for x in rows])
    shape = (ends[-1], *rows[0].dense_shape[1:])
    return IndexedRows(values, jnp.concatenate(indices), shape)


def join_stacked_rows(rows: IndexedRows, num_towers: int) -> IndexedRows:
    """As `join_tower_rows`, for the towers' rows stacked in one ``IndexedRows``."""
    size, *rest = rows.dense_shape
    first = size * jnp.arange(num_towers)[:, None]
    indices = _shift_indices(rows, first, num_towers * size).reshape(-1)
    values = jnp.asarray(rows.values).reshape(indices.size, *rest)
    return IndexedRows(values, indices, (num_towers * size, *rest))


def _shift_indices(rows: IndexedRows, first: Any, size: int) -> jax.Array:
    """Indices in an array of ``size`` rows, where this tower's rows begin at ``first``.

    An index out of range becomes ``size``, so that it names no row of another tower.
    """
    indices = widen_indices(rows.indices)
    exist = (indices >= 0) & (indices < rows.dense_shape[0])
    return jnp.where(exist, indices + jnp.asarray(first, indices.dtype), size)


def reduce_stacked_rows(
    reduction: Reduction, rows: IndexedRows, num_towers: int
) -> IndexedRows:
    """As `reduce_rows`, for the towers' rows stacked in one ``IndexedRows``."""
    check_reduction(reduction)
    shape = np.shape(rows.indices)
    if len(shape) != 2 or shape[0] != num_towers:
        raise ValueError(
            f"IndexedRows of each tower, side by side, have indices of shape {shape}."
            f" Dim 0 runs over the {num_towers} towers and dim 1 over rows: stack one"
            " IndexedRows for each tower, or give PerTower a tuple of them."
        )
    values, indices = jnp.asarray(rows.values), jnp.asarray(rows.indices)
    if reduction is Reduction.ONLY_FIRST_TOWER:
        return IndexedRows(values[0], indices[0], rows.dense_shape)
    values = values.reshape(indices.size, *values.shape[2:])
    joined = IndexedRows(values, indices.reshape(-1), rows.dense_shape)
    return _take_mean(reduction, joined, num_towers)


def _take_mean(reduction: Reduction, rows: IndexedRows, num_towers: int) -> IndexedRows:
    values = from_total(reduction, rows.values, num_towers, rows.values.dtype)
    return dataclasses.replace(rows, values=values)


def reduce_tree_over_towers(
    reduction: Reduction, value: PyTree, tower_id: jax.Array, axes: TowerAxes
) -> PyTree:
    """As `reduce_over_towers`, for a tree that may hold ``IndexedRows``."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_rows)
    # One call reduces all dense leaves, so that errors name all of them.
    dense = [None if is_rows(x) else x for x in leaves]
    dense = reduce_over_towers(reduction, dense, tower_id, axes)

    def one(x: IndexedRows) -> IndexedRows:
        if reduction is Reduction.ONLY_FIRST_TOWER:
            return reduce_over_towers(reduction, x, tower_id, axes)
        stacked = gather_over_towers(x, axes)
        return reduce_stacked_rows(reduction, stacked, axes.num_towers)

    out = [one(x) if is_rows(x) else d for x, d in zip(leaves, dense, strict=True)]
    return jax.tree.unflatten(treedef, out)
