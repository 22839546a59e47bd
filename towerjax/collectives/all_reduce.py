"""How does a sum travel fastest? As one all-reduce over flat buffers."""

import dataclasses

import jax
from jax import lax

from towerjax.collectives.packing import Packing, Sums
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, short_repr
from towerjax.types.options import check_whole


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce:
    """One all-reduce over flat buffers: the fastest, right up to rounding.

    Small leaves share one flat buffer per dtype, because an all-reduce pays per
    operand; large ones travel alone, because copying them costs more than that.

    Attributes:
      pack_below_bytes: Leaves up to this many bytes are packed; 0 packs none. On CPU
        devices a step of 24 leaves of 128 KiB takes 0.6 of the time when packed, of
        256 KiB 0.8 to 0.9, and one of 8 leaves of 1 MiB 1.1 to 1.3.

    Raises:
      ValueError: ``pack_below_bytes`` is negative or no int.

    Example:
      >>> AllReduce(pack_below_bytes=0)
      AllReduce(pack_below_bytes=0)
    """

    pack_below_bytes: int = 131072

    def __repr__(self) -> str:
        """Text that can be pasted back."""
        return short_repr(self)

    def __post_init__(self) -> None:
        """Check the option."""
        check_whole("AllReduce.pack_below_bytes", self.pack_below_bytes, 0, 2**63 - 1)

    @property
    def needs_every_tower(self) -> bool:
        """False: local towers are added first."""
        return False

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        leaves, treedef = jax.tree.flatten(tree)
        below = self.pack_below_bytes if axes.device_axis else -1
        packing = Packing.plan(leaves, below, lead=0)
        buffers = packing.pack(leaves, lead=0)
        if axes.device_axis:
            buffers = lax.psum(buffers, DEVICE_AXIS)
        return Sums(buffers, packing, treedef, axes.platform)
