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
    """The values of a jaxpr's variables, while its equations are evaluated."""

    def __init__(self, body: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]):
        self.values: dict[Any, Any] = dict(zip(body.invars, inputs, strict=True))
        self.values |= dict(zip(body.constvars, consts, strict=True))

    def read(self, var: Any) -> Any:
        """Read the value of a variable or a literal."""
        return var.val if isinstance(var, Literal) else self.values[var]

    def evaluate(self, eqn: Any, operands: list[Any] | None = None) -> None:
        """Evaluate an equation and store its results.

        ``operands``, if given, are used in place of the values of the equation's own
        operands.
        """
        if operands is None:
            operands = []
            for x in eqn.invars:  # without `read`, because many calls of it are slow
                operands.append(x.val if isinstance(x, Literal) else self.values[x])
        try:
            results = evaluate_eqn(eqn, operands)
        except NotImplementedError as error:
            error.add_note(f"{eqn.primitive} at {user_line((eqn, None))}.")
            raise
        self.values.update(zip(eqn.outvars, results, strict=True))


def evaluate_eqn(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run an equation on ``operands``.

    It is traced in the `eqn_context` of the equation.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    at = eqn.source_info
    names = current_name_stack() + at.name_stack
    with user_context(at.traceback, name_stack=names), eqn.ctx.manager:
        out = eqn.primitive.bind(*operands, **params)
    return out if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def eqn_context(eqn: Any) -> Iterator[None]:
    """Trace the body of this `with` with an equation's line, name stack and settings.

    The settings are those of JAX, such as its default precision.
    """
    at = eqn.source_info
    names = current_name_stack() + at.name_stack
    with user_context(at.traceback, name_stack=names), eqn.ctx.manager:
        yield


def as_call(
    eqn: JaxprEqn, fn: Callable[..., Any], axes: Sequence[tuple[str, int]] = ()
) -> JaxprEqn:
    """Make an equation that calls ``fn``, to be put in the place of ``eqn``.

    It has the same operands and results. ``axes`` are the names and sizes of mesh axes
    that ``fn`` may use.
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
    """Replace each jaxpr in an equation's params by ``change(jaxpr)``."""
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
    """A program in parts that run one after another.

    Part i ends at equations of one of the primitives ``ends``. These are not evaluated:
    the caller computes their results between two parts, and gives them to the next.
    Equations of the primitive ``marks`` are identities that mark values; see `source`.

    Attributes:
      eqns: The program's equations, without those at which a part ends.
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
                number += 1  # this part ends at equations of another primitive
            self._ends.append((eqn, number))
            number += 1
        else:
            self.eqns.append(eqn)
        if kind is self._marks:
            self._marked.update(zip(eqn.outvars, eqn.invars, strict=True))
        self._first_known.update(dict.fromkeys(eqn.outvars, number))

    @property
    def last(self) -> int:
        """The index of the last part that ends at an equation; -1 if none does."""
        return max((number for _, number in self._ends), default=-1)

    def first_knowing(self, values: Iterable[Any]) -> int:
        """Find the first part in which all of these values are known, by index."""
        numbers = [
            self._first_known.get(x, 0) for x in values if not isinstance(x, Literal)
        ]
        return max(numbers, default=0)

    def ends_of(self, number: int | None) -> list[JaxprEqn]:
        """List, in order, the equations at which the part with this index ends."""
        return [eqn for eqn, part in self._ends if part == number]

    def kind_of(self, number: int) -> Primitive | None:
        """Name the primitive at which a part ends; None if it ends the program."""
        return self._kinds.get(number)

    def dependents(self, inputs: Sequence[Var], axis: str) -> set[Any]:
        """Collect the values that depend on ``inputs`` or ``axis`` within a part.

        The results of an equation at which a part ends are treated as independent.
        """
        return dependents(self.program.jaxpr, inputs, axis, self._kinds.values())

    def source(self, marked: Var) -> Any:
        """Find the value that was marked, by the result of the marking equation."""
        return self._marked[marked]

    def interpreter(self, inputs: Sequence[Any]) -> Interpreter:
        """Make an interpreter that knows the values of the program's inputs only."""
        return Interpreter(self.program.jaxpr, self.program.consts, inputs)

    def evaluate(
        self, walk: Interpreter, wanted: Iterable[Any], shown: Iterable[JaxprEqn] = ()
    ) -> None:
        """Evaluate the equations that ``wanted`` need and that are not evaluated yet.

        ``walk`` holds the results so far. The equations in ``shown`` have effects, such
        as a print, so they are evaluated even if no wanted value needs them.
        """
        unknown = [x for x in self.eqns if walk.values.keys().isdisjoint(x.outvars)]
        for eqn in needed_eqns(unknown, wanted, always=shown):
            if eqn.primitive is not self._marks:
                walk.evaluate(eqn)
                continue
            for var, source in zip(eqn.outvars, eqn.invars, strict=True):
                walk.values[var] = walk.read(source)
