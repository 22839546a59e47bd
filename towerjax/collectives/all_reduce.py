"""How does a sum travel fastest? As one all-reduce over flat buffers."""

import dataclasses

import jax
from jax import lax

from towerjax.collectives.packing import PACK_BELOW_BYTES, Sums, sum_packed
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, short_repr
from towerjax.types.options import check_whole


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """One all-reduce over flat buffers: the fastest, right up to rounding.

    Small leaves of a dtype share a flat buffer with those near them, because an
    all-reduce pays per operand; larger ones travel alone, because copying them costs
    more than that.

    Attributes:
      pack_below_bytes: How many bytes a leaf that shares a buffer has at most; 0 packs
        none. A buffer's leaves lie within 8 times as many bytes of the tree, so that
        what the first gradients are made of does not wait in memory for the last.

    Raises:
      ValueError: ``pack_below_bytes`` is negative or no int.

    Example:
      >>> AllReduce(pack_below_bytes=0)
      AllReduce(pack_below_bytes=0)
    """

    pack_below_bytes: int = PACK_BELOW_BYTES

    needs_every_tower = False  # local towers are added first
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check the option."""
        check_whole("AllReduce.pack_below_bytes", self.pack_below_bytes, 0, 2**63 - 1)

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        return sum_packed(tree, axes, _all_reduce, alone_above=self.pack_below_bytes)


def _all_reduce(buffers: list[jax.Array]) -> list[jax.Array]:
    return lax.psum(buffers, DEVICE_AXIS)
