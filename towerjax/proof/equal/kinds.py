"""Kinds: how a value on each of T towers relates to the value on one tower.

A proof compares two numbers of towers, ``a`` and ``b``, on one global batch. A kind
with the power ``p`` says that the towers' values, put together as the kind says, are
for ``b`` towers ``(b / a)^p`` times what they are for ``a`` towers.
"""

import dataclasses
import enum
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from towerjax.proof.equal.nouns import nouns


class Kind(enum.Enum):
    """The kinds; a member's value is its text for errors, with fields for nouns."""

    UNKNOWN = "unknown"
    ZERO = "zero"
    # Each tower has the value. If it has a dim of rows, it is constant along it.
    COPY = "a replicated value"
    # The value is the towers' values, joined along their dim of rows.
    ROWS = "{its} rows"
    # The value is the sum of the towers' values.
    PART = "a sum over {its} rows"
    # Rows along several dims, in the order of the note; see `Groups`.
    SPREAD = "{its} rows in groups"
    # The value is the largest, or smallest, of the towers' values.
    MAXIMUM = "a maximum over {its} rows"
    MINIMUM = "a minimum over {its} rows"
    # A part divided by a part of the tower's own; see `guards`.
    MEAN = "a mean over {its} rows"
    # The towers' values one after another; the note is their kind.
    STACKED = "the values of all {many}"

    # Numbers and keys of a tower's own.
    TOWER = "{number}"
    FIRST_ROW = "the number of a {one}'s first row"
    NUMBERS = "the numbers of {its} rows"
    COLUMNS = "indices with the numbers of {its} rows"
    # Each number once; the note is the order.
    ORDER = "the numbers of {its} rows in another order"
    KEY = "a {one}'s own key"
    VALID = "the number of {its} rows without padding"
    SIZE = "the number of {its} rows, padding included"
    IS_FULL = "whether none of {its} rows is padding"
    # The number of rows with the flag in the note, or any number above 0 if there is
    # none.
    AT_LEAST = "the number of rows with a flag, or another number if there are none"

    # In a loop over rows.
    ROW = "a value of one row"
    SO_FAR = "the sum of the rows so far"
    COUNTER = "the number of the row in a loop"
    NEXT = "the number of the next row in a loop"
    BUFFER = "an array that a loop fills row by row"

    @property
    def text(self) -> str:
        """The words for it in an error."""
        return in_nouns(self.value)


def in_nouns(template: str) -> str:
    """Return a text with the nouns in the places of its fields."""
    return template.format_map(nouns()._asdict())


PADDING = "padding"
"""The member of `Known.zeros` that stands for padding rows."""

ROWS_OF_TOWER = "rows of a tower"
"""The note of a copy that is the number of a tower's rows."""


class InPadding(enum.IntEnum):
    """What is known of a value in padding rows; a smaller member says less."""

    ANY = 0  # it may be infinite
    FINITE = 1
    # Computed from the row's values as an example's is, and not from its padding. It is
    # finite, because what is computed from any example is assumed to be finite.
    AS_EXAMPLE = 2


class Identity(int):
    """The identity of one value of a program, or of one flag."""


@dataclasses.dataclass(frozen=True)
class OneValue:
    """One value of the program, with its derivative."""

    number: Identity


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of each row, 0 or 1; that of PADDING says that a row is no padding."""

    flag: Identity | str


@dataclasses.dataclass(frozen=True)
class Count:
    """The number of rows with a flag."""

    flag: Identity | str


@dataclasses.dataclass(frozen=True)
class HasRow:
    """Whether a tower has a row with a flag, or has none."""

    flag: Identity | str
    is_any: bool


@dataclasses.dataclass(frozen=True)
class InfinitePadding:
    """Rows whose padding is minus or plus infinity."""

    sign: int


@dataclasses.dataclass(frozen=True)
class NumberInBatch:
    """Rows that are each row's number in the whole batch, which has no padding."""


LOWEST = InfinitePadding(-1)
HIGHEST = InfinitePadding(1)


