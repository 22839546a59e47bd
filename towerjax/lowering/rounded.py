"""Find whether values that all towers share are rounded to few bits.

A value that all towers of a device share has one gradient for all of them. If the value
has fewer bits than gradients have, such as bfloat16, this gradient has few bits, too.
Then a sum of many small numbers stops growing, and a sum of large numbers overflows. On
one device this happens sooner than on several.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.jaxprs.flow import dependents, inner_programs
from towerjax.types.trees import widen_dtype


def rounds_shared_values(
    program: ClosedJaxpr, per_tower: Sequence[Any], trained: Sequence[Any], axis: str
) -> bool:
    """Look for a value that all towers share and that is rounded to few bits.

    ``per_tower`` tells for each input whether it is per tower, and ``trained`` whether
    a gradient is taken by it. ``axis`` is the axis of all towers.
    """
    avals: list[Any] = [var.aval for var in trained]
    if any(_has_few_bits(x.dtype) for x in avals):
        return True
    return _rounds(program.jaxpr, set(per_tower), axis)


def _rounds(body: Jaxpr, per_tower: set[Any], axis: str) -> bool:
    differ = dependents(body, per_tower, axis)

    def is_own(var: Any) -> bool:
        return not isinstance(var, Literal) and var in differ

    for eqn in body.eqns:
        if _is_rounding(eqn) and not is_own(eqn.invars[0]):
            return True
        if eqn.primitive.name == "while":
            continue  # it has no backward derivative
        reads_own = any(map(is_own, eqn.invars))
        for inner in inner_programs(eqn):
            values = zip(inner.operands, inner.carried, strict=True)
            are_own = [
                reads_own if operand is None else is_own(operand) or is_own(after)
                for operand, after in values
            ]
            inputs = zip(inner.jaxpr.invars, are_own, strict=True)
            if _rounds(inner.jaxpr, {x for x, differs in inputs if differs}, axis):
                return True
    return False


def _is_rounding(eqn: JaxprEqn) -> bool:
    """Return whether a floating value is cast to fewer bits than gradients have."""
    if eqn.primitive.name != "convert_element_type":
        return False
    aval: Any = eqn.invars[0].aval
    is_floating = jnp.issubdtype(aval.dtype, jnp.inexact)
    return is_floating and _has_few_bits(eqn.params["new_dtype"])


def _has_few_bits(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and widen_dtype(dtype) != dtype
