"""What is known to be wrong is refused by the proof or the audit; what is right not."""

import jax
import numpy as np
import optax
import pytest
from known_wrong import PARAMS, RIGHT, WRONG, WRONG_WHERE_PADDED, batch

import towerjax as tj
from towerjax.testing import SplitError

pytestmark = pytest.mark.slow


def build(loss_fn, remainder="error"):
    strategy = tj.Mirrored(["cpu:0"], towers=2)
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, remainder=remainder)


def assert_refused(step):
    state = step.init(PARAMS)
    with pytest.raises((tj.ReplicationError, SplitError)):
        step(state, batch())
    jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)


@pytest.mark.parametrize("name", WRONG)
def test_a_known_wrong_loss_is_refused_before_anything_changes(name):
    assert_refused(build(WRONG[name]))


@pytest.mark.parametrize("name", WRONG_WHERE_PADDED)
def test_a_loss_that_is_wrong_where_towers_are_padded_is_refused(name):
    full = build(WRONG_WHERE_PADDED[name])
    full.audit(full.init(PARAMS), batch())
    assert_refused(build(WRONG_WHERE_PADDED[name], "pad"))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_like_it_passes(name):
    step = build(RIGHT[name])
    step.audit(step.init(PARAMS), batch())
    assert step.is_audited
