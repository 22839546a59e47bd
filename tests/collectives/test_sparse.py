"""Rows of a large array: how they join over towers, apply, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import with_verbs as mirrored

import towerjax as tj

R = tj.Reduction
SHAPE = (6, 2)


def of_tower(t, rows=3):
    """Tower ``t``'s rows: an index twice, others shared with its neighbours."""
    rng = np.random.default_rng(t)
    indices = np.array([t % 6, (t + 1) % 6, t % 6, 5, 0])[:rows]
    return tj.sparse.IndexedRows(
        rng.normal(size=(rows, 2)).astype(np.float32), indices, SHAPE
    )


def dense(rows):
    out = np.zeros(rows.dense_shape)
    for value, index in zip(rows.values, rows.indices, strict=True):
        out[index] += value
    return out


def assert_joined(out, towers, reduction):
    """The towers' rows end to end, kept apart, divided for a mean."""
    share = 1 / len(towers) if reduction is R.MEAN else 1
    if reduction is R.ONLY_FIRST_TOWER:
        towers = towers[:1]
    assert isinstance(out, tj.sparse.IndexedRows) and out.dense_shape == SHAPE
    assert isinstance(out.values, jax.Array)  # and no array of the caller's own
    assert out.indices.tolist() == np.concatenate([x.indices for x in towers]).tolist()
    values = np.concatenate([np.float64(x.values) for x in towers]) * share
    np.testing.assert_allclose(out.values, values, rtol=1e-6)
    total = sum(dense(x) for x in towers) * share
    np.testing.assert_allclose(dense(jax.device_get(out)), total, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "T, D, reduction", [(1, 1, R.SUM), (4, 2, R.MEAN), (3, 3, R.ONLY_FIRST_TOWER)]
)
def test_rows_side_by_side_join_in_tower_order(T, D, reduction):
    towers = [of_tower(t) for t in range(T)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *towers)
    out = mirrored(T, D).reduce(
        reduction, {"rows": tj.PerTower(stacked), "n": tj.PerTower(np.arange(T))}
    )
    assert_joined(out["rows"], towers, reduction)
    expected = {R.SUM: sum(range(T)), R.MEAN: (T - 1) / 2, R.ONLY_FIRST_TOWER: 0}
    assert float(out["n"]) == expected[reduction]


@pytest.mark.slow
@pytest.mark.parametrize(
    "T, D, reduction", [(3, 3, R.SUM), (4, 2, R.MEAN), (3, 3, R.ONLY_FIRST_TOWER)]
)
def test_towers_may_have_unequally_many_rows(T, D, reduction):
    towers = [of_tower(t, rows=t + 1) for t in range(T)]
    out = mirrored(T, D).reduce(reduction, tj.PerTower(tuple(towers)))
    assert_joined(out, towers, reduction)


@pytest.mark.slow
def test_a_dense_tower_among_sparse_ones_has_all_rows():
    array = np.arange(12, dtype=np.float32).reshape(SHAPE)
    every = tj.sparse.IndexedRows(array, np.arange(6), SHAPE)
    towers = [of_tower(0), every, of_tower(2, rows=1)]
    mixed = tj.PerTower((towers[0], array, towers[2]))
    assert_joined(mirrored(3).reduce(R.SUM, mixed), towers, R.SUM)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("T, D, executor", [(3, 3, "shard_map"), (4, 2, "pmap")])
def test_inside_a_tower_rows_join_too(T, D, executor):
    strategy = mirrored(T, D, executor=executor)
    towers = [of_tower(t) for t in range(T)]
    values, indices = (np.stack([getattr(x, n) for x in towers]) for n in
                       ("values", "indices"))  # fmt: skip
    reductions = (R.SUM, R.MEAN, R.ONLY_FIRST_TOWER)

    def tower_fn(tower, values, indices):
        rows = tj.sparse.IndexedRows(values, indices, SHAPE)
        tree = {"rows": rows, "one": jnp.float32(1)}
        once = [tower.reduce(r, tree) for r in reductions]
        merged = [
            tower.merge_call(lambda s, x, r=r: s.reduce(r, x), rows) for r in reductions
        ]
        return once, merged, rows

    all_once, all_merged, rows = strategy.call_for_each_tower(
        tower_fn, tj.PerTower(values), tj.PerTower(indices)
    )
    for reduction, once, merged in zip(reductions, all_once, all_merged, strict=True):
        assert float(once["one"]) == (T if reduction is R.SUM else 1)
        assert_joined(once["rows"], towers, reduction)  # bare: the same on all
        assert_joined(merged, towers, reduction)
    if T > 1:  # what comes back with PerTower leaves is rows of each tower
        assert isinstance(rows.values, tj.PerTower)
        assert_joined(strategy.reduce(R.SUM, rows), towers, R.SUM)


