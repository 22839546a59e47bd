"""What each kind of the proof of equality means, as a function of values.

`holds` compares the values of ``a`` towers with those of ``b`` towers on the same
examples. It knows no rule: of the proof it imports the kinds alone.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.prover.equality.kinds.joined import Joined
from towerjax.prover.equality.kinds.kinds import (
    PADDING,
    AtLeast,
    Buffer,
    Columns,
    Copy,
    Counter,
    FirstRow,
    Flag,
    FromFirstRow,
    Groups,
    HasRow,
    InfinitePadding,
    InPadding,
    IsFull,
    Key,
    Kind,
    Maximum,
    Mean,
    Minimum,
    NumberInBatch,
    NumberPair,
    Part,
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
    blocks_of,
)
from towerjax.prover.equality.kinds.stacked import RowsInTurn, Slots, Stacked, Starts


@dataclasses.dataclass(frozen=True)
class Side:
    """The towers of one of the two programs.

    Attributes:
      towers: The number of towers T.
      rows: The rows of each tower, with padding.
      counts: The rows of each tower that are examples, ``[T]``; they come first.
    """

    towers: int
    rows: int
    counts: tuple[int, ...]

    @property
    def is_example(self) -> np.ndarray:
        """Whether each row is an example, ``[T, rows]``."""
        return np.arange(self.rows) < np.array(self.counts)[:, None]


class World(NamedTuple):
    """One batch on two numbers of towers, and the values that kinds refer to.

    ``flags`` has for each flag of the rows its values ``[T, rows]`` on either side, and
    ``orders`` has for each order of the rows which row, counted over all towers, lies
    in each place, ``[T, rows]``. ``repeated`` has the example of the batch that each
    row is, ``[T, rows]``: padding repeats one. It is None if padding is anything.
    """

    sides: tuple[Side, Side]
    flags: dict[Any, tuple[np.ndarray, np.ndarray]]
    orders: dict[Any, tuple[np.ndarray, np.ndarray]]
    repeated: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def padded(self) -> bool:
        """Whether a tower has padding."""
        return any(min(x.counts) < x.rows for x in self.sides)

    def factor(self, power: Any) -> float:
        """The factor of a power of T between the two sides."""
        first, second = self.sides
        return (second.towers / first.towers) ** float(power or 0)

    def axis(self, shapes: Any) -> int | None:
        """The dim of rows of two arrays of one tower."""
        for i, sizes in enumerate(zip(*shapes, strict=True)):
            pairs = zip(sizes, self.sides, strict=True)
            times = {size / side.rows for size, side in pairs}
            if len(times) == 1 and sizes[0] != sizes[1]:
                return i
        return None

    def axis_of_towers(self, shapes: Any) -> int | None:
        """The dim that has an entry for each tower."""
        for i, sizes in enumerate(zip(*shapes, strict=True)):
            if sizes == tuple(x.towers for x in self.sides):
                return i
        return None


def world_of(towers, rows, counts=None):
    """A world of two numbers of towers; all rows are examples unless ``counts`` says.

    ``towers`` and ``rows`` are pairs.
    """
    pairs = zip(towers, rows, strict=True)
    counts = counts or tuple((n,) * t for t, n in pairs)
    sides = [Side(*x) for x in zip(towers, rows, counts, strict=True)]
    assert sum(counts[0]) == sum(counts[1])
    return World((sides[0], sides[1]), {}, {})


def is_integer(dtype):
    """Whether values of the dtype are whole numbers, or bools."""
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


def eps_of(dtype):
    """The relative rounding of a dtype."""
    return 0.0 if is_integer(dtype) else float(jnp.finfo(dtype).eps)


def as_wide(x):
    """The values in the widest integers or floats, so that few sums are rounded."""
    if x.dtype == np.bool_:
        return x.astype(np.int64)
    if is_integer(x.dtype):
        return x.astype(np.int64)
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return x.astype(np.complex128 if is_complex else np.float64)


def near(x, y, dtype, scale=0.0, rounding=0.0):
    """Whether two arrays of one dtype are the same, except for rounding.

    ``rounding`` is that of the values they were computed from, if it is larger.

    Integers of fewer bits wrap, so that they are compared modulo that. Values that are
    not finite are the same in the same places.
    """
    if x.shape != y.shape:
        return False
    if not x.size:
        return True
    if is_integer(dtype):
        if dtype == np.bool_:
            return bool((x == y).all())
        bits = jnp.iinfo(dtype).bits
        return not ((x - y) % 2**bits).any()
    with np.errstate(invalid="ignore"):
        ends = np.isfinite(x) & np.isfinite(y)
        scale = max(scale, float(np.abs(np.where(ends, x, 0)).max()), 1e-3)
        tolerance = 64 * max(eps_of(dtype), rounding) * scale
        close = np.abs(np.where(ends, x - y, 0)) <= tolerance
    both_nan = np.isnan(x) & np.isnan(y)
    if np.iscomplexobj(x):  # which of its parts is infinite may differ
        both_nan = ~np.isfinite(x) & ~np.isfinite(y)
    return bool(np.where(ends, close, both_nan | (x == y)).all())


def scaled(x, factor):
    """A multiple of values; whole numbers stay exact."""
    if factor == 1:
        return x
    with np.errstate(invalid="ignore"):
        return x * (int(factor) if factor == int(factor) else factor)


def examples_of(side, x, axis, blocks):
    """The examples' entries of all towers, joined: ``[blocks, entries, ...]``.

    A block of the dim of rows has all rows in order, each with as many entries.
    """
    x = np.moveaxis(x, axis + 1, 1)
    size = x.shape[1] // blocks
    x = x.reshape(side.towers, blocks, size, *x.shape[2:])
    if all(n == side.rows for n in side.counts):
        return np.concatenate([*x], axis=1)
    assert size % side.rows == 0
    each = size // side.rows
    pairs = zip(x, side.counts, strict=True)
    return np.concatenate([own[:, : n * each] for own, n in pairs], axis=1)


def holds(known, values, world, rounding=0.0):
    """Whether the towers' values ``[T, ...]`` of both sides have a kind.

    Args:
      known: What is said of the value.
      values: Its values on either side.
      world: The world.
      rounding: The relative rounding of what the values were computed from.

    Returns:
      True or False; None if the kind says nothing that two runs can show.
    """
    case = Case(known, tuple(map(np.asarray, values)), world, rounding)
    found = _MEANINGS[type(known)](case)
    if not found:
        return found
    return found and _zeros_hold(case) and _fact_holds(case)


@dataclasses.dataclass
class Case:
    """A value of which something is said."""

    known: Any
    values: tuple[np.ndarray, np.ndarray]
    world: World
    rounding: float = 0.0

    @property
    def dtype(self):
        """The dtype of the values."""
        return self.values[0].dtype

    @property
    def axis(self):
        """The dim of rows of one tower's value."""
        return self.world.axis([x.shape[1:] for x in self.values])

    def same(self, x, y, scale=0.0):
        """Whether y is the value's power of T times x."""
        factor = self.world.factor(self.known.power)
        x = scaled(as_wide(x), factor)
        return near(x, as_wide(y), self.dtype, scale, self.rounding)

    def each(self, of_side):
        """Whether a predicate of a side and its values holds on both sides."""
        return all(of_side(*x) for x in zip(self.world.sides, self.values, strict=True))

    def with_kind(self, kind, values):
        """Whether other values have another kind, with this power and these zeros."""
        known = self.known
        found = {"zeros": known.zeros, "in_padding": known.in_padding}
        return holds(kind(known.power, **found), values, self.world, self.rounding)


