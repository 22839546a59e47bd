"""Rules for comparisons of elements, and for choices made by them."""

import math
from typing import Any, TypeAlias

from towerjax.prover.equality.kinds.equation_pair import EquationPair, constant_of
from towerjax.prover.equality.kinds.kinds import (
    ELEMENTS,
    HIGHEST,
    LOWEST,
    PADDING,
    SAME_FOR_ALL,
    Buffer,
    Copy,
    Counter,
    FirstRow,
    Flag,
    FromFirstRow,
    IsFull,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    NumberInBatch,
    Row,
    RowNumbers,
    RowOrder,
    Size,
    SoFar,
    TowerId,
    TowerRows,
    Unknown,
    Valid,
    Zero,
    copy,
    function_of,
    joined,
    rows,
)
from towerjax.prover.equality.rules import guards
from towerjax.prover.equality.rules.rules import refused, rule

_EXTREME_OF: dict[str, Any] = {"max": Maximum, "min": Minimum}
_NOT_NEGATIVE: TypeAlias = RowNumbers | Counter | TowerId | FirstRow | RowOrder


@rule("max min", ELEMENTS, ELEMENTS, knows_identity=True)
def _larger(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """``max(T^p x, T^p y) = T^p max(x, y)``; refuse other powers.

    ``T^p`` is positive, so the larger value stays the larger one. It is the same for
    ``min``.
    """
    return joined([x, y], "compared with")


@rule("max", Maximum, Maximum, knows_identity=True)
@rule("max", Maximum, Copy, knows_identity=True, commutes=True)
@rule("min", Minimum, Minimum, knows_identity=True)
@rule("min", Minimum, Copy, knows_identity=True, commutes=True)
def _larger_of_extremes(pair: EquationPair, x: Maximum | Minimum, y: Kind) -> Kind:
    """``max(max_t x_t, max_t y_t) = max_t max(x_t, y_t)``, and so for minima.

    One of the two may be replicated. Both must have one power.
    """
    if x.power != y.power:
        raise refused(pair)
    return x.times_tower(x.power)


@rule(
    "max min", SoFar, ELEMENTS | Maximum | Minimum, knows_identity=True, commutes=True
)
def _largest_so_far(pair: EquationPair, x: SoFar, y: Kind) -> Kind:
    """Take a value into a loop's extreme so far: ``max(carry, y)``.

    In a loop over rows there must be no padding, because a padding row may hold a
    larger value.
    """
    extreme = _EXTREME_OF[pair.name]
    is_of_rows = pair.scope.loop is not None
    fits = isinstance(y, Copy | (Row if is_of_rows else extreme))
    fits &= x.power in (None, y.power)
    # A carry without a power is still its start: no trip has added to it.
    is_new = x.extreme is None and x.power is None
    fits &= is_new or x.extreme is extreme
    if not fits or (is_of_rows and pair.sizes.padded):
        raise refused(pair)
    return x.replace(power=y.power, extreme=extreme)


def extreme_of_trips(before: Kind, start: Kind, end: Kind) -> Kind | None:
    """Find the extreme that a loop leaves, if its trips only raised, or lowered, it.

    ``before`` is its kind before the loop, ``start`` before a trip, and ``end`` after
    it. The result is None for a carry that is no extreme.

    Raises:
      NotOfOneKindError: The loop starts with a value that does not fit.
    """
    if not isinstance(end, SoFar) or end.extreme is None:
        return None
    fits = isinstance(before, SAME_FOR_ALL | end.extreme) and before.power == end.power
    if not (isinstance(start, SoFar) and start.carry == end.carry and fits):
        raise NotOfOneKindError(f"no rule for a loop whose carry starts as {before}")
    return end.extreme(end.power)


def is_same_carry(start: Kind, end: Kind) -> bool:
    """Return whether a trip changed a carry only by adding to it, or not at all."""
    are_sums = isinstance(start, SoFar) and isinstance(end, SoFar)
    return are_sums and start.carry == end.carry and end.extreme is None  # type: ignore


@rule("eq ne lt le gt ge", ELEMENTS, ELEMENTS, knows_identity=True)
def _comparison(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """``T^p x < T^p y`` where ``x < y``: a comparison is a flag of each row.

    The factor T^p of both does not change the result.
    """
    if pair.name == "lt" and isinstance(y, Zero):
        if isinstance(x, Zero) or isinstance(x.fact, NumberInBatch):
            return copy(number=False)
    if pair.name == "ge" and pair.sizes.is_rows_of_tower(x):
        if _is_size_of_tower(pair, y):
            return copy(number=True)
    for one, other, names in ((x, y, ("gt", "ne")), (y, x, ("lt", "ne"))):
        if isinstance(one.fact, Flag) and isinstance(other, Zero):
            if pair.name in names:
                return one
    both = joined([x, y], "compared with")
    if isinstance(both, Zero):
        return copy()
    return guards.as_flag(pair, both.times_tower(0))


@rule("eq ne", FromFirstRow, RowNumbers, knows_identity=True, commutes=True)
def _is_number_in_batch(pair: EquationPair, x: FromFirstRow, y: RowNumbers) -> Kind:
    """``c - f_t = i`` where ``c = f_t + i``, a row's index in the batch: rows."""
    is_each = pair.times_rows(1, pair.rows_in[1]) == 1
    if not (is_each and pair.has_rows_in_order):
        raise refused(pair)
    return rows()


@rule("lt", _NOT_NEGATIVE, Zero, knows_identity=True)
def _is_negative(pair: EquationPair, x: Kind, y: Zero) -> Kind:
    """A tower's or row's index is never below 0."""
    return copy(number=False)


@rule("lt", RowNumbers, Valid, knows_identity=True)
def _is_example(pair: EquationPair, x: RowNumbers, y: Valid) -> Kind:
    """A row whose index is below the number of examples is an example.

    It is the flag of `PADDING`, because a tower's examples come before its padding.
    """
    if pair.times_rows(0, pair.rows_in[0]) != 1:
        raise refused(pair)
    is_flag = len(pair.shape(0)) == 1
    flag = Flag(PADDING) if is_flag else None
    return rows().replace(zeros=frozenset([PADDING]), fact=flag)


@rule("lt", RowNumbers, Copy | Size, knows_identity=True)
def _is_row(pair: EquationPair, x: RowNumbers, y: Copy | Size) -> Kind:
    """The index of each row is below the number of rows."""
    is_each = pair.times_rows(0, pair.rows_in[0]) == 1
    if not (is_each and pair.sizes.is_rows_of_tower(y)):
        raise refused(pair)
    return copy(number=True)


@rule("ge", Valid, Copy | Size, knows_identity=True)
def _is_full(pair: EquationPair, x: Valid, y: Copy | Size) -> Kind:
    """A tower with as many examples as rows has no padding."""
    if not _is_size_of_tower(pair, y):
        raise refused(pair)
    return IsFull()


@rule("ge", Size, Copy | Size, knows_identity=True)
@rule("ge", Copy, Size, knows_identity=True)
def _has_all_rows(pair: EquationPair, x: Copy | Size, y: Copy | Size) -> Kind:
    """A tower's number of rows is at least itself."""
    if not (pair.sizes.is_rows_of_tower(x) and _is_size_of_tower(pair, y)):
        raise refused(pair)
    return copy(number=True)


def _is_size_of_tower(pair: EquationPair, x: Kind) -> bool:
    """Return whether an operand is the number of a tower's rows, padding included.

    In several micro-batches a tower has as many rows as in one.
    """
    number = constant_of(x)
    return pair.sizes.is_rows_of_tower(x) or pair.sizes.are_of_tower(number, number)


@rule("or", ELEMENTS, ELEMENTS, knows_identity=True)
def _either(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """``x or y``, element by element; True if one of them is True on all towers."""
    is_true = constant_of(x) is True or constant_of(y) is True
    if is_true and pair.are(SAME_FOR_ALL):
        return copy(number=True)
    return function_of([x, y], "or")


@rule("or", TowerRows, IsFull, knows_identity=True, commutes=True)
def _is_example_or_full(pair: EquationPair, x: TowerRows, y: IsFull) -> Kind:
    """A row is an example, or its tower is full: the flag of `PADDING`.

    All rows of a full tower are examples, so the flag is 1 in each of them anyway.
    """
    if x.fact != Flag(PADDING):
        raise refused(pair)
    return x


@rule("and", ELEMENTS, ELEMENTS, knows_identity=True)
def _both(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """``x and y``, element by element; the ``and`` of two flags is a flag."""
    return guards.flag_of(pair, function_of([x, y], "and"))


@rule("not", ELEMENTS, knows_identity=True)
def _opposite(pair: EquationPair, x: Kind) -> Kind:
    """``not x``, element by element, for rows or a replicated value."""
    return function_of([x], "not")


@rule("select_n", every=Kind, knows_identity=True)
def _choice(pair: EquationPair, predicate: Kind, *cases: Kind) -> Kind:
    """Choose between cases by a predicate, for all rows or row by row.

    If the predicate is replicated, the kind of the cases stays. If it is rows, each row
    chooses for itself, and the cases must be rows or replicated.
    """
    if constant_of(predicate) == 0:
        return cases[0]
    for x in pair.ins:
        if isinstance(x, Unknown):
            return x
    if len(cases) == 2:
        if isinstance(predicate, TowerRows) and isinstance(predicate.fact, Flag):
            if isinstance(cases[0], Zero) and constant_of(cases[1]) == 1:
                return predicate
        if either := guards.chosen_by_any(predicate, cases):
            return either
    if any(isinstance(x, SoFar | Buffer) for x in cases):
        return _choice_in_loop(pair, predicate, cases)
    if not isinstance(predicate, ELEMENTS) or predicate.power:
        raise NotOfOneKindError(f"no rule for a choice by {predicate}")
    either = joined(cases, "as an alternative to")
    if isinstance(predicate, SAME_FOR_ALL):
        return either
    if not isinstance(either, ELEMENTS):
        raise NotOfOneKindError(f"no rule for {either} that rows choose")
    if isinstance(either, Zero):
        return either
    both = joined([predicate, either.times_tower(0)], "choosing")
    chosen = both.times_tower(either.power)
    return chosen.replace(fact=_of_padding(pair, chosen))


def _of_padding(pair: EquationPair, chosen: Kind) -> Any:
    """Find the infinity that a choice puts into padding rows; None if none.

    The predicate must be 0 in padding rows, so that they get case 0.
    """
    is_chosen = PADDING in pair.ins[0].zeros and len(pair.ins) == 3
    if not isinstance(chosen, TowerRows) or not is_chosen:
        return None
    return {-math.inf: LOWEST, math.inf: HIGHEST}.get(pair.constant(1))


def _choice_in_loop(pair: EquationPair, predicate: Kind, cases: Any) -> Kind:
    """Choose, inside a loop, between an old and a new carry of one power."""
    known = [x for x in cases if x.power is not None] or cases
    of_carry = {_carry_of(x) for x in cases}
    is_of_row = isinstance(predicate, Row | SAME_FOR_ALL) and pair.rows_in[0] is None
    is_even = len({x.power for x in known}) == 1
    if not (is_of_row and len(of_carry) == 1 and is_even):
        raise NotOfOneKindError(
            f"no rule for a choice between {cases[0]} and {cases[-1]} by {predicate}"
        )
    zeros = frozenset.intersection(*[x.zeros for x in cases])
    return known[0].replace(zeros=zeros)


def _carry_of(x: Kind) -> Any:
    """Make a key that tells which carry a kind is of, and how a trip changed it.

    The kind of a carry is `SoFar` or `Buffer`. For any other kind, the key is the kind.
    """
    if isinstance(x, SoFar):
        return SoFar, x.carry, x.extreme
    return (Buffer, x.carry) if isinstance(x, Buffer) else (type(x), x)


@rule("clamp", every=ELEMENTS)
def _clamped(pair: EquationPair, *ins: Kind) -> Kind:
    """``clamp(T^p a, T^p x, T^p b) = T^p clamp(a, x, b)``; refuse other powers.

    It is a maximum of a minimum.
    """
    return joined(ins, "clipped by")
