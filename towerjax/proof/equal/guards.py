"""Means over a tower's rows: a part divided by another part of the same tower.

Such a mean depends on the split, but multiplied by its divisor it is a part again. That
uses that two values cancel. For this to hold for derivatives, too, the divisor must be
the number of rows with a flag, which is an integer without a derivative, and must be
the same value of the program in both places; a stopped mean is another value. A tower
may have no such rows, so a guard is needed, such as ``max(count, 1)`` or ``where(count
> 0, ...)``. The guard changes nothing in a sum over the counted rows: without such rows
the sum is 0, and so is its derivative.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from towerjax.proof.equal.equation_pair import EquationPair
from towerjax.proof.equal.kinds import (
    Count,
    Flag,
    HasRow,
    Kind,
    Known,
    NotOfOneKindError,
    part,
)

_ANY_IS = {"gt": True, "ne": True, "eq": False, "le": False}
_SWAPPED = {"lt": "gt", "gt": "lt", "ge": "le", "le": "ge"}


def as_flag(pair: EquationPair, value: Known) -> Known:
    """The value as a flag of rows, 0 or 1, with an identity of its own."""
    if value.kind is not Kind.ROWS:
        return value
    number = pair.walk.new_identity()
    return value._replace(fact=Flag(number), zeros=value.zeros | {number})


def counted_flag(value: Known) -> Any:
    """The flag whose rows a value counts, or None."""
    if value.kind is Kind.PART and isinstance(value.fact, Count):
        return value.fact.flag
    return None


def comparison(pair: EquationPair) -> Known | None:
    """A comparison of a count with 0 or 1, or of a flag with 0; else None."""
    (x, y) = pair.ins
    name = pair.name
    against = pair.constant(1)
    if x.kind is Kind.ZERO or counted_flag(y) is not None:
        x, y = y, x
        name = _SWAPPED.get(name, name)
        against = pair.constant(0)
    flag = counted_flag(x)
    if flag is not None:
        if against == 1 and name in ("ge", "lt"):
            return has_any(flag, name == "ge")
        if y.kind is Kind.ZERO and name in _ANY_IS:
            return has_any(flag, _ANY_IS[name])
        return None
    if isinstance(x.fact, Flag) and y.kind is Kind.ZERO and name in ("gt", "ne"):
        return x
    return None


def has_any(flag: Any, is_any: bool) -> Known:
    """Whether a tower has a row with a flag, or none, as a maximum or minimum."""
    kind = Kind.MAXIMUM if is_any else Kind.MINIMUM
    return Known(kind, Fraction(0), fact=HasRow(flag, is_any))


def opposite(x: Known) -> Known:
    """The opposite of a maximum or minimum of booleans."""
    if isinstance(x.fact, HasRow):
        return has_any(x.fact.flag, not x.fact.is_any)
    is_largest = x.kind is Kind.MAXIMUM
    return Known(Kind.MINIMUM if is_largest else Kind.MAXIMUM, x.power)


def at_least_one(pair: EquationPair) -> Known | None:
    """The maximum of a count and a number from 0 to 1, or None."""
    for operand, other in ((0, 1), (1, 0)):
        flag = counted_flag(pair.ins[operand])
        bound = pair.constant(other)
        if pair.name == "max" and flag is not None and bound is not None:
            if 0 < bound <= 1:
                power = pair.ins[operand].power
                return Known(Kind.AT_LEAST, power, note=flag)
    return None


def choice(pair: EquationPair) -> Known | None:
    """A choice by a flag, or by whether there is a row with a flag; else None."""
    predicate, *cases = pair.ins
    if len(cases) != 2:
        return None
    is_flag = isinstance(predicate.fact, Flag) and predicate.kind is Kind.ROWS
    if is_flag and cases[0].kind is Kind.ZERO:
        if pair.constant(2) == 1:
            return predicate
    return chosen_by_any(predicate, cases)


def chosen_by_any(predicate: Known, cases: Sequence[Known]) -> Known | None:
    """The case for a tower that has a row with a flag, if both cases fit; else None."""
    if not isinstance(predicate.fact, HasRow):
        return None
    flag = predicate.fact.flag
    without, with_any = cases if predicate.fact.is_any else cases[::-1]
    is_number = isinstance(without.note, int | float) and without.kind is Kind.COPY
    if is_number and without.note > 0 and counted_flag(with_any) == flag:
        return Known(Kind.AT_LEAST, with_any.power, note=flag)
    if without.kind is Kind.ZERO and with_any.kind is Kind.PART:
        if flag in with_any.zeros:
            return with_any
    if without.kind in (Kind.ZERO, Kind.COPY) and with_any.kind is Kind.MEAN:
        _, vanishes = with_any.note
        if vanishes and with_any.fact == Count(flag):
            return with_any
    raise NotOfOneKindError(f"no rule for a choice by {predicate}")


def quotient_of_parts(pair: EquationPair) -> Known | None:
    """A part divided by a part of the tower's own, or by a guarded count; else None.

    The note has the power of the divisor, and whether the dividend is 0 where the
    divisor is.
    """
    x, y = pair.ins
    if x.kind is not Kind.PART or pair.shape(1) != ():
        return None
    if y.kind is Kind.AT_LEAST:
        if y.note not in x.zeros:
            raise NotOfOneKindError(f"no rule for {x} divided by {y}")
        fact = Count(y.note)
    elif y.kind is Kind.PART:
        fact = None  # a tower where it is 0 has NaN, and no way back
    else:
        return None
    vanishes = fact is not None
    return Known(Kind.MEAN, x.power, fact=fact, note=(y.power, vanishes))


def multiple_of_mean(mean: Known, power: Any) -> Known:
    """The product of a mean and a copy."""
    return mean._replace(power=mean.power + power)


def product_with_mean(pair: EquationPair) -> Known | None:
    """The product of a mean: with its divisor it is the part that was divided."""
    for mean, other in (pair.ins, pair.ins[::-1]):
        if mean.kind is not Kind.MEAN:
            continue
        if other.kind is Kind.COPY:
            return multiple_of_mean(mean, other.power)
        is_one = mean.fact is not None and other.fact == mean.fact
        if other.kind is Kind.PART and is_one:
            return part(mean.power)
        raise NotOfOneKindError(f"no rule for {mean} times {other}")
    return None


def sum_with_mean(pair: EquationPair) -> Known | None:
    """The sum with a mean: x / n + y / n is (x + y) / n, and a copy c is c n / n."""
    x, y = pair.ins
    if Kind.MEAN not in pair.kinds:
        return None
    mean, other = (x, y) if x.kind is Kind.MEAN else (y, x)
    power, vanishes = mean.note
    if other.kind is Kind.ZERO:
        return mean
    if other.kind is Kind.COPY and other.power + power == mean.power:
        return mean
    is_of_one = (x.kind, x.power, x.fact) == (y.kind, y.power, y.fact)
    if is_of_one:
        return mean._replace(note=(power, vanishes and other.note[1]))
    raise NotOfOneKindError(f"no rule for {x} added to {y}")