def _is_zero(case):
    return not any(x.any() for x in case.values)


def _is_copy(case):
    axis = case.axis
    values = case.values
    if axis is not None:
        firsts = []
        for x in values:
            x = np.moveaxis(x, axis + 1, 1)
            first = x[:, :1]
            if not near(as_wide(x), as_wide(np.broadcast_to(first, x.shape)), x.dtype):
                return False
            firsts.append(x[:, 0])
        values = firsts
    for x in values:
        if not near(as_wide(x), as_wide(np.broadcast_to(x[:1], x.shape)), x.dtype):
            return False
    if isinstance(case.known.number, NumberPair):
        numbers = zip(case.known.number, values, strict=True)
        if not all((x == number).all() for number, x in numbers):
            return False
    if isinstance(case.known.number, bool | int | float):
        number = np.asarray(case.known.number).astype(case.dtype)
        wanted = np.broadcast_to(number, values[0].shape)
        if not near(as_wide(values[0]), as_wide(wanted), case.dtype):
            return False
    return case.same(values[0][0], values[1][0])


def _are_rows(case):
    if case.axis is None:
        return False
    pairs = zip(case.world.sides, case.values, strict=True)
    joined = [examples_of(*x, case.axis, blocks_of(case.known)) for x in pairs]
    return case.same(*joined) and _is_padding_so(case, joined)


