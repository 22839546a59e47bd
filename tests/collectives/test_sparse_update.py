"""Updating rows is updating the table, or, lazily, its rows that were looked up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

pytestmark = pytest.mark.slow
N = 7
D = 3
SHAPES = {"a": (N, D), "b": (3,), "c": (5, 2)}
# Of each step: the rows of `a` and of `c`: both ends, some twice, none at all.
STEPS = [([0, N - 1, 0, 0, 3], [4, 4]), ([3, 3, 3, 1, 0], [0, 1]), ([], [])]
STEPS += [([N - 1, 2, 1, 2, 5], [2, 0])]
ALL_STEPS = range(len(STEPS))


def arrays(seed, dtype=np.float32, names="ab"):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=SHAPES[name]).astype(dtype) for name in names}


def gradients(step, dtype=np.float32, names="ab", seed=0):
    """Rows for `a` and `c`, an array for `b`."""
    grads = arrays(10 + step + seed, dtype, names)
    rng = np.random.default_rng(20 + step + seed)
    for name, indices in zip("ac", STEPS[step], strict=True):
        if name in names:
            values = rng.normal(size=(len(indices), *SHAPES[name][1:])).astype(dtype)
            indices = np.array(indices, np.int32)
            grads[name] = tj.sparse.IndexedRows(values, indices, SHAPES[name])
    return grads


def is_rows(x):
    return isinstance(x, tj.sparse.IndexedRows)


def dense(tree):
    return jax.tree.map(
        lambda x: x.to_dense() if is_rows(x) else x, tree, is_leaf=is_rows
    )


def trained(optimizer, steps, params, grads=gradients, lazy=False, **extra_args):
    """``(params, state)`` by rows, and densely; by one program, sooner compiled."""
    optimizer = optax.with_extra_args_support(optimizer)
    by_rows = functools.partial(tj.sparse.update_with_rows, optimizer, lazy=lazy)

    @jax.jit
    def step(grads, *states):
        after = []
        for update, own, (params, state) in zip(
            (by_rows, optimizer.update), (grads, dense(grads)), states, strict=True
        ):
            updates, state = update(own, state, params, **extra_args)
            after.append((optax.apply_updates(params, updates), state))
        return after

    states = [(params, jax.jit(optimizer.init)(params))] * 2
    for i in steps:
        states = step(grads(i), *states)
    return jax.device_get(states)


def assert_same(actual, expected, rtol=1e-5):
    def close(x, y):
        bound = 2e-2 if x.dtype == jnp.bfloat16 else rtol  # its 8 bits
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=bound, atol=1e-6)

    jax.tree.map(close, actual, expected)


def doubled(updates, state, params=None, *, value, **extra_args):
    """Reads an argument of ``update`` that others do not know."""
    return jax.tree.map(lambda g: g * value, updates), state


def are_vectors(tree):
    return jax.tree.map(lambda x: x.ndim == 1, tree)


KINDS = {
    "centred rows": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "clip, adagrad": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)),
    "inject": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.0, 0.1, 2)),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), are_vectors), optax.sgd(0.1)
    ),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "extra": optax.chain(
        optax.sgd(0.1), optax.GradientTransformationExtraArgs(lambda _: (), doubled)
    ),
    "bfloat16": optax.adagrad(0.1),
    "frozen": optax.set_to_zero(),
    "moments": optax.adamw(0.1),
}


@pytest.mark.parametrize("lazy", [True, False])
def test_rows_are_updated_as_the_table_is(lazy):
    """A table and an array of each kind, all in one program; lazily without moments."""
    names = {"frozen": "a"}
    dtypes = {"bfloat16": jnp.bfloat16}
    names["moments"] = "b" if lazy else "ab"
    kinds = [
        (kind, dtypes.get(kind, np.float32), names.get(kind, "ab"), 50 * i)
        for i, kind in enumerate(KINDS)
    ]
    params = {kind: arrays(seed, *rest) for kind, *rest, seed in kinds}

    def grads(step):
        return {kind: gradients(step, *rest) for kind, *rest in kinds}

    optimizer = optax.partition(KINDS, {kind: kind for kind in KINDS})
    assert_same(*trained(optimizer, ALL_STEPS, params, grads, lazy, value=2.0))


def test_without_rows_it_is_the_optimizers_update():
    optimizer = optax.adamw(0.1)
    grads = arrays(10)
    params = arrays(0)
    state = optimizer.init(params)
    of_rows = functools.partial(tj.sparse.update_with_rows, optimizer)
    texts = [
        str(jax.make_jaxpr(lambda *x, f=f: f(*x))(grads, state, params))
        for f in (of_rows, optimizer.update)
    ]
    assert texts[0] == texts[1]


def test_lazy_adam_by_hand():
    """NumPy float64: moments move with their rows, the count with each step."""
    t = np.float64(arrays(0)["a"])
    mu = np.zeros((N, D))
    nu = np.zeros((N, D))
    for step in range(len(STEPS)):
        rows = gradients(step)["a"]
        indices = np.asarray(rows.indices)
        for row in np.unique(indices):
            grad = np.float64(rows.values)[indices == row].sum(0)
            mu[row] = 0.9 * mu[row] + 0.1 * grad
            nu[row] = 0.99 * nu[row] + 0.01 * grad**2
            corrected = mu[row] / (1 - 0.9 ** (step + 1))
            scale = np.sqrt(nu[row] / (1 - 0.99 ** (step + 1))) + 1e-8
            t[row] -= 0.05 * (corrected / scale + 0.1 * t[row])
    optimizer = optax.adamw(0.05, b2=0.99, weight_decay=0.1)
    (params, state), (expected, _) = trained(optimizer, ALL_STEPS, arrays(0), lazy=True)
    np.testing.assert_allclose(params["a"], t, rtol=2e-5)
    np.testing.assert_allclose(state[0].mu["a"], mu, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state[0].nu["a"], nu, rtol=1e-5, atol=1e-7)
    assert state[0].count == len(STEPS)
    # The dense leaf is updated as ever.
    np.testing.assert_allclose(params["b"], expected["b"], rtol=1e-5)


def test_a_traced_index_that_names_no_row_cannot_go_unseen():
    params = arrays(0)
    optimizer = optax.adagrad(0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(indices):
        rows = tj.sparse.IndexedRows(jnp.ones((2, D)), indices, (N, D))
        updates, _ = tj.sparse.update_with_rows(
            optimizer, gradients(0) | {"a": rows}, state, params, lazy=True
        )
        return optax.apply_updates(params, updates)["a"]

    for bad in (-1, N):
        assert np.isnan(step(np.array([2, bad]))[2]).all()
    assert not np.isnan(step(np.array([2, N - 1]))).any()


def test_a_narrow_state_takes_rows_of_float32_without_a_warning():
    params = {"t": jnp.ones((N, 1), jnp.bfloat16)}
    optimizer = optax.trace(0.5)
    rows = tj.sparse.IndexedRows(np.ones((2, 1), np.float32), np.array([2, 4]), (N, 1))

    def update():
        state = optimizer.init(params)
        return tj.sparse.update_with_rows(
            optimizer, {"t": rows}, state, params, lazy=True
        )

    _, state = jax.eval_shape(update)
    assert state.trace["t"].dtype == jnp.bfloat16


def test_a_row_that_is_given_twice_is_its_sum():
    """Also to an optimizer of norms: no row that is none stands beside the others."""
    optimizer = optax.lamb(0.1, weight_decay=0.1)
    params = {"t": jnp.ones((N, 1))}
    values = np.array([[1.0], [2.0], [4.0]], np.float32)
    state = optimizer.init(params)
    updates = []
    for rows, indices in [(values, [3, 1, 3]), (values[1:] + [[0], [1]], [1, 3])]:
        rows = tj.sparse.IndexedRows(np.float32(rows), np.array(indices), (N, 1))
        given = optimizer, {"t": rows}, state, params
        update, _ = tj.sparse.update_with_rows(*given, lazy=True)
        updates.append(jax.device_get(optax.apply_updates(params, update)["t"]))
    assert (updates[1] != 1).sum() == 2
    np.testing.assert_allclose(*updates, rtol=1e-6)


def test_an_array_plus_rows_keeps_its_dtype():
    bf16 = np.full((N, D), 256, jnp.bfloat16)
    ones = np.ones((4, D), np.float32)
    rows = tj.sparse.IndexedRows(ones, np.array([1, 1, 1, 2]), (N, D))
    ints = tj.sparse.IndexedRows(np.ones((2, D), int), np.array([1, 1]), (N, D))
    out, whole = jax.jit(lambda: (bf16 + rows, np.zeros((N, D), int) + ints))()
    # 256 + 3 rounds to 260, 256 + 1 to 256; one by one all to 256.
    assert out.dtype == jnp.bfloat16
    assert np.asarray(out)[:, 0].tolist()[:3] == [256, 260, 256]
    assert np.asarray(whole)[:, 0].tolist() == [0, 2, 0, 0, 0, 0, 0]


# What is compiled.
