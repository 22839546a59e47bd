"""Place the leaves of pytrees on devices, and read them back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from towerjax.mesh.placement import Placement, whole_on
from towerjax.mesh.private_jax import is_tracing, put
from towerjax.mesh.processes import processes_of
from towerjax.types import Layout, PyTree
from towerjax.types.refusals import listed, refuse_unheld
from towerjax.types.trees import (
    has_tracers,
    held_dtype,
    is_key,
    is_traced,
    key_data,
    like_key,
    named_leaves,
    sorted_keys,
)

# XLA:CPU shares a host array whose address is a multiple of _ALIGNED, without a copy.
# Below _SMALL bytes a program copies its argument fastest by itself. From _LARGE bytes
# on NumPy copies fastest, because its memory pages are large.
_ALIGNED = 64
_SMALL = 2**17
_LARGE = 2**20


def refuse_leaked(root: str, tree: PyTree) -> None:
    """Raise for a tracer whose trace has ended."""
    with sorted_keys(root, tree):
        is_of_trace = has_tracers(tree)
    if is_of_trace and not is_tracing():
        named = named_leaves(root, tree)
        leaked = [name for name, x in named if isinstance(x, Tracer)]
        raise ValueError(
            f"{listed(leaked)} has no value, because a traced function computed it and"
            " put it aside, in a list, a global or an attribute. Return it from the"
            " function instead; a loss function returns it as tj.TowerOutput(loss,"
            " metrics={...})."
        )


def refuse_traced(root: str, tree: PyTree) -> None:
    """Raise if a step is called with a tracer; a step places and donates arrays."""
    refuse_leaked(root, tree)
    if has_tracers(tree):
        raise ValueError(
            "A step must be called from Python, but JAX traces its arguments. Inside"
            " jax.jit, scan, vmap or grad write step.fn(state, batch) of a train step."
            " If a traced function put a value aside, return it from that function."
        )


def place(
    tree: PyTree, placement: Placement, layouts: PyTree, params: PyTree = None
) -> PyTree:
    """Copy the first process's values to the devices; the copy may be donated.

    All processes that own the devices call this.
    """
    refuse_unheld("value", tree)
    if is_traced(tree):
        return jax.tree.map(jnp.asarray, tree)
    leaves, treedef = jax.tree.flatten(tree)
    on_host = [i for i, leaf in enumerate(leaves) if not _is_global(leaf)]
    if on_host and placement.num_processes > 1:
        on_each_host = [copy_to_host(key_data(leaves[i])) for i in on_host]
        kinds = ", ".join(f"{x.dtype}{list(x.shape)}" for x in on_each_host)
        advice = "Run the same program on every process."
        what = "The value to place on devices"
        processes = placement.processes
        processes.require_same(what, f"{treedef}: {kinds}", advice)
        sent = processes.from_first(on_each_host)
        for i, first in zip(on_host, sent, strict=True):
            leaves[i] = like_key(first, leaves[i])
    return place_own(jax.tree.unflatten(treedef, leaves), placement, layouts, params)


def place_own(
    tree: PyTree, placement: Placement, layouts: PyTree, params: PyTree = None
) -> PyTree:
    """Copy each process's own values to its devices.

    It does not communicate, so a prefetch thread may call it.
    """
    placement.require_present()
    shardings = placement.shardings(layouts, tree, params)
    if placement.num_processes == 1:
        return jax.device_put(jax.tree.map(copy_to_host, tree), shardings)
    return jax.tree.map(_place_on_processes, tree, shardings)


def copy_to_host(leaf: Any) -> Any:
    """Copy a leaf to NumPy, in a dtype that devices hold; a key stays a key."""
    if is_key(leaf):  # copy() of a key would compile a program
        data = key_data(leaf)
        # A single process cannot copy a global array to devices, so the copy stays on
        # the host.
        if _is_global(data):
            on_host: Any = np.array(readable(data))
            return like_key(on_host, leaf)
        return like_key(jax.device_put(data, data.sharding, may_alias=False), leaf)
    if isinstance(leaf, jax.Array):
        return np.array(readable(leaf))
    return np.array(leaf, dtype=held_dtype(np.asarray(leaf).dtype))


def _is_global(leaf: Any) -> bool:
    is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return is_placed and not leaf.is_fully_addressable


def is_split(leaf: Any) -> bool:
    """Return whether processes hold different shards of the leaf.

    No process can then read all of it.
    """
    return _is_global(leaf) and not leaf.is_fully_replicated


def readable(leaf: Any) -> Any:
    """Replicate a leaf that was split, so that each process can read it."""
    if not is_split(leaf):
        return leaf
    mirrored = whole_on(leaf.sharding.mesh)
    with processes_of(leaf).says_if_alone("a value of all towers is read"):
        return wait_on_cpus(_reshard(leaf, sharding=mirrored))


_wrap_key_data = jax.jit(jax.random.wrap_key_data, static_argnames="impl")


def _place_on_processes(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Make a global array; this process places the shards of its own devices only."""
    if is_key(leaf):
        data = _place_on_processes(jax.random.key_data(leaf), sharding)
        return _wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if _is_global(leaf):
        if leaf.sharding.device_set == sharding.device_set:
            return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    host = copy_to_host(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def has_sharding(x: Any, sharding: NamedSharding) -> bool:
    """Return whether ``x`` is a JAX array with this sharding."""
    is_array = isinstance(x, jax.Array)
    return is_array and x.sharding.is_equivalent_to(sharding, x.ndim)


def place_rows(tree: PyTree, placement: Placement, layout: Layout) -> PyTree:
    """Place the rows of a batch on the devices of their towers.

    Rows on the host are copied, because a loader may write into its buffer again.
    """
    if placement.num_processes > 1:
        return place_own(tree, placement, layout)
    placement.require_present()
    sharding = placement.sharding(layout)
    return jax.tree.map(lambda x: _place_rows_of(x, sharding), tree)


def _place_rows_of(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array):
        return x if has_sharding(x, sharding) else jax.device_put(x, sharding)
    x = np.asarray(x)
    dtype = held_dtype(x.dtype)
    # XLA cannot copy an array without elements, or one shard to several devices. Such
    # an array is copied here, aligned, and then shared.
    has_copies = len(sharding.mesh.axis_names) > 1
    if not 0 < x.nbytes < _LARGE or has_copies:
        return put(_copy_aligned(x, dtype), sharding, shared=True)
    # The memory order must be C, because XLA cannot copy an array whose elements share
    # memory, such as a result of ``broadcast_to``.
    return put(x.astype(dtype, order="C", copy=False), sharding)


def _copy_aligned(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    size = x.size * dtype.itemsize
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.__array_interface__["data"][0] % _ALIGNED
    copy = room[start : start + size].view(dtype).reshape(x.shape)
    np.copyto(copy, x, casting="unsafe")
    return copy


def argument_converter(x: Any, sharding: NamedSharding) -> Callable[[Any], Any] | None:
    """Make a function that turns an array like ``x`` into a program's argument.

    Returns None if such an array can be passed as it is.
    """
    # On one device, the program itself places a small host array faster than `put`. So
    # it gets a copy in NumPy.
    if not isinstance(x, jax.Array) and sharding.num_devices == 1 and x.nbytes < _SMALL:
        return functools.partial(np.array, dtype=held_dtype(x.dtype))
    if has_sharding(x, sharding):
        return None
    return functools.partial(_place_rows_of, sharding=sharding)


def place_own_rows(tree: PyTree, placement: Placement) -> PyTree:
    """Make global arrays, to which each process gives the rows of its own towers."""
    placement.require_present()
    sharding = placement.sharding(Layout.PER_TOWER)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, copy_to_host(x)),
        tree,
    )


