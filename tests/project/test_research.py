"""Means of all rows, populations, and training inside of a trace."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import data, mirrored

import towerjax as tj

T = 4


IN_TURN = mirrored(T, 2, "scan")


W = np.float32([0.5, -1, 2, 0.3, -0.2])


def error(w, batch):
    return jnp.tanh(batch["x"] @ w - batch["y"])


def loss_fn(w, batch, tower):
    return tj.Weighted.mean(error(w, batch) ** 2, batch["weight"] * tower.weight)


# The same in NumPy float64, of the whole batch.


def of_rows(w, batch):
    """Losses ``[n]`` and the gradient of each, ``[n, 5]``."""
    x = batch["x"].astype(float)
    y = batch["y"].astype(float)
    e = np.tanh(x @ w - y)
    return e**2, (2 * e * (1 - e**2))[:, None] * x


def value_and_grad(w, batch):
    weight = batch["weight"].astype(float)
    losses, grads = of_rows(w, batch)
    return weight @ losses / weight.sum(), weight @ grads / weight.sum()


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("rows", [24, 18])
def test_tower_mean_is_that_of_all_rows(rows):
    batch = data(rows)

    def tower_fn(state, batch, tower):
        weight = batch["weight"] * tower.weight
        x = batch["x"]
        y = batch["y"]
        means = tower.mean(y, weight), tower.mean({"x": x}, weight, axis=0)["x"]
        return {"mean": means[0], "row": means[1]}

    def update_fn(state, merged):
        return state, {"mean": merged["mean"], "row": merged["row"][2]}

    step = tj.build_step(tower_fn, update_fn, mirrored(T, 2), remainder="pad")
    metrics = step(step.init(0.0), batch)[1]
    weight = batch["weight"].astype(float)
    for name, x in {"mean": batch["y"], "row": batch["x"][:, 2]}.items():
        np.testing.assert_allclose(metrics[name], weight @ x / weight.sum(), rtol=3e-6)
    step = tj.build_step(tower_fn, update_fn, IN_TURN, remainder="pad")
    with pytest.raises(ValueError, match=r"^tower.mean needs all towers at once"):
        step(step.init(0.0), batch)


def num_all_reduces(text):
    return len(re.findall(r" all-reduce\(", text))


def dropping(w, batch, tower):
    """A loss with noise of each tower's own key."""
    noise = jax.random.key_data(tower.rng)[0] / 2.0**32  # a draw compiles long
    errors = jnp.tanh(batch["x"] @ w - batch["y"] - noise)
    return tj.Weighted.mean(errors**2, batch["weight"] * tower.weight)


@pytest.fixture(scope="module")
def noisy():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    # Its noise is each tower's own.
    how = {"donate": False, "audit": False}
    return tj.build_train_step(dropping, optimizer, mirrored(T, 2), **how)


def member(start, seed, rate):
    inner = start.opt_state._replace(hyperparams={"learning_rate": rate})
    key = jax.random.key(seed)
    params = W + jax.random.key_data(key)[1] / 8.0  # which is the seed
    return dataclasses.replace(start, params=params, opt_state=inner, rng=key)


@pytest.mark.slow
def test_a_population_of_seeds_and_rates_is_its_members_in_one_all_reduce(noisy):
    start = noisy.init(W)
    seeds = np.arange(8)
    rates = np.geomspace(0.01, 1, 8, dtype=np.float32)
    made = jax.jit(lambda seed, rate: member(start, seed, rate))
    members = jax.vmap(made)(seeds, rates)
    stacked = jax.tree.map(lambda *x: np.stack(x), *[data(16, s) for s in range(3)])

    def train(state, batches):
        return jax.lax.scan(noisy.fn, state, batches)

    train_all = jax.jit(jax.vmap(train, in_axes=(0, None)))
    train_all = train_all.lower(members, stacked).compile()
    assert num_all_reduces(train_all.as_text()) == 1
    after, metrics = train_all(members, stacked)
    assert metrics["loss"].shape == (8, 3)
    for i in (0, 3, 7):
        state = noisy.place(made(seeds[i], rates[i]))
        for number in range(3):
            state, each = noisy(state, data(16, number))
            loss = metrics["loss"][i, number]
            np.testing.assert_allclose(loss, each["loss"], rtol=2e-6)
        np.testing.assert_allclose(after.params[i], state.params, atol=2e-6)


