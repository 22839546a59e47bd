"""Find the equation that brings a power of T, or a tower's own mean, into a program.

A result often shows the power only at a later line. For example, a device divides by
its own number of rows in its loss, and the sum over devices comes later.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.jaxprs.flow import inner_programs
from towerjax.jaxprs.params import open_jaxpr
from towerjax.jaxprs.sites import Site
from towerjax.prover.equality.kinds.kinds import (
    Copy,
    Kind,
    Mean,
    Part,
    Unknown,
)


class Cause(NamedTuple):
    """An equation that brings a wrong number in, its site, and its operands' kinds."""

    site: Site
    ins: tuple[Kind, ...]
    value: Kind | None = None  # the value with the power that came in here


class _Place(NamedTuple):
    """A variable of a program, and the equation that runs this program.

    ``around`` is a place in the program that has this equation, ``eqn``. Both are None
    in the outermost program.
    """

    program: Jaxpr
    var: Any
    eqn: JaxprEqn | None = None
    around: Any = None

    def site(self, eqn: JaxprEqn) -> Site:
        """Make the site of an equation of this program."""
        outer = None if self.eqn is None else self.around.site(self.eqn)
        return eqn, outer


class Causes:
    """The causes of what a proof refutes, or cannot decide, in a program.

    ``kinds`` are the kinds of the program's values that a `Walk` found.
    """

    def __init__(
        self, kinds: Mapping[int, Mapping[Any, Kind]], program: ClosedJaxpr
    ) -> None:
        self._kinds = kinds
        self._program = open_jaxpr(program)
        self._makers: dict[int, dict[Any, JaxprEqn]] = {}

    def of_power(self, result: int) -> Cause | None:
        """Find the equation that brings a power of T into a result, or None."""
        return self._of_power(_Place(self._program, self._program.outvars[result]))

    def of_unknown(self, result: int) -> Cause | None:
        """Find the wrong equation that makes a result unknown; None if there is none.

        Such an equation divides by a tower's own sum, or brings a power of T into a
        replicated value.
        """
        place = _Place(self._program, self._program.outvars[result])
        first = self._first(place, lambda x: isinstance(x, Unknown))
        if first is None:
            return None
        known = [(x, self._known(x)) for x in self._before(first)]
        cause = self._cause(first)
        if cause and cause.site[0].primitive.name == "div":
            if isinstance(cause.ins[1], Part):
                return cause
        for x, value in known:
            if value and isinstance(value, Mean):
                return self._cause(self._first(x, lambda x: isinstance(x, Mean)))
        for x, value in known:
            if value and isinstance(value, Copy) and value.power:
                return self._of_power(x)
        return None

    def _of_power(self, place: _Place) -> Cause | None:
        value = self._known(place)
        is_above = value is not None and value.power > 0

        def has_power(x: Kind) -> bool:
            return bool(x.power) and (x.power > 0) == is_above

        return self._cause(self._first(place, has_power), value)

    def _known(self, place: _Place) -> Kind | None:
        """Look up the kind of a variable; None if it was not found."""
        if isinstance(place.var, Literal):
            return None
        return self._kinds.get(id(place.program), {}).get(place.var)

    def _maker(self, place: _Place) -> JaxprEqn | None:
        """Find the equation that computes a variable; None for an argument."""
        key = id(place.program)
        if key not in self._makers:
            makers = [(v, eqn) for eqn in place.program.eqns for v in eqn.outvars]
            self._makers[key] = dict(makers)
        return self._makers[key].get(place.var)

    def _cause(self, place: _Place | None, value: Kind | None = None) -> Cause | None:
        eqn = None if place is None else self._maker(place)
        if place is None or eqn is None:
            return None
        ins = [self._known(place._replace(var=v)) for v in eqn.invars]
        return Cause(place.site(eqn), tuple(x or Copy() for x in ins), value)

    def _first(self, place: _Place, has: Callable[[Kind], bool]) -> _Place | None:
        """Find the variable at which a property first appears, on the way to ``place``.

        ``has`` tells from a value's kind whether it has the property. The variable
        found has it, and no value that it is computed from has it. It is a result of an
        equation, not an argument.
        """
        todo = [place]
        seen = set[tuple[int, Any]]()
        while todo:
            place = todo.pop()
            value = self._known(place)
            key = (id(place.program), place.var)
            if value is None or not has(value) or key in seen:
                continue
            seen.add(key)
            before = [*self._before(place)]
            values = [self._known(x) for x in before]
            if any(x is not None and has(x) for x in values):
                todo += before[::-1]
            elif self._maker(place) is not None:
                return place
        return None

    def _before(self, place: _Place) -> Iterator[_Place]:
        """Yield the variables from which a variable is computed, also across calls."""
        eqn = self._maker(place)
        if eqn is not None:
            inner = [x for x in inner_programs(eqn) if place.var in x.results]
            for x in inner:
                out = x.jaxpr.outvars[x.results.index(place.var)]
                yield _Place(x.jaxpr, out, eqn, place)
            if not inner:
                yield from (place._replace(var=v) for v in eqn.invars)
        elif place.eqn is not None and place.var in place.program.invars:
            programs = [
                x for x in inner_programs(place.eqn) if x.jaxpr is place.program
            ]
            operand = programs[0].operands[place.program.invars.index(place.var)]
            if operand is not None:
                yield place.around._replace(var=operand)
