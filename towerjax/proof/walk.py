"""How is a program evaluated one equation after another? In each one's own name."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.extend.source_info_util import current_name_stack, user_context


class Walk:
    """The values of a jaxpr that is evaluated equation by equation."""

    def __init__(self, closed: Any, inputs: Sequence[Any]) -> None:
        self.values: dict[Any, Any] = dict(
            zip(closed.jaxpr.invars, inputs, strict=True)
        )
        self.values |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(self, var: Any) -> Any:
        """The value of a variable or a literal."""
        return var.val if isinstance(var, Literal) else self.values[var]

    def evaluate(self, eqn: Any, operands: list[Any] | None = None) -> None:
        """Evaluate an equation."""
        operands = [self.read(x) for x in eqn.invars] if operands is None else operands
        self.values.update(zip(eqn.outvars, evaluated(eqn, operands), strict=True))


def evaluated(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """What an equation gives for operands, in its line's name."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with as_written(eqn):
        out = eqn.primitive.bind(*operands, **params)
    return out if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def as_written(eqn: Any) -> Iterator[None]:
    """In the name of an equation's line, with the settings that it was traced with."""
    names = current_name_stack() + eqn.source_info.name_stack
    where = user_context(eqn.source_info.traceback, name_stack=names)
    with where, eqn.ctx.manager:
        yield
