"""What is here? Versions, devices, processors, memory, and the settings that count."""

import dataclasses
import os
import pathlib
import platform
import shutil
from typing import Any

import jax

from towerjax.loop.checkpoint.record import library_versions
from towerjax.mesh.devices import canonical_device_name
from towerjax.tools.bench.machine import cores

_PREFIXES = ("JAX_", "XLA_", "CUDA_VISIBLE", "NCCL_", "TOWERJAX_", "TF_CONFIG")
_OPTIONS = (
    "jax_enable_x64",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """One device.

    Attributes:
      name: ``"gpu:0"``.
      kind: What its maker calls it.
      process: Which process of the job has it.
      memory_bytes: What JAX may take of its memory; None where JAX does not say.
    """

    name: str
    kind: str
    process: int
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Machine:
    """What one process of a job sees.

    Attributes:
      versions: Name -> version; None of a package that is not installed.
      system: The operating system and the processor's kind.
      devices: All devices of the job, in tower order; empty where JAX has none.
      problem: What JAX said where it has none.
      cpus: How many processors this process may use.
      memory_bytes: How much memory the machine has; None where it does not say.
      shared_memory_bytes: How large ``/dev/shm`` is; None where there is none.
      nvidia: Does the machine have an NVIDIA GPU, whatever JAX knows of it?
      environment: The variables that JAX, XLA and NCCL read.
      options: Those of JAX that change numbers or speed.
    """

    versions: dict[str, str]
    system: str
    devices: tuple[DeviceInfo, ...]
    problem: str | None
    cpus: int
    memory_bytes: int | None
    shared_memory_bytes: int | None
    nvidia: bool
    environment: dict[str, str]
    options: dict[str, bool]

    @property
    def platform(self) -> str | None:
        """``"cpu"``, ``"gpu"``: the devices'; None where there are none."""
        return self.devices[0].name.split(":")[0] if self.devices else None


def this_machine() -> Machine:
    """What this process sees; starts JAX's devices."""
    devices, problem = _devices()
    shm = pathlib.Path("/dev/shm")
    return Machine(
        versions={"python": platform.python_version(), **library_versions()},
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
