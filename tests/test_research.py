"""What researchers write with a step: statistics, privacy, populations, searches."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracle import data

import towerjax as tj

T = 4


def mirrored(devices, local="vmap"):
    names = [f"cpu:{i}" for i in range(devices)]
    return tj.Mirrored(names, towers=T, local=local)


IN_TURN = mirrored(2, "scan")
PARTS = {"micro_batches": 3, "remainder": "pad"}


W = np.float32([0.5, -1, 2, 0.3, -0.2])


def error(w, batch):
    return jnp.tanh(batch["x"] @ w - batch["y"])


def loss_fn(w, batch, tower):
    return tj.Weighted.mean(error(w, batch) ** 2, batch["weight"] * tower.weight)


# The same in NumPy float64, of the whole batch.


def of_rows(w, batch):
    """Losses ``[n]`` and the gradient of each, ``[n, 5]``."""
    x, y = batch["x"].astype(float), batch["y"].astype(float)
    e = np.tanh(x @ w - y)
    return e**2, (2 * e * (1 - e**2))[:, None] * x


def value_and_grad(w, batch):
    weight = batch["weight"].astype(float)
    losses, grads = of_rows(w, batch)
    return weight @ losses / weight.sum(), weight @ grads / weight.sum()


@pytest.mark.parametrize("rows", [24, 18])
def test_tower_mean_is_that_of_all_rows(rows):
    batch = data(rows)

    def tower_fn(state, batch, tower):
        weight = batch["weight"] * tower.weight
        x, y = batch["x"], batch["y"]
        means = tower.mean(y, weight), tower.mean({"x": x}, weight, axis=0)["x"]
        return {"mean": means[0], "row": means[1]}

    def update_fn(state, merged):
        return state, {"mean": merged["mean"], "row": merged["row"][2]}

    step = tj.build_step(tower_fn, update_fn, mirrored(2), remainder="pad")
    metrics = step(step.init(0.0), batch)[1]
    weight = batch["weight"].astype(float)
    for name, x in {"mean": batch["y"], "row": batch["x"][:, 2]}.items():
        np.testing.assert_allclose(metrics[name], weight @ x / weight.sum(), rtol=3e-6)
    step = tj.build_step(tower_fn, update_fn, IN_TURN, remainder="pad")
    with pytest.raises(ValueError, match=r"^tower.mean needs all towers at once"):
        step(step.init(0.0), batch)


def num_all_reduces(text):
    return len(re.findall(r" all-reduce\(", text))


# Privacy


@pytest.mark.slow
def test_dp_sgd_clips_each_example_and_adds_noise_once():
    def tower_fn(state, batch, tower):
        def loss_of_one(w, x, y):
            return jnp.tanh(x @ w - y) ** 2

        per_example = jax.vmap(jax.grad(loss_of_one), (None, 0, 0))
        grads = per_example(state.params, batch["x"], batch["y"])
        norms = jnp.linalg.norm(grads, axis=1)
        scale = jnp.minimum(1, 0.4 / norms) * tower.weight
        return {"grads": tj.Weighted(scale @ grads, tower.weight.sum())}

    def update_fn(state, merged):
        key = jax.random.fold_in(state.rng, state.step)
        grads = merged["grads"]
        noise = 1.5 * 0.4 * jax.random.normal(key, state.params.shape)
        params = state.params - 0.5 * (grads.sum + noise) / grads.weight
        return dataclasses.replace(state, params=params), {}

    step = tj.build_step(tower_fn, update_fn, IN_TURN, **PARTS)
    key = jax.random.key(3)
    state, w, noises = step.init(W, rng=key), W.astype(float), []
    for number in range(3):
        batch = data(22, number)
        state, _ = step(state, batch)
        _, grads = of_rows(w, batch)
        scale = np.minimum(1, 0.4 / np.linalg.norm(grads, axis=1))
        assert 3 < (scale < 1).sum() < 22
        noises.append(np.asarray(jax.random.normal(jax.random.fold_in(key, number), 5)))
        w = w - 0.5 * (scale @ grads + 1.5 * 0.4 * noises[-1].astype(float)) / 22
        np.testing.assert_allclose(state.params, w, atol=2e-6)
    assert not np.allclose(noises[0], noises[1])


# A contrastive loss in two passes


def unit(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def encoded(encoders, batch):
    return {name: unit(jnp.tanh(batch[name] @ encoders[name])) for name in encoders}


def contrast(rows, weight, scale):
    """The mean over rows of both cross entropies, of rows of a weight alone."""
    logits = jnp.exp(scale) * rows["image"] @ rows["text"].T
    masked = (
        jnp.where(weight > 0, logits, -jnp.inf),
        jnp.where(weight > 0, logits.T, -jnp.inf),
    )
    own = jnp.diag(logits)
    losses = sum(jax.nn.logsumexp(each, axis=1) - own for each in masked)
    return weight @ losses / (2 * weight.sum())


@pytest.mark.slow
def test_grad_cache_is_the_gradient_of_the_whole_batch(size=21):
    def embed(state, batch, tower):
        rows = encoded(state.params["encoders"], batch)
        return tj.Rows({"rows": rows, "weight": tower.weight})

    def tower_fn(state, batch, tower, merged):
        every, weight = merged.value["rows"], merged.value["weight"]
        at = jnp.where(tower.weight > 0, batch["row"], len(weight))

        def loss_of(params):
            own = encoded(params["encoders"], batch)
            rows = jax.tree.map(lambda x, y: x.at[at].set(y), every, own)
            return contrast(rows, weight, params["scale"])

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        examples = tower.weight.sum()
        return {
            "loss": tj.Weighted(examples * loss, examples),
            "encoders": tj.Sum(grads["encoders"]),
            "scale": tj.Weighted(examples * grads["scale"], examples),
        }

    def update_fn(state, merged):
        grads = {key: merged[key].value for key in ("encoders", "scale")}
        params = jax.tree.map(lambda p, g: p - g, state.params, grads)
        return dataclasses.replace(state, params=params), {"loss": merged["loss"]}

    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(size, 5)) for name in ("image", "text")}
    batch = jax.tree.map(np.float32, batch) | {"row": np.arange(size, dtype=np.int32)}
    encoders = {name: rng.normal(size=(5, 4)) for name in ("image", "text")}
    params = jax.tree.map(np.float32, {"encoders": encoders, "scale": 0.3})
    step = tj.build_step((embed, tower_fn), update_fn, IN_TURN, **PARTS)
    state, metrics = step(step.init(params), batch)

    def whole(params):
        rows = encoded(params["encoders"], batch)
        return contrast(rows, jnp.ones(size), params["scale"])

    loss, grads = jax.jit(jax.value_and_grad(whole))(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    moved = jax.tree.map(lambda old, new: old - new, params, state.params)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-6), moved, grads)


# A mean teacher


@pytest.mark.slow
def test_a_mean_teacher_teaches_and_is_evaluated():
    """Tarvainen and Valpola, 2017: an error of labelled rows, a distance of all."""

    def tower_fn(state, batch, tower):
        def loss_of(w, batch, tower):
            predicted = batch["x"] @ w
            known = tower.weight * batch["known"]
            errors = (predicted - batch["y"]) ** 2
            apart = (predicted - batch["x"] @ tower.extra) ** 2
            mean = tj.Weighted.mean
            return mean(errors, known) + 0.5 * mean(apart, tower.weight)

        loss, grads = tj.value_and_grad(loss_of)(state.params, batch, tower)
        return {"loss": loss, "grads": grads}

    def update_fn(state, merged):
        w = state.params - 0.1 * merged["grads"].value
        teacher = 0.75 * state.extra + 0.25 * w
        after = dataclasses.replace(state, params=w, extra=teacher)
        return after, {"loss": merged["loss"]}

    def metric_fn(w, batch, tower):
        return {
            "mse": tj.Weighted.mean((batch["x"] @ w - batch["y"]) ** 2, tower.weight)
        }

    step = tj.build_step(tower_fn, update_fn, IN_TURN, **PARTS)
    cut = [data(22, seed) for seed in range(5)]
    for batch in cut:
        batch["known"] = (batch.pop("weight") > 0.5).astype(np.float32)
    held_out = data(9, 9)
    state, history = tj.run(
        step,
        step.init(W, extra=W),
        cut,
        evaluate=tj.build_eval_step(metric_fn, IN_TURN),
        eval_batches=[held_out],
        eval_params=lambda state: state.extra,
        progress=False,
    )
    w = teacher = W.astype(float)
    for batch, loss in zip(cut, history.metrics["loss"], strict=True):
        x, y, known = (batch[name].astype(float) for name in ("x", "y", "known"))
        errors, apart = x @ w - y, x @ (w - teacher)
        expected = known @ errors**2 / known.sum() + 0.5 * np.mean(apart**2)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        slope = 2 * (known * errors) @ x / known.sum() + 0.5 * 2 * apart @ x / len(x)
        w = w - 0.1 * slope
        teacher = 0.75 * teacher + 0.25 * w
    np.testing.assert_allclose(state.params, w, atol=1e-6)
    np.testing.assert_allclose(state.extra, teacher, atol=1e-6)
    x, y = held_out["x"].astype(float), held_out["y"].astype(float)
    expected = np.mean((x @ teacher - y) ** 2)
    np.testing.assert_allclose(history.evaluations[-1][1]["mse"], expected, rtol=1e-5)


# The step as a JAX function: populations, gradients through training, searches


def dropping(w, batch, tower):
    """A loss with noise of each tower's own key."""
    noise = jax.random.key_data(tower.rng)[0] / 2.0**32  # a draw compiles long
    errors = jnp.tanh(batch["x"] @ w - batch["y"] - noise)
    return tj.Weighted.mean(errors**2, batch["weight"] * tower.weight)


