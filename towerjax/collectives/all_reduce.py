"""How does a sum travel as all-reduces over flat buffers? In one, or in packs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
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


@dataclasses.dataclass(frozen=True)
class Packed:
    """One all-reduce of packs whose number or size you choose; a pack has one dtype.

    Shapes and order come back as they were. With no option: one pack a dtype. XLA
    may send several packs in one message, up to its own limit for combining them.

    Attributes:
      num_packs: All leaves of a dtype lie end to end and are cut into so many
        packs of ``total // num_packs`` elements; the last one has the remainder
        too. A pack without elements is not sent.
      bytes_per_pack: Consecutive leaves of a dtype fill a pack up to so many bytes;
        a larger leaf travels alone. Not with ``num_packs``.
      max_group: A pack has at most so many leaves. Not with ``num_packs``.

    Raises:
      ValueError: An option is not a positive int, or options exclude each other.

    Example:
      >>> Packed(bytes_per_pack=1 << 20, max_group=16)
      Packed(bytes_per_pack=1048576, max_group=16)

    Source:
      The packers of ``tf.contrib.distribute`` (TensorFlow 1.11, 2018),
      ``ConcatAndSplitPacker`` and ``AggregateSmallTensorPacker``,
      https://github.com/tensorflow/tensorflow/blob/v1.11.0/tensorflow/contrib/distribute/python/cross_tower_ops.py;
      here limits are in bytes, and a group has no more leaves than it may.
    """

    num_packs: int | None = None
    bytes_per_pack: int | None = None
    max_group: int | None = None

    needs_every_tower = False  # local towers are added first
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check the options."""
        if type(self.num_packs) is int and self.num_packs <= 0:
            raise ValueError(
                f"Packed: num_packs must be greater than zero, got {self.num_packs}."
            )
        for field in dataclasses.fields(self):
            if (number := getattr(self, field.name)) is not None:
                check_whole(f"Packed.{field.name}", number, 1, 2**63 - 1)
        others = [
            f"{name}={getattr(self, name)}"
            for name in ("bytes_per_pack", "max_group")
            if getattr(self, name) is not None
        ]
        if self.num_packs is not None and others:
            raise ValueError(
                f"Packed got num_packs={self.num_packs} and {' and '.join(others)}."
                " num_packs cuts all leaves into equal parts, so it leaves nothing to"
                " choose: give num_packs alone, or leave it out."
            )

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        if self.num_packs is not None:
            return sum_packed(tree, axes, self._all_reduce, alone_above=math.inf)
        most = self.bytes_per_pack or math.inf
        return sum_packed(
            tree,
            axes,
            self._all_reduce,
            alone_above=most,
            reach=most,
            max_leaves=self.max_group or math.inf,
        )

    def _all_reduce(self, buffers: list[jax.Array]) -> list[jax.Array]:
        if self.num_packs is None:
            return lax.psum(buffers, DEVICE_AXIS)
        packs = [cut(buffer.reshape(-1), self.num_packs) for buffer in buffers]
        return [jnp.concatenate(parts) for parts in lax.psum(packs, DEVICE_AXIS)]


def pack_sizes(total: int, num_packs: int) -> list[int]:
    """How many elements each pack has: equally many, and the last the rest too."""
    size = total // num_packs
    return [size] * (num_packs - 1) + [total - size * (num_packs - 1)]


def cut(buffer: jax.Array, num_packs: int) -> list[jax.Array]:
    """The packs of a buffer, without those that have no elements."""
    parts, start = [], 0
    for size in pack_sizes(buffer.size, num_packs):
        if size:
            parts.append(lax.slice_in_dim(buffer, start, start + size))
        start += size
    return parts
