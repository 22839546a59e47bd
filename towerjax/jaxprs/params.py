"""Read an equation's params: its axes, inner jaxprs, and code that a function hides."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.sharding import Mesh, PartitionSpec, Sharding

from towerjax.jaxprs.primitives import FOREIGN, PLAIN, TRUSTED

_LEAF_TYPES = (str, bytes, int, float, complex, type(None), type, slice, range)
_LEAF_TYPES += (np.generic, np.ndarray, np.dtype, jax.Array)
_LEAF_TYPES += (jax.core.AbstractValue, Mesh, jax.sharding.AbstractMesh, Sharding)


def param_leaves(params: dict[str, Any]) -> list[Any]:
    """List the jaxprs, plain values and functions inside an equation's params."""
    # This is called several times per equation, so a loop is used: recursion is slower.
    leaves = []
    todo = [*params.values()][::-1]
    seen = set()
    while todo:
        x = todo.pop()
        kind = type(x)
        if _is_leaf_type(kind) or callable(x) or hasattr(x, "call_wrapped"):
            leaves.append(x)
        elif id(x) not in seen:
            seen.add(id(x))
            parts = x if kind in (tuple, list) else _parts(x)
            todo += parts[::-1]
    return leaves


@functools.cache
def _is_leaf_type(kind: type) -> bool:
    return issubclass(kind, (Jaxpr, ClosedJaxpr, *_LEAF_TYPES))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict | Mapping):
        return [*value, *value.values()]
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, jax.tree_util.PyTreeDef):
        return [*(value.node_data() or ()), *value.children()]
    names = [*getattr(value, "__dict__", ())]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [getattr(value, name) for name in names if hasattr(value, name)]


def is_hidden(eqn: JaxprEqn) -> bool:
    """Return whether a function in an equation's params hides what the equation does.

    No jaxpr in the params shows it; the function must be traced to find out.
    """
    if eqn.primitive in PLAIN or eqn.primitive.name in TRUSTED:
        return False
    kinds = map(type, param_leaves(eqn.params))
    return _is_high(eqn.primitive) or not all(map(_is_leaf_type, kinds))


@functools.lru_cache(maxsize=512)
def _is_high(primitive: Primitive) -> bool:
    """Return whether a primitive's code is in a class of JAX's "hijax" types."""
    has_class = type(primitive).to_lojax is not Primitive.to_lojax
    return has_class or primitive.name.startswith("call_hi_primitive")


def given_name(eqn: JaxprEqn) -> str | None:
    """Read the name that an equation of `checkpoint_name` gives; else None."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    high: Any = eqn.params.get("_prim")  # present under the flag jax_remat3 only
    return high.name if type(high).__name__.startswith("CheckpointName") else None


# A function that cannot take tracers raises one of these. JAX's own errors are
# subclasses of them.
_UNTRACEABLE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, NotImplementedError, RecursionError, TypeError, ValueError),
)


def trace_hidden(eqn: JaxprEqn, sizes: Mapping[str, int]) -> ClosedJaxpr | None:
    """Trace the code that a primitive hides in its params; return None if that fails.

    ``sizes`` has the size of each mesh axis that the code may use.
    """
    primitive = eqn.primitive
    code: Callable = primitive.to_lojax if _is_high(primitive) else primitive.impl
    avals: list[Any] = [v.aval for v in eqn.invars]
    try:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        hidden = jax.make_jaxpr(
            lambda *operands: code(*operands, **eqn.params),
            axis_env=list(sizes.items()),
        )(*shapes)
    except _UNTRACEABLE:
        return None  # the code needs arrays, a device, or an axis that is not there
    return hidden if len(hidden.out_avals) == len(eqn.outvars) else None


# These are effects on Refs only. The analysis follows a Ref like any other value.
_HARMLESS_EFFECTS = frozenset(
    "InternalMutableArrayEffect ReadEffect WriteEffect AccumEffect".split()
)


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Read the mesh axes that a collective names."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple([axis for axis in axes if isinstance(axis, str)]) if axes else ()


def manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    """Read the mesh axes that a `shard_map` maps over.

    Any other axis of the mesh is left to the compiler.
    """
    name = "newly_manual_axes"
    return frozenset(eqn.params[name if name in eqn.params else "manual_axes"])


def axes_of_dims(spec: PartitionSpec) -> list[tuple[Any, ...]]:
    """List, for each dim of a value, the mesh axes over which the dim is split."""
    # Some versions of JAX have specs that are not iterable.
    dims = [spec[i] for i in range(len(spec))]
    return [x if isinstance(x, tuple) else (x,) for x in dims]


def names_in(spec: PartitionSpec) -> set[str]:
    """Collect the mesh axes that a spec names: a value may differ along these."""
    return {*spec.unreduced, *[name for part in axes_of_dims(spec) for name in part]}


def meshes_of(eqn: JaxprEqn) -> list[Any]:
    """List the meshes in an equation's params, without meshes that have no axis."""
    leaves = [getattr(x, "mesh", x) for x in param_leaves(eqn.params)]
    kinds = Mesh, jax.sharding.AbstractMesh
    return [x for x in leaves if isinstance(x, kinds) and x.axis_names]


