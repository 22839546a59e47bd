"""How do the towers' metric states become one that do not add up? One by one."""

import jax
from jax import lax

from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.metrics.state import is_metric, merged_rows
from towerjax.types import PyTree


def folded_over_towers(rows: PyTree, axes: TowerAxes) -> PyTree:
    """All towers' states, merged in tower order, inside a device function.

    Every tower's state travels to every device: for small states that do not add up.
    """
    if axes.device_axis:
        rows = jax.tree.map(lambda x: lax.all_gather(x, DEVICE_AXIS, tiled=True), rows)
    return jax.tree.map(merged_rows, rows, is_leaf=is_metric)
