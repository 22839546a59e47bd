"""One equation of two programs, and the table of rules by primitive."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import JaxprEqn

from towerjax.jaxprs.sites import Site, user_line
from towerjax.proof.equal.kinds import Kind, Known
from towerjax.proof.equal.nouns import nouns


class ProgramsDifferError(Exception):
    """The programs differ in more than their numbers of rows and towers."""


def failed(error: Exception) -> str:
    """The reason why nothing is known where the proof itself raised an error."""
    told = str(error).splitlines() or [""]
    return (
        f"the proof failed with {type(error).__name__}: {told[0]}; please report this"
    )


class Sizes(NamedTuple):
    """The sizes in which two programs differ, as pairs with one for each program."""

    towers: tuple[int, int]
    rows: tuple[Any, Any]  # of one tower: two numbers, or one symbol
    padded: bool = False  # whether towers may have different amounts of padding
    # The numbers of micro-batches of a tower's rows; each counts as a tower.
    parts: tuple[int, int] = (1, 1)

    def times(self, first: Any, second: Any) -> Fraction | None:
        """The multiple of a tower's rows that these sizes are; None if they are not."""
        found = [_times(x, n) for x, n in zip((first, second), self.rows, strict=True)]
        return found[0] if found[0] == found[1] else None

    def are_of_tower(self, first: Any, second: Any) -> bool:
        """Whether these sizes are the rows of all micro-batches of a tower."""
        given = zip((first, second), self.rows, self.parts, strict=True)
        return self.parts != (1, 1) and all(x == n * k for x, n, k in given)

    def axes(self, first: Any, second: Any) -> tuple[int | None, int | None]:
        """The dim of rows of two arrays, and their dim of towers.

        Raises:
          ProgramsDifferError: Another dim differs, or several have rows.
        """
        found: dict[str, int] = {}
        if len(first.shape) != len(second.shape):
            raise ProgramsDifferError("the number of dims differs")
        pairs = zip(first.shape, second.shape, strict=True)
        for i, (m, n) in enumerate(pairs):
            if is_size(m) and is_size(n) and m == n:
                continue
            what = self._what_differs(m, n)
            if what in found:
                counted = nouns().many if what == "towers" else what
                raise ProgramsDifferError(f"an array has several dims of {counted}")
            if what:
                found[what] = i
        return found.get("rows"), found.get("towers")

    def _what_differs(self, m: Any, n: Any) -> str:
        if self.times(m, n) is not None:
            return "rows"
        is_number = is_size(m) and is_size(n)
        a, b = self.towers
        if is_number and m * b == n * a:
            return "towers"
        times = [_times(x, r) for x, r in zip((m, n), self.rows, strict=True)]
        is_of_all = None not in times and times[0] * b == times[1] * a  # type: ignore
        if is_of_all and not is_number and not self.padded:
            return ""  # the rows of all towers, equally many
        raise ProgramsDifferError(
            f"a size that is no number of rows depends on the number of {nouns().many}"
        )


def _times(size: Any, rows: Any) -> Fraction | None:
    if is_size(rows):
        return Fraction(int(size), int(rows)) if is_size(size) else None
    if is_size(size) or size % rows != 0:
        return None
    times = size // rows
    return Fraction(int(times)) if is_size(times) else None


def is_size(x: Any) -> bool:
    """Whether a size is a number and not a symbol."""
    return isinstance(x, int | np.integer)


class Scope(NamedTuple):
    """Where an equation runs: what is around it, and which of a tower's rows it has."""

    site: Site | None = None  # the equation that runs its program
    loop: tuple[Any, Any] | None = None  # the lengths of a loop over rows
    in_chunks: bool = False  # whether it has some of a tower's rows, as in a chunk
    within: frozenset[str] = frozenset()  # axes of a tower's own devices