@dataclasses.dataclass(frozen=True)
class RowsInTurn:
    """Rows that towers get in turn: tower t has the rows t, t + T, t + 2 T, ...

    As the note of STACKED it says that the towers' values are such rows.
    """

    @property
    def text(self) -> str:
        """The words for it in an error, as those of a `Kind`."""
        return in_nouns(PERMUTED)


class Power(Fraction):
    """A power of the number of towers, and the line where a value got it."""

    __slots__ = ("line",)
    line: str

    def __new__(cls, power: Any, line: str) -> "Power":
        """The number ``power``, with a line."""
        self = super().__new__(cls, power)
        self.line = line
        return self


PERMUTED = "{its} rows in another order"


NO_ZEROS: frozenset[Any] = frozenset()


class Groups(NamedTuple):
    """The way in which an array has the tower's rows along several dims.

    Attributes:
      dims: The dims, outermost first, that together have each row in order.
      each: Whether an element belongs to one row; otherwise the elements along the dims
        add up to a sum over rows.
      order: None; or the other order that the rows are in, counted over all towers,
        each row once. The same order is the same value of the program.
    """

    dims: tuple[int, ...]
    each: bool
    order: Any = None


class Known(NamedTuple):
    """What is known of a value in two programs."""

    kind: Kind
    power: Any = 0  # of the number of towers; None for a sum to which nothing was added
    # The number of blocks in the dim of rows; each block has all rows in order.
    blocks: int = 1
    # Where the value is 0: PADDING, and flags without which all of it is 0.
    zeros: frozenset[Any] = NO_ZEROS
    # What else is known of it; equal values of one of these types are the same value.
    fact: OneValue | Flag | Count | HasRow | InfinitePadding | NumberInBatch | None = (
        None
    )
    # For a COPY its number, if that is known; for other kinds as the kind says.
    note: Any = None
    in_padding: InPadding = InPadding.ANY
    why: str = ""  # for UNKNOWN: the reason, with a line

    def bare(self) -> "Known":
        """The same, without what holds only in one trip of a loop."""
        zeros = self.zeros & {PADDING}
        note = None if self.kind is Kind.COPY else self.note
        return self._replace(zeros=zeros, fact=None, note=note)

    def times_tower(self, power: Any) -> "Known":
        """The same kind with another power, as another value."""
        note = None if self.kind is Kind.COPY else self.note
        return self._replace(power=power, fact=None, note=note)

    def __str__(self) -> str:
        by = _told_power(self.power)
        is_permuted = isinstance(self.note, Groups) and self.note.order is not None
        return (in_nouns(PERMUTED) if is_permuted else self.kind.text) + by


def _told_power(power: Any) -> str:
    """The text for a power of the number of towers, after a kind."""
    match power:
        case None | 0:
            return ""
        case 1:
            return f" times the number of {nouns().many}"
        case -1:
            return f" divided by the number of {nouns().many}"
        case _:
            return f" times the number of {nouns().many}^({Fraction(power)})"


ZERO = Known(Kind.ZERO)
SIZE = Known(Kind.SIZE, note=ROWS_OF_TOWER)
EACH = frozenset([Kind.COPY, Kind.ROWS, Kind.ROW, Kind.ZERO])
"""Kinds that any function of their elements keeps."""

LINEAR = EACH | {Kind.PART}
"""Kinds that a linear function of the elements of one value keeps."""


def copy(power: Any = 0, note: Any = None) -> Known:
    """The kind of a value that is the same on all towers."""
    found = Known(Kind.COPY, Fraction(power), note=note)
    return found._replace(in_padding=InPadding.AS_EXAMPLE)


def rows(power: Any = 0, blocks: int = 1) -> Known:
    """The kind of rows of the batch."""
    return Known(Kind.ROWS, Fraction(power), blocks)


def permuted(x: Known, axis: int, order: Any) -> Known:
    """The kind of rows in another order along their dim."""
    return Known(Kind.SPREAD, x.power, note=Groups((axis,), True, order))


