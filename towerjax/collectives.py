"""How does a sum over towers travel? Cross-tower ops: packed all-reduce, pinned tree.

A cross-tower op is a frozen dataclass with ``needs_every_tower`` (does it want
each local tower's values apart, ``[k, ...]``, or their sum?) and
``sum_over_towers(tree, axes) -> Sums``.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, short_repr


class CrossTowerOps(Protocol):
    """How the sum over towers is made; see `AllReduce` and `PinnedTree`."""

    @property
    def needs_every_tower(self) -> bool:
        """Does ``sum_over_towers`` take leaves ``[k, ...]``, one row a local tower?"""
        ...

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> "Sums":
        """The sum over all towers, inside a device function.

        Args:
          tree: This device's towers' values, apart or added.
          axes: The axes that the towers meet over.

        Returns:
          The sums, the same on each device.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where one leaf lies: which buffer, from which element, of which shape."""

    buffer: int
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class _Packing:
    """Leaves -> one flat buffer a dtype for the small ones, the large ones alone."""

    slots: tuple[_Slot, ...]
    num_buffers: int

    @classmethod
    def plan(cls, leaves: list[jax.Array], below_bytes: float, lead: int) -> "_Packing":
        """Where each leaf goes; ``lead`` leading dims stay in front of a buffer."""
        shared: dict[np.dtype, int] = {}
        filled: list[int] = []
        slots = []
        for leaf in leaves:
            shape = leaf.shape[lead:]
            size = math.prod(shape)
            if size * leaf.dtype.itemsize <= below_bytes:
                buffer = shared.setdefault(leaf.dtype, len(filled))
            else:
                buffer = len(filled)
            if buffer == len(filled):
                filled.append(0)
            slots.append(_Slot(buffer, filled[buffer], shape))
            filled[buffer] += size
        return cls(tuple(slots), len(filled))

    def pack(self, leaves: list[jax.Array], lead: int) -> list[jax.Array]:
        """The buffers, ``[..., n]`` (a leaf that has one to itself keeps its shape)."""
        parts: list[list[jax.Array]] = [[] for _ in range(self.num_buffers)]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            parts[slot.buffer].append(leaf)
        return [
            group[0]
            if len(group) == 1
            else jnp.concatenate(
                [x.reshape(x.shape[:lead] + (-1,)) for x in group], axis=-1
            )
            for group in parts
        ]

    def unpack(self, buffers: list[jax.Array], platform: str) -> list[jax.Array]:
        """The leaves of buffers without leading dims."""
        starts: Sequence[jax.Array | int] = [slot.start for slot in self.slots]
        if platform == "cpu" and self.num_buffers < len(self.slots):
            starts = _unfolded([slot.start for slot in self.slots], buffers[0])
        return [
            self._leaf(buffers[slot.buffer], slot, start)
            for slot, start in zip(self.slots, starts, strict=True)
        ]

    def leading(self, buffers: list[jax.Array], num_leaves: int) -> list[jax.Array]:
        """The first part of each buffer, as far as the first leaves fill it."""
        ends = [0] * self.num_buffers
        for slot in self.slots[:num_leaves]:
            ends[slot.buffer] = slot.start + slot.size
        return [
            buffer if end == buffer.size else buffer[:end]
            for buffer, end in zip(buffers, ends, strict=True)
            if end
        ]

    @staticmethod
    def _leaf(buffer: jax.Array, slot: _Slot, start: jax.Array | int) -> jax.Array:
        if buffer.size == slot.size:
            return buffer.reshape(slot.shape)
        if isinstance(start, int):
            part = lax.slice_in_dim(buffer, start, start + slot.size)
        else:
            # Without the code that makes negative starts count from the end.
            part = lax.dynamic_slice(
                buffer, (start,), (slot.size,), allow_negative_indices=False
            )
        return part.reshape(slot.shape)


def _unfolded(starts: list[int], witness: jax.Array) -> tuple[jax.Array, ...]:
    """The same numbers in a form that the compiler does not fold into the code.

    XLA compiles equal kernels once. With constant offsets the updates of equal
    layers are different kernels: 25 layers then take 0.8 s to compile instead of
    0.3 s (CPU, JAX 0.10.2 and 0.12). Both branches are the same, so the predicate
    does not matter. Not for GPUs, where a branch costs a round trip.
    """
    values = [np.int32(start) for start in starts]
    predicate = witness.reshape(-1)[0] > 0
    return lax.cond(
        predicate,
        lambda: tuple(jnp.asarray(v) for v in values),
        lambda: tuple(jnp.asarray(v) for v in values),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over all towers as they travelled: flat buffers, not yet the tree.

    Attributes:
      buffers: The summed buffers, the same on each device.
      packing: Where each leaf lies in them.
      treedef: The tree that the leaves make.
      platform: The device's.
    """

    buffers: list[jax.Array]
    packing: _Packing = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})
    platform: str = dataclasses.field(metadata={"static": True})

    def tree(self) -> PyTree:
        """The sums as the tree that went in.

        Returns:
          Leaves ``[...]``.
        """
        leaves = self.packing.unpack(self.buffers, self.platform)
        return jax.tree.unflatten(self.treedef, leaves)

    def finite(self, num_leaves: int) -> jax.Array:
        """Are the first so many leaves all finite?

        Args:
          num_leaves: How many leaves to look at, in tree order.

        Returns:
          ``()`` bool.
        """
        checks = [
            jnp.isfinite(part).all()
            for part in self.packing.leading(self.buffers, num_leaves)
            if jnp.issubdtype(part.dtype, jnp.inexact)
        ]
        return functools.reduce(jnp.logical_and, checks, jnp.bool_(True))


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
      ValueError: ``pack_below_bytes`` is negative.

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
        if self.pack_below_bytes < 0:
            raise ValueError(
                f"AllReduce.pack_below_bytes={self.pack_below_bytes} must be >= 0;"
                " 0 packs nothing."
            )

    @property
    def needs_every_tower(self) -> bool:
        """False: local towers are added first."""
        return False

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        leaves, treedef = jax.tree.flatten(tree)
        below = self.pack_below_bytes if axes.device_axis else -1
        packing = _Packing.plan(leaves, below, lead=0)
        buffers = packing.pack(leaves, lead=0)
        if axes.device_axis:
            buffers = lax.psum(buffers, DEVICE_AXIS)
        return Sums(buffers, packing, treedef, axes.platform)


