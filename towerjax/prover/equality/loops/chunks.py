"""Trips over chunks of a tower's rows: a scan of an array ``[k, b / k, ...]``.

A chunk's sum is a part of the sum over all chunks and towers. A chunk of a chunk, or of
a micro-batch, is a chunk, too.
"""

from collections.abc import Sequence
from typing import Any

from towerjax.jaxprs.params import loop_sizes
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    Copy,
    GroupDims,
    Groups,
    Kind,
    NotOfOneKindError,
    Part,
    TowerRows,
    Unknown,
    Zero,
    rows_as,
)
from towerjax.prover.equality.loops.counts import Steps


def chunks_of(pair: EquationPair) -> "Chunks | None":
    """Find whether a `scan` has a trip for each chunk of the tower's rows.

    Raises:
      NotOfOneKindError: It runs over groups of rows that are not chunks in order, or it
        is inside a loop over rows.
    """
    first, second = [eqn.params["length"] for eqn in (pair.first, pair.second)]
    start = sum(loop_sizes(pair.first))
    pairs = [*zip(pair.ins[start:], pair.rows_in[start:], strict=True)]
    groups = [(x.layout, axis) for x, axis in pairs if isinstance(x, Groups)]
    if first != second or not groups:
        return None
    in_order = [GroupDims((0, axis or 0), True) for _, axis in groups]
    if any(x != wanted for (x, _), wanted in zip(groups, in_order, strict=True)):
        raise NotOfOneKindError("no rule for a loop over these groups of {its} rows")
    if pair.scope.loop is not None:
        raise NotOfOneKindError("a loop over chunks of rows is inside a loop over rows")
    return Chunks(pair)


class Chunks:
    """Each trip has a chunk of each tower's rows; the towers are the towers."""

    one = "chunk of rows"
    shared = Copy | Zero | Unknown

    def __init__(self, pair: EquationPair) -> None:
        self.pair = pair

    def index(self, steps: Steps) -> None:
        """Describe no index: no rule reads one."""

    def slice_of(self, operand: int, x: Kind) -> Kind | None:
        """Give a trip its chunk: rows."""
        return rows_as(x) if isinstance(x, Groups) else None

    def buffer(self, operand: int, x: Kind) -> None:
        """Take no carry for an array to fill."""

    def walk(self, programs: Sequence[Any], ins: Sequence[Kind]) -> list[Kind]:
        """Walk a trip as a program of a tower that has only some of its rows."""
        return self.pair.inside(programs, ins, in_chunks=True)

    def over_all(self, x: Kind) -> Kind:
        """Add up one tower's chunks: its addend, or its extreme."""
        return x

    def stacked(self, result: int, x: Kind) -> Kind | None:
        """Put rows together in chunks, and sums as sums of chunks."""
        axis = self.pair.rows_out[result]
        if isinstance(x, TowerRows) and x.blocks == 1 and axis is not None:
            groups = GroupDims((0, axis), True)
        elif isinstance(x, Part):
            groups = GroupDims((0,), False)
        else:
            return None
        zeros = x.bare().zeros
        return Groups(x.power, layout=groups, zeros=zeros, in_padding=x.in_padding)
