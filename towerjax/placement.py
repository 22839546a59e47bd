"""Where do towers and values live? Meshes, layouts, placing a tree.

``T`` towers lie on ``D`` devices, ``k = T / D`` local towers on each, device after
device: tower ``t`` is local tower ``t % k`` of device ``t // k``.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from towerjax.devices import Device, find_device, platform_devices
from towerjax.types import Layout, PyTree

# Names that nobody writes by chance: a psum over the device axis alone would leave out
# the towers of the same device. Users ask for ``tower.axis_names``, which has both.
DEVICE_AXIS = "towerjax_device"
LOCAL_AXIS = "towerjax_local"

SPECS = {
    Layout.MIRRORED: PartitionSpec(),
    Layout.PER_TOWER: PartitionSpec(DEVICE_AXIS),
    Layout.PER_TOWER_STEPS: PartitionSpec(None, DEVICE_AXIS),
}


@dataclasses.dataclass(frozen=True)
class TowerAxes:
    """Which named axes a tower can meet the others over.

    Attributes:
      num_devices: ``D``.
      num_local: ``k``, towers on a device.
      device_axis: Is the device axis bound? Not on one device, where nothing
        has to travel.
      in_turn: Do the local towers run one after another (``local="scan"``)?
      platform: ``"cpu"``, ``"gpu"`` ...: the device's, for choices of method.
      devices: The devices' names in the order of the device axis; empty where they
        are absent.
      num_processes: ``P``; process ``p`` has devices ``p D / P`` and following.
    """

    num_devices: int
    num_local: int
    device_axis: bool
    in_turn: bool
    platform: str
    devices: tuple[str, ...] = ()
    num_processes: int = 1

    @property
    def num_towers(self) -> int:
        """``T``."""
        return self.num_devices * self.num_local

    @property
    def device_names(self) -> tuple[str, ...]:
        """The axis over devices, when there are several."""
        return (DEVICE_AXIS,) if self.device_axis else ()

    @property
    def names(self) -> tuple[str, ...]:
        """All bound tower axes, outermost first."""
        together = self.num_local > 1 and not self.in_turn
        return self.device_names + ((LOCAL_AXIS,) if together else ())


@dataclasses.dataclass(frozen=True)
class Placement:
    """``T`` towers on ``D`` named devices, and how they are run there.

    Attributes:
      devices: Canonical names, ``("cpu:0", "cpu:1")``; tower order.
      num_towers: ``T``, a multiple of ``len(devices)``.
      local: ``"vmap"`` or ``"scan"``.
      executor: ``"shard_map"`` or ``"pmap"``.
    """

    devices: tuple[str, ...]
    num_towers: int
    local: str
    executor: str

    @property
    def num_devices(self) -> int:
        """``D``."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """The platform of the first device."""
        return self.devices[0].split(":")[0]

    @property
    def axes(self) -> TowerAxes:
        """The axes that a tower meets the others over on these devices."""
        return TowerAxes(
            num_devices=self.num_devices,
            num_local=self.num_towers // self.num_devices,
            device_axis=self.num_devices > 1,
            in_turn=self.local == "scan",
            platform=self.platform,
            devices=self.devices,
            num_processes=self.num_processes,
        )

    @property
    def abstract_axes(self) -> TowerAxes:
        """The same towers, each on a device of its own, none of which exists."""
        return TowerAxes(
            num_devices=self.num_towers,
            num_local=1,
            device_axis=True,
            in_turn=self.local == "scan",
            platform=self.platform,
            num_processes=self.num_processes,
        )

    @property
    def runs_one_tower_a_device(self) -> bool:
        """Is a device's program, as traced, one tower's program?"""
        one_each = 1 < self.num_devices == self.num_towers
        return one_each and self.executor == "shard_map"

    @functools.cached_property
    def num_processes(self) -> int:
        """``P``: how many processes share the devices; 1 where they are absent."""
        present = platform_devices(self.platform)
        indices = [int(name.split(":")[1]) for name in self.devices]
        if max(indices) >= len(present):
            return 1
        return len({present[index].process_index for index in indices})

    @functools.cached_property
    def jax_devices(self) -> tuple[Device, ...]:
        """The devices themselves, in tower order."""
        return tuple(find_device(name) for name in self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """A mesh of one Auto axis over the devices."""
        axis_types = (AxisType.Auto,)
        return Mesh(np.array(self.jax_devices), (DEVICE_AXIS,), axis_types=axis_types)

    def sharding(self, layout: Layout) -> NamedSharding:
        """How a value of that layout is split over the devices."""
        return NamedSharding(self.mesh, SPECS[layout])

    def shardings(self, layouts: PyTree) -> PyTree:
        """A tree of layouts -> the same tree of shardings."""
        return jax.tree.map(self.sharding, layouts)


def place(tree: PyTree, placement: Placement, layouts: PyTree) -> PyTree:
    """A copy of the tree on the placement's devices.

    A copy always: ``device_put`` alone may share the caller's buffer, and a
    donated state would then delete or overwrite the caller's array.

    Args:
      tree: Arrays, NumPy or JAX, or typed keys.
      placement: Where to.
      layouts: A prefix tree of layouts.

    Returns:
      The tree, committed to its shardings, with strong dtypes.
    """
    copied = jax.tree.map(_own_copy, tree)
    return jax.device_put(copied, placement.shardings(layouts))


def _own_copy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf.copy()
        return np.array(leaf)
    return np.array(leaf, dtype=jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))


def place_rows(tree: PyTree, placement: Placement, layout: Layout) -> PyTree:
    """Rows on the devices of their towers; host arrays are copied first.

    On the CPU, placing an aligned NumPy array shares its memory, so a loader
    that reuses its buffer would rewrite a batch in flight.

    Args:
      tree: NumPy or JAX arrays whose split dim the devices divide.
      placement: Where to.
      layout: ``PER_TOWER`` or ``PER_TOWER_STEPS``.

    Returns:
      The tree of ``jax.Array``.
    """
    owned = jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else _own_copy(x), tree
    )
    return jax.device_put(owned, placement.sharding(layout))
