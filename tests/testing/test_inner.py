"""The step that a trainer defines within its `train`."""

import functools

import jax
import pytest

import towerjax as tj

SCALE = 3.0


def train(rate, steps):
    @functools.partial(jax.pmap, axis_name="i")
    def step(w, gradient):
        def scaled(x):
            return rate * SCALE * x

        return w - scaled(gradient)

    def unused():
        return step

    for _ in range(steps):
        step(1.0, 2.0)


def test_a_step_is_taken_from_a_trainer():
    for outer in (train, functools.wraps(train)(lambda *args: train(*args))):
        assert tj.testing.inner(outer, "step", rate=0.5)(5.0, 2.0) == 2.0
    assert tj.testing.inner(train, "scaled", rate=0.5)(2.0) == 3.0


@pytest.mark.parametrize(
    ("outer", "name", "closed", "told"),
    [
        (train, "stop", {}, "0 functions named 'stop' are defined in <function train"),
        (jax.nn, "relu", {}, "0 functions named 'relu'"),
        (train, "step", {}, "rate from the function around it, but got nothing"),
        (train, "step", {"rate": 1.0, "w": 1.0}, "but got rate; w"),
        (train, "unused", {"rate": 1.0}, "unused reads step from the function"),
    ],
)
def test_what_is_not_there_is_told(outer, name, closed, told):
    with pytest.raises(ValueError, match=told):
        tj.testing.inner(outer, name, **closed)
