"""An equation in two programs, for two numbers of towers, and its operands' kinds."""

import dataclasses
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from towerjax.jaxprs.sites import Site, user_line
from towerjax.prover.equality.kinds.kinds import (
    Copy,
    Kind,
    NumberPair,
    Size,
    TowerRows,
    Unknown,
    Zero,
)
from towerjax.prover.equality.kinds.reasons import (
    ProgramsDifferError,
    Reason,
    ReasonedError,
)


def failed(error: Exception) -> str:
    """Word the reason for an unknown result if the proof's code raised an error."""
    lines = str(error).splitlines() or [""]
    return (
        f"the proof failed with {type(error).__name__}: {lines[0]}; please report this"
    )


class Sizes(NamedTuple):
    """The sizes in which two programs may differ, as pairs: one for each program."""

    towers: tuple[int, int]
    rows: tuple[int, int]  # the rows of one tower
    padded: bool = False  # whether towers may have different amounts of padding
    # The number of micro-batches of a tower. Each counts as a tower.
    parts: tuple[int, int] = (1, 1)

    def swapped(self) -> "Sizes":
        """Give the sizes of the two programs in the other order."""

        def other_way(pair: tuple[int, int]) -> tuple[int, int]:
            return pair[1], pair[0]

        return self._replace(
            towers=other_way(self.towers),
            rows=other_way(self.rows),
            parts=other_way(self.parts),
        )

    def times(self, first: int, second: int) -> Fraction | None:
        """Find m if both sizes are m times the rows of a tower; otherwise None.

        ``first`` is the size in the first program, ``second`` that in the second.
        """
        a, b = self.rows
        is_proportional = first * b == second * a
        return Fraction(int(first), int(a)) if is_proportional else None

    def are_of_tower(self, first: int, second: int) -> bool:
        """Return whether both sizes are a tower's rows, of all micro-batches."""
        triples = zip((first, second), self.rows, self.parts, strict=True)
        return self.parts != (1, 1) and all(x == n * k for x, n, k in triples)

    def is_rows_of_tower(self, x: Kind) -> bool:
        """Return whether a value is the number of a tower's rows, padding included."""
        return isinstance(x, Size) or (isinstance(x, Copy) and x.number == self.rows)

    def numbers_of(self, x: Kind) -> tuple[Any, Any] | None:
        """Find the numbers that a value is in the two programs; None if not known."""
        if isinstance(x, Size):  # of a micro-batch, or of all of a tower's
            return self.rows if self.parts == (1, 1) else None
        if isinstance(x, Copy) and isinstance(x.number, NumberPair):
            return x.number
        number = constant_of(x)
        return None if number is None else (number, number)

    def axes(self, first: Any, second: Any) -> tuple[int | None, int | None]:
        """Find an array's dim of rows and its dim of towers; each may be None.

        ``first`` and ``second`` are the array's types in the two programs.

        Raises:
          ProgramsDifferError: Another dim differs, or several dims have rows.
        """
        if len(first.shape) != len(second.shape):
            raise ProgramsDifferError(
                "an array has another number of dims for another number of {many}"
            )
        pairs = zip(first.shape, second.shape, strict=True)
        dims: dict[str, list[int | None]] = {"rows": [], "towers": []}
        for i, (m, n) in enumerate(pairs):
            if m != n:
                dims[self._what_differs(m, n)].append(i)
        of_rows, of_towers = dims.values()
        if len(of_rows) > 1:
            is_dealt = bool(of_towers)
            reason = Reason.DEALT_BY_NUMBER if is_dealt else Reason.ROWS_MEET_ROWS
            raise ProgramsDifferError("an array has several dims of rows", reason)
        if len(of_towers) > 1:
            raise ProgramsDifferError("an array has several dims of {many}")
        return [*of_rows, None][0], [*of_towers, None][0]

    def _what_differs(self, m: int, n: int) -> str:
        if self.times(m, n) is not None:
            return "rows"
        a, b = self.towers
        if m * b == n * a:
            return "towers"
        why = "a size that is no number of rows depends on the number of {many}"
        raise ProgramsDifferError(why, Reason.OTHER_SIZES)


def sizes_of_a_share(
    shapes: Iterable[tuple[Any, Any]], towers: tuple[int, int]
) -> list[tuple[int, int]]:
    """List the sizes of dims that towers share: with n times the towers, 1/n of them.

    ``shapes`` are those of values of one tower, in both programs.
    """
    a, b = towers
    sizes = [
        (m, n)
        for first, second in shapes
        for m, n in zip(first, second, strict=False)
        if m != n and m * a == n * b
    ]
    return [*dict.fromkeys(sizes)]


class Scope(NamedTuple):
    """Where an equation is in its program: the equations and loops around it."""

    site: Site | None = None  # the equation whose inner program has this one
    loop: tuple[Any, Any] | None = None  # the lengths of a loop over rows around it
    in_chunks: bool = False  # whether it has only some of a tower's rows, as a chunk
    within: frozenset[str] = frozenset()  # the mesh axes of a tower's own devices


