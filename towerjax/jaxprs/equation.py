"""Read one equation of a jaxpr: its axes, inner jaxprs, hidden code and source line."""

import functools
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.core
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    primitives,
)
from jax.sharding import Mesh, PartitionSpec, Sharding

from towerjax.jaxprs import tags

# Primitives of JAX whose params hold functions that hide nothing: those of derivatives,
# of partitioning or of random keys, or code that the params hold as a jaxpr, too.
_TRUSTED = frozenset(
    "checkpoint composite core_map custom_jvp_call custom_lin custom_partitioning "
    "custom_vjp_call custom_vmap_call debug_callback inspect_sharding jit linear_call "
    "mpmd_map pallas_call pure_callback random_bits random_fold_in random_gamma "
    "random_seed random_split random_unwrap random_wrap reduce reduce_window remat2 "
    "remat_opt run_state scan select_and_gather_add select_and_scatter_add".split()
)
# Primitives that depend on their operands alone: their params hold no code, no jaxpr
# and no axis.
_PLAIN_NAMES = """
    abs acos acosh add add_jaxvals and argmax argmin asin asinh atan atan2 atanh
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex concatenate conj
    conv_general_dilated convert_element_type cos cosh cumlogsumexp cummax cummin
    cumprod cumsum digamma div dot_general dynamic_slice dynamic_update_slice eq erf
    erf_inv erfc exp exp2 expm1 floor gather ge gt imag integer_pow iota is_finite le
    lgamma log log1p logistic lt max min mul ne neg nextafter not or pad
    population_count pow real reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod reduce_sum reduce_xor rem reshape rev round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice
    sort sqrt square squeeze sub tan tanh top_k transpose xor
"""
_KNOWN = vars(primitives)  # a version of JAX may lack some
PLAIN: frozenset[Primitive] = frozenset(
    _KNOWN[f"{name}_p"] for name in _PLAIN_NAMES.split() if f"{name}_p" in _KNOWN
)
"""Primitives into which no rule, and no walk through a program, has to look."""

_LEAF_TYPES = (str, bytes, int, float, complex, type(None), type, slice, range)
_LEAF_TYPES += (np.generic, np.ndarray, np.dtype, jax.Array)
_LEAF_TYPES += (jax.core.AbstractValue, Mesh, jax.sharding.AbstractMesh, Sharding)


def param_leaves(params: dict[str, Any]) -> list[Any]:
    """The jaxprs, plain values and functions inside the objects of params."""
    # One loop: it runs several times for each equation of a program.
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
    """Whether a function among an equation's params hides what the equation does."""
    if eqn.primitive in PLAIN or eqn.primitive.name in _TRUSTED:
        return False
    kinds = map(type, param_leaves(eqn.params))
    return _is_high(eqn.primitive) or not all(map(_is_leaf_type, kinds))


@functools.lru_cache(maxsize=512)
def _is_high(primitive: Primitive) -> bool:
    """Whether a hijax class defines what a primitive does."""
    has_class = type(primitive).to_lojax is not Primitive.to_lojax
    return has_class or primitive.name.startswith("call_hi_primitive")


