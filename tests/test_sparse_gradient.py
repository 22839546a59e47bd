"""The gradient of tables in rows is the dense gradient, however rows are looked up."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import towerjax as tj
from towerjax.proof.equation import user_line

N, D = 5, 3
IDS = np.array([[0, 1, -1], [4, 2, 4]])
WILD = np.array([[0, 7, -9], [4, -1, 4]])  # beyond both ends
R = tj.Reduction


def table(seed=0, shape=(N, D), dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def scalar(x):
    """One number that tells all of an array's numbers apart."""
    x = jnp.nan_to_num(x.astype(jnp.float32))
    factors = 1 + jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape)
    return (jnp.sin(x) * factors).sum()


def rows_last(t):
    """A gather whose output has the numbers of a row before the ids."""
    numbers = lax.GatherDimensionNumbers((0,), (0,), (0,))
    return lax.gather(t, IDS.reshape(-1, 1) % N, numbers, (1, D))


LOOKUPS = {
    "rows last": (rows_last, [0, 1, 4, 4, 2, 4]),
    "ids": (lambda t: t[IDS], [0, 1, 4, 4, 2, 4]),
    "ids out of range": (lambda t: t[WILD], [0, 0, 0, 4, 4, 4]),
    "ids and all columns": (lambda t: t[IDS[1], :], [4, 2, 4]),
    "one id": (lambda t: t[jnp.asarray(IDS)[1, 1]], [2]),
    "one id out of range": (lambda t: t[jnp.asarray(WILD)[0, 1]], [4]),
    "a known id": (lambda t: t[-1], [4]),
    "a slice": (lambda t: t[1:3], [1, 2]),
    "a stride": (lambda t: t[::2], [0, 2, 4]),
    "a dynamic slice": (lambda t: lax.dynamic_slice_in_dim(t, IDS[1, 0], 2), [3, 4]),
    "small ids": (lambda t: t[jnp.asarray(IDS, jnp.int8)], [0, 1, 4, 4, 2, 4]),
    "unsigned ids": (lambda t: t[jnp.asarray(IDS[1], jnp.uint8)], [4, 2, 4]),
    "take": (lambda t: jnp.take(t, WILD, axis=0), [0, 0, 0, 4, 4, 4]),
    "fill": (
        lambda t: jnp.take(t, WILD, axis=0, mode="fill", fill_value=7),
        [0, 0, 0, 4, 4, 4],
    ),
    "clip": (lambda t: jnp.take(t, WILD, axis=0, mode="clip"), [0, 4, 0, 4, 0, 4]),
    "wrap": (lambda t: jnp.take(t, WILD, axis=0, mode="wrap"), [0, 2, 1, 4, 4, 4]),
    "at": (lambda t: t.at[WILD].get(mode="drop", fill_value=0), [0, 0, 0, 4, 4, 4]),
    "vmap": (lambda t: jax.vmap(lambda i: t[i])(IDS[1]), [4, 2, 4]),
    "vmap, rows last": (
        lambda t: jax.vmap(lambda i: t[i], out_axes=1)(IDS),
        [0, 1, 4, 4, 2, 4],
    ),
    "vmap of slices": (
        lambda t: jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 2))(WILD[0]),
        [0, 1, 3, 4, 0, 1],
    ),
    "under jit, twice": (
        lambda t: jax.jit(lambda t: (t[IDS], t))(t)[1][IDS[1]],
        [0, 1, 4, 4, 2, 4, 4, 2, 4],
    ),
    "beside a constant": (lambda t: (lax.stop_gradient(t) * t[4:])[IDS[1]], [4]),
    "no ids": (lambda t: t[np.zeros(0, int)], []),
    "no lookup": (lambda t: jnp.ones_like(t[:0]), []),
}


