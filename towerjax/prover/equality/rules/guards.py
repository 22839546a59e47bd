"""Means over a tower's rows: a part divided by another part of the same tower.

Such a mean depends on the split, but multiplied by its divisor it is a part again: the
product and the quotient cancel. For this to hold for derivatives, too, the divisor must
be a count of rows with a flag, which is an integer without a derivative, and the same
value of the program in both places; a mean behind a `stop_gradient` is another value. A
tower may have no row with the flag, so a guard is needed, such as ``max(count, 1)`` or
``where(count > 0, ...)``. The guard changes nothing in a sum over the counted rows:
without such rows the sum is 0, and its derivative, too.
"""

from collections.abc import Sequence
from typing import Any

from towerjax.prover.equality.kinds.equation_pair import EquationPair, constant_of
from towerjax.prover.equality.kinds.kinds import (
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
from towerjax.prover.equality.rules.rules import refused, rule

_ANY_IS = {"gt": True, "ne": True, "eq": False, "le": False}
_SWAPPED = {"lt": "gt", "gt": "lt", "ge": "le", "le": "ge"}


def as_flag(pair: EquationPair, value: Kind) -> Kind:
    """Give rows that hold 0 or 1 a new flag as their fact.

    Any other kind is returned unchanged.
    """
    if not isinstance(value, TowerRows):
        return value
    number = pair.walk.new_identity()
    return value.replace(fact=Flag(number), zeros=value.zeros | {number})


def flag_of(pair: EquationPair, value: Kind) -> Kind:
    """Make a flag of the kind if all operands of the equation are flags.

    If they are not, return the kind unchanged.
    """
    are_flags = all(isinstance(x.fact, Flag) for x in pair.ins)
    return as_flag(pair, value) if are_flags else value


def counted_flag(value: Kind) -> Any:
    """Find the flag whose rows a value counts; None if the value is no such count."""
    is_count = isinstance(value, Part) and isinstance(value.fact, Count)
    return value.fact.flag if is_count else None  # type: ignore


def has_any(flag: Any, is_any: bool) -> Kind:
    """Describe a bool that tells whether a tower has a row with a flag.

    If ``is_any`` is true, the bool is True for a tower that has one: a maximum over
    towers. Otherwise it is True for a tower that has none: a minimum.
    """
    kind = Maximum if is_any else Minimum
    return kind(fact=HasRow(flag, is_any))


@rule("eq ne lt le gt ge", Part, SAME_FOR_ALL, knows_identity=True, commutes=True)
def _count_compared(pair: EquationPair, x: Part, y: Kind) -> Kind:
    """``count > 0``: does a tower have a row with the flag that is counted?

    ``count >= 1`` asks the same, ``count == 0`` and ``count < 1`` the opposite. Any
    other comparison is refused.
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
    """``not max_t b_t = min_t (not b_t)``, for bools, and the reverse."""
    if pair.dtype(0).kind != "b":
        raise refused(pair)
    if isinstance(x.fact, HasRow):
        return has_any(x.fact.flag, not x.fact.is_any)
    return Minimum(x.power) if isinstance(x, Maximum) else Maximum(x.power)


@rule("max", Part, Copy, knows_identity=True, commutes=True)
def _at_least_one(pair: EquationPair, x: Part, y: Copy) -> Kind:
    """``max(count, c)`` with ``0 < c <= 1`` is a count that is never 0.

    The number c replaces the count on a tower that counts no row, and nowhere else.
    """
    flag = counted_flag(x)
    bound = constant_of(y)
    if flag is None or bound is None or not 0 < bound <= 1:
        raise refused(pair)
    return AtLeast(x.power, flag=flag)


def chosen_by_any(predicate: Kind, cases: Sequence[Kind]) -> Kind | None:
    """Choose by whether a tower has a row with some flag.

    The result is None if ``predicate`` does not tell whether there is such a row.

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
    """``sum / max(count, 1)`` is a mean over the rows with a flag.

    Its dividend is 0 if the count is.
    """
    is_whole = pair.dtype(0).kind in "iu"
    if pair.shape(1) != () or y.flag not in x.zeros or is_whole:
        raise refused(pair)
    return Mean(x.power, y.power, vanishes=True, fact=Count(y.flag))


@rule("div", Part, Part, knows_identity=True)
def _mean_by_part(pair: EquationPair, x: Part, y: Part) -> Kind:
    """``x_t / y_t``: a part divided by any part of the same tower is a mean.

    A tower where the divisor is 0 gets NaN. So `_part_again` does not accept this mean.
    """
    if pair.shape(1) != () or pair.dtype(0).kind in "iu":
        raise refused(pair)
    return Mean(x.power, y.power)


@rule("neg", Mean, knows_identity=True)
def _negative_mean(pair: EquationPair, x: Mean) -> Kind:
    """``-(x / n) = (-x) / n``."""
    return x


@rule("mul", Mean, Copy, knows_identity=True, commutes=True)
def _multiple_of_mean(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """``(T^p x / n) * T^q c = T^(p+q) (c x / n)``."""
    return x.replace(power=x.power + y.power)


@rule("div", Mean, Copy, knows_identity=True)
def _part_of_mean(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """``(T^p x / n) / (T^q c) = T^(p-q) (x / c) / n``."""
    if pair.dtype(0).kind in "iu":
        raise refused(pair)
    return x.replace(power=x.power - y.power)


@rule("mul", Mean, Part, knows_identity=True, commutes=True)
def _part_again(pair: EquationPair, x: Mean, y: Part) -> Kind:
    """``(x / n) * n = x``: a mean times its own divisor is a part."""
    if x.fact is None or y.fact != x.fact:
        raise refused(pair)
    return part(x.power)


@rule("add sub add_any", Mean, Zero, knows_identity=True, commutes=True)
def _mean_and_zero(pair: EquationPair, x: Mean, y: Zero) -> Kind:
    """``x / n + 0 = x / n``."""
    return x


@rule("add sub add_any", Mean, Copy, knows_identity=True, commutes=True)
def _mean_and_copy(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """``x / n + c = (x + c n) / n``; refuse another power of ``c n`` than of ``x``."""
    if y.power + x.divisor != x.power:
        raise refused(pair)
    return x


@rule("add sub add_any", Mean, Mean, knows_identity=True)
def _sum_of_means(pair: EquationPair, x: Mean, y: Mean) -> Kind:
    """``x / n + y / n = (x + y) / n``; refuse other powers and divisors."""
    if (x.power, x.fact) != (y.power, y.fact):
        raise refused(pair)
    return x.replace(vanishes=x.vanishes and y.vanishes)
