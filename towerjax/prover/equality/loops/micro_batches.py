"""Loops over micro-batches: a scan with one trip for each, which adds sums to a carry.

The proof treats a trip as a tower: it has the rows of one micro-batch, and what it adds
to a carry is its part of a sum. After the loop the carry is the sum over all trips,
which is replicated: it is the same for any number of micro-batches. Around the loop, an
array ``[n, B / n, ...]`` has the values of all micro-batches.

A carry may also be the index of the trip, as in ``fori_loop``. Any other carry is
refused, because it would make a micro-batch depend on those before it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal

from towerjax.jaxprs.params import loop_sizes, open_jaxpr
from towerjax.jaxprs.sites import all_eqns
from towerjax.prover.equality.kinds.equation_pair import EquationPair, Scope, Sizes
from towerjax.prover.equality.kinds.kinds import (
    EXTREME,
    Copy,
    GroupDims,
    Groups,
    Kind,
    NotOfOneKindError,
    Part,
    RowsInTurn,
    SoFar,
    Stacked,
    TowerId,
    TowerRows,
    Unknown,
    Zero,
    added,
    copy,
    of_one_tower,
)
from towerjax.prover.equality.rules.choices import extreme_of_trips, is_same_carry
from towerjax.prover.equality.walk.walk import Walk

_SHARED: TypeAlias = Copy | Zero | Unknown | Stacked


def runs_over_micro_batches(pair: EquationPair, lengths: tuple[Any, Any]) -> bool:
    """Return whether a scan has one trip for each micro-batch.

    ``lengths`` are its numbers of trips in the two programs.
    """
    return lengths == pair.sizes.towers and not pair.walk.axes


def over_micro_batches(pair: EquationPair, programs: Sequence[Any]) -> list[Kind]:
    """Run a loop that has a trip per micro-batch.

    Its results are sums over all trips, and arrays with an entry for each trip.
    """
    if pair.scope.in_chunks or pair.scope.loop is not None:
        raise NotOfOneKindError("a loop over micro-batches is inside another loop")
    consts, carry_size = loop_sizes(pair.first)
    start = consts + carry_size
    bodies = [open_jaxpr(x) for x in programs]
    befores = [x.bare() for x in pair.ins[consts:start]]
    changes = [_change_of(bodies[0], consts + i, i) for i in range(carry_size)]
    shared = [_shared(pair, x.bare()) for x in pair.ins[:consts]]
    carry = [
        _in_a_trip(pair, number, x, change)
        for number, (x, change) in enumerate(zip(befores, changes, strict=True))
    ]
    slices = [_slice_of(pair, i) for i in range(start, len(pair.ins))]
    sizes = Sizes(pair.sizes.towers, _rows_of_trips(bodies, pair.sizes.towers))
    walk = Walk(sizes, (), has_keys=False)
    walk.kinds = pair.walk.kinds
    scope = Scope(pair.site, in_chunks=True)
    first, second = programs
    outs = walk.closed(first, second, [*shared, *carry, *slices], scope)
    changed = zip(befores, changes, carry, outs[:carry_size], strict=True)
    ends = [
        _after_all_trips(pair, before, change, start, end)
        for before, change, start, end in changed
    ]
    stacked = enumerate(outs[carry_size:], carry_size)
    return [*ends, *[_stacked(pair, walk, bodies, i, x) for i, x in stacked]]


def _change_of(body: Any, operand: int, result: int) -> str:
    """Tell how a trip changes a carry: not ("kept"), by 1 ("counted"), or "other"."""
    before = body.invars[operand]
    after = body.outvars[result]
    if after is before:
        return "kept"
    makers = [eqn for eqn in body.eqns if after in eqn.outvars]
    if makers and makers[0].primitive.name == "add" and before.aval.shape == ():
        x, y = makers[0].invars
        is_next = x is before and isinstance(y, Literal) and y.val == 1
        if is_next and before.aval.dtype.kind in "iu":
            return "counted"
    return "other"


def _shared(pair: EquationPair, x: Kind) -> Kind:
    """Give a value to each trip entirely."""
    return x if isinstance(x, _SHARED) else pair.unknown(f"each micro-batch uses {x}")


def _in_a_trip(pair: EquationPair, number: int, x: Kind, change: str) -> Kind:
    """Take a carry before a trip as an index, or as a sum or extreme so far.

    A carry that is counted up from 0 is the micro-batch's index. One that a trip
    changes in another way is a sum, or an extreme, of the trips so far.
    """
    if change == "kept":
        return _shared(pair, x)
    if change == "counted" and isinstance(x, Zero) and not pair.params["reverse"]:
        return TowerId()
    return x if isinstance(x, Unknown) else SoFar(None, carry=number)


def _slice_of(pair: EquationPair, operand: int) -> Kind:
    """Give one trip its slice of an array ``[n, ...]``."""
    x = pair.ins[operand].bare()
    if isinstance(x, Stacked) and pair.towers_in[operand] == 0:
        return of_one_tower(x, None if pair.rows_in[operand] is None else 0)
    if isinstance(x, Zero | Unknown):
        return x
    return pair.unknown(f"a micro-batch gets a slice of {x}")


def _rows_of_trips(bodies: Sequence[Any], towers: tuple[int, int]) -> tuple[int, int]:
    """Find the number of rows of a micro-batch, in both programs.

    It is not given. It is the least size in the loop that is smaller for more
    micro-batches.
    """
    a, b = towers
    pairs = zip(*[[*_shapes_in(x)] for x in bodies], strict=False)
    sizes = [
        (m, n)
        for first, second in pairs
        for m, n in zip(first, second, strict=False)
        if m != n and m * a == n * b
    ]
    return min(sizes, default=(b, a))


def _shapes_in(body: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the shapes of a program's arguments and of all values in it."""
    yield from (v.aval.shape for v in body.invars)
    eqns: Iterator[JaxprEqn] = all_eqns(body)
    for eqn in eqns:
        yield from (getattr(v.aval, "shape", ()) for v in eqn.outvars)


def _after_all_trips(
    pair: EquationPair, before: Kind, change: str, start: Kind, end: Kind
) -> Kind:
    """Find what a carry is after all trips, by its kinds around a trip.

    ``before`` is its kind before the loop, ``start`` before a trip, and ``end`` after
    it.
    """
    if change == "kept":
        return before
    if isinstance(start, TowerId):
        # The index ends as the number of trips. It is T, because a trip is a tower.
        return copy(1)
    if isinstance(end, Unknown):
        return end
    try:
        if extreme := extreme_of_trips(before, start, end):
            return copy(extreme.power)
        if not is_same_carry(start, end):
            raise NotOfOneKindError("a micro-batch depends on the one before it")
        return before if end.power is None else added([before, copy(end.power)])
    except NotOfOneKindError as error:
        return pair.unknown(str(error))


def _stacked(
    pair: EquationPair, walk: Walk, bodies: Sequence[Any], result: int, x: Kind
) -> Kind:
    """Stack the values that all trips return."""
    if isinstance(x, Zero | Unknown):
        return x
    avals = [body.outvars[result].aval for body in bodies]
    axis = walk.sizes.axes(*avals)[0]
    if isinstance(x, Groups) and x.layout == GroupDims((0,), True, RowsInTurn()):
        return Stacked(x.power, of=RowsInTurn())
    is_first = isinstance(x, TowerRows) and axis == 0 and x.blocks == 1
    is_whole = axis is None and isinstance(x, Copy | Part | EXTREME)
    if not is_first and not is_whole:
        return pair.unknown(f"each micro-batch returns {x}")
    return Stacked(x.power, of=type(x))