@dataclasses.dataclass(frozen=True)
class EquationPair:
    """An equation, as both programs have it, with the kinds of its operands."""

    walk: Any  # the walk of the two programs
    first: JaxprEqn
    second: JaxprEqn
    scope: Scope
    ins: Sequence[Kind]
    rows_in: Sequence[int | None]  # the dim of rows of each operand
    rows_out: Sequence[int | None]
    towers_in: Sequence[int | None]
    towers_out: Sequence[int | None]
    is_swapped: bool = False  # whether the two operands appear in the other order

    @property
    def site(self) -> Site:
        """The site of the equation: itself, and the equations around it."""
        return self.first, self.scope.site

    def inside(
        self, programs: Sequence[Any], ins: Sequence[Kind], **scope: Any
    ) -> list[Kind]:
        """Walk inner programs that the equation runs, to the kinds of their results.

        ``programs`` are the inner program in the first and in the second program.
        ``scope`` has the fields of the equation's scope that are different inside.
        """
        new = self.scope._replace(site=self.site, **scope)
        return self.walk.closed(*programs, ins, new)

    def _operand_of(self, eqn: JaxprEqn, operand: int) -> Any:
        """Pick the variable of an operand of one of the two equations."""
        return eqn.invars[1 - operand if self.is_swapped else operand]

    def swapped(self) -> "EquationPair":
        """Swap the two operands of the equation."""
        return dataclasses.replace(
            self,
            ins=self.ins[::-1],
            rows_in=self.rows_in[::-1],
            towers_in=self.towers_in[::-1],
            is_swapped=not self.is_swapped,
        )

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.first.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The params of the equation in the first program."""
        return self.first.params

    @property
    def sizes(self) -> Sizes:
        """The sizes in which the two programs may differ."""
        return self.walk.sizes

    def shape(self, operand: int) -> tuple[Any, ...]:
        """Look up the shape of an operand in the first program."""
        aval: Any = self._operand_of(self.first, operand).aval
        return aval.shape

    def out_shape(self, result: int = 0) -> tuple[Any, ...]:
        """Look up the shape of a result in the first program."""
        aval: Any = self.first.outvars[result].aval
        return aval.shape

    def dtype(self, operand: int) -> Any:
        """Look up the dtype of an operand."""
        aval: Any = self._operand_of(self.first, operand).aval
        return aval.dtype

    def out_dtype(self, result: int) -> Any:
        """Look up the dtype of a result; None for a token."""
        return getattr(self.first.outvars[result].aval, "dtype", None)

    def sizes_along(self, operand: int, axis: int) -> tuple[Any, Any]:
        """Look up the sizes of a dim of an operand, in both programs."""
        first: Any = self._operand_of(self.first, operand).aval
        second: Any = self._operand_of(self.second, operand).aval
        return first.shape[axis], second.shape[axis]

    @property
    def has_rows_in_order(self) -> bool:
        """Whether a tower's first row and its number of rows tell which rows it has.

        So it is if all towers have equally many rows, one after another, if none is
        padding, and if each tower has all its rows at once.
        """
        is_even = not self.sizes.padded and self.sizes.parts == (1, 1)
        return is_even and self.walk.dealt is TowerRows

    def times_rows(self, operand: int, axis: int | None) -> Fraction | None:
        """Find m if a dim of an operand has m times a tower's rows; otherwise None.

        The result is None for ``axis=None``, too.
        """
        if axis is None:
            return None
        return self.sizes.times(*self.sizes_along(operand, axis))

    def constant(self, operand: int) -> Any:
        """Find the number that all elements of an operand are, if it is known.

        The number must be the same in both programs. Otherwise the result is None.
        """
        return constant_of(self.ins[operand])

    def are(self, kinds: Any) -> bool:
        """Return whether all operands are of these kinds."""
        return all(isinstance(x, kinds) for x in self.ins)

    def has_padding(self, zeros: frozenset[Any]) -> bool:
        """Return whether padding rows may hold something other than 0.

        ``zeros`` are the places where the value is known to be 0.
        """
        return self.walk.has_padding(zeros)

    def with_kinds(self, ins: Sequence[Kind]) -> "EquationPair":
        """Give the operands of the equation other kinds."""
        return dataclasses.replace(self, ins=ins)

    def unknown(self, why: str, reason: Reason | None = None) -> Unknown:
        """Make an unknown kind, with a reason and the line of this equation."""
        line = user_line(self.site)
        told = f"{why}, at {line}" if line else why
        return Unknown(why=told, reason=reason, has_line=bool(line))

    def unknown_by(self, error: ReasonedError) -> Kind:
        """Make an unknown kind, with an error's reason and this equation's line."""
        return self.unknown(str(error), error.reason)


def constant_of(x: Kind) -> Any:
    """Find the number that all elements of a value are in both programs, or None."""
    if isinstance(x, Zero):
        return 0
    if isinstance(x, Copy) and isinstance(x.number, bool | int | float):
        return x.number
    return None