def is_foreign(eqn: JaxprEqn, axis: str | None) -> bool:
    """Decide whether results may differ between towers although operands are equal.

    They may after a side effect, in code that is no JAX program, and in an unknown
    primitive that names the towers' axis in its params.
    """
    name = eqn.primitive.name
    if _is_high(eqn.primitive):
        return False  # the analysis traces its code, and judges what is in there
    effects = {type(effect).__name__ for effect in eqn.effects} - _HARMLESS_EFFECTS
    named = [x for x in param_leaves(eqn.params) if isinstance(x, str)]
    is_known = name in FOREIGN or name.startswith("thunky.")
    return bool(effects) or is_known or axis in named


def groups(eqn: JaxprEqn, size: int) -> Any:
    """Read the ``axis_index_groups`` of a collective; None for one group of all.

    ``size`` is the number of towers.
    """
    all_groups = eqn.params.get("axis_index_groups")
    if all_groups is None or len(all_groups) > 1:
        return all_groups
    # For one tower, a group of one may mean "all towers" or "each tower alone", so the
    # groups are returned.
    return None if len(all_groups[0]) == size > 1 else all_groups


def is_full(eqn: JaxprEqn, size: int) -> bool:
    """Return whether a ``ppermute`` sends a value to every tower.

    A tower to which none is sent gets 0.
    """
    return len({target for _, target in eqn.params["perm"]}) == size


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Take the jaxpr out of a closed jaxpr; since JAX 0.12 both are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """List the inner jaxprs that run when an equation runs, without constants."""
    return [open_jaxpr(x) for x in jaxprs_in_params(eqn)]


def jaxprs_in_params(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """List the inner jaxprs that run when an equation runs, with constants."""
    if eqn.primitive in PLAIN:
        return []
    params = eqn.params
    if "_prim" in params:
        return [x for x in [program_of_class(params["_prim"])] if x is not None]
    if eqn.primitive.name == "custom_linear_solve":  # others serve derivatives
        params = {"solve": params["jaxprs"].solve}
    return [x for x in param_leaves(params) if isinstance(x, (Jaxpr, ClosedJaxpr))]


def program_of_class(high: Any) -> Jaxpr | ClosedJaxpr | None:
    """Find the program of `jax.checkpoint`, `custom_jvp` or `custom_vjp`.

    ``high`` is an equation's param "_prim". With the flags ``jax_remat3``,
    ``jax_custom_jvp3`` or ``jax_custom_vjp3`` it is an object of one of JAX's own
    classes, which holds the program. For any other object the result is None.
    """
    kind = type(high)
    if not kind.__module__.startswith("jax."):
        return None
    if kind.__name__ == "RematTraced":
        return high.jaxpr
    if kind.__name__ in ("CustomJVPTraced", "CustomVJPTraced"):
        return high.traced.jaxpr
    return None


def loop_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Count the constants and the carries of a `scan`."""
    if "ft_in" in eqn.params:  # JAX 0.12
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return consts, carry
    return eqn.params["num_consts"], eqn.params["num_carry"]
