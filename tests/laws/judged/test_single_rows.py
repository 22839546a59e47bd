"""Towers of one row each: what is right is proved, and nothing wrong is."""

import jax
import optax
import pytest
from single_rows import BATCH, PARAMS, RIGHT, RIGHT_WHERE_FULL, ROWS, WRONG

import towerjax as tj


@pytest.fixture(autouse=True)
def any_rank():
    """Some losses here add arrays of other ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def step_of(loss_fn, towers=ROWS, remainder="error"):
    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    how = {"remainder": remainder, "audit": False}
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **how)


def unproved(loss_fn, remainder="error", rows=ROWS):
    """The leaves that are not proved for towers of one row, and why."""
    step = step_of(loss_fn, remainder=remainder)
    batch = jax.tree.map(lambda x: x[:rows], BATCH)
    return step.check(step.init(PARAMS), batch).unproved


def loss_on(loss_fn, towers):
    step = step_of(loss_fn, towers)
    return float(step(step.init(PARAMS), BATCH)[1]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_proved(name):
    assert unproved(RIGHT[name]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 3, 1])
@pytest.mark.parametrize("name", sorted(RIGHT.keys() - RIGHT_WHERE_FULL))
def test_a_right_loss_is_proved_of_a_padded_batch(name, rows):
    assert unproved(RIGHT[name], "pad", rows) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_not_proved(name):
    alone = loss_on(WRONG[name], 1)
    assert abs(loss_on(WRONG[name], ROWS) - alone) > 0.01 * abs(alone)
    for remainder in ("error", "pad"):
        step = step_of(WRONG[name], remainder=remainder)
        try:
            assert step.check(step.init(PARAMS), BATCH).unproved
        except tj.ReplicationError as error:
            assert "not equal" in str(error)
