"""Loops over micro-batches: each right form is proved, and no wrong one is."""

import functools

import jax
import jax.numpy as jnp
import micro_batch_loops as deck
import numpy as np
import pytest
from layouts import cases

import towerjax as tj

SHAPES = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in deck.ARGUMENTS]


def unproved(fn, numbers=deck.NUMBERS):
    """The results that are not proved; nothing is run."""
    make = lambda n: (functools.partial(fn, n), SHAPES)  # noqa: E731
    try:
        return tj.testing.prove(make, micro_batches=numbers).unproved
    except tj.ReplicationError as error:
        return {"refuted": str(error)}


def runs_the_same(fn):
    make = lambda n: (jax.jit(functools.partial(fn, n)), deck.ARGUMENTS)  # noqa: E731
    return tj.testing.same_for(make, micro_batches=deck.NUMBERS, rtol=1e-4)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", cases(deck.Right))
def test_a_right_loop_is_proved(name):
    assert unproved(cases(deck.Right)[name]) == {}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", cases(deck.Wrong))
def test_no_wrong_loop_is_proved(name):
    assert unproved(cases(deck.Wrong)[name])


def test_starts_in_a_byte_may_wrap():
    """With four micro-batches the last one starts at row 180."""

    def by_starts(dtype, n, w, x, *_):
        many = jnp.tile(x, (15, 1))
        size = len(many) // n
        starts = jnp.arange(n, dtype=dtype) * np.dtype(dtype).type(size)
        total = lambda i: deck.rows_at(many, i, size).sum()  # noqa: E731
        return deck.over_starts(starts.astype(np.int32), total)

    assert not unproved(functools.partial(by_starts, "int32"), (2, 4))
    assert unproved(functools.partial(by_starts, "int8"), (2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(deck.Right))
def test_a_right_loop_runs_the_same(name):
    assert runs_the_same(cases(deck.Right)[name]).compared


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(deck.Wrong))
def test_a_wrong_loop_runs_otherwise(name):
    with pytest.raises(tj.testing.SplitError):
        runs_the_same(cases(deck.Wrong)[name])
