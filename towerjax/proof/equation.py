"""What does one equation of a jaxpr say of itself? Its axes, inner jaxprs and Refs."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

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
    """The mesh axes that a collective names.

    Args:
      eqn: Any equation.

    Returns:
      Names; under vmap, and in ``reduce_sum``, an axis is the number of a dimension,
      and is left out.
    """
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def is_foreign(eqn: JaxprEqn, towers: frozenset[str]) -> bool:
    """May its results differ between towers although its operands do not?

    True for side effects, for calls of code that is no jaxpr, and for an unknown
    primitive that has a tower axis among its params.

    Args:
      eqn: An equation without inner jaxprs that is no known collective.
      towers: The tower axes.

    Returns:
      Whether nothing may be said of its results.
    """
    name = eqn.primitive.name
    effects = {type(effect).__name__ for effect in eqn.effects} - _HARMLESS_EFFECTS
    if effects or name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES):
        return True
    return any(isinstance(x, str) and x in towers for x in _flat(eqn.params))


def num_towers(eqn: JaxprEqn) -> int:
    """How many meet over the named axes.

    Args:
      eqn: A collective.

    Returns:
      Their number; 0 where the mesh is not known.
    """
    aval: Any = eqn.invars[0].aval
    sizes = aval.sharding.mesh.shape
    return math.prod(sizes.get(name, 0) for name in named_axes(eqn))


def is_full(eqn: JaxprEqn) -> bool:
    """Does a ppermute give every tower a value? The others would get zeros.

    Args:
      eqn: A ``ppermute``.

    Returns:
      Whether each tower is a target.
    """
    return len({target for _, target in eqn.params["perm"]}) == num_towers(eqn)


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs inside an equation that run with it.

    Args:
      eqn: Any equation.

    Returns:
      Jaxprs, in the order of its params; none of those that are for derivatives.
    """
    params = dict(eqn.params)
    if eqn.primitive.name == "custom_linear_solve":  # the others are for derivatives
        params = {"solve": params["jaxprs"].solve}
    if "_prim" in params:  # JAX 0.12 keeps the params of some in an object
        inner = vars(params["_prim"])
        params |= {**inner, "params": inner.get("params", {})}
    return [open_jaxpr(x) for x in _flat(params) if isinstance(x, (Jaxpr, ClosedJaxpr))]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        yield value
        return
    for one in value:
        yield from _flat(one)


def open_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The jaxpr without its constants.

    Args:
      jaxpr: Closed or not.

    Returns:
      The open one.
    """
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def refs(eqn: JaxprEqn) -> list[Any]:
    """The operands that are memory, which the equation may write.

    Args:
      eqn: Any equation.

    Returns:
      Variables.
    """
    return [v for v in eqn.invars if type(v.aval).__name__ == "AbstractRef"]
