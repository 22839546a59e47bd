"""Kinds: how a value on each of T towers relates to the value on one tower.

A proof compares two numbers of towers, ``a`` and ``b``, on one global batch. A kind
with the power ``p`` says that the towers' values, put together as the kind says, are
for ``b`` towers ``(b / a)^p`` times what they are for ``a`` towers.

Each kind is a type, with a field for all that is known of such a value. What each means
is a function of values in ``tests/proof/meanings.py``.
"""

import dataclasses
import enum
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, TypeAlias

PADDING = "padding"
"""The member of `Kind.zeros` that stands for padding rows."""

NO_ZEROS: frozenset[Any] = frozenset()


class InPadding(enum.IntEnum):
    """What is known of a value in padding rows; a smaller member says less."""

    ANY = 0  # it may be infinite
    FINITE = 1
    # Computed from the row's values as an example's is, and not from its padding. It is
    # finite, because what is computed from any example is assumed to be finite.
    AS_EXAMPLE = 2


# What else is known of a value.


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

Fact: TypeAlias = OneValue | Flag | Count | HasRow | InfinitePadding | NumberInBatch
"""Equal values of one of these types are the same value."""


class Power(Fraction):
    """A power of the number of towers, and the line where a value got it."""

    __slots__ = ("line",)
    line: str

    def __new__(cls, power: Any, line: str) -> "Power":
        """The number ``power``, with a line."""
        self = super().__new__(cls, power)
        self.line = line
        return self


NO_POWER = Fraction(0)


# The kinds.


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of a value in two programs.

    Attributes:
      power: The power of the number of towers; None for a sum to which nothing was
        added.
      zeros: Where the value is 0: PADDING, and flags without which all of it is 0.
      fact: What else is known of it.
      in_padding: What is known of its padding.
    """

    power: Any = NO_POWER
    zeros: frozenset[Any] = dataclasses.field(default=NO_ZEROS, kw_only=True)
    fact: Fact | None = dataclasses.field(default=None, kw_only=True)
    in_padding: InPadding = dataclasses.field(default=InPadding.ANY, kw_only=True)

    name: ClassVar[str]  # for reasons, with fields for `Nouns`
    # The fields that say which value it is, as they are where that is not known.
    no_identity: ClassVar[dict[str, None]] = {"fact": None}

    def replace(self, **fields: Any) -> Any:
        """Return the same kind with other fields."""
        return dataclasses.replace(self, **fields)

    def bare(self) -> Any:
        """Return the same, without what holds only in one trip of a loop."""
        return self.replace(zeros=self.zeros & {PADDING}, **self.no_identity)

    def times_tower(self, power: Any) -> Any:
        """Return the same kind with another power, as another value."""
        return self.replace(power=power, **self.no_identity)

    def without_identity(self) -> Any:
        """Return the same, without which value it is and where it is 0."""
        return self.replace(zeros=NO_ZEROS, **self.no_identity)

    def __str__(self) -> str:
        return self.name + _told_power(self.power)


def _told_power(power: Any) -> str:
    """The text for a power of the number of towers, after a kind."""
    match power:
        case None | 0:
            return ""
        case 1:
            return " times the number of {many}"
        case -1:
            return " divided by the number of {many}"
        case _:
            return f" times the number of {{many}}^({Fraction(power)})"


@dataclasses.dataclass(frozen=True)
class Unknown(Kind):
    """Nothing is known; ``why`` is the reason, with a line."""

    name = "unknown"
    why: str = dataclasses.field(default="", kw_only=True)


@dataclasses.dataclass(frozen=True)
class Zero(Kind):
    """0, for all towers."""

    name = "zero"


class RowsOfTower(enum.Enum):
    """The number of a tower's rows, which no program says as a number."""

    NUMBER = "rows of a tower"


ROWS_OF_TOWER = RowsOfTower.NUMBER


