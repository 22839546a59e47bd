"""How does a program run on several devices? By shard_map or pmap, and jit.

The only file that names these; `placement` says where the towers are, and
`one_axis` how those of one device run.
"""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jax import lax

from towerjax.mesh.placement import (
    DEVICE_AXIS,
    LOCAL_AXIS,
    SPECS,
    Placement,
    TowerAxes,
)
from towerjax.mesh.private_jax import inline_and_merge, with_axis
from towerjax.proof.equation import arrays_in
from towerjax.types import Layout, PyTree
from towerjax.types.leaves import has_tracers, held_dtype

_MEETING = "towerjax_meeting"
_HAVE_NO_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_PMAP_AXES = {Layout.MIRRORED: None, Layout.PER_TOWER: 0, Layout.PER_TOWER_STEPS: 1}


def over_devices(
    device_fn: Callable[..., PyTree],
    placement: Placement,
    in_layouts: Sequence[PyTree],
    out_layouts: PyTree,
) -> Callable[..., PyTree]:
    """``device_fn`` on every device at once, as a function of global values."""
    if placement.num_devices == 1:
        return device_fn
    device_fn = _without_mesh(device_fn, placement)
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


def over_members(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """``fn`` of several trainings, or towers: of all arguments, dim 0 is theirs."""
    return jax.vmap(fn)


def _without_mesh(
    device_fn: Callable[..., PyTree], placement: Placement
) -> Callable[..., PyTree]:
    """``device_fn``, traced as on one device: with a named axis and no mesh.

    In a mesh values are of other types than under ``jit``, and libraries that compare
    types refuse them.
    """

    def run(*args: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(args)
        env = [(DEVICE_AXIS, placement.num_devices)]
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            traced, out = jax.make_jaxpr(device_fn, axis_env=env, return_shape=True)(
                *jax.tree.unflatten(treedef, [shapes_of(x) for x in leaves])
            )
        try:
            values = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *leaves)
        except Exception as error:
            _explain_meshes(arrays_in(traced), error)
            raise
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return run


def _explain_meshes(constants: Iterable[Any], error: Exception) -> None:
    """Raise what to write where two meshes meet, that of a constant and the towers'."""
    kinds = _kinds_in_a_mesh(constants)
    if kinds and "Mesh for all inputs" in str(error):
        raise ValueError(
            "A tower function closes over arrays that lie in a mesh, such as another"
            f" state's parameters: {kinds}. Pass them to call_for_each_tower as"
            " arguments; to a step give them in the batch, tj.Shared(teacher), as"
            " step.init(..., extra=teacher), or close over jax.device_get(teacher)."
        ) from error


def closed_over(jaxpr: Any) -> str:
    """Of which kinds are the arrays in a mesh that are constants of it? Else ""."""
    return _kinds_in_a_mesh(x for x in arrays_in(jaxpr) if not has_tracers(x))


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What is known of a call besides its program; compared by identity."""

    first: Any  # the call that was traced
    closes_over: str

    def refuse_again(self, call: Any) -> None:
        """Raise where another call would have constants of the first one."""
        if self.closes_over and self.first is not call:
            raise ValueError(
                "A tower function closes over arrays that a strategy has placed, such"
                " as a variable's value, or gets them in an object that is no pytree:"
                f" {self.closes_over}. It was traced with those of its first call, and"
                " is called again. Pass them as arguments, of fn(tower, variable):"
                " strategy.call_for_each_tower(fn, variable); or in the carry of"
                " run_steps_on_dataset."
            )


def _kinds_in_a_mesh(constants: Iterable[Any]) -> str:
    types = [jax.typeof(x) for x in constants if isinstance(x, jax.Array)]
    kinds = {x.str_short() for x in types if not x.sharding.mesh.empty}
    return ", ".join(sorted(kinds)[:4])


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
        # One axis a leaf: JAX takes in_axes of as many entries as there are leaves for
        # that, even where one argument has no leaves and another has several.
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
    """``fn(x, axis)`` of each leaf ``x`` whose layout has an axis of devices."""

    def of_tree(layout: Layout, tree: PyTree) -> PyTree:
        axis = _PMAP_AXES[layout]
        return tree if axis is None else jax.tree.map(lambda x: fn(x, axis), tree)

    return of_tree


def trace_one_tower(
    device_fn: Callable[..., PyTree],
    axes: TowerAxes,
    in_layouts: Sequence[PyTree],
    args: Sequence[PyTree],
    *,
    args_of: int | None = None,
) -> tuple[Any, PyTree]:
    """The jaxpr of ``device_fn`` on one of ``axes.num_devices`` absent devices."""

    def part(x: jax.ShapeDtypeStruct, axis: int) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        shape[axis] //= args_of or axes.num_devices
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    shapes = jax.tree.map(_at_axis(part), tuple(in_layouts), tuple(shapes_of(args)))
    env = [(DEVICE_AXIS, axes.num_devices)]
    return jax.make_jaxpr(device_fn, axis_env=env, return_shape=True)(*shapes)


def is_inside_tower() -> bool:
    """Is a tower function or a merge function being traced?"""
    return _is_bound(DEVICE_AXIS) or _is_bound(LOCAL_AXIS)


def is_of_one_tower(value: PyTree) -> bool:
    """Is it of a tower function, and not of a merge function, which has all towers'?"""
    return has_tracers(value) and is_inside_tower() and not _is_bound(_MEETING)


def meeting() -> Any:
    """A context for a merge function."""
    return with_axis(_MEETING)


def _is_bound(axis: str) -> bool:
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


@contextlib.contextmanager
def tower_explained() -> Iterator[None]:
    """Around a tower function: says why ``if tower.id == 0`` or an axis cannot be."""
    try:
        yield
    except _HAVE_NO_VALUE as error:
        error.add_note(
            "A tower function is traced once for all towers: tower.id, the batch and"
            " what is computed of them have no values yet. Write jnp.where or lax.cond;"
            " to see values, jax.debug.print('{}', x). To pick by tower.id, write"
            " jnp.asarray(values)[tower.id]."
        )
        raise
    except NameError as error:
        if found := re.search(r"unbound axis name: ([^\s.]+)", str(error)):
            error.add_note(
                f"Towers know the axis {found[1]!r} by a strategy that names it,"
                f" tj.Mirrored(axis_name={found[1]!r}), or as tower.axis_names;"
                " without any, write tower.reduce(tj.Reduction.SUM, x), or return"
                " tj.Sum(x), which the step adds."
            )
        raise


def shapes_of(tree: PyTree) -> PyTree:
    """The tree with each array replaced by the shape and dtype it has on a device."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, held_dtype(x.dtype)), tree
    )


def lower_on_devices(traced: Any, placement: Placement) -> Any:
    """The traced program lowered; of towers in turn, in the same form on any devices.

    For several devices XLA inlines calls and merges equal operations before anything
    else. For one device it first rewrites operations by how often their operands are
    used (a division by what is used once becomes a product with the inverse), and then
    bits depend on ``D``. So for one device that is done here.
    """
    # JAX lowers for the default platform, which an absent one never is.
    absent = placement.absent and {"gpu": "cuda"}.get(placement.platform, "tpu")
    try:
        lowered = traced.lower(lowering_platforms=(absent,) if absent else None)
    except ValueError as error:
        if "ordered effects" in str(error):
            error.add_note(
                "Devices go at the same time, in no order: write ordered=False in"
                " jax.debug.print and callbacks, or take one device."
            )
        raise
    if placement.local == "scan" and placement.num_devices == 1:
        inline_and_merge(lowered)
    return lowered


def compile_on_devices(lowered: Any, placement: Placement) -> Any:
    """The lowered program compiled; where absent GPUs need it, by kernels of cuBLAS."""
    if placement.absent is None:
        return lowered.compile()
    with warnings.catch_warnings():
        # JAX keeps programs for absent devices on the disk, and cannot read them.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        return _compiled_for_absent(lowered)


def _compiled_for_absent(lowered: Any) -> Any:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "output tile sizes" not in str(error):
            raise
    # XLA chooses tiles before it knows whether they fit, and leaves it to trials on the
    # device to find others: openxla/xla, pull request 36792.
    warnings.warn(
        "No GPU is here to try kernels on, and XLA's own for a matrix product of this"
        " program does not fit: compiled for cuBLAS, xla_gpu_enable_triton_gemm=false.",
        stacklevel=3,
    )
    return lowered.compile({"xla_gpu_enable_triton_gemm": False})
