"""How do towers' values meet outside a step? By the strategy's cross-tower ops."""

import functools
from typing import Any

import jax

from towerjax.collectives.base import sum_rows_over_towers
from towerjax.collectives.reduce import addable, reduce_stacked, reduced_dtype
from towerjax.mesh.placement import Placement, place_rows, waited
from towerjax.towers.executors import over_devices
from towerjax.types import Layout, PyTree, Reduction
from towerjax.types.leaves import is_traced


def reduce_side_by_side(strategy: Any, reduction: Reduction, stacked: PyTree) -> PyTree:
    """One value of the towers' values that lie side by side.

    SUM and MEAN of arrays that are there travel together, in one compiled program by
    the strategy's cross-tower ops. Where JAX is tracing, as inside a ``merge_call``,
    and for ONLY_FIRST_TOWER nothing travels.
    """
    nothing = not jax.tree.leaves(stacked) or reduction is Reduction.ONLY_FIRST_TOWER
    if nothing or is_traced(stacked):
        return reduce_stacked(reduction, stacked)
    placement: Placement = strategy.placement
    rows = place_rows(stacked, placement, Layout.PER_TOWER)
    return waited(_reduced(rows, strategy=strategy, reduction=reduction))


@functools.partial(jax.jit, static_argnames=("strategy", "reduction"))
def _reduced(rows: PyTree, *, strategy: Any, reduction: Reduction) -> PyTree:
    placement: Placement = strategy.placement

    def dtype_of(x: jax.Array) -> Any:
        return reduced_dtype(reduction, x.dtype)

    def device_fn(rows: PyTree) -> PyTree:
        addends = jax.tree.map(lambda x: x.astype(addable(dtype_of(x))), rows)
        ops, axes = strategy.cross_tower_ops, placement.axes
        totals = sum_rows_over_towers(ops, addends, axes)
        if reduction is Reduction.MEAN:
            totals = jax.tree.map(lambda x: x / placement.num_towers, totals)
        return jax.tree.map(lambda total, x: total.astype(dtype_of(x)), totals, rows)

    per_tower, mirrored = (Layout.PER_TOWER,), Layout.MIRRORED
    out = over_devices(device_fn, placement, per_tower, mirrored)(rows)
    return jax.lax.with_sharding_constraint(out, placement.sharding(mirrored))
