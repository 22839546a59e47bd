"""A step that may be refused writes rows in place, and refused it writes none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import towerjax as tj
from towerjax.step.state.update import accept_or_keep

N = 4096
WIDTH = 16
TABLE_BYTES = N * WIDTH * 4


def bits(x):
    return np.asarray(x).view(np.uint32)


def odd_table(seed=0):
    """With what arithmetic would change: -0.0, infinity, NaN with bits of its own."""
    table = np.random.default_rng(seed).normal(size=(6, 2)).astype(np.float32)
    table[1] = -0.0
    table[3] = np.array([np.inf, 0], np.float32)
    table.view(np.uint32)[4, 0] = 0x7FC01234
    return table


IDS = np.array([1, 3, 4, 1, 7, -1])
NEW = np.arange(12, dtype=np.float32).reshape(6, 2)


def one_by_one(table):
    for i in IDS:
        table = table.at[i % 6].set(NEW[i % 6])
    return table


def stacked(table):
    """What vmap makes of a value that all of its rows have in common."""
    out = jax.vmap(lambda i: (i, table.at[IDS].add(NEW)))(jnp.arange(3))[1]
    return out[1]


UPDATES = {
    "set": lambda x: x.at[IDS].set(NEW),
    "add": lambda x: x.at[IDS].add(NEW),
    "multiply": lambda x: x.at[IDS].multiply(NEW),
    "dropped": lambda x: x.at[IDS].set(NEW, mode="drop"),
    "clipped": lambda x: x.at[IDS].add(NEW, mode="clip"),
    "columns": lambda x: x.at[:, 1].set(0),
    "elements": lambda x: x.at[IDS, IDS % 2].add(NEW[:, 0]),
    "slice": lambda x: lax.dynamic_update_slice(x, jnp.ones((2, 2)), (3, 0)),
    "one by one": one_by_one,
    "stacked": stacked,
    "rows, then all": lambda x: x.at[IDS].add(NEW) * 2,
    "all, then rows": lambda x: (x * 2).at[IDS].add(NEW),
    "nested": jax.jit(lambda x: x.at[IDS].add(NEW)),
    "transposed": lambda x: x.T[:, ::-1].T.at[IDS].add(NEW),
}


def update_if(accepted, update, carry):
    return accept_or_keep(lambda carry: (accepted, update(carry), ()), carry)[0]


@pytest.fixture(scope="module")
def updated():
    """By name what each update makes: ``(refused, accepted, plain)``."""

    @jax.jit
    def run(accepted, x):
        return {name: update_if(accepted, f, x) for name, f in UPDATES.items()}

    @jax.jit
    def plain(x):
        return {name: update(x) for name, update in UPDATES.items()}

    made = run(False, odd_table()), run(True, odd_table()), plain(odd_table())
    return jax.device_get(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_a_refusal_keeps_every_bit_and_what_is_accepted_is_the_update(name, updated):
    refused, accepted, plain = (found[name] for found in updated)
    np.testing.assert_array_equal(bits(refused), bits(odd_table()))
    np.testing.assert_array_equal(accepted, plain)


@pytest.mark.parametrize("name", [*UPDATES][:4] + [*UPDATES][5:9])
def test_where_rows_are_written_they_alone_are_selected(name):
    def run(*x):
        return update_if(x[0], UPDATES[name], x[1])

    table = odd_table()
    eqns = jax.make_jaxpr(run)(True, table).eqns
    selected = [x.outvars[0].aval.shape for x in eqns if x.primitive is lax.select_n_p]
    assert table.shape not in selected


def test_a_refused_first_step_has_no_derivative_by_its_rate():
    def kept(rate, accepted):
        optimizer = optax.adam(rate)  # divides by 1 - b**count

        def update(carry):
            updates, state = optimizer.update(jnp.ones(2), carry[1], carry[0])
            return carry[0] + updates, state

        carry = jnp.ones(2), optimizer.init(jnp.ones(2))
        return update_if(accepted, update, carry)[0].sum()

    of_rate = jax.jit(jax.grad(kept))
    assert of_rate(0.1, False) == 0
    assert of_rate(0.1, True) < -1


def swapped(tables):
    return {"a": tables["b"].at[IDS].add(1), "b": tables["a"].at[IDS].set(NEW)}


def handed_on(tables):
    rows = tables["b"].at[IDS].add(1)
    return {"a": rows, "b": rows.at[IDS].set(NEW)}


def test_tables_that_change_places_keep_theirs():
    """Each becomes rows of the other: a refused scatter leaves the wrong one."""
    tables = {"a": odd_table(0), "b": odd_table(1)}
    changes = (swapped, handed_on)

    @jax.jit
    def run(accepted, tables):
        return [(update_if(accepted, f, tables), f(tables)) for f in changes]

    for accepted in (False, True):
        for found, changed in run(accepted, tables):
            expected = changed if accepted else tables
            for name, table in found.items():
                np.testing.assert_array_equal(bits(table), bits(expected[name]))


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
