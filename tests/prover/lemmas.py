"""Lemmas: operands drawn with their kinds, one equation, and the kind of its result.

A `Lemma` is a small function of one primitive, with the shapes and dtypes of its
operands. For each combination of the operands' kinds the walk says what the result is.
Values that have these kinds are drawn, the function is run on the towers of both sides
of a world, and `meanings.holds` says whether the result is what the walk said.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from meanings import World, as_wide, eps_of, holds, is_integer, scaled, world_of

from towerjax.prover.equality import one_tower  # noqa: F401 - it registers all rules
from towerjax.prover.equality.kinds.equation_pair import ProgramsDifferError, Sizes
from towerjax.prover.equality.kinds.kinds import (
    HIGHEST,
    LOWEST,
    PADDING,
    SIZE,
    ZERO,
    AtLeast,
    Columns,
    Copy,
    Count,
    FirstRow,
    Flag,
    FromFirstRow,
    GroupDims,
    Groups,
    HasRow,
    Identity,
    InfinitePadding,
    InPadding,
    IsFull,
    Kind,
    Maximum,
    Mean,
    Minimum,
    NumberInBatch,
    NumberPair,
    Part,
    RowNumbers,
    RowOrder,
    Size,
    TowerId,
    TowerRows,
    Unknown,
    Valid,
    Zero,
    blocks_of,
    copy,
    part,
    rows,
)
from towerjax.prover.equality.kinds.stacked import Stacked
from towerjax.prover.equality.walk.walk import Walk

AXIS = "towers"
N = "rows"  # a dim of a tower's rows; (N, 2) is twice as many, (N, 1, 2) half as many
T = "towers"  # a dim with an entry for each tower
B = "batch"  # a dim of the rows of all towers, of a batch without padding
FLAG = Identity(10**6)  # of examples alone
ORDER = Identity(10**6 + 1)
_MOST = 80  # combinations of kinds that a lemma is held for; more are drawn from

FULL = {
    "1 and 2": world_of((1, 2), (8, 4)),
    "2 and 4": world_of((2, 4), (4, 2)),
    "1 and 3": world_of((1, 3), (6, 2)),
    "1 and 4, of one row": world_of((1, 4), (4, 1)),
}
PADDED = {
    "1 and 2, padded": world_of((1, 2), (8, 6), ((6,), (4, 2))),
    "2 and 4, padded": world_of((2, 4), (4, 6), ((3, 3), (4, 2, 0, 0))),
    "1 and 3, padded": world_of((1, 3), (8, 4), ((4,), (3, 1, 0))),
}
WORLDS = FULL | PADDED


@dataclasses.dataclass(frozen=True)
class Lemma:
    """A function of one primitive, and its operands.

    Attributes:
      fn: The function of a `Side` and of one tower's operands.
      shapes: The shape of each operand, with `N` and `T` for dims of rows and towers.
      dtypes: The dtype of each operand.
      near: The least and greatest value to draw, where a function needs some.
      kinds: The kinds of each operand, if only some of them are to be tried.
    """

    fn: Callable[..., Any]
    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    near: tuple[float, float] = (-2, 2)
    kinds: tuple[Any, ...] | None = None


def shape_on(side, template):
    """The shape of one tower's operand on a side."""
    found = []
    for size in template:
        if size == N:
            found.append(side.rows)
        elif size == T:
            found.append(side.towers)
        elif size == B:
            if min(side.counts) < side.rows:
                raise NotThereError
            found.append(side.towers * side.rows)
        elif isinstance(size, tuple):
            _, times, by = (*size, 1)[:3]
            if side.rows * times % by:
                raise NotThereError
            found.append(side.rows * times // by)
        else:
            found.append(size)
    return tuple(found)


# Kinds.


def with_flags(world, seed):
    """The world with a flag of its examples and an order of its rows."""
    rng = np.random.default_rng([seed, 7])
    total = sum(world.sides[0].counts)
    is_set = rng.random(total) < 0.4
    is_set[0] = True
    is_set[total // 2 :] = False  # so that a tower has none
    flags = {FLAG: split_rows(world, is_set, np.zeros), PADDING: ()}
    flags[PADDING] = tuple(x.is_example for x in world.sides)
    placed = []
    for side in world.sides:
        own = [rng.permutation(side.rows) for _ in range(side.towers)]
        placed.append(np.array(own) + np.arange(side.towers)[:, None] * side.rows)
    repeated = []
    for side in world.sides:
        at = rng.integers(total, size=(side.towers, side.rows))
        ends = np.cumsum(side.counts)
        for t, (end, count) in enumerate(zip(ends, side.counts, strict=True)):
            at[t, :count] = np.arange(end - count, end)
        repeated.append(at)
    return World(world.sides, flags, {ORDER: tuple(placed)}, tuple(repeated))


def split_rows(world, joined, fill, each=1):
    """Rows of all examples ``[N each, ...]``, split over the towers of both sides.

    ``fill`` makes the entries of padding, from their shape.
    """
    found = []
    for side in world.sides:
        ends = np.cumsum(side.counts) * each
        own = np.zeros((side.towers, int(side.rows * each), *joined.shape[1:]))
        own = own.astype(joined.dtype)
        for t, (end, count) in enumerate(zip(ends, side.counts, strict=True)):
            size = int(count * each)
            own[t, :size] = joined[int(end) - size : int(end)]
            own[t, size:] = fill(own[t, size:].shape)
        found.append(own)
    return tuple(found)


_NUMBERS = (TowerId, FirstRow, Valid, IsFull)


_AS_EXAMPLE = Copy | Part | TowerRows


def kinds_for(template, dtype, world):
    """The kinds that an operand of this shape and dtype may have.

    Padding is what an example is, or anything that is finite, or anything.
    """
    found = []
    for known in _plain_kinds_for(template, dtype, world):
        is_plain = isinstance(known, _AS_EXAMPLE) and known.fact is None
        is_plain &= not known.zeros
        level = InPadding.AS_EXAMPLE if is_plain else InPadding.ANY
        if known.zeros or (is_integer(dtype) and not is_plain):
            level = InPadding.FINITE
        found.append(known.replace(in_padding=level))
        if (
            is_plain
            and isinstance(known, TowerRows)
            and world.padded
            and not known.power
        ):
            levels = (InPadding.FINITE, InPadding.ANY)
            found += [known.replace(in_padding=x) for x in levels]
    return found


def _plain_kinds_for(template, dtype, world):
    has_rows = N in template or any(isinstance(x, tuple) for x in template)
    is_whole = is_integer(dtype)
    is_flag = dtype == np.bool_
    zeros = frozenset([FLAG, PADDING])
    if T in template:
        kinds = (TowerRows,) if has_rows else ()
        kinds = kinds or (Copy, Maximum, Minimum, Part)
        kinds = [x for x in kinds if not (is_flag and x is Part)]
        kinds += [TowerId] if template == (T,) and dtype == np.int32 else []
        return [ZERO, *[Stacked(of=x) for x in kinds]]
    powers = [] if is_flag else [copy(1)]
    from_first = [FromFirstRow()] if dtype in (np.float32, np.int32) else []
    if has_rows:
        found = [ZERO, copy(), *powers, *from_first]
        is_cut = any(x[1:] == (1, 2) for x in template if isinstance(x, tuple))
        if not (is_cut and world.padded):  # several rows an entry, of which one is none
            found.append(rows())
        if not is_flag and not (is_cut and world.padded):
            found += [rows(1), rows().replace(zeros=frozenset([PADDING]))]
        if template == (N,):
            found.append(rows().replace(zeros=zeros, fact=Flag(FLAG)))
        if not is_whole and world.padded and not is_cut:
            found += [rows().replace(fact=x) for x in (LOWEST, HIGHEST)]
        if (is_whole and not is_flag) or dtype == np.float32:
            found.append(RowNumbers())
        if template[:1] == (N,) and is_whole and len(template) == 1 and not is_flag:
            found.append(RowOrder(order=(ORDER, None)))
            if not world.padded and np.dtype(dtype).itemsize >= 4:
                found.append(rows().replace(fact=NumberInBatch()))
        if N in template:
            layout = GroupDims((template.index(N),), True, (ORDER, None))
            found.append(Groups(layout=layout))
        size = [i for i, x in enumerate(template) if isinstance(x, tuple)]
        if size and template[size[0]][1:] == (2,):
            found.append(rows(0, 2))
        if template[:2] == (2, (N, 1, 2)):
            found.append(Groups(layout=GroupDims((0, 1), True)))
        return found
    found = [ZERO, copy(), *powers, *from_first]
    if template == ():
        found.append(copy(number=True if is_flag else 1))
    found += [Maximum(Fraction(0)), Minimum(Fraction(0))]
    if is_flag:
        if template == ():
            found.append(Maximum(Fraction(0), fact=HasRow(FLAG, True)))
            found.append(Minimum(Fraction(0), fact=HasRow(FLAG, False)))
            found.append(IsFull())
        return found
    found += [part(), part(1), part().replace(zeros=zeros)]
    if template == () and dtype in (np.float32, np.int32):
        count = part().replace(zeros=zeros, fact=Count(FLAG))
        found += [count, AtLeast(flag=FLAG)]
        found += [TowerId(), FirstRow()]
        found += [Valid(), SIZE] if world.padded else []
        if not world.padded:
            found.append(copy(-1, NumberPair(*[x.rows for x in world.sides])))
    if not is_whole:
        found.append(Mean())
        found.append(Mean(vanishes=True, fact=Count(FLAG)))
    return found


# Values.


class Draw:
    """Values of the kinds that a world may have."""

    def __init__(self, world, seed, near=(-2, 2)):
        self.world = world
        self.rng = np.random.default_rng(seed)
        self.near = near

    def numbers(self, shape, dtype, times=1):
        """NumberPair of which small sums and products are exact in all dtypes."""
        dtype = np.dtype(dtype)
        low, high = self.near
        if dtype == np.bool_:
            return self.rng.random(shape) < 0.5
        if is_integer(dtype):
            low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else math.ceil(low)
            x = self.rng.integers(low, max(math.floor(high), low + 1) + 1, shape)
            return (x * times).astype(dtype)
        x = self.rng.integers(math.ceil(2 * low), math.floor(2 * high) + 1, shape) / 2
        if jnp.issubdtype(dtype, jnp.complexfloating):
            x = x + 1j * self.rng.integers(-2, 3, shape)
        return np.asarray(x * times).astype(dtype)

    def of_padding(self, shape, dtype, level):
        """NumberPair that padding may have."""
        x = self.numbers(shape, dtype, 3)
        x = np.where(self.rng.random(x.shape) < 0.3, 0, x).astype(dtype)
        if level is InPadding.ANY and not is_integer(dtype):
            odd = self.rng.choice([np.inf, -np.inf, np.nan, 0], x.shape)
            x = np.where(self.rng.random(x.shape) < 0.3, odd, x).astype(dtype)
        return x

    def values(self, known, shapes, dtype):
        """The towers' values ``[T, ...]`` of a kind on both sides."""
        dtype = np.dtype(dtype)
        first, second = _DRAWN[type(known)](self, known, shapes, dtype)
        return np.asarray(first).astype(dtype), np.asarray(second).astype(dtype)

    def power(self, known, first, second, dtype):
        """Both sides, the second times its power of T."""
        second = scaled(second, self.world.factor(known.power))
        return first, second.astype(dtype)

    def of_each(self, of_side, shapes):
        """NumberPair of a tower, as arrays of one tower's shape."""
        found = []
        for side, shape in zip(self.world.sides, shapes, strict=True):
            x = np.asarray(of_side(side))
            x = x.reshape(-1, *[1] * len(shape))
            found.append(np.broadcast_to(x, (side.towers, *shape)))
        return found


def _zero(draw, known, shapes, dtype):
    pairs = zip(draw.world.sides, shapes, strict=True)
    return [np.zeros((side.towers, *shape), dtype) for side, shape in pairs]


def _copies(draw, known, shapes, dtype):
    axis = draw.world.axis(shapes)
    if isinstance(known.number, NumberPair):
        of_side = dict(zip(draw.world.sides, known.number, strict=True))
        return draw.of_each(lambda side: [of_side[side]] * side.towers, shapes)
    shape = [*shapes[0]]
    if axis is not None:
        shape[axis] = 1
    one = draw.numbers(shape, dtype)
    if isinstance(known.number, bool | int | float):
        one = np.full(shape, known.number).astype(dtype)
    found = []
    for side, whole in zip(draw.world.sides, shapes, strict=True):
        found.append(np.broadcast_to(one, (side.towers, *whole)))
    return draw.power(known, *found, dtype)


def _rows(draw, known, shapes, dtype):
    world = draw.world
    axis = world.axis(shapes)
    assert axis is not None
    each = Fraction(shapes[0][axis], world.sides[0].rows) / blocks_of(known)
    total = int(sum(world.sides[0].counts) * each)
    rest = [size for i, size in enumerate(shapes[0]) if i != axis]
    joined = draw.numbers((total, blocks_of(known), *rest), dtype)
    fill = functools.partial(draw.of_padding, dtype=dtype, level=known.in_padding)
    if PADDING in known.zeros:
        fill = functools.partial(np.zeros, dtype=dtype)
    if isinstance(known.fact, InfinitePadding):
        end = np.inf * known.fact.sign
        fill = functools.partial(np.full, fill_value=end, dtype=dtype)
    if isinstance(known.fact, Flag):
        return world.flags[known.fact.flag]
    if isinstance(known.fact, NumberInBatch):
        return [np.arange(x.towers * x.rows).reshape(x.towers, -1) for x in world.sides]
    split = split_rows(world, joined, fill, each)
    is_plain = not known.zeros and known.fact is None
    is_whole = each.denominator == 1
    if is_plain and known.in_padding is InPadding.AS_EXAMPLE and is_whole:
        of_rows = joined.reshape(int(total / each), int(each), *joined.shape[1:])
        repeated = [of_rows[at] for at in world.repeated]
        split = [
            x.reshape(len(x), x.shape[1] * x.shape[2], *joined.shape[1:])
            for x in repeated
        ]
    found = []
    for own in split:
        x = np.moveaxis(own, 2, 1)
        x = x.reshape(len(own), x.shape[1] * x.shape[2], *rest)
        found.append(np.moveaxis(x, 1, axis + 1))
    return draw.power(known, *found, dtype)


def _parts(draw, known, shapes, dtype):
    world = draw.world
    if isinstance(known.fact, Count):
        counts = [x.sum(1) for x in world.flags[known.fact.flag]]
        pairs = zip(counts, shapes, strict=True)
        return [np.broadcast_to(x.reshape(-1, *[1] * len(s)), (len(x), *s))
                for x, s in pairs]  # fmt: skip
    total = draw.numbers(shapes[0], dtype, 2)
    found = []
    for number, side in enumerate(world.sides):
        own = draw.numbers((side.towers, *shapes[0]), dtype, 3)
        if is_integer(dtype) and dtype not in (np.int32, np.int64):
            # The sum of short integers wraps, and so may each tower's value.
            ends = jnp.iinfo(dtype)
            own = draw.rng.integers(ends.min, ends.max, own.shape).astype(dtype)
        live = np.ones(side.towers, bool)
        if FLAG in known.zeros:
            live = world.flags[FLAG][number].any(1)
        own[~live] = 0
        last = int(np.flatnonzero(live)[-1])
        whole = total if number == 0 else draw.power(known, total, total, dtype)[1]
        others = as_wide(np.delete(own, last, 0)).sum(0)
        with np.errstate(over="ignore"):
            own[last] = np.asarray(as_wide(np.asarray(whole)) - others).astype(dtype)
        found.append(own)
    return found


def _extremes(draw, known, shapes, dtype):
    best = draw.numbers(shapes[0], dtype)
    found = []
    is_maximum = isinstance(known, Maximum)
    for number, side in enumerate(draw.world.sides):
        if isinstance(known.fact, HasRow):
            has_any = draw.world.flags[known.fact.flag][number].any(1)
            found.append(has_any == known.fact.is_any)
            continue
        own = draw.numbers((side.towers, *shapes[0]), dtype)
        own = np.minimum(own, best) if is_maximum else np.maximum(own, best)
        own[draw.rng.integers(side.towers)] = best
        found.append(own)
    return draw.power(known, *found, dtype)


def _from_first_row(draw, known, shapes, dtype):
    numbers = _copies(draw, copy(), shapes, dtype)
    pairs = zip(numbers, draw.world.sides, strict=True)
    return [
        x - np.arange(0, x.shape[0]).reshape(-1, *[1] * (x.ndim - 1)) * side.rows
        for x, side in pairs
    ]


def _means(draw, known, shapes, dtype):
    world = draw.world
    if known.fact is None:
        pairs = zip(world.sides, shapes, strict=True)
        return [draw.numbers((side.towers, *shape), dtype) for side, shape in pairs]
    zeros = frozenset([FLAG, PADDING])
    parts = _parts(draw, part(known.power).replace(zeros=zeros), shapes, dtype)
    found = []
    for x, flag in zip(parts, world.flags[FLAG], strict=True):
        count = flag.sum(1).reshape(-1, *[1] * (x.ndim - 1))
        mean = as_wide(x) / np.maximum(count, 1)
        found.append(np.where(count > 0, mean, draw.numbers(x.shape, dtype)))
    return found


def _spread(draw, known, shapes, dtype):
    dims, by_row, order = known.layout
    assert by_row
    world = draw.world
    if order is not None:
        axis = dims[0]
        plain = _rows(draw, rows(known.power).replace(zeros=known.zeros), shapes, dtype)
        found = []
        for x, placed in zip(plain, world.orders[order[0]], strict=True):
            x = np.moveaxis(x, axis + 1, 1)
            flat = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
            flat = flat[placed.ravel()].reshape(x.shape)
            found.append(np.moveaxis(flat, 1, axis + 1))
        return found
    start = dims[0]
    merged = [
        (*s[:start], math.prod(s[start : dims[-1] + 1]), *s[dims[-1] + 1 :])
        for s in shapes
    ]
    plain = _rows(draw, rows(known.power), merged, dtype)
    pairs = zip(plain, shapes, strict=True)
    return [x.reshape(len(x), *shape) for x, shape in pairs]


def _stacked(draw, known, shapes, dtype):
    sides = draw.world.sides
    axis = draw.world.axis_of_towers(shapes)
    each = [tuple(x for i, x in enumerate(s) if i != axis) for s in shapes]
    own = draw.values(known.of(known.power), each, dtype)
    found = []
    for x, side in zip(own, sides, strict=True):
        x = np.moveaxis(x, 0, axis)
        found.append(np.broadcast_to(x, (side.towers, *x.shape)))
    return found


def _row_numbers(draw, known, shapes, dtype):
    axis = draw.world.axis(shapes)
    found = []
    for side, shape in zip(draw.world.sides, shapes, strict=True):
        x = np.arange(shape[axis]).reshape([-1 if i == axis else 1
                                            for i in range(len(shape))])  # fmt: skip
        found.append(np.broadcast_to(x, (side.towers, *shape)))
    return found


def _ordered_numbers(draw, known, shapes, dtype):
    pairs = zip(draw.world.sides, draw.world.orders[ORDER], strict=True)
    return [at - np.arange(side.towers)[:, None] * side.rows for side, at in pairs]


def _columns(draw, known, shapes, dtype):
    each = [tuple(s[:-1]) for s in shapes]
    columns = [draw.values(x(), each, dtype) for x in known.columns]
    return [np.stack(x, -1) for x in zip(*columns, strict=True)]


def _counts_or_more(draw, known, shapes, dtype):
    found = []
    for x, side in zip(draw.world.flags[known.flag], draw.world.sides, strict=True):
        count = x.sum(1)
        other = draw.rng.integers(1, 4, side.towers)
        found.append(np.where(count > 0, count, other))
    pairs = zip(found, shapes, strict=True)
    return [np.broadcast_to(x.reshape(-1, *[1] * len(s)), (len(x), *s))
            for x, s in pairs]  # fmt: skip


def _of_tower(of_side):
    def drawn(draw, known, shapes, dtype):
        return draw.of_each(of_side, shapes)

    return drawn


_DRAWN: dict[type[Kind], Callable[..., Any]] = {
    Zero: _zero,
    Copy: _copies,
    TowerRows: _rows,
    Part: _parts,
    Maximum: _extremes,
    Minimum: _extremes,
    Mean: _means,
    Groups: _spread,
    Stacked: _stacked,
    RowNumbers: _row_numbers,
    RowOrder: _ordered_numbers,
    Columns: _columns,
    AtLeast: _counts_or_more,
    TowerId: _of_tower(lambda side: range(side.towers)),
    FirstRow: _of_tower(lambda side: np.arange(side.towers) * side.rows),
    FromFirstRow: _from_first_row,
    Valid: _of_tower(lambda side: side.counts),
    Size: _of_tower(lambda side: [side.rows] * side.towers),
    IsFull: _of_tower(lambda side: np.array(side.counts) == side.rows),
}


# Lemmas.


@dataclasses.dataclass(frozen=True)
class Found:
    """A result that does not have the kind that the walk gave it."""

    world: str
    shapes: tuple[Any, ...]
    dtypes: tuple[str, ...]
    ins: tuple[str, ...]
    said: str
    values: Any

    def __str__(self) -> str:
        operands = zip(self.shapes, self.dtypes, self.ins, strict=True)
        told_ins = " and ".join(" ".join(map(str, x)) for x in operands)
        return f"{self.world}: {told_ins} -> {self.said}"


def told(known):
    """A kind with all that is known of it."""
    fields = {x.name: (getattr(known, x.name), x) for x in dataclasses.fields(known)}
    odd = {name: x for name, (x, field) in fields.items() if x != field.default}
    return f"{type(known).__name__} {odd}"


def programs_of(lemma, world):
    """The programs of one tower for both sides."""
    found = []
    for side in world.sides:
        shapes = [shape_on(side, x) for x in lemma.shapes]
        args = map(jax.ShapeDtypeStruct, shapes, lemma.dtypes)
        fn = functools.partial(lemma.fn, side)
        closed = jax.make_jaxpr(fn, axis_env=[(AXIS, side.towers)])(*args)
        found.append(closed)
    return found


def runner(closed, side):
    """The function of the towers' operands that runs a program on all towers."""
    run = functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
    return jax.jit(jax.vmap(run, axis_name=AXIS, axis_size=side.towers))


@dataclasses.dataclass
class Tally:
    """How often lemmas held."""

    held: int = 0
    unknown: int = 0
    unseen: int = 0  # no two runs can show them
    broken: list[Found] = dataclasses.field(default_factory=list)


def combinations_of(lemma, world, seed):
    """The combinations of kinds that a lemma's operands are tried with."""
    kinds = [
        kinds_for(x, np.dtype(dtype), world)
        for x, dtype in zip(lemma.shapes, lemma.dtypes, strict=True)
    ]
    if lemma.kinds is not None:
        kinds = [
            every if only is None else only
            for every, only in zip(kinds, lemma.kinds, strict=True)
        ]
    combinations = [*itertools.product(*kinds)]
    if len(combinations) > _MOST:
        rng = np.random.default_rng(seed)
        at = rng.choice(len(combinations), _MOST, replace=False)
        combinations = [combinations[i] for i in at]
    return combinations


def sizes_of(world):
    """The sizes in which the programs of a world's sides may differ."""
    towers, rows_each = zip(*[(x.towers, x.rows) for x in world.sides], strict=True)
    return Sizes(towers, rows_each, world.padded)


def walks_of(lemma, name, seed):
    """Functions that walk a lemma, for all kinds of its operands; no value is drawn."""
    world = with_flags(WORLDS[name], seed)
    try:
        programs = programs_of(lemma, world)
    except NotThereError:
        return
    sizes = sizes_of(world)
    for ins in combinations_of(lemma, world, seed):
        walk = Walk(sizes, [AXIS], has_keys=True)
        yield functools.partial(walked, walk, programs, ins)


def walked(walk, programs, ins):
    """What a walk says of two programs' results; nothing of programs that differ."""
    try:
        return walk.closed(*programs, ins)
    except ProgramsDifferError:
        return []


def hold(lemma, name, seed=0, tally=None):
    """Hold a lemma in a world, for all kinds of its operands."""
    tally = tally or Tally()
    world = with_flags(WORLDS[name], seed)
    try:
        programs = programs_of(lemma, world)
    except NotThereError:
        return tally
    runs = [runner(*x) for x in zip(programs, world.sides, strict=True)]
    shapes = [[shape_on(side, x) for side in world.sides] for x in lemma.shapes]
    combinations = combinations_of(lemma, world, seed)
    sizes = sizes_of(world)
    rounding = max([eps_of(np.dtype(x)) for x in lemma.dtypes], default=0.0)
    for number, ins in enumerate(combinations):
        outs = walked(Walk(sizes, [AXIS], has_keys=True), programs, ins)
        if all(isinstance(x, Unknown) for x in outs):
            tally.unknown += max(len(outs), 1)
            continue
        draw = Draw(world, [seed, number], lemma.near)
        args = [draw.values(*x) for x in zip(ins, shapes, lemma.dtypes, strict=True)]
        each_side = [*zip(*args, strict=True)] or [(), ()]
        pairs = zip(runs, each_side, strict=True)
        results = jax.device_get([run(*own) for run, own in pairs])
        for known, *values in zip(outs, *results, strict=True):
            if isinstance(known, Unknown):
                tally.unknown += 1
                continue
            held = holds(known, values, world, rounding)
            tally.held += held is True
            tally.unseen += held is None
            if held is False:
                dtypes = tuple(np.dtype(x).name for x in lemma.dtypes)
                told_ins = tuple(map(told, ins))
                tally.broken.append(
                    Found(
                        name,
                        lemma.shapes,
                        dtypes,
                        told_ins,
                        told(known),
                        (args, values),
                    )
                )
    return tally


class NotThereError(Exception):
    """A lemma has no program in a world, or this JAX has no such primitive."""