def given_name(eqn: JaxprEqn) -> str | None:
    """The name that ``checkpoint_name`` gives a value, if this equation does."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    high: Any = eqn.params.get("_prim")  # with jax_remat3
    return high.name if type(high).__name__.startswith("CheckpointName") else None


# What a function raises if it cannot take tracers, JAX's own errors included.
_UNTRACEABLE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, NotImplementedError, RecursionError, TypeError, ValueError),
)


def trace_hidden(eqn: JaxprEqn, sizes: Mapping[str, int]) -> ClosedJaxpr | None:
    """The jaxpr of the code that a primitive hides; None if it cannot be traced."""
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
        return None  # It needs arrays, a device, or an axis: what it does is unknown.
    return hidden if len(hidden.out_avals) == len(eqn.outvars) else None


REDUCTIONS = frozenset(
    "psum psum_invariant pmax pmin unreduced_psum unreduced_pmax unreduced_pmin "
    "all_gather all_gather_invariant all_gather_reduced pbroadcast".split()
)
"""Collectives whose result is the same on all towers."""

SUMS = frozenset("psum psum_invariant unreduced_psum".split())
"""Those of `REDUCTIONS` that add up: a value that towers share counts ``T`` times."""

EXTREMES = frozenset("pmax pmin unreduced_pmax unreduced_pmin".split())
"""Those of `REDUCTIONS` that take the largest or smallest: copies change nothing."""

# Output i is operand i; some have an `axes` param, but none communicates.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    mulhi ne neg nextafter not one_minus_square or polygamma population_count pow
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh xor zeta""".split()
)
"""Primitives that compute each element from the elements at its place, or numbers."""

IDENTITIES = (
    "optimization_barrier pvary pcast preduced vary_unreduced_cast_p "
    "vary_unreduced_cast reduced_vary_cast_p reduced_vary_cast device_put copy "
    "sharding_constraint name"
).split()

# Primitives whose code no jaxpr shows, because it is in another language or on another
# device. Their results may differ even if the operands are the same.
_FOREIGN = frozenset(
    "ffi_call call_exported buffer_callback cudnn_fusion custom_fusion "
    "tpu_custom_call mosaic_gpu_p triton_kernel_call rng_uniform "
    "dma_start dma_wait psend precv get_barrier_semaphore semaphore_read "
    "semaphore_signal semaphore_signal_multicast semaphore_signal_parallel "
    "semaphore_wait multimem_load_reduce multimem_store".split()
)
# Effects on Refs, which are values of the program itself.
_HARMLESS_EFFECTS = frozenset(
    "InternalMutableArrayEffect ReadEffect WriteEffect AccumEffect".split()
)


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that a collective names."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple([axis for axis in axes if isinstance(axis, str)]) if axes else ()


def manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    """The axes of the mesh that a `shard_map` maps over."""
    name = "newly_manual_axes"
    return frozenset(eqn.params[name if name in eqn.params else "manual_axes"])


def axes_of_dims(spec: PartitionSpec) -> list[tuple[Any, ...]]:
    """The axes over which each dim is split, by number: a spec may be no iterable."""
    dims = [spec[i] for i in range(len(spec))]
    return [x if isinstance(x, tuple) else (x,) for x in dims]


def names_in(spec: PartitionSpec) -> set[str]:
    """The axes along which a value of a `shard_map` may differ."""
    return {*spec.unreduced, *[name for part in axes_of_dims(spec) for name in part]}


def meshes_of(eqn: JaxprEqn) -> list[Any]:
    """The meshes among the params of an equation that have at least one axis."""
    leaves = [getattr(x, "mesh", x) for x in param_leaves(eqn.params)]
    kinds = Mesh, jax.sharding.AbstractMesh
    return [x for x in leaves if isinstance(x, kinds) and x.axis_names]


def is_foreign(eqn: JaxprEqn, axis: str | None) -> bool:
    """Whether results may differ between towers although the operands are the same.

    True for side effects, for foreign code, and for an unknown primitive with the
    towers' axis among its params.
    """
    name = eqn.primitive.name
    if _is_high(eqn.primitive):
        return False  # its code is looked at
    effects = {type(effect).__name__ for effect in eqn.effects} - _HARMLESS_EFFECTS
    named = [x for x in param_leaves(eqn.params) if isinstance(x, str)]
    is_known = name in _FOREIGN or name.startswith("thunky.")
    return bool(effects) or is_known or axis in named


def groups(eqn: JaxprEqn, size: int) -> Any:
    """The ``axis_index_groups`` of a collective; None if one group has all towers."""
    given = eqn.params.get("axis_index_groups")
    if given is None or len(given) > 1:
        return given
    # With one tower, a group of one may stand for all towers or for each alone.
    return None if len(given[0]) == size > 1 else given


