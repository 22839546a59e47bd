"""Batches with sparse leaves: each tower has its own rows' entries, as dense ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse
from jax.experimental import sparse
from layouts import mirrored

import towerjax as tj

# The proof has no rule for entries; an audit compares the steps here, and says so.
SAMPLED = "not proved equal to one tower. .*sparse leaves.* A sample agreed"
pytestmark = pytest.mark.filterwarnings(f"ignore:{SAMPLED}")
WIDTH = 5
W = np.float32([2, -1, 3, 0.5, 7])


def dense_rows(examples, seed=0):
    """Half of the entries are 0, and so are whole rows: some towers have none."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, WIDTH)) * (rng.random((examples, WIDTH)) < 0.5)
    x[2:5] = 0
    return x.astype(np.float32)


def bcoo(x, **layout):
    """In no order, one entry in two parts, and one that only fills up."""
    if layout:  # each row's entries where they are
        columns = np.broadcast_to(np.arange(WIDTH)[:, None], (*x.shape, 1))
        return sparse.BCOO((x, columns), shape=x.shape)
    indices = np.argwhere(x)[::-1]
    values = x[tuple(indices.T)]
    values = np.concatenate([values, values[:1] / 2, [np.float32(9)]])
    values[0] /= 2
    indices = np.concatenate([indices, indices[:1], [x.shape]])
    return sparse.BCOO((values, indices), shape=x.shape)


def dense(leaf):
    """The leaf as an array, by hand: compiles nothing."""
    out = np.zeros(leaf.dense_shape if hasattr(leaf, "dense_shape") else leaf.shape)
    if isinstance(leaf, tj.sparse.IndexedRows):
        np.add.at(out, leaf.indices, leaf.values)
    elif leaf.n_batch:
        out[:] = leaf.data
    else:
        inside = (np.asarray(leaf.indices) < leaf.shape).all(1)
        at = np.asarray(leaf.indices)[inside]
        np.add.at(out, tuple(at.T), np.asarray(leaf.data)[inside])
    return out


def batch_of(examples, seed=0, **layout):
    x = dense_rows(examples, seed)
    rng = np.random.default_rng(100 + seed)
    y, weight = rng.normal(size=(2, examples)).astype(np.float32)
    return {"x": bcoo(x, **layout), "y": y, "weight": np.abs(weight)}, x


def loss_fn(params, batch, tower):
    errors = (batch["x"] @ params - batch["y"]) ** 2
    return tj.Weighted.mean(errors, tower.weight * batch["weight"])


def next_w(w, x, batch, rate=0.1):
    """One step of gradient descent by hand, in float64."""
    x, y, weight = (np.float64(a) for a in (x, batch["y"], batch["weight"]))
    return w - rate * 2 * (weight * (x @ w - y)) @ x / weight.sum()


def training(strategy, **options):
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)


def predicting(fn, strategy, **options):
    return tj.build_predict_step(lambda w, x, tower: fn(w, x), strategy, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "T, D, options, layout",
    [(4, 2, {"tower_loop": "scan"}, {}), (4, 2, {}, {"n_batch": 1})],
)
def test_predictions_are_those_of_the_dense_rows(T, D, options, layout):
    batch, x = batch_of(7, **layout)

    def both(w, batch):
        return {"y": batch["x"] @ w, "x": batch["x"].todense()}

    out = predicting(both, mirrored(T, D, **options))(W, batch)
    np.testing.assert_allclose(out["y"], np.float64(x) @ W, rtol=1e-6)
    np.testing.assert_array_equal(out["x"], x)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"n_batch": 1}])
@pytest.mark.parametrize("remainder, examples", [("error", 8), ("pad", 7)])
def test_a_sparse_batch_is_audited_as_dense_rows_are(layout, remainder, examples):
    batch, _ = batch_of(examples, **layout)
    step = training(mirrored(4, 2), remainder=remainder)
    with pytest.warns(UserWarning, match=SAMPLED):
        step(step.init(W), batch)
    assert step.is_audited

    def wrong(params, batch, tower):
        return tj.Weighted(loss_fn(params, batch, tower).value, 1.0)

    step = tj.build_train_step(wrong, optax.sgd(0.1), mirrored(4, 2), remainder="pad")
    with pytest.raises(tj.testing.SplitError, match="loss is .* on 2 towers"):
        step(step.init(W), batch)


