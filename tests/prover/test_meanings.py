"""Meanings of the proof's kinds: each is seen to hold, and to fail."""

import lemmas
import numpy as np
import pytest
from lemmas import FLAG, ORDER, WORLDS, Draw, N, T, kinds_for, shape_on, with_flags
from meanings import _MEANINGS, ALL_KINDS, holds

from towerjax.prover.equality.kinds.joined import Joined
from towerjax.prover.equality.kinds.kinds import (
    PADDING,
    Buffer,
    Columns,
    Count,
    Counter,
    GroupDims,
    Groups,
    IsFull,
    Key,
    Maximum,
    Mean,
    Minimum,
    Row,
    RowOrder,
    SoFar,
    Unknown,
    copy,
    part,
    rows,
)
from towerjax.prover.equality.kinds.stacked import Slots

SHAPES = {
    "a number": (),
    "features": (2,),
    "rows": (N,),
    "rows of features": (N, 2),
    "two blocks of rows": ((N, 2),),
    "rows of all towers": (T, N),
    "an entry per tower": (T, 2),
    "groups": (2, (N, 1, 2)),
}
IN_A_LOOP = {Row, SoFar, Counter, Buffer, Slots}
UNSEEN = IN_A_LOOP | {Unknown, Key, Joined}


def test_every_kind_has_a_meaning():
    assert _MEANINGS.keys() == ALL_KINDS


@pytest.mark.slow
def test_what_is_drawn_with_a_kind_has_it():
    seen = set()
    for name, plain in WORLDS.items():
        world = with_flags(plain, 0)
        for shape in SHAPES.values():
            for dtype in ("float32", "int32", "int8", "bool"):
                try:
                    shapes = [shape_on(side, shape) for side in world.sides]
                except lemmas.NotThereError:
                    continue
                for known in kinds_for(shape, np.dtype(dtype), world):
                    values = Draw(world, 1).values(known, shapes, dtype)
                    held = holds(known, values, world)
                    assert held is not False, (name, shape, dtype, known)
                    seen |= {type(known)} if held else set()
    assert seen == ALL_KINDS - UNSEEN - {Columns}


def changed(x, by):
    """The values with another first element on the first tower."""
    x = np.array(x)
    x[(0,) * x.ndim] += by
    return x


@pytest.mark.parametrize("kind", sorted(ALL_KINDS - UNSEEN - {Columns}, key=str))
def test_what_has_not_a_kind_is_seen(kind):
    """A value of the first tower is too large, or too small."""
    seen = 0
    # The first row in another order may be padding.
    names = ["1 and 2"] if kind is Groups else ["1 and 2", "1 and 2, padded"]
    for name in names:
        world = with_flags(WORLDS[name], 0)
        for shape in SHAPES.values():
            shapes = [shape_on(side, shape) for side in world.sides]
            dtype = np.dtype("int32" if kind is RowOrder else "float32")
            dtype = np.dtype("bool") if kind is IsFull else dtype
            for known in kinds_for(shape, dtype, world):
                if type(known) is not kind:
                    continue
                first, second = Draw(world, 1).values(known, shapes, dtype)
                odd = [changed(second, by) for by in (50, -50)]
                if dtype == np.bool_:
                    odd = [~np.array(second)]
                held = [holds(known, (first, x), world) for x in odd]
                assert False in held or held == [None] * len(held), (name, shape, known)
                seen += False in held
    assert seen


WORLD = with_flags(WORLDS["1 and 2"], 0)
PADDED = with_flags(WORLDS["1 and 2, padded"], 0)


def arrays(first, second):
    return np.array(first, np.float32), np.array(second, np.float32)


@pytest.mark.parametrize(
    "known, values, wanted",
    [
        (part(), arrays([3], [1, 2]), True),
        (part(1), arrays([3], [2, 4]), True),
        (part(1), arrays([3], [1, 2]), False),
        (copy(), arrays([3], [3, 3]), True),
        (copy(), arrays([3], [3, 2]), False),
        (copy(-1), arrays([3], [1.5, 1.5]), True),
        (copy(number=2), arrays([3], [3, 3]), False),
        (copy(number=3), arrays([3], [3, 3]), True),
        (Maximum(), arrays([3], [3, 1]), True),
        (Minimum(), arrays([3], [3, 1]), False),
        (Maximum(), arrays([np.nan], [np.nan, 1]), True),
    ],
)
def test_numbers_of_towers(known, values, wanted):
    assert holds(known, values, WORLD) is wanted


def test_short_integers_add_up_modulo_what_they_hold():
    first = np.array([44], np.int8)
    second = np.array([100, -56 + 256 - 256], np.int8)
    assert holds(part(), (first, second), WORLD)
    wide = first.astype(np.int32), np.array([100, 200], np.int32)
    assert not holds(part(), wide, WORLD)
    assert holds(part(), tuple(x.astype(np.int8) for x in wide), WORLD)


def test_padding_is_no_row_and_may_be_zero():
    first = np.arange(8.0)[None]
    second = np.array([[0, 1, 2, 3, 9, 9], [4, 5, 9, 9, 9, 9.0]])
    assert holds(rows(), (first, second), PADDED)
    zeros = rows().replace(zeros=frozenset([PADDING]))
    assert not holds(zeros, (first, second), PADDED)
    masked = first * (first < 6), second * (second < 9)
    assert holds(zeros, masked, PADDED)
    assert not holds(rows(), (first, second[::-1]), PADDED)


def test_rows_in_an_order_are_each_there_once():
    known = Groups(layout=GroupDims((0,), True, (ORDER, None)))
    of_rows = np.arange(8.0)
    values = [of_rows[x] for x in WORLD.orders[ORDER]]
    assert holds(known, values, WORLD)
    twice = [x.copy() for x in values]
    twice[1][0, 0] = twice[1][0, 1]
    assert not holds(known, twice, WORLD)
    another = known.replace(layout=GroupDims((0,), True, ("new", None)))
    assert holds(another, (values[0], values[1][::-1]), WORLD)
    assert not holds(another, twice, WORLD)


def test_a_mean_is_seen_by_its_count():
    counts = [x.sum(1) for x in WORLD.flags[FLAG]]
    assert min(counts[1]) == 0
    mean = Mean(vanishes=True, fact=Count(FLAG))
    total = np.array([6.0])
    values = total / counts[0], np.where(counts[1] > 0, 6.0 / counts[0].sum(), 5.0)
    assert holds(mean, values, WORLD)
    assert not holds(mean, (values[0], values[1] * 2), WORLD)
    # By another number nothing is known of it.
    assert holds(mean.replace(fact=None), values, WORLD) is None
