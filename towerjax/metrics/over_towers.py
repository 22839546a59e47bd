"""How do the towers' metric states become one? In one sum, or one by one."""

from typing import Any

import jax
from jax import lax

from towerjax.collectives import CrossTowerOps
from towerjax.collectives.base import sum_rows_over_towers
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.metrics.state import is_metric, merged_rows, split_states
from towerjax.types import PyTree


def folded_over_towers(rows: PyTree, axes: TowerAxes) -> PyTree:
    """All towers' states, merged in tower order, inside a device function.

    Every tower's state travels to every device: for small states that do not add up.
    """
    if axes.device_axis:
        rows = jax.tree.map(lambda x: lax.all_gather(x, DEVICE_AXIS, tiled=True), rows)
    return jax.tree.map(merged_rows, rows, is_leaf=is_metric)


def merged_over_towers(ops: CrossTowerOps, rows: PyTree, axes: TowerAxes) -> PyTree:
    """The merged states of all towers, inside a device function.

    States that add up travel in one sum, by ``ops``; the others are gathered and
    merged one after another, tower 0 first. Nothing is divided.
    """
    added, folded, flags = split_states(rows)
    added = iter(sum_rows_over_towers(ops, added, axes) if added else ())
    folded = iter(folded_over_towers(folded, axes))
    merged: list[Any] = [next(added) if flag else next(folded) for flag in flags]
    treedef = jax.tree.structure(rows, is_leaf=is_metric)
    return jax.tree.unflatten(treedef, merged)
