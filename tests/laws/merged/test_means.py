"""A sum of means: several terms of a loss, each with its own denominator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored

import towerjax as tj

EPS = np.finfo(np.float32).eps
SIZE = 22
FACTOR = 0.3
DECAY = 0.01
RATE = 0.5


def data(seed=0):
    """Some towers have hardly a label, and weights grow from the first to the last."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(SIZE, 5)).astype(np.float32),
        "y": rng.normal(size=SIZE).astype(np.float32),
        "labelled": (rng.random(SIZE) < np.linspace(0.1, 1, SIZE)).astype(np.float32),
        "weight": (rng.random(SIZE) ** 3).astype(np.float32),
    }


def params():
    return {"w": np.float32([0.3, -0.2, 0.5, 0.1, -0.4])}


def losses(params, batch):
    hidden = batch["x"] @ params["w"]
    return (jnp.tanh(hidden) - batch["y"]) ** 2, hidden**2


def loss_fn(params, batch, tower):
    first, second = losses(params, batch)
    ce = tj.Weighted.mean(first, batch["labelled"] * tower.weight)
    aux = tj.Weighted.mean(second, batch["weight"] * tower.weight)
    return ce + FACTOR * aux + tj.penalty(DECAY * (params["w"] ** 2).sum())


def oracle(w, batch):
    """The terms, and the gradient, in NumPy float64 of the whole batch."""
    x = batch["x"].astype(float)
    y = batch["y"].astype(float)
    hidden = x @ w
    error = np.tanh(hidden) - y
    parts = [batch[x] / (batch[x].sum(dtype=float) or 1) for x in WEIGHTS]
    terms = [parts[0] @ error**2, FACTOR * (parts[1] @ hidden**2), DECAY * (w @ w)]
    slope = parts[0] * 2 * error * (1 - np.tanh(hidden) ** 2)
    return terms, (slope + FACTOR * parts[1] * 2 * hidden) @ x + 2 * DECAY * w


WEIGHTS = ("labelled", "weight")


@pytest.mark.slow
def test_outside_of_towers_a_sum_of_means_is_one_towers():
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.5))
    state = tj.TrainState.create(np.float32(1), optimizer)
    means = [
        lambda w: tj.Weighted(6 * w, 3.0) + tj.penalty(w),
        lambda w: tj.Weighted(6 * w, 3.0) + tj.Weighted(w**2, 2.0) + tj.penalty(w),
    ]
    minimize = jax.jit(lambda s: [optimizer.minimize(mean, s)[1] for mean in means])
    after = [float(each.params) for each in minimize(state)]
    assert after == [1 - 0.5 * (2 + 1), 1 - 0.5 * (2 + 1 + 1)]
    with pytest.raises(ValueError, match=r"optimizer\.minimize"):
        optimizer.compute_gradients(means[1], np.float32(1))


@pytest.mark.slow
def test_a_metric_may_be_a_sum_of_means():
    """Of two batches of unequal weights it is that of all their rows."""

    def metric_fn(params, batch, tower):
        return {"loss": loss_fn(params, batch, tower)}

    evaluate = tj.build_eval_step(metric_fn, mirrored(4, 2, "vmap"))
    batch = data()
    halves = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
    terms, _ = oracle(params()["w"].astype(float), batch)
    found = tj.evaluate(evaluate, params(), halves)["loss"]
    np.testing.assert_allclose(found, sum(terms), rtol=200 * EPS)