@dataclasses.dataclass(frozen=True)
class PinnedTree:
    """A sum in one fixed binary tree over towers: the same bits on any devices.

    Tower values are added pairwise in tower order, then the pairs, and so on: the
    order depends on ``T`` alone. With ``local="scan"``, which also runs the same
    program for each tower, a whole training run has the same bits on every ``D``
    that divides ``T``. Each device adds ``1/D`` of the numbers for all and then
    hands them round, which moves the bytes of a ring all-reduce.

    Where ``k = T / D`` is a power of two a device's own towers are a subtree and
    are added before they travel; otherwise each tower's values travel, ``k`` times
    the bytes. A device holds ``k`` gradients at once.

    What follows the sum is the same program on every ``D`` too, as far as the compiler
    can be held to it: optimizers that branch inside (``optax.MultiSteps``,
    ``optax.contrib.mechanize``) were seen to differ in last bits between one device
    and several, on the CPU.

    Example:
      >>> PinnedTree()
      PinnedTree()
    """

    @property
    def needs_every_tower(self) -> bool:
        """True: the tree is over towers."""
        return True

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        # Without these two barriers XLA fuses a tower's last operations, and the
        # update, differently for different D, and most bits differ.
        leaves, treedef = jax.tree.flatten(lax.optimization_barrier(tree))
        packing = _Packing.plan(leaves, math.inf, lead=1)
        buffers = [
            _add_in_tower_order(rows.reshape(rows.shape[0], -1), axes)
            for rows in packing.pack(leaves, lead=1)
        ]
        buffers = lax.optimization_barrier(buffers)
        return Sums(buffers, packing, treedef, axes.platform)


def _add_in_tower_order(rows: jax.Array, axes: TowerAxes) -> jax.Array:
    """``[k, n]`` rows of local towers -> ``[n]``, added over all towers."""
    num_local, size = rows.shape
    if not axes.device_axis:
        # A barrier does not keep XLA from fusing these additions into the update; a
        # branch does. Both branches are the same, so the predicate does not matter.
        return lax.cond(rows[0, 0] > 0, _add_pairwise, _add_pairwise, rows)
    if num_local & (num_local - 1) == 0:
        rows = _add_pairwise(rows)[None]
    share = -(-size // axes.num_devices)
    rows = jnp.pad(rows, ((0, 0), (0, share * axes.num_devices - size)))
    rows = rows.reshape(rows.shape[0], axes.num_devices, share)
    # Device d receives share d of every device's rows: [D * rows, share].
    rows = lax.all_to_all(rows, DEVICE_AXIS, split_axis=1, concat_axis=0, tiled=True)
    total = _add_pairwise(rows.reshape(-1, share))
    return lax.all_gather(total, DEVICE_AXIS, tiled=True)[:size]


def _add_pairwise(rows: jax.Array) -> jax.Array:
    """``[n, ...] -> [...]``: neighbours added, then their sums; an odd last waits."""
    while rows.shape[0] > 1:
        paired = rows.shape[0] // 2 * 2
        sums = rows[0:paired:2] + rows[1:paired:2]
        rows = jnp.concatenate([sums, rows[paired:]]) if paired < len(rows) else sums
    return rows[0]


def sum_rows_over_towers(ops: CrossTowerOps, rows: PyTree, axes: TowerAxes) -> PyTree:
    """The sum over all towers of values that lie as one row a local tower.

    Args:
      ops: How the sum travels.
      rows: Leaves ``[k, ...]``, inside a device function.
      axes: The axes that the towers meet over.

    Returns:
      Leaves ``[...]``, the same on each device.
    """
    if not ops.needs_every_tower:
        rows = jax.tree.map(lambda x: x.sum(axis=0), rows)
    return ops.sum_over_towers(rows, axes).tree()