def is_full(eqn: JaxprEqn, size: int) -> bool:
    """Whether a ppermute sends a value to every tower; the others get zeros."""
    return len({target for _, target in eqn.params["perm"]}) == size


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The inner jaxprs that run when an equation runs."""
    return [open_jaxpr(x) for x in jaxprs_in_params(eqn)]


def jaxprs_in_params(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    """The inner jaxprs of `sub_jaxprs`, with their constants."""
    if eqn.primitive in PLAIN:
        return []
    params = eqn.params
    if "_prim" in params:
        return [x for x in [program_of_class(params["_prim"])] if x is not None]
    if eqn.primitive.name == "custom_linear_solve":  # the others are for derivatives
        params = {"solve": params["jaxprs"].solve}
    return [x for x in param_leaves(params) if isinstance(x, (Jaxpr, ClosedJaxpr))]


def program_of_class(high: Any) -> Jaxpr | ClosedJaxpr | None:
    """The program of `jax.checkpoint`, `jax.custom_jvp` or `jax.custom_vjp`.

    With ``jax_remat3``, ``jax_custom_jvp3`` and ``jax_custom_vjp3`` these are objects
    of JAX's own classes. For any other object it is None.
    """
    kind = type(high)
    if not kind.__module__.startswith("jax."):
        return None
    if kind.__name__ == "RematTraced":
        return high.jaxpr
    if kind.__name__ in ("CustomJVPTraced", "CustomVJPTraced"):
        return high.traced.jaxpr
    return None


def all_jaxprs(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr | ClosedJaxpr]:
    """A jaxpr and the jaxprs inside it."""
    yield jaxpr
    for eqn in open_jaxpr(jaxpr).eqns:
        for inner in () if eqn.primitive in PLAIN else jaxprs_in_params(eqn):
            yield from all_jaxprs(inner)


def all_eqns(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of its inner jaxprs."""
    return (eqn for each in all_jaxprs(jaxpr) for eqn in open_jaxpr(each).eqns)


def all_sites(
    jaxpr: Jaxpr | ClosedJaxpr,
    *,
    enter: Callable[[JaxprEqn], bool] = lambda eqn: True,
    plain: bool = False,
    outer: "Site | None" = None,
) -> list["Site"]:
    """The site of each equation of a jaxpr, and of the inner jaxprs that are entered.

    ``enter(eqn)``: whether to enter the jaxprs inside an equation. ``plain``: whether
    equations of `PLAIN` primitives are listed, too.
    """
    sites: list[Site] = []
    for eqn in open_jaxpr(jaxpr).eqns:
        if plain or eqn.primitive not in PLAIN:
            sites.append(site := (eqn, outer))
            for inner in jaxprs_in_params(eqn) if enter(eqn) else ():
                sites += all_sites(inner, enter=enter, plain=plain, outer=site)
    return sites


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The jaxpr of a closed jaxpr; since JAX 0.12 both are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def needed_eqns(
    eqns: Sequence[Any],
    results: Iterable[Any],
    always: Iterable[Any] = (),
) -> list[Any]:
    """The equations, in order, that ``results`` depend on or that ``always`` run."""
    wanted = {x for x in results if not isinstance(x, Literal)}
    runs = set(map(id, always))
    needed = []
    for eqn in reversed(eqns):
        if id(eqn) in runs or not wanted.isdisjoint(eqn.outvars):
            needed.append(eqn)
            wanted |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return needed[::-1]


def loop_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """The number of constants and the number of carries of a scan."""
    if "ft_in" in eqn.params:  # JAX 0.12
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return consts, carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


_CALLS = "jit eval_jaxpr checkpoint remat2 custom_jvp_call custom_vjp_call scan".split()


