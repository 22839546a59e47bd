"""Unwrap, reduce and gather the towers' values."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.collectives.reduce import (
    as_addend,
    check_addable,
    check_dim,
    check_reduction,
    from_total,
    join_rows,
    reduce_stacked,
)
from towerjax.collectives.rows_over_towers import (
    check_joins,
    join_tower_rows,
    reduce_rows,
    reduce_stacked_rows,
)
from towerjax.collectives.sparse_rows import IndexedRows, is_rows
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.placement import has_sharding, place_rows, wait_on_cpus
from towerjax.metrics.weighted import Weighted
from towerjax.towers.cross_tower.destinations import copy_to, of_first_process
from towerjax.towers.executors import is_of_one_tower, over_devices
from towerjax.towers.fields import StrategyFields
from towerjax.towers.merge import (
    as_native,
    check_structures,
    is_tuple,
    num_stacked,
    stack_towers,
)
from towerjax.towers.tower_local import read_local_over_towers, refuse_own_copy
from towerjax.towers.variables import (
    TowerLocal,
    any_per_tower,
    is_per_tower,
)
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.types.leaves import is_traced, map_parts, parts_of


def reduce_on_devices(
    strategy: StrategyFields, reduction: Reduction, stacked: PyTree
) -> PyTree:
    """Reduce leaves ``[T, ...]`` to one value.

    SUM and MEAN of concrete arrays are computed together, in one compiled program, by
    the strategy's cross-tower ops. While JAX traces, as inside a ``merge_call``, and
    for ONLY_FIRST_TOWER there is no communication.
    """
    no_sums = not jax.tree.leaves(stacked) or reduction is Reduction.ONLY_FIRST_TOWER
    if no_sums or is_traced(stacked):
        return reduce_stacked(reduction, stacked)
    placement = strategy.placement
    rows = place_rows(stacked, placement, Layout.PER_TOWER)
    return wait_on_cpus(_reduce_all(rows, strategy=strategy, reduction=reduction))


@functools.partial(jax.jit, static_argnames=("strategy", "reduction"))
def _reduce_all(
    rows: PyTree, *, strategy: StrategyFields, reduction: Reduction
) -> PyTree:
    placement = strategy.placement

    def device_fn(rows: PyTree) -> PyTree:
        ops, axes = strategy.cross_tower_ops, placement.axes
        return read_local_over_towers(TowerLocal(rows, reduction), ops, axes)

    per_tower, mirrored = (Layout.PER_TOWER,), Layout.MIRRORED
    out = over_devices(device_fn, placement, per_tower, mirrored)(rows)
    return jax.lax.with_sharding_constraint(out, placement.sharding(mirrored))


def as_per_tower(x: Any) -> PerTower:
    """``x`` as ``PerTower``, if it is a tower-local variable; else ``x``."""
    if not isinstance(x, TowerLocal):
        return x
    refuse_own_copy(x)
    # A tuple in a variable is a tree of leaves [T, ...].
    apart = is_tuple(x.value)
    return PerTower(tuple(_unstack(x.value)) if apart else x.value)


def unpad_batches(tree: PyTree) -> PyTree:
    """Replace each placed batch of a tree by its towers' rows."""
    if not parts_of(PlacedBatch, tree):
        return tree  # the same objects
    return map_parts(PlacedBatch, PlacedBatch.unpadded, tree)


def unwrap(value: Any) -> list[Any]:
    """The towers' values, or trees, as a list; ``[value]`` when it is one value."""
    value = unpad_batches(value)
    if not any_per_tower(value):
        return [value]
    parts, treedef = jax.tree.flatten(value, is_leaf=is_per_tower)
    columns = [
        _tower_rows(as_per_tower(x).values) if is_per_tower(x) else itertools.repeat(x)
        for x in parts
    ]
    return [treedef.unflatten(row) for row in zip(*columns, strict=False)]


def _tower_rows(rows: Any) -> list[Any]:
    return list(rows) if is_tuple(rows) else _unstack(rows)


def _unstack(stacked: PyTree) -> list[PyTree]:
    """Split a tree of leaves ``[T, ...]`` into the towers' trees."""
    towers = range(num_stacked(stacked))
    return [jax.tree.map(lambda x, t=t: x[t], stacked) for t in towers]


