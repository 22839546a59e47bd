"""Rules for comparisons of elements, and for choices made by them."""

import math
from typing import Any

from towerjax.proof.equal import guards
from towerjax.proof.equal.equation_pair import EquationPair, rule
from towerjax.proof.equal.kinds import (
    EACH,
    HIGHEST,
    LOWEST,
    PADDING,
    ROWS_OF_TOWER,
    Flag,
    Kind,
    Known,
    NotOfOneKindError,
    NumberInBatch,
    copy,
    function_of,
    joined,
    rows,
)

_EXTREME_OF = {Kind.MAXIMUM: "max", Kind.MINIMUM: "min"}


@rule("max min", knows_identity=True, by_element=True, kinds=[Kind.SO_FAR])
def _larger(pair: EquationPair) -> Known:
    """The larger of two values stays the larger, if both have the same power."""
    x, y = pair.ins
    if Kind.SO_FAR in pair.kinds:
        return _largest_so_far(pair)
    if found := guards.at_least_one(pair):
        return found
    extremes = [v for v in pair.ins if v.kind in _EXTREME_OF]
    if extremes:
        wanted = {kind for kind, name in _EXTREME_OF.items() if name == pair.name}
        is_even = len({v.power for v in pair.ins if v.kind is not Kind.ZERO}) == 1
        if pair.kinds <= wanted | {Kind.COPY} and is_even:
            return extremes[0].times_tower(x.power)
        raise NotOfOneKindError(f"no rule for the {pair.name} of {x} and {y}")
    if not pair.kinds <= EACH:
        raise NotOfOneKindError(f"no rule for the {pair.name} of {x} and {y}")
    return joined(pair.ins, "compared with")


def _largest_so_far(pair: EquationPair) -> Known:
    """The largest of a carry and a trip's value, in a loop over rows or chunks.

    Padding is a row in a loop over rows, where nothing says that it is no larger.
    """
    x, y = pair.ins
    one, other = (x, y) if x.kind is Kind.SO_FAR else (y, x)
    extreme = Kind.MAXIMUM if pair.name == "max" else Kind.MINIMUM
    is_of_rows = pair.scope.loop is not None
    fits = other.kind is Kind.COPY
    fits |= other.kind is (Kind.ROW if is_of_rows else extreme)
    fits &= one.power in (None, other.power)
    fits &= isinstance(one.note, int) or one.note[1] is extreme
    if not fits or (is_of_rows and pair.sizes.padded):
        raise NotOfOneKindError(f"no rule for the {pair.name} of {x} and {y}")
    number = one.note if isinstance(one.note, int) else one.note[0]
    return one._replace(power=other.power, note=(number, extreme))


def extreme_of_trips(before: Known, start: Known, end: Known) -> Known | None:
    """The kind of a carry that only grew, or only fell, in all trips; else None."""
    if end.kind is not Kind.SO_FAR or not isinstance(end.note, tuple):
        return None
    number, extreme = end.note
    fits = before.kind in (Kind.COPY, Kind.ZERO, extreme) and number == start.note
    is_even = before.power == end.power
    if start.kind is not Kind.SO_FAR or not (fits and is_even):
        raise NotOfOneKindError(f"no rule for a loop that starts at {before}")
    return Known(extreme, end.power)


@rule(
    "eq ne lt le gt ge",
    knows_identity=True,
    kinds=[Kind.ORDER],
    by_element=True,
)
def _comparison(pair: EquationPair) -> Known:
    """A comparison has the same result for all powers, if both have the same power."""
    x, y = pair.ins
    if pair.name == "lt" and y.kind is Kind.ZERO:
        own = (Kind.NUMBERS, Kind.COUNTER, Kind.TOWER, Kind.FIRST_ROW, Kind.ZERO)
        is_number = isinstance(x.fact, NumberInBatch)
        if x.kind in own or x.kind is Kind.ORDER or is_number:
            return copy(note=False)
    if x.kind is Kind.NUMBERS and pair.name == "lt":
        is_each = pair.times_rows(0, pair.rows_in[0]) == 1
        if y.kind is Kind.VALID and is_each:  # rows that are not padding come first
            is_flag = len(pair.shape(0)) == 1
            weight = Flag(PADDING) if is_flag else None
            return rows()._replace(zeros=frozenset([PADDING]), fact=weight)
        if y.note == ROWS_OF_TOWER and is_each:
            return copy(note=True)
    if pair.name == "ge" and _is_size_of_tower(pair, 1):
        if x.kind is Kind.VALID:
            return Known(Kind.IS_FULL)
        if x.note == ROWS_OF_TOWER:
            return copy(note=True)
    if found := guards.comparison(pair):
        return found
    if not pair.kinds <= EACH:
        raise NotOfOneKindError(f"no rule for {x} compared with {y}")
    found = joined(pair.ins, "compared with")
    if found.kind is Kind.ZERO:
        return copy()
    return guards.as_flag(pair, found.times_tower(0))