@dataclasses.dataclass(frozen=True)
class Copy(Kind):
    """Each tower has the value. If it has a dim of rows, it is constant along it.

    ``number`` is the number that it is, if that is known.
    """

    name = "a replicated value"
    no_identity = {"fact": None, "number": None}
    number: bool | int | float | RowsOfTower | None = None


@dataclasses.dataclass(frozen=True)
class TowerRows(Kind):
    """The value is the towers' values, joined along their dim of rows.

    ``blocks`` is the number of blocks in the dim; each block has all rows in order.
    """

    name = "{its} rows"
    blocks: int = 1


@dataclasses.dataclass(frozen=True)
class Part(Kind):
    """The value is the sum of the towers' values."""

    name = "a sum over {its} rows"


class GroupDims(NamedTuple):
    """The way in which an array has the tower's rows along several dims.

    Attributes:
      dims: The dims, outermost first, that together have each row in order.
      by_row: Whether an element belongs to one row; otherwise the elements along the
        dims add up to a sum over rows.
      order: None; or the other order that the rows are in, counted over all towers,
        each row once. The same order is the same value of the program.
    """

    dims: tuple[int, ...]
    by_row: bool
    order: Any = None


PERMUTED = "{its} rows in another order"


@dataclasses.dataclass(frozen=True)
class Groups(Kind):
    """Rows along several dims, or along one in another order."""

    layout: GroupDims = dataclasses.field(kw_only=True)

    @property
    def name(self) -> str:
        """The text for errors."""
        in_order = self.layout.order is None
        return "{its} rows in groups" if in_order else PERMUTED


@dataclasses.dataclass(frozen=True)
class Maximum(Kind):
    """The value is the largest of the towers' values."""

    name = "a maximum over {its} rows"


@dataclasses.dataclass(frozen=True)
class Minimum(Kind):
    """The value is the smallest of the towers' values."""

    name = "a minimum over {its} rows"


@dataclasses.dataclass(frozen=True)
class Mean(Kind):
    """A part divided by a part of the tower's own; see `guards`.

    ``divisor`` is the power of the divisor. ``vanishes`` tells whether the dividend is
    0 where the divisor is.
    """

    name = "a mean over {its} rows"
    divisor: Any = NO_POWER
    vanishes: bool = False


@dataclasses.dataclass(frozen=True)
class RowsInTurn:
    """Rows that towers get in turn: tower t has the rows t, t + T, t + 2 T, ..."""

    name = PERMUTED  # for errors, as that of a `Kind`


@dataclasses.dataclass(frozen=True)
class Stacked(Kind):
    """The towers' values one after another, each of the kind ``of``."""

    name = "the values of all {many}"
    of: type[Kind] | RowsInTurn = dataclasses.field(kw_only=True)


# Numbers and keys of a tower's own.


@dataclasses.dataclass(frozen=True)
class TowerId(Kind):
    """The number of the tower."""

    name = "{number}"


@dataclasses.dataclass(frozen=True)
class FirstRow(Kind):
    """The number of a tower's first row in the whole batch."""

    name = "the number of a {one}'s first row"


@dataclasses.dataclass(frozen=True)
class RowNumbers(Kind):
    """The numbers of a tower's rows, which start at 0 on each tower."""

    name = "the numbers of {its} rows"


@dataclasses.dataclass(frozen=True)
class RowOrder(Kind):
    """The numbers of the tower's rows in another order, each number once."""

    name = "the numbers of {its} rows in another order"
    order: Any = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Columns(Kind):
    """Indices, of which each column has a kind of its own; an order is told whole."""

    name = "indices with the numbers of {its} rows"
    columns: tuple[type[Kind] | RowOrder, ...] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Key(Kind):
    """A tower's own key, which stands for one key per row."""

    name = "a {one}'s own key"


@dataclasses.dataclass(frozen=True)
class Valid(Kind):
    """The number of the tower's rows that are no padding."""

    name = "the number of {its} rows without padding"


@dataclasses.dataclass(frozen=True)
class Size(Kind):
    """The number of the tower's rows, of towers that may have padding."""

    name = "the number of {its} rows, padding included"


