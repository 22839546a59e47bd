"""Rows at their numbers in the batch: written to it, read from it, and passed on."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import towerjax as tj

ROWS = 8
BATCH = np.random.default_rng(3).normal(size=ROWS).astype(np.float32)
SUM = tj.Reduction.SUM


def numbers_of(batch, tower):
    return tower.id * len(batch) + jnp.arange(len(batch))


def loss_of(values, whole, tower):
    """A loss in which each row meets all rows."""
    nearest = ((values[:, None] - whole[None]) ** 2 + 0.1 * whole[None]).min(1)
    return tj.Weighted.mean(nearest, tower.weight)


def by_a_slice(params, batch, tower):
    values = jnp.sin(params * batch)
    first = (tower.id * len(batch),)
    whole = lax.dynamic_update_slice(jnp.zeros(ROWS), values, first)
    whole = tower.reduce(SUM, whole)
    own = lax.dynamic_slice(whole, first, (len(batch),))
    return loss_of(own + values, whole, tower)


def by_numbers(params, batch, tower):
    values = jnp.sin(params * batch)
    numbers = numbers_of(batch, tower)
    whole = tower.reduce(SUM, jnp.zeros(ROWS).at[numbers].set(values))
    return loss_of(values + whole[numbers], whole, tower)


def by_numbers_on_a_tower(params, batch, tower):
    values = jnp.sin(params * batch)
    whole = jnp.zeros(ROWS).at[jnp.arange(len(batch))].set(values)
    return loss_of(values, tower.reduce(SUM, whole), tower)


def by_numbers_of_triples(params, batch, tower):
    values = jnp.sin(params * batch)
    triples = numbers_of(batch, tower) // 3
    whole = tower.reduce(SUM, jnp.zeros(ROWS).at[triples].set(values))
    return loss_of(values, whole, tower)


def by_a_slice_at_the_tower(params, batch, tower):
    values = jnp.sin(params * batch)
    whole = lax.dynamic_update_slice(jnp.zeros(ROWS), values, (tower.id,))
    return loss_of(values, tower.reduce(SUM, whole), tower)


def step_of(loss_fn, towers):
    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, audit=False)


def trained(loss_fn, towers):
    step = step_of(loss_fn, towers)
    state, metrics = step(step.init(np.float32(1.5)), BATCH)
    return np.array([state.params, metrics["loss"]])


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 4])
@pytest.mark.parametrize("loss_fn", [by_a_slice, by_numbers])
def test_rows_at_their_numbers_in_the_batch_are_proved(loss_fn, towers):
    step = step_of(loss_fn, towers)
    assert step.check(step.init(np.float32(1.5)), BATCH).unproved == {}
    np.testing.assert_allclose(trained(loss_fn, towers), trained(loss_fn, 1), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_fn", [by_numbers_on_a_tower, by_numbers_of_triples, by_a_slice_at_the_tower]
)
def test_rows_at_other_numbers_are_not(loss_fn):
    step = step_of(loss_fn, 2)
    assert "loss" in step.check(step.init(np.float32(1.5)), BATCH).unproved
    assert np.abs(trained(loss_fn, 2) - trained(loss_fn, 1)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 4])
@pytest.mark.parametrize("reads", ["a slice", "numbers"])
def test_a_second_pass_over_rows_that_a_first_one_returned_is_proved(reads, towers):
    optimizer = optax.sgd(0.1)

    def embed(state, batch, tower):
        return {"rows": tj.Rows(jnp.sin(state.params * batch))}

    def loss_fn(params, batch, tower, merged):
        whole = merged["rows"].value
        if reads == "numbers":
            own = whole[numbers_of(batch, tower)]
        else:
            own = lax.dynamic_slice(whole, (tower.id * len(batch),), (len(batch),))
        return loss_of(own + params * batch, whole, tower)

    def update_fn(state, merged):
        state = tj.apply_gradients(optimizer, state, merged["grads"])
        return state, {"loss": merged["loss"]}

    def built(towers):
        strategy = tj.Mirrored(("cpu:0",), towers=towers)
        passes = embed, tj.of_loss(loss_fn)
        step = tj.build_step(passes, update_fn, strategy, audit=False)
        params = np.float32(1.5)
        return step, step.init(params, opt_state=optimizer.init(params))

    step, state = built(towers)
    assert step.check(state, BATCH).unproved == {}
    of_one, state_of_one = built(1)
    loss = step(state, BATCH)[1]["loss"]
    np.testing.assert_allclose(loss, of_one(state_of_one, BATCH)[1]["loss"], 1e-6)
