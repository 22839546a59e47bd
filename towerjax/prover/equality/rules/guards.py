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
    """Return the kind of rows that hold 0 or 1, with a new flag as its fact.

    Any other kind is returned unchanged.
    """
    if not isinstance(value, TowerRows):
        return value
    number = pair.walk.new_identity()
    return value.replace(fact=Flag(number), zeros=value.zeros | {number})


def flag_of(pair: EquationPair, value: Kind) -> Kind:
    """Return `as_flag` of the kind if all operands of the equation are flags.

    If they are not, return the kind unchanged.
    """
    are_flags = all(isinstance(x.fact, Flag) for x in pair.ins)
    return as_flag(pair, value) if are_flags else value


def counted_flag(value: Kind) -> Any:
    """Return the flag whose rows a value counts; None if the value is no such count."""
    is_count = isinstance(value, Part) and isinstance(value.fact, Count)
    return value.fact.flag if is_count else None  # type: ignore


def has_any(flag: Any, is_any: bool) -> Kind:
    """Return the kind of a bool that tells whether a tower has a row with a flag.

    If ``is_any`` is true, the bool is True for a tower that has one: a maximum over
    towers. Otherwise it is True for a tower that has none: a minimum.
    """
    kind = Maximum if is_any else Minimum
    return kind(fact=HasRow(flag, is_any))


@rule("eq ne lt le gt ge", Part, SAME_FOR_ALL, knows_identity=True, commutes=True)
def _count_compared(pair: EquationPair, x: Part, y: Kind) -> Kind:
    """Return the kind of a comparison of a count of rows with 0 or 1.

    The result tells whether a tower has a row with the flag that is counted.
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
    """Return the kind of `not` of an extreme of bools: the opposite extreme.

    The `not` of a maximum of bools is a minimum, and the reverse.
    """
    if pair.dtype(0).kind != "b":
        raise refused(pair)
    if isinstance(x.fact, HasRow):
        return has_any(x.fact.flag, not x.fact.is_any)
    return Minimum(x.power) if isinstance(x, Maximum) else Maximum(x.power)


@rule("max", Part, Copy, knows_identity=True, commutes=True)
def _at_least_one(pair: EquationPair, x: Part, y: Copy) -> Kind:
    """Return the kind of ``max(count, c)`` with a number c above 0 and at most 1.

    The number c replaces the count on a tower that counts no row, and nowhere else.
    """
    flag = counted_flag(x)
    bound = constant_of(y)
    if flag is None or bound is None or not 0 < bound <= 1:
        raise refused(pair)
    return AtLeast(x.power, flag=flag)


def chosen_by_any(predicate: Kind, cases: Sequence[Kind]) -> Kind | None:
    """Return the kind of a choice by whether a tower has a row with some flag.

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
    """Return the kind of a sum over rows with a flag, divided by their guarded count.

    It is a mean, whose dividend is 0 if the count is.
    """
    is_whole = pair.dtype(0).kind in "iu"
    if pair.shape(1) != () or y.flag not in x.zeros or is_whole:
        raise refused(pair)
    return Mean(x.power, y.power, vanishes=True, fact=Count(y.flag))


@rule("div", Part, Part, knows_identity=True)
def _mean_by_part(pair: EquationPair, x: Part, y: Part) -> Kind:
    """Return the kind of a part divided by any part of the same tower: a mean.

    A tower where the divisor is 0 gets NaN. So `_part_again` does not accept this mean.
    """
    if pair.shape(1) != () or pair.dtype(0).kind in "iu":
        raise refused(pair)
    return Mean(x.power, y.power)


@rule("neg", Mean, knows_identity=True)
def _negative_mean(pair: EquationPair, x: Mean) -> Kind:
    """Return the kind of the negative of a mean: a mean, of the negatives."""
    return x


@rule("mul", Mean, Copy, knows_identity=True, commutes=True)
def _multiple_of_mean(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """Return the kind of a mean times a replicated value: a mean.

    The exponents of T add up.
    """
    return x.replace(power=x.power + y.power)


@rule("div", Mean, Copy, knows_identity=True)
def _part_of_mean(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """Return the kind of a mean divided by a replicated value: a mean."""
    if pair.dtype(0).kind in "iu":
        raise refused(pair)
    return x.replace(power=x.power - y.power)


@rule("mul", Mean, Part, knows_identity=True, commutes=True)
def _part_again(pair: EquationPair, x: Mean, y: Part) -> Kind:
    """Return the kind of a mean times its divisor: the part that was divided."""
    if x.fact is None or y.fact != x.fact:
        raise refused(pair)
    return part(x.power)


@rule("add sub add_any", Mean, Zero, knows_identity=True, commutes=True)
def _mean_and_zero(pair: EquationPair, x: Mean, y: Zero) -> Kind:
    """Return the kind of a mean plus or minus 0: that mean."""
    return x


@rule("add sub add_any", Mean, Copy, knows_identity=True, commutes=True)
def _mean_and_copy(pair: EquationPair, x: Mean, y: Copy) -> Kind:
    """Return the kind of a mean x / n plus a replicated value c.

    It is a mean, (x + c n) / n.
    """
    if y.power + x.divisor != x.power:
        raise refused(pair)
    return x


@rule("add sub add_any", Mean, Mean, knows_identity=True)
def _sum_of_means(pair: EquationPair, x: Mean, y: Mean) -> Kind:
    """Return the kind of a sum of two means by one divisor n: a mean.

    It is x / n + y / n = (x + y) / n.
    """
    if (x.power, x.fact) != (y.power, y.fact):
        raise refused(pair)
    return x.replace(vanishes=x.vanishes and y.vanishes)