@pytest.mark.slow
def test_training_is_that_on_the_dense_rows():
    strategy = mirrored(4, 2, tower_loop="scan")
    step = training(strategy, micro_batches=2, remainder="pad")
    state = step.init(W)
    expected = np.float64(W)
    for number, examples in enumerate((9, 5, 9)):
        batch, x = batch_of(examples, seed=number)
        state, metrics = step(state, batch)
        expected = next_w(expected, x, batch)
        np.testing.assert_allclose(state.params, expected, rtol=1e-6, atol=1e-6)


def test_the_example_of_four_rows():
    indices = np.array([[0, 0], [0, 1], [0, 2], [3, 0]])
    x = sparse.BCOO((np.float32([1, 2, 3, 4]), indices), shape=(4, 3))
    predict = predicting(lambda w, x: x @ w, mirrored(2, 1))
    assert predict(np.ones(3, np.float32), x).tolist() == [6, 0, 0, 4]


@pytest.mark.slow
def test_data_is_cut_by_rows():
    """Shuffled, prefetched, an uneven end."""
    data, x = batch_of(23)
    step = training(mirrored(4, 2), remainder="pad")
    source = tj.batches(data, 6, epochs=2, seed=3)
    state, _ = tj.run(step, step.init(W), source, progress=False)
    rows = {**data, "x": x}
    expected = np.float64(W)
    for batch in tj.batches(rows, 6, epochs=2, seed=3):
        expected = next_w(expected, batch["x"], batch)
    np.testing.assert_allclose(state.params, expected, rtol=1e-5)


def test_batches_hold_the_rows_and_nothing_else():
    data, x = batch_of(11)
    rows = tj.sparse.IndexedRows(x[1::2], np.arange(11)[1::2], x.shape)
    batched = bcoo(x, n_batch=1)
    data = {"a": data["x"], "b": rows, "c": batched, "d": x}
    for batch in tj.batches(data, 4, seed=5):
        order = batch["d"]
        np.testing.assert_array_equal(dense(batch["a"]), order)
        np.testing.assert_array_equal(dense(batch["c"]), order)
        odd = [(x[1::2] == row).all(1).any() and row.any() for row in order]
        kept = np.where(np.array(odd)[:, None], order, 0)
        np.testing.assert_array_equal(dense(batch["b"]), kept)


@pytest.mark.slow
def test_a_data_set_is_distributed_by_rows():
    strategy = mirrored(4, 2)
    pairs = [batch_of(n, seed=n) for n in (8, 3)]
    predict = predicting(lambda w, x: x["x"] @ w, strategy, max_programs=2)
    placed = strategy.distribute_dataset([batch for batch, _ in pairs])
    for batch, (_, x) in zip(placed, pairs, strict=True):
        np.testing.assert_allclose(predict(W, batch), np.float64(x) @ W, rtol=1e-6)


def test_entries_that_were_split_for_other_micro_batches_are_refused():
    strategy = mirrored(2, 1)
    (batch, x) = batch_of(8)
    dense_too = {**batch, "x": x}
    for placed_for, taken_for in ((1, 2), (2, 1), (2, 4)):
        given = {"micro_batches": placed_for}
        sparse_one, dense_one = strategy.distribute_dataset([batch, dense_too], **given)
        step = training(strategy, micro_batches=taken_for)
        step.place_batch(dense_one)
        text = f"for micro_batches={placed_for}. Write micro_batches={taken_for} w"
        with pytest.raises(ValueError, match=re.escape(text)):
            step.place_batch(sparse_one)
    with pytest.raises(ValueError, match="split for micro_batches=2"):
        sparse_one.per_tower()


