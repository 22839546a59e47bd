"""Run a program on several devices by shard_map or pmap.

Only this file and `towerjax.tools` call shard_map or pmap. The towers of one device are
run by `tower_axis`.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, use_abstract_mesh

from towerjax.jaxprs.sites import arrays_in
from towerjax.jaxprs.tags import DEVICE_AXIS, LOCAL_AXIS
from towerjax.lowering.scatters import hold_indexed
from towerjax.lowering.sharded_values import Shards
from towerjax.mesh.placement import SPECS, Placement, TowerAxes
from towerjax.mesh.private_jax import bind_axis, without_axis
from towerjax.types import Layout, PyTree
from towerjax.types.notes import says
from towerjax.types.trees import has_tracers, key_data, shapes_of

_IN_TOWER = "towerjax_in_tower"
_MERGING = "towerjax_merging"
_HAVE_NO_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_PMAP_AXES = {Layout.MIRRORED: None, Layout.PER_TOWER: 0, Layout.PER_TOWER_STEPS: 1}


def over_devices(
    device_fn: Callable[..., PyTree],
    placement: Placement,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
    *,
    traced: tuple[ClosedJaxpr, PyTree] | None = None,
    shards: Shards | None = None,
) -> Callable[..., PyTree]:
    """Run ``device_fn`` on every device, as a function of global values.

    ``traced`` is the jaxpr of ``device_fn`` on one of the devices, with the shapes of
    its results. ``shards`` says which mirrored leaves devices take and return as
    shards: ``device_fn`` gets a `Shard` for each of these, and may return one.
    """
    if placement.num_devices > 1 or placement.within:
        device_fn = _trace_in_mesh(device_fn, placement, traced, shards)
    if placement.num_devices == 1:
        return device_fn
    if placement.executor == "pmap":
        return _over_devices_by_pmap(device_fn, placement, in_layouts, out_layouts)
    specs = jax.tree.map(SPECS.get, (tuple(in_layouts), out_layouts))
    if shards is not None:
        specs = shards.specs(specs)
    return jax.shard_map(
        device_fn,
        mesh=placement.mesh_in_trace,
        in_specs=specs[0],
        out_specs=specs[1],
        axis_names={DEVICE_AXIS},
        # With True, JAX would sum gradients over towers by itself and refuse some plain
        # user code. `towerjax.prover` proves what this option checks.
        check_vma=False,
    )


def vmap_members(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Map ``fn`` over dim 0 of all arguments, which runs over members or towers.

    Members are the trainings of a sweep.
    """
    return jax.vmap(fn)


def _trace_in_mesh(
    device_fn: Callable[..., PyTree],
    placement: Placement,
    traced: tuple[ClosedJaxpr, PyTree] | None,
    shards: Shards | None,
) -> Callable[..., PyTree]:
    """Trace ``device_fn`` outside of the mesh, and run its jaxpr inside.

    Inside a mesh, values have other types than under ``jit``, and libraries that
    compare types refuse them. So ``device_fn`` is traced with the name of the device
    axis only, and its jaxpr runs in the mesh. A given ``traced`` is this jaxpr. A tower
    of several devices sees only the mesh of its own devices.
    """
    mesh = placement.tower_mesh

    def run(*args: PyTree) -> PyTree:
        if shards is None and traced is not None:
            jaxpr, out = traced
        else:
            fn = device_fn if shards is None else shards.around(device_fn)
            size = placement.num_devices
            jaxpr, out = _trace_on_one(fn, size, shapes_of(args), mesh)
        leaves = jax.tree.leaves(args)
        same = contextlib.nullcontext()
        try:
            with use_abstract_mesh(mesh) if placement.within else same:
                if placement.within:
                    jaxpr = hold_indexed(jaxpr, placement)
                values = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *leaves)
        except Exception as error:
            kinds = _kinds_in_mesh(arrays_in(jaxpr))
            if not kinds or not says(error, "Mesh for all inputs"):
                raise
            raise ValueError(
                "A tower function closes over arrays that lie in a mesh, such as"
                f" another state's parameters: {kinds}. Pass them to"
                " call_for_each_tower as arguments; to a step give them in the batch,"
                " tj.Whole(teacher), as step.init(..., extra=teacher), or close over"
                " jax.device_get(teacher)."
            ) from error
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return run


