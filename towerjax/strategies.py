"""Which towers, where, and how do they reduce? Mirrored and OneDevice."""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax

from towerjax.collectives import AllReduce, ChecksDevices, CrossTowerOps
from towerjax.cross_tower.job import JobMethods
from towerjax.cross_tower.methods import CrossTowerMethods
from towerjax.devices import (
    canonical_device_name,
    canonical_device_names,
    first_of_each_process,
)
from towerjax.html_form import table
from towerjax.placement import Placement
from towerjax.types import short_repr


@dataclasses.dataclass(frozen=True, repr=False)
class Mirrored(CrossTowerMethods, JobMethods):
    """``T`` towers, mirrored parameters, one reduction a step.

    Attributes:
      devices: ``"platform:index"`` names or ``jax.Device`` objects, in tower order;
        None takes every accelerator of every process, or the CPUs where there is
        none. The index counts over all processes, process after process.
      num_gpus: ``devices`` as the first so many GPUs of each process; 0 is the CPU.
      num_gpus_per_worker: The same, by its other name.
      towers: ``T``; None is one a device. A multiple of the number of devices;
        where ``devices`` is None, as many of them are used as divide it.
      local: How the ``k = T / D`` towers of a device run: ``"vmap"`` together,
        ``"scan"`` one after another, which needs the memory of one.
      executor: ``"shard_map"``, or ``"pmap"``, JAX's legacy path.
      cross_tower_ops: How a reduction travels: `AllReduce`, `PinnedTree`, `Packed`,
        `ReduceToOneDevice` or `Hierarchical`; see `choose_cross_tower_ops`.
      prefetch_on_device: How many placed batches `distribute_dataset` keeps ready; 0
        places each when it is asked for.

    Raises:
      ValueError: Options that exclude each other, no or duplicate devices, a name
        that is none, ``towers`` that the devices do not divide, ``cross_tower_ops``
        that these devices cannot honour.

    Example:
      >>> Mirrored(devices=("CPU:0",), towers=8, local="scan")
      Mirrored(devices=('cpu:0',), towers=8, local='scan')
    """

    devices: Sequence[Any] | None = None
    num_gpus: int | None = None
    num_gpus_per_worker: int | None = None
    towers: int | None = None
    local: Literal["vmap", "scan"] = "vmap"
    executor: Literal["shard_map", "pmap"] = "shard_map"
    cross_tower_ops: CrossTowerOps = AllReduce()
    prefetch_on_device: int = 2

    def __post_init__(self) -> None:
        """Check everything that can be known without a device."""
        _check_choices(self)
        if self.devices is not None:
            object.__setattr__(self, "devices", canonical_device_names(self.devices))
        devices = self._named_devices()
        if devices is not None:
            _check_divides(self.towers, len(devices))
            _check_ops(self.cross_tower_ops, devices)

    def __repr__(self) -> str:
        """Text that can be pasted back."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        return _as_html(self)

    @functools.cached_property
    def placement(self) -> Placement:
        """Where the towers are, by name: the devices need not be on this machine."""
        devices = self._devices()
        _check_ops(self.cross_tower_ops, devices)
        return Placement(
            devices=devices,
            num_towers=self.towers or len(devices),
            local=self.local,
            executor=self.executor,
        )

    def _named_devices(self) -> tuple[str, ...] | None:
        """The devices that the options name; None where they leave it open."""
        if self.devices is not None:
            return tuple(self.devices)
        if (gpus := self._gpus_per_process()) is None:
            return None
        return tuple(f"gpu:{i}" for i in range(gpus)) or ("cpu:0",)

    def _gpus_per_process(self) -> int | None:
        given = (self.num_gpus, self.num_gpus_per_worker)
        return given[0] if given[0] is not None else given[1]

    def _devices(self) -> tuple[str, ...]:
        if self._gpus_per_process() is not None and jax.process_count() > 1:
            return first_of_each_process(self._gpus_per_process() or 0)
        named = self._named_devices()
        if named is not None:
            return named
        found = tuple(canonical_device_name(device) for device in jax.devices())
        return found if self.towers is None else _shared_evenly(found, self.towers)


def _shared_evenly(found: tuple[str, ...], towers: int) -> tuple[str, ...]:
    """As many of the devices as share the towers evenly, as many of each process."""
    processes = jax.process_count()
    each = len(found) // processes
    fitting = [n for n in range(1, each + 1) if towers % (n * processes) == 0]
    if not fitting:
        raise ValueError(
            f"towers={towers} is not a multiple of the {processes} processes, each of"
            " which runs as many towers. Use"
            f" towers={-(-towers // processes) * processes}."
        )
    used = fitting[-1]
    if used < each and used * processes < len(found) <= towers:
        warnings.warn(
            f"{towers} towers share {used * processes} of {len(found)} devices evenly;"
            f" {len(found) - used * processes} stay idle. Choose towers as a multiple"
            f" of {len(found)}, or name the devices.",
            stacklevel=2,
        )
    return tuple(
        found[process * each + index]
        for process in range(processes)
        for index in range(used)
    )


@dataclasses.dataclass(frozen=True, repr=False)
class OneDevice(CrossTowerMethods, JobMethods):
    """One tower on one device: no split, no scaling, no communication.

    Attributes:
      device: A ``"platform:index"`` name or a ``jax.Device``; None is the default
        device.
      prefetch_on_device: As for `Mirrored`.

    Raises:
      ValueError: ``device`` is not a name.

    Example:
      >>> OneDevice("CPU:0")
      OneDevice(device='cpu:0')
    """

    device: str | None = None
    prefetch_on_device: int = 2

    def __post_init__(self) -> None:
        """Canonicalise the name."""
        _check_number("prefetch_on_device", self.prefetch_on_device, 0)
        if self.device is not None:
            object.__setattr__(self, "device", canonical_device_name(self.device))

    def __repr__(self) -> str:
        """Text that can be pasted back."""
        return short_repr(self)

    def _repr_html_(self) -> str:
        return _as_html(self)

    @property
    def cross_tower_ops(self) -> CrossTowerOps:
        """Nothing travels; sums are of one tower."""
        return AllReduce()

    @functools.cached_property
    def placement(self) -> Placement:
        """Where the tower is, by name."""
        name = self.device or canonical_device_name(jax.local_devices()[0])
        return Placement((name,), 1, local="vmap", executor="shard_map")


Strategy = Mirrored | OneDevice


def _as_html(strategy: Strategy) -> str:
    """Which device has which towers."""
    try:
        placement = strategy.placement
    except ValueError as error:  # what cannot be placed here can still be shown
        return table(repr(strategy), (), [(str(error),)])
    each = placement.axes.num_local
    rows = [
        (name, *range(i * each, (i + 1) * each)[:16], *(["…"] if each > 16 else []))
        for i, name in enumerate(placement.devices)
    ]
    together = "one after another" if placement.local == "scan" else "together"
    last = (
        f"{placement.num_towers} towers on {placement.num_devices} devices",
        *([f"{each} on each, {together}"] if each > 1 else []),
        repr(strategy.cross_tower_ops),
    )
    return table(repr(strategy), ("device", "towers"), rows, last=last)


def _check_choices(strategy: Mirrored) -> None:
    counts = (strategy.num_gpus, strategy.num_gpus_per_worker)
    if None not in counts:
        raise ValueError(
            "num_gpus and num_gpus_per_worker mean the same; give one of them."
        )
    if strategy.devices is not None and counts != (None, None):
        raise ValueError(
            "devices already says how many GPUs there are; leave out num_gpus and"
            " num_gpus_per_worker."
        )
    for name in ("num_gpus", "num_gpus_per_worker", "towers", "prefetch_on_device"):
        number = getattr(strategy, name)
        if number is not None or name == "prefetch_on_device":
            _check_number(name, number, 1 if name == "towers" else 0)
    for name, allowed in (
        ("local", ("vmap", "scan")),
        ("executor", ("shard_map", "pmap")),
    ):
        if getattr(strategy, name) not in allowed:
            raise ValueError(
                f"{name}={getattr(strategy, name)!r} must be one of {allowed}."
            )
    ops = strategy.cross_tower_ops
    if isinstance(ops, type) or not hasattr(ops, "sum_over_towers"):
        raise ValueError(
            f"cross_tower_ops={ops!r} is not a cross-tower op; write tj.AllReduce(),"
            " tj.PinnedTree(), tj.Packed(...), tj.ReduceToOneDevice(...) or"
            " tj.Hierarchical(...)."
        )


def _check_ops(ops: CrossTowerOps, devices: tuple[str, ...]) -> None:
    if isinstance(ops, ChecksDevices):
        ops.check_devices(devices)


def _check_number(name: str, number: Any, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name}={number!r} must be an int >= {least}.")


def _check_divides(towers: int | None, num_devices: int) -> None:
    if towers is not None and towers % num_devices:
        below, above = towers // num_devices * num_devices, -(-towers // num_devices)
        choices = [n for n in (below, above * num_devices) if n]
        raise ValueError(
            f"towers={towers} is not a multiple of the {num_devices} devices, so they"
            " cannot share the towers evenly. Use towers="
            + " or ".join(str(n) for n in choices)
            + ", or another number of devices."
        )
