"""An equation of two programs, for two numbers of towers, and its operands' kinds."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from towerjax.jaxprs.sites import Site, user_line
from towerjax.proof.equal.kinds import (
    Copy,
    Kind,
    Unknown,
    Zero,
)


class ProgramsDifferError(Exception):
    """The two programs differ in more than their numbers of rows and towers."""


def failed(error: Exception) -> str:
    """Return the reason for a result if the proof itself raised an error there."""
    lines = str(error).splitlines() or [""]
    return (
        f"the proof failed with {type(error).__name__}: {lines[0]}; please report this"
    )


class Sizes(NamedTuple):
    """The sizes in which two programs differ, as pairs with one for each program."""

    towers: tuple[int, int]
    rows: tuple[Any, Any]  # the rows of one tower, as two numbers or one symbol
    padded: bool = False  # whether towers may have different amounts of padding
    # A tower's rows may be in several micro-batches, and each counts as a tower.
    parts: tuple[int, int] = (1, 1)

    def times(self, first: Any, second: Any) -> Fraction | None:
        """Return the multiple of a tower's rows that both sizes are.

        The result is None if they are not the same multiple in both programs.
        """
        both = [_times(x, n) for x, n in zip((first, second), self.rows, strict=True)]
        return both[0] if both[0] == both[1] else None

    def are_of_tower(self, first: Any, second: Any) -> bool:
        """Return whether these sizes are the rows of all micro-batches of a tower."""
        triples = zip((first, second), self.rows, self.parts, strict=True)
        return self.parts != (1, 1) and all(x == n * k for x, n, k in triples)

    def axes(self, first: Any, second: Any) -> tuple[int | None, int | None]:
        """Find the dim of rows that two arrays have, and the dim of towers.

        Raises:
          ProgramsDifferError: Another dim differs, or several dims have rows.
        """
        axes: dict[str, int] = {}
        if len(first.shape) != len(second.shape):
            raise ProgramsDifferError(
                "an array has another number of dims for another number of {many}"
            )
        pairs = zip(first.shape, second.shape, strict=True)
        for i, (m, n) in enumerate(pairs):
            if is_size(m) and is_size(n) and m == n:
                continue
            unit = self._what_differs(m, n)
            if unit in axes:
                counted = "{many}" if unit == "towers" else unit
                raise ProgramsDifferError(f"an array has several dims of {counted}")
            if unit:
                axes[unit] = i
        return axes.get("rows"), axes.get("towers")

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
            return ""  # A dim of all towers' rows has one size in both programs.
        raise ProgramsDifferError(
            "a size that is no number of rows depends on the number of {many}"
        )


def _times(size: Any, rows: Any) -> Fraction | None:
    if is_size(rows):
        return Fraction(int(size), int(rows)) if is_size(size) else None
    if is_size(size) or size % rows != 0:
        return None
    times = size // rows
    return Fraction(int(times)) if is_size(times) else None


def is_size(x: Any) -> bool:
    """Return whether a size is a number and not a symbol."""
    return isinstance(x, int | np.integer)


class Scope(NamedTuple):
    """Where an equation runs: the equations around it, and which rows it has."""

    site: Site | None = None  # the equation that runs its program
    loop: tuple[Any, Any] | None = None  # the lengths of a loop over rows around it
    in_chunks: bool = False  # whether it has only some of a tower's rows, as a chunk
    within: frozenset[str] = frozenset()  # the mesh axes of a tower's own devices


@dataclasses.dataclass(frozen=True)
class EquationPair:
    """The same equation of both programs, with the kinds of its operands."""

    walk: Any  # the walk of the two programs
    first: JaxprEqn
    second: JaxprEqn
    scope: Scope
    ins: Sequence[Kind]
    rows_in: Sequence[int | None]  # the dim of rows of each operand
    rows_out: Sequence[int | None]
    towers_in: Sequence[int | None]
    towers_out: Sequence[int | None]
    is_swapped: bool = False  # whether its two operands are exchanged

    @property
    def site(self) -> Site:
        """The equation, and those around it."""
        return self.first, self.scope.site

    def inside(
        self, programs: Sequence[Any], ins: Sequence[Kind], **scope: Any
    ) -> list[Kind]:
        """Return the kinds of the results of programs that the equation runs.

        ``scope`` has the fields of the equation's scope that differ inside these
        programs.
        """
        new = self.scope._replace(site=self.site, **scope)
        return self.walk.closed(*programs, ins, new)

    def _operand_of(self, eqn: JaxprEqn, operand: int) -> Any:
        """Return the variable of an operand in one of the programs."""
        return eqn.invars[1 - operand if self.is_swapped else operand]

    def swapped(self) -> "EquationPair":
        """Return the same equation with its two operands in the other order."""
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
        """The parameters in the first program."""
        return self.first.params

    @property
    def sizes(self) -> Sizes:
        """The sizes in which the programs differ."""
        return self.walk.sizes

    def shape(self, operand: int) -> tuple[Any, ...]:
        """Return the shape of an operand in the first program."""
        aval: Any = self._operand_of(self.first, operand).aval
        return aval.shape

    def out_shape(self, result: int = 0) -> tuple[Any, ...]:
        """Return the shape of a result in the first program."""
        aval: Any = self.first.outvars[result].aval
        return aval.shape

    def dtype(self, operand: int) -> Any:
        """Return the dtype of an operand."""
        aval: Any = self._operand_of(self.first, operand).aval
        return aval.dtype

    def out_dtype(self, result: int) -> Any:
        """Return the dtype of a result; None for a token."""
        return getattr(self.first.outvars[result].aval, "dtype", None)

    def sizes_along(self, operand: int, axis: int) -> tuple[Any, Any]:
        """Return the sizes of a dim of an operand, in both programs."""
        first: Any = self._operand_of(self.first, operand).aval
        second: Any = self._operand_of(self.second, operand).aval
        return first.shape[axis], second.shape[axis]

    def times_rows(self, operand: int, axis: int | None) -> Fraction | None:
        """Return how many times a tower's rows a dim of an operand has.

        The result is None for ``axis=None`` and for a dim that is no multiple of the
        rows.
        """
        if axis is None:
            return None
        return self.sizes.times(*self.sizes_along(operand, axis))

    def constant(self, operand: int) -> Any:
        """Return the constant that an operand is in both programs; None if unknown."""
        return constant_of(self.ins[operand])

    def are(self, kinds: Any) -> bool:
        """Return whether all operands are of these kinds."""
        return all(isinstance(x, kinds) for x in self.ins)

    def has_padding(self, zeros: frozenset[Any]) -> bool:
        """Return whether padding may count in a value that is 0 only in ``zeros``."""
        return self.walk.has_padding(zeros)

    def with_kinds(self, ins: Sequence[Kind]) -> "EquationPair":
        """Return the same equation with other kinds for its operands."""
        return dataclasses.replace(self, ins=ins)

    def unknown(self, why: str) -> Kind:
        """Return an unknown kind, with a reason and the line of this equation."""
        line = user_line(self.site)
        return Unknown(why=f"{why}, at {line}" if line else why)


def constant_of(x: Kind) -> Any:
    """Return the constant that a value is in both programs; None if unknown."""
    if isinstance(x, Zero):
        return 0
    if isinstance(x, Copy) and isinstance(x.number, bool | int | float):
        return x.number
    return None


def size_before(shape: Sequence[Any], axis: int) -> int:
    """Return the number of elements along all dims before ``axis``."""
    sizes = shape[:axis]
    if not all(is_size(x) for x in sizes):
        raise ProgramsDifferError(
            "a size that is no number of rows depends on the number of {many}"
        )
    return math.prod(map(int, sizes))
