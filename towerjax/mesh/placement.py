"""Place the leaves of pytrees on the devices of the towers, by their layouts.

``T`` towers lie on ``D`` devices, ``k = T / D`` local towers on each, device after
device: tower ``t`` is local tower ``t % k`` of device ``t // k``. If a tower has
several devices, these are a mesh of their own, and ``D`` counts such groups.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from towerjax.jaxprs.tags import DEVICE_AXIS, LOCAL_AXIS, TOWER_AXIS
from towerjax.mesh.absent import Absent
from towerjax.mesh.devices import (
    Device,
    canonical_device_name,
    find_devices,
    host_device,
    owners_of,
)
from towerjax.mesh.processes import Processes
from towerjax.mesh.specs import Specs, specs_like
from towerjax.types import Layout, PyTree
from towerjax.types.trees import is_key

SPECS = {
    Layout.MIRRORED: PartitionSpec(),
    Layout.PER_TOWER: PartitionSpec(DEVICE_AXIS),
    Layout.PER_TOWER_STEPS: PartitionSpec(None, DEVICE_AXIS),
}


# A leaf whose shards would have fewer elements stays replicated, because gathering it
# would cost time and save little memory. On 8 CPU devices, steps of small models then
# take 0.8 to 1.0 of the time. The price is 0 to 7 % more memory, for a state of a
# megabyte or more.
LEAST_SHARD = 128
NO_MESH = AbstractMesh((), ())
WHOLE = PartitionSpec()


def split_spec(dim: int | None, within: PartitionSpec = WHOLE) -> PartitionSpec:
    """Write the spec of an array that is split along ``dim`` over ``D`` devices.

    ``within`` is the spec of its split over the devices of a tower.
    """
    if dim is None:
        return within
    entries = [*within, *[None] * (dim + 1 - len(within))]
    return PartitionSpec(*entries[:dim], DEVICE_AXIS, *entries[dim + 1 :])


def whole_on(mesh: Mesh) -> NamedSharding:
    """Make the sharding of an array that is replicated over a mesh."""
    return NamedSharding(mesh, WHOLE)


@dataclasses.dataclass(frozen=True)
class TowerAxes:
    """The named axes by which a tower communicates, and the devices along them."""

    num_devices: int  # D
    num_local: int  # k, the number of towers on each device
    # Whether the device axis is bound. With one device it is not, because nothing is
    # sent between devices.
    device_axis: bool
    in_turn: bool  # whether local towers run one after another (tower_loop="scan")
    platform: str  # such as "cpu"; some methods are chosen by it
    devices: tuple[str, ...] = ()  # the devices' names in the order of the device axis
    num_processes: int = 1  # P; process p owns D / P devices, from index p D / P on
    tower_axis: str = TOWER_AXIS  # the axis over all towers in a tower function
    # Whether the axis of all towers is bound in place of the axes of devices and local
    # towers. It is so while a tower function is traced, before it is lowered.
    as_one: bool = False
    # The mesh of one tower's devices, see `Placement.tower_mesh`
    mesh: AbstractMesh = NO_MESH
    # Whether a tower hears itself where it would hear others; see `Placement.alone`.
    alone: bool = False

    @property
    def num_towers(self) -> int:
        """The number of towers, ``T``."""
        return self.num_devices * self.num_local

    @property
    def names(self) -> tuple[str, ...]:
        """All bound axes of towers, outermost first."""
        if self.as_one:
            return (self.tower_axis,)
        devices = (DEVICE_AXIS,) if self.device_axis else ()
        has_local_axis = self.num_local > 1 and not self.in_turn
        return devices + ((LOCAL_AXIS,) if has_local_axis else ())


@dataclasses.dataclass(frozen=True)
class Placement:
    """``T`` towers on named devices, and how they run there."""

    devices: tuple[str, ...]  # canonical names such as "cpu:0", in tower order
    num_towers: int  # T, a multiple of D
    tower_loop: str = "vmap"  # or "scan": how a device runs its towers
    executor: str = "shard_map"  # or "pmap": how devices run a program
    axis_name: str = TOWER_AXIS  # the axis over all towers in a tower function
    absent: Absent | None = None
    # Each contiguous run of elements of a shard has a multiple of this length; see
    # `split_dim`.
    shard_run: int = dataclasses.field(default=1, compare=False)
    within: tuple[tuple[str, int], ...] = ()  # the axes within a tower, and their sizes
    rows: str | None = None  # the axis of ``within`` that splits a tower's rows
    specs: Specs | None = None  # how parameters are split over the axes of ``within``
    # Whether towers that communicate each hear themselves in place of the others. What
    # a tower computes then depends on its own device alone, which a replay compares.
    alone: bool = False

    @functools.cached_property
    def devices_each(self) -> int:
        """The number of devices of a tower."""
        return math.prod(size for _, size in self.within)

    @functools.cached_property
    def row_shards(self) -> int:
        """The number of devices over which a tower's rows are split."""
        return dict(self.within).get(self.rows or "", 1)

    @functools.cached_property
    def num_devices(self) -> int:
        """``D``: the number of devices, or of groups if a tower has several devices."""
        return len(self.devices) // self.devices_each

    @property
    def tower_mesh(self) -> AbstractMesh:
        """The mesh of one tower's devices, in which a tower function is traced.

        The axes within the tower are Auto.
        """
        if not self.within:
            return NO_MESH
        mesh: Any = self.mesh_in_trace
        mesh = getattr(mesh, "abstract_mesh", mesh)
        # XLA refuses a manual axis of size 1 beside other axes, so a device axis of
        # size 1 is Auto.
        first = AxisType.Manual if self.num_devices > 1 else AxisType.Auto
        return mesh.update_axis_types({DEVICE_AXIS: first})

    @functools.cached_property
    def platform(self) -> str:
        """The platform of the devices."""
        return self.devices[0].split(":")[0]

    @property
    def host(self) -> Device:
        """This process's first CPU device, whose memory the host reads directly."""
        return host_device()

    def tower_on(self, device: str | Device) -> int:
        """Find the tower that runs on a device; raise unless it is exactly one."""
        device = canonical_device_name(device)
        k = self.num_towers // self.num_devices
        if device in self.devices and k == 1:
            return self.devices.index(device) // self.devices_each
        fault = "has no tower" if device not in self.devices else f"has {k} towers"
        raise ValueError(
            f"{device} {fault} of those on {', '.join(self.devices)}. Name the tower by"
            " its number."
        )

    @property
    def groups_each(self) -> int:
        """The number of devices, or of groups of a tower's devices, of each process."""
        return self.num_devices // self.num_processes

    def rotated(self, by: int) -> tuple[str, ...]:
        """Replace the name of each device by that of a neighbour.

        The neighbour is ``by`` devices further on in the same process, which is a
        circle. If a tower has several devices, they move together.
        """
        size = self.devices_each
        each = self.groups_each
        starts = [
            (i // each * each + (i + by) % each) * size for i in range(self.num_devices)
        ]
        return tuple(x for at in starts for x in self.devices[at : at + size])

    @property
    def axes(self) -> TowerAxes:
        """The named axes of a tower on these devices."""
        return TowerAxes(
            num_devices=self.num_devices,
            num_local=self.num_towers // self.num_devices,
            device_axis=self.num_devices > 1,
            in_turn=self.tower_loop == "scan",
            platform=self.platform,
            devices=self.devices[:: self.devices_each],
            num_processes=self.num_processes,
            tower_axis=self.axis_name,
            mesh=self.tower_mesh,
            alone=self.alone,
        )

    @property
    def abstract_axes(self) -> TowerAxes:
        """The axes that towers would have with a device for each tower.

        These devices need not exist.
        """
        if self.num_towers == self.num_devices > 1:
            return self.axes
        spread = {"num_devices": self.num_towers, "num_local": 1, "device_axis": True}
        return dataclasses.replace(self.axes, devices=(), **spread)

    @property
    def shares_devices(self) -> bool:
        """Whether several towers run on a device at once, under ``vmap``."""
        return self.num_towers > self.num_devices and self.tower_loop == "vmap"

    @functools.cached_property
    def num_processes(self) -> int:
        """``P``: the number of processes that own the devices; 1 if one is missing.

        A device is missing if JAX does not find it on this machine.
        """
        if self.absent is not None:
            return self.absent.num_hosts
        return len(owners_of(self.devices)) or 1

    @functools.cached_property
    def processes(self) -> Processes:
        """The processes that own the devices; none of absent devices."""
        return Processes(self.jax_devices if self.absent is None else ())

    @property
    def process_index(self) -> int:
        """The place of this process among those that own the devices, from 0."""
        if self.num_processes == 1:
            return 0
        return self.processes.numbers.index(jax.process_index())

    @functools.cached_property
    def jax_devices(self) -> tuple[Device, ...]:
        """The devices themselves, in tower order."""
        if self.absent is None:
            devices = find_devices(self.devices)
            _check_owners(devices, self.devices_each)
        else:
            devices = self.absent.jax_devices()
        if self.num_processes > 1 and self.executor == "pmap":
            raise ValueError(
                "executor='pmap' needs devices of one process, but these belong to"
                f" {self.num_processes}. Use executor='shard_map'."
            )
        return devices

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh over all devices: an axis of ``D``, and the axes in a tower.

        All axes are Auto.
        """
        sizes, names, kinds = self._mesh_axes
        return Mesh(np.array(self.jax_devices).reshape(sizes), names, axis_types=kinds)

    @property
    def mesh_in_trace(self) -> Mesh | AbstractMesh:
        """The mesh, or without the devices an abstract mesh, which a proof can use."""
        if self.absent is None and not owners_of(self.devices):
            return AbstractMesh(*self._mesh_axes)
        return self.mesh

    @property
    def _mesh_axes(self) -> tuple[Any, Any, Any]:
        """The sizes, the names and the types of the axes of `mesh`, as three tuples."""
        axes = {DEVICE_AXIS: self.num_devices, **dict(self.within)}
        return (*axes.values(),), (*axes,), (AxisType.Auto,) * len(axes)

    def require_present(self) -> None:
        """Raise if nothing can be placed: devices are absent, or a mesh is set.

        A mesh is set by `jax.set_mesh`.
        """
        if self.absent is not None:
            raise ValueError(
                f"{self.absent!r} is not on this machine, so nothing can be placed or"
                " run on it. Pass step.shapes(params) to step.check or step.report, or"
                " name devices that this machine has."
            )
        names = jax.sharding.get_abstract_mesh().axis_names
        if names and DEVICE_AXIS not in names:
            raise ValueError(
                f"jax.set_mesh has set a mesh of axes {names}, but a strategy makes its"
                " own mesh. Set yours only around your own programs: with"
                " jax.set_mesh(mesh): ..."
            )

    def sharding(self, layout: Layout) -> NamedSharding:
        """Make the sharding of a value that has this layout."""
        return NamedSharding(self.mesh, SPECS[layout])

    def sharding_like(self, sharding: Any) -> NamedSharding:
        """Move a sharding over other devices to these devices."""
        assert isinstance(sharding, NamedSharding), sharding
        return NamedSharding(self.mesh, sharding.spec)

    def shardings(
        self, layouts: PyTree, values: PyTree, params: PyTree = None
    ) -> PyTree:
        """Choose a sharding for each leaf of ``values``, by a prefix tree of layouts.

        Within a tower, a leaf is split like its parameter in ``params``.
        """
        leaves, treedef = jax.tree.flatten(values)
        of_leaves = jax.tree.leaves(jax.tree.broadcast(layouts, values))
        specs = self.specs_within(values, params)
        by_spec: dict[PartitionSpec, NamedSharding] = {}
        shardings = []
        for layout, x, spec in zip(of_leaves, leaves, specs, strict=True):
            if layout is Layout.SHARDED:
                spec = split_spec(self.split_dim(x, spec), spec)
            elif layout is not Layout.MIRRORED:
                spec = SPECS[layout]
            if spec not in by_spec:
                by_spec[spec] = NamedSharding(self.mesh, spec)
            shardings.append(by_spec[spec])
        return treedef.unflatten(shardings)

    def specs_within(self, values: PyTree, params: PyTree) -> Sequence[PartitionSpec]:
        """Split each leaf over a tower's devices like its parameter."""
        if self.specs is None or params is None:
            return [WHOLE] * len(jax.tree.leaves(values))
        return specs_like(values, self.specs.table(params, dict(self.within)))

    def split_rows(self, rows: PyTree) -> PyTree:
        """Split a tower's rows over its devices, if ``self.rows`` names an axis.

        It is called in a tower function.
        """
        size = self.row_shards

        def split(x: Any) -> Any:
            if is_key(x) or not jnp.ndim(x):
                return x
            if len(x) % size:
                raise ValueError(
                    f"rows={self.rows!r} splits the rows of a tower over {size}"
                    f" devices, but a tower function is called with {len(x)} rows. Make"
                    f" that a multiple of {size}, with a larger batch or fewer"
                    " micro_batches."
                )
            return jax.lax.with_sharding_constraint(x, PartitionSpec(self.rows))

        return rows if size == 1 else jax.tree.map(split, rows)

    def split_dim(self, x: Any, within: PartitionSpec = WHOLE) -> int | None:
        """Choose the longest dim that can be split over ``D`` devices, or None.

        Its size is a multiple of ``D``, and ``within`` does not split it. A shard has
        at least `LEAST_SHARD` elements, and its contiguous runs have a multiple of
        ``shard_run`` elements.
        """
        shape = np.shape(x)
        count = self.num_devices
        if math.prod(shape) < LEAST_SHARD * count:
            return None

        def may_split(dim: int, size: int) -> bool:
            run = math.prod(shape[dim:]) // count
            is_whole = within[dim] is None if dim < len(within) else True
            fits = size > 0 and size % count == 0 and run % self.shard_run == 0
            return is_whole and fits

        dims = [i for i, n in enumerate(shape) if may_split(i, n)]
        return max(dims, key=lambda i: shape[i]) if dims else None


def _check_owners(devices: tuple[Device, ...], devices_each: int) -> None:
    """Raise unless this process and each other owner have equally many devices.

    Devices of several processes are listed process after process.
    """
    owners = [device.process_index for device in devices]
    groups = [owners[i : i + devices_each] for i in range(0, len(owners), devices_each)]
    if torn := [group for group in groups if len({*group}) > 1]:
        raise ValueError(
            f"A tower of {devices_each} devices would belong to the processes"
            f" {sorted({*torn[0]})}, but must be in one. Name a multiple of"
            f" {devices_each} devices of each process."
        )
    counts = {owners.count(process) for process in (jax.process_index(), *owners)}
    if owners != sorted(owners) or len(counts) > 1:
        raise ValueError(
            f"The devices belong to the processes {owners} of {jax.process_count()},"
            " but each process needs equally many. Name equally many devices of each,"
            " process after process, or leave devices out."
        )