def reduce_values(
    strategy: StrategyFields,
    reduction: Reduction,
    value: PyTree,
    *,
    axis: int | None = None,
    destinations: Any = None,
) -> PyTree:
    """Reduce all towers' values to one; see `CrossTowerMethods.reduce`."""
    check_reduction(reduction)
    value = as_native("value", unpad_batches(value))
    if axis is not None and reduction is Reduction.ONLY_FIRST_TOWER:
        raise ValueError(
            f"axis={axis} adds up elements or takes their mean, which"
            " Reduction.ONLY_FIRST_TOWER does not say. Write SUM or MEAN, or reduce"
            " without axis and then over the dim."
        )
    value = _group_fields(Weighted | IndexedRows, value, strategy.num_towers)

    def one(x: Any) -> Any:
        if not is_per_tower(x):
            x = _reduce_mirrored(strategy, reduction, x)
            return x if axis is None else _reduce_dim(reduction, x, axis=axis)
        x = as_per_tower(x)
        check_addable(reduction, x)
        if parts_of(IndexedRows, x):
            rows = _reduce_sparse(strategy, reduction, x.values, axis)
            return map_parts(IndexedRows, lambda r: _on_all(strategy, r), rows)
        if axis is not None:  # joined before they are added: bfloat16 is rounded once
            joined = _join_values(strategy, x, axis, "reduce with")
            of_dim = functools.partial(_reduce_dim, reduction, axis=axis)
            return jax.tree.map(of_dim, joined)
        return PerTower(stack_towers(x, strategy.num_towers, "The PerTower value"))

    out = jax.tree.map(one, value, is_leaf=lambda x: is_per_tower(x) or is_rows(x))
    leaves, treedef = jax.tree.flatten(out, is_leaf=is_per_tower)
    stacked = [x.values for x in leaves if is_per_tower(x)]
    one_value = iter(reduce_on_devices(strategy, reduction, stacked))
    leaves = [next(one_value) if is_per_tower(x) else x for x in leaves]
    out = jax.tree.unflatten(treedef, leaves)
    return out if destinations is None else copy_to(out, destinations)


def _group_fields(kind: Any, tree: PyTree, num_towers: int) -> PyTree:
    """Make each part of class ``kind`` with a ``PerTower`` field one ``PerTower``.

    So both fields of a ``Weighted`` are reduced alike, even if towers share the weight.
    """

    def stack_field(x: Any) -> Any:
        if is_per_tower(x):
            return stack_towers(as_per_tower(x), num_towers, "A field")
        return jnp.broadcast_to(x, (num_towers, *np.shape(x)))

    def one(part: Any) -> Any:
        fields, treedef = jax.tree.flatten(part, is_leaf=is_per_tower)
        own = [as_per_tower(x).values for x in fields if is_per_tower(x)]
        if not own:
            return part
        if any(map(is_tuple, own)):
            return PerTower(tuple(unwrap(part)))
        return PerTower(treedef.unflatten(map(stack_field, fields)))

    return map_parts(kind, one, tree)


def _on_all(strategy: StrategyFields, rows: IndexedRows) -> IndexedRows:
    """The rows on all devices, as a reduced array is; traced ones as they are."""
    return rows if is_traced(rows) else copy_to(rows, strategy.placement.devices)


def _reduce_sparse(
    strategy: StrategyFields, reduction: Reduction, rows: Any, axis: Any
) -> Any:
    num_towers, name = strategy.num_towers, "The PerTower value"
    if axis is not None:
        raise ValueError(f"axis={axis} of IndexedRows: reduce without axis first.")
    if not is_tuple(rows):
        leaves, treedef = jax.tree.flatten(rows, is_leaf=is_rows)
        out = [
            reduce_stacked_rows(reduction, x, num_towers)
            if is_rows(x)
            else PerTower(stack_towers(PerTower(x), num_towers, name))
            for x in leaves
        ]
        return jax.tree.unflatten(treedef, out)
    if len(rows) != num_towers:
        raise ValueError(
            f"The PerTower value holds {len(rows)} towers' rows, but the strategy has"
            f" {num_towers} towers. Give one IndexedRows, or array, for each tower."
        )
    check_structures(rows, name, is_leaf=is_rows)

    def one(*leaves: Any) -> Any:
        if any(map(is_rows, leaves)):
            return reduce_rows(reduction, list(leaves))
        return PerTower(stack_towers(PerTower(leaves), num_towers, name))

    return jax.tree.map(one, *rows, is_leaf=is_rows)


def refuse_in_tower(what: str, value: Any, instead: str) -> None:
    """Raise in a tower function for one tower's value, which no collective merged."""
    if is_of_one_tower(value):
        raise ValueError(
            f"strategy.{what} in a tower function of a value that is one tower's. Write"
            f" {instead}, or meet first: tower.merge_call(lambda strategy, x:"
            f" strategy.{what}(...), x) gives its function all towers' values."
        )