@dataclasses.dataclass(frozen=True)
class IsFull(Kind):
    """Whether a tower has no padding."""

    name = "whether none of {its} rows is padding"


@dataclasses.dataclass(frozen=True)
class AtLeast(Kind):
    """The number of rows with a flag, or any number above 0 if there are none."""

    name = "the number of rows with a flag, or another number if there are none"
    flag: Any = dataclasses.field(kw_only=True)


# In a loop over rows.


@dataclasses.dataclass(frozen=True)
class Row(Kind):
    """The value of one row."""

    name = "a value of one row"


@dataclasses.dataclass(frozen=True)
class SoFar(Kind):
    """A carry that only grows: the sum, or an extreme, of the trips so far.

    ``carry`` is its number among the loop's carries. ``extreme`` is the kind of the
    extreme that it is; None for a sum, and for a carry that nothing has changed.
    """

    name = "the sum of the rows so far"
    carry: int = dataclasses.field(kw_only=True)
    extreme: type[Maximum | Minimum] | None = dataclasses.field(
        default=None, kw_only=True
    )


@dataclasses.dataclass(frozen=True)
class Counter(Kind):
    """The number of the row in a loop."""

    name = "the number of the row in a loop"


@dataclasses.dataclass(frozen=True)
class NextRow(Kind):
    """The number of the next row in a loop."""

    name = "the number of the next row in a loop"


@dataclasses.dataclass(frozen=True)
class Buffer(Kind):
    """An array that a loop fills row by row; ``carry`` is its number."""

    name = "an array that a loop fills row by row"
    carry: int = dataclasses.field(kw_only=True)


ALL_KINDS: tuple[type[Kind], ...] = (
    *(Unknown, Zero, Copy, TowerRows, Part, Groups, Maximum, Minimum, Mean, Stacked),
    *(
        TowerId,
        FirstRow,
        RowNumbers,
        RowOrder,
        Columns,
        Key,
        Valid,
        Size,
        IsFull,
        AtLeast,
    ),
    *(Row, SoFar, Counter, NextRow, Buffer),
)
"""All kinds."""

ELEMENTS: TypeAlias = Copy | TowerRows | Row | Zero
"""Kinds that any function of their elements keeps."""

LINEAR: TypeAlias = ELEMENTS | Part
"""Kinds that a linear function of the elements of one value keeps."""

SAME_FOR_ALL: TypeAlias = Copy | Zero
"""Kinds of a value that all towers have."""

EXTREME: TypeAlias = Maximum | Minimum
"""Kinds of an extreme over the tower's rows."""

ZERO = Zero()
SIZE = Size()


def copy(power: Any = 0, number: Any = None) -> Copy:
    """Return the kind of a value that is the same on all towers."""
    return Copy(Fraction(power), number, in_padding=InPadding.AS_EXAMPLE)


def rows(power: Any = 0, blocks: int = 1) -> TowerRows:
    """Return the kind of rows of the batch."""
    return TowerRows(Fraction(power), blocks)


def rows_as(x: Kind) -> TowerRows:
    """Return rows with what is known of where a value is 0, and of its padding."""
    return TowerRows(x.power, zeros=x.zeros, in_padding=x.in_padding)


def part(power: Any = 0) -> Part:
    """Return the kind of a part of a sum over towers."""
    return Part(Fraction(power))


def permuted(x: Kind, axis: int, order: Any) -> Groups:
    """Return the kind of rows in another order along their dim."""
    return Groups(x.power, layout=GroupDims((axis,), True, order))


def blocks_of(x: Kind) -> int:
    """Return the number of blocks in a value's dim of rows."""
    return x.blocks if isinstance(x, TowerRows) else 1


def is_rows_of_tower(x: Kind) -> bool:
    """Return whether a value is the number of a tower's rows, padding included."""
    return isinstance(x, Size) or (isinstance(x, Copy) and x.number is ROWS_OF_TOWER)


