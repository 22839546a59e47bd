"""Describe the machine that towers run on, and advise what to mend on it."""

import dataclasses
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator
from typing import Any

import jax

from towerjax.mesh.devices import canonical_device_name
from towerjax.tools.bench.sweep import num_cores, versions

_PREFIXES = ("JAX_", "XLA_", "CUDA_VISIBLE", "NCCL_", "TOWERJAX_", "TF_CONFIG")
_OPTIONS = (
    "jax_enable_x64",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """One device."""

    name: str  # "gpu:0"
    kind: str  # the maker's name of it
    process: int  # the process of the job that owns it
    memory_bytes: int | None  # how much of its memory JAX may use


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine as one process of a job sees it."""

    versions: dict[str, str]  # by name
    system: str  # the operating system and the processor's kind
    devices: tuple[DeviceInfo, ...]  # all devices of the job, in tower order
    problem: str | None  # JAX's error if it has no devices
    cpus: int  # how many processors this process may use
    memory_bytes: int  # how much memory the machine has
    shared_memory_bytes: int | None  # how large /dev/shm is; None where there is none
    nvidia: bool  # whether it has an NVIDIA GPU, even one that JAX does not find
    environment: dict[str, str]  # the variables that JAX, XLA and NCCL read
    options: dict[str, bool]  # options of JAX that change results or speed

    @property
    def platform(self) -> str | None:
        """``"cpu"``, ``"gpu"``: the devices'; None where there are none."""
        return self.devices[0].name.split(":")[0] if self.devices else None


def this_machine() -> Machine:
    """The `Machine` of this process; starts JAX's backends."""
    devices, problem = _find_devices()
    shm = pathlib.Path("/dev/shm")
    return Machine(
        versions=versions(),
        system=f"{platform.system()} {platform.machine()}",
        devices=devices,
        problem=problem,
        cpus=num_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        shared_memory_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        nvidia=pathlib.Path("/dev/nvidiactl").exists(),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES)
        },
        options={name: bool(getattr(jax.config, name)) for name in _OPTIONS},
    )


def _find_devices() -> tuple[tuple[DeviceInfo, ...], str | None]:
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # A RuntimeError if a platform does not start; an AssertionError without text if
        # JAX does not know the platform ("cuda" without its plugin).
        return (), str(error) or "it could start no platform that it was told to."
    return tuple(_device_info(device) for device in found), None


def _device_info(device: Any) -> DeviceInfo:
    is_own = device.process_index == jax.process_index()
    stats = (device.memory_stats() if is_own else None) or {}
    return DeviceInfo(
        name=canonical_device_name(device),
        kind=device.device_kind,
        process=device.process_index,
        memory_bytes=stats.get("bytes_limit"),
    )


_LEAST_SHARED_BYTES = 1 << 30
_FINITE = "; a step refuses what is not finite by itself"
_DRAWS = "random draws depend on how arrays lie on devices"
_64_BIT = "numbers without a dtype are of 64 bits"
_TRAPS = (  # option, the value to warn of, is it wrong, why, an end of the advice
    ("jax_disable_jit", True, True, "nothing is compiled", ""),
    ("jax_threefry_partitionable", False, True, _DRAWS, ""),
    ("jax_debug_nans", True, False, "every result is fetched and looked at", _FINITE),
    ("jax_enable_x64", True, False, _64_BIT, ", if that is not meant"),
)


@dataclasses.dataclass(frozen=True)
class Advice:
    """One fault to mend, or fact to know."""

    is_wrong: bool  # whether it must be mended; else it may be intended
    what: str  # what was found
    fix: str  # what to do

    def __str__(self) -> str:
        return f"{'wrong' if self.is_wrong else 'note'}: {self.what}\n  do: {self.fix}"


def advice_on(machine: Machine) -> tuple[Advice, ...]:
    """All advice on a machine, faults first."""
    if not machine.devices:
        on_devices = _on_no_devices(machine)
    elif machine.platform == "cpu":
        on_devices = _on_cpu_devices(machine)
    else:
        on_devices = _on_accelerators(machine)
    found = (*on_devices, *_on_options(machine))
    return tuple(sorted(found, key=lambda advice: not advice.is_wrong))


def _on_no_devices(machine: Machine) -> Iterator[Advice]:
    fix = "Install JAX for this machine's accelerator, pip install 'jax[cuda13]'."
    if platforms := machine.environment.get("JAX_PLATFORMS"):
        fix = f"Unset JAX_PLATFORMS, which is {platforms!r}. {fix}"
    yield Advice(True, f"JAX has no devices: {machine.problem}", fix)


def _on_cpu_devices(machine: Machine) -> Iterator[Advice]:
    if machine.nvidia:
        is_asked = "JAX_PLATFORMS" in machine.environment
        what = "The machine has an NVIDIA GPU, but JAX computes on the CPU."
        fix = "Unset JAX_PLATFORMS, if that is not meant."
        yield Advice(
            not is_asked, what, fix if is_asked else "pip install 'jax[cuda13]'"
        )
    if len(machine.devices) == 1:
        what = "There is one CPU device, so nothing travels between devices."
        yield Advice(False, what, "To try several, set JAX_NUM_CPU_DEVICES=8.")
    first = machine.devices[0].process
    count = sum(device.process == first for device in machine.devices)
    if count > machine.cpus:
        what = (
            f"{count} CPU devices share {machine.cpus} processors: good for tests, but"
        )
        what += " times say nothing about scaling."
        fix = "For speed take as many devices as there are processors, or fewer."
        yield Advice(False, what, fix)


def _on_accelerators(machine: Machine) -> Iterator[Advice]:
    kinds = sorted({device.kind for device in machine.devices})
    if len(kinds) > 1:
        what = f"The devices are of several kinds, {', '.join(kinds)}; the slowest sets"
        what += " the pace of all."
        yield Advice(False, what, "Name those of one kind: tj.Mirrored(devices=...).")
    shared, number = machine.shared_memory_bytes, len(machine.devices)
    has_gpus = number > 1 and machine.platform == "gpu"
    if has_gpus and shared is not None and shared < _LEAST_SHARED_BYTES:
        what = f"/dev/shm has {shared >> 20} MiB, too little for NCCL to send between"
        fix = "Start the container with --shm-size=8g, or --ipc=host."
        yield Advice(True, f"{what} {number} GPUs.", fix)


def _on_options(machine: Machine) -> Iterator[Advice]:
    flags = machine.environment.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags:
        what = "XLA_FLAGS says how many CPU devices there are, the old way."
        fix = "Set JAX_NUM_CPU_DEVICES in its place; JAX refuses both together."
        yield Advice(False, what, fix)
    for option, value, is_wrong, why, besides in _TRAPS:
        if bool(machine.options.get(option, not value)) is value:
            what = f"{option} is {'on' if value else 'off'}: {why}."
            yield Advice(is_wrong, what, f"Unset {option.upper()}{besides}.")
