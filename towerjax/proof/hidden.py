"""What do the params of an equation hold, and what program stands in code there?"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.sharding import Mesh, Sharding

# Primitives of JAX's own whose params hold code: of derivatives, of partitioning, of
# how a random key is made, or of what the equation shows as a jaxpr too.
_TRUSTED = frozenset(
    "checkpoint composite core_map custom_jvp_call custom_lin custom_partitioning "
    "custom_vjp_call custom_vmap_call inspect_sharding linear_call mpmd_map "
    "pallas_call pure_callback random_bits random_fold_in random_gamma random_seed "
    "random_split random_unwrap random_wrap reduce reduce_window remat2 remat_opt "
    "run_state scan select_and_gather_add select_and_scatter_add".split()
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