def of_one_tower(x: Stacked, axis: int | None) -> Kind:
    """Return the kind of one tower's value, from that of the values of all towers.

    ``axis`` is its dim of rows.
    """
    if isinstance(x.of, RowsInTurn):
        own_rows = rows(x.power).replace(in_padding=InPadding.AS_EXAMPLE)
        return own_rows if axis is None else permuted(own_rows, axis, x.of)
    if x.of is TowerRows and axis is not None:
        return rows(x.power).replace(in_padding=InPadding.AS_EXAMPLE)
    return TowerId() if x.of is TowerId else x.of(x.power)


def as_part(value: Kind) -> Kind:
    """Return the value as a part: T copies add up to T times a copy."""
    return part(value.power + 1) if isinstance(value, Copy) else value


def added_over_towers(x: Copy | Part | Zero) -> Kind:
    """Return the kind of the sum of all towers' values; copies add up to T copies."""
    return ZERO if isinstance(x, Zero) else copy(as_part(x).power)


class NotOfOneKindError(Exception):
    """The values have no kind in common; the text says why."""


def joined(values: Sequence[Kind], verb: str = "added to") -> Any:
    """Return the kind of values of one shape that are joined, added or chosen from.

    Raises:
      NotOfOneKindError: Their kinds, powers or orders do not fit.
    """
    live = [x for x in values if not isinstance(x, Zero)]
    if not live:
        return ZERO
    kinds = {type(x) for x in live}
    if kinds == {Part, Copy}:
        live = [as_part(x) for x in live]
        kinds = {Part}
    fits = kinds <= {Copy, TowerRows} or kinds <= {Copy, Row}
    fits |= len(kinds) == 1 and isinstance(live[0], Part | EXTREME)
    is_even = len({x.power for x in live}) == 1
    if not (fits and is_even):
        first = live[0]
        odd = [x for x in live if (type(x), x.power) != (type(first), first.power)]
        other = odd[0] if odd else live[-1]
        raise NotOfOneKindError(f"no rule for {first} {verb} {other}")
    if len({x.blocks for x in live if isinstance(x, TowerRows)}) > 1:
        raise NotOfOneKindError("rows meet rows in another order")
    most = next((x for x in live if not isinstance(x, Copy)), live[0])
    if isinstance(most, TowerRows):
        return TowerRows(most.power, most.blocks)
    return type(most)(most.power)


def added(values: Sequence[Kind]) -> Any:
    """Return the kind of the sum of values of one shape.

    Raises:
      NotOfOneKindError: The error of `joined`; or one value is a maximum or minimum.
    """
    if extreme := next((x for x in values if isinstance(x, EXTREME)), None):
        raise NotOfOneKindError(f"no rule for a sum of {extreme} and other values")
    return joined(values)


def function_of(values: Sequence[Kind], name: str) -> Any:
    """Return the kind of any function of the elements of its operands.

    Raises:
      NotOfOneKindError: One of the operands is neither a copy nor rows, or has a power.
    """
    for x in values:
        if not isinstance(x, ELEMENTS) or x.power:
            raise NotOfOneKindError(f"no rule for {name} of {x}")
    return joined([as_copy(x) for x in values], "together with")


def as_copy(value: Kind) -> Kind:
    """Return the value, as a copy if it is 0."""
    return copy() if isinstance(value, Zero) else value


def product_of(x: Kind, y: Kind, verb: str = "times") -> Any:
    """Return the kind of the elementwise product of two values.

    Zero is a copy here: the product with a value that may be infinite is not 0.

    Raises:
      NotOfOneKindError: Neither value is a copy, and they are not both rows.
    """
    x = as_copy(x)
    y = as_copy(y)
    power = x.power + y.power if None not in (x.power, y.power) else None
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Part) and isinstance(other, Copy):
            return part(power)
    if not (isinstance(x, ELEMENTS) and isinstance(y, ELEMENTS)):
        raise NotOfOneKindError(f"no rule for {x} {verb} {y}")
    both = joined([x.times_tower(0), y.times_tower(0)], verb)
    return both.times_tower(power)
