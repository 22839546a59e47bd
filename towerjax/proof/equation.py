"""What does one equation of a jaxpr say of itself? Axes, jaxprs, hidden code, line."""

import functools
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.core
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.sharding import Mesh, Sharding

# Primitives of JAX's own whose params hold code: of derivatives, of partitioning, of
# how a random key is made, or of what the equation shows as a jaxpr too.
_TRUSTED = frozenset(
    "checkpoint composite core_map custom_jvp_call custom_lin custom_partitioning "
    "custom_vjp_call custom_vmap_call debug_callback inspect_sharding linear_call "
    "mpmd_map pallas_call pure_callback random_bits random_fold_in random_gamma "
    "random_seed random_split random_unwrap random_wrap reduce reduce_window remat2 "
    "remat_opt run_state scan select_and_gather_add select_and_scatter_add".split()
)
_PLAIN = (str, bytes, int, float, complex, type(None), type, slice, range)
_PLAIN += (np.generic, np.ndarray, np.dtype, jax.Array)
_PLAIN += (jax.core.AbstractValue, Mesh, jax.sharding.AbstractMesh, Sharding)


def held(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Jaxprs, plain values and code, inside of whatever objects they are."""
    seen = set() if seen is None else seen
    if _is_plain(type(value)) or is_code(value):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _parts(value):
            yield from held(part, seen)


def is_code(value: Any) -> bool:
    """Is it a function, or an object that stands for one?"""
    is_callable = callable(value) or hasattr(value, "call_wrapped")
    return is_callable and not _is_plain(type(value))


@functools.cache
def _is_plain(kind: type) -> bool:
    return issubclass(kind, (Jaxpr, ClosedJaxpr, *_PLAIN))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
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
    """Is what it does written in code that it holds, whatever jaxprs are there too?"""
    if eqn.primitive.name in _TRUSTED:
        return False
    return _is_high(eqn) or any(map(is_code, held(eqn.params)))


def _is_high(eqn: JaxprEqn) -> bool:
    """Does a class of hijax say what it does, as an object or as the primitive?"""
    has_class = type(eqn.primitive).to_lojax is not Primitive.to_lojax
    return has_class or eqn.primitive.name.startswith("call_hi_primitive")


def opened(eqn: JaxprEqn, sizes: Mapping[str, int]) -> ClosedJaxpr | None:
    """The program of a primitive, traced from the code that says what it does."""
    code: Callable = eqn.primitive.to_lojax if _is_high(eqn) else eqn.primitive.impl
    avals: list[Any] = [v.aval for v in eqn.invars]
    try:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        program = jax.make_jaxpr(
            lambda *operands: code(*operands, **eqn.params),
            axis_env=list(sizes.items()),
        )(*shapes)
    except Exception:  # Code of anybody's, made for arrays perhaps: nothing is known.
        return None
    return program if len(program.out_avals) == len(eqn.outvars) else None


REDUCTIONS = frozenset(
    "psum psum_invariant pmax pmin unreduced_psum unreduced_pmax unreduced_pmin "
    "all_gather all_gather_invariant all_gather_reduced pbroadcast".split()
)
"""Of all towers' operands they make one value, which each tower has."""

SUMS = frozenset("psum psum_invariant unreduced_psum".split())
"""Those of `REDUCTIONS` that add up, so that what is the same counts ``T`` times."""

# Output i is operand i; some of these have an `axes` param, yet communicate nothing.
IDENTITIES = (
    "optimization_barrier pvary pcast preduced vary_unreduced_cast_p "
    "vary_unreduced_cast reduced_vary_cast_p reduced_vary_cast device_put copy "
    "sharding_constraint name"
).split()

# What they do stands in another language, or is done by another device: the program
# shows neither, so that their results may differ whatever goes in.
_FOREIGN = frozenset(
    "ffi_call call_exported buffer_callback cudnn_fusion custom_fusion "
    "tpu_custom_call mosaic_gpu_p triton_kernel_call rng_uniform "
    "dma_start dma_wait psend precv get_barrier_semaphore semaphore_read "
    "semaphore_signal semaphore_signal_multicast semaphore_signal_parallel "
    "semaphore_wait multimem_load_reduce multimem_store".split()
)
_FOREIGN_PREFIXES = ("thunky.",)
# Values of the program itself that are written in place.
_HARMLESS_EFFECTS = {
    "InternalMutableArrayEffect",
    "ReadEffect",
    "WriteEffect",
    "AccumEffect",
}


def named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes that a collective names."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def is_foreign(eqn: JaxprEqn, towers: frozenset[str]) -> bool:
    """May its results differ between towers although its operands do not?

    True for side effects, for calls of code that is no jaxpr, and for an unknown
    primitive that has a tower axis among its params.
    """
    name = eqn.primitive.name
    effects = {type(effect).__name__ for effect in eqn.effects} - _HARMLESS_EFFECTS
    if effects or name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES):
        return True
    return any(isinstance(x, str) and x in towers for x in held(eqn.params))


