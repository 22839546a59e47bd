"""Collectives in groups of towers: both sides of a grid are all towers, one is not."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from analysed import AXIS, psum, study
from jax import lax

from towerjax.prover.replication.marks import ALL, coordinate_of, without_coordinate


def blocks(size, length):
    return [list(range(i, i + length)) for i in range(0, size, length)]


def strides(size, length):
    return [list(range(i, size, length)) for i in range(length)]


def in_groups(collective, make, length):
    """The collective in groups of towers that ``make(size, length)`` lists."""

    def step(value):
        groups = make(lax.axis_size(AXIS), length)
        return collective(value, AXIS, axis_index_groups=groups)

    return step


def chain(*steps):
    def tower(w, x):
        for step in steps:
            x = step(x)
        return x

    return tower


def scatter(value, axis, axis_index_groups):
    group = len(axis_index_groups[0])
    value = jnp.tile(value.reshape(-1), group)
    options = {"tiled": True}
    options["axis_index_groups"] = axis_index_groups
    return lax.psum_scatter(value, axis, **options)


def gather(value, axis, axis_index_groups):
    return lax.all_gather(value, axis, axis_index_groups=axis_index_groups, tiled=True)


def add_id(value):
    return value + lax.axis_index(AXIS)


def neighbours(value):
    size = lax.axis_size(AXIS)
    return lax.ppermute(value, AXIS, [(i, (i + 1) % size) for i in range(size)])


def inner(length, collective=lax.psum):
    return in_groups(collective, blocks, length)


def outer(length, collective=lax.psum):
    return in_groups(collective, strides, length)


def swapped(size, length):
    """Blocks but for towers 0 and the last, which have changed places."""
    order = [size - 1, *range(1, size - 1), 0]
    return [[order[i] for i in group] for group in blocks(size, length)]


def crossed(make, size, length):
    """Groups of which the second and third have exchanged a tower."""
    groups = make(size, length)
    groups[1][-1], groups[2][0] = groups[2][0], groups[1][-1]
    return groups


def uneven(size, length):
    return [[0], list(range(1, size))]


GRID_LEGAL = [
    (inner(2), outer(2)),
    (outer(2), inner(2)),
    (inner(4), outer(4)),
    (inner(2, lax.pmax), outer(2, lax.pmin)),
    (inner(4, scatter), outer(4), inner(4, gather)),
    (outer(2, scatter), inner(2), outer(2, gather)),
    (inner(2, gather), outer(2, gather)),
    (inner(2), outer(2), inner(4), neighbours),
    (inner(1), add_id, inner(2), outer(2)),
    (psum, in_groups(lax.psum, swapped, 2)),
]
GRID_REFUSED = [
    (inner(2),),
    (outer(2),),
    (inner(2), inner(2)),
    (outer(2), outer(2)),
    (inner(2), outer(4)),  # of another grid
    (inner(4), outer(2)),
    (inner(2), inner(4)),
    (inner(4, scatter), outer(4)),  # each tower of a block has its own part
    (inner(4, scatter), inner(4, gather)),
    (inner(2), outer(2), inner(2, scatter)),
    (inner(2), add_id, outer(2)),
    (inner(2), neighbours, outer(2)),
    (neighbours, outer(2)),
    (in_groups(lax.psum, swapped, 2), outer(2)),
    (in_groups(lax.psum, partial(crossed, blocks), 2), outer(2)),
    (inner(4), in_groups(lax.psum, partial(crossed, strides), 4)),
    (inner(2), in_groups(lax.psum, lambda n, k: strides(n, k)[::-1], 4)),
    (in_groups(lax.psum, uneven, 0), outer(2)),
    (inner(2), in_groups(lax.psum, uneven, 0)),
]


@pytest.mark.parametrize("num_towers", [8, 16])
@pytest.mark.parametrize("steps", GRID_LEGAL)
def test_reductions_over_both_sides_of_a_grid_are_one_over_all(steps, num_towers):
    assert study(chain(*steps), num_towers).outputs == (None,)


@pytest.mark.parametrize("num_towers", [8, 16])
@pytest.mark.parametrize("steps", GRID_REFUSED)
def test_reductions_that_leave_a_side_of_a_grid_are_refused(steps, num_towers):
    assert study(chain(*steps), num_towers).outputs != (None,)


def test_both_sides_of_a_grid_are_reduced_in_a_loop_too():
    def tower(w, x):
        def body(carry, row):
            total = chain(inner(2), outer(2))(w, row)
            return carry + total, chain(inner(2))(w, row)

        return lax.scan(body, w, x)

    carry, rows = study(tower, 8).outputs
    assert carry is None and rows.source == "batch['x']"


def test_a_coordinate_never_hides_a_dependence():
    """Random reductions in groups, done with numbers: what is left shows in them."""
    size = 12
    rng = np.random.default_rng(0)
    lengths = (2, 3, 4, 6)
    mirrored = 0
    for _ in range(400):
        values = rng.integers(1, 10**6, size)
        along = ALL
        for _ in range(rng.integers(1, 5)):
            make = (blocks, strides)[rng.integers(2)]
            groups = make(size, lengths[rng.integers(4)])
            over = coordinate_of(groups, size)
            values = values.copy()
            along = without_coordinate(along, over)
            for group in groups:
                values[group] = values[group].sum() % 10**6
        mirrored += not along
        seen = {}
        for tower, value in enumerate(values):
            # Towers that agree on all that is left must have the same value.
            key = tuple(
                tower % x.block if x.within else tower // x.block for x in along
            )
            assert seen.setdefault(key, value) == value
    assert 20 < mirrored < 380


@pytest.mark.parametrize(
    "groups, size",
    [([[0], [1, 2]], 3), ([[0, 2], [1]], 3), ([[0, 2, 4], [1, 3]], 5)]
    + [([[0, 3], [1], [2]], 4)],
)
def test_groups_of_unequal_size_are_no_grid(groups, size):
    def tower(w, x):
        return lax.psum(w, AXIS, axis_index_groups=groups)

    def scanned(w, x):
        return lax.scan(lambda c, _: (tower(c, x), None), w, None, length=3)[0]

    assert coordinate_of(groups, size) is None
    for program in (tower, scanned):
        [dependence] = study(program, num_towers=size).outputs
        assert dependence is not None and dependence.source == "psum"
