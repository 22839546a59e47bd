"""On what was it measured? The machine, and the versions of what ran."""

import importlib.metadata
import os
import pathlib
import platform
import sys
from typing import Any

_PACKAGES = ("towerjax", "jax", "jaxlib", "flax", "optax", "numpy")
PEER_PACKAGES = {
    "keras": ("keras", "jax", "jaxlib"),
    "tensorflow": ("tensorflow",),
    "torch": ("torch",),
}
PEER_MODELS = ("mlp", "cnn")
"""What is written for the peers that are not JAX."""


def describe_machine() -> dict[str, Any]:
    """The processor, its cores that this process may use, and the system."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Name -> version, of Python and of the packages that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    peers = [name for names in PEER_PACKAGES.values() for name in names]
    for name in dict.fromkeys([*_PACKAGES, *peers]):
        if (version := _version(name)) is not None:
            found[name] = version
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # The package of the CPU alone has another name.
        return _version(f"{name}-cpu") if name == "tensorflow" else None


def why_not(peer: str, model: str, dtype: str) -> str | None:
    """Why a peer cannot run a model here."""
    if peer not in PEER_PACKAGES:
        return None
    for name in PEER_PACKAGES[peer]:
        if _version(name) is None:
            return f"{name} is not installed here"
    if model not in PEER_MODELS or dtype != "float32":
        return f"for {peer}, {' and '.join(PEER_MODELS)} are written, in float32"
    return None


def load() -> float | None:
    """How many programs ran or waited here in the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