def forwarded_inputs(jaxpr: Jaxpr, given: Sequence[Any]) -> list[Any]:
    """For each output, the entry of ``given`` that it is, passed on unchanged, or None.

    ``given`` has an entry for each input. Calls and scans are looked into.
    """
    forwarded = dict(zip(map(id, jaxpr.invars), given, strict=True))
    for eqn in jaxpr.eqns:
        inner = sub_jaxprs(eqn) if eqn.primitive.name in _CALLS else []
        hidden = trace_hidden(eqn, {}) if is_hidden(eqn) else None
        if hidden is not None:  # with jax_remat3
            inner = [open_jaxpr(hidden)]
        if inner:
            inside = [forwarded.get(id(x)) for x in eqn.invars]
            if eqn.primitive.name == "scan":  # only xs can be passed on, as ys
                once = sum(loop_sizes(eqn))
                inside[:once] = [None] * once
            outside = forwarded_inputs(inner[0], inside)
            forwarded |= zip(map(id, eqn.outvars), outside, strict=True)
    return [forwarded.get(id(x)) for x in jaxpr.outvars]


def refs(eqn: JaxprEqn) -> list[Any]:
    """The operands that are Refs, which the equation may write."""
    kinds = [type(var.aval).__name__ for var in eqn.invars]
    return list(filter(is_ref, eqn.invars)) if _REF in kinds else []


def is_ref(var: Any) -> bool:
    """Whether a variable is a Ref, which a program may write."""
    return type(var.aval).__name__ == _REF


_REF = "AbstractRef"


Site: TypeAlias = tuple[JaxprEqn, Any]
"""An equation, and the site of the equation around it, or None."""

_PACKAGE = Path(__file__).parents[1]
_LIBRARY = ("<frozen", f"{sysconfig.get_path('stdlib')}/", f"{_PACKAGE}/")


def outwards(site: Site | None) -> Iterator[JaxprEqn]:
    """The equation of a site, then those around it."""
    while site is not None:
        eqn, site = site
        yield eqn


def scopes_of(site: Site) -> list[str]:
    """The name scopes around a site's equation, the outermost first."""
    stacks = [x.source_info.name_stack.stack for x in outwards(site)]
    return [
        (tags.TRANSPOSED if x.name == "transpose" else "")
        if type(x).__name__ == "Transform"
        else x.name
        for stack in stacks[::-1]
        for x in stack
    ]


def user_line(site: Site | None) -> str:
    """The innermost line of user code around an equation; "" if there is none."""
    for eqn in outwards(site):
        traceback = eqn.source_info.traceback
        for frame in traceback.frames if traceback is not None else ():
            if not is_library(frame.file_name):
                return format_line(frame.file_name, frame.line_num, frame.function_name)
    return ""


def is_in_mean(eqn: JaxprEqn) -> bool:
    """Whether a sum is part of a `jax.lax.pmean`, which divides it."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return "pmean" in [frame.function_name for frame in frames]


def is_library(file: str) -> bool:
    """Whether a file belongs to Python, an installed package or towerjax itself."""
    library = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return bool(library) or file.startswith(_LIBRARY)


def format_line(file: str, line: int, function: str) -> str:
    """A text for a line of code, such as "train.py:12 (loss_fn)"."""
    path = Path(file)
    here = Path.cwd()
    below = path.is_relative_to(here)
    path = path.relative_to(here if below else path.parent.parent)
    inside = f" ({function.split('<locals>.')[-1]})" if function else ""
    return f"{path}:{line}{inside}"


def arrays_in(jaxpr: ClosedJaxpr) -> Iterator[jax.Array]:
    """The arrays that are constants or literals of a jaxpr and its inner jaxprs."""
    for each in all_jaxprs(jaxpr):
        body = open_jaxpr(each)
        yield from getattr(each, "consts", ())
        for var in [*(v for eqn in body.eqns for v in eqn.invars), *body.outvars]:
            if isinstance(var, Literal) and np.ndim(var.val):
                yield var.val