def closed_over_kinds(jaxpr: ClosedJaxpr) -> str:
    """Write the types of those constants of a jaxpr that lie in a mesh.

    The text is "" if there are none.
    """
    return _kinds_in_mesh(x for x in arrays_in(jaxpr) if not has_tracers(x))


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class Static:
    """A value that is not an array, as a pytree without leaves.

    A traced function can return one beside its arrays.
    """

    value: Any


def _kinds_in_mesh(constants: Iterable[PyTree]) -> str:
    types = [jax.typeof(x) for x in constants if isinstance(x, jax.Array)]
    kinds = {x.str_short() for x in types if not x.sharding.mesh.empty}
    return ", ".join(sorted(kinds)[:4])


def _over_devices_by_pmap(
    device_fn: Callable[..., PyTree],
    placement: Placement,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
) -> Callable[..., PyTree]:
    """Run ``device_fn`` on every device by ``jax.pmap``, the legacy path.

    Sizes are always given, because ``reshape`` cannot infer -1 for an array without
    elements.
    """
    num_devices = placement.num_devices

    def split(x: jax.Array, axis: int) -> jax.Array:
        dims = (num_devices, x.shape[axis] // num_devices)
        return x.reshape(x.shape[:axis] + dims + x.shape[axis + 1 :])

    def join(x: jax.Array, axis: int) -> jax.Array:
        rows = x.shape[axis] * x.shape[axis + 1]
        return x.reshape(x.shape[:axis] + (rows,) + x.shape[axis + 2 :])

    def global_fn(*args: PyTree) -> PyTree:
        args = tuple(jax.tree.map(_at_axis(split), tuple(in_layouts), args))
        layouts = jax.tree.leaves(jax.tree.broadcast(tuple(in_layouts), args))
        leaves, treedef = jax.tree.flatten(args)
        # The mapped function takes leaves, and ``in_axes`` has one entry for each of
        # them. With trees JAX misreads ``in_axes`` if it has as many entries as there
        # are leaves, but one argument has no leaves and another has several.
        mapped = jax.pmap(
            lambda *leaves: device_fn(*jax.tree.unflatten(treedef, leaves)),
            axis_name=DEVICE_AXIS,
            in_axes=tuple(map(_PMAP_AXES.get, layouts)),
            out_axes=jax.tree.map(_PMAP_AXES.get, out_layouts),
            devices=list(placement.jax_devices),
        )
        return jax.tree.map(_at_axis(join), out_layouts, mapped(*leaves))

    return global_fn


def _at_axis(fn: Callable[[Any, int], Any]) -> Callable[[Layout, PyTree], PyTree]:
    """Apply ``fn(x, axis)`` to each leaf that is split over devices.

    ``axis`` is the dim of devices; mirrored leaves stay as they are.
    """

    def of_tree(layout: Layout, tree: PyTree) -> PyTree:
        axis = _PMAP_AXES[layout]
        return tree if axis is None else jax.tree.map(lambda x: fn(x, axis), tree)

    return of_tree


def trace_one_tower(
    device_fn: Callable[..., PyTree],
    axes: TowerAxes,
    in_layouts: Sequence[PyTree],
    args: Sequence[PyTree],
) -> tuple[ClosedJaxpr, PyTree]:
    """Trace ``device_fn`` as one of ``axes.num_devices`` devices, without a device.

    ``args`` are the shapes of global values. Returns the jaxpr, and the shapes of its
    results.
    """

    def part(x: jax.ShapeDtypeStruct, axis: int) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        shape[axis] //= axes.num_devices
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    shapes = jax.tree.map(_at_axis(part), tuple(in_layouts), tuple(args))
    return _trace_on_one(device_fn, axes.num_devices, shapes, axes.mesh)


def _trace_on_one(
    device_fn: Callable[..., PyTree],
    num_devices: int,
    args: Sequence[PyTree],
    mesh: AbstractMesh,
) -> tuple[ClosedJaxpr, PyTree]:
    """Trace ``device_fn`` as one of several devices, inside the tower's mesh."""
    env = [(DEVICE_AXIS, num_devices)]
    # With a single group of devices, the device axis is not manual. It is hidden here,
    # because it is no axis of a tower.
    with use_abstract_mesh(mesh), without_axis(DEVICE_AXIS):
        return jax.make_jaxpr(device_fn, axis_env=env, return_shape=True)(*args)


def is_inside_tower() -> bool:
    """Return whether a tower function or a merge function is being traced."""
    return any(map(_is_bound, (_IN_TOWER, DEVICE_AXIS, LOCAL_AXIS)))


def is_of_one_tower(value: PyTree) -> bool:
    """Return whether ``value`` is traced in a tower function.

    The result is False in a merge function, which is called in the tower function.
    """
    return has_tracers(value) and is_in_tower_fn()


def is_in_tower_fn() -> bool:
    """Return whether a tower function is being traced, and no merge function in it."""
    return is_inside_tower() and not _is_bound(_MERGING)


def in_merge_fn() -> contextlib.AbstractContextManager[None]:
    """Open the context in which a merge function runs."""
    return bind_axis(_MERGING)


def _is_bound(axis: str) -> bool:
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


# Each entry has the type of an error in a tower function, a pattern of its text, and
# the note to add to it.
_NOTES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    (
        _HAVE_NO_VALUE,
        "",
        "A tower function is traced once for all towers, so tower.id, the batch and"
        " what is computed from them have no values yet. Write jnp.where or lax.cond;"
        " to see values, jax.debug.print('{{}}', x). To pick by tower.id, write"
        " jnp.asarray(values)[tower.id].",
    ),
    (
        TypeError,
        r"\b(Weighted|Means)\b",
        "A tower's mean is a sum and a weight, and no number before all towers are"
        " added up. tj.value_and_grad(loss_fn) differentiates it; as a number take"
        " tower.reduce(tj.Reduction.SUM, mean).value, or .value in a later pass of"
        " tj.build_step.",
    ),
    (
        (RuntimeError, ValueError),
        "requires a non-empty mesh|is not found in mesh",
        "A tower function knows the axes of a tower of several devices:"
        " tj.Mirrored(within={{'model': 2}}).",
    ),
    # In JAX 0.10 to 0.12 a function made by jax.shard_map stays bound to its first
    # mesh.
    (
        ValueError,
        "should match the mesh passed to shard_map",
        "What jax.shard_map returns stays with the first mesh that it meets, and towers"
        " on other devices have another: call jax.shard_map in the tower function.",
    ),
    (
        NameError,
        r"unbound axis name: ([^\s.]+)",
        "Towers know the axis {0!r} by a strategy that names it,"
        " tj.Mirrored(axis_name={0!r}), or as tower.axis_names; without any, write"
        " tower.reduce(tj.Reduction.SUM, x), or return tj.Sum(x), which the step adds.",
    ),
)


@contextlib.contextmanager
def in_tower_fn() -> Iterator[None]:
    """Explain errors of a tower function, which runs within this ``with`` block."""
    try:
        with bind_axis(_IN_TOWER):
            yield
    except Exception as error:
        for kinds, pattern, note in _NOTES:
            match = says(error, pattern) if isinstance(error, kinds) else None
            if match is not None:
                error.add_note(note.format(*match.groups()))
                break
        raise


def fingerprint_of_program(
    traced: jax.stages.Traced, lowered: jax.stages.Lowered
) -> str:
    """Join a program's text and a hash of the constants that it does not show."""
    digest = hashlib.sha256()
    for array in arrays_in(traced.jaxpr):
        array = key_data(array)
        # Arrays that are split over processes are left out: one process cannot read
        # them, and JAX itself requires processes to agree on them.
        if getattr(array, "is_fully_addressable", True) or array.is_fully_replicated:
            digest.update(np.asarray(array).tobytes())
    return f"{lowered.as_text()}{digest.hexdigest()}"
