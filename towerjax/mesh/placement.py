"""Place the leaves of pytrees on the devices of the towers, by their layouts.

``T`` towers lie on ``D`` devices, ``k = T / D`` local towers on each, device after
device: tower ``t`` is local tower ``t % k`` of device ``t // k``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from towerjax.mesh.absent import Absent
from towerjax.mesh.devices import Device, find_device, owners_of
from towerjax.mesh.private_jax import put
from towerjax.mesh.processes import from_first_process, require_same, says_if_alone
from towerjax.types import Layout, PyTree
from towerjax.types.leaves import (
    held_dtype,
    is_key,
    is_traced,
    key_data,
    like_key,
    refuse_unheld,
)

# Names that no user writes by chance: a psum over the device axis alone would leave out
# the towers of the same device. Users have the tower axis, over all towers.
DEVICE_AXIS = "towerjax_device"
LOCAL_AXIS = "towerjax_local"
TOWER_AXIS = "towerjax_tower"

# XLA:CPU shares, without a copy, a host array whose address is a multiple of _ALIGNED.
# Bytes below which a program's own copy of an argument takes the least time, and from
# which NumPy's does, whose pages are large.
_ALIGNED, _SMALL, _LARGE = 64, 2**17, 2**20

SPECS = {
    Layout.MIRRORED: PartitionSpec(),
    Layout.PER_TOWER: PartitionSpec(DEVICE_AXIS),
    Layout.PER_TOWER_STEPS: PartitionSpec(None, DEVICE_AXIS),
}


def split_spec(dim: int | None) -> PartitionSpec:
    """The spec of an array that is split along ``dim``; None: mirrored."""
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, DEVICE_AXIS)


@dataclasses.dataclass(frozen=True)
class TowerAxes:
    """The named axes over which a tower can communicate, and what they lie on."""

    num_devices: int  # D
    num_local: int  # k, towers on a device
    # Is the device axis bound? Not on one device, where nothing has to travel.
    device_axis: bool
    in_turn: bool  # do the local towers run one after another (local="scan")?
    platform: str  # "cpu", "gpu" ..., on which the choice of a method depends
    devices: tuple[str, ...] = ()  # the devices' names in the order of the device axis
    num_processes: int = 1  # P; process p has devices p D / P and following
    tower_axis: str = TOWER_AXIS  # the axis over all towers in a tower function
    # Is the tower axis the one bound axis? In a tower function it is.
    as_one: bool = False
    # Traced tower functions, reused while a step is proved and traced; None: no reuse.
    traced: dict[Any, Any] | None = dataclasses.field(default=None, compare=False)

    @property
    def num_towers(self) -> int:
        """``T``."""
        return self.num_devices * self.num_local

    @property
    def names(self) -> tuple[str, ...]:
        """All bound tower axes, outermost first."""
        if self.as_one:
            return (self.tower_axis,)
        devices = (DEVICE_AXIS,) if self.device_axis else ()
        has_local_axis = self.num_local > 1 and not self.in_turn
        return devices + ((LOCAL_AXIS,) if has_local_axis else ())


@dataclasses.dataclass(frozen=True)
class Placement:
    """``T`` towers on ``D`` named devices, and how they run there."""

    devices: tuple[str, ...]  # canonical names, ("cpu:0", "cpu:1"); tower order
    num_towers: int  # T, a multiple of len(devices)
    local: str = "vmap"  # or "scan"
    executor: str = "shard_map"  # or "pmap"
    axis_name: str = TOWER_AXIS  # the axis over all towers in a tower function
    absent: Absent | None = None
    # Of an array that is split over devices; see `split_dim`.
    part_run: int = dataclasses.field(default=1, compare=False)

    @property
    def num_devices(self) -> int:
        """``D``."""
        return len(self.devices)

    @functools.cached_property
    def platform(self) -> str:
        """The platform of the first device."""
        return self.devices[0].split(":")[0]

    def tower_on(self, device: str) -> int:
        """The tower that runs on a device."""
        k = self.num_towers // self.num_devices
        if device in self.devices and k == 1:
            return self.devices.index(device)
        what = "has no tower" if device not in self.devices else f"has {k} towers"
        raise ValueError(
            f"{device} {what} of those on {', '.join(self.devices)}. Name the tower by"
            " its number."
        )

    @property
    def axes(self) -> TowerAxes:
        """The named axes of a tower on these devices."""
        return TowerAxes(
            num_devices=self.num_devices,
            num_local=self.num_towers // self.num_devices,
            device_axis=self.num_devices > 1,
            in_turn=self.local == "scan",
            platform=self.platform,
            devices=self.devices,
            num_processes=self.num_processes,
            tower_axis=self.axis_name,
        )

    @property
    def abstract_axes(self) -> TowerAxes:
        """The axes of the same towers, each alone on a device that need not exist."""
        if self.num_towers == self.num_devices > 1:
            return self.axes
        alone = {"num_devices": self.num_towers, "num_local": 1, "device_axis": True}
        return dataclasses.replace(self.axes, devices=(), **alone)

    @property
    def shares_devices(self) -> bool:
        """Do several towers run on a device at once, under ``vmap``?"""
        return self.num_towers > self.num_devices and self.local == "vmap"

    @functools.cached_property
    def num_processes(self) -> int:
        """``P``: how many processes own the devices; 1 where a device is missing."""
        if self.absent is not None:
            return self.absent.num_hosts
        return len(owners_of(self.devices)) or 1

    @functools.cached_property
    def jax_devices(self) -> tuple[Device, ...]:
        """The devices themselves, in tower order."""
        if self.absent is None:
            devices = tuple(find_device(name) for name in self.devices)
            _check_owners(devices)
        else:
            devices = self.absent.jax_devices()
        if self.num_processes > 1 and self.executor == "pmap":
            raise ValueError(
                f"executor='pmap' runs on the devices of one process, and these belong"
                f" to {self.num_processes}. Use executor='shard_map'."
            )
        return devices

    @functools.cached_property
    def mesh(self) -> Mesh:
        """A mesh of one Auto axis over the devices."""
        axis_types = (AxisType.Auto,)
        return Mesh(np.array(self.jax_devices), (DEVICE_AXIS,), axis_types=axis_types)

    @property
    def mesh_in_trace(self) -> Mesh | AbstractMesh:
        """The mesh; its shape alone where a device is missing, to prove a step."""
        if self.absent is None and not owners_of(self.devices):
            auto = (AxisType.Auto,)
            return AbstractMesh((self.num_devices,), (DEVICE_AXIS,), axis_types=auto)
        return self.mesh

    def require_present(self) -> None:
        """Raise where nothing can be placed: devices are absent, or a mesh is set."""
        if self.absent is not None:
            raise ValueError(
                f"{self.absent!r} is not here, so that nothing can be placed or run on"
                " it. Give step.check and step.report the parameters, or"
                " step.shapes(params), in place of step.init(params), or name devices"
                " that this machine has."
            )
        names = jax.sharding.get_abstract_mesh().axis_names
        if names and DEVICE_AXIS not in names:
            raise ValueError(
                f"jax.set_mesh has set a mesh of axes {names}, and a strategy makes the"
                " mesh of its towers itself. Set yours around your own programs alone:"
                " with jax.set_mesh(mesh): ..."
            )

    def sharding(self, layout: Layout) -> NamedSharding:
        """How a value of that layout is split over the devices."""
        return NamedSharding(self.mesh, SPECS[layout])

    def shardings(self, layouts: PyTree, values: PyTree) -> PyTree:
        """A sharding for each leaf of ``values``; ``layouts`` is a prefix tree."""

        def of(layout: Layout, part: PyTree) -> PyTree:
            if layout is Layout.SHARDED:
                return jax.tree.map(self._split, part)
            sharding = self.sharding(layout)
            return jax.tree.map(lambda _: sharding, part)

        return jax.tree.map(of, layouts, values)

    def split_dim(self, x: Any) -> int | None:
        """The longest dim whose size is a multiple of ``D``; None where none is.

        With ``part_run`` a part's elements lie together in so many, or in a multiple.
        """
        shape, count = np.shape(x), self.num_devices

        def may_split(dim: int, size: int) -> bool:
            run = math.prod(shape[dim:]) // count
            return size > 0 and size % count == 0 and run % self.part_run == 0

        dims = [i for i, n in enumerate(shape) if may_split(i, n)]
        return max(dims, key=lambda i: shape[i]) if dims else None

    def _split(self, x: Any) -> NamedSharding:
        return NamedSharding(self.mesh, split_spec(self.split_dim(x)))


def _check_owners(devices: tuple[Device, ...]) -> None:
    """Raise unless this process owns all devices, or all own as many, in order."""
    owners = [device.process_index for device in devices]
    if set(owners) == {jax.process_index()}:
        return
    counts = {owners.count(process) for process in range(jax.process_count())}
    if owners != sorted(owners) or len(counts) > 1:
        raise ValueError(
            f"The devices belong to the processes {owners}. In a job of"
            f" {jax.process_count()} processes name as many devices of each, process"
            " after process, or leave devices out to use all."
        )


def place(tree: PyTree, placement: Placement, layouts: PyTree) -> PyTree:
    """A copy, which may be donated, on the placement's devices; of process 0's values.

    All processes call this. In a trace nothing is placed.
    """
    refuse_unheld("value", tree)
    if is_traced(tree):
        return jax.tree.map(jnp.asarray, tree)
    placement.require_present()
    leaves, treedef = jax.tree.flatten(tree)
    on_host = [i for i, leaf in enumerate(leaves) if not _is_global(leaf)]
    if on_host and placement.num_processes > 1:
        own = [copy_to_host(key_data(leaves[i])) for i in on_host]
        kinds = ", ".join(f"{x.dtype}{list(x.shape)}" for x in own)
        advice = "Run the same program on every process."
        require_same("What is placed on all devices", f"{treedef}: {kinds}", advice)
        for i, first in zip(on_host, from_first_process(own), strict=True):
            leaves[i] = like_key(first, leaves[i])
    return place_own(jax.tree.unflatten(treedef, leaves), placement, layouts)


def place_own(tree: PyTree, placement: Placement, layouts: PyTree) -> PyTree:
    """As `place`, but each process places its own values, and a thread may call it."""
    placement.require_present()
    shardings = placement.shardings(layouts, tree)
    if placement.num_processes == 1:
        return jax.device_put(jax.tree.map(copy_to_host, tree), shardings)
    return jax.tree.map(_place_on_processes, tree, shardings)


def copy_to_host(leaf: Any) -> Any:
    """A NumPy array of its own, of a dtype that devices hold; a key stays a key."""
    if is_key(leaf):  # a key's own copy() would compile a program
        data = key_data(leaf)
        return like_key(jax.device_put(data, data.sharding, may_alias=False), leaf)
    if isinstance(leaf, jax.Array):
        return np.array(readable(leaf))
    return np.array(leaf, dtype=held_dtype(np.asarray(leaf).dtype))


def _is_global(leaf: Any) -> bool:
    is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_placed and not leaf.is_fully_addressable


def is_split(leaf: Any) -> bool:
    """Whether parts of an array lie on other processes, so that none can read it."""
    return _is_global(leaf) and not leaf.is_fully_replicated


def readable(leaf: Any) -> Any:
    """The leaf, mirrored if it is split; every process calls this, and may read it."""
    if not is_split(leaf):
        return leaf
    mirrored = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    with says_if_alone("a value of all towers is read"):
        return wait_on_cpus(_reshard(leaf, sharding=mirrored))


_wrap_key_data = jax.jit(jax.random.wrap_key_data, static_argnames="impl")


def _place_on_processes(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A global array, of which this process places the shards of its own devices."""
    if is_key(leaf):
        data = _place_on_processes(jax.random.key_data(leaf), sharding)
        return _wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if _is_global(leaf):
        if leaf.sharding.device_set == sharding.device_set:
            return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    host = copy_to_host(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def has_sharding(x: Any, sharding: NamedSharding) -> bool:
    """Is ``x`` a JAX array of that sharding?"""
    is_array = isinstance(x, jax.Array)
    return is_array and x.sharding.is_equivalent_to(sharding, x.ndim)


def place_rows(tree: PyTree, placement: Placement, layout: Layout) -> PyTree:
    """Rows on the devices of their towers, copied: a loader may reuse its buffer."""
    placement.require_present()
    if placement.num_processes > 1:
        return place_own(tree, placement, layout)
    sharding = placement.sharding(layout)
    return jax.tree.map(lambda x: _place_rows_of(x, sharding), tree)


def _place_rows_of(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array):
        return x if has_sharding(x, sharding) else jax.device_put(x, sharding)
    x = np.asarray(x)
    dtype = held_dtype(x.dtype)
    if not 0 < x.nbytes < _LARGE:  # XLA fails to copy an array without elements
        return put(_copy_aligned(x, dtype), sharding, shared=True)
    # In C order: XLA cannot copy an array whose elements share memory (broadcast_to).
    return put(x.astype(dtype, order="C", copy=False), sharding)


def _copy_aligned(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    size = x.size * dtype.itemsize
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.__array_interface__["data"][0] % _ALIGNED
    copy = room[start : start + size].view(dtype).reshape(x.shape)
    np.copyto(copy, x, casting="unsafe")
    return copy


def argument_converter(x: Any, sharding: NamedSharding) -> Callable[[Any], Any] | None:
    """A function that makes arrays like ``x`` a program's arguments; None: they are."""
    # A program of one device places a copy of few rows in less time than `put`.
    if not isinstance(x, jax.Array) and sharding.num_devices == 1 and x.nbytes < _SMALL:
        return functools.partial(np.array, dtype=held_dtype(x.dtype))
    if has_sharding(x, sharding):
        return None
    return functools.partial(_place_rows_of, sharding=sharding)


def place_own_rows(tree: PyTree, placement: Placement) -> PyTree:
    """Global arrays of which this process's rows are the part of its own towers."""
    placement.require_present()
    sharding = placement.sharding(Layout.PER_TOWER)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, copy_to_host(x)),
        tree,
    )


def wait_on_cpus(out: PyTree) -> PyTree:
    """Return ``out``; wait for it first if it is on several CPUs: `bound_in_flight`."""
    for x in jax.tree.leaves(out):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            devices = x.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                x.block_until_ready()
    return out


def on_every_process(tree: PyTree, placement: Placement) -> PyTree:
    """The tree, mirrored, so that the host of each process can read it."""
    if placement.num_processes == 1:
        return tree
    mirrored = placement.sharding(Layout.MIRRORED)
    return wait_on_cpus(_reshard(tree, sharding=mirrored))


@functools.partial(jax.jit, static_argnames="sharding")
def _reshard(tree: PyTree, *, sharding: NamedSharding) -> PyTree:
    return jax.lax.with_sharding_constraint(tree, sharding)
