"""Loops over chunks of a tower's rows: a scan of an array ``[k, b / k, ...]``.

A trip has the rows of one chunk, and their sum is a part of the sum over all trips and
towers. So the rules for rows hold in a trip, with three exceptions. Towers must not
communicate, because which rows the towers have in a trip depends on the number of
towers. Only sums may change from trip to trip, because other carries would make a row
depend on those before it. And a key must not be used, because it would draw the same
numbers for the rows of each chunk.
"""

from collections.abc import Sequence
from typing import Any

from towerjax.jaxprs.params import loop_sizes, open_jaxpr
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    ZERO,
    Copy,
    GroupDims,
    Groups,
    Kind,
    NotOfOneKindError,
    Part,
    SoFar,
    TowerRows,
    Unknown,
    Zero,
    joined,
    part,
    rows_as,
)
from towerjax.prover.equality.rules.choices import extreme_of_trips, is_same_carry


def runs_over_chunks(pair: EquationPair) -> bool:
    """Decide whether a `scan` runs over chunks of the tower's rows.

    Raises:
      NotOfOneKindError: It runs over groups of rows that are not chunks in order.
    """
    start = sum(loop_sizes(pair.first))
    pairs = [*zip(pair.ins[start:], pair.rows_in[start:], strict=True)]
    groups = [(x.layout, axis) for x, axis in pairs if isinstance(x, Groups)]
    in_order = [GroupDims((0, axis or 0), True) for _, axis in groups]
    if any(x != wanted for (x, _), wanted in zip(groups, in_order, strict=True)):
        raise NotOfOneKindError("no rule for a loop over these groups of {its} rows")
    return bool(groups)


def over_chunks(pair: EquationPair, programs: Sequence[Any]) -> list[Kind]:
    """Run a loop over chunks: it adds sums to a carry, and stacks rows."""
    if pair.scope.loop is not None or pair.scope.in_chunks:
        raise NotOfOneKindError(
            "a loop over chunks of rows is inside another loop over rows"
        )
    consts, carry_size = loop_sizes(pair.first)
    start = consts + carry_size
    body: Any = open_jaxpr(programs[0])
    is_kept = [
        x is y for x, y in zip(body.invars[consts:start], body.outvars, strict=False)
    ]
    bare = [x.bare() for x in pair.ins]
    shared = [_shared(pair, x) for x in bare[:consts]]
    carry = [
        _shared(pair, x) if is_same else _added_to(number, x)
        for number, (x, is_same) in enumerate(
            zip(bare[consts:start], is_kept, strict=True)
        )
    ]
    ins = [*shared, *carry, *[_of_a_trip(pair, x) for x in bare[start:]]]
    outs = pair.inside(programs, ins, in_chunks=True)
    ends = [
        before if is_same else _sum_of_trips(pair, before, *both)
        for before, is_same, *both in zip(
            bare[consts:start], is_kept, carry, outs[:carry_size], strict=True
        )
    ]
    is_same = zip(outs[carry_size:], pair.rows_out[carry_size:], strict=True)
    return [*ends, *[_of_all_trips(pair, x, axis) for x, axis in is_same]]


def _shared(pair: EquationPair, x: Kind) -> Kind:
    """Give a value to each trip; it must be replicated."""
    if isinstance(x, Copy | Zero | Unknown):
        return x
    return pair.unknown(f"each trip of a loop over chunks of rows uses {x}")


def _added_to(number: int, x: Kind) -> Kind:
    return x if isinstance(x, Unknown) else SoFar(None, carry=number)


def _of_a_trip(pair: EquationPair, x: Kind) -> Kind:
    """Give one trip its slice of an array ``[k, ...]``."""
    if isinstance(x, Groups):
        return rows_as(x)
    if isinstance(x, Zero | Unknown):
        return x
    return pair.unknown(f"each trip of a loop over chunks of rows gets a slice of {x}")


def _sum_of_trips(pair: EquationPair, before: Kind, start: Kind, end: Kind) -> Kind:
    """Add up a carry over all trips, by its kinds around a trip.

    ``before`` is its kind before the loop, ``start`` before a trip, and ``end`` after
    it.
    """
    if isinstance(end, Unknown):
        return end
    try:
        if extreme := extreme_of_trips(before, start, end):
            return extreme
        if not is_same_carry(start, end):
            raise NotOfOneKindError("a chunk of rows depends on the chunk before it")
        return before if end.power is None else joined([before, part(end.power)])
    except NotOfOneKindError as error:
        return pair.unknown(str(error))


def _of_all_trips(pair: EquationPair, x: Kind, axis: int | None) -> Kind:
    """Stack what the trips return: rows in chunks, or an array of sums.

    ``axis`` is the dim of rows of the stacked array.
    """
    if isinstance(x, Zero | Unknown):
        return x if isinstance(x, Unknown) else ZERO
    if isinstance(x, TowerRows) and x.blocks == 1 and axis is not None:
        groups = GroupDims((0, axis), True)
    elif isinstance(x, Part):
        groups = GroupDims((0,), False)
    else:
        return pair.unknown(f"a loop over chunks of rows returns {x} for each chunk")
    zeros = x.bare().zeros
    return Groups(x.power, layout=groups, zeros=zeros, in_padding=x.in_padding)
