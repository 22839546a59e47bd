"""What is here for towers to run on, and what about it is to be mended?"""

import dataclasses
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax

from towerjax.mesh.devices import canonical_device_name
from towerjax.tools.bench.sweep import cores, versions

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
    kind: str  # what its maker calls it
    process: int  # which process of the job has it
    memory_bytes: int | None  # what JAX may take of its memory


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one process of a job sees."""

    versions: dict[str, str]  # by name
    system: str  # the operating system and the processor's kind
    devices: tuple[DeviceInfo, ...]  # all devices of the job, in tower order
    problem: str | None  # what JAX said where it has none
    cpus: int  # how many processors this process may use
    memory_bytes: int | None  # how much memory the machine has
    shared_memory_bytes: int | None  # how large /dev/shm is; None where there is none
    nvidia: bool  # does the machine have an NVIDIA GPU, whatever JAX knows of it?
    environment: dict[str, str]  # the variables that JAX, XLA and NCCL read
    options: dict[str, bool]  # those of JAX that change numbers or speed

    @property
    def platform(self) -> str | None:
        """``"cpu"``, ``"gpu"``: the devices'; None where there are none."""
        return self.devices[0].name.split(":")[0] if self.devices else None


def this_machine() -> Machine:
    """What this process sees; starts JAX's devices."""
    devices, problem = _devices()
    shm = pathlib.Path("/dev/shm")
    return Machine(
        versions=versions(),
        system=f"{platform.system()} {platform.machine()}",
        devices=devices,
        problem=problem,
        cpus=cores(),
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        nvidia=pathlib.Path("/dev/nvidiactl").exists(),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES)
        },
        options={name: bool(getattr(jax.config, name)) for name in _OPTIONS},
    )


def _devices() -> tuple[tuple[DeviceInfo, ...], str | None]:
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:
        # The one where a platform does not start; of one that JAX was not told of
        # ("cuda" without its plugin) it asserts, without a word.
        return (), str(error) or "it could start no platform that it was told to."
    return tuple(_device_info(device) for device in found), None


def _device_info(device: Any) -> DeviceInfo:
    own = device.process_index == jax.process_index()
    stats = (device.memory_stats() if own else None) or {}
    return DeviceInfo(
        name=canonical_device_name(device),
        kind=device.device_kind,
        process=device.process_index,
        memory_bytes=stats.get("bytes_limit"),
    )


def _memory_bytes() -> int | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_LEAST_SHARED_BYTES = 1 << 30
_FINITE = "; a step refuses what is not finite by itself"
_DRAWS = "random draws depend on how arrays lie on devices"
_WIDE = "numbers without a dtype are of 64 bits"
_TRAPS = (  # an option, the value to tell of, is it wrong, why, what to do besides
    ("jax_disable_jit", True, True, "nothing is compiled", ""),
    ("jax_threefry_partitionable", False, True, _DRAWS, ""),
    ("jax_debug_nans", True, False, "every result is fetched and looked at", _FINITE),
    ("jax_enable_x64", True, False, _WIDE, ", if that is not meant"),
)


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing to mend, or to know."""

    is_wrong: bool  # must it be mended? Else it may be meant so
    what: str  # what was found
    fix: str  # what to do

    def __str__(self) -> str:
        return f"{'wrong' if self.is_wrong else 'note'}: {self.what}\n  do: {self.fix}"


def advice_on(machine: Machine) -> tuple[Advice, ...]:
    """What to mend on a machine, and what to know of it."""
    if not machine.devices:
        on_devices = _on_no_devices(machine)
    elif machine.platform == "cpu":
        on_devices = _on_cpu_devices(machine)
    else:
        on_devices = _on_accelerators(machine)
    found = [Advice(*one) for one in (*on_devices, *_on_options(machine))]
    return tuple(sorted(found, key=lambda advice: not advice.is_wrong))


Found: TypeAlias = Iterator[tuple[bool, str, str]]


def _on_no_devices(machine: Machine) -> Found:
    fix = "Install JAX for this machine's accelerator, pip install 'jax[cuda13]'."
    if platforms := machine.environment.get("JAX_PLATFORMS"):
        fix = f"Unset JAX_PLATFORMS, which is {platforms!r}. {fix}"
    yield True, f"JAX has no devices: {machine.problem}", fix


def _on_cpu_devices(machine: Machine) -> Found:
    if machine.nvidia:
        is_asked = "JAX_PLATFORMS" in machine.environment
        what = "The machine has an NVIDIA GPU, but JAX computes on the CPU."
        fix = "Unset JAX_PLATFORMS, if that is not meant."
        yield not is_asked, what, fix if is_asked else "pip install 'jax[cuda13]'"
    if len(machine.devices) == 1:
        what = "There is one CPU device, so nothing travels between devices."
        yield False, what, "To try several, set JAX_NUM_CPU_DEVICES=8."
    first = machine.devices[0].process
    own = sum(device.process == first for device in machine.devices)
    if own > machine.cpus:
        what = f"{own} CPU devices share {machine.cpus} processors: good for tests, but"
        what += " times say nothing about scaling."
        fix = "For speed take as many devices as there are processors, or fewer."
        yield False, what, fix


def _on_accelerators(machine: Machine) -> Found:
    kinds = sorted({device.kind for device in machine.devices})
    if len(kinds) > 1:
        what = f"The devices are of several kinds, {', '.join(kinds)}; the slowest sets"
        what += " the pace of all."
        yield False, what, "Name those of one kind: tj.Mirrored(devices=...)."
    shared, number = machine.shared_memory_bytes, len(machine.devices)
    several = number > 1 and machine.platform == "gpu"
    if several and shared is not None and shared < _LEAST_SHARED_BYTES:
        what = f"/dev/shm has {shared >> 20} MiB, too little for NCCL to send between"
        fix = "Start the container with --shm-size=8g, or --ipc=host."
        yield True, f"{what} {number} GPUs.", fix


def _on_options(machine: Machine) -> Found:
    flags = machine.environment.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags:
        what = "XLA_FLAGS says how many CPU devices there are, the old way."
        fix = "Set JAX_NUM_CPU_DEVICES in its place; JAX refuses both together."
        yield False, what, fix
    for option, value, is_wrong, why, besides in _TRAPS:
        if bool(machine.options.get(option, not value)) is value:
            what = f"{option} is {'on' if value else 'off'}: {why}."
            yield is_wrong, what, f"Unset {option.upper()}{besides}."