def test_entries_are_split_anew_in_each_batch_of_the_same_shapes():
    """Two micro-batches of one tower: their arrays have the shapes of the whole."""
    step = training(mirrored(1, 1), micro_batches=2)
    values = np.arange(1, 9, dtype=np.float32)[:, None]
    for rows in ([0, 0, 1, 1, 2, 2, 3, 3], [3, 1, 2, 0, 0, 1, 3, 2]):
        whole = tj.sparse.IndexedRows(values, np.array(rows, np.int32), (4, 1))
        placed = step.place_batch({"x": whole}).arrays["x"]
        assert placed.values.shape == values.shape
        arrays = placed.values, placed.indices
        halves = zip(*(np.split(np.asarray(x), 2) for x in arrays), strict=True)
        parts = [dense(tj.sparse.IndexedRows(*half, (2, 1))) for half in halves]
        np.testing.assert_array_equal(np.concatenate(parts), dense(whole))


def test_one_tower_has_the_entries_of_all_towers():
    batch, x = batch_of(8)
    step = training(mirrored(2, 1), micro_batches=2)
    placed = tj.testing.one_tower(step).place_batch(batch)
    np.testing.assert_array_equal(dense(placed.arrays["x"]), x)


@pytest.mark.slow
def test_few_programs_serve_batches_of_any_number_of_entries():
    """One kind of batch, whose towers have from none to 60 entries."""
    predict = predicting(lambda w, x: x @ w, mirrored(2, 2), max_programs=1)
    x = np.arange(60, dtype=np.float32).reshape(2, 30)
    for entries in (0, 3, 30, 17, 9):
        indices = np.argwhere(np.arange(30) < entries * np.ones((2, 1)))
        cut = sparse.BCOO((x[tuple(indices.T)], indices), shape=x.shape)
        out = predict(np.ones(30, np.float32), cut)
        np.testing.assert_allclose(out, x[:, :entries].sum(1), rtol=1e-6)
    assert len(predict.programs.compiled) <= 3
    change = re.escape("batch is float32[4, 30], expected float32[2, 30]")
    cut = sparse.BCOO((cut.data, cut.indices), shape=(4, 30))
    with pytest.raises(ValueError, match=change):
        predict(np.ones(30, np.float32), cut)


# fmt: off
BAD = {
    "bcsr": (
        lambda: sparse.BCSR((np.ones(4), np.arange(4), np.arange(5)), shape=(4, 4)),
        "batch['x'] is a BCSR, a format that"),
    "scipy": (lambda: scipy.sparse.csr_matrix(np.eye(4)),
        "batch['x'] is a csr_matrix, a format that cannot be split"),
    "coo": (lambda: sparse.COO((np.ones(4), np.arange(4), np.arange(4)), shape=(4, 4)),
        "BCOO.fromdense(x.todense())"),
    "negative": (lambda: sparse.BCOO((np.ones(1), np.array([[-1, 0]])), shape=(4, 2)),
        "batch['x'] has the index -1, but indices are counted from 0"),
}
# fmt: on


@pytest.mark.parametrize("name", BAD)
def test_other_formats_are_refused(name):
    make, text = BAD[name]
    predict = predicting(lambda w, batch: batch["y"], mirrored(2, 1))
    with pytest.raises(ValueError, match=re.escape(text)):
        predict(np.float32(1), {"x": make(), "y": np.ones(4)})


def test_sparse_outputs_are_refused():
    predict = predicting(lambda w, x: {"same": x}, mirrored(2, 1))
    with pytest.raises(ValueError, match=r"predictions\['same'\] is a BCOO, whose ent"):
        predict(np.float32(1), bcoo(np.eye(4)))


def test_where_entries_would_be_taken_for_examples_they_are_refused():
    data = [{"x": bcoo(np.eye(4))}] * 2
    placed = mirrored(2, 1).distribute_dataset(data, split="elements")
    with pytest.raises(ValueError, match=r"\['x'\] is a BCOO, whose entries would be"):
        next(iter(placed))
    step = training(mirrored(2, 1))
    with pytest.raises(ValueError, match=r"\['x'\] is a BCOO, whose entries would be"):
        step.check(jax.ShapeDtypeStruct((4,), jnp.float32), data[0])
    with pytest.raises(ValueError, match=r"\['x'\] is a BCOO.*only a call of a"):
        step.fn(step.init(jnp.zeros(4)), data[0])
