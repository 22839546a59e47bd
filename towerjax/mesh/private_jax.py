"""All uses of JAX's private modules, each with the versions of JAX that have it."""

import functools
import os
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax._src import api_util, clusters, distributed  # JAX 0.10 to 0.12
from jax._src.array import ArrayImpl  # JAX 0.10 to 0.12
from jax._src.config import explicit_device_put_scope  # JAX 0.10 to 0.12
from jax._src.core import (  # JAX 0.10 to 0.12
    add_explicit_mesh_axis_names,  # JAX 0.10 to 0.12
    extend_axis_env_nd,
    get_axis_env,
    trace_state_clean,
)
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding
from jaxlib import xla_client  # JAX 0.10 to 0.12

# The class of arrays on devices, but not of keys and tracers. A test for it takes a
# fifth of the time of ``isinstance(x, jax.Array)``.
DeviceArray = ArrayImpl

_COPIED = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
_SHARED = xla_client.HostBufferSemantics.ZERO_COPY

# A compiled program raises this under ``jax_debug_nans`` and ``jax_debug_infs``.
FoundNonFinite = api_util.InternalFloatingPointError


def put(
    array: np.ndarray, sharding: NamedSharding, *, shared: bool = False
) -> jax.Array:
    """Place the array on the devices, in a quarter of the time of `jax.device_put`.

    The result is a copy. If ``shared``, it shares the memory of ``array`` where XLA
    can.
    """
    aval, parts, devices = _split(array.shape, array.dtype, sharding)
    # A `jax.transfer_guard` may allow only explicit transfers.
    with explicit_device_put_scope():
        return xla_client.batched_device_put(
            aval,
            sharding,
            [array[i] for i in parts],
            devices,
            host_buffer_semantics=_SHARED if shared else _COPIED,
        )


@functools.lru_cache(1024)
def _split(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """Find the type of an array with that sharding, and where its shards lie.

    For each shard that is its index in the array, and its device.
    """
    zeros = np.broadcast_to(np.zeros((), dtype), shape)
    parts = sharding.addressable_devices_indices_map(shape)
    aval = jax.device_put(zeros, sharding).aval
    return aval, list(parts.values()), list(parts)


def is_literal_zero(x: Any) -> bool:
    """Return whether ``x`` is a traced literal 0, such as the tangent of a constant."""
    literal = getattr(x, "val", None)
    return isinstance(literal, Literal) and not np.any(literal.val)


def inputs_read(program: ClosedJaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Mark the inputs on which one of the outputs marked True depends."""
    return partial_eval.dce_jaxpr(program.jaxpr, outputs)[1]  # JAX 0.10 to 0.12


def is_tracing() -> bool:
    """Return whether JAX is tracing a function."""
    return not trace_state_clean()


def bind_axis(name: Hashable) -> AbstractContextManager[None]:
    """Bind an axis of size 1 in a context, with any hashable name."""
    return extend_axis_env_nd([(name, 1)])


def without_axis(name: str) -> AbstractContextManager[None]:
    """Keep `jax.shard_map` from taking this axis of the mesh, in a context.

    By default `jax.shard_map` makes all axes of a mesh manual.
    """
    names: Any = [name]  # a list, although JAX's annotation says one name
    return add_explicit_mesh_axis_names(names)


def bound_axes() -> list[Any]:
    """List the names of the axes that are bound here."""
    return [*get_axis_env().axis_sizes]


def coordinator_client() -> Any:
    """Get JAX's client of the job's key-value store."""
    return distributed.global_state.client


def live_processes(numbers: Iterable[int]) -> dict[int, int]:
    """Ask which of these processes are alive, each with a number of its start.

    It waits until all that are alive have asked. `multihost_utils.live_devices` is made
    of it.
    """
    return coordinator_client().get_live_nodes([*numbers])  # JAX 0.10 to 0.12


def take_number() -> int | None:
    """Take the number of this process; None if an earlier one has had it.

    It does not start the devices, as `jax.process_index` does.
    """
    number = distributed.global_state.process_id
    try:
        coordinator_client().key_value_set(f"towerjax/joined/{number}", "")
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return None
    return number


def detects_cluster(method: str | None) -> bool:
    """Ask whether JAX was started as one of several processes.

    ``method`` is the launcher to look for; None is any.
    """
    if os.environ.get("JAX_COORDINATOR_ADDRESS") and method != "deactivate":
        return True
    return any(  # JAX 0.10 to 0.12
        kind.is_env_present()
        for kind in clusters.ClusterEnv._cluster_types
        if (kind.name == method if method else not kind.opt_in_only_method)
    )


def read_arguments(compiled: Any) -> list[int]:
    """List the argument leaves that a compiled program reads, by index."""
    return sorted(compiled._executable._kept_var_idx)  # JAX 0.10 to 0.12


def least_effort(platform: str, level: int) -> dict[str, Any] | None:
    """Choose compiler options for a program that runs too rarely to be optimized.

    ``level`` is the optimization level. At 1, convolutions run ten times as fast as at
    0, and a loss with its gradient takes 1.5 times as long to compile. Returns None for
    a platform without such options.
    """
    if platform != "cpu":
        return None
    options: dict[str, Any] = {
        "xla_backend_optimization_level": level,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    if jax.__version_info__ < (0, 11):  # JAX 0.10 still has the older emitters
        options["xla_cpu_use_fusion_emitters"] = False
    return options
