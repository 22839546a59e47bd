"""A lookup by `tj.sparse.take` has the dense gradient, as rows; all else is refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import towerjax as tj
from towerjax.collectives.sparse_rows import all_rows_of, map_values, sum_duplicates
from towerjax.step.passes.looked_up import TracedLoss

N = 5
D = 3
IDS = np.array([[0, 1, 4], [4, 2, -1]])
WILD = np.array([-1, -5, -6, 7, 2])
TOWER = tj.estimator.TowerOptimizer


def table(dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=(N, D)).astype(dtype)


def scalar(x):
    """A function of all elements, each with a gradient of its own."""
    x = jnp.nan_to_num(x).astype(jnp.float32)
    return (jnp.sin(x) * jnp.arange(1, x.size + 1).reshape(x.shape)).sum()


def embedded(t, take):
    """A variable of nnx, in a module that is put together in the loss."""
    graph, params = nnx.split(nnx.Embed(N, D, rngs=nnx.Rngs(0)), nnx.Param)
    leaves = [t] * len(jax.tree.leaves(params))
    model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(params), leaves))
    return take(model.embedding, IDS)


def used_in_a_scan(t, take):
    first = jnp.ones(IDS.shape[1:] + (D,))
    return lax.scan(lambda c, x: (c + x, c * x), first, take(t, IDS))[1]


LOOKUPS = {
    "ids": (lambda t, take: take(t, IDS), 6),
    "one id": (lambda t, take: take(t, 3), 1),
    "small ids": (lambda t, take: take(t, IDS.astype(np.int8)), 6),
    "twice": (lambda t, take: take(t, IDS[0]) * take(t, IDS[1]), 6),
    "ids of rows": (lambda t, take: take(t, (take(t, IDS)[..., 0] > 0).astype(int)), 6),
    "beyond": (lambda t, take: take(t, WILD), 5),
    "cast after": (lambda t, take: take(t, IDS).astype(jnp.bfloat16), 6),
    "used in a scan": (used_in_a_scan, 6),
    "under vmap": (lambda t, take: jax.vmap(lambda i: take(t, i))(IDS), 6),
    "under a derivative": (
        lambda t, take: jax.grad(lambda t: (take(t, 1) ** 2).sum())(t)[1], 1),
    "of a constant too": (
        lambda t, take: take(lax.stop_gradient(t), IDS) * take(t, IDS[:1, :1]), 1),
    "no ids": (lambda t, take: take(t, np.zeros(0, int)), 0),
    "no gradient": (lambda t, take: lax.stop_gradient(take(t, IDS)), 0),
    "variable": (embedded, 6),
}  # fmt: skip


def as_rows(loss):
    """``(value, gradient)`` of ``loss(params)`` by the rows."""

    def run(params):
        traced = TracedLoss.of(loss, params)
        value, pull_back, _ = traced.vjp(params, lambda value, _: value)
        return value, pull_back(jnp.ones(()))

    return run


@pytest.fixture(scope="module")
def of_lookups():
    """Of each: ``(value, grads)`` by rows, and densely; one program of them all."""

    @jax.jit
    def of_all(params):
        found = {}
        for name, (look_up, _) in LOOKUPS.items():

            def loss(params, take=tj.sparse.take, look_up=look_up):
                return scalar(look_up(params["t"], take) * params["s"])

            dense = lambda p, loss=loss: loss(p, lambda t, i: jnp.take(  # noqa: E731
                jnp.asarray(t), i, axis=0))  # fmt: skip
            found[name] = as_rows(loss)(params), jax.value_and_grad(dense)(params)
        return found

    return jax.device_get(of_all({"t": table(), "s": np.float32(0.7)}))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUPS)
def test_each_lookup_has_the_dense_gradient(name, of_lookups):
    (value, grads), (expected_value, expected) = of_lookups[name]
    assert value == pytest.approx(float(expected_value), rel=1e-6)
    np.testing.assert_allclose(grads["s"], expected["s"], rtol=1e-6)
    rows = grads["t"]
    assert isinstance(rows, tj.sparse.IndexedRows) and rows.dense_shape == (N, D)
    assert rows.values.dtype == np.float32 and len(rows.indices) == LOOKUPS[name][1]
    dense = np.zeros((N, D), np.float32)
    np.add.at(dense, rows.indices, rows.values)
    np.testing.assert_allclose(dense, expected["t"], rtol=1e-6)


def test_an_id_of_no_row_counts_at_one_that_was_looked_up():
    """Else a lazy update would move a row that no id names."""
    _, rows = jax.jit(as_rows(lambda t: scalar(tj.sparse.take(t, [9, 3, -7]))))(table())
    assert rows.indices.tolist() == [3, 3, 3]
    assert rows.values.any(axis=1).tolist() == [False, True, False]


@pytest.mark.slow
def test_derivatives_go_through_the_gradient_of_rows():
    """Members by vmap, and the derivative of a step by its parameters."""

    def of_rows(t):
        rows = as_rows(lambda t: (jnp.sin(tj.sparse.take(t, IDS)) ** 2).sum())(t)[1]
        return (rows.to_dense() ** 2).sum()

    def dense(t):
        return (jax.grad(lambda t: (jnp.sin(t[IDS]) ** 2).sum())(t) ** 2).sum()

    stack = np.stack([table(), table(seed=1)])
    for transformed in (jax.grad, lambda f: jax.grad(jax.checkpoint(f))):
        both = [jax.jit(jax.vmap(transformed(f)))(stack) for f in (of_rows, dense)]
        np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5)

    def after_a_step(take):
        def loss_fn(t, ids, tower):
            values = (jnp.sin(take(t, ids)) ** 2).sum(-1)
            return tj.Weighted.mean(values, tower.weight)

        made = tj.build_train_step(loss_fn, optax.sgd(0.5), tj.Mirrored(towers=1))
        state = made.init(table())

        def after(t):
            given = dataclasses.replace(state, params=t)
            return (made.fn(given, IDS[0])[0].params ** 2).sum()

        return jax.jit(jax.grad(after))(table())

    both = [after_a_step(take) for take in (tj.sparse.take, lambda t, ids: t[ids])]
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5)


def test_rows_of_a_bfloat16_table_add_up_in_float32():
    ids = np.array([1] * 300 + [N - 1])
    gradient = as_rows(lambda t: tj.sparse.take(t, ids).sum(dtype=jnp.float32))
    rows, dense = jax.jit(lambda t: (rows := gradient(t)[1], rows.to_dense()))(
        table(jnp.bfloat16)
    )
    assert rows.values.dtype == jnp.bfloat16 and rows.values.shape == (301, D)
    # In bfloat16 1 + 1 + ... ends at 256.
    assert np.asarray(dense)[:, 0].tolist() == [0, 300, 0, 0, 1]


@pytest.mark.slow
def test_elsewhere_it_is_a_lookup_as_any_other():
    t = table()
    np.testing.assert_array_equal(tj.sparse.take(t, IDS), t[IDS])
    np.testing.assert_array_equal(jax.jit(tj.sparse.take)(t, IDS), t[IDS])
    found = jax.grad(lambda t: scalar(tj.sparse.take(t, IDS)))(t)
    np.testing.assert_allclose(found, jax.grad(lambda t: scalar(t[IDS]))(t), rtol=1e-6)
    for take in (tj.sparse.take, jax.jit(tj.sparse.take)):
        frozen = as_rows(lambda s, take=take: scalar(take(t, IDS) * s))
        assert float(frozen(np.float32(1))[1]) != 0


def inside(transform):
    return lambda t: transform(lambda i: tj.sparse.take(t, i).sum())(IDS[0]).sum()


def with_own_rule(f):
    fn = jax.custom_vjp(f)
    fn.defvjp(lambda ids: (f(ids), None), lambda *_: (None,))
    return fn


INSIDE = {
    "jit": inside(jax.jit),
    "jit of the table": lambda t: jax.jit(lambda t: tj.sparse.take(t, IDS).sum())(t),
    "remat": inside(jax.checkpoint),
    "scan": inside(lambda f: lambda ids: lax.map(f, ids)),
    "cond": inside(lambda f: lambda ids: lax.cond(True, f, lambda _: 0.0, ids)),
    "own rule": inside(with_own_rule),
}
if getattr(jax.config, "jax_custom_vjp3", False):  # JAX itself refuses it
    del INSIDE["own rule"]
COMPUTED = {
    "scaled": lambda t: tj.sparse.take(t * 2, IDS).sum(),
    "cast": lambda t: tj.sparse.take(t.astype(jnp.bfloat16), IDS).sum(),
    "one for each": lambda t: jax.vmap(tj.sparse.take)(t, np.ones(N, int)).sum(),
}
BOTH = {
    "tied": lambda t: (tj.sparse.take(t, IDS) @ t.T).sum(),
    "decayed": lambda t: (t**2).sum() + tj.sparse.take(t, IDS).sum(),
    "looked up": lambda t: t[IDS].sum() + tj.sparse.take(t, IDS).sum(),
}
KINDS = {
    "stands inside a jit, scan, cond, while_loop, remat, custom_jvp or custom_": INSIDE,
    "got a table that is computed from the parameters, so that all its rows": COMPUTED,
    "params['t']: the loss looks up rows by tj.sparse.take, and also": BOTH,
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("text", KINDS)
def test_what_would_need_all_rows_is_refused(text):
    step = [tj.OneDevice(), tj.Mirrored(towers=2)]
    for name, loss in KINDS[text].items():

        def loss_fn(p, batch, tower, loss=loss):
            return tj.Weighted.mean(tower.weight * loss(p["t"]), tower.weight)

        with pytest.raises(ValueError, match=re.escape(text)):
            as_rows(lambda p, loss=loss: loss(p["t"]))({"t": table()})
        if name in ("jit of the table", "scan", "cond", "cast", "tied"):
            made = tj.build_train_step(loss_fn, optax.sgd(0.1), step[name != "scan"])
            with pytest.raises(ValueError, match=re.escape(text)):
                made.check({"t": table()}, {"x": np.ones(4)})


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_a_lookup_under_vmap_has_rows_in_a_train_step(dim):
    ids = np.arange(16).reshape(4, 4).T % (N - 1)
    scale = np.arange(1, 1 + D, dtype=np.float32)

    def loss_fn(take):
        def loss(p, batch, tower):
            each = jax.vmap(lambda i: jnp.sin(take(p["t"], i) * scale[None]).sum(), dim)
            return tj.Weighted.mean(each(batch["i"]) * batch["y"], tower.weight)

        return loss

    batch = {"i": ids, "y": np.arange(1, 5, dtype=np.float32)}
    found = []
    for take in (tj.sparse.take, lambda t, i: t[i]):
        how = optax.sgd(1.0), tj.Mirrored(towers=1)
        step = tj.build_train_step(loss_fn(take), *how, audit=False)
        found.append(step(step.init({"t": table()}), batch)[0].params["t"])
    assert np.abs(found[0] - table()).max() > 0.1
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)


def test_ids_that_are_none_are_refused():
    for bad in (lambda: tj.sparse.take(table(), np.ones(2)),
                lambda: tj.sparse.take(np.float32(1), 0)):  # fmt: skip
        with pytest.raises(ValueError, match="Give integers, and a table"):
            bad()


def batch_of(size, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "ids": rng.integers(0, N - 1, (size, 2)),  # the last row is in no batch
        "y": rng.normal(size=size).astype(np.float32),
        "m": rng.uniform(0.05, 1, size).astype(np.float32),
    }


def params():
    w = np.random.default_rng(3).normal(size=D).astype(np.float32)
    return {"t": table(seed=2), "w": w}


def loss_fn(p, batch, tower):
    rows = tj.sparse.take(p["t"], batch["ids"]).mean(axis=1)
    losses = (rows @ p["w"] - batch["y"]) ** 2
    return tj.Weighted.mean(losses, tower.weight * batch["m"])


def gradients(p, batch):
    """By hand, in float64."""
    t, w = (np.float64(p[name]) for name in "tw")
    ids = batch["ids"]
    y = np.float64(batch["y"])
    m = np.float64(batch["m"])
    rows = t[ids].mean(axis=1)
    slope = 2 * m * (rows @ w - y) / m.sum()
    of_table = np.zeros_like(t)
    np.add.at(of_table, ids, slope[:, None, None] * w / 2)
    return {"t": of_table, "w": slope @ rows}


RATE = 0.25
DECAY = 0.5


def trained(p, batches, lazy):
    """SGD with momentum and weight decay; of a lazy table, of the rows looked up."""
    p = {name: np.float64(x) for name, x in p.items()}
    momentum = {name: np.zeros_like(x) for name, x in p.items()}
    for batch in batches:
        grads = gradients(p, batch)
        for name, grad in grads.items():
            seen = np.unique(batch["ids"]) if lazy and name == "t" else slice(None)
            step = grad[seen] + 0.1 * p[name][seen] + DECAY * momentum[name][seen]
            momentum[name][seen] = step
            p[name][seen] -= RATE * step
    return p


OPTIMIZER = optax.chain(
    optax.add_decayed_weights(0.1), optax.sgd(np.float32(RATE), momentum=DECAY)
)
GRID = {
    "lazy": (4, 2, {}, 2, True),
    "pinned": (
        4,
        2,
        {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()},
        2,
        False,
    ),
    "lazy parts": (2, 2, {"state": "sharded"}, 1, True),
    "parts": (2, 2, {"state": "sharded"}, 1, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_towers_train_a_table_as_one_does(name):
    """Unequal weights and padding; batches of 11 and 7 rows."""
    T, D_, how, parts, lazy = GRID[name]
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(D_)], towers=T, **how)
    optimizer = TOWER(OPTIMIZER, lazy=True) if lazy else OPTIMIZER
    step = tj.build_train_step(
        loss_fn, optimizer, strategy, micro_batches=parts, remainder="pad"
    )
    batches = [batch_of(11), batch_of(7, seed=1)]
    state = step.init(params())
    for batch in batches:
        state, _ = step(state, batch)
    expected = trained(params(), batches, lazy)
    for name, x in expected.items():
        np.testing.assert_allclose(state.params[name], x, rtol=2e-5, atol=2e-6)
    moved = expected["t"][N - 1] != params()["t"][N - 1]
    assert moved.all() != lazy


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [True, False])
def test_no_gradient_of_the_tables_size_is_sent(lazy):
    """And none is made, nor the table copied, where the update is lazy."""
    large = {**params(), "t": np.ones((10_000, D), np.float32)}
    strategy = tj.Mirrored(["cpu:0", "cpu:1"], towers=2)
    optimizer = TOWER(optax.sgd(0.1, momentum=0.5), lazy=lazy)
    step = tj.build_train_step(loss_fn, optimizer, strategy)
    text = step.program(step.init(large), batch_of(8)).call.as_text()
    of_all = r"^.*(?:all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(.*$"
    sent = re.findall(of_all, text, re.MULTILINE)
    assert sent and not [line for line in sent if "10000" in line]
    made = rf"f32\[10000,{D}\]\S* (copy|select|add|multiply|broadcast)\("
    assert (re.search(made, text) is None) == lazy


# What rows are added and multiplied by.


@pytest.mark.slow
def test_rows_by_index():
    rng = np.random.default_rng(0)
    for rows, num_rows in [(0, 4), (6, 4), (6, 50)]:
        values = rng.normal(size=(rows, 2)).astype(np.float32)
        indices = rng.integers(0, num_rows, rows)
        summed, unique = jax.device_get(
            jax.jit(sum_duplicates, static_argnums=2)(values, indices, num_rows)
        )
        assert len(unique) == min(rows, num_rows)
        assert (np.diff(unique) > 0).all()
        exist = unique < num_rows
        assert unique[exist].tolist() == np.unique(indices).tolist()
        expected = [np.float64(values)[indices == i].sum(0) for i in np.unique(indices)]
        np.testing.assert_allclose(
            summed[exist], np.reshape(expected, (-1, 2)), rtol=1e-5, atol=1e-6
        )
        assert not summed[~exist].any()


@pytest.mark.slow
def test_a_map_of_values_leaves_indices_alone():
    values = np.random.default_rng(0).normal(size=(5, D)).astype(np.float32)
    rows = tj.sparse.IndexedRows(values, np.int32([0, N - 1, 0, 0, 3]), (N, D))
    tree = {"b": np.ones(2), "t": rows}
    out = map_values(lambda x, y: x * y, tree, {"b": 2, "t": 3})
    assert out["b"].tolist() == [2, 2]
    np.testing.assert_array_equal(out["t"].values, tree["t"].values * 3)
    np.testing.assert_array_equal(out["t"].indices, tree["t"].indices)
    dtypes = map_values(lambda x: x.dtype, tree)
    assert map_values(lambda x, y: x.astype(y), tree, dtypes)["t"].dense_shape == (N, D)
    product = map_values(lambda x, y: x * y, tree, tree)["t"]
    np.testing.assert_array_equal(product.values, tree["t"].values ** 2)
    assert all_rows_of(jnp.ones((2, 1))).indices.tolist() == [0, 1]
