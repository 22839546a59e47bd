"""How does a sum travel over one device? Added in a tree towards it, then broadcast."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.packing import Sums, sum_packed
from towerjax.collectives.reduce import as_bits, from_bits
from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, short_repr


@dataclasses.dataclass(frozen=True)
class ReduceToOneDevice:
    """Sums added on one device and sent from there to all.

    In round ``s`` the devices whose distance from that one is an odd multiple of
    ``2**s`` send what they have to the device ``2**s`` nearer, which adds it:
    ``ceil(log2(D))`` rounds for ``D`` devices. The additions are in one fixed
    order. For links that are much better to one device than between the others;
    elsewhere slower than `AllReduce`.

    Attributes:
      device: The name of the device, one of the strategy's; None is its first.

    Raises:
      ValueError: ``device`` is not a name, or not one of the strategy's devices.

    Example:
      >>> ReduceToOneDevice("CPU:3")
      ReduceToOneDevice(device='cpu:3')

    Source:
      ``ReductionToOneDeviceCrossTowerOps`` of ``tf.contrib.distribute`` (TensorFlow
      1.11, 2018), which gathers everything at once; the tree is the binomial one of
      Thakur, Rabenseifner and Gropp (2005), "Optimization of Collective
      Communication Operations in MPICH", https://doi.org/10.1177/1094342005051521.
    """

    device: str | None = None

    needs_every_tower = False  # local towers are added first
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Canonicalise the name."""
        if self.device is not None:
            object.__setattr__(self, "device", canonical_device_name(self.device))

    def check_devices(self, devices: Sequence[str]) -> None:
        """Nothing, when the device is one of these; see `ChecksDevices`."""
        if self.device is not None and self.device not in devices:
            raise ValueError(
                f"ReduceToOneDevice.device={self.device!r} is not one of the"
                f" strategy's devices, {', '.join(devices)}. Name one of them, or leave"
                " it out for the first."
            )

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers; see `CrossTowerOps`."""
        root = 0
        if axes.devices:  # else they are absent, and which one it is does not matter
            self.check_devices(axes.devices)
            root = axes.devices.index(self.device) if self.device else 0

        def travel(buffers: list[jax.Array]) -> list[jax.Array]:
            return [
                _broadcast_from(root, _added_at(root, buffer, axes.num_devices))
                for buffer in buffers
            ]

        return sum_packed(tree, axes, travel)


def _added_at(root: int, value: jax.Array, num_devices: int) -> jax.Array:
    """On device ``root`` the sum over devices, elsewhere parts of it."""
    distance = (lax.axis_index(DEVICE_AXIS) - root) % num_devices
    reach = 1
    while reach < num_devices:
        senders = range(reach, num_devices, 2 * reach)
        pairs = [
            ((root + sender) % num_devices, (root + sender - reach) % num_devices)
            for sender in senders
        ]
        received = lax.ppermute(value, DEVICE_AXIS, pairs)
        # Who receives nothing is given zeros, and -0.0 + 0.0 is not -0.0.
        receives = (distance % (2 * reach) == 0) & (distance + reach < num_devices)
        value = jnp.where(receives, value + received, value)
        reach *= 2
    return value


def _broadcast_from(root: int, value: jax.Array) -> jax.Array:
    """Device ``root``'s value on each device, bit for bit."""
    bits = as_bits(value)
    here = lax.axis_index(DEVICE_AXIS) == root
    bits = lax.psum(jnp.where(here, bits, jnp.zeros_like(bits)), DEVICE_AXIS)
    return from_bits(bits, value.dtype)
