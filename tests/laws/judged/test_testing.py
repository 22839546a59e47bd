"""The one-tower oracle, and comparing two states leaf by leaf."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.testing import assert_same, one_tower

DRAW = np.random.default_rng(11)
PARAMS = {"w": np.array([0.5, -1.0, 2.0], np.float32), "b": np.float32(0.25)}


def batch_of(rows):
    return {
        "x": DRAW.normal(size=(rows, 3)).astype(np.float32),
        "y": DRAW.normal(size=rows).astype(np.float32),
    }


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] + params["b"] - batch["y"]
    loss = tj.Weighted.mean(errors**2, tower.weight)
    local = {"seen": tower.local["seen"] + tower.weight.sum()}
    return tj.TowerOutput(
        loss, {"error": tj.Weighted.mean(errors, tower.weight)}, local
    )


def local():
    return {"seen": tj.TowerLocal(np.float32(0), tj.Reduction.SUM)}


@pytest.fixture(scope="module")
def pair():
    """A step, and its oracle."""
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"), towers=4, tower_loop="scan")
    optimizer = optax.sgd(0.1, momentum=0.9)
    options = {"micro_batches": 2, "remainder": "pad", "max_programs": 2}
    step = tj.build_train_step(loss_fn, optimizer, strategy, **options)
    return step, one_tower(step)


@pytest.mark.slow
def test_the_oracle_sees_the_same_examples(pair):
    step, oracle = pair
    assert oracle.strategy == tj.OneDevice("cpu:0")
    assert oracle.options.micro_batches == 1 and not oracle.options.donate
    state, alone = (s.init(PARAMS, local=local()) for s in pair)
    for rows in (16, 13):
        batch = batch_of(rows)
        state, metrics = step(state, batch)
        before = alone
        alone, expected = oracle(alone, batch)
        assert_same((state, metrics), (alone, expected))
        assert float(before.step) == float(alone.step) - 1  # it was not donated
    assert float(tj.towers.read_local(alone.local["seen"])) == 16 + 13


@pytest.mark.slow
def test_histories_are_compared(pair):
    data = [batch_of(16) for _ in range(3)]
    histories = []
    for s in pair:
        state = s.init(PARAMS, local=local())
        histories.append(tj.run(s, state, data, progress=False)[1])
    assert_same(*histories)
    with pytest.raises(AssertionError, match=r"a\['metrics'\]\['loss'\]"):
        histories[0].metrics["loss"][1] += 1
        assert_same(*histories)


def test_the_oracle_drops_the_rows_that_the_step_drops():
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"), towers=4)
    options = {"micro_batches": 2, "remainder": "drop"}
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)
    placed = one_tower(step).place_batch(np.arange(13.0, dtype=np.float32))
    assert max(len(x) for x in jax.tree.leaves(placed) if np.ndim(x)) == 8


@pytest.mark.slow
def test_a_step_of_ones_own_has_an_oracle():
    def mean(state, batch, tower):
        return tj.Weighted.mean(batch, tower.weight)

    def spread(state, batch, tower, mean):
        return tj.Weighted.mean((batch - mean.value) ** 2, tower.weight)

    def update_fn(state, spread):
        params = state.params + spread.value
        return dataclasses.replace(state, params=params), {"loss": spread}

    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4, tower_loop="scan")
    options = {"micro_batches": 2, "remainder": "pad"}
    step = tj.build_step((mean, spread), update_fn, strategy, **options)
    oracle = one_tower(step)
    batch = np.array([1, 5, 6, 7, 11], np.float32)
    assert oracle.strategy == tj.OneDevice("cpu:0") and not oracle.options.donate
    state, _ = step(step.init(np.float32(2)), batch)
    alone, metrics = oracle(oracle.init(np.float32(2)), batch)
    assert_same(state, alone)
    assert float(metrics["loss"]) == pytest.approx(batch.var(), rel=1e-6)


@pytest.mark.slow
def test_the_oracle_shows_what_is_wrong():
    def bad(w, batch, tower):
        loss = tj.Weighted.mean((w - batch) ** 2, tower.weight)
        return tj.Weighted(loss.value, 1.0)

    how = {"remainder": "pad", "audit": False}
    step = tj.build_train_step(bad, optax.sgd(0.1), tj.Mirrored(towers=4), **how)
    batch = np.arange(6, dtype=np.float32)
    ends = [s(s.init(np.float32(1)), batch)[0] for s in (step, one_tower(step))]
    with pytest.raises(AssertionError, match="a.params is .* and should be"):
        assert_same(*ends)


@pytest.mark.slow
def test_a_replicated_model_has_an_oracle():
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def model_fn(variables, features, labels, mode, tower):
        def loss(w):
            return tj.Weighted.mean((features @ w - labels) ** 2, tower.weight)

        loss, train_op = optimizer.minimize(loss, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    options = {"devices": tj.Mirrored(towers=4), "donate": True}
    model = tj.estimator.replicate_model_fn(model_fn, **options)
    batch = batch_of(7)
    ends = []
    oracle = one_tower(model)
    assert not oracle.options.step.donate
    for m in (model, oracle):
        variables = m.init(tj.TrainState.create(PARAMS["w"], optimizer))
        ends.append(m(variables, batch["x"], batch["y"], tj.estimator.Mode.TRAIN))
    assert_same(ends[0].train_op, ends[1].train_op)
    assert_same(ends[0].loss, ends[1].loss)
    dropping = tj.estimator.replicate_model_fn(
        model_fn, devices=tj.Mirrored(towers=4), remainder="drop"
    )
    with pytest.raises(ValueError, match="depend on its 4 towers"):
        one_tower(dropping)
    alone = {"devices": tj.OneDevice("cpu:1"), "remainder": "drop"}
    one_tower(tj.estimator.replicate_model_fn(model_fn, **alone))
    with pytest.raises(ValueError, match="got a function"):
        one_tower(model_fn)
    with pytest.raises(ValueError, match="got a Step"):
        one_tower(model.train_step())


def test_differences_are_told_leaf_by_leaf():
    right = {
        "a": np.array([1.0, 2.0, np.nan], np.float32),
        "b": np.array([[3.0, 4.0]], np.float64),
        "n": np.array([1, 2]),
        "h": jnp.array([1.0, 2.0], jnp.bfloat16),
        "z": np.array([1 + 2j]),
        "key": jax.random.key(3),
    }
    assert_same(right, dict(right), bits=True)
    wrong = {
        "a": np.array([1.0, np.nextafter(np.float32(2), 3), np.nan], np.float32),
        "b": np.array([[3.0, 5.0]]),
        "n": np.array([1, 3]),
        "h": jnp.array([1.0, 2.015625], jnp.bfloat16),
        "z": np.array([1 + 3j]),
        "key": jax.random.key(4),
    }
    with pytest.raises(AssertionError) as error:
        assert_same(wrong, right)
    text = str(error.value)
    assert text.startswith("5 of 6 leaves differ (rtol=1e-05)")
    assert "a['b'] is 5.0 and should be 4.0 at (0, 1): they differ by 1" in text
    assert "a['h']" in text and "= 1 ulps" in text and "a['n']" in text
    assert "a['z'] is (1+3j) and should be (1+2j)" in text
    assert "a['key']" in text and "a['a']" not in text
    assert_same({"a": wrong["a"]}, {"a": right["a"]})
    with pytest.raises(AssertionError, match="1 ulps, and 1 of 3 elements"):
        assert_same({"a": wrong["a"]}, {"a": right["a"]}, bits=True)
    with pytest.raises(AssertionError, match=r"bit by bit"):
        assert_same(np.float32(-0.0), np.float32(0.0), bits=True)
    assert_same(np.float32(-0.0), np.float32(0.0))
    for rtol in (-1.0, float("nan"), float("inf")):  # no difference is larger
        with pytest.raises(ValueError, match="rtol=.* must be a number >= 0"):
            assert_same(np.float32(1), np.float32(2), rtol)


def test_trees_that_are_not_alike_are_told():
    one = np.zeros(2, np.float32)
    for text, a, b in (
        (r"a\['y'\] is missing", {"x": one}, {"x": one, "y": one}),
        (r"a\['y'\] should not be there", {"x": one, "y": one}, {"x": one}),
        (r"is float32\[2\] and should be float32\[3\]", one, np.zeros(3, np.float32)),
        (r"is float32\[2\] and should be float64\[2\]", one, np.zeros(2)),
        (r"the containers are", (one,), [one]),
        (r"is nan and should be 0.0", np.float32("nan"), np.float32(0)),
        (r"is inf and should be 0.0", np.float32("inf"), np.float32(0)),
    ):
        with pytest.raises(AssertionError, match=text):
            assert_same(a, b)
    with pytest.raises(ValueError, match="rtol=-1"):
        assert_same(one, one, rtol=-1)
