"""Work around a fault of XLA where it splits what a scatter writes to."""

from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from towerjax.proof.equation import open_jaxpr
from towerjax.proof.interpreter import as_call, with_programs


def hold_scattered(jaxpr: Any) -> Any:
    """A jaxpr, closed or not, of which each scatter's operand is behind a barrier.

    XLA writes to one index of an array that it splits within a tower on every device,
    and where the index is not of the device's part, it writes what it has read there.
    If it has cut the part out of the whole, it merges the two slices and reads another
    place, until JAX 0.12: https://github.com/openxla/xla/issues/49121.
    """

    def behind_barrier(eqn: JaxprEqn) -> JaxprEqn:
        if not eqn.primitive.name.startswith("scatter"):
            return with_programs(eqn, hold_scattered)

        def scatter(operand: jax.Array, *rest: jax.Array) -> Any:
            operand = lax.optimization_barrier(operand)
            return eqn.primitive.bind(operand, *rest, **eqn.params)

        return as_call(eqn, scatter)

    body = open_jaxpr(jaxpr)
    eqns = [*map(behind_barrier, body.eqns)]
    if all([a is b for a, b in zip(eqns, body.eqns, strict=True)]):
        return jaxpr
    new = body.replace(eqns=eqns)
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)
