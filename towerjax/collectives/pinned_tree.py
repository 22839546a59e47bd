"""Sum over towers in one fixed binary tree, with the same bits on any devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.packing import Packing, Sums
from towerjax.collectives.reduce import add_pairwise
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class PinnedTree:
    """A sum in one fixed binary tree over towers: the same bits on any devices.

    Tower values are added pairwise in tower order, then the pairs, and so on: the
    order depends on ``T`` alone. With ``local="scan"``, which also runs the same
    program for each tower, a whole training run has the same bits on every ``D``
    that divides ``T``. Each device adds ``1/D`` of the numbers of all towers, and an
    all-gather shares the sums, which moves the bytes of a ring all-reduce.

    Where ``k = T / D`` is a power of two, a device's own towers are a subtree and are
    added before they are sent; otherwise each tower's values are sent, ``k`` times
    the bytes. A device holds ``k`` gradients at once.

    ``python -m benchmarks.same_bits`` tries it on many models and
    optimizers; ``docs/same_bits.md`` says how it works and what it costs.

    Example:
      >>> PinnedTree()
      PinnedTree()
    """

    needs_every_tower = True  # the tree is over towers

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        leaves, treedef = jax.tree.flatten(tree)
        packing = Packing.plan(leaves, lead=1)
        buffers = [
            _add_in_tower_order(
                rows.reshape(rows.shape[0], math.prod(rows.shape[1:])), axes
            )
            for rows in packing.pack(leaves, lead=1)
        ]
        return Sums(buffers, packing, treedef, axes.platform)


def _add_in_tower_order(rows: jax.Array, axes: TowerAxes) -> jax.Array:
    """``[k, n]`` rows of local towers -> ``[n]``, added over all towers."""
    num_local, size = rows.shape
    if not size:
        return jnp.zeros(0, rows.dtype)
    if not axes.device_axis:
        # Fused into the update, these additions would round otherwise. A collective
        # keeps XLA from fusing them; on one device a branch does, a barrier does not.
        # Both branches are the same, so the predicate does not matter.
        return lax.cond(rows[0, 0] > 0, add_pairwise, add_pairwise, rows)
    if num_local & (num_local - 1) == 0:
        rows = add_pairwise(rows)[None]
    share = -(-size // axes.num_devices)
    rows = jnp.pad(rows, ((0, 0), (0, share * axes.num_devices - size)))
    rows = rows.reshape(rows.shape[0], axes.num_devices, share)
    # Device d receives share d of every device's rows: [D * rows, share].
    rows = lax.all_to_all(rows, DEVICE_AXIS, split_axis=1, concat_axis=0, tiled=True)
    total = add_pairwise(rows.reshape(-1, share))
    return lax.all_gather(total, DEVICE_AXIS, tiled=True)[:size]
