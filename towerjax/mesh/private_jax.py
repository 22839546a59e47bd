"""What does JAX offer under no public name? All of it that is used here."""

import functools
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax._src.config import explicit_device_put_scope
from jax._src.core import extend_axis_env_nd
from jax._src.interpreters.pxla import batched_device_put
from jax.sharding import NamedSharding
from jaxlib.mlir.passmanager import PassManager


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """As ``jax.device_put`` of an array of a dtype that devices hold, which calls this.

    In a quarter of its time, which for small batches is longer than a step's call. The
    devices may share the array's memory.
    """
    aval, parts, devices = _split(array.shape, array.dtype, sharding)
    with explicit_device_put_scope():  # of which ``jax.transfer_guard`` takes note
        return batched_device_put(aval, sharding, [array[i] for i in parts], devices)


@functools.lru_cache(1024)
def _split(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """The type of such an array, which part of it goes to which device."""
    zeros = np.broadcast_to(np.zeros((), dtype), shape)
    parts = sharding.addressable_devices_indices_map(shape)
    aval = jax.device_put(zeros, sharding).aval
    return aval, list(parts.values()), list(parts)


def carries_gradient(x: Any, of: Any) -> bool:
    """Does the gradient by ``of``, in whose making this is called, go through ``x``?

    Not through what ``lax.stop_gradient`` or a comparison gave.
    """
    made_by = [y._trace.tag for y in (x, of) if hasattr(y, "tangent")]
    return len(made_by) == 2 and made_by[0] is made_by[1]


def with_axis(name: str) -> Any:
    """A context in which a named axis of one is bound, as ``lax.axis_size`` tells."""
    return extend_axis_env_nd([(name, 1)])


def coordinator_client() -> Any:
    """JAX's client of the job's key-value store."""
    return distributed.global_state.client


def run_passes(lowered: Any, passes: str) -> None:
    """Rewrites a lowered program by passes of MLIR, named as ``"inline,cse"``."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        PassManager.parse(f"builtin.module({passes})").run(module.operation)
