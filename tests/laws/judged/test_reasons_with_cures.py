"""Reasons for which advice is known: they name a line, and the advice is proved.

Each case has a program, and the same program with its advice followed. The first one
is not proved, and gives other results for other numbers unless it is right in another
form. The second is proved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from layouts import cases
from on_devices import NUMBERS, W, X, mapped, proof_of
from programs_with_advice import OfMicroBatches, OnDevices, RightOnDevices, words_of

import towerjax as tj


def are_the_same(make, numbers, is_cured):
    """Whether a program has the same results for the least and the largest number."""
    given = []
    for number in (numbers[0], numbers[-1]):
        fn, args = make(number, is_cured)
        given.append(np.asarray(fn(*args), np.float64))
    return given[0].shape == given[1].shape and np.allclose(*given, 2e-5)


def devices_of(number):
    return jax.devices()[:number]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(OnDevices))
def test_on_devices_the_advice_is_proved(name):
    make = cases(OnDevices)[name]
    assert_advice_is_proved(make)
    lists = [devices_of(1), devices_of(4)]
    assert not are_the_same(make, lists, False)
    assert are_the_same(make, lists, True)


def assert_advice_is_proved(make):
    [why] = proof_of(lambda devices: make(devices, False)).unproved.values()
    for words in words_of(make):
        assert words in why
    assert "programs_with_advice.py:" in why
    assert not proof_of(lambda devices: make(devices, True)).unproved


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", cases(RightOnDevices))
def test_of_a_right_program_the_advice_is_proved(name):
    make = cases(RightOnDevices)[name]
    assert_advice_is_proved(make)
    lists = [devices_of(1), devices_of(4)]
    assert are_the_same(make, lists, False)
    assert are_the_same(make, lists, True)
    both = [np.asarray(fn(*args)) for fn, args in (make(lists[1], x) for x in (0, 1))]
    np.testing.assert_allclose(*both, 2e-5)


# Programs that only a library's frame calls, so that no line of the user's is around.


def with_a_size(devices, size):
    """A map that returns a total, and an array of another size."""

    def step(w, x):
        total = lax.psum((x @ w).sum(), "i")
        return total, jnp.ones(size) * total

    return mapped(devices, step, W, X)


def test_a_size_that_depends_on_the_devices_has_its_line():
    """The map's other results are proved."""
    unproved = proof_of(lambda devices: with_a_size(devices, len(devices) + 1)).unproved
    assert [*unproved] == ["result[1]"]
    [why] = unproved.values()
    assert "depends on the number of devices, at " in why
    assert "test_reasons_with_cures.py:" in why
    assert "(step). Give the array one size for any number of devices" in why
    assert not proof_of(lambda devices: with_a_size(devices, 4)).unproved


@pytest.mark.parametrize("name", ["number", "array"])
def test_a_constant_that_depends_on_the_devices_has_its_line(name):
    def make(devices, size):
        constant = {"number": size + 0.5, "array": np.arange(3) + size}[name]

        def step(w, x):
            return lax.psum((x @ w).sum(), "i") * jnp.sin(constant).sum()

        return mapped(devices, step, W, X)

    [why] = proof_of(lambda devices: make(devices, len(devices))).unproved.values()
    assert "a constant depends on the number of devices, at " in why
    assert "test_reasons_with_cures.py:" in why and why.endswith("(step)")
    assert not proof_of(lambda devices: make(devices, 4)).unproved


def given(devices, x):
    fn, _ = mapped(devices, lambda w, x: lax.psum((x @ w).sum(), "i"), W, X)
    return fn, (W, x)


ARGUMENTS = {
    "of another size": (lambda n: np.tile(X, (n, 1)), "args[1] is a different array"),
    "of other numbers": (lambda n: X + n, "args[1] is a different array"),
    "of more dims": (
        lambda n: {f"{i}": X for i in range(n)},
        "args[1]['1'] is an array for",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_differs_has_its_name(name):
    argument, words = ARGUMENTS[name]

    def make(devices):
        fn, _ = given(devices, X)
        given_x = argument(len(devices))
        is_dict = isinstance(given_x, dict)
        return (lambda w, x: fn(w, x["0"] if is_dict else x)), (W, given_x)

    [why] = proof_of(make).unproved.values()
    assert words in why
    assert "Let make give the same arguments for each number of devices" in why
    assert not proof_of(lambda devices: given(devices, X)).unproved


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(OfMicroBatches))
def test_of_micro_batches_the_advice_is_proved(name):
    make = cases(OfMicroBatches)[name]
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.prove(lambda n: make(n, False), micro_batches=NUMBERS)
    for words in (*words_of(make), "programs_with_advice.py:"):
        assert words in str(error.value)
    cured = tj.testing.prove(lambda n: make(n, True), micro_batches=NUMBERS)
    assert not cured.unproved
    assert not are_the_same(make, NUMBERS, False)
    assert are_the_same(make, NUMBERS, True)
