"""Evaluate a jaxpr equation by equation, or replace equations by others."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, primitives
from jax.extend.source_info_util import current_name_stack, user_context

from towerjax.jaxprs.primitives import PLAIN
from towerjax.jaxprs.sites import user_line


class Interpreter:
    """The values of a jaxpr, while a caller evaluates its equations."""

    def __init__(self, body: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]):
        self.values: dict[Any, Any] = dict(zip(body.invars, inputs, strict=True))
        self.values |= dict(zip(body.constvars, consts, strict=True))

    def read(self, var: Any) -> Any:
        """The value of a variable or a literal."""
        return var.val if isinstance(var, Literal) else self.values[var]

    def evaluate(self, eqn: Any, operands: list[Any] | None = None) -> None:
        """Evaluate an equation and store its results; ``operands`` replace its own."""
        if operands is None:
            operands = []
            for x in eqn.invars:  # this calls no function, because there are many
                operands.append(x.val if isinstance(x, Literal) else self.values[x])
        try:
            results = evaluate_eqn(eqn, operands)
        except NotImplementedError as error:
            error.add_note(f"{eqn.primitive} at {user_line((eqn, None))}.")
            raise
        self.values.update(zip(eqn.outvars, results, strict=True))


def evaluate_eqn(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation for ``operands``, in its `eqn_context`."""
    params = eqn.primitive.get_bind_params(eqn.params)
    at = eqn.source_info
    names = current_name_stack() + at.name_stack
    with user_context(at.traceback, name_stack=names), eqn.ctx.manager:
        out = eqn.primitive.bind(*operands, **params)
    return out if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """A context for tracing with an equation's line, name stack and JAX settings."""
    at = eqn.source_info
    names = current_name_stack() + at.name_stack
    with user_context(at.traceback, name_stack=names), eqn.ctx.manager:
        yield


def as_call(
    eqn: JaxprEqn, fn: Callable[..., Any], axes: Sequence[tuple[str, int]] = ()
) -> JaxprEqn:
    """An equation that calls ``fn``, in place of ``eqn``; ``axes`` are bound in it."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    closed = jax.make_jaxpr(fn, axis_env=[*axes])(*shapes)
    return eqn.replace(
        primitive=primitives.closed_call_p,
        params={"call_jaxpr": closed},
        effects=closed.effects,
    )


def with_programs(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """The equation, with ``change(jaxpr)`` in place of each jaxpr in its params."""
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