@pytest.mark.slow
def test_weights_may_be_of_local_variables_and_of_another_loss():
    """Of all micro-batches, each of which goes on from the one before."""

    def of_all_rows(params, batch, tower):
        return tj.Weighted.mean(losses(params, batch)[0], tower.weight)

    def whole_loss(params, batch, tower):
        fixed = jax.lax.stop_gradient(params)
        _, first = tj.value_and_grad(of_all_rows)(fixed, batch, tower)
        size = jnp.abs(first.sum["w"]).sum() / first.weight
        seen = tower.local + 1
        batch = {**batch, "weight": batch["weight"] * (seen + size)}
        return tj.TowerOutput(loss_fn(params, batch, tower), local=seen)

    def update_fn(state, merged):
        w = state.params["w"] - RATE * merged["grads"].value["w"]
        after = dataclasses.replace(state, params={"w": w}, local=merged["local"])
        return after, {"loss": merged["loss"]}

    passes = tj.of_loss(whole_loss)
    # Each tower's weights are its own: they come from its variable and its rows.
    how = {"micro_batches": 11, "audit": False}
    step = tj.build_step(passes, update_fn, mirrored(2), **how)
    local = tj.TowerLocal(np.float32(0), tj.Reduction.SUM)
    state, metrics = step(step.init(params(), local=local), data())
    w = params()["w"].astype(float)
    batch = data()
    for row in range(SIZE):
        x = batch["x"][row].astype(float)
        y = batch["y"][row]
        error = np.tanh(x @ w) - y
        slope = 2 * error * (1 - np.tanh(x @ w) ** 2) * x
        batch["weight"][row] *= row % 11 + 1 + np.abs(slope).sum()
    terms, grad = oracle(w, batch)
    np.testing.assert_allclose(metrics["loss"], sum(terms), rtol=200 * EPS)
    np.testing.assert_allclose(state.params["w"], w - RATE * grad, atol=400 * EPS)


@pytest.mark.slow
def test_a_mean_of_all_towers_is_a_factor_as_the_error_says():
    def product(params, batch, tower):
        first, second = losses(params, batch)
        mean = tj.Weighted.mean(first, batch["labelled"] * tower.weight)
        mean = tower.reduce(tj.Reduction.SUM, mean).value
        return mean * tj.Weighted.mean(second, batch["weight"] * tower.weight)

    def in_float64(w):
        (first, second, shared), _ = oracle(w, data())
        return first * second / FACTOR

    step = tj.build_train_step(
        product, optax.sgd(RATE), mirrored(4, 2), remainder="pad"
    )
    state, metrics = step(step.init(params()), data())
    w = params()["w"].astype(float)
    h = 1e-5 * np.eye(5)
    grad = [(in_float64(w + d) - in_float64(w - d)) / 2e-5 for d in h]
    np.testing.assert_allclose(metrics["loss"], in_float64(w), rtol=200 * EPS)
    np.testing.assert_allclose(
        state.params["w"], w - RATE * np.array(grad), atol=400 * EPS
    )


@pytest.mark.slow
def test_several_means_cost_one_small_reduction_more():
    step = tj.build_train_step(loss_fn, optax.sgd(RATE), mirrored(2, 2))
    found = step.check(params(), data()).analysis.collectives
    assert [x.primitive for x in found] == ["psum"] * 2 and found[0].bytes == 8


@pytest.mark.slow
def test_one_mean_and_what_is_shared_need_one_pass():
    def loss(params, batch, tower):
        mean = tj.Weighted.mean(losses(params, batch)[0], batch["labelled"])
        return 2.0 * (mean + tj.penalty(DECAY * (params["w"] ** 2).sum()))

    strategy = mirrored(2, 2)
    step = tj.build_train_step(loss, optax.sgd(RATE), strategy, micro_batches=11)
    state = step.init(params())
    assert len(step.check(state, data()).analysis.collectives) == 1
    state, metrics = step(state, data())
    w = params()["w"].astype(float)
    batch = {**data(), "weight": np.zeros(SIZE)}
    batch["weight"][:] = 1
    terms, grad = oracle(w, batch)
    hidden = batch["x"].astype(float) @ w
    aux = FACTOR * 2 * (hidden @ batch["x"]) / SIZE
    np.testing.assert_allclose(metrics["loss"], 2 * (terms[0] + terms[2]), rtol=1e-5)
    expected = w - RATE * 2 * (grad - aux)
    np.testing.assert_allclose(state.params["w"], expected, atol=400 * EPS)