def wait_on_cpus(out: PyTree) -> PyTree:
    """Wait for ``out`` if it lies on several CPU devices, and return it.

    `bound_in_flight` says why.
    """
    for x in jax.tree.leaves(out):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            devices = x.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                x.block_until_ready()
    return out


def on_neighbours(tree: PyTree, placement: Placement, other: Placement) -> PyTree:
    """Move arrays of ``placement`` to its rotated devices, ``other``.

    A device that holds a part of an array itself, such as all of a replicated one,
    keeps its own copy. Other parts move from the device before it, within a process.
    """
    pairs = [*zip(placement.jax_devices, other.jax_devices, strict=True)]

    moved = dict[int, jax.Array]()

    def move(x: jax.Array) -> jax.Array:
        held = {piece.device: piece for piece in x.addressable_shards}
        pieces = []
        for before, device in pairs:
            if device in held:
                is_same = held[device].index == held[before].index
                piece = held[device if is_same else before]
                pieces.append(jax.device_put(piece.data, device))
        sharding = other.sharding_like(x.sharding)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    def move_once(x: jax.Array) -> jax.Array:
        if id(x) not in moved:
            moved[id(x)] = like_key(move(key_data(x)), x)
        return moved[id(x)]

    return jax.tree.map(move_once, tree)


def on_every_process(tree: PyTree, placement: Placement) -> PyTree:
    """Replicate a tree, so that each process can read all of it."""
    if placement.num_processes == 1:
        return tree
    mirrored = placement.sharding(Layout.MIRRORED)
    return wait_on_cpus(_reshard(tree, sharding=mirrored))


@functools.partial(jax.jit, static_argnames="sharding")
def _reshard(tree: PyTree, *, sharding: NamedSharding) -> PyTree:
    return jax.lax.with_sharding_constraint(tree, sharding)