def of_one_tower(x: Known, axis: int | None) -> Known:
    """The kind of one tower's value, from that of the values of all towers.

    ``axis`` is its dim of rows.
    """
    if x.note is Kind.TOWER:
        return Known(Kind.TOWER)
    if axis is None or x.note not in (Kind.ROWS, RowsInTurn()):
        return Known(x.note, x.power)
    own = rows(x.power)._replace(in_padding=InPadding.AS_EXAMPLE)
    return own if x.note is Kind.ROWS else permuted(own, axis, x.note)


def part(power: Any = 0) -> Known:
    """The kind of a part of a sum over towers."""
    return Known(Kind.PART, Fraction(power))


def as_part(value: Known) -> Known:
    """The value as a part: T copies add up to T times a copy."""
    is_copy = value.kind is Kind.COPY
    return part(value.power + 1) if is_copy else value


class NotOfOneKindError(Exception):
    """The values have no kind in common; the text says why."""


def joined(values: Sequence[Known], verb: str = "added to") -> Known:
    """The kind of values of one shape that are joined, added or chosen from.

    Raises:
      NotOfOneKindError: Their kinds, powers or orders do not fit.
    """
    live = [x for x in values if x.kind is not Kind.ZERO]
    if not live:
        return ZERO
    kinds = {x.kind for x in live}
    if kinds == {Kind.PART, Kind.COPY}:
        live = [as_part(x) for x in live]
        kinds = {Kind.PART}
    alone = {Kind.PART, Kind.MAXIMUM, Kind.MINIMUM}
    fits = kinds <= {Kind.COPY, Kind.ROWS} or kinds <= {Kind.COPY, Kind.ROW}
    fits |= len(kinds) == 1 and kinds <= alone
    is_even = len({x.power for x in live}) == 1
    if not (fits and is_even):
        first = live[0]
        odd = [x for x in live if (x.kind, x.power) != (first.kind, first.power)]
        other = odd[0] if odd else live[-1]
        raise NotOfOneKindError(f"no rule for {first} {verb} {other}")
    orders = {x.blocks for x in live if x.kind is Kind.ROWS}
    if len(orders) > 1:
        raise NotOfOneKindError("rows meet rows in another order")
    found = next((x for x in live if x.kind is not Kind.COPY), live[0])
    return Known(found.kind, found.power, found.blocks)


def added(values: Sequence[Known]) -> Known:
    """The kind of the sum of values of one shape.

    Raises:
      NotOfOneKindError: The error of `joined`; or one value is a maximum or minimum.
    """
    extremes = (Kind.MAXIMUM, Kind.MINIMUM)
    if extreme := next((x for x in values if x.kind in extremes), None):
        raise NotOfOneKindError(f"no rule for a sum of {extreme} and other values")
    return joined(values)


def function_of(values: Sequence[Known], what: str) -> Known:
    """The kind of any function of the elements of its operands.

    Raises:
      NotOfOneKindError: One of the operands is neither a copy nor rows, or has a power.
    """
    for x in values:
        if x.kind not in EACH or x.power:
            raise NotOfOneKindError(f"no rule for {what} of {x}")
    return joined([as_copy(x) for x in values], "together with")


def as_copy(value: Known) -> Known:
    """The value, as a copy if it is 0."""
    return copy() if value.kind is Kind.ZERO else value


def product_of(x: Known, y: Known, verb: str = "times") -> Known:
    """The kind of the elementwise product of two values.

    Zero is a copy here: the product with a value that may be infinite is not 0.

    Raises:
      NotOfOneKindError: Neither value is a copy, and they are not both rows.
    """
    x = as_copy(x)
    y = as_copy(y)
    power = x.power + y.power if None not in (x.power, y.power) else None
    for one, other in ((x, y), (y, x)):
        if one.kind is Kind.PART and other.kind is Kind.COPY:
            return part(power)
    if not {x.kind, y.kind} <= EACH:
        raise NotOfOneKindError(f"no rule for {x} {verb} {y}")
    both = joined([x.times_tower(0), y.times_tower(0)], verb)
    return both.times_tower(power)