@pytest.mark.slow
def test_several_means_have_the_same_bits_on_any_devices():
    ends = set()
    for devices in (1, 2):
        strategy = mirrored(4, devices, "scan", cross_tower_ops=tj.PinnedTree())
        step = tj.build_train_step(loss_fn, optax.sgd(RATE), strategy, remainder="pad")
        state = step.init(params())
        for seed in range(3):
            state, metrics = step(state, data(seed))
        ends.add((np.asarray(state.params["w"]).tobytes(), float(metrics["loss"])))
    assert len(ends) == 1


def refused(loss, text, error=ValueError, **options):
    step = tj.build_train_step(loss, optax.sgd(RATE), mirrored(2, 2), **options)
    with pytest.raises(error, match=text):
        step.check(params(), data())


@pytest.mark.slow
def test_what_is_no_sum_of_means_is_refused_by_name():
    def differs(params, batch, tower):
        return loss_fn(params, batch, tower) + tj.penalty(batch["y"].sum())

    def one_mean(params, batch, tower):
        mean = tj.Weighted.mean(batch["y"] * params["w"][0], tower.weight)
        return mean + tj.penalty(batch["y"].sum())

    def in_each_part(params, batch, tower):
        mean = tj.Weighted.mean(batch["y"] * params["w"][0], tower.weight)
        return tower.reduce(tj.Reduction.SUM, mean).value * mean

    text = r"the value in tj\.penalty, .*\n.* depends on batch\['y'\]; it is made at"
    refused(differs, text, tj.ReplicationError)
    refused(one_mean, text, tj.ReplicationError)
    text = "a mean's factor or tj.penalty, made at .*test_means.*in an earlier pass"
    refused(in_each_part, text, tj.ReplicationError, micro_batches=11)
    refused(lambda p, b, t: tj.penalty((p["w"] ** 2).sum()), "no row contributes.*MEAN")
    refused(loss_fn, "is a bare scalar", loss_reduction=tj.Reduction.MEAN)

    def taken(params, batch, tower):
        return tj.TowerOutput(loss_fn(params, batch, tower), {"loss/0": tower.step})

    refused(taken, r"'loss/0'\] has the name of the loss or of a term of it. Give your")
    with pytest.raises(ValueError, match=r"mean \+ tj\.penalty\(.*\.value"):
        1.0 - tj.Weighted(2.0, 1.0)
    assert (0 - tj.Weighted(6.0, 3.0)).value == -2  # 0 is where sum() starts


def moving(params, batch, tower):  # weights that learn
    weight = jax.nn.sigmoid(batch["x"] @ params["w"])
    return tj.Weighted.mean(losses(params, batch)[0], weight * tower.weight)


def held(params, batch, tower):
    loss = moving(params, batch, tower)
    return dataclasses.replace(loss, weight=jax.lax.stop_gradient(loss.weight))


def test_weights_that_move_with_the_parameters_are_refused():
    text = r"weights of the loss depend on the parameters.*stop_gradient"
    refused(moving, text)
    refused(lambda *args: moving(*args) + held(*args), text)
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(RATE))
    with pytest.raises(ValueError, match=text):
        optimizer.compute_gradients(lambda w: tj.Weighted(w, 2 * w), np.float32(1))

    def chosen(params, batch, tower):  # a comparison has no derivative
        sure = jax.nn.sigmoid(batch["x"] @ params["w"]) > 0.5
        return tj.Weighted.mean(losses(params, batch)[0], sure * tower.weight)

    for loss in (held, chosen):
        step = tj.build_train_step(loss, optax.sgd(RATE), mirrored(2, 2))
        step.check(params(), data())


