"""How does a sum travel in two stages? Inside groups of devices, then across them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.packing import Sums, sum_packed
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, short_repr
from towerjax.types.options import check_whole


@dataclasses.dataclass(frozen=True)
class Hierarchical:
    """Sums made inside groups of ``L`` devices and then across the groups.

    A reduce-scatter leaves each device of a group with its own ``1/L`` of the
    group's sums; an all-reduce adds these over the ``D/L`` groups, and an all-gather
    in the group hands them round. So ``1/L`` of the bytes go between groups, where
    links are slow. Leaves are padded to a multiple of ``L``.

    Attributes:
      group_size: ``L``, devices in a group, which are neighbours in tower order;
        it divides ``D``. None is the devices of one process.

    Raises:
      ValueError: ``group_size`` is not a positive int, or does not divide the
        number of devices.

    Example:
      >>> Hierarchical(group_size=4)
      Hierarchical(group_size=4)

    Source:
      Goyal et al. (2017), "Accurate, Large Minibatch SGD", section 4,
      https://arxiv.org/abs/1706.02677. ``hierarchical_copy`` of
      ``tf.contrib.distribute`` (TensorFlow 1.11, 2018) is for 8 GPUs, and forgets
      the last tower of an odd number; this is for any number.
    """

    group_size: int | None = None

    needs_every_tower = False  # local towers are added first
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check the option."""
        if self.group_size is not None:
            check_whole("Hierarchical.group_size", self.group_size)

    def check_devices(self, devices: Sequence[str]) -> None:
        """Nothing, when the groups come out even; see `ChecksDevices`."""
        if self.group_size is not None:
            _check_divides(self.group_size, len(devices))

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        size = self.group_size
        if size is None:
            size = _devices_of_a_process(axes)
        _check_divides(size, axes.num_devices)

        def travel(buffers: list[jax.Array]) -> list[jax.Array]:
            flat = [buffer.reshape(-1) for buffer in buffers]
            return [_sum_in_two(buffer, size, axes.num_devices) for buffer in flat]

        return sum_packed(tree, axes, travel)


def _devices_of_a_process(axes: TowerAxes) -> int:
    if axes.num_devices % axes.num_processes:
        raise ValueError(
            f"Hierarchical(): {axes.num_processes} processes do not have equally many"
            f" of the {axes.num_devices} devices. Say how many make a group, such as"
            " tj.collectives.Hierarchical(group_size=1), or use tj.AllReduce()."
        )
    return axes.num_devices // axes.num_processes


def _check_divides(size: int, num_devices: int) -> None:
    if num_devices % size:
        fitting = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ValueError(
            f"Hierarchical.group_size={size} does not divide the number of devices,"
            f" {num_devices}, into equal groups. Use"
            f" {' or '.join(str(n) for n in fitting)}, or leave it out for the devices"
            " of one process."
        )


def _sum_in_two(buffer: jax.Array, size: int, num_devices: int) -> jax.Array:
    """``[n]`` -> ``[n]``, added over all devices."""
    if size == 1:
        return lax.psum(buffer, DEVICE_AXIS)
    starts = range(0, num_devices, size)
    # One group of all is said by None: that is known to be the whole axis.
    inside = [[start + i for i in range(size)] for start in starts]
    across = [[start + i for start in starts] for i in range(size)]
    groups = inside if len(inside) > 1 else None
    padded = jnp.pad(buffer, (0, -buffer.size % size))
    share = lax.psum_scatter(padded, DEVICE_AXIS, axis_index_groups=groups, tiled=True)
    if groups is not None:
        share = lax.psum(share, DEVICE_AXIS, axis_index_groups=across)
    total = lax.all_gather(share, DEVICE_AXIS, axis_index_groups=groups, tiled=True)
    return total[: buffer.size]
