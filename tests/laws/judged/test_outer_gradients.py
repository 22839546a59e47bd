"""Gradients taken outside of a map: right losses are proved, and no wrong one is."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from outer_gradients import BOTH, Right, Wrong, named, program

import towerjax as tj

NUMBERS = (1, 2, 4)
# The number of devices of each axis, by the number of all devices, or of the towers.
GROWING = {
    "rows first": {1: (1, 1), 2: (2, 1), 4: (2, 2)},
    "rows alone": {1: (1, 2), 2: (2, 2), 4: (4, 2)},
}
HOW = {False: "without types", True: "with types"}  # by ``check_vma``
# A pipeline of one stage is another program than one of two.
STAGES = "rows first", "pipeline"
# The map returns an entry for each device of an axis, and other axes have several.
OF_ONE_AXIS = "rows alone", "mean_outside"


def maker(card, growing, typed):
    shapes = GROWING[growing]

    def make(devices):
        shape = shapes[len(devices)]
        found = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        return program(card, Mesh(found, BOTH), typed=typed)

    return make


def cases(deck):
    return [
        pytest.param(card, typed, id=f"{name} {HOW[typed]}")
        for name, card in named(deck).items()
        for typed in card.typed
    ]


def is_proved(card, growing, typed):
    try:
        report = tj.testing.prove(maker(card, growing, typed), devices=NUMBERS)
    except tj.ReplicationError:
        return False
    return report.unproved == {}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("growing", GROWING)
@pytest.mark.parametrize(("card", "typed"), cases(Right))
def test_a_right_loss_is_proved(card, typed, growing):
    names = {id(x): name for name, x in named(Right).items()}
    is_known = (growing, names[id(card)]) not in (STAGES, OF_ONE_AXIS)
    assert is_proved(card, growing, typed) is is_known


@pytest.mark.slow
@pytest.mark.parametrize(("card", "typed"), cases(Right))
def test_what_is_proved_is_the_same(card, typed):
    make = maker(card, "rows first", typed)
    assert tj.testing.same_on_devices(make, devices=NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize(("card", "typed"), cases(Wrong))
def test_no_wrong_loss_is_proved(card, typed):
    assert not is_proved(card, "rows first", typed)


@pytest.mark.slow
@pytest.mark.parametrize(("card", "typed"), cases(Wrong))
def test_each_wrong_loss_depends_on_the_mesh(card, typed):
    make = maker(card, "rows first", typed)
    with pytest.raises((tj.testing.SplitError, tj.ReplicationError)):
        tj.testing.same_on_devices(make, devices=NUMBERS)


def on_meshes(card, shapes):
    def make(devices):
        mesh = Mesh(np.array(devices).reshape(shapes[len(devices)]), BOTH)
        return program(card, mesh, typed=True)

    return tj.testing.prove(make, devices=tuple(shapes)).unproved


@pytest.mark.slow
def test_axes_that_grow_at_once_name_the_meshes_between():
    """And with these the loss is proved."""
    why = on_meshes(Right.columns, {1: (1, 1), 4: (2, 2)})["result[0]"]
    assert "list the meshes as (1, 1), (2, 1), (2, 2)" in why
    assert on_meshes(Right.columns, {1: (1, 1), 2: (2, 1), 4: (2, 2)}) == {}


@pytest.mark.slow
def test_a_mesh_that_grows_from_one_device_alone_is_compared_with_it():
    shapes = {1: (1, 1), 2: (2, 1), 4: (1, 4)}
    assert on_meshes(Right.columns, shapes) == {}
    assert on_meshes(Wrong.shift_per_device, shapes)
    assert on_meshes(Wrong.own_denominators, shapes)
