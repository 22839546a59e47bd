"""Loops whose trips share the rows: over micro-batches, chunks of rows, or rows.

A trip has some of the rows, and what it adds to a carry is its addend of a sum over all
trips. So a kind says of a trip what it says of a tower. Three things differ. Towers
must not communicate in a trip, because which rows they have in it depends on their
number. Only a sum, an extreme, the trip's index and an array with an entry for each
trip may change from trip to trip, because a row would otherwise depend on those before
it. And a key must not be used, because each trip would draw the same numbers from it.

`over_trips` is the loop. What a trip gets of an array, and what its results become
after the loop, differs between the three; `Trips` has the functions that say so.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from towerjax.jaxprs.params import loop_sizes
from towerjax.prover.equality.answers.reasons import reason_of_kinds
from towerjax.prover.equality.kinds.constants import kind_of_constant
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    Buffer,
    Kind,
    NotOfOneKindError,
    SoFar,
    Unknown,
    Zero,
    added,
    part,
)
from towerjax.prover.equality.kinds.stacked import Slots
from towerjax.prover.equality.loops.counts import KEPT, Steps, steps_of
from towerjax.prover.equality.rules.choices import extreme_of_trips, is_same_carry


class Trips(Protocol):
    """What the trips of one loop share.

    Attributes:
      pair: The `scan`, in both programs.
      one: The words for the piece of an array that one trip gets.
      shared: The kinds of values that each trip may read whole.
    """

    pair: EquationPair
    one: str
    shared: Any

    def index(self, steps: Steps) -> Kind | None:
        """Describe a carry that grows from 0 by these steps; None if no rule reads it.

        ``steps`` are what a trip adds to it, in both programs.
        """

    def slice_of(self, operand: int, x: Kind) -> Kind | None:
        """Give a trip its slice of an array; None if no rule does."""

    def buffer(self, operand: int, x: Kind) -> Kind | None:
        """Take a carry for an array that the trips fill; None if it is another one."""

    def walk(self, programs: Sequence[Any], ins: Sequence[Kind]) -> list[Kind]:
        """Walk the program of one trip."""
        ...

    def over_all(self, x: Kind) -> Kind:
        """Add up all trips' addends, take an extreme of theirs, or fill an array."""
        ...

    def stacked(self, result: int, x: Kind) -> Kind | None:
        """Put together what all trips return; None if no rule does."""


def over_trips(trips: Trips, programs: Sequence[Any]) -> list[Kind]:
    """Walk one trip, and find what the carries and results are after all trips."""
    pair = trips.pair
    consts, carry_size = loop_sizes(pair.first)
    start = consts + carry_size
    bare = [x.bare() for x in pair.ins]
    befores = bare[consts:start]
    steps = [steps_of(programs, consts + i, i) for i in range(carry_size)]
    shared = [_shared(trips, x) for x in bare[:consts]]
    carry = [_before_a_trip(trips, consts + i, step) for i, step in enumerate(steps)]
    slices = [_slice_of(trips, i) for i in range(start, len(bare))]
    outs = trips.walk(programs, [*shared, *carry, *slices])
    changed = zip(befores, steps, carry, outs[:carry_size], strict=True)
    ends = [_after_all_trips(trips, *each) for each in changed]
    stacked = enumerate(outs[carry_size:], carry_size)
    return [*ends, *[_stacked(trips, i, x) for i, x in stacked]]


def _shared(trips: Trips, x: Kind) -> Kind:
    """Give a value entirely to each trip."""
    if isinstance(x, trips.shared):
        return x
    return trips.pair.unknown(f"each {trips.one} uses {x}")


def _before_a_trip(trips: Trips, operand: int, steps: Steps | None) -> Kind:
    """Take a carry for the trip's index, an array to fill, or a sum or extreme so far.

    A carry that grows from 0 may be the index. One that no trip changes is shared.
    """
    x = trips.pair.ins[operand].bare()
    if steps == KEPT:
        return _shared(trips, x)
    if steps and isinstance(x, Zero) and not trips.pair.params["reverse"]:
        if index := trips.index(steps):
            return index
    if isinstance(x, Unknown):
        return x
    number = operand - loop_sizes(trips.pair.first)[0]
    return trips.buffer(operand, x) or SoFar(None, carry=number)


def _slice_of(trips: Trips, operand: int) -> Kind:
    """Give a trip its slice of an array; of 0 it is 0."""
    x = trips.pair.ins[operand].bare()
    if isinstance(x, Zero | Unknown):
        return x
    own = trips.slice_of(operand, x)
    return own or trips.pair.unknown(f"each {trips.one} gets a slice of {x}")


def _after_all_trips(
    trips: Trips, before: Kind, steps: Steps | None, start: Kind, end: Kind
) -> Kind:
    """Find what a carry is after the loop, from its kinds around a trip.

    ``before`` is its kind before the loop, ``start`` before a trip, and ``end`` after
    it.
    """
    if steps == KEPT:
        return before
    if steps and start == trips.index(steps):
        return _count(trips, steps)
    if isinstance(end, Unknown):
        return end
    try:
        if extreme := extreme_of_trips(before, start, end):
            return trips.over_all(extreme)
        if is_same_carry(start, end):
            if end.power is None:  # no trip has added anything
                return before
            return added([before, trips.over_all(part(end.power))])
    except NotOfOneKindError as error:
        return trips.pair.unknown_by(error)
    if isinstance(start, Buffer | Slots) and isinstance(end, Buffer | Slots):
        if start.carry == end.carry:
            return trips.over_all(end)
    why = f"each {trips.one} depends on the one before it"
    return trips.pair.unknown(why, reason_of_kinds([start]))


def _count(trips: Trips, steps: Steps) -> Kind:
    """``n s``: find what a carry is that grew from 0 by s in each of n trips."""
    pair = trips.pair
    lengths = [eqn.params["length"] for eqn in (pair.first, pair.second)]
    ends = [n * step for n, step in zip(lengths, steps, strict=True)]
    return kind_of_constant(pair.sizes, *ends)


def _stacked(trips: Trips, result: int, x: Kind) -> Kind:
    """Put together what all trips return; all zeros are 0."""
    if isinstance(x, Zero | Unknown):
        return x
    of_all = trips.stacked(result, x)
    return of_all or trips.pair.unknown(f"each {trips.one} returns {x}")
