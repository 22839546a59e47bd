"""Cross-tower ops: all-reduce, packed, hierarchical, to one device, pinned tree."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.packing import PACK_BELOW_BYTES, Packing, Sums, sum_packed
from towerjax.collectives.reduce import add_pairwise, add_rows, hide_complex, take_first
from towerjax.jaxprs import tags
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import TowerAxes
from towerjax.types import PyTree
from towerjax.types.options import check_whole, short_repr


class CrossTowerOps(Protocol):
    """The interface of a cross-tower op, which adds over towers, like `AllReduce`."""

    @property
    def needs_every_tower(self) -> bool:
        """Whether ``sum_over_towers`` takes leaves ``[k, ...]``, one row per tower."""
        ...

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """Add ``tree`` over all towers.

        Its leaves are a device's sums or, if ``needs_every_tower``, have a row for each
        tower of the device.
        """
        ...


@runtime_checkable
class ChecksDevices(Protocol):
    """The interface of a cross-tower op that does not fit every set of devices."""

    def check_devices(self, devices: Sequence[str]) -> None:
        """Raise a ValueError unless the op can use these devices, in tower order."""
        ...


def sum_over_towers(ops: CrossTowerOps, tree: PyTree, axes: TowerAxes) -> Sums:
    """Add over all towers by the op, under the name that marks a step's own sums."""
    with jax.named_scope(tags.SUMMED_BY_STEP):
        return ops.sum_over_towers(tree, axes)


def sends_alone(ops: CrossTowerOps, leaf: Any, axes: TowerAxes) -> bool:
    """Return whether the op sends a leaf alone, so that it can be scattered.

    The answer is no for a user's op, and for a user's subclass of one of ours, because
    it may send leaves in another way.
    """
    return type(ops) is AllReduce and ops.sends_alone(leaf, axes)


