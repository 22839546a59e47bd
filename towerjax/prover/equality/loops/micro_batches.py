"""Trips over micro-batches: a scan that has a trip for each of them.

After the loop a sum over all trips is replicated: it is the same for any number of
micro-batches. Around the loop, an array ``[n, B / n, ...]`` has the values of all
micro-batches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from towerjax.jaxprs.params import loop_sizes, open_jaxpr
from towerjax.jaxprs.sites import all_eqns
from towerjax.prover.equality.kinds.equation_pair import (
    EquationPair,
    Scope,
    Sizes,
    sizes_of_a_share,
)
from towerjax.prover.equality.kinds.kinds import (
    EXTREME,
    Copy,
    FirstRow,
    Groups,
    Kind,
    NotOfOneKindError,
    Part,
    TowerId,
    TowerRows,
    Unknown,
    Zero,
    copy,
)
from towerjax.prover.equality.kinds.stacked import (
    Dealt,
    RowsInTurn,
    Slots,
    Stacked,
    of_one_tower,
)
from towerjax.prover.equality.loops.counts import Steps
from towerjax.prover.equality.walk.walk import Walk


def micro_batches_of(
    pair: EquationPair, programs: Sequence[Any]
) -> "MicroBatches | None":
    """Find whether a `scan` has one trip for each micro-batch.

    Raises:
      NotOfOneKindError: It is inside another loop over rows.
    """
    lengths = tuple(eqn.params["length"] for eqn in (pair.first, pair.second))
    if lengths != pair.sizes.towers or pair.walk.axes:
        return None
    if pair.scope.in_chunks or pair.scope.loop is not None:
        raise NotOfOneKindError("a loop over micro-batches is inside another loop")
    return MicroBatches(pair, programs)


class MicroBatches:
    """Each trip has a micro-batch, which counts as a tower."""

    one = "micro-batch"
    shared = Copy | Zero | Unknown | Stacked

    def __init__(self, pair: EquationPair, programs: Sequence[Any]) -> None:
        self.pair = pair
        self._bodies = [open_jaxpr(x) for x in programs]
        towers = pair.sizes.towers
        self._dealt = _dealt_to(pair.ins)
        in_turn = self._dealt if isinstance(self._dealt, RowsInTurn) else None
        rows = in_turn.each if in_turn else _rows_of_trips(self._bodies, towers)
        self._sizes = Sizes(towers, rows)

    def index(self, steps: Steps) -> Kind | None:
        """Describe a carry that counts the micro-batches, or the rows before them."""
        if steps == (1, 1):
            return TowerId()
        return FirstRow() if steps == self._sizes.rows else None

    def slice_of(self, operand: int, x: Kind) -> Kind | None:
        """Give a trip the micro-batch's own value."""
        if not isinstance(x, Stacked) or self.pair.towers_in[operand] != 0:
            return None
        axis = self.pair.rows_in[operand]
        axis = None if axis is None else axis - 1
        return of_one_tower(x, axis, dealt=self._dealt, each=self._sizes.rows)

    def buffer(self, operand: int, x: Kind) -> Kind | None:
        """Take a carry with a dim of micro-batches for an array that they fill."""
        if self.pair.towers_in[operand] != 0:
            return None
        return Slots(carry=operand - loop_sizes(self.pair.first)[0])

    def walk(self, programs: Sequence[Any], ins: Sequence[Kind]) -> list[Kind]:
        """Walk a trip in a walk of its own, whose towers are the micro-batches."""
        walk = Walk(self._sizes, (), has_keys=False, dealt=self._dealt)
        walk.kinds = self.pair.walk.kinds
        scope = Scope(self.pair.site, in_chunks=True)
        first, second = programs
        return walk.closed(first, second, ins, scope)

    def over_all(self, x: Kind) -> Kind:
        """Add up all micro-batches, or fill an array with an entry for each.

        A sum is the same for any number of them.
        """
        if not isinstance(x, Slots):
            return copy(x.power)
        filled = None if x.entry is None else _of_all(x.entry, x.axis, self._dealt)
        return filled or self.pair.unknown(f"each {self.one} writes {x.entry}")

    def stacked(self, result: int, x: Kind) -> Kind | None:
        """Put together the values of all micro-batches."""
        avals = [body.outvars[result].aval for body in self._bodies]
        return _of_all(x, self._sizes.axes(*avals)[0], self._dealt)


def _of_all(x: Kind, axis: int | None, dealt: Dealt) -> Kind | None:
    """Put the values of all towers together along a new dim; None if no rule does.

    It undoes `of_one_tower`. Zeros of all are 0.
    """
    if isinstance(x, Zero):
        return x
    if isinstance(x, TowerRows) and axis == 0 and x.blocks == 1:
        return Stacked(x.power, of=dealt)
    if isinstance(x, Groups) and x.layout[:2] == ((0,), True):
        order = x.layout.order
        is_dealt = order is TowerRows or isinstance(order, RowsInTurn)
        return Stacked(x.power, of=order) if is_dealt else None
    is_whole = axis is None and isinstance(x, Copy | Part | EXTREME)
    return Stacked(x.power, of=type(x)) if is_whole else None


def _dealt_to(ins: Sequence[Kind]) -> Dealt:
    """Find how the micro-batches get their rows; if in several ways, the first."""
    of_all = [x.of for x in ins if isinstance(x, Stacked)]
    dealt = [x for x in of_all if x is TowerRows or isinstance(x, RowsInTurn)]
    return dealt[0] if dealt else TowerRows


def _rows_of_trips(bodies: Sequence[Any], towers: tuple[int, int]) -> tuple[int, int]:
    """Find the number of rows of a micro-batch, in both programs.

    It is not given. It is the least size in the loop that is smaller for more
    micro-batches.
    """
    shapes = zip(*[[*_shapes_in(x)] for x in bodies], strict=False)
    first, second = towers
    return min(sizes_of_a_share(shapes, towers), default=(second, first))


def _shapes_in(body: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the shapes of a program's arguments and of all values in it."""
    yield from (v.aval.shape for v in body.invars)
    eqns: Iterator[JaxprEqn] = all_eqns(body)
    for eqn in eqns:
        yield from (getattr(v.aval, "shape", ()) for v in eqn.outvars)
