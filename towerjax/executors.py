"""How are towers run? shard_map, pmap, vmap or scan over devices and local towers.

The only file that names these; `placement` says where the towers are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jaxlib.mlir.passmanager import PassManager

from towerjax.placement import (
    DEVICE_AXIS,
    LOCAL_AXIS,
    SPECS,
    Placement,
    TowerAxes,
)
from towerjax.reduce import add_pairwise
from towerjax.types import Layout, PyTree

_PMAP_AXES = {Layout.MIRRORED: None, Layout.PER_TOWER: 0, Layout.PER_TOWER_STEPS: 1}


def over_devices(
    device_fn: Callable[..., PyTree],
    placement: Placement,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
) -> Callable[..., PyTree]:
    """``device_fn`` on every device at once, as a function of global values.

    Args:
      device_fn: Sees each ``PER_TOWER`` value's own rows and each ``MIRRORED``
        value whole; may communicate over ``DEVICE_AXIS`` when there are several
        devices.
      placement: Which devices, and by which executor.
      in_layouts: A prefix tree of layouts for each argument.
      out_layouts: A prefix tree of layouts for the result.

    Returns:
      A function of global values, to be compiled by `jit_on_devices`.
    """
    if placement.num_devices == 1:
        return device_fn
    if placement.executor == "pmap":
        return _over_devices_by_pmap(device_fn, placement, in_layouts, out_layouts)
    specs = jax.tree.map(SPECS.get, (tuple(in_layouts), out_layouts))
    return jax.shard_map(
        device_fn,
        mesh=placement.mesh,
        in_specs=specs[0],
        out_specs=specs[1],
        # True would sum gradients over towers by itself, and refuses plain user
        # code; what it proved, towerjax.proof proves.
        check_vma=False,
    )


def _over_devices_by_pmap(
    device_fn: Callable[..., PyTree],
    placement: Placement,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
) -> Callable[..., PyTree]:
    """The legacy path: the same global function by ``jax.pmap``.

    Sizes are written out and never -1, which an array without elements would not tell.
    """
    num_devices = placement.num_devices

    def split(layout: Layout, tree: PyTree) -> PyTree:
        axis = _PMAP_AXES[layout]
        if axis is None:
            return tree

        def reshape(x: jax.Array) -> jax.Array:
            dims = (num_devices, x.shape[axis] // num_devices)
            return x.reshape(x.shape[:axis] + dims + x.shape[axis + 1 :])

        return jax.tree.map(reshape, tree)

    def join(layout: Layout, tree: PyTree) -> PyTree:
        axis = _PMAP_AXES[layout]
        if axis is None:
            return tree

        def reshape(x: jax.Array) -> jax.Array:
            rows = x.shape[axis] * x.shape[axis + 1]
            return x.reshape(x.shape[:axis] + (rows,) + x.shape[axis + 2 :])

        return jax.tree.map(reshape, tree)

    def global_fn(*args: PyTree) -> PyTree:
        args = tuple(jax.tree.map(split, tuple(in_layouts), args))
        out = _pmapped(device_fn, placement, in_layouts, out_layouts, args)
        return jax.tree.map(join, out_layouts, out)

    return global_fn


def _pmapped(
    device_fn: Callable[..., PyTree],
    placement: Placement,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
    args: tuple[PyTree, ...],
) -> PyTree:
    axes: list[int | None] = []

    def add_axes(layout: Layout, part: PyTree) -> None:
        axes.extend(_PMAP_AXES[layout] for _ in jax.tree.leaves(part))

    jax.tree.map(add_axes, tuple(in_layouts), args)
    leaves, treedef = jax.tree.flatten(args)
    # One axis a leaf: JAX takes in_axes of as many entries as there are leaves for
    # that, even where one argument has no leaves and another has several.
    mapped = jax.pmap(
        lambda *leaves: device_fn(*jax.tree.unflatten(treedef, leaves)),
        axis_name=DEVICE_AXIS,
        in_axes=tuple(axes),
        out_axes=jax.tree.map(_PMAP_AXES.get, out_layouts),
        devices=list(placement.jax_devices),
    )
    return mapped(*leaves)


def trace_one_tower(
    device_fn: Callable[..., PyTree],
    axes: TowerAxes,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
    args: Sequence[PyTree],
) -> tuple[Any, PyTree]:
    """The jaxpr of ``device_fn`` on a mesh of ``axes.num_devices`` absent devices.

    Args:
      device_fn: As for `over_devices`, written for ``axes``.
      axes: One tower a device (``Placement.abstract_axes``).
      in_layouts: A prefix tree of layouts for each argument.
      out_layouts: A prefix tree of layouts for the result.
      args: Arrays or ``jax.ShapeDtypeStruct`` trees; only shapes are read.

    Returns:
      The closed jaxpr, which holds one ``shard_map`` equation, and the result's
      shapes.
    """
    mesh = AbstractMesh(
        (axes.num_devices,), (DEVICE_AXIS,), axis_types=(AxisType.Auto,)
    )
    specs = jax.tree.map(SPECS.get, (tuple(in_layouts), out_layouts))
    mapped = jax.shard_map(
        device_fn, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )
    return jax.make_jaxpr(mapped, return_shape=True)(*shapes_of(args))


def shapes_of(tree: PyTree) -> PyTree:
    """The tree with each array replaced by the shape and dtype it has on a device."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(shape_of, tree)