@pytest.mark.slow
def test_a_step_has_a_derivative_by_the_weights_of_its_loss():
    """As where the weights of examples are learned from what a step does."""
    x = np.arange(1.0, 5, dtype=np.float32)
    w = np.float32(0.5)

    def loss(w, batch, tower):
        return tj.Weighted.mean((w * batch["x"]) ** 2, batch["m"] * tower.weight)

    step = tj.build_train_step(loss, optax.sgd(RATE), tj.Mirrored(("cpu:0",), towers=2))
    state = step.init(w)
    after = lambda m: step.fn(state, {"x": x, "m": m})[0].params  # noqa: E731
    # w - rate * 2 w sum(m x^2) / sum(m), by m at ones
    expected = -2 * RATE * w * (x**2 - np.mean(x**2)) / 4
    found = jax.jit(jax.grad(after))(jnp.ones(4))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_shared_term_is_the_same_on_all_towers_whatever_is_returned(T, terms):
    def loss(params, batch, tower):
        mean = tj.Weighted.mean((params["w"] @ batch["x"].T) ** 2, tower.weight)
        rest = tj.Weighted.mean(batch["y"], batch["weight"]) if terms == 2 else 0 * mean
        return mean + rest + tj.penalty(batch["y"].mean() * params["w"].sum())

    step = tj.build_step(tj.of_loss(loss), lambda state, _: (state, {}), mirrored(T, 1))
    text = "the value in tj.penalty, .*\n.*batch\\['y'\\]; it is made at .*test_means"
    with pytest.raises(tj.ReplicationError, match=text):
        step.check(params(), data())


@pytest.mark.slow
@pytest.mark.parametrize("tower_loop", ["vmap", "scan"])
@pytest.mark.parametrize("parts", [1, 11])
def test_the_second_of_two_passes_is_differentiated_elsewhere(tower_loop, parts):
    """Where the first one's gradient leads; of several means, in float64 by hand."""

    def ahead(state, merged):
        return {"w": state.params["w"] + 0.5 * merged["grads"].value["w"]}

    def second(params, batch, tower, merged):
        return loss_fn(params, batch, tower)

    def update_fn(state, merged):
        w = state.params["w"] - RATE * merged["grads"].value["w"]
        metrics = {"loss": merged["loss"], "first": merged["before"]["loss"]}
        return dataclasses.replace(state, params={"w": w}), metrics

    passes = tj.of_loss(loss_fn), tj.of_loss(second, ahead)
    how = {"micro_batches": parts, "audit": False}
    step = tj.build_step(passes, update_fn, mirrored(2, 2, tower_loop), **how)
    state, metrics = step(step.init(params()), data())
    w = params()["w"].astype(float)
    first, slope = oracle(w, data())
    last, slope = oracle(w + 0.5 * slope, data())
    found = float(metrics["first"]), float(metrics["loss"])
    np.testing.assert_allclose(found, (sum(first), sum(last)), rtol=200 * EPS)
    np.testing.assert_allclose(state.params["w"], w - RATE * slope, rtol=200 * EPS)


def test_padding_that_one_term_does_not_mask_is_refused():
    def loss(params, batch, tower):
        first, second = losses(params, batch)
        return tj.Weighted.mean(first, tower.weight) + tj.Weighted.mean(second)

    step = tj.build_train_step(loss, optax.sgd(RATE), mirrored(4, 2), remainder="pad")
    with pytest.raises(ValueError, match=r"loss\.terms\[1\]\.sum"):
        step(step.init(params()), data())


def test_a_tower_has_no_gradient_of_several_means_of_its_own():
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
        return {"loss": loss, "grads": grads}

    step = tj.build_step(tower_fn, lambda s, m: (s, {}), mirrored(2, 2))
    with pytest.raises(ValueError, match=r"tj\.build_step\(tj\.of_loss\(loss_fn\)"):
        step(step.init(params()), data())
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(RATE))
    mean = tj.Weighted.mean(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="has its own denominator"):
        optimizer.compute_gradients(lambda w: w * mean + mean, np.float32(1))
