"""Replace equations of a jaxpr, and the programs inside them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives

from towerjax.proof.equation import PLAIN


def as_call(
    eqn: JaxprEqn, fn: Callable[..., Any], axes: Sequence[tuple[str, int]] = ()
) -> JaxprEqn:
    """A call of ``fn``, in which ``axes`` are bound, in place of an equation."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    closed = jax.make_jaxpr(fn, axis_env=[*axes])(*shapes)
    return eqn.replace(
        primitive=primitives.closed_call_p,
        params={"call_jaxpr": closed},
        effects=closed.effects,
    )


def with_programs(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """An equation with ``change(jaxpr)`` for each jaxpr in its params; or itself."""
    if eqn.primitive in PLAIN:
        return eqn
    params = {key: _changed(value, change) for key, value in eqn.params.items()}
    if all([params[key] is value for key, value in eqn.params.items()]):
        return eqn
    return eqn.replace(params=params)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return change(value)
    if not isinstance(value, tuple):
        return value
    parts = [_changed(part, change) for part in value]
    if all([a is b for a, b in zip(parts, value, strict=True)]):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
