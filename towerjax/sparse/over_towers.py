"""How do rows of a large array travel? As values and indices, never added up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.placement import TowerAxes
from towerjax.reduce import (
    check_reduction,
    gather_over_towers,
    reduce_over_towers,
    reduce_stacked,
    reduced_dtype,
)
from towerjax.sparse.rows import IndexedRows, is_rows, rows_of
from towerjax.types import PyTree, Reduction


def reduce_rows(reduction: Reduction, towers: list[Any]) -> IndexedRows:
    """One ``IndexedRows`` of all towers'.

    Args:
      reduction: SUM (all rows, in tower order), MEAN (the same divided by ``T``) or
        ONLY_FIRST_TOWER.
      towers: Each tower's ``IndexedRows``, of which an array stands for all its rows;
        towers may have unequally many rows.

    Returns:
      ``IndexedRows``.

    Raises:
      ValueError: They are rows of arrays of different shapes, or one is neither rows
        nor an array; names the tower.
    """
    check_reduction(reduction)
    for tower, x in enumerate(towers):
        if not isinstance(x, IndexedRows | jax.Array | np.ndarray):
            raise ValueError(
                f"Tower {tower} has a {type(x).__name__} where others have IndexedRows."
                " Give IndexedRows, or an array [N, ...] for all its rows."
            )
    rows = [x if is_rows(x) else rows_of(x) for x in towers]
    for tower, x in enumerate(rows):
        if x.dense_shape != rows[0].dense_shape:
            raise ValueError(
                f"Tower {tower} has rows of an array of shape {x.dense_shape} and tower"
                f" 0 of {rows[0].dense_shape}; rows add up only in one array."
            )
    if reduction is Reduction.ONLY_FIRST_TOWER:
        return rows[0]
    values = jnp.concatenate([jnp.asarray(x.values) for x in rows])
    indices = jnp.concatenate([jnp.asarray(x.indices) for x in rows])
    joined = IndexedRows(values, indices, rows[0].dense_shape)
    return _divided(reduction, joined, len(rows))


def reduce_stacked_rows(
    reduction: Reduction, rows: IndexedRows, num_towers: int
) -> IndexedRows:
    """As `reduce_rows`, of towers' rows that lie side by side.

    Args:
      reduction: SUM, MEAN or ONLY_FIRST_TOWER.
      rows: Values ``[T, r, ...]`` and indices ``[T, r]``.
      num_towers: ``T``.

    Returns:
      ``IndexedRows`` of ``T r`` rows, or of ``r``.

    Raises:
      ValueError: There are not ``T``, or ``reduction`` gives no one value.
    """
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
    values = values.reshape(-1, *values.shape[2:])
    joined = IndexedRows(values, indices.reshape(-1), rows.dense_shape)
    return _divided(reduction, joined, num_towers)


def _divided(reduction: Reduction, rows: IndexedRows, num_towers: int) -> IndexedRows:
    values, dtype = rows.values, reduced_dtype(reduction, rows.values.dtype)
    if reduction is Reduction.MEAN:
        values = values / num_towers
    return dataclasses.replace(rows, values=values.astype(dtype))


def reduce_stacked_tree(
    reduction: Reduction, stacked: PyTree, num_towers: int
) -> PyTree:
    """As `reduce_stacked`, of a tree that may hold ``IndexedRows``.

    Args:
      reduction: SUM, MEAN or ONLY_FIRST_TOWER.
      stacked: Leaves ``[T, ...]``.
      num_towers: ``T``.

    Returns:
      Like ``stacked``, with one value a leaf.
    """

    def one(x: Any) -> Any:
        if is_rows(x):
            return reduce_stacked_rows(reduction, x, num_towers)
        return reduce_stacked(reduction, x)

    return jax.tree.map(one, stacked, is_leaf=is_rows)


def reduce_tree_over_towers(
    reduction: Reduction, value: PyTree, tower_id: jax.Array, axes: TowerAxes
) -> PyTree:
    """As `reduce_over_towers`, of a tree that may hold ``IndexedRows``.

    Args:
      reduction: SUM, MEAN or ONLY_FIRST_TOWER.
      value: This tower's value; ``IndexedRows`` of as many rows on each tower.
      tower_id: ``()`` int32.
      axes: The axes that the towers meet over.

    Returns:
      Like ``value``; of ``IndexedRows`` with ``r`` rows on each tower, ``T r`` rows.
    """
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_rows)
    # All that is dense at once, so that one call checks all of it.
    dense = [None if is_rows(x) else x for x in leaves]
    dense = reduce_over_towers(reduction, dense, tower_id, axes)

    def one(x: IndexedRows) -> IndexedRows:
        if reduction is Reduction.ONLY_FIRST_TOWER:
            return reduce_over_towers(reduction, x, tower_id, axes)
        stacked = gather_over_towers(x, axes)
        return reduce_stacked_rows(reduction, stacked, axes.num_towers)

    out = [one(x) if is_rows(x) else d for x, d in zip(leaves, dense, strict=True)]
    return jax.tree.unflatten(treedef, out)