def jit_on_devices(
    fn: Callable[..., PyTree],
    placement: Placement,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
    *,
    donate: bool,
) -> Any:
    """``jax.jit`` of a global function with each value where its layout says.

    Args:
      fn: As `over_devices` returns it.
      placement: Which devices.
      in_layouts: A prefix tree of layouts for each argument.
      out_layouts: A prefix tree of layouts for the result.
      donate: May the result take over the first argument's buffers?

    Returns:
      The jitted function, to be lowered and compiled.
    """
    return jax.jit(
        fn,
        in_shardings=placement.shardings(tuple(in_layouts)),
        out_shardings=placement.shardings(out_layouts),
        donate_argnums=(0,) if donate else (),
    )


def lower_on_devices(traced: Any, placement: Placement) -> Any:
    """The traced program lowered; of towers in turn, in the same form on any devices.

    For several devices XLA inlines calls and merges equal operations before anything
    else. For one device it first rewrites operations by how often their operands are
    used (a division by what is used once becomes a product with the inverse), and then
    bits depend on ``D``. So for one device that is done here.

    Args:
      traced: What `jit_on_devices` returned, traced.
      placement: Which devices.

    Returns:
      The lowered program, to be compiled.
    """
    lowered = traced.lower()
    if placement.local == "scan" and placement.num_devices == 1:
        module = lowered.compiler_ir("stablehlo")
        with module.context:
            passes = PassManager.parse("builtin.module(inline,symbol-dce,cse)")
            passes.run(module.operation)
    return lowered


def stack_on_devices(trees: Sequence[PyTree], placement: Placement) -> PyTree:
    """Batches that lie on the devices, stacked there.

    Args:
      trees: ``K`` pytrees of arrays ``[B, ...]`` of layout ``PER_TOWER``.
      placement: Which devices.

    Returns:
      Leaves ``[K, B, ...]`` of layout ``PER_TOWER_STEPS``.
    """
    sharding = placement.sharding(Layout.PER_TOWER_STEPS)
    return jax.tree.map(lambda *leaves: _stack(leaves, sharding=sharding), *trees)


@functools.partial(jax.jit, static_argnames="sharding")
def _stack(leaves: tuple[jax.Array, ...], *, sharding: Any) -> jax.Array:
    return lax.with_sharding_constraint(jnp.stack(leaves), sharding)


def first_tower_of_device(axes: TowerAxes) -> jax.Array:
    """The id of the first local tower, ``()`` int32, inside a device function."""
    if not axes.device_axis:
        return jnp.int32(0)
    return lax.axis_index(DEVICE_AXIS).astype(jnp.int32) * axes.num_local


def over_local_towers(
    tower_fn: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    axes: TowerAxes,
    per_tower: PyTree,
    *,
    stack_sums: bool,
) -> tuple[PyTree, PyTree]:
    """``tower_fn`` for each tower of this device.

    Args:
      tower_fn: ``(tower_id, its values) -> (sums, kept)``.
      axes: How many local towers there are, and whether they run in turn.
      per_tower: Leaves ``[k, ...]``, row ``l`` for local tower ``l``.
      stack_sums: Keep each tower's ``sums`` apart, as ``[k, ...]``? Otherwise
        they are added here, and under ``in_turn`` never held side by side.

    Returns:
      ``sums`` (added, or ``[k, ...]``) and ``kept`` with leaves ``[k, ...]``.
    """
    first = first_tower_of_device(axes)
    if axes.num_local == 1 and not (axes.in_turn and stack_sums):
        # A vmap of one would still turn convolutions into grouped ones.
        sums, kept = tower_fn(first, jax.tree.map(lambda x: x[0], per_tower))
        kept = jax.tree.map(lambda x: jnp.asarray(x)[None], kept)
        return (jax.tree.map(lambda x: x[None], sums) if stack_sums else sums), kept
    ids = first + jnp.arange(axes.num_local, dtype=jnp.int32)
    if not axes.in_turn:
        sums, kept = jax.vmap(tower_fn, axis_name=LOCAL_AXIS)(ids, per_tower)
        return (sums if stack_sums else jax.tree.map(_add_rows, sums)), kept
    if stack_sums:
        if axes.num_local == 1 and axes.platform == "cpu":
            return _map_of_one(tower_fn, ids, per_tower)
        return lax.map(lambda row: _alone(tower_fn, *row), (ids, per_tower))
    return _running_sum(tower_fn, ids, per_tower)


