"""Kinds: how a value on each of T towers relates to the value on one tower.

A proof compares two numbers of towers, ``a`` and ``b``, on one global batch. A kind
with the power ``p`` says that the towers' values, put together as the kind says, are
for ``b`` towers ``(b / a)^p`` times what they are for ``a`` towers.

The main kinds are replicated values (`Copy`), rows of the batch (`TowerRows`) and parts
(`Part`), which are the towers' addends of a sum over towers. Each kind is a type, with
a field for all that is known of such a value. The meaning of each is a function of
values in ``tests/prover/meanings.py``.
"""

import dataclasses
import enum
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, TypeAlias

from towerjax.prover.equality.kinds.reasons import NotOfOneKindError, Reason

PADDING = "padding"
"""The member of `Kind.zeros` that stands for padding rows."""

NO_ZEROS: frozenset[Any] = frozenset()
MEAN_OF_OWN_ROWS = "a mean over {its} own rows"


class InPadding(enum.IntEnum):
    """What is known of a value in padding rows; a smaller number says less."""

    ANY = 0  # The value may be infinite or NaN.
    FINITE = 1
    AS_EXAMPLE = 2  # computed from its row as in an example, so assumed to be finite


class Identity(int):
    """A number that identifies one value of a program, or one flag."""


@dataclasses.dataclass(frozen=True)
class OneValue:
    """A fact: which value of the program it is; equal numbers, equal values."""

    number: Identity


@dataclasses.dataclass(frozen=True)
class Flag:
    """A fact: each row holds 0 or 1; for the flag of PADDING, 0 means padding."""

    flag: Identity | str


@dataclasses.dataclass(frozen=True)
class Count:
    """A fact: a value is the number of a tower's rows in which a flag is 1."""

    flag: Identity | str


@dataclasses.dataclass(frozen=True)
class HasRow:
    """A fact: a value is a bool that tells whether a flag is 1 in some row of a tower.

    True means that it has such a row if ``is_any`` is true, otherwise that it has none.
    """

    flag: Identity | str
    is_any: bool


@dataclasses.dataclass(frozen=True)
class InfinitePadding:
    """A fact: the padding rows of a value hold infinity, with this sign (-1 or 1)."""

    sign: int


@dataclasses.dataclass(frozen=True)
class NumberInBatch:
    """A fact: each row holds its index in the whole batch, and there is no padding."""


LOWEST = InfinitePadding(-1)
HIGHEST = InfinitePadding(1)

Fact: TypeAlias = OneValue | Flag | Count | HasRow | InfinitePadding | NumberInBatch
"""What else is known of a value; most facts also identify the value."""


class Power(Fraction):
    """An exponent of the number of towers T, and the user's line where it came in."""

    __slots__ = ("line",)
    line: str

    def __new__(cls, power: Any, line: str) -> "Power":
        """Create the exponent ``power``, which came into a value at ``line``."""
        self = super().__new__(cls, power)
        self.line = line
        return self


