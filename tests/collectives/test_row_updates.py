"""A step that may be refused writes rows in place, and refused it writes none."""

import re

import jax
import numpy as np
import optax
import pytest

import towerjax as tj

N = 4096
WIDTH = 16
TABLE_BYTES = N * WIDTH * 4


def bits(x):
    return np.asarray(x).view(np.uint32)


RATE = np.float32(0.5)
DECAY = np.float32(0.5)
OPTIMIZER = tj.estimator.TowerOptimizer(optax.sgd(RATE, momentum=DECAY), lazy=True)


def model_fn(variables, features, labels, mode, tower):
    def loss_fn(params):
        predicted = tj.sparse.take(params["table"], features).sum(-1) * params["scale"]
        return tj.Weighted.mean((predicted - labels) ** 2, tower.weight)

    loss, train_op = OPTIMIZER.minimize(loss_fn, variables)
    return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)


def step_and_state(T, D):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(D)], towers=T)
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    table = np.random.default_rng(0).normal(size=(N, WIDTH)).astype(np.float32)
    params = {"table": table, "scale": np.float32(0.25)}
    step = model.train_step(on_nonfinite="skip")
    return step, step.start(tj.TrainState.create(params, OPTIMIZER)), table


def batch_of(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, N, 7)
    ids[1] = ids[0]
    return {"features": ids, "labels": rng.normal(size=7).astype(np.float32)}


@pytest.mark.sampled
@pytest.mark.slow
def test_no_table_is_copied():
    step, state, _ = step_and_state(2, 1)
    program = step.program(state, batch_of(0)).call
    assert program.memory_analysis().temp_size_in_bytes < TABLE_BYTES / 2
    whole = rf"= f32\[{N},{WIDTH}\]\S* (?:copy|select|add|multiply)\("
    assert not re.findall(whole, program.as_text())


def by_hand(table, momentum, scale, batch):
    """Lazy momentum of the rows that are looked up, in float64; the scale's too."""
    ids = batch["features"]
    labels = batch["labels"]
    rows = table[ids].sum(-1)
    slope = 2 * (rows * scale - labels) / len(ids)
    grad = np.zeros_like(table)
    np.add.at(grad, ids, slope[:, None] * scale)
    seen = np.unique(ids)
    momentum[seen] = grad[seen] + DECAY * momentum[seen]
    table[seen] -= RATE * momentum[seen]
    return (slope * rows).sum()


@pytest.mark.sampled
@pytest.mark.slow
def test_a_refused_step_among_others_leaves_table_and_momentum():
    step, state, start = step_and_state(4, 2)
    table = np.float64(start)
    momentum = np.zeros((N, WIDTH))
    scale = 0.25
    of_scale = 0.0
    for seed in range(4):
        batch = batch_of(seed)
        if seed == 2:
            bad = {**batch, "labels": np.full(7, np.nan, np.float32)}
            before = jax.tree.map(np.array, (state.params, state.opt_state))
            state, _ = step(state, bad)
            after = state.params, state.opt_state
            pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            for old, new in pairs:
                np.testing.assert_array_equal(bits(new), bits(old))
        of_scale = by_hand(table, momentum, scale, batch) + DECAY * of_scale
        scale -= RATE * of_scale
        state, _ = step(state, batch)
    np.testing.assert_allclose(state.params["table"], table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["scale"], scale, rtol=1e-5)
