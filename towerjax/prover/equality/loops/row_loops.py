"""Trips over a tower's rows: a loop that has a trip for each of them."""

from collections.abc import Sequence
from typing import Any

from towerjax.jaxprs.params import loop_sizes
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    ZERO,
    Buffer,
    Copy,
    Counter,
    Kind,
    NotOfOneKindError,
    Row,
    RowNumbers,
    SoFar,
    TowerRows,
    Zero,
    blocks_of,
    copy,
    rows,
)
from towerjax.prover.equality.loops.counts import Steps


def row_trips_of(pair: EquationPair) -> "RowTrips | None":
    """Find whether a `scan` has a trip, or a fixed number, for each of a tower's rows.

    Raises:
      NotOfOneKindError: It is inside another such loop.
    """
    lengths = tuple(eqn.params["length"] for eqn in (pair.first, pair.second))
    if pair.sizes.times(*lengths) is None:
        return None
    if pair.scope.loop is not None or any(isinstance(x, SoFar) for x in pair.ins):
        raise NotOfOneKindError("a loop over {its} rows is inside another one")
    return RowTrips(pair, lengths)


class RowTrips:
    """Each trip has one row of each tower."""

    one = "row of a loop over {its} rows"
    shared = Kind

    def __init__(self, pair: EquationPair, lengths: tuple[Any, Any]) -> None:
        self.pair = pair
        self._lengths = lengths

    def index(self, steps: Steps) -> Kind | None:
        """Describe a carry that counts the trips."""
        return Counter() if steps == (1, 1) else None

    def slice_of(self, operand: int, x: Kind) -> Kind | None:
        """Give a trip its row of an array of rows, and its element of a replicated."""
        if self.pair.rows_in[operand] != 0:
            why = "no rule for a loop over {its} rows and another dim"
            return self.pair.unknown(why)
        if isinstance(x, Copy):
            return x
        if isinstance(x, RowNumbers) and len(self.pair.shape(operand)) == 1:
            return Counter()
        if isinstance(x, TowerRows) and x.blocks == 1:
            return Row(x.power, zeros=x.zeros, in_padding=x.in_padding)
        return None

    def buffer(self, operand: int, x: Kind) -> Kind | None:
        """Take a carry with a dim of rows for an array that is filled row by row."""
        if self.pair.rows_in[operand] is None:
            return None
        number = operand - loop_sizes(self.pair.first)[0]
        x = rows(x.power) if isinstance(x, Copy) else x
        if not isinstance(x, TowerRows | Zero) or blocks_of(x) > 1:
            return self.pair.unknown(f"a loop over {{its}} rows changes {x}")
        power = None if isinstance(x, Zero) else x.power
        return Buffer(power, zeros=x.zeros, carry=number)

    def walk(self, programs: Sequence[Any], ins: Sequence[Kind]) -> list[Kind]:
        """Walk a trip as a program of one row of each tower."""
        return self.pair.inside(programs, ins, loop=self._lengths)

    def over_all(self, x: Kind) -> Kind:
        """Add up one tower's rows: its addend, its extreme, or all its rows."""
        if not isinstance(x, Buffer):
            return x
        return ZERO if x.power is None else rows(x.power)

    def stacked(self, result: int, x: Kind) -> Kind | None:
        """Put together one entry of each row: rows, or the rows' indices."""
        if isinstance(x, Row):
            all_rows = rows(x.power).replace(zeros=x.bare().zeros)
            return all_rows.replace(in_padding=x.in_padding)
        if isinstance(x, Copy):
            return copy(x.power)
        return RowNumbers() if isinstance(x, Counter) else None