def wide(t, size=6):
    """Tower ``t``'s rows of an array ``[size, 2]``, as it is and in full."""
    rows = of_tower(t)
    rows = tj.sparse.IndexedRows(rows.values, rows.indices.astype(np.int8), (size, 2))
    full = np.zeros((size, 2))
    np.add.at(full, rows.indices, np.float64(rows.values))
    return rows, full


@pytest.mark.slow
@pytest.mark.parametrize("T, D", [(3, 3), (4, 2)])
def test_rows_gathered_in_a_tower_are_rows_of_the_joined_array(T, D):
    towers, full = zip(*map(wide, range(T)), strict=True)
    strategy = mirrored(T, D)

    def tower_fn(tower, rows):
        return tower.all_gather({"rows": rows}, axis=0)["rows"]

    stacked = tj.PerTower(jax.tree.map(lambda *x: np.stack(x), *towers))
    out = strategy.call_for_each_tower(tower_fn, stacked)
    assert out.dense_shape == (6 * T, 2)
    found = dense(jax.device_get(out))
    np.testing.assert_allclose(found, np.concatenate(full), rtol=1e-6)


def test_a_gathered_index_that_names_no_row_is_not_the_next_towers():
    def tower_fn(tower, index):
        rows = tj.sparse.IndexedRows(jnp.ones((1, 2)), index, (6, 2))
        return tower.all_gather(rows, axis=0).to_dense()

    for bad in (-1, 6):
        indices = tj.PerTower(np.array([[0], [bad], [2]]))
        out = mirrored(3).call_for_each_tower(tower_fn, indices)
        assert np.isnan(out).all()


@pytest.mark.slow
def test_indices_that_all_towers_share_come_back_once_and_count_for_each():
    strategy = mirrored(2)

    def tower_fn(tower):
        values = jnp.full((1, 2), 1.0 + tower.id)
        return tj.sparse.IndexedRows(values, jnp.array([4]), SHAPE)

    rows = strategy.call_for_each_tower(tower_fn)
    assert isinstance(rows.indices, jax.Array) and rows.indices.shape == (1,)
    out = strategy.reduce(R.SUM, rows)
    assert (out.values.tolist(), out.indices.tolist()) == ([[1, 1], [2, 2]], [4, 4])


@pytest.mark.slow
def test_rows_that_all_towers_share_are_their_own_mean():
    rows = of_tower(0)
    strategy = mirrored(2)
    np.testing.assert_array_equal(strategy.reduce(R.MEAN, rows).values, rows.values)


@pytest.mark.slow
def test_a_mean_of_whole_numbers_is_float32():
    rows = tj.sparse.IndexedRows(np.array([[1, 2]]), np.array([3]), SHAPE)
    out = mirrored(2).reduce(R.MEAN, tj.PerTower((rows, rows)))
    assert out.values.dtype == np.float32
    assert out.values.tolist() == [[0.5, 1], [0.5, 1]]