def _is_padding_so(case, joined):
    """Whether padding is what is known of it, if all examples are finite."""
    level = case.known.in_padding
    repeated = case.world.repeated
    is_inexact = not is_integer(case.dtype)
    if not case.world.padded or level is InPadding.ANY or blocks_of(case.known) > 1:
        return True
    if is_inexact and not all(np.isfinite(as_wide(x)).all() for x in joined):
        return True
    if level is InPadding.FINITE:
        return not is_inexact or all(
            np.isfinite(as_wide(x)).all() for x in _padding_of(case)
        )
    if repeated is None or case.axis is None:
        return True
    for side, x, each, at in zip(
        case.world.sides, case.values, joined, repeated, strict=True
    ):
        x = np.moveaxis(x, case.axis + 1, 1)
        if x.shape[1] != side.rows:
            return True
        if not near(as_wide(x), as_wide(each[0][at]), case.dtype):
            return False
    return True


def _is_part(case):
    if case.dtype == np.bool_:
        return False  # the sum of flags is no flag
    with np.errstate(invalid="ignore"):
        totals = [as_wide(x).sum(0) for x in case.values]
        sizes = [np.abs(as_wide(x)) for x in case.values]
    scale = 0.0
    if not is_integer(case.dtype):
        scale = max([x[np.isfinite(x)].max(initial=0) for x in sizes])
    return case.same(*totals, scale)


def _is_maximum(case):
    return case.same(*[_wide_of_flags(x).max(0) for x in case.values])


def _is_minimum(case):
    return case.same(*[_wide_of_flags(x).min(0) for x in case.values])


def _wide_of_flags(x):
    return x if x.dtype == np.bool_ else as_wide(x)


def _is_mean(case):
    """Times the count that divided it, it is a part; of other means nothing shows."""
    flag = getattr(case.known.fact, "flag", None)
    if flag not in case.world.flags:
        return None
    counts = [x.sum(1) for x in case.world.flags[flag]]
    products = []
    for x, count in zip(case.values, counts, strict=True):
        count = count.reshape(-1, *[1] * (x.ndim - 1))
        with np.errstate(invalid="ignore"):
            products.append(np.where(count > 0, as_wide(x) * count, 0))
    totals = [x.sum(0) for x in products]
    scale = max([float(np.abs(x).max(initial=0)) for x in products])
    return case.same(*totals, scale)


def _are_groups(case):
    dims, by_row, order = case.known.layout
    if not by_row:
        # Elements along the groups' dims add up to a sum over rows.
        inner = [as_wide(x).sum(tuple(i + 1 for i in dims)) for x in case.values]
        scale = max([float(np.abs(as_wide(x)).max(initial=0)) for x in case.values])
        return case.same(*[x.sum(0) for x in inner], scale * 8)
    merged = [_with_merged(x, dims) for x in case.values]
    if order is None:
        return case.with_kind(TowerRows, merged)
    first, _ = order
    placed = case.world.orders.get(first)
    pairs = zip(case.world.sides, merged, strict=True)
    rows = [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for _, x in pairs]
    if placed is None:
        # Some order: the examples are the same ones, and padding is 0.
        if case.world.padded:
            return None
        return case.same(*[x[_row_order(x)] for x in rows])
    rows = [x[np.argsort(at.ravel())] for x, at in zip(rows, placed, strict=True)]
    back = [
        x.reshape(side.towers, side.rows, *x.shape[1:])
        for x, side in zip(rows, case.world.sides, strict=True)
    ]
    return case.with_kind(TowerRows, back)