def sum_rows_over_towers(ops: CrossTowerOps, rows: PyTree, axes: TowerAxes) -> PyTree:
    """Add leaves ``[k, ...]``, one row per local tower, over all towers."""
    if not ops.needs_every_tower:
        rows = jax.tree.map(add_rows, rows)
    return sum_over_towers(ops, rows, axes).tree()


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """One all-reduce over flat buffers: the fastest op, exact up to rounding.

    Small leaves share a flat buffer if they have one dtype and are near each other in
    the tree, because each operand of an all-reduce costs time. Larger leaves are sent
    alone, because copying them costs more.

    Attributes:
      pack_below_bytes: The largest size of a leaf that shares a buffer, in bytes; 0
        packs none. A buffer takes leaves from a stretch of the tree that has at most 8
        times this size. So the first gradients need not stay in memory until the last
        one is computed.
      num_packs: The number of equal buffers per dtype, in place of
        ``pack_below_bytes``; see `Packed`.
      bytes_per_pack: The largest size of a buffer in bytes, in place of
        ``pack_below_bytes``; see `Packed`.
      max_group: The largest number of leaves in a buffer.
      group_size: The number of devices of a group, in which sums are made first; see
        `Hierarchical`.
      device: The name of the one device on which sums are made; see
        `ReduceToOneDevice`.

    Raises:
      ValueError: A number is out of range; options exclude each other; or the devices
        cannot form such groups or do not have this device.

    Example:
      >>> AllReduce(pack_below_bytes=0)
      AllReduce(pack_below_bytes=0)
    """

    pack_below_bytes: int = PACK_BELOW_BYTES
    num_packs: int | None = None
    bytes_per_pack: int | None = None
    max_group: int | None = None
    group_size: int | Literal["process"] | None = None
    device: str | None = None

    needs_every_tower = False  # a device's towers are added before the op
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_whole("pack_below_bytes", self.pack_below_bytes, 0, _UNLIMITED)
        if type(self.num_packs) is int and self.num_packs <= 0:
            raise ValueError(
                f"num_packs must be greater than zero, got {self.num_packs}."
            )
        for name in ("num_packs", "bytes_per_pack", "max_group"):
            check_whole(name, getattr(self, name), 1, _UNLIMITED, or_none=True)
        if self.num_packs is not None and (self.bytes_per_pack or self.max_group):
            raise ValueError(
                f"{self!r}: num_packs already sets the size of all packs. Give"
                " num_packs alone, or leave it out."
            )
        if self.group_size != "process":
            check_whole("group_size", self.group_size, or_none=True)
        if self.device not in (None, _FIRST):
            object.__setattr__(self, "device", canonical_device_name(self.device))
        if self.device is not None and self.group_size is not None:
            raise ValueError(
                f"{self!r} has both group_size and device. Give one of them."
            )

    def check_devices(self, devices: Sequence[str]) -> None:
        """Raise unless ``group_size`` and ``device`` fit these devices."""
        size: Any = self.group_size
        if size not in (None, "process"):
            _check_group_size(size, len(devices))
        if self.device not in (None, _FIRST, *devices):
            raise ValueError(
                f"device={self.device!r} is not one of the strategy's devices,"
                f" {', '.join(devices)}."
            )

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """Add over all towers; see `CrossTowerOps`."""
        send = functools.partial(self._send, axes=axes)
        if number := self.num_packs:

            def in_packs(buffers: list[jax.Array]) -> list[jax.Array]:
                packs = [split_into_packs(x.reshape(-1), number) for x in buffers]
                sums = iter(send([part for parts in packs for part in parts]))
                return [jnp.concatenate([next(sums) for _ in x]) for x in packs]

            return sum_packed(tree, axes, in_packs, unshared_above=math.inf)
        below = self._shared_below(axes)
        leaves = self.max_group or math.inf
        reach = None if self.bytes_per_pack is None else below
        return sum_packed(tree, axes, send, below, reach, leaves)

    def sends_alone(self, leaf: Any, axes: TowerAxes) -> bool:
        """Return whether a leaf of this shape is sent by itself in an all-reduce."""
        others = self.num_packs, self.group_size, self.device
        num_bytes = leaf.size * leaf.dtype.itemsize
        is_plain = others == (None, None, None)
        return is_plain and num_bytes > self._shared_below(axes)

    def _shared_below(self, axes: TowerAxes) -> int:
        """Choose the size, in bytes, up to which a leaf shares a buffer."""
        # In a tower of several devices, leaves are split over the devices of the tower,
        # and packing them into a buffer would gather them. So no leaf is packed.
        if axes.mesh.axis_names:
            return 0
        most = self.bytes_per_pack
        return self.pack_below_bytes if most is None else most

    def _send(self, buffers: list[jax.Array], axes: TowerAxes) -> list[jax.Array]:
        """Add the buffers over all devices."""
        size = self.group_size
        count = axes.num_devices
        root = 0
        if size is not None:
            if size == "process" and count % axes.num_processes:
                raise ValueError(
                    f"Hierarchical(): {axes.num_processes} processes do not have equal"
                    f" numbers of the {count} devices. Give a group_size."
                )
            size = count // axes.num_processes if size == "process" else size
            _check_group_size(size, count)
            return [_sum_in_stages(x, size, count) for x in buffers]
        if self.device is None:
            buffers = jax.tree.map(hide_complex, buffers)
            return lax.psum(buffers, DEVICE_AXIS)
        if axes.devices and self.device != _FIRST:  # absent devices have no name
            self.check_devices(axes.devices)
            root = axes.devices.index(self.device)
        number = lax.axis_index(DEVICE_AXIS) - root
        sums = [_sum_at_root(root, x, count) for x in buffers]
        return [take_first(x, number, (DEVICE_AXIS,)) for x in sums]


_FIRST = "first"
_UNLIMITED = 2**63 - 1


def Packed(
    num_packs: int | None = None,
    bytes_per_pack: int | None = None,
    max_group: int | None = None,
) -> AllReduce:
    """Add in one all-reduce of packs, whose number or size you choose.

    XLA may send several packs in one message, up to its own limit for combining them.

    Args:
      num_packs: The number of packs for each dtype. All leaves of the dtype are joined
        and cut into packs of ``total // num_packs`` elements; the last pack also has
        the remainder. A pack without elements is not sent.
      bytes_per_pack: The largest size of a pack, in bytes. Consecutive leaves of a
        dtype fill a pack; a larger leaf is sent alone. Not with ``num_packs``.
      max_group: The largest number of leaves in a pack. Not with ``num_packs``.

    Example:
      >>> Packed(bytes_per_pack=1 << 20, max_group=16)
      AllReduce(bytes_per_pack=1048576, max_group=16)

    Source:
      The packers of ``tf.contrib.distribute`` (TensorFlow 1.11, 2018),
      ``ConcatAndSplitPacker`` and ``AggregateSmallTensorPacker``,
      https://github.com/tensorflow/tensorflow/blob/v1.11.0/tensorflow/contrib/distribute/python/cross_tower_ops.py;
      here limits are in bytes, and a group never has more leaves than ``max_group``.
    """
    if num_packs is bytes_per_pack is None:
        bytes_per_pack = _UNLIMITED
    return AllReduce(
        num_packs=num_packs, bytes_per_pack=bytes_per_pack, max_group=max_group
    )