def groups(eqn: JaxprEqn, size: int) -> Any:
    """The groups in which towers meet."""
    given = eqn.params.get("axis_index_groups")
    if given is None or len(given) > 1:
        return given
    # On one tower nobody knows whether a group is of all or of each alone.
    return None if len(given[0]) == size > 1 else given


def is_full(eqn: JaxprEqn, size: int) -> bool:
    """Does a ppermute give every tower a value? The others would get zeros."""
    return len({target for _, target in eqn.params["perm"]}) == size


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs inside an equation that run with it."""
    return [open_jaxpr(x) for x in _inside(eqn)]


def _inside(eqn: JaxprEqn) -> list[Jaxpr | ClosedJaxpr]:
    params = eqn.params
    if eqn.primitive.name == "custom_linear_solve":  # the others are for derivatives
        params = {"solve": params["jaxprs"].solve}
    return [x for x in held(params) if isinstance(x, (Jaxpr, ClosedJaxpr))]


def all_eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from all_eqns(inner)


def arrays_in(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """The constants of a jaxpr and of those inside it, also where JAX wrote them in."""
    if isinstance(jaxpr, ClosedJaxpr):
        yield from jaxpr.consts
        jaxpr = jaxpr.jaxpr
    inside = [v for eqn in jaxpr.eqns for v in eqn.invars]
    for var in [*inside, *jaxpr.outvars]:
        if isinstance(var, Literal) and np.ndim(var.val):
            yield var.val
    for eqn in jaxpr.eqns:
        for inner in _inside(eqn):
            yield from arrays_in(inner)


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The jaxpr without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def loop_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants and how many carries a scan has."""
    if "ft_in" in eqn.params:  # JAX 0.12
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return consts, carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


_CALLS = "jit checkpoint remat2 custom_jvp_call custom_vjp_call scan".split()


def handed_on(jaxpr: Jaxpr, given: Sequence[Any]) -> list[Any]:
    """Which of those given each output is, handed on by calls and scans; else None."""
    found = dict(zip(map(id, jaxpr.invars), given, strict=True))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            inside = [found.get(id(x)) for x in eqn.invars]
            if eqn.primitive.name == "scan":  # all steps' rows of it are all of it
                once = sum(loop_sizes(eqn))
                inside[:once] = [None] * once
            outside = handed_on(sub_jaxprs(eqn)[0], inside)
            found |= zip(map(id, eqn.outvars), outside, strict=True)
    return [found.get(id(x)) for x in jaxpr.outvars]


def refs(eqn: JaxprEqn) -> list[Any]:
    """The operands that are memory, which the equation may write."""
    return [v for v in eqn.invars if type(v.aval).__name__ == "AbstractRef"]


Site: TypeAlias = tuple[JaxprEqn, Any]
"""An equation and the site of the one around it, or None."""

_PACKAGE = Path(__file__).parents[1]
_LIBRARY = ("<frozen", f"{sysconfig.get_path('stdlib')}/", f"{_PACKAGE}/")


def outwards(site: Site | None) -> Iterator[JaxprEqn]:
    """The equation of a site, then those around it."""
    while site is not None:
        eqn, site = site
        yield eqn


def line_of(site: Site | None) -> str:
    """The innermost line of the user's; library code inside jit has no such frame."""
    for eqn in outwards(site):
        traceback = eqn.source_info.traceback
        for frame in traceback.frames if traceback is not None else ():
            if not is_library(frame.file_name):
                return shown(frame.file_name, frame.line_num, frame.function_name)
    return ""


def is_library(file: str) -> bool:
    """Is it a file of Python's, of an installed package or of towerjax itself?"""
    library = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return bool(library) or file.startswith(_LIBRARY)


def shown(file: str, line: int, function: str) -> str:
    """A line of code as people call it."""
    path, here = Path(file), Path.cwd()
    below = path.is_relative_to(here)
    path = path.relative_to(here if below else path.parent.parent)
    inside = f" ({function.split('<locals>.')[-1]})" if function else ""
    return f"{path}:{line}{inside}"
