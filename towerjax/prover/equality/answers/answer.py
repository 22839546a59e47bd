"""The proof's answer for a merged result, from its kind: proved, refuted or unknown."""

import enum
from fractions import Fraction
from typing import Any, NamedTuple

from towerjax.prover.equality.answers.reasons import reason_of_kinds
from towerjax.prover.equality.answers.says import Says
from towerjax.prover.equality.kinds.kinds import (
    ELEMENTS,
    PADDING,
    Copy,
    Kind,
    Maximum,
    Mean,
    Minimum,
    Part,
    Power,
    TowerRows,
    Unknown,
    Zero,
    as_part,
    blocks_of,
)
from towerjax.prover.equality.kinds.reasons import Reason


class Merge(enum.Enum):
    """The ways in which the towers' values of a result are merged into one value."""

    SUM = "added up"
    MEAN = "added up, and divided by what another result adds up to"
    ROWS = "joined"
    TABLE_ROWS = "joined, and added up where their indices are the same"
    REPLICATED = "the same on all towers"
    PER_TOWER = "each tower's own"
    MAXIMUM = "the largest"
    MINIMUM = "the smallest"
    OTHER = "merged by a function of its own"


class ProvedResult(NamedTuple):
    """What is known of a result of two programs, for two numbers of towers."""

    value: Kind
    # m if dim 0 has m times a tower's rows; None if its size is no such multiple.
    times_rows: Fraction | None
    is_of_one_shape: bool  # whether no dim depends on the number of towers

    @property
    def is_the_same(self) -> bool:
        """Whether the value is replicated, and the same for both numbers of towers."""
        is_copy = isinstance(self.value, Copy | Zero) and not self.value.power
        return is_copy and self.is_of_one_shape


class Answer(NamedTuple):
    """The proof's answer for one leaf."""

    says: Says
    why: str = ""  # the reason, if it is not proved
    advice: str = ""  # what to write, if it is refuted
    has_line: bool = False  # whether the reason names a line of the program
    reason: Reason | None = None  # the typed reason, if there is one


_KIND_OF = {Merge.MAXIMUM: Maximum, Merge.MINIMUM: Minimum}
_PROVED = Answer(Says.PROVED)
_MEAN_OF_ROWS = (
    "Return tj.Weighted(sum, weight) with the weights of the same rows, or"
    " tj.Weighted.mean(values, tower.weight)."
)
_FREE_OF_NUMBER = (
    "Do not multiply or divide by the number of towers or of a tower's rows: sums are"
    " added over towers, and divided once, by the sum of all weights. A Python counter"
    " is another number in each trace: read tower.step."
)
_NO_COPY = (
    "All T towers have the same value, so that their sum is T times as large. Return"
    " the value without tj.Sum, or return tj.Weighted(x, 1.0)."
)


def answer_for(
    merge: Merge, value: Kind, weight: Kind | None, has_rows: bool
) -> Answer:
    """Answer for a leaf: proved if its merged value is one tower's.

    ``weight`` is the kind of the result that a mean is divided by. ``has_rows`` tells
    whether dim 0 of the leaf is that of the tower's rows.
    """
    unknown = [x for x in (value, weight) if x and isinstance(x, Unknown)]
    if unknown:
        return _of_unknown(unknown[0])
    if merge is Merge.OTHER:
        return Answer(Says.UNKNOWN, f"it is {merge.value}")
    if merge is Merge.ROWS:
        return _of_rows(value, has_rows)
    if isinstance(value, Zero) and (weight is None or not isinstance(weight, Zero)):
        return _PROVED
    if merge is Merge.REPLICATED:
        return _off_by(value, Copy, value.power, _FREE_OF_NUMBER)
    if merge in _KIND_OF:
        # The largest of equal values is that value, so a replicated value will do, too.
        is_copy = isinstance(value, Copy)
        wanted = Copy if is_copy else _KIND_OF[merge]
        return _off_by(value, wanted, value.power, _FREE_OF_NUMBER)
    if merge is Merge.SUM:
        advice = _FREE_OF_NUMBER if isinstance(value, Part) else _NO_COPY
        value = as_part(value)
        return _off_by(value, Part, value.power, advice)
    assert weight is not None
    return _of_mean(value, weight)