def over_local_towers_sharing(
    tower_fn: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree, PyTree]],
    axes: TowerAxes,
    per_tower: PyTree,
) -> tuple[PyTree, PyTree, PyTree]:
    """As `over_local_towers` with ``stack_sums``, and with what all towers share.

    Args:
      tower_fn: ``(tower_id, its values) -> (sums, kept, shared)``; what is shared is
        the same on every tower.
      axes: How many local towers there are, and whether they run in turn.
      per_tower: Leaves ``[k, ...]``, row ``l`` for local tower ``l``.

    Returns:
      ``sums`` and ``kept`` with leaves ``[k, ...]``, and ``shared`` as it is: on a
      lone tower the very values, without an operation between.
    """
    if axes.num_local == 1 and not axes.in_turn:
        first = first_tower_of_device(axes)
        own = jax.tree.map(lambda x: x[0], per_tower)
        sums, kept, shared = tower_fn(first, own)
        sums, kept = jax.tree.map(lambda x: jnp.asarray(x)[None], (sums, kept))
        return sums, kept, shared

    def paired(tower_id: jax.Array, own: PyTree) -> tuple[PyTree, PyTree]:
        sums, *others = tower_fn(tower_id, own)
        return sums, tuple(others)

    sums, (kept, shared) = over_local_towers(paired, axes, per_tower, stack_sums=True)
    return sums, kept, jax.tree.map(lambda x: x[0], shared)


def _alone(tower_fn: Callable[..., PyTree], tower_id: jax.Array, row: PyTree) -> PyTree:
    """One tower's program, fused with nothing that depends on how many are here."""
    tower_id, row = lax.optimization_barrier((tower_id, row))
    return lax.optimization_barrier(tower_fn(tower_id, row))


def _map_of_one(
    tower_fn: Callable[..., PyTree], ids: jax.Array, per_tower: PyTree
) -> PyTree:
    """``lax.map`` over one tower, compiled as it would be over several.

    XLA:CPU drops a loop of one trip, and barriers before it fuses; then a tower's
    sums are added in another order than in a loop, and bits depend on ``D``. So the
    number of trips is one that the compiler cannot know, and rows are a part of more.
    """
    row = jax.tree.map(lambda x: x[0], (ids, per_tower))
    shapes = jax.eval_shape(tower_fn, *row)
    zeros = jax.tree.map(lambda s: jnp.zeros((1, *s.shape), s.dtype), shapes)
    count = 1 + jnp.minimum(ids[0], 0)
    rows = jax.tree.map(lambda x: jnp.concatenate([x, x]), (ids, per_tower))

    def body(i: jax.Array, done: PyTree) -> PyTree:
        out = _alone(tower_fn, *jax.tree.map(lambda x: x[i], rows))
        return jax.tree.map(lambda all_of_them, x: all_of_them.at[i].set(x), done, out)

    return lax.fori_loop(0, count, body, zeros)


def _add_rows(x: jax.Array) -> jax.Array:
    # A sum over what a product has made XLA:CPU fuses with it, and then makes both
    # element by element: 2 to 5 times slower than additions.
    return add_pairwise(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x.sum(axis=0)


def _running_sum(
    tower_fn: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    ids: jax.Array,
    per_tower: PyTree,
) -> tuple[PyTree, PyTree]:
    """One tower after another, holding one tower's sums at a time."""
    row = jax.tree.map(lambda x: x[0], (ids, per_tower))
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(tower_fn, *row)[0]
    )

    def body(total: PyTree, row: PyTree) -> tuple[PyTree, PyTree]:
        sums, kept = tower_fn(*row)
        return jax.tree.map(jnp.add, total, sums), kept

    return lax.scan(body, zeros, (ids, per_tower))