NO_POWER = Fraction(0)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of a value in two programs, for two numbers of towers T.

    Attributes:
      power: The exponent p if the value has the factor T^p; None for the sum of a loop
        to which no trip has added anything yet.
      zeros: Where the value is 0: PADDING stands for padding rows, and a flag for
        towers in which no row has it.
      fact: What else is known of the value.
      in_padding: What is known of the value in padding rows.
    """

    power: Any = NO_POWER
    zeros: frozenset[Any] = dataclasses.field(default=NO_ZEROS, kw_only=True)
    fact: Fact | None = dataclasses.field(default=None, kw_only=True)
    in_padding: InPadding = dataclasses.field(default=InPadding.ANY, kw_only=True)

    name: ClassVar[str]  # its text in reasons, with fields that `Nouns` fills in
    # These fields identify the value. A kind whose value is not identified holds the
    # values given here in them.
    no_identity: ClassVar[dict[str, None]] = {"fact": None}

    def replace(self, **fields: Any) -> Any:
        """Change the named fields of a copy of this kind."""
        return dataclasses.replace(self, **fields)

    def bare(self) -> Any:
        """Drop what holds in one trip of a loop only."""
        return self.replace(zeros=self.zeros & {PADDING}, **self.no_identity)

    def times_tower(self, power: Any) -> Any:
        """Set the exponent of T to ``power``, for another value of this kind."""
        return self.replace(power=power, **self.no_identity)

    def without_identity(self) -> Any:
        """Drop the identity of the value, and its zeros."""
        return self.replace(zeros=NO_ZEROS, **self.no_identity)

    def __str__(self) -> str:
        return self.name + _told_power(self.power)


def _told_power(power: Any) -> str:
    """Word the factor that follows a kind's name, a power of T."""
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
    """A value of which nothing is known.

    ``why`` is the reason in words, and ``reason`` is the typed one, if there is one.
    With ``has_line``, the words name a line of the program.
    """

    name = "unknown"
    why: str = dataclasses.field(default="", kw_only=True)
    reason: Reason | None = dataclasses.field(default=None, kw_only=True)
    has_line: bool = dataclasses.field(default=False, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Zero(Kind):
    """A value that is 0 in all elements on all towers."""

    name = "zero"


class NumberPair(NamedTuple):
    """A number that differs between the two programs, such as that of a tower's rows.

    Its fields are its values in the two programs.
    """

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Copy(Kind):
    """A replicated value: all towers have the same.

    A replicated value with a dim of rows is constant along that dim. If all its
    elements are one known number, ``number`` is that number: one for both programs, or
    one for each.
    """

    name = "a replicated value"
    no_identity = {"fact": None, "number": None}
    number: bool | int | float | NumberPair | None = None


@dataclasses.dataclass(frozen=True)
class TowerRows(Kind):
    """Rows: the towers' rows, joined along a dim, are the batch's rows.

    ``blocks`` tells how often that dim repeats them: each of its blocks has all rows of
    the tower, in order.
    """

    name = "{its} rows"
    blocks: int = 1


@dataclasses.dataclass(frozen=True)
class Part(Kind):
    """A tower's addend of a sum over towers; a `psum` gives that sum."""

    name = "a sum over {its} rows"

    def __str__(self) -> str:  # times T: a sum divided by the number of the own rows
        return MEAN_OF_OWN_ROWS if self.power == 1 else super().__str__()


class GroupDims(NamedTuple):
    """The dims along which an array has a tower's rows, unless it is one dim in order.

    Attributes:
      dims: The dims, outermost first. Read in this order, they have each row in order.
      by_row: True if each element belongs to one row. Otherwise the elements along the
        dims only add up to a sum over rows.
      order: None, or what identifies another order: a permutation of the rows of all
        towers. Arrays with equal ``order`` have the same permutation.
    """

    dims: tuple[int, ...]
    by_row: bool
    order: Any = None


PERMUTED = "{its} rows in another order"


@dataclasses.dataclass(frozen=True)
class Groups(Kind):
    """Rows along several dims, or along one dim in another order."""

    layout: GroupDims = dataclasses.field(kw_only=True)

    @property
    def name(self) -> str:
        """The words for the kind in a reason."""
        in_order = self.layout.order is None
        return "{its} rows in groups" if in_order else PERMUTED


@dataclasses.dataclass(frozen=True)
class Maximum(Kind):
    """A maximum over a tower's own rows; a `pmax` makes it replicated."""

    name = "a maximum over {its} rows"


@dataclasses.dataclass(frozen=True)
class Minimum(Kind):
    """A minimum over a tower's own rows; a `pmin` makes it replicated."""

    name = "a minimum over {its} rows"


@dataclasses.dataclass(frozen=True)
class Mean(Kind):
    """A part divided by another part of the same tower; see `guards`.

    ``divisor`` is the exponent of T in the divisor. ``vanishes`` tells whether the
    dividend is 0 wherever the divisor is 0.
    """

    name = MEAN_OF_OWN_ROWS
    divisor: Any = NO_POWER
    vanishes: bool = False


# The next kinds are of numbers and random keys that differ from tower to tower.


@dataclasses.dataclass(frozen=True)
class TowerId(Kind):
    """A tower's index, which counts from 0."""

    name = "{number}"


@dataclasses.dataclass(frozen=True)
class FirstRow(Kind):
    """The index in the whole batch of a tower's first row."""

    name = "the number of a {one}'s first row"


@dataclasses.dataclass(frozen=True)
class FromFirstRow(Kind):
    """A replicated number minus the index in the whole batch of a tower's first row."""

    name = "a number that counts from a {one}'s first row"


@dataclasses.dataclass(frozen=True)
class RowNumbers(Kind):
    """The indices 0, 1, 2, ... of a tower's rows, within the tower."""

    name = "the numbers of {its} rows"


@dataclasses.dataclass(frozen=True)
class RowOrder(Kind):
    """A permutation of the indices 0, 1, 2, ... of a tower's rows."""

    name = "the numbers of {its} rows in another order"
    order: Any = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Columns(Kind):
    """An array of indices, whose columns have kinds of their own.

    ``columns`` has the type of each column's kind. For a column that is a permutation
    of the rows' indices, it has the `RowOrder` itself.
    """

    name = "indices with the numbers of {its} rows"
    columns: tuple[type[Kind] | RowOrder, ...] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Key(Kind):
    """A tower's own random key; a draw from it gives each row its own numbers."""

    name = "a {one}'s own key"


@dataclasses.dataclass(frozen=True)
class Valid(Kind):
    """The number of a tower's rows without padding: of its examples."""

    name = "the number of {its} rows without padding"


@dataclasses.dataclass(frozen=True)
class Size(Kind):
    """The number of a tower's rows, if some of them may be padding."""

    name = "the number of {its} rows, padding included"


@dataclasses.dataclass(frozen=True)
class IsFull(Kind):
    """A bool that is True for a tower without padding."""

    name = "whether none of {its} rows is padding"


@dataclasses.dataclass(frozen=True)
class AtLeast(Kind):
    """A guarded count of the rows with a flag, such as ``max(count, 1)``.

    If a tower has no row with the flag, the value is some number above 0.
    """

    name = "the number of rows with a flag, or another number if there are none"
    flag: Any = dataclasses.field(kw_only=True)


# These kinds are found only inside loops over rows or chunks of rows.


@dataclasses.dataclass(frozen=True)
class Row(Kind):
    """The value of the current row, inside a loop over rows."""

    name = "a value of one row"


@dataclasses.dataclass(frozen=True)
class SoFar(Kind):
    """A loop's carry that is a sum, or an extreme, of the trips so far.

    ``carry`` is its index among the loop's carries. ``extreme`` is `Maximum` or
    `Minimum`. It is None for a sum, and for a carry that no trip has changed yet.
    """

    name = "the sum of the rows so far"
    carry: int = dataclasses.field(kw_only=True)
    extreme: type[Maximum | Minimum] | None = dataclasses.field(
        default=None, kw_only=True
    )


@dataclasses.dataclass(frozen=True)
class Counter(Kind):
    """The current row's index, inside a loop over rows."""

    name = "the number of the row in a loop"


@dataclasses.dataclass(frozen=True)
class Buffer(Kind):
    """An array that a loop over rows fills row by row.

    ``carry`` is its index among the loop's carries.
    """

    name = "an array that a loop fills row by row"
    carry: int = dataclasses.field(kw_only=True)


ELEMENTS: TypeAlias = Copy | TowerRows | Row | Zero
"""Kinds that stay under any function of the elements."""

LINEAR: TypeAlias = ELEMENTS | Part
"""Kinds that stay under a linear function of the elements of one value."""

SAME_FOR_ALL: TypeAlias = Copy | Zero
"""Kinds of a value that is the same on all towers."""

EXTREME: TypeAlias = Maximum | Minimum
"""Kinds of a maximum or minimum over the tower's rows."""

ZERO = Zero()
SIZE = Size()


def copy(power: Any = 0, number: Any = None) -> Copy:
    """Describe a replicated value, whose elements are ``number`` if known."""
    return Copy(Fraction(power), number, in_padding=InPadding.AS_EXAMPLE)


def rows(power: Any = 0, blocks: int = 1) -> TowerRows:
    """Describe rows: ``blocks`` times all rows of the tower along one dim."""
    return TowerRows(Fraction(power), blocks)


def rows_as(x: Kind) -> TowerRows:
    """Describe rows with the power, the zeros and the padding of ``x``."""
    return TowerRows(x.power, zeros=x.zeros, in_padding=x.in_padding)


def part(power: Any = 0) -> Part:
    """Describe a part: one tower's addend of a sum over towers."""
    return Part(Fraction(power))


def permuted(x: Kind, axis: int, order: Any) -> Groups:
    """Describe rows in another order along the dim ``axis``."""
    return Groups(x.power, layout=GroupDims((axis,), True, order))


def blocks_of(x: Kind) -> int:
    """Count how often a dim of rows repeats all rows; 1 if there is no such dim."""
    return x.blocks if isinstance(x, TowerRows) else 1


def as_part(value: Kind) -> Kind:
    """``sum_t T^p c = T^(p+1) c``: take a replicated value as a part.

    Any other kind is returned unchanged.
    """
    return part(value.power + 1) if isinstance(value, Copy) else value


def added_over_towers(x: Copy | Part | Zero) -> Kind:
    """``sum_t x_t = x`` and ``sum_t c = T c``: add over all towers.

    Parts add up to the one tower's value. A replicated value is added up to T times it.
    """
    return ZERO if isinstance(x, Zero) else copy(as_part(x).power)


def joined(values: Sequence[Kind], verb: str = "added to") -> Any:
    """Join values of one power, add them, or choose between them.

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
        given = [x for x in values if not isinstance(x, Zero)]
        first = given[0]
        odd = [x for x in given if (type(x), x.power) != (type(first), first.power)]
        other = odd[0] if odd else given[-1]
        raise NotOfOneKindError(f"no rule for {first} {verb} {other}")
    if len({x.blocks for x in live if isinstance(x, TowerRows)}) > 1:
        raise NotOfOneKindError("rows are combined with rows in another order")
    most = next((x for x in live if not isinstance(x, Copy)), live[0])
    if isinstance(most, TowerRows):
        return TowerRows(most.power, most.blocks)
    return type(most)(most.power)


def added(values: Sequence[Kind]) -> Any:
    """``T^p x + T^p y = T^p (x + y)``: add values of one shape.

    Raises:
      NotOfOneKindError: `joined` raises it, or one value is a maximum or minimum.
    """
    if extreme := next((x for x in values if isinstance(x, EXTREME)), None):
        raise NotOfOneKindError(f"no rule for a sum of {extreme} and other values")
    return joined(values)


def function_of(values: Sequence[Kind], name: str) -> Any:
    """Apply an elementwise function ``name`` to rows and replicated values.

    Raises:
      NotOfOneKindError: An operand is neither replicated nor rows, or has a power.
    """
    for x in values:
        if not isinstance(x, ELEMENTS) or x.power:
            raise NotOfOneKindError(f"no rule for {name} of {x}")
    return joined([as_copy(x) for x in values], "together with")


def as_copy(value: Kind) -> Kind:
    """Take 0 as a replicated value; leave any other kind unchanged."""
    return copy() if isinstance(value, Zero) else value


def product_of(x: Kind, y: Kind, verb: str = "times") -> Any:
    """``T^p x * T^q y = T^(p+q) x y``, element by element.

    An operand 0 is treated as any replicated value: 0 times infinity is not 0.

    Raises:
      NotOfOneKindError: Neither value is replicated, and they are not both rows.
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