def _is_size_of_tower(pair: EquationPair, operand: int) -> bool:
    """Whether an operand is the number of a tower's rows, padding included.

    One tower has as many rows in one micro-batch as in several.
    """
    number = pair.constant(operand)
    is_known = pair.ins[operand].note == ROWS_OF_TOWER
    return is_known or pair.sizes.are_of_tower(number, number)


@rule("or", knows_identity=True, by_element=True)
def _either(pair: EquationPair) -> Known:
    """A function of both; with IS_FULL the flag that a row is no padding is itself."""
    x, y = pair.ins
    weight = Flag(PADDING)
    for one, other in ((x, y), (y, x)):
        if one.fact == weight and other.kind is Kind.IS_FULL:
            return one
    is_true = pair.constant(0) is True or pair.constant(1) is True
    if is_true and pair.kinds <= {Kind.COPY, Kind.ZERO}:
        return copy(note=True)
    return function_of(pair.ins, "or")


@rule("and", knows_identity=True, by_element=True)
def _both(pair: EquationPair) -> Known:
    """A function of both values; for two flags it is a flag."""
    found = function_of(pair.ins, "and")
    if all(isinstance(v.fact, Flag) for v in pair.ins):
        return guards.as_flag(pair, found)
    return found


@rule("not", knows_identity=True, by_element=True)
def _opposite(pair: EquationPair) -> Known:
    """A function; the opposite of a maximum of flags is a minimum of opposites."""
    [x] = pair.ins
    if x.kind in _EXTREME_OF and pair.dtype(0).kind == "b":
        return guards.opposite(x)
    return function_of(pair.ins, "not")


@rule(
    "select_n",
    knows_identity=True,
    knows_unknown=True,
    kinds=[Kind.SO_FAR, Kind.BUFFER, Kind.COLUMNS, Kind.ORDER],
    by_element=True,
)
def _choice(pair: EquationPair) -> Known:
    """A choice that is the same on all towers keeps kinds; one per row makes rows."""
    predicate, *cases = pair.ins
    if predicate.kind is Kind.ZERO or pair.constant(0) is False:
        return cases[0]
    unknown = [x for x in pair.ins if x.kind is Kind.UNKNOWN]
    if unknown:
        return unknown[0]
    if found := guards.choice(pair):
        return found
    if {x.kind for x in cases} & {Kind.SO_FAR, Kind.BUFFER}:
        return _choice_in_loop(pair)
    if predicate.kind not in EACH or predicate.power:
        raise NotOfOneKindError(f"no rule for a choice by {predicate}")
    found = joined(cases, "as an alternative to")
    if predicate.kind in (Kind.COPY, Kind.ZERO):
        return found
    if found.kind not in EACH:
        raise NotOfOneKindError(f"no rule for {found} that rows choose")
    if found.kind is Kind.ZERO:
        return found
    both = joined([predicate, found.times_tower(0)], "choosing")
    chosen = both.times_tower(found.power)
    return chosen._replace(fact=_of_padding(pair, chosen))


def _of_padding(pair: EquationPair, chosen: Known) -> Any:
    """The infinity that padding gets, or None: a predicate of 0 chooses case 0."""
    is_chosen = PADDING in pair.ins[0].zeros and len(pair.ins) == 3
    if chosen.kind is not Kind.ROWS or not is_chosen:
        return None
    return {-math.inf: LOWEST, math.inf: HIGHEST}.get(pair.constant(1))


def _choice_in_loop(pair: EquationPair) -> Known:
    """A choice between a carry, and the same carry after a row was added or written."""
    predicate, *cases = pair.ins
    known = [x for x in cases if x.power is not None] or cases
    is_of_row = predicate.kind in (Kind.ROW, Kind.COPY, Kind.ZERO)
    is_one = len({(x.kind, x.note) for x in cases}) == 1
    is_even = len({x.power for x in known}) == 1
    if not (is_of_row and is_one and is_even) or pair.rows_in[0] is not None:
        raise NotOfOneKindError(
            f"no rule for {cases[0]} or {cases[-1]}, chosen by {predicate}"
        )
    zeros = frozenset.intersection(*[x.zeros for x in cases])
    return known[0]._replace(zeros=zeros)


@rule("clamp", by_element=True)
def _clamped(pair: EquationPair) -> Known:
    """A clip, which is a maximum and a minimum."""
    if not pair.kinds <= EACH:
        raise NotOfOneKindError(f"no rule for a clip of {pair.ins[1]}")
    return joined(pair.ins, "clipped by")