def pack_sizes(total: int, num_packs: int) -> list[int]:
    """Share the elements evenly among packs; the last one takes the rest."""
    size = total // num_packs
    return [size] * (num_packs - 1) + [total - size * (num_packs - 1)]


def split_into_packs(buffer: jax.Array, num_packs: int) -> list[jax.Array]:
    """Cut a buffer into packs, and leave out packs without elements."""
    ends = itertools.accumulate(pack_sizes(buffer.size, num_packs), initial=0)
    return [
        lax.slice_in_dim(buffer, start, end)
        for start, end in itertools.pairwise(ends)
        if end > start
    ]


def Hierarchical(group_size: int | None = None) -> AllReduce:
    """Add in groups of ``L`` devices, and then across the groups.

    A reduce-scatter leaves each device of a group with its own ``1/L`` of the group's
    sums. An all-reduce adds these over the ``D/L`` groups, and an all-gather in the
    group shares them. So only ``1/L`` of the bytes go between groups, where links are
    slow. Flat buffers are padded to a multiple of ``L``.

    Args:
      group_size: ``L``, the number of devices in a group, which are neighbours in tower
        order; it must divide ``D``. None takes the devices of one process.

    Example:
      >>> Hierarchical(group_size=4)
      AllReduce(group_size=4)

    Source:
      Goyal et al. (2017), "Accurate, Large Minibatch SGD", section 4,
      https://arxiv.org/abs/1706.02677. ``hierarchical_copy`` of
      ``tf.contrib.distribute`` (TensorFlow 1.11, 2018) is for 8 GPUs, and forgets
      the last tower of an odd number; this is for any number.
    """
    return AllReduce(group_size="process" if group_size is None else group_size)