@pytest.mark.slow
def test_a_population_is_evaluated_and_predicted_by_one_program_and_differentiated():
    # one row of which is padding
    strategy = mirrored(T, 4)
    batch = data(7)
    x = batch["x"].astype(float)
    y = batch["y"].astype(float)

    def metric_fn(w, batch, tower):
        errors = (batch["x"] @ w - batch["y"]) ** 2
        return {"mse": tj.Weighted.mean(errors, tower.weight)}

    evaluate = tj.build_eval_step(metric_fn, strategy)
    predict = tj.build_predict_step(lambda w, rows, tower: rows["x"] @ w, strategy)
    members = np.stack([W, 2 * W, -W])

    def of_member(w, rows):
        mse = lambda w: evaluate.fn(w, batch)["mse"].value  # noqa: E731
        return *jax.value_and_grad(mse)(w), predict.fn(w, rows)

    of_all = jax.jit(jax.vmap(of_member, in_axes=(0, None)))
    mse, slopes, predicted = of_all(members, predict.place_batch(batch))
    errors = members.astype(float) @ x.T - y
    np.testing.assert_allclose(mse, (errors**2).mean(1), rtol=1e-5)
    np.testing.assert_allclose(slopes, 2 * errors @ x / len(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(predicted, errors + y, rtol=1e-4, atol=1e-5)

    forgetful = tj.build_eval_step(
        lambda w, rows, tower: {"m": tj.Weighted.mean(rows["x"] @ w)}, strategy
    )
    with pytest.raises(ValueError, match="A batch of 7 examples was padded, but m"):
        jax.eval_shape(forgetful.fn, W, batch)


@pytest.mark.slow
def test_an_evaluation_is_differentiated_by_what_it_reads_of_each_tower():
    def metric_fn(w, batch, tower):
        read = sum(tower.local.values())
        return {"sum": tj.Sum((read * tower.weight * batch).sum())}

    # It reads each tower's variables, and step.fn has no rows to audit.
    evaluate = tj.build_eval_step(metric_fn, mirrored(T, 2), audit=False)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(T, 2))
    slopes = {"SUM": [36] * 4, "MEAN": [9] * 4, "ONLY_FIRST_TOWER": [36, 0, 0, 0]}
    one = np.float32(1)
    local = {name: tj.TowerLocal(one, tj.Reduction[name]) for name in slopes}
    state = step.init(W, local=local)

    def total(local):
        rows = jnp.arange(1.0, 9.0)
        return evaluate.fn(dataclasses.replace(state, local=local), rows)["sum"].value

    found = jax.jit(jax.grad(total))(state.local)
    for name, slope in slopes.items():
        np.testing.assert_allclose(found[name].value, slope, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_gradient_through_three_steps_is_a_finite_difference():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = tj.build_train_step(loss_fn, optimizer, mirrored(T, 2), donate=False)
    start = step.init(W)
    cut = [data(16, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *cut)
    held_out = data(9, 9)

    def loss_after(rate):
        inner = start.opt_state._replace(hyperparams={"learning_rate": rate})
        state = dataclasses.replace(start, opt_state=inner)
        state, _ = jax.lax.scan(step.fn, state, stacked)
        return (error(state.params, held_out) ** 2).mean()

    def in_float64(rate):
        w = W.astype(float)
        for batch in cut:
            w = w - rate * value_and_grad(w, batch)[1]
        return of_rows(w, held_out)[0].mean()

    slope = jax.jit(jax.grad(loss_after))(jnp.float32(0.1))
    expected = (in_float64(0.1 + 1e-5) - in_float64(0.1 - 1e-5)) / 2e-5
    np.testing.assert_allclose(slope, expected, rtol=1e-4)