def _of_unknown(value: Unknown) -> Answer:
    """Answer that a value is unknown, with its reason, which names a line."""
    return Answer(Says.UNKNOWN, value.why, has_line=True, reason=value.reason)


def _of_rows(value: Kind, has_rows: bool) -> Answer:
    """Answer for a leaf of rows, which are joined to the batch's rows."""
    if isinstance(value, Zero) and has_rows:
        return _PROVED
    if not has_rows or blocks_of(value) > 1:
        return Answer(Says.UNKNOWN, "its dim 0 is not that of the tower's rows")
    kind = TowerRows if isinstance(value, TowerRows) else Copy
    return _off_by(value, kind, value.power, _FREE_OF_NUMBER)


def answer_for_table_rows(value: Kind, at: ProvedResult, padded: bool) -> Answer:
    """Answer for rows of a table, which are added up by their indices.

    If all towers have the same indices, the values are a sum like any other.
    """
    indices = at.value
    for x in (value, indices):
        if isinstance(x, Unknown):
            return _of_unknown(x)
    if isinstance(value, Zero):
        return _PROVED
    if not isinstance(indices, ELEMENTS) or indices.power:
        return Answer(Says.UNKNOWN, f"its indices are {indices}")
    if at.times_rows is None:
        total = as_part(value)
        return _off_by(total, Part, total.power, _FREE_OF_NUMBER)
    if not isinstance(value, ELEMENTS):
        return Answer(Says.UNKNOWN, f"it is {value}, at indices that are {indices}")
    orders = {x.blocks for x in (value, indices) if isinstance(x, TowerRows)}
    if len(orders) > 1:
        return Answer(Says.UNKNOWN, "its values and its indices are of different rows")
    if padded and PADDING not in value.zeros:
        return Answer(Says.UNKNOWN, "padding counts in it")
    return _off_by(value, type(value), value.power, _FREE_OF_NUMBER)


def _off_by(value: Kind, wanted: type[Kind], power: Any, advice: str) -> Answer:
    """Refute a value of the right kind whose power of T is not 0.

    A value of another kind than ``wanted`` is unknown. One with power 0 is proved.
    """
    if type(value) is not wanted:
        why = f"it is {value}, and not {wanted.name}"
        return Answer(Says.UNKNOWN, why, reason=reason_of_kinds([value]))
    if not power:
        return _PROVED
    return Answer(Says.REFUTED, _told(power), advice, _has_line(power))


def _of_mean(value: Kind, weight: Kind) -> Answer:
    """Answer for a mean, whose sum and weight must have one power of T."""
    if isinstance(value, Mean) and isinstance(weight, Copy):
        why = "it is an average of the towers' averages, each over its rows"
        return Answer(Says.REFUTED, why, _MEAN_OF_ROWS)
    # The number of a tower's rows is replicated, with power -1. It is also the sum of a
    # 1 for each row, so the advice for a weight that is no sum does not fit it.
    is_copy = [isinstance(x, Copy) and x.power != -1 for x in (value, weight)]
    advice = _MEAN_OF_ROWS if True in is_copy else _FREE_OF_NUMBER
    total = as_part(value)
    of_weights = as_part(weight)
    if not (isinstance(total, Part) and isinstance(of_weights, Part)):
        why = f"it is {value}, divided by {weight}"
        return Answer(Says.UNKNOWN, why, reason=reason_of_kinds([value, weight]))
    power = total.power - of_weights.power
    if power == -1 and is_copy == [False, True]:
        why = _told(power) + ": its weight is no sum over rows, and is added T times"
        return Answer(Says.REFUTED, why, advice, _has_line(power))
    powers = [x.power for x in (value, weight) if isinstance(x.power, Power)]
    if power and powers:
        power = Power(power, powers[0].line)
    return _off_by(total, Part, power, advice)


def _has_line(power: Any) -> bool:
    """Return whether it is known at which line a value got its power of T."""
    return isinstance(power, Power) and bool(power.line)


def _told(power: Any) -> str:
    """Word a power of T: the factor, and the line where it came in."""
    line = power.line if isinstance(power, Power) else ""
    size = "T" if abs(power) == 1 else f"T^{abs(Fraction(power))}"
    factor = size if power > 0 else f"1/{size}"
    text = f"on T towers it is {factor} times what it is on one"
    return f"{text}, since a factor at {line}" if line else text
