"""The kinds of arrays that have all towers' values, and how rows are dealt out."""

import dataclasses
from typing import TypeAlias

from towerjax.prover.equality.kinds.kinds import (
    PERMUTED,
    Copy,
    FirstRow,
    InPadding,
    Kind,
    NotOfOneKindError,
    Part,
    TowerId,
    TowerRows,
    permuted,
    rows,
)


@dataclasses.dataclass(frozen=True)
class RowsInTurn:
    """Rows that are dealt out in turn: tower t has the rows t, t + T, t + 2 T, ...

    ``each`` is how many each tower gets, in the two programs. A dim may have several
    elements for each of them.
    """

    each: tuple[int, int]

    name = PERMUTED  # its text in reasons, as for a `Kind`


@dataclasses.dataclass(frozen=True)
class Starts:
    """Whole numbers with equal gaps: tower t has t s.

    ``step`` is s, in the two programs.
    """

    step: tuple[int, int]

    name = "the number of a {one}'s first row"  # its text in reasons, as for a `Kind`


Dealt: TypeAlias = type[TowerRows] | RowsInTurn
"""How a batch is dealt out: each tower gets rows one after another, or in turn."""


@dataclasses.dataclass(frozen=True)
class Stacked(Kind):
    """An array that holds all towers' values, each of the kind ``of``."""

    name = "the values of all {many}"
    of: type[Kind] | RowsInTurn | Starts = dataclasses.field(kw_only=True)

    @property
    def is_linear(self) -> bool:
        """Whether the kind stays if all values are multiplied by one number."""
        return isinstance(self.of, RowsInTurn) or self.of in (Copy, Part, TowerRows)


@dataclasses.dataclass(frozen=True)
class Slots(Kind):
    """An array that a loop over micro-batches fills: each writes its own entry.

    ``carry`` is its index among the loop's carries. ``entry`` is what the trip wrote;
    None if it has not yet written. ``axis`` is the entry's dim of rows, if it has one.
    """

    name = "an array that a loop fills with one entry per {one}"
    carry: int = dataclasses.field(kw_only=True)
    entry: Kind | None = dataclasses.field(default=None, kw_only=True)
    axis: int | None = dataclasses.field(default=None, kw_only=True)


def of_one_tower(
    x: Stacked, axis: int | None, *, dealt: Dealt, each: tuple[int, int]
) -> Kind:
    """Take one tower's value out of an array of all towers' values.

    ``axis`` is the dim of rows of that value; None if it has none. ``dealt`` is how the
    towers have their rows; rows that are dealt out otherwise are in another order.
    ``each`` is how many rows a tower has, in the two programs.
    """
    if isinstance(x.of, Starts):
        if x.of.step != each:
            raise NotOfOneKindError("no rule for starts that are no tower's first row")
        return FirstRow()
    if isinstance(x.of, RowsInTurn) or (x.of is TowerRows and axis is not None):
        own_rows = rows(x.power).replace(in_padding=InPadding.AS_EXAMPLE)
        if axis is None or x.of == dealt:
            return own_rows
        return permuted(own_rows, axis, x.of)
    if x.of is TowerId and x.power:
        raise NotOfOneKindError(f"no rule for {x.of(x.power)}")
    return x.of(x.power)