def _check_group_size(size: int, num_devices: int) -> None:
    if num_devices % size:
        fitting = [str(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ValueError(
            f"group_size={size} does not divide the number of devices,"
            f" {num_devices}, into equal groups. Use {' or '.join(fitting)}, or"
            " Hierarchical() for the devices of one process."
        )


def _sum_in_stages(buffer: jax.Array, size: int, num_devices: int) -> jax.Array:
    """Add a buffer over all devices: in groups of ``size``, and then across groups."""
    buffer = hide_complex(buffer.reshape(-1))
    if size == 1:
        return lax.psum(buffer, DEVICE_AXIS)
    starts = range(0, num_devices, size)
    # For a single group None is passed. JAX and the proof take it to mean the whole
    # axis.
    inside = [[start + i for i in range(size)] for start in starts]
    across = [[start + i for start in starts] for i in range(size)]
    groups = inside if len(inside) > 1 else None
    padded = jnp.pad(buffer, (0, -buffer.size % size))
    share = lax.psum_scatter(padded, DEVICE_AXIS, axis_index_groups=groups, tiled=True)
    if groups is not None:
        share = lax.psum(share, DEVICE_AXIS, axis_index_groups=across)
    total = lax.all_gather(share, DEVICE_AXIS, axis_index_groups=groups, tiled=True)
    return total[: buffer.size]


def ReduceToOneDevice(device: str | None = None) -> AllReduce:
    """Add on one device, and send the sums from there to all.

    The sums travel in ``ceil(log2(D))`` rounds for ``D`` devices. In round ``s`` a
    device sends if its distance from the one device is an odd multiple of ``2**s``. The
    device that is nearer by ``2**s`` receives, and adds. So the additions have one
    fixed order. Then an all-reduce, to which the other devices give zeros, sends the
    sums to all. Use this op if the links to one device are much better than those
    between others. Elsewhere it is slower than `AllReduce`.

    Args:
      device: The name of one of the strategy's devices; None is its first.

    Example:
      >>> ReduceToOneDevice("CPU:3")
      AllReduce(device='cpu:3')

    Source:
      ``ReductionToOneDeviceCrossTowerOps`` of ``tf.contrib.distribute`` (TensorFlow
      1.11, 2018), which gathers everything at once; the tree is the binomial one of
      Thakur, Rabenseifner and Gropp (2005), "Optimization of Collective
      Communication Operations in MPICH", https://doi.org/10.1177/1094342005051521.
    """
    return AllReduce(device=_FIRST if device is None else device)


def _sum_at_root(root: int, value: jax.Array, num_devices: int) -> jax.Array:
    """Add over all devices; only device ``root`` then holds the whole sum."""
    distance = (lax.axis_index(DEVICE_AXIS) - root) % num_devices
    reach = 1
    while reach < num_devices:
        senders = range(reach, num_devices, 2 * reach)
        pairs = [
            ((root + sender) % num_devices, (root + sender - reach) % num_devices)
            for sender in senders
        ]
        received = lax.ppermute(value, DEVICE_AXIS, pairs)
        # A device that is sent nothing gets zeros from ``ppermute``. Adding these would
        # turn -0.0 into 0.0.
        receives = (distance % (2 * reach) == 0) & (distance + reach < num_devices)
        value = jnp.where(receives, value + received, value)
        reach *= 2
    return value


@dataclasses.dataclass(frozen=True)
class PinnedTree:
    """A sum in one fixed binary tree over towers: the same bits on any devices.

    The values of neighbouring towers are added in pairs, then the sums of the pairs,
    and so on. So the order depends only on ``T``. ``tower_loop="scan"`` also runs the
    same program for each tower. With both, a whole training run has the same bits on
    every ``D`` that divides ``T``. Each device adds ``1/D`` of the elements for all
    towers, and an all-gather shares the sums. This moves as many bytes as a ring
    all-reduce.

    If ``k = T / D`` is a power of two, the towers of a device are a subtree, and are
    added before they are sent. Otherwise each tower's values are sent, which is ``k``
    times the bytes. A device holds ``k`` gradients at once.

    Example:
      >>> PinnedTree()
      PinnedTree()
    """

    needs_every_tower = True  # the binary tree has towers as its leaves

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """Add over all towers in a fixed order; see `CrossTowerOps`."""
        leaves, treedef = jax.tree.flatten(tree)
        packing = Packing.of(leaves, lead=1)
        buffers = [
            _add_in_tower_order(
                rows.reshape(rows.shape[0], math.prod(rows.shape[1:])), axes
            )
            for rows in packing.pack(leaves, lead=1)
        ]
        return Sums(buffers, packing, treedef, axes.platform)


def _add_in_tower_order(rows: jax.Array, axes: TowerAxes) -> jax.Array:
    """Add the towers' rows ``[k, n]`` over all ``T`` towers, in one fixed order.

    The result has the shape ``[n]`` and is the same on all devices.
    """
    num_local, size = rows.shape
    if not size:
        return jnp.zeros(0, rows.dtype)
    if not axes.device_axis:
        # If XLA fused these additions into the update, they would round in another way.
        # With several devices, a collective stands between additions and update and
        # prevents that. On one device a branch does, while a barrier does not. Both
        # branches are equal, so the predicate does not matter.
        return lax.cond(rows[0, 0] > 0, add_pairwise, add_pairwise, rows)
    if num_local & (num_local - 1) == 0:
        rows = add_pairwise(rows)[None]
    share = -(-size // axes.num_devices)
    rows = jnp.pad(rows, ((0, 0), (0, share * axes.num_devices - size)))
    rows = rows.reshape(rows.shape[0], axes.num_devices, share)
    # Device ``d`` receives share ``d`` of every device's rows: ``[D * rows, share]``.
    rows = lax.all_to_all(rows, DEVICE_AXIS, split_axis=1, concat_axis=0, tiled=True)
    total = add_pairwise(rows.reshape(-1, share))
    return lax.all_gather(total, DEVICE_AXIS, tiled=True)[:size]
