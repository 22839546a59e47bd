"""Evaluate a jaxpr equation by equation, in one part or in several."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    primitives,
)
from jax.extend.source_info_util import current_name_stack, user_context

from towerjax.jaxprs.flow import dependents, needed_eqns
from towerjax.jaxprs.primitives import PLAIN
from towerjax.jaxprs.sites import user_line


class Interpreter:
    """The values of a jaxpr, while a caller evaluates its equations."""

    def __init__(self, body: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]):
        self.values: dict[Any, Any] = dict(zip(body.invars, inputs, strict=True))
        self.values |= dict(zip(body.constvars, consts, strict=True))

    def read(self, var: Any) -> Any:
        """Return the value of a variable or a literal."""
        return var.val if isinstance(var, Literal) else self.values[var]

    def evaluate(self, eqn: Any, operands: list[Any] | None = None) -> None:
        """Evaluate an equation and store its results.

        ``operands``, if there are any, replace the values of the equation's own
        operands.
        """
        if operands is None:
            operands = []
            for x in eqn.invars:  # A call of `read` for each of many would be slower.
                operands.append(x.val if isinstance(x, Literal) else self.values[x])
        try:
            results = evaluate_eqn(eqn, operands)
        except NotImplementedError as error:
            error.add_note(f"{eqn.primitive} at {user_line((eqn, None))}.")
            raise
        self.values.update(zip(eqn.outvars, results, strict=True))


def evaluate_eqn(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of an equation for ``operands``, traced as at its own line.

    Its line, name stack and JAX settings are those of `eqn_context`.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    at = eqn.source_info
    names = current_name_stack() + at.name_stack
    with user_context(at.traceback, name_stack=names), eqn.ctx.manager:
        out = eqn.primitive.bind(*operands, **params)
    return out if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """Trace what is inside with an equation's line, name stack and JAX settings."""
    at = eqn.source_info
    names = current_name_stack() + at.name_stack
    with user_context(at.traceback, name_stack=names), eqn.ctx.manager:
        yield


def as_call(
    eqn: JaxprEqn, fn: Callable[..., Any], axes: Sequence[tuple[str, int]] = ()
) -> JaxprEqn:
    """Return an equation that calls ``fn``, to be put in the place of ``eqn``.

    ``axes`` are the names and sizes of mesh axes that ``fn`` may use.
    """
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    closed = jax.make_jaxpr(fn, axis_env=[*axes])(*shapes)
    return eqn.replace(
        primitive=primitives.closed_call_p,
        params={"call_jaxpr": closed},
        effects=closed.effects,
    )


def with_programs(eqn: JaxprEqn, change: Callable[[Any], Any]) -> JaxprEqn:
    """Return the equation with ``change(jaxpr)`` for each jaxpr in its params."""
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


class Parts:
    """A program in parts that run one after another; between two, values are supplied.

    A part ends at equations of the primitives ``ends``, whose results a later part is
    given. Equations of ``marks`` are identities: they mark values, and are passed
    through.

    Attributes:
      eqns: The program's equations, except those at which a part ends.
    """

    def __init__(
        self, program: ClosedJaxpr, ends: Collection[Primitive], marks: Primitive
    ) -> None:
        self.program = program
        self.eqns: list[JaxprEqn] = []
        self._marks = marks
        self._first_known: dict[Var, int] = {}  # the first part that knows a value
        self._ends: list[tuple[JaxprEqn, int]] = []  # equations, and the part they end
        self._kinds: dict[int, Primitive] = {}  # the primitive at which a part ends
        self._marked: dict[Var, Any] = {}
        for eqn in program.jaxpr.eqns:
            self._place(eqn, ends)

    def _place(self, eqn: JaxprEqn, ends: Collection[Primitive]) -> None:
        """Assign an equation to a part; note the first part that knows its results."""
        number = self.first_knowing(eqn.invars)
        kind = eqn.primitive
        if kind in ends:
            while self._kinds.setdefault(number, kind) is not kind:
                number += 1  # This part ends with equations of another primitive.
            self._ends.append((eqn, number))
            number += 1
        else:
            self.eqns.append(eqn)
        if kind is self._marks:
            self._marked.update(zip(eqn.outvars, eqn.invars, strict=True))
        self._first_known.update(dict.fromkeys(eqn.outvars, number))

    @property
    def last(self) -> int:
        """The number of the last part that ends at an equation; -1 if none does."""
        return max((number for _, number in self._ends), default=-1)

    def first_knowing(self, values: Iterable[Any]) -> int:
        """Return the first part that knows all of these values."""
        numbers = [
            self._first_known.get(x, 0) for x in values if not isinstance(x, Literal)
        ]
        return max(numbers, default=0)

    def ends_of(self, number: int | None) -> list[JaxprEqn]:
        """Return the equations at which a part ends, in order."""
        return [eqn for eqn, part in self._ends if part == number]

    def kind_of(self, number: int) -> Primitive | None:
        """Return the primitive at which a part ends; None if it ends the program."""
        return self._kinds.get(number)

    def dependents(self, inputs: Sequence[Var], axis: str) -> set[Any]:
        """Return the values that depend on some inputs or an axis, within one part.

        The results of an equation at which a part ends count as independent.
        """
        return dependents(self.program.jaxpr, inputs, axis, self._kinds.values())

    def source(self, marked: Var) -> Any:
        """Return the value that an equation of the primitive ``marks`` marked."""
        return self._marked[marked]

    def interpreter(self, inputs: Sequence[Any]) -> Interpreter:
        """Return an interpreter that knows the program's inputs, and nothing else."""
        return Interpreter(self.program.jaxpr, self.program.consts, inputs)

    def evaluate(
        self, walk: Interpreter, wanted: Iterable[Any], shown: Iterable[JaxprEqn] = ()
    ) -> None:
        """Evaluate the equations that ``wanted`` need and that are not evaluated yet.

        ``walk`` holds the results so far. The equations in ``shown`` have effects, so
        they are evaluated even if no wanted value needs them.
        """
        unknown = [x for x in self.eqns if walk.values.keys().isdisjoint(x.outvars)]
        for eqn in needed_eqns(unknown, wanted, always=shown):
            if eqn.primitive is not self._marks:
                walk.evaluate(eqn)
                continue
            for var, source in zip(eqn.outvars, eqn.invars, strict=True):
                walk.values[var] = walk.read(source)
