"""Trips over micro-batches: a scan that has a trip for each of them.

After the loop a sum over all trips is replicated: it is the same for any number of
micro-batches. Around the loop, an array ``[n, B / n, ...]`` has the values of all
micro-batches.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from towerjax.jaxprs.params import open_jaxpr
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
    GroupDims,
    Groups,
    Kind,
    NotOfOneKindError,
    Part,
    RowsInTurn,
    Stacked,
    TowerId,
    TowerRows,
    Unknown,
    Zero,
    copy,
    of_one_tower,
)
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
    index = TowerId()
    count = copy(1)  # their number is T

    def __init__(self, pair: EquationPair, programs: Sequence[Any]) -> None:
        self.pair = pair
        self._bodies = [open_jaxpr(x) for x in programs]
        towers = pair.sizes.towers
        self._sizes = Sizes(towers, _rows_of_trips(self._bodies, towers))

    def slice_of(self, operand: int, x: Kind) -> Kind | None:
        """Give a trip the micro-batch's own value."""
        if not isinstance(x, Stacked) or self.pair.towers_in[operand] != 0:
            return None
        return of_one_tower(x, None if self.pair.rows_in[operand] is None else 0)

    def buffer(self, operand: int, x: Kind) -> None:
        """Take no carry for an array to fill."""

    def walk(self, programs: Sequence[Any], ins: Sequence[Kind]) -> list[Kind]:
        """Walk a trip in a walk of its own, whose towers are the micro-batches."""
        walk = Walk(self._sizes, (), has_keys=False)
        walk.kinds = self.pair.walk.kinds
        scope = Scope(self.pair.site, in_chunks=True)
        first, second = programs
        return walk.closed(first, second, ins, scope)

    def over_all(self, x: Kind) -> Kind:
        """Add up all micro-batches: a value that is the same for any number."""
        return copy(x.power)

    def stacked(self, result: int, x: Kind) -> Kind | None:
        """Put together the values of all micro-batches."""
        avals = [body.outvars[result].aval for body in self._bodies]
        axis = self._sizes.axes(*avals)[0]
        if isinstance(x, Groups) and x.layout == GroupDims((0,), True, RowsInTurn()):
            return Stacked(x.power, of=RowsInTurn())
        is_first = isinstance(x, TowerRows) and axis == 0 and x.blocks == 1
        is_whole = axis is None and isinstance(x, Copy | Part | EXTREME)
        return Stacked(x.power, of=type(x)) if is_first or is_whole else None


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