def _with_merged(x, dims):
    """The values with the dims of groups merged to dim 0 of a tower's value."""
    at = [i + 1 for i in dims]
    x = np.moveaxis(x, at, range(1, len(at) + 1))
    size = math.prod(x.shape[1 : len(at) + 1])
    return x.reshape(x.shape[0], size, *x.shape[len(at) + 1 :])


def _row_order(x):
    """The order of rows by their elements."""
    flat = as_wide(x).reshape(len(x), -1)
    return np.lexsort(np.round(flat, 4).T) if flat.shape[1] else np.arange(len(x))


def _are_stacked(case):
    """Each tower has the same values of all towers, which have the kind `of`."""
    axis = case.world.axis_of_towers([x.shape[1:] for x in case.values])
    if axis is None:
        return False
    found = []
    for x in case.values:
        if not near(as_wide(x), as_wide(np.broadcast_to(x[:1], x.shape)), x.dtype):
            return False
        found.append(np.moveaxis(x[0], axis, 0))
    if isinstance(case.known.of, RowsInTurn):
        pairs = zip(found, case.known.of.each, strict=True)
        each = [x.reshape(len(x), rows, -1, *x.shape[2:]) for x, rows in pairs]
        in_turn = [x.swapaxes(0, 1).reshape(-1, *x.shape[3:]) for x in each]
        return case.same(*in_turn)
    if isinstance(case.known.of, Starts):
        steps = zip(case.known.of.step, found, strict=True)
        return all((_last(x) == step * np.arange(len(x))).all() for step, x in steps)
    return case.with_kind(case.known.of, found)


def _is_number_of_tower(case):
    return case.each(
        lambda side, x: (_last(x) == np.arange(side.towers)).all()  # the same elements
    )


def _is_number_of_first_row(case):
    return case.each(
        lambda side, x: (_last(x) == np.arange(side.towers) * side.rows).all()
    )


def _counts_from_first_row(case):
    """With the index of the tower's first row added, it is a replicated value."""
    first_rows = [np.arange(side.towers) * side.rows for side in case.world.sides]
    added = [
        x + at.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
        for x, at in zip(case.values, first_rows, strict=True)
    ]
    return holds(Copy(), added, case.world, case.rounding)


def _is_number_of_examples(case):
    return case.each(lambda side, x: (_last(x) == np.array(side.counts)).all())


def _is_number_of_rows(case):
    return case.each(lambda side, x: (x == side.rows).all())


def _is_full(case):
    return case.each(
        lambda side, x: (_last(x) == (np.array(side.counts) == side.rows)).all()
    )


def _last(x):
    """The values with towers as their last dim."""
    return np.moveaxis(x, 0, -1)


def _are_row_numbers(case):
    axis = case.axis
    if axis is None:
        return False
    return case.each(
        lambda side, x: (
            np.moveaxis(x, axis + 1, -1) == np.arange(x.shape[axis + 1])
        ).all()
    )


def _are_row_numbers_in_order(case):
    """Each number once; of a known order, the row that lies in each place."""
    axis = case.axis
    if axis is None:
        return False
    placed = case.world.orders.get(case.known.order[0])

    def of_side(number, side, x):
        x = np.moveaxis(x, axis + 1, 1).reshape(side.towers, side.rows, -1)
        if placed is None:
            return (np.sort(x, 1) == np.arange(side.rows)[:, None]).all()
        own = placed[number] - np.arange(side.towers)[:, None] * side.rows
        return (x == own[..., None]).all()

    pairs = enumerate(zip(case.world.sides, case.values, strict=True))
    return all(of_side(number, *x) for number, x in pairs)


def _are_columns(case):
    kinds = case.known.columns
    if len(kinds) != case.values[0].shape[-1]:
        return False
    each = [
        case.with_kind(kind, [x[..., i] for x in case.values])
        for i, kind in enumerate(kinds)
    ]
    return all(x is not False for x in each)


