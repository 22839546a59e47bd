"""Reduce all towers' values to one, outside of a step or in a merge function."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.collectives.reduce import (
    check_reduction,
    multiplies,
    one_of,
    reduce_rows,
    takes_first,
)
from towerjax.collectives.sparse_rows import IndexedRows, is_rows
from towerjax.mesh.transfer import place_rows, wait_on_cpus
from towerjax.metrics.weighted import Weighted
from towerjax.towers import values
from towerjax.towers.executors import is_inside_tower, over_devices
from towerjax.towers.values import StrategyFields
from towerjax.towers.variables import (
    TowerLocal,
    read_local_over_towers,
)
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.types.trees import is_traced, map_parts, parts_of, put_parts

_VALUE = "the PerTower value"


def reduce_values(
    self: StrategyFields, reduction: Reduction, value: PyTree, destinations: Any = None
) -> PyTree:
    """Reduce all towers' values to one value, leaf by leaf.

    ``reduction`` is SUM, MEAN or ONLY_FIRST_TOWER; SUM of a replicated value is
    refused. ``destinations`` are the devices of the result: a device name, a
    ``jax.Device``, several of these, or a value that lies on them. While JAX traces,
    only a traced value may be given, which lies on all devices.
    """
    check_reduction(reduction)
    value = values.as_native("value", values.unpad_batches(value))
    value = _by_leaf(value, self.num_towers, Weighted | IndexedRows)

    def reduced(x: Any) -> Any:
        if not isinstance(x, PerTower):
            return _reduce_mirrored(self, reduction, x)
        check_reduction(reduction, x)
        if not parts_of(IndexedRows, x):
            return PerTower(values.stack_towers(x, self.num_towers, _VALUE))
        if values.is_tuple(x.values):
            out = reduce_rows(reduction, list(x.values))
        else:
            rows = values.stack_towers(x, self.num_towers, _VALUE)
            out = one_of(reduction, rows)
        # The rows are copied to the devices on which reduced arrays lie.
        return out if is_traced(out) else values.copy_to(out, self.placement.devices)

    def is_leaf(x: Any) -> bool:
        return isinstance(x, PerTower | IndexedRows)

    out = jax.tree.map(reduced, value, is_leaf=is_leaf)
    stacked = [x.values for x in parts_of(PerTower, out)]
    out = put_parts(PerTower, out, _reduce_on_devices(self, reduction, stacked))
    return values.copy_to(out, destinations)


def _reduce_on_devices(
    strategy: StrategyFields, reduction: Reduction, stacked: PyTree
) -> PyTree:
    """Reduce leaves ``[T, ...]`` to one value, by the strategy's cross-tower ops."""
    no_sums = not jax.tree.leaves(stacked) or takes_first(reduction)
    if no_sums or is_inside_tower():  # nothing is sent
        return one_of(reduction, stacked)
    if is_traced(stacked):
        return _reduce_global(strategy, reduction, stacked)
    rows = place_rows(stacked, strategy.placement, Layout.PER_TOWER)
    return wait_on_cpus(_reduce_all(rows, strategy=strategy, reduction=reduction))


@functools.partial(jax.jit, static_argnames=("strategy", "reduction"))
def _reduce_all(
    rows: PyTree, *, strategy: StrategyFields, reduction: Reduction
) -> PyTree:
    out = _reduce_global(strategy, reduction, rows)
    sharding = strategy.placement.sharding(Layout.MIRRORED)
    return jax.lax.with_sharding_constraint(out, sharding)


def _reduce_global(
    strategy: StrategyFields, reduction: Reduction, rows: PyTree
) -> PyTree:
    """Reduce global leaves ``[T, ...]``, in a trace."""
    placement = strategy.placement

    def device_fn(rows: PyTree) -> PyTree:
        ops = strategy.cross_tower_ops
        axes = placement.axes
        return read_local_over_towers(TowerLocal(rows, reduction), ops, axes)

    per_tower = (Layout.PER_TOWER,)
    mirrored = Layout.MIRRORED
    return over_devices(device_fn, placement, per_tower, mirrored)(rows)


def _by_leaf(value: PyTree, num_towers: int, kind: Any) -> PyTree:
    """Split each ``PerTower`` of a tree into one ``PerTower`` per leaf.

    ``kind`` is a type that stays one part, such as a mean.
    """

    def stack_field(x: Any) -> Any:
        if isinstance(x, PerTower):
            return values.stack_towers(x, num_towers, "a field")
        return jnp.broadcast_to(x, (num_towers, *np.shape(x)))

    def grouped(part: Any) -> Any:
        # A mean's sum and weight are reduced alike, so a replicated weight is stacked
        # for all towers if the sum is per tower.
        per_tower = parts_of(PerTower, part)
        if any(values.is_tuple(x.values) for x in per_tower):  # shapes may differ
            return PerTower(tuple(values.values_of_towers(part, num_towers)))
        rows = jax.tree.map(
            stack_field, part, is_leaf=lambda x: isinstance(x, PerTower)
        )
        return PerTower(rows) if per_tower else part

    def by_leaf(x: PerTower) -> PyTree:
        rows = x.values
        if not values.is_tuple(rows):
            return jax.tree.map(PerTower, rows, is_leaf=is_rows)
        if len(rows) != num_towers:
            raise ValueError(
                f"{_VALUE} holds values of {len(rows)} towers, but the strategy has"
                f" {num_towers} towers. Give one value for each tower."
            )
        values.check_structures(rows, _VALUE, is_leaf=is_rows)
        return jax.tree.map(lambda *xs: PerTower(xs), *rows, is_leaf=is_rows)

    value = map_parts(TowerLocal, lambda x: values.copies_by_leaf(x).value, value)
    return map_parts(PerTower, by_leaf, map_parts(kind, grouped, value))


def _reduce_mirrored(strategy: StrategyFields, reduction: Reduction, value: Any) -> Any:
    values.refuse_in_tower("reduce", value, f"tower.reduce(tj.{reduction!r}, x)")
    if not multiplies(reduction) or strategy.num_towers == 1:
        value = values.of_first_process(value, strategy.placement)
        # A copy is returned, because the caller may write into a NumPy array later.
        return map_parts(np.ndarray | np.generic, jnp.array, value)
    # A SUM of zeros is allowed, such as the gradient of an unused parameter. NumPy
    # compares, because JAX's comparison has no value while JAX traces.
    known = not isinstance(value, Tracer) and not is_rows(value)
    if known and not np.any(np.asarray(value)):
        return value
    shown = f"an array of shape {np.shape(value)}" if np.ndim(value) else value
    raise ValueError(
        f"reduce got SUM of {'IndexedRows' if is_rows(value) else shown}, which is the"
        f" same on all {strategy.num_towers} towers. Use Reduction.MEAN for the value"
        " itself, or multiply by num_towers."
    )