@dataclasses.dataclass(frozen=True)
class EquationPair:
    """The same equation of both programs, with the kinds of its operands."""

    walk: Any  # the walk of the two programs
    first: JaxprEqn
    second: JaxprEqn
    scope: Scope
    ins: Sequence[Known]
    rows_in: Sequence[int | None]  # the dim of rows of each operand
    rows_out: Sequence[int | None]
    towers_in: Sequence[int | None]
    towers_out: Sequence[int | None]

    @property
    def site(self) -> Site:
        """The equation, and those around it."""
        return self.first, self.scope.site

    def inside(
        self, programs: Sequence[Any], ins: Sequence[Known], **scope: Any
    ) -> list[Known]:
        """The kinds of the results of programs that the equation runs.

        ``scope`` has the fields of its scope that are others inside.
        """
        new = self.scope._replace(site=self.site, **scope)
        return self.walk.closed(*programs, ins, new)

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.first.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The parameters in the first program."""
        return self.first.params

    @property
    def sizes(self) -> Sizes:
        """The sizes in which the programs differ."""
        return self.walk.sizes

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of all operands."""
        return {x.kind for x in self.ins}

    def shape(self, operand: int) -> tuple[Any, ...]:
        """The shape of an operand in the first program."""
        aval: Any = self.first.invars[operand].aval
        return aval.shape

    def out_shape(self, result: int = 0) -> tuple[Any, ...]:
        """The shape of a result in the first program."""
        aval: Any = self.first.outvars[result].aval
        return aval.shape

    def dtype(self, operand: int) -> Any:
        """The dtype of an operand."""
        aval: Any = self.first.invars[operand].aval
        return aval.dtype

    def out_dtype(self, result: int) -> Any:
        """The dtype of a result; None for a token."""
        return getattr(self.first.outvars[result].aval, "dtype", None)

    def sizes_along(self, operand: int, axis: int) -> tuple[Any, Any]:
        """The sizes of a dim of an operand, in both programs."""
        first: Any = self.first.invars[operand].aval
        second: Any = self.second.invars[operand].aval
        return first.shape[axis], second.shape[axis]

    def times_rows(self, operand: int, axis: int | None) -> Fraction | None:
        """The multiple of a tower's rows that a dim of an operand has."""
        if axis is None:
            return None
        return self.sizes.times(*self.sizes_along(operand, axis))

    def constant(self, operand: int) -> Any:
        """The constant that an operand is in both programs; None if it is unknown."""
        value = self.ins[operand]
        if value.kind is Kind.ZERO:
            return 0
        known = isinstance(value.note, bool | int | float)
        return value.note if value.kind is Kind.COPY and known else None

    def has_padding(self, zeros: frozenset[Any]) -> bool:
        """Whether padding may count in a value that is 0 only in these places."""
        return self.walk.has_padding(zeros)

    def with_kinds(self, ins: Sequence[Known]) -> "EquationPair":
        """The same equation with other kinds of its operands."""
        return dataclasses.replace(self, ins=ins)

    def unknown(self, why: str) -> Known:
        """An unknown kind, with a reason and the line of this equation."""
        line = user_line(self.site)
        return Known(Kind.UNKNOWN, why=f"{why}, at {line}" if line else why)


Rule: TypeAlias = Callable[[EquationPair], Known | list[Known]]


class Registered(NamedTuple):
    """A rule, and the operands that it accepts."""

    rule: Rule
    # Whether it is given ROWS for a COPY that has a dim of rows.
    copies_as_rows: bool = False
    # Whether it accepts UNKNOWN; otherwise its result is unknown, too.
    knows_unknown: bool = False
    # Whether it says which value a result is, and where this is 0; otherwise what was
    # known of that is dropped.
    knows_identity: bool = False
    kinds: frozenset[Kind] = frozenset()  # special kinds that it accepts
    # Whether each element of a result is a function of one element of each operand; it
    # then gets groups of rows as rows.
    by_element: bool = False


RULES: dict[str, Registered] = {}
"""The rules by the names of their primitives; other primitives are unknown."""

SPECIAL = frozenset([Kind.SPREAD, Kind.STACKED, Kind.COLUMNS, Kind.SO_FAR, Kind.BUFFER])
SPECIAL |= {Kind.ORDER}
"""Kinds that only rules which name them accept."""


def rule(
    names: str,
    *,
    copies_as_rows: bool = False,
    knows_unknown: bool = False,
    knows_identity: bool = False,
    kinds: Iterable[Kind] = (),
    by_element: bool = False,
) -> Callable[[Rule], Rule]:
    """A decorator that registers a rule for the primitives of these names."""

    def register(function: Rule) -> Rule:
        found = Registered(
            function,
            copies_as_rows,
            knows_unknown,
            knows_identity,
            frozenset(kinds),
            by_element,
        )
        RULES.update(dict.fromkeys(names.split(), found))
        return function

    return register


def size_before(shape: Sequence[Any], axis: int) -> int:
    """The number of elements of the dims before an axis."""
    sizes = shape[:axis]
    if not all(is_size(x) for x in sizes):
        raise ProgramsDifferError(
            f"a size that is no number of rows depends on the number of {nouns().many}"
        )
    return math.prod(map(int, sizes))