def _reduce_mirrored(strategy: StrategyFields, reduction: Reduction, value: Any) -> Any:
    refuse_in_tower("reduce", value, f"tower.reduce(tj.{reduction!r}, x)")
    if reduction is not Reduction.SUM or strategy.num_towers == 1:
        value = of_first_process(value, strategy.placement)
        # A copy, since the caller may write into a NumPy array later.
        numpys = np.ndarray | np.generic
        return jax.tree.map(
            lambda x: jnp.array(x) if isinstance(x, numpys) else x, value
        )
    known = not isinstance(value, Tracer) and not is_rows(value)
    # Such as the gradient of an unused parameter. Compared in NumPy, since JAX's
    # comparison has no value while JAX traces.
    if known and not np.any(np.asarray(value)):
        return value
    if is_rows(value):
        value = "IndexedRows"
    elif np.ndim(value):
        value = f"an array of shape {np.shape(value)}"
    raise ValueError(
        f"SUM of {value}, which is the same on all {strategy.num_towers} towers:"
        f" did you mean {strategy.num_towers} times the value, or the value? Use"
        " Reduction.MEAN for the value itself, or multiply by num_towers."
    )


def _reduce_dim(reduction: Reduction, x: Any, *, axis: int) -> Any:
    check_dim([x], axis)
    x = jnp.asarray(x)
    total = as_addend(reduction, x).sum(axis=axis)
    count = max(x.shape[axis], 1)  # no elements: 0, never NaN
    return from_total(reduction, total, count, x.dtype)


def gather_values(strategy: StrategyFields, value: PyTree, axis: int) -> PyTree:
    """All towers' values joined along a dim; sizes may differ along it alone."""
    value = _group_fields(IndexedRows, as_native("value", value), strategy.num_towers)
    if not is_per_tower(value):
        if any_per_tower(value):
            one = functools.partial(gather_values, strategy, axis=axis)
            stops = lambda x: is_per_tower(x) or is_rows(x)  # noqa: E731
            return jax.tree.map(one, value, is_leaf=stops)
        refuse_in_tower("gather", value, "tower.all_gather(x)")
        if strategy.num_towers > 1:
            raise ValueError(
                f"gather of a value that is the same on all {strategy.num_towers}"
                " towers: it is one value and not a PerTower. Use it as it is, or tile"
                " it for as many copies as there are towers."
            )
        value = PerTower((value,))
    return _join_values(strategy, as_per_tower(value), axis, "gather along")


def _join_values(
    strategy: StrategyFields, value: PerTower, axis: int, what: str
) -> PyTree:
    """All towers' values joined along dim ``axis`` of a tower's."""
    number, stacked = strategy.num_towers, value.values
    one_by_one = is_tuple(stacked) or bool(parts_of(IndexedRows, stacked))
    rows = unwrap(value) if one_by_one else [None] * num_stacked(stacked)
    # A tuple of ``map`` may lack the values of the last towers.
    if not rows or len(rows) > number or (len(rows) < number and not is_tuple(stacked)):
        raise ValueError(
            f"The PerTower value holds {len(rows)} towers' values, but the strategy has"
            f" {number} towers. Stack one value for each tower."
        )
    if not one_by_one:
        return jax.tree.map(lambda x: _join_stacked(strategy, x, axis), stacked)
    # The shape of IndexedRows is part of their structure, but may differ.
    bare = [jax.tree.map(lambda x: 0, row, is_leaf=is_rows) for row in rows]
    check_structures(bare, "gather: the PerTower value")

    def join(*leaves: Any) -> Any:
        check_joins(leaves, axis)
        if any(map(is_rows, leaves)):
            return wait_on_cpus(join_tower_rows(list(leaves)))
        return _concatenate(tuple(map(jnp.asarray, leaves)), axis, what)

    return jax.tree.map(join, *rows, is_leaf=is_rows)


def _join_stacked(strategy: StrategyFields, x: Any, axis: int) -> jax.Array:
    check_dim([jax.ShapeDtypeStruct(np.shape(x)[1:], np.int32)], axis)
    per_tower = strategy.placement.sharding(Layout.PER_TOWER)
    if is_traced(x) or not has_sharding(x, per_tower):
        return join_rows(jnp.asarray(x), axis)
    mirrored = strategy.placement.sharding(Layout.MIRRORED)
    return wait_on_cpus(_join_on_devices(x, axis=axis, sharding=mirrored))


@functools.partial(jax.jit, static_argnames=("axis", "sharding"))
def _join_on_devices(x: jax.Array, *, axis: int, sharding: Any) -> jax.Array:
    """One program: a slice for each tower takes a program of all devices each."""
    return jax.lax.with_sharding_constraint(join_rows(x, axis), sharding)


def _concatenate(rows: Sequence[jax.Array], axis: int, what: str) -> jax.Array:
    def other_dims(row: jax.Array) -> tuple[int, ...]:
        return tuple(np.delete(row.shape, axis).tolist())

    for tower, row in enumerate(rows):
        if row.ndim != rows[0].ndim or other_dims(row) != other_dims(rows[0]):
            raise ValueError(
                f"{what} axis {axis}: tower {tower} has shape {row.shape} and"
                f" tower 0 {rows[0].shape}; only dim {axis} may differ."
            )
    return wait_on_cpus(jnp.concatenate(rows, axis=axis))
