"""Where a power of T, or a mean over a tower's rows, came into a program.

The line that shows it is often another one: a device divides by its own number of rows
in its loss, and the sum over devices stands below.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from towerjax.proof.equal.kinds import Kind, Known
from towerjax.proof.equation import Site, open_jaxpr, sub_jaxprs

_Kinds = Mapping[int, Mapping[Any, Known]]


class Cause(NamedTuple):
    """An equation, those around it, and what it was given."""

    site: Site
    ins: tuple[Known, ...]


class _Place(NamedTuple):
    """A variable of a program, and the equation that runs it, with its place."""

    program: Jaxpr
    var: Any
    eqn: JaxprEqn | None = None
    around: Any = None

    def site(self, eqn: JaxprEqn) -> Site:
        """The site of an equation of the program."""
        outer = None if self.eqn is None else self.around.site(self.eqn)
        return eqn, outer


def cause_of_power(kinds: _Kinds, program: Any, result: int) -> Cause | None:
    """The equation since which a result has a power of T."""
    jaxpr = open_jaxpr(program)
    place = _Place(jaxpr, jaxpr.outvars[result])
    is_above = (_known_of(kinds, place) or Known(Kind.COPY)).power > 0

    def has_power(x: Known) -> bool:
        return bool(x.power) and (x.power > 0) == is_above

    return _first(kinds, place, has_power)


def cause_of_mean(kinds: _Kinds, program: Any, result: int) -> Cause | None:
    """The quotient of a tower's own sums since which a result is unknown, if any."""
    jaxpr = open_jaxpr(program)
    place = _Place(jaxpr, jaxpr.outvars[result])
    found = _first(kinds, place, lambda x: x.kind is Kind.UNKNOWN, Kind.MEAN)
    return found if found and found.site[0].primitive.name == "div" else None


def _known_of(kinds: _Kinds, place: _Place) -> Known | None:
    """What is known of a variable."""
    if isinstance(place.var, Literal):
        return None
    return kinds.get(id(place.program), {}).get(place.var)


def _first(
    kinds: _Kinds,
    place: _Place,
    has: Callable[[Known], bool],
    then: Kind | None = None,
) -> Cause | None:
    """The first equation, going back, that makes what ``has`` of what has it not.

    With a kind, the first that makes a value of it, which such an equation is given.
    """
    todo, seen = [place], set[tuple[int, Any]]()
    while todo:
        place = todo.pop()
        value, key = _known_of(kinds, place), (id(place.program), place.var)
        if value is None or not has(value) or key in seen:
            continue
        seen.add(key)
        before = [*_before(place)]
        values = [_known_of(kinds, x) for x in before]
        if any(x is not None and has(x) for x in values):
            todo += before[::-1]
            continue
        made = [eqn for eqn in place.program.eqns if place.var in eqn.outvars]
        of_kind = [
            x for x, v in zip(before, values, strict=True) if v and v.kind is then
        ]
        if of_kind:
            return _first(kinds, of_kind[0], lambda x: x.kind is then)
        if made and then is None:
            ins = [_known_of(kinds, place._replace(var=v)) for v in made[0].invars]
            known = tuple(x or Known(Kind.COPY) for x in ins)
            return Cause(place.site(made[0]), known)
    return None


def _before(place: _Place) -> Iterator[_Place]:
    """What a variable is made of: operands, results of an inner program, or outside."""
    if place.var in place.program.invars and place.eqn is not None:
        number = place.program.invars.index(place.var)
        offset = len(place.eqn.invars) - len(place.program.invars)
        yield place.around._replace(var=place.eqn.invars[number + offset])
        return
    for eqn in place.program.eqns:
        if place.var not in eqn.outvars:
            continue
        number = eqn.outvars.index(place.var)
        inner = [x for x in sub_jaxprs(eqn) if _is_call(eqn, x)]
        for program in inner:
            yield _Place(program, program.outvars[number], eqn, place)
        if not inner:
            yield from (place._replace(var=v) for v in eqn.invars)


def _is_call(eqn: JaxprEqn, program: Jaxpr) -> bool:
    """Whether operands and results of the equation are those of its program."""
    more = len(eqn.invars) - len(program.invars)
    is_branch = eqn.primitive.name == "cond" and more == 1
    return (more == 0 or is_branch) and len(eqn.outvars) == len(program.outvars)
