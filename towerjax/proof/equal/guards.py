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
from typing import Any

from towerjax.proof.equal.equation_pair import EquationPair, constant_of
from towerjax.proof.equal.kinds import (
    SAME_FOR_ALL,
    AtLeast,
    Copy,
    Count,
    Flag,
    HasRow,
    Kind,
    Maximum,
    Mean,
    Minimum,
    NotOfOneKindError,
    Part,
    TowerRows,
    Zero,
    part,
)
from towerjax.proof.equal.rules import refused, rule

_ANY_IS = {"gt": True, "ne": True, "eq": False, "le": False}
_SWAPPED = {"lt": "gt", "gt": "lt", "ge": "le", "le": "ge"}


def as_flag(pair: EquationPair, value: Kind) -> Kind:
    """Return rows as a flag, 0 or 1 in each row, with an identity of its own.

    Any other kind is returned as it is.
    """
    if not isinstance(value, TowerRows):
        return value
    number = pair.walk.new_identity()
    return value.replace(fact=Flag(number), zeros=value.zeros | {number})


def flag_of(pair: EquationPair, value: Kind) -> Kind:
    """Return ``value`` as a flag if all operands of the equation are flags."""
    are_flags = all(isinstance(x.fact, Flag) for x in pair.ins)
    return as_flag(pair, value) if are_flags else value


def counted_flag(value: Kind) -> Any:
    """Return the flag whose rows a value counts; None if the value is no count."""
    is_count = isinstance(value, Part) and isinstance(value.fact, Count)
    return value.fact.flag if is_count else None  # type: ignore


def has_any(flag: Any, is_any: bool) -> Kind:
    """Return the kind of a bool that says whether a flag is 1 in some row of a tower.

    If ``is_any`` is false, the bool says that the tower has no such row. The first is a
    maximum over towers, the second a minimum.
    """
    kind = Maximum if is_any else Minimum
    return kind(fact=HasRow(flag, is_any))


@rule("eq ne lt le gt ge", Part, SAME_FOR_ALL, knows_identity=True, commutes=True)
def _count_compared(pair: EquationPair, x: Part, y: Kind) -> Kind:
    """Answer a count of rows with a flag, compared with 0 or 1.

    The result says whether a tower has a row with the flag.
    """
    flag = counted_flag(x)
    name = _SWAPPED.get(pair.name, pair.name) if pair.is_swapped else pair.name
    if flag is not None and constant_of(y) == 1 and name in ("ge", "lt"):
        return has_any(flag, name == "ge")
    if flag is not None and isinstance(y, Zero) and name in _ANY_IS:
        return has_any(flag, _ANY_IS[name])
    raise refused(pair)


@rule("not", Maximum | Minimum, knows_identity=True)
def _opposite(pair: EquationPair, x: Maximum | Minimum) -> Kind:
    """Answer `not` of a maximum of bools, which is a minimum, or the reverse."""
    if pair.dtype(0).kind != "b":
        raise refused(pair)
    if isinstance(x.fact, HasRow):
        return has_any(x.fact.flag, not x.fact.is_any)
    return Minimum(x.power) if isinstance(x, Maximum) else Maximum(x.power)


@rule("max", Part, Copy, knows_identity=True, commutes=True)
def _at_least_one(pair: EquationPair, x: Part, y: Copy) -> Kind:
    """Answer the maximum of a count and a number above 0 that is at most 1.

    The number replaces the count on a tower that counts no row, and nowhere else.
    """
    flag = counted_flag(x)
    bound = constant_of(y)
    if flag is None or bound is None or not 0 < bound <= 1:
        raise refused(pair)
    return AtLeast(x.power, flag=flag)


def chosen_by_any(predicate: Kind, cases: Sequence[Kind]) -> Kind | None:
    """Return the kind of a choice by whether a tower has a row with a flag.

    The result is None if ``predicate`` does not say whether there is such a row.

    Raises:
      NotOfOneKindError: The two cases do not fit.
    """
    if not isinstance(predicate.fact, HasRow):
        return None
    flag = predicate.fact.flag
    without, with_any = cases if predicate.fact.is_any else cases[::-1]
    number = constant_of(without) if isinstance(without, Copy) else None
    if number is not None and number > 0 and counted_flag(with_any) == flag:
        return AtLeast(with_any.power, flag=flag)
    if isinstance(without, Zero) and isinstance(with_any, Part):
        if flag in with_any.zeros:
            return with_any
    if isinstance(without, SAME_FOR_ALL) and isinstance(with_any, Mean):
        if with_any.vanishes and with_any.fact == Count(flag):
            return with_any
    raise NotOfOneKindError(f"no rule for a choice by {predicate}")


@rule("div", Part, AtLeast, knows_identity=True)
def _mean_of_flagged(pair: EquationPair, x: Part, y: AtLeast) -> Kind:
    """Answer a sum over rows with a flag, divided by their guarded count: a mean."""
    is_whole = pair.dtype(0).kind in "iu"
    if pair.shape(1) != () or y.flag not in x.zeros or is_whole:
        raise refused(pair)
    return Mean(x.power, y.power, vanishes=True, fact=Count(y.flag))


@rule("div", Part, Part, knows_identity=True)
def _mean_by_part(pair: EquationPair, x: Part, y: Part) -> Kind:
    """Answer a part divided by any part of the same tower: a mean.

    A tower where the divisor is 0 gets NaN, so no product makes such a mean a part
    again.
    """
    if pair.shape(1) != () or pair.dtype(0).kind in "iu":
        raise refused(pair)
    return Mean(x.power, y.power)


@rule("neg", Mean, knows_identity=True)
def _negative_mean(pair: EquationPair, x: Mean) -> Kind:
    """Answer the negative of a mean, which is the mean of the negatives."""
    return x


@rule("mul", Mean, Copy, knows_identity=True, commutes=True)
def _multiple_of_mean(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """Answer a mean times a replicated value, which is a mean: the powers of T add."""
    return x.replace(power=x.power + y.power)


@rule("div", Mean, Copy, knows_identity=True)
def _part_of_mean(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """Answer a mean divided by a replicated value, which is a mean."""
    if pair.dtype(0).kind in "iu":
        raise refused(pair)
    return x.replace(power=x.power - y.power)


@rule("mul", Mean, Part, knows_identity=True, commutes=True)
def _part_again(pair: EquationPair, x: Mean, y: Part) -> Kind:
    """Answer a mean times its divisor, which is the part that was divided."""
    if x.fact is None or y.fact != x.fact:
        raise refused(pair)
    return part(x.power)


@rule("add sub add_any", Mean, Zero, knows_identity=True, commutes=True)
def _mean_and_zero(pair: EquationPair, x: Mean, y: Zero) -> Kind:
    """Answer a mean plus or minus 0, which is that mean."""
    return x


@rule("add sub add_any", Mean, Copy, knows_identity=True, commutes=True)
def _mean_and_copy(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """Answer a mean x / n plus a replicated value c, which is (x + c n) / n."""
    if y.power + x.divisor != x.power:
        raise refused(pair)
    return x


@rule("add sub add_any", Mean, Mean, knows_identity=True)
def _sum_of_means(pair: EquationPair, x: Mean, y: Mean) -> Kind:
    """Answer the sum of two means by one divisor n: x / n + y / n = (x + y) / n."""
    if (x.power, x.fact) != (y.power, y.fact):
        raise refused(pair)
    return x.replace(vanishes=x.vanishes and y.vanishes)