@pytest.mark.slow
def test_gradients_pass_through_a_reduction_of_rows():
    """The loss of each tower is t times the square of the joined rows' sum."""
    T = 4
    D = 2
    values = np.arange(T * 2, dtype=np.float32).reshape(T, 1, 2) + 1

    def tower_fn(tower, x):
        def loss(x):
            rows = tj.sparse.IndexedRows(x, jnp.full(1, 3), SHAPE)
            total = tower.reduce(R.SUM, rows).to_dense()
            return (tower.id + 1.0) * (total**2).sum()

        return jax.grad(loss)(x)

    out = mirrored(T, D).call_for_each_tower(tower_fn, tj.PerTower(values))
    # d sum_t (t + 1) s^2 / d x = 2 s sum_t (t + 1), on each tower.
    expected = 2 * values.sum(0) * sum(range(1, T + 1))
    for x in mirrored(T, D).unwrap(out) if isinstance(out, tj.PerTower) else [out]:
        np.testing.assert_allclose(x, expected, rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.slow
def test_rows_of_a_batch_go_to_the_towers_of_their_examples():
    predict = tj.build_predict_step(
        lambda params, batch, tower: batch["rows"].to_dense() + params * batch["x"],
        mirrored(4, 2),
        max_programs=2,
    )
    x = np.arange(14, dtype=np.float32).reshape(7, 2)
    # Two examples a tower, and the last has one; then a tower with 5 rows.
    for indices in ([6, 0, 3, 3, 1, 6], [2, 3, 3, 2, 3, 6, 0]):
        values = np.random.default_rng(0).normal(size=(len(indices), 2)).astype("f")
        rows = tj.sparse.IndexedRows(values, np.array(indices), (7, 2))
        out = predict(np.float32(10), {"rows": rows, "x": x})
        expected = 10.0 * x
        for value, index in zip(values, indices, strict=True):
            expected[index] += value
        np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_traced_index_that_names_no_row_spoils_all_of_the_result():
    filled = {np.float32: np.nan, np.int32: -(2**31), np.uint8: 255}

    @jax.jit
    def apply(i):
        rows = [tj.sparse.IndexedRows(jnp.ones((2, 2), d), i, SHAPE) for d in filled]
        return [x.to_dense() for x in rows]

    for bad in (-1, 6, 100):
        for out, (dtype, value) in zip(
            apply(np.array([1, bad])), filled.items(), strict=True
        ):
            np.testing.assert_array_equal(out, np.full(SHAPE, value, dtype))
    assert [float(np.sum(out)) for out in apply(np.array([1, 5]))] == [4, 4, 4]


@pytest.mark.slow
def test_trees_of_anything_can_be_made():
    rows = of_tower(0)
    leaves, treedef = jax.tree.flatten(rows)
    assert len(leaves) == 2
    for other in (object(), None, "name", jax.ShapeDtypeStruct((), "float32")):
        jax.tree.unflatten(treedef, [other, object()])
    assert jax.tree.unflatten(treedef, leaves).dense_shape == SHAPE
    shapes = jax.eval_shape(lambda x: x, rows)
    assert shapes.values.shape == (3, 2)
    stacked = jax.vmap(lambda x: x)(jax.tree.map(lambda x: np.stack([x, x]), rows))
    assert stacked.indices.shape == (2, 3)
    assert jax.jit(lambda x: x)(rows).dense_shape == SHAPE
    _, pullback = jax.vjp(lambda x: x.to_dense(), rows)
    (cotangent,) = pullback(jnp.ones(SHAPE))
    np.testing.assert_array_equal(cotangent.values, np.ones((3, 2)))


def test_rows_go_where_they_are_sent():
    value = tj.PerTower((of_tower(0), of_tower(1)))
    out = mirrored(2).reduce(R.SUM, value, destinations="cpu:3")
    assert out.values.devices() == out.indices.devices() == {jax.devices()[3]}
    batch = mirrored(2).batch_reduce(R.SUM, [(value, None), (value, "cpu:2")])
    assert batch[1].values.devices() == {jax.devices()[2]}
    first, moved = map(dense, jax.device_get((batch[0], out)))
    np.testing.assert_array_equal(first, moved)


@pytest.mark.slow
@pytest.mark.parametrize("reduction, divisor", [(R.SUM, 1), (R.MEAN, 2)])
def test_rows_of_several_numbers_that_were_regrouped_reduce(reduction, divisor):
    rows = [([[1, 2]], [1]), ([[3, 4], [5, 6]], [1, 3])]
    nests = [tj.sparse.IndexedRows(np.float32(v), np.array(i), (5, 2)) for v, i in rows]
    strategy = mirrored(2, 1)
    given = strategy.regroup(nests)
    tj.testing.assert_same(strategy.unwrap(given), nests)
    (out,) = strategy.batch_reduce(reduction, [(given, None)])
    assert out.indices.tolist() == [1, 1, 3]
    expected = np.array([[0, 0], [4, 6], [0, 0], [5, 6], [0, 0]]) / divisor
    np.testing.assert_array_equal(out.to_dense(), expected)