@pytest.fixture(scope="module")
def of_lookups():
    """Of each: ``(value, grads)`` by rows, and densely; one program of them all."""

    @jax.jit
    def of_all(params, factor):
        found = {}
        for name, (lookup, _) in LOOKUPS.items():

            def loss(params, factor, lookup=lookup):
                return scalar(lookup(params["t"]) * params["s"]) * factor

            by_rows = tj.sparse.sparse_value_and_grad(loss, ["t"])
            found[name] = [
                f(params, factor) for f in (by_rows, jax.value_and_grad(loss))
            ]
        return found

    return jax.device_get(of_all({"t": table(), "s": np.float32(0.7)}, np.float32(2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUPS)
def test_each_lookup_has_the_dense_gradient(name, of_lookups):
    (value, grads), (expected_value, expected) = of_lookups[name]
    assert value == pytest.approx(float(expected_value), rel=1e-6)
    np.testing.assert_allclose(grads["s"], expected["s"], rtol=1e-6)
    rows = grads["t"]
    assert isinstance(rows, tj.sparse.IndexedRows) and rows.dense_shape == (N, D)
    if name != "under jit, twice":
        assert rows.indices.tolist() == LOOKUPS[name][1]
    dense = np.zeros((N, D), np.float32)
    np.add.at(dense, rows.indices, rows.values)
    np.testing.assert_allclose(dense, expected["t"], rtol=1e-6)


@st.composite
def programs(draw):
    """A loss of several lookups in several tables of different ranks, in any order."""
    kinds = st.sampled_from([(), (3,), (2, 2)])
    shapes = draw(st.lists(kinds, min_size=1, max_size=3))
    lookups = []
    for _ in range(draw(st.integers(1, 3))):
        which = draw(st.integers(0, len(shapes) - 1))
        ids = np.array(
            draw(st.lists(st.integers(-7, 9), min_size=2, max_size=2)), np.int32
        ).reshape(draw(st.sampled_from([(-1,), (1, -1), (-1, 1)])))
        mode = draw(st.sampled_from(["fill", "clip", "wrap", "index"]))
        jit, reuse = draw(st.booleans()), draw(st.booleans())
        lookups.append((which, ids, mode, jit, reuse))
    tables = {str(i): table(i, (N, *shape)) for i, shape in enumerate(shapes)}

    def loss(params):
        total = params["s"]
        for which, ids, mode, jit, reuse in lookups:
            # ids that depend on what came before
            ids = jnp.asarray(ids) + (total > 0).astype(int) * reuse

            def look(t, ids=ids, mode=mode):
                if mode == "index":
                    return t[ids % N]
                return jnp.take(t, ids, axis=0, mode=mode, fill_value=0.5)

            rows = (jax.jit(look) if jit else look)(params[str(which)])
            total = total + scalar(rows * params["s"]) * 0.1
        return total

    return loss, {**tables, "s": jnp.float32(0.7)}


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(programs())
def test_random_programs_have_the_dense_gradient(program):
    loss, params = program
    names = [name for name in params if name != "s"]
    # One program for both is sooner compiled than each of their equations.
    (value, grads), (expected_value, expected) = jax.jit(
        lambda params: (
            tj.sparse.sparse_value_and_grad(loss, names)(params),
            jax.value_and_grad(loss)(params),
        )
    )(params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(grads["s"], expected["s"], rtol=1e-4, atol=1e-5)
    for name in names:
        dense = grads[name].to_dense()
        np.testing.assert_allclose(dense, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_flax_embeds_are_lookups(dtype):
    close = dict(rtol=1e-6 if dtype is None else 2e-2)
    linen = nn.Embed(N, D, dtype=dtype)
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: nnx.Embed(N, D, dtype=dtype, rngs=nnx.Rngs(0)))
    )
    state = jax.tree.map(lambda x: table(), state)

    @jax.jit
    def both(params, state):
        of_linen = lambda p: scalar(linen.apply(p, IDS))  # noqa: E731
        of_nnx = lambda s: scalar(nnx.merge(graphdef, s)(jnp.asarray(IDS)))  # noqa: E731
        return [
            (
                tj.sparse.sparse_value_and_grad(loss, ["embedding"])(x)[1],
                jax.grad(loss)(x),
            )
            for loss, x in ((of_linen, params), (of_nnx, state))
        ]

    (grads, expected), (of_nnx, dense) = both({"params": {"embedding": table()}}, state)
    rows = grads["params"]["embedding"]
    assert rows.values.dtype == jnp.float32  # the table's, whatever the rows' is
    expected = expected["params"]["embedding"]
    np.testing.assert_allclose(rows.to_dense(), expected, **close)
    rows, expected = (x["embedding"].get_value() for x in (of_nnx, dense))
    np.testing.assert_allclose(rows.to_dense(), expected, **close)


@pytest.mark.slow
def test_rows_of_a_bfloat16_table_are_bfloat16_and_add_up_in_float32():
    t = table(dtype=jnp.bfloat16)
    ids = np.array([1] * 300 + [N - 1])
    gradient = tj.sparse.sparse_value_and_grad(
        lambda t: t[ids].sum(dtype=jnp.float32), ""
    )
    rows, dense = jax.jit(lambda t: (rows := gradient(t)[1], rows.to_dense()))(t)
    assert rows.values.dtype == jnp.bfloat16 and rows.values.shape == (301, D)
    # In bfloat16 1 + 1 + ... ends at 256.
    assert np.asarray(dense)[:, 0].tolist() == [0, 300, 0, 0, 1]


@pytest.mark.slow
def test_the_value_is_the_same_to_the_bit():
    t = jnp.array([[-0.0], [2.0]])
    gradient = tj.sparse.sparse_value_and_grad(
        lambda t: (1 / t[np.array([0])]).sum(), ""
    )
    value, rows = jax.jit(gradient)(t)
    assert value == -np.inf and rows.values.tolist() == [[-np.inf]]


@pytest.mark.slow
def test_aux_comes_back_as_it_is():
    def loss(params, batch, *, scale):
        rows = params["t"][batch]
        return (rows * scale).sum(), {
            "rows": rows, "name": "batch", "count": 3, "given": scale,
            "table": params["t"], "none": None,
        }  # fmt: skip

    gradient = tj.sparse.sparse_value_and_grad(loss, ["['t']"], has_aux=True)
    with jax.checking_leaks():
        (value, aux), grads = gradient({"t": table()}, IDS, scale=np.float32(2))
    assert grads["t"].values.tolist() == [[2.0] * D] * 6
    assert aux["name"] == "batch" and aux["count"] == 3 and aux["none"] is None
    assert isinstance(aux["given"], np.float32)
    np.testing.assert_array_equal(aux["rows"], table()[IDS])
    np.testing.assert_array_equal(aux["table"], table())
    with pytest.raises(TypeError, match=r"must return \(scalar, aux\)"):
        tj.sparse.sparse_value_and_grad(lambda t: t[IDS].sum(), "", has_aux=True)(
            table()
        )


# Which leaves.


@pytest.mark.slow
@pytest.mark.parametrize(
    "sparse, selected",
    [
        (["['a']['embedding']"], "a"),
        (["embedding"], "ab"),
        ("embedding", "ab"),
        ({"c"}, "c"),
        (["c", "['b']['embedding']"], "bc"),
        (lambda name: "'a'" in name, "a"),
        (lambda name: name.endswith("['embedding']"), "ab"),
        ((), ""),
    ],
)
def test_leaves_are_selected_by_path_or_name(sparse, selected):
    params = {"a": {"embedding": table(0)}, "b": {"embedding": table(1)}, "c": table(2)}

    def loss(params):
        leaves = jax.tree.leaves(params)
        return sum(scalar(x[IDS]) for x in leaves)

    _, grads = jax.eval_shape(tj.sparse.sparse_value_and_grad(loss, sparse), params)
    for name in "abc":
        (leaf,) = jax.tree.leaves(
            grads[name], is_leaf=lambda x: isinstance(x, tj.sparse.IndexedRows)
        )
        assert isinstance(leaf, tj.sparse.IndexedRows) == (name in selected)


@pytest.mark.parametrize(
    "sparse, text",
    [
        (["words"], "`sparse` names 'words', which is no leaf. The leaves of params are"
         " ['n'], ['t']. Give a path, or its last name."),
        (["t", "x", "y"], "`sparse` names 'x', which is no leaf; `sparse` names 'y'"),
        (lambda name: False, "`sparse` is true of no leaf. The leaves of params are"),
        (["n"], "params['n'] is selected by `sparse`, but is a scalar, which has no"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(sparse, text):
    params = {"t": table(), "n": jnp.float32(1)}
    with pytest.raises(ValueError, match=re.escape(text)):
        tj.sparse.sparse_value_and_grad(lambda p: p["t"][IDS].sum(), sparse)(params)


def test_dtypes_are_those_that_jax_takes():
    loss = lambda p: (p["t"][IDS] * p["n"]).sum()  # noqa: E731
    with pytest.raises(TypeError, match=r"params\['t'\] is selected .* int32;"):
        ints = {"t": np.ones((N, D), int), "n": 1.0}
        jax.eval_shape(tj.sparse.sparse_value_and_grad(loss, "t"), ints)
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        mixed = {"t": table(), "n": np.int32(2)}
        jax.eval_shape(tj.sparse.sparse_value_and_grad(loss, "t"), mixed)
    with pytest.raises(TypeError, match="scalar-output"):
        jax.eval_shape(tj.sparse.sparse_value_and_grad(lambda t: t[IDS], ""), table())


def tied(t):
    return (t[IDS] @ t.T).sum()


def decayed(t):
    return t[IDS].sum() + jax.jit(lambda t: (t**2).sum())(t)


def in_a_scan(t):
    return lax.scan(lambda total, i: (total + t[i].sum(), None), 0.0, IDS[0])[0]


def in_a_branch(t):
    return lax.cond(IDS.sum() > 0, lambda t: t[IDS].sum(), lambda t: 0.0, t)


@jax.custom_vjp
def own_rule(t):
    return t[IDS].sum()


own_rule.defvjp(lambda t: (own_rule(t), t), lambda t, g: (g * t,))

REFUSED = {
    "tied": (tied, "transpose"),
    "decayed": (decayed, "integer_pow"),
    "in_a_scan": (in_a_scan, "scan"),
    "in_a_branch": (in_a_branch, "cond"),
    "remat": (jax.checkpoint(lambda t: t[IDS].sum()), "remat2|checkpoint"),
    "own_rule": (own_rule, "custom_vjp_call"),
    "part of a row": (lambda t: t[IDS, 0].sum(), "gather"),
    "a column": (lambda t: jnp.take(t, IDS[0] % D, axis=1).sum(), "gather"),
    "part of slices": (
        lambda t: jax.vmap(lambda i: lax.dynamic_slice(t, (i, 0), (1, 2)))(
            IDS[0]
        ).sum(),
        "gather",
    ),
    "part of a slice": (lambda t: t[1:, 1:].sum(), "slice"),
    "scaled": (lambda t: (t * 2)[IDS].sum(), "mul"),
    "cast to integers": (lambda t: t.astype(int)[IDS].sum() * 1.0, "convert_elem.*"),
    "as indices": (lambda t: jnp.ones(3)[t.astype(int)[0, 0]] * t[0, 0], "convert.*"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_use_is_refused_with_its_line(name):
    loss, primitive = REFUSED[name]
    with pytest.raises(
        ValueError,
        match=rf"params\['t'\] is selected by `sparse`, but ({primitive}) uses it"
        r" otherwise than by looking up whole rows, at .*test_sparse_gradient.py:\d+"
        r" \(.*\)\. Look up its rows outside of .*, as in table\[ids\]; or leave"
        " it out of `sparse`",
    ):
        tj.sparse.sparse_value_and_grad(lambda p: loss(p["t"]), "t")({"t": table()})


@pytest.mark.slow
def test_an_id_within_the_row_is_refused_where_it_may_name_none():
    """Clipped, it can but be 0; else a row may be left out for it."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0, 1))

    def loss(t, mode):
        ids = np.array([[0, 0], [3, 1]])
        return jnp.nan_to_num(lax.gather(t, ids, numbers, (1, D), mode=mode)).sum()

    gradient = tj.sparse.sparse_value_and_grad(loss, "")
    clipped = lambda t: gradient(t, lax.GatherScatterMode.CLIP)[1]  # noqa: E731
    rows = jax.jit(clipped)(table())
    assert rows.to_dense()[:, 0].tolist() == [1, 0, 0, 1, 0]
    with pytest.raises(ValueError, match="gather uses it otherwise"):
        gradient(table(), lax.GatherScatterMode.FILL_OR_DROP)


def test_equations_keep_their_source_lines():
    def loss(t):
        return jnp.cos(t[IDS]).sum()

    jaxpr = jax.make_jaxpr(tj.sparse.sparse_value_and_grad(loss, ""))(table())
    (cos,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cos"]
    assert re.search(r"test_sparse_gradient.py:\d+ \(loss\)", user_line((cos, None)))


@pytest.mark.slow
def test_nothing_of_the_tables_size_is_made():
    t = jnp.ones((10_000, 8))
    gradient = tj.sparse.sparse_value_and_grad(
        lambda p, ids: (p["t"].astype(jnp.bfloat16)[ids] ** 2).sum(), "t"
    )
    compiled = jax.jit(gradient).lower({"t": t}, IDS).compile()
    large = re.findall(r"\[10000,8\]\S* (?!parameter)[a-z-]+\(", compiled.as_text())
    assert large == []


# In towers.


@pytest.mark.slow
def test_rows_of_all_towers_are_the_dense_gradient():
    """Ids that towers share, ids at both ends, a tower's own factor; NumPy float64."""
    T, strategy = 4, tj.Mirrored(["cpu:0", "cpu:1"], towers=4, executor="pmap")
    rng = np.random.default_rng(T)
    ids = rng.integers(0, N, (T, 4))
    ids[:, 0], ids[-1, 1:] = 0, N - 1
    factors = rng.normal(size=T).astype(np.float32)
    t, s = table(), np.float32(0.3)

    def tower_fn(tower, params, ids, factor):
        def loss(params):
            return (params["t"][ids] * params["s"]).sum() * factor

        gradient = tj.sparse.sparse_value_and_grad(loss, ["t"])
        return tower.reduce(R.SUM, gradient(params))

    out = jax.jit(
        lambda params, ids, factors: strategy.call_for_each_tower(
            tower_fn, params, tj.PerTower(ids), tj.PerTower(factors)
        )
    )({"t": t, "s": s}, ids, factors)
    value, grads = jax.tree.map(
        lambda x: strategy.unwrap(x)[0] if isinstance(x, tj.PerTower) else x,
        out,
        is_leaf=lambda x: isinstance(x, tj.PerTower),
    )
    dense, total = np.zeros((N, D)), 0.0
    for i, factor in zip(ids, np.float64(factors), strict=True):
        total += (np.float64(t)[i] * s).sum() * factor
        np.add.at(dense, i, s * factor)
    assert grads["t"].indices.shape == (4 * T,)
    np.testing.assert_allclose(value, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads["t"].to_dense(), dense, rtol=1e-5, atol=1e-6)
