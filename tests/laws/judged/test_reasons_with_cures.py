"""Reasons for which advice is known: they name a line, and the advice is proved.

Each case has a program, and the same program with its advice followed. The first one
is not proved, and gives other results for other numbers; the second is proved.
"""

import jax
import numpy as np
import pytest
from layouts import cases
from on_devices import NUMBERS, proof_of
from programs_with_advice import OfMicroBatches, OnDevices, words_of

import towerjax as tj


def are_the_same(make, numbers, is_cured):
    """Whether a program has the same results for the least and the largest number."""
    given = []
    for number in (numbers[0], numbers[-1]):
        fn, args = make(number, is_cured)
        given.append(np.asarray(fn(*args), np.float64))
    return np.allclose(*given, 2e-5)


def devices_of(number):
    return jax.devices()[:number]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(OnDevices))
def test_on_devices_the_advice_is_proved(name):
    make = cases(OnDevices)[name]
    [why] = proof_of(lambda devices: make(devices, False)).unproved.values()
    for words in words_of(make):
        assert words in why
    assert "programs_with_advice.py:" in why
    assert not proof_of(lambda devices: make(devices, True)).unproved
    lists = [devices_of(1), devices_of(4)]
    assert not are_the_same(make, lists, False)
    assert are_the_same(make, lists, True)


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
