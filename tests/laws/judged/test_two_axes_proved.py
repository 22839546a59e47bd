"""Meshes of rows and a second axis: right programs are proved, and no wrong one is."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from two_axes import BOTH, ROWS_OVER_BOTH, SPECS, Right, Wrong, named, program

import towerjax as tj

NUMBERS = (1, 2, 4)
# The number of devices of each axis, by the number of all devices, or of the towers.
ROWS_FIRST = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
SECOND_FIRST = {1: (1, 1), 2: (1, 2), 4: (2, 2)}
GROWING = {
    "rows first": ROWS_FIRST,
    "the second axis first": SECOND_FIRST,
    "rows alone": {1: (1, 2), 2: (2, 2), 4: (4, 2)},
    "the second axis alone": {1: (2, 1), 2: (2, 2), 4: (2, 4)},
}


def maker(name, fn, shapes):
    def make(devices):
        shape = shapes[len(devices)]
        found = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        return program(name, fn, Mesh(found, BOTH))

    return make


def unproved(make):
    try:
        return tj.testing.prove(make, devices=NUMBERS).unproved
    except tj.ReplicationError as error:
        return {"result": str(error)}


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("growing", GROWING)
@pytest.mark.parametrize("name", named(Right))
def test_what_is_right_is_proved(name, growing):
    why = unproved(maker(name, named(Right)[name], GROWING[growing]))
    is_of_both = SPECS.get(name, (None,))[0] is ROWS_OVER_BOTH
    if is_of_both and growing in ("the second axis first", "rows alone"):
        # Each place of the second axis then has other rows of the batch.
        assert "must come last among the axes of its dim" in why["result"]
    else:
        assert why == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", named(Right))
def test_what_is_proved_is_the_same(name):
    make = maker(name, named(Right)[name], ROWS_FIRST)
    assert tj.testing.same_on_devices(make, devices=NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", named(Wrong))
def test_no_fault_is_proved(name):
    for growing in (ROWS_FIRST, SECOND_FIRST):
        assert unproved(maker(name, named(Wrong)[name], growing))


@pytest.mark.slow
@pytest.mark.parametrize("name", named(Wrong))
def test_each_fault_is_one(name):
    make = maker(name, named(Wrong)[name], ROWS_FIRST)
    with pytest.raises(tj.testing.SplitError):
        tj.testing.same_on_devices(make, devices=NUMBERS)


REFUTED = {
    "count_added_again": "1/D times",
    "divided_by_devices": "1/D times",
    "experts_counted_per_device": "D times",
    "rows_averaged_twice": "1/D times",
}


@pytest.mark.parametrize("name", REFUTED)
def test_a_factor_is_told(name):
    with pytest.raises(tj.ReplicationError, match=REFUTED[name]):
        tj.testing.prove(maker(name, named(Wrong)[name], ROWS_FIRST), devices=NUMBERS)


@pytest.mark.slow
def test_a_place_has_other_rows_where_the_outer_axis_grows():
    """Each place of the second axis divides by a count of its own rows."""
    name = "rows_by_counts_of_one_axis"
    make = maker(name, named(Wrong)[name], GROWING["rows alone"])
    assert unproved(make)
    programs = [make(jax.devices()[:number]) for number in NUMBERS]
    one, *others = [float(fn(*args)) for fn, args in programs]
    assert all(abs(x - one) > 1e-3 * abs(one) for x in others)