def _is_count_or_other(case):
    if case.known.flag not in case.world.flags:
        return None
    counts = [x.sum(1) for x in case.world.flags[case.known.flag]]
    factors = 1, case.world.factor(case.known.power)
    for x, count, factor in zip(case.values, counts, factors, strict=True):
        x = _last(as_wide(x))
        wanted = scaled(count, factor)
        fits = np.where(count > 0, np.abs(x - wanted) <= 1e-3 * (1 + wanted), x > 0)
        if not fits.all():
            return False
    return True


def _is_own_key(case):
    """Each row's draw is the same with keys whose rows draw equal numbers.

    The keys are of `one_tower_programs.key_of_rows`.
    """
    return None


def _of_devices(case):
    """The values of all devices of a map; see `test_maps`, which asks each device."""
    return None


def _of_a_loop(case):
    """Values in a trip; see `lemmas`, which holds all trips against other kinds."""
    return None


ALL_KINDS = {*Kind.__subclasses__()}
_MEANINGS = {
    Unknown: _of_a_loop,
    Zero: _is_zero,
    Copy: _is_copy,
    TowerRows: _are_rows,
    Part: _is_part,
    Groups: _are_groups,
    Maximum: _is_maximum,
    Minimum: _is_minimum,
    Mean: _is_mean,
    Stacked: _are_stacked,
    Joined: _of_devices,
    TowerId: _is_number_of_tower,
    FirstRow: _is_number_of_first_row,
    FromFirstRow: _counts_from_first_row,
    RowNumbers: _are_row_numbers,
    Columns: _are_columns,
    RowOrder: _are_row_numbers_in_order,
    Key: _is_own_key,
    Valid: _is_number_of_examples,
    Size: _is_number_of_rows,
    IsFull: _is_full,
    AtLeast: _is_count_or_other,
    Row: _of_a_loop,
    SoFar: _of_a_loop,
    Counter: _of_a_loop,
    Buffer: _of_a_loop,
    Slots: _of_a_loop,
}


def _zeros_hold(case):
    """Whether the value is 0 where it is said to be."""
    for place in case.known.zeros:
        if place == PADDING:
            if not _is_zero_in_padding(case):
                return False
        elif place in case.world.flags:
            flags = case.world.flags[place]
            for x, flag in zip(case.values, flags, strict=True):
                if x[~flag.any(1)].any():
                    return False
    return True


def _is_zero_in_padding(case):
    if not isinstance(case.known, TowerRows):
        has_examples = [np.array(x.counts) > 0 for x in case.world.sides]
        pairs = zip(case.values, has_examples, strict=True)
        return isinstance(case.known, Groups) or not any(x[~y].any() for x, y in pairs)
    return all(not x.any() for x in _padding_of(case))


def _padding_of(case):
    """The entries of padding of each tower."""
    for side, x in zip(case.world.sides, case.values, strict=True):
        x = np.moveaxis(x, case.axis + 1, 1)
        size = x.shape[1] // blocks_of(case.known)
        if size % side.rows:
            continue  # several rows an entry, of towers without padding
        each = size // side.rows
        x = x.reshape(side.towers, blocks_of(case.known), size, *x.shape[2:])
        for own, count in zip(x, side.counts, strict=True):
            yield own[:, count * each :]


def _fact_holds(case):
    """Whether the value is the one that is said."""
    fact = case.known.fact
    if isinstance(fact, InfinitePadding):
        end = np.inf * fact.sign
        return all((as_wide(x) == end).all() for x in _padding_of(case))
    if isinstance(fact, NumberInBatch):
        return all((x.ravel() == np.arange(x.size)).all() for x in case.values)
    flag = getattr(fact, "flag", None)
    if flag not in case.world.flags or isinstance(case.known, Mean):
        return True
    found = []
    for x, rows in zip(case.values, case.world.flags[flag], strict=True):
        wanted = rows if isinstance(fact, Flag) else rows.sum(1)
        if isinstance(fact, HasRow):
            wanted = rows.any(1) == fact.is_any
        x = as_wide(x).reshape(wanted.shape) if x.size == wanted.size else as_wide(x)
        found.append(x.shape == wanted.shape and bool((x == wanted).all()))
    return all(found)


def device_values(tree):
    """The arrays of a tree as NumPy's."""
    return jax.tree.map(np.asarray, jax.device_get(tree))
