"""Devices that this machine lacks, by name: XLA compiles for them from shapes."""

import contextlib
import dataclasses
import glob
import importlib.metadata
import logging
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from towerjax.types.options import check_text, check_whole, short_repr

# The fields of a GpuTargetConfigProto in which GPUs differ. The numbers below are those
# of SXM modules.
_FIGURES = """core_count fpus_per_core shared_memory_per_core
    shared_memory_per_block_optin l2_cache_size clock_rate_ghz memory_bandwidth
    device_memory_size""".split()
_HOPPER = (132, 128, 233472, 232448, 52428800, 1.98)
_GPUS = {  # each: the major compute capability, then _FIGURES
    "a100": (8, 108, 64, 167936, 166912, 41943040, 1.41, 2039040000000, 85100068864),
    "h100": (9, *_HOPPER, 3352320000000, 84942979072),
    "h200": (9, *_HOPPER, 4800000000000, 151397597184),
    "b200": (
        *(10, 148, 128, 233472, 232448, 132644864, 1.965),
        *(7672320000000, 191514411008),
    ),
}
_TARGET = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  cuda_compute_capability {{ major: {major} }}
{figures}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "NVIDIA {name}"
"""
_MOST = 1 << 20  # for so many GPUs the compiler needs a minute and 8 GB
_TPU = re.compile(r"v\d+\w*:(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Absent:
    """Devices that this machine lacks, for which XLA can compile.

    A strategy on them proves and compiles steps from shapes, with ``step.check`` and
    ``step.report``. Nothing runs on them. The compiler comes with ``pip install
    '.[gpu-compiler]'`` or ``[tpu-compiler]`` in a checkout, and needs no driver.

    Attributes:
      target: A GPU, ``"a100"``, ``"h100"``, ``"h200"`` or ``"b200"``; a topology of
        TPUs, ``"v5e:2x4"``; or XLA's description of a GPU, a ``GpuTargetConfigProto``
        as text.
      number: The number of GPUs, up to 1,048,576; None for TPUs: their topology has it.
      hosts: The number of hosts, which share the GPUs evenly; None: a host for each 8.

    Raises:
      ValueError: The target is unknown, or hosts cannot share the number evenly.

    Example:
      >>> import towerjax as tj
      >>> tj.Mirrored(devices=tj.Absent("h200", 16)).num_towers
      16
    """

    target: str
    number: int | None = None
    hosts: int | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check the arguments as far as is possible without a compiler."""
        check_text("target", self.target, "a name, such as 'H100' or 'v5e:2x4'")
        if self.platform == "tpu" and (self.number, self.hosts) == (None, None):
            return
        if self.target not in _GPUS and "gpu_device_info" not in self.target:
            raise ValueError(
                f"{self!r} is not a known device. Write one of"
                f" {', '.join(map(repr, _GPUS))} and a number, a TPU topology such as"
                " 'v5e:2x4' without a number, or XLA's description of a GPU, a text"
                " with gpu_device_info { ... }."
            )
        check_whole("number", self.number, 1, _MOST)
        check_whole("hosts", self.hosts, or_none=True)
        if len(self) % self.num_hosts:
            raise ValueError(
                f"{self.num_hosts} hosts cannot share {self.number} GPUs evenly. Write"
                f" hosts= with a number that divides {self.number}."
            )

    def __len__(self) -> int:
        """Count the devices."""
        if match := _TPU.fullmatch(self.target):
            return math.prod(int(size) for size in match[1].split("x"))
        return self.number or 0

    @property
    def platform(self) -> str:
        """The platform of the devices, ``"gpu"`` or ``"tpu"``."""
        return "tpu" if self.is_topology(self.target) else "gpu"

    @staticmethod
    def is_topology(target: str) -> bool:
        """Whether ``target`` is a topology of TPUs, such as ``"v5e:2x4"``."""
        return _TPU.fullmatch(target) is not None

    @property
    def num_hosts(self) -> int:
        """The number of hosts that have the GPUs.

        It is 1 for TPUs: the compiler knows their hosts from the topology.
        """
        return self.hosts or -(-(self.number or 1) // 8)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that present devices would have: ``"gpu:0"`` and so on."""
        return tuple(f"{self.platform}:{i}" for i in range(len(self)))

    @property
    def kind(self) -> str:
        """The name of one device in a report."""
        match = re.search(r'device_description_str: "([^"]*)"', self.text)
        other = self.target if self.platform == "tpu" else "GPU"
        return match[1] if match else other

    @property
    def memory_bytes(self) -> int | None:
        """The memory of one device in bytes; None if the target does not say."""
        match = re.search(r"device_memory_size: (\d+)", self.text)
        return int(match[1]) if match else None

    @property
    def text(self) -> str:
        """The target, as the compiler reads it.

        It is a ``GpuTargetConfigProto`` as text, or a topology of TPUs.
        """
        if self.target not in _GPUS:
            return self.target
        major, *numbers = _GPUS[self.target]
        pairs = zip(_FIGURES, numbers, strict=True)
        figures = "\n".join(f"  {name}: {number}" for name, number in pairs)
        return _TARGET.format(major=major, figures=figures, name=self.target.upper())

    def jax_devices(self) -> tuple[Any, ...]:
        """Make the compiler's devices; raise if the compiler is not installed."""
        # Called first, so that JAX's default devices are the present ones.
        jax.devices()
        make = _tpu_devices if self.platform == "tpu" else _gpu_devices
        devices = tuple(make(self))
        if len(devices) != len(self):
            raise ValueError(
                f"{self} has {len(devices)} devices according to the compiler, but its"
                f" name says {len(self)}. Name a topology that the compiler knows."
            )
        return devices


def _gpu_devices(absent: Absent) -> list[Any]:
    gpus_each = len(absent) // absent.num_hosts
    options = {"topology": f"1x{absent.num_hosts}x{gpus_each}"}
    options["target_config"] = absent.text
    try:
        topology = topologies.get_topology_desc(platform="cuda", **options)
    except NotImplementedError:  # without a driver JAX did not register the plugin
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        compilers = [plugin for plugin in plugins if plugin.name.startswith("xla_cuda")]
        if not compilers:
            raise _missing_compiler(absent) from None
        with _set_by_default("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
            compilers[0].load().initialize()
        topology = topologies.get_topology_desc(platform="cuda", **options)
    return list(topology.devices)


def _tpu_devices(absent: Absent) -> list[Any]:
    try:
        # libtpu has a lock, so that one process at a time uses the TPUs. Here nothing
        # runs on TPUs, so the lock is switched off.
        with _set_by_default("ALLOW_MULTIPLE_LIBTPU_LOAD"):
            topology = topologies.get_topology_desc(absent.target, platform="tpu")
    except RuntimeError as error:
        if "TPU support not installed" not in str(error):
            raise
        raise _missing_compiler(absent) from None
    return list(topology.devices)


def _missing_compiler(absent: Absent) -> ValueError:
    return ValueError(
        f"Compiling for {absent} needs its compiler, a wheel of JAX's version. Install"
        f" it with pip install '.[{absent.platform}-compiler]' in a checkout of"
        " towerjax."
    )


@contextlib.contextmanager
def _set_by_default(variable: str) -> Iterator[None]:
    """Set an environment variable to "1" within the block, unless it is set."""
    is_ours = variable not in os.environ
    os.environ.setdefault(variable, "1")
    try:
        yield
    finally:
        if is_ours:
            del os.environ[variable]


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop one error of JAX: that the CUDA plugin failed without a GPU."""
    is_of_cuda = record.exc_info and "xla_cuda" in record.getMessage()
    return not is_of_cuda or bool(glob.glob("/dev/nvidia*"))


# JAX logs that error in every program if the package with the compiler is installed.
logging.getLogger("jax._src.xla_bridge").addFilter(_is_worth_logging)