@pytest.fixture(scope="module")
def noisy():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    return tj.build_train_step(dropping, optimizer, mirrored(2), donate=False)


def member(start, seed, rate):
    inner = start.opt_state._replace(hyperparams={"learning_rate": rate})
    key = jax.random.key(seed)
    params = W + jax.random.key_data(key)[1] / 8.0  # which is the seed
    return dataclasses.replace(start, params=params, opt_state=inner, rng=key)


@pytest.mark.slow
def test_a_population_of_seeds_and_rates_is_its_members_in_one_all_reduce(noisy):
    start = noisy.init(W)
    seeds, rates = np.arange(8), np.geomspace(0.01, 1, 8, dtype=np.float32)
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
    strategy, batch = mirrored(4), data(7)  # one row of which is padding
    x, y = batch["x"].astype(float), batch["y"].astype(float)

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

    evaluate = tj.build_eval_step(metric_fn, mirrored(2))
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2))
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
    step = tj.build_train_step(loss_fn, optimizer, mirrored(2), donate=False)
    start, cut = step.init(W), [data(16, seed) for seed in range(3)]
    stacked, held_out = jax.tree.map(lambda *x: np.stack(x), *cut), data(9, 9)

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


@pytest.mark.slow
def test_lbfgs_searches_lines_through_the_towers_of_a_step():
    def ridge(w, batch, tower):
        errors = batch["x"] @ w - batch["y"]
        mean = tj.Weighted.mean(errors**2, batch["weight"] * tower.weight)
        return mean + tj.penalty(0.1 * (w**2).sum())

    step = tj.build_train_step(ridge, optax.sgd(0.0), mirrored(2), donate=False)
    start, batch, optimizer = step.init(W), data(24), optax.lbfgs()

    def value_fn(w):
        return step.fn(dataclasses.replace(start, params=w), batch)[1]["loss"]

    def search(carry, _):
        w, opt_state = carry
        value, grads = optax.value_and_grad_from_state(value_fn)(w, state=opt_state)
        updates, opt_state = optimizer.update(
            grads, opt_state, w, value=value, grad=grads, value_fn=value_fn
        )
        return (optax.apply_updates(w, updates), opt_state), value

    first = start.params, optimizer.init(start.params)
    (w, _), values = jax.jit(lambda c: jax.lax.scan(search, c, length=10))(first)
    weight = batch["weight"].astype(float) / batch["weight"].astype(float).sum()
    x, y = batch["x"].astype(float), batch["y"].astype(float)
    best = np.linalg.solve((x.T * weight) @ x + 0.1 * np.eye(5), (x.T * weight) @ y)
    np.testing.assert_allclose(w, best, atol=2e-5)
    assert (np.diff(values) <= 1e-6).all()
