"""Towers meet: merge_call, reduce, all_gather and axis_names, wherever towers lie."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from layouts import with_verbs as mirrored

import towerjax as tj
from towerjax.layers.batch_norm.linen import TowerBatchNorm

R = tj.Reduction
EPS = np.finfo(np.float32).eps
T = 4
D = 2


def values(T):
    """Distinct, irregular, of both signs."""
    return np.array([1.5, -0.25, 3.0, 0.75])[:T]


def per_tower(T):
    return tj.PerTower(values(T).astype(np.float32))


def all_towers(out, T):
    """Each tower's value, in float64; a bare result is every tower's."""
    rows = out.values if isinstance(out, tj.PerTower) else np.stack([out] * T)
    return np.asarray(rows, np.float64)


def sum_of_squares(strategy, v):
    return sum(x**2 for x in strategy.unwrap(v))


@pytest.mark.slow
def test_pytrees_strings_and_none_go_through():
    seen = []

    def merge_fn(strategy, tree, word, nothing, number):
        seen.append((word, nothing, number, strategy.unwrap(word)))
        assert isinstance(tree["a"], tj.PerTower)
        total = jax.tree.map(
            lambda x: strategy.reduce(R.SUM, x),
            tree,
            is_leaf=lambda x: isinstance(x, tj.PerTower),
        )
        return {"total": total, "word": word + "!", "nothing": nothing, "n": number}

    def tower_fn(tower, x):
        tree = {"a": x, "b": [jnp.stack([x, 2 * x]), x > 0]}
        return tower.merge_call(merge_fn, tree, "word", None, 7)

    out = mirrored(T, D).call_for_each_tower(tower_fn, per_tower(T))
    total = values(T).sum()
    np.testing.assert_allclose(out["total"]["a"], total, rtol=4 * EPS)
    np.testing.assert_allclose(out["total"]["b"][0], [total, 2 * total], rtol=4 * EPS)
    assert int(out["total"]["b"][1]) == (values(T) > 0).sum()
    assert (out["word"], out["nothing"], out["n"]) == ("word!", None, 7)
    assert set(map(str, seen)) == {str(("word", None, 7, ["word"]))}


def test_destinations_inside_may_be_what_is_traced_with_the_value():
    strategy = mirrored(2, 2)

    def merge_fn(strategy, x, v):
        [total] = strategy.batch_reduce(R.SUM, [(x, v)])
        half = strategy.reduce(R.MEAN, x, destinations=x)
        return total, half, strategy.fetch(v), strategy.broadcast(4.0, v)

    v = strategy.create_var("v", 7.0)
    out = strategy.call_for_each_tower(
        lambda tower, v: tower.merge_call(merge_fn, tower.id, v), v
    )
    assert [float(x) for x in out] == [1, 0.5, 7, 4]


# Inside transformations. f is what a tower computes of its own x with the others'.


def sums(tower, x):
    return tower.merge_call(sum_of_squares, x)


def sum_twice(tower, x):
    def merge_fn(strategy, v):
        return sum(strategy.unwrap(v)) * x  # x is the tower's own, closed over

    return tower.merge_call(merge_fn, x) + tower.merge_call(merge_fn, 2 * x)


def in_nested_functions(tower, x):
    @jax.jit
    def outer(x):
        return jax.checkpoint(jax.jit(lambda y: sums(tower, y)))(x)

    return outer(x)


def in_cond_on_towers(tower, x):
    number = tower.reduce(R.SUM, 1 + 0 * tower.id)
    return lax.cond(
        number == tower.num_towers, lambda x: sums(tower, x), lambda x: x, x
    )


def in_scan(tower, x):
    def body(total, scale):
        return total + sums(tower, scale * x), None

    return lax.scan(body, jnp.float32(0), jnp.array([0.0, 0.6, 0.8]))[0]


def in_vmap(tower, x):
    return jax.vmap(lambda scale: sums(tower, scale * x))(jnp.array([0.6, 0.8])).sum()


PLACES = [in_nested_functions, in_cond_on_towers, in_scan, in_vmap]


@pytest.mark.slow
def test_value_and_gradient_of_a_sum():
    """`L_t = c_t sum_j x_j^2`: own gradient of all towers' losses `2 x_t sum_j c_j`."""

    def tower_fn(tower, x, c):
        return [jax.value_and_grad(lambda x, f=f: c * f(tower, x))(x) for f in PLACES]

    x = values(T)
    c = np.array([2.0, -1.0, 0.5, 4.0])[:T]
    found = mirrored(T, D).call_for_each_tower(
        tower_fn, per_tower(T), tj.PerTower(c.astype(np.float32))
    )
    size = np.abs(c).sum() * (x**2).sum()
    close = dict(rtol=0, atol=8 * EPS * size)
    for f, (losses, gradients) in zip(PLACES, found, strict=True):
        close["err_msg"] = f.__name__
        np.testing.assert_allclose(all_towers(losses, T), c * (x**2).sum(), **close)
        np.testing.assert_allclose(all_towers(gradients, T), 2 * x * c.sum(), **close)


def test_values_that_are_closed_over_stay_the_towers_own():
    out = mirrored(T, D).call_for_each_tower(sum_twice, per_tower(T))
    x = values(T)
    np.testing.assert_allclose(all_towers(out, T), 3 * x * x.sum(), rtol=8 * EPS)


@pytest.mark.slow
def test_a_reduction_in_16_bits_is_rounded_once():
    rows = {"f2": np.float16([60000] * 3), "bf": np.array([256, 1, 1], jnp.bfloat16)}
    rows = tj.PerTower(rows)  # 3 * 60000 is no float16, and 256 + 1 is 256 in bfloat16
    strategy = mirrored(3, 3)
    for reduction, expected in ((R.SUM, [np.inf, 258]), (R.MEAN, [60000, 86])):
        inside = strategy.call_for_each_tower(
            lambda tower, rows, r=reduction: tower.reduce(r, rows), rows
        )
        for found in (inside, strategy.reduce(reduction, rows)):
            assert [float(found["f2"]), float(found["bf"])] == expected
            assert (found["f2"].dtype, found["bf"].dtype) == (np.float16, jnp.bfloat16)


@pytest.mark.slow
def test_other_towers_nan_does_not_leak_into_the_first():
    def tower_fn(tower, x):
        bad = jnp.where(tower.id == 0, x, jnp.nan)

        def first(x):
            return tower.reduce(R.ONLY_FIRST_TOWER, x)

        return (
            first(bad),
            first(jnp.where(tower.id == 0, x, jnp.inf)),
            jax.grad(lambda x: first(x) / tower.num_towers)(x),
        )

    value, other, gradient = mirrored(T, D).call_for_each_tower(tower_fn, per_tower(T))
    assert float(value) == float(other) == values(T)[0]
    # A share of tower 0's value, as each tower has it.
    assert all_towers(gradient, T).tolist() == [1] + [0] * (T - 1)


@pytest.mark.slow
def test_typed_keys_meet():
    def tower_fn(tower):
        key = jax.random.fold_in(jax.random.key(3), tower.id)
        return (
            key,
            tower.all_gather(key),
            tower.reduce(R.ONLY_FIRST_TOWER, key),
            tower.merge_call(lambda strategy, v: strategy.unwrap(v)[-1], key),
        )

    own, gathered, first, last = map(
        lambda x: np.asarray(
            jax.random.key_data(x.values if isinstance(x, tj.PerTower) else x)
        ),
        mirrored(T, D).call_for_each_tower(tower_fn),
    )
    assert len(np.unique(own, axis=0)) == T
    assert (gathered == own).all()
    assert (first == own[0]).all() and (last == own[-1]).all()


def test_all_gather_joins_along_a_dim():
    strategy = tj.tf1.MirroredStrategy(devices=("cpu:0", "cpu:1"), towers=4)
    axes = (0, 1, -1)
    rows = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)

    def tower_fn(tower, x):
        return [tower.all_gather({"x": x}, axis=axis) for axis in axes]

    out = strategy.call_for_each_tower(tower_fn, tj.PerTower(rows))
    for axis, joined in zip(axes, out, strict=True):
        np.testing.assert_array_equal(joined["x"], np.concatenate([*rows], axis))


def test_a_joined_all_gather_differentiates():
    strategy = tj.tf1.MirroredStrategy(devices=("cpu:0", "cpu:1"), towers=2)
    rows = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)

    def tower_fn(tower, x):
        weights = jnp.arange(1.0, 5.0) * (1 + tower.id)
        return jax.grad(lambda x: (weights * tower.all_gather(x, axis=0)).sum())(x)

    out = strategy.call_for_each_tower(tower_fn, tj.PerTower(rows))
    # Each row takes part in both towers' sums, with weights w and 2 w.
    assert out.values.tolist() == [[3.0, 6.0], [9.0, 12.0]]


def test_merge_call_takes_names():
    strategy = tj.tf1.MirroredStrategy(devices=("cpu:0", "cpu:1"), towers=2)

    def merge_fn(strategy, a, *, b, word):
        assert word == "word"
        return sum(strategy.unwrap(a)) + 10 * sum(strategy.unwrap(b))

    def tower_fn(tower):
        return tower.merge_call(merge_fn, 1 + tower.id, b=3 + tower.id, word="word")

    out = strategy.call_for_each_tower(tower_fn)
    assert int(out) == 73


def gathers_rows(w, batch, tower):
    others = tower.all_gather(batch, axis=0)
    return (batch @ others.T).sum(1) * w


def gathers_their_weight_too(w, batch, tower):
    others, weight = tower.all_gather((batch, tower.weight), axis=0)
    return (batch @ others.T) @ weight * w


def adds_rows(w, batch, tower):
    count = tower.reduce(R.SUM, tower.weight.sum())
    return (batch @ tower.reduce(R.SUM, batch.sum(0))) * w / count


def adds_rows_in_a_loop(w, batch, tower):
    def one(total, _):
        return total + tower.reduce(R.MEAN, (batch * w).mean()), None

    return batch[:, 0] * jax.checkpoint(lambda: lax.scan(one, 0.0, length=2)[0])()


def merges_rows(w, batch, tower):
    return batch @ tower.merge_call(lambda s, x: s.reduce(R.MEAN, x), batch.mean(0)) * w


def adds_weighted_rows(w, batch, tower):
    mean = tj.Weighted.mean(batch, tower.weight, axis=0)
    total, count = tower.reduce(R.SUM, (mean.sum, mean.weight))
    return batch @ (total / count) * w + tower.reduce(R.ONLY_FIRST_TOWER, batch[0, 0])


def normed_by_flax(w, batch, tower, mask=None):
    norm = nn.BatchNorm(use_running_average=False, axis_name=tower.axis_names)
    stats = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    params = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}
    variables = {"params": params, "batch_stats": stats}
    y, _ = norm.apply(variables, batch * w, mask=mask, mutable=["batch_stats"])
    return y[:, 0]


def normed_by_flax_with_a_mask(w, batch, tower):
    return normed_by_flax(w, batch, tower, tower.weight[:, None] > 0)


def normed_by_towerjax(w, batch, tower):
    norm = TowerBatchNorm(False, use_scale=False, use_bias=False)
    variables = {"batch_stats": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}
    y, _ = norm.apply(variables, batch * w, tower, mutable=["batch_stats"])
    return y[:, 0]


def gathers_by_name(w, batch, tower):
    return (batch @ lax.all_gather(batch, tower.axis_names, tiled=True).T).sum(1) * w


def gathers_by_name_their_weight_too(w, batch, tower):
    others, weight = lax.all_gather((batch, tower.weight), tower.axis_names, tiled=True)
    return (batch @ others.T) @ weight * w


def gathers_by_name_and_counts(w, batch, tower):
    others = lax.all_gather(batch, tower.axis_names, tiled=True)
    count = lax.psum(tower.weight.sum(), tower.axis_names)
    return (batch @ others.T) @ (jnp.arange(len(others)) < count) * w


def scatters_a_sum(w, batch, tower):
    rows = batch.sum() * jnp.arange(1.0 + tower.num_towers)[1:]
    share = lax.psum_scatter(rows, tower.axis_names)
    return batch[:, 0] * share * w


def to_the_next(value, tower):
    count = tower.num_towers
    pairs = [(i, (i + 1) % count) for i in range(count)]
    return lax.ppermute(value, tower.axis_names, pairs)


def counts_all(tower):
    return lax.psum(tower.weight.sum(), tower.axis_names)


def passes_rows_on(w, batch, tower):
    return (batch @ to_the_next(batch, tower).T).sum(1) * w / counts_all(tower)


def passes_rows_on_in_a_loop(w, batch, tower):
    def one(carry, _):
        others, total = carry
        others = to_the_next(others, tower)
        return (others, total + (batch @ others.T).sum(1)), None

    start = batch, jnp.zeros_like(batch[:, 0])
    return lax.scan(one, start, length=tower.num_towers)[0][1] * w


def passes_rows_on_with_their_weight(w, batch, tower):
    others, weight = to_the_next((batch, tower.weight), tower)
    return (batch @ others.T) @ weight * w


def passes_rows_on_whose_weights_are_known(w, batch, tower):
    others = to_the_next(batch, tower)
    weights = lax.all_gather(tower.weight, tower.axis_names)
    return (batch @ others.T) @ weights[tower.id - 1] * w


def passes_on_a_sum(w, batch, tower):
    return batch @ to_the_next(tower.weight @ batch, tower) * w / counts_all(tower)


def passes_parameters_on(w, batch, tower):
    return batch[:, 0] * to_the_next(w * (1.0 + tower.id), tower)


def swaps_rows(w, batch, tower):
    parts = batch.reshape(tower.num_towers, -1, 3)
    others = lax.all_to_all(parts, tower.axis_names, 0, 0, tiled=True)
    return (batch @ others.reshape(-1, 3).T).sum(1) * w


def swaps_rows_and_weights(w, batch, tower):
    count = tower.num_towers
    parts = batch.reshape(count, -1, 3), tower.weight.reshape(count, -1)
    others, weight = lax.all_to_all(parts, tower.axis_names, 0, 0, tiled=True)
    return (batch @ others.reshape(-1, 3).T) @ weight.reshape(-1) * w


def sends_the_first_rows(w, batch, tower):
    return batch @ lax.pbroadcast(batch.mean(0), tower.axis_names, 0) * w


def adds_by_name_and_counts(w, batch, tower):
    total = lax.psum(batch.sum(0), tower.axis_names)
    return batch @ total * w / lax.psum(tower.weight.sum(), tower.axis_names)


def adds_in_a_scope_called(name):
    def losses(w, batch, tower):
        with jax.named_scope(name):
            total = lax.psum(batch.sum(0), tower.axis_names)
        return batch @ total * w

    return losses


def adds_rows_of_a_table(w, batch, tower):
    indices = batch[:, 0].astype(jnp.int32)
    rows = tj.sparse.IndexedRows(batch * tower.weight[:, None], indices, (2, 3))
    return batch @ tower.reduce(R.SUM, rows).to_dense()[0] * w


def asks_what_a_copy_does_not_change(w, batch, tower):
    names = tower.axis_names
    bad = jnp.isnan(batch).any()
    largest = lax.pmax(lax.stop_gradient(batch.max()), names)
    first = lax.psum(jnp.where(tower.id == 0, batch[0], 0), names)
    ok = lax.psum(bad, names) + lax.psum(bad.astype(jnp.float32) * 2, names) == 0
    return batch @ first * w / largest * ok


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("losses, where", [
    (gathers_rows, "tower.all_gather"),
    (gathers_their_weight_too, None),
    (adds_rows, "tower.reduce"),
    (adds_rows_in_a_loop, "tower.reduce"),
    (merges_rows, "tower.merge_call"),
    (adds_weighted_rows, None),
    (normed_by_flax, "psum"),
    (normed_by_flax_with_a_mask, None),
    (normed_by_towerjax, None),
    (gathers_by_name, "all_gather"),
    (gathers_by_name_their_weight_too, None),
    (gathers_by_name_and_counts, None),
    (scatters_a_sum, "reduce_scatter"),
    (passes_rows_on, "ppermute"),
    (passes_rows_on_in_a_loop, "ppermute"),
    (passes_rows_on_with_their_weight, None),
    (passes_rows_on_whose_weights_are_known, None),
    (passes_on_a_sum, None),
    (passes_parameters_on, None),
    (swaps_rows, "all_to_all"),
    (swaps_rows_and_weights, None),
    (sends_the_first_rows, "pbroadcast"),
    (adds_by_name_and_counts, "psum"),
    (adds_in_a_scope_called("towerjax.sums"), "psum"),
    (adds_in_a_scope_called("transpose("), "psum"),
    (adds_rows_of_a_table, None),
    (asks_what_a_copy_does_not_change, None),
])  # fmt: skip
def test_padding_does_not_count_where_towers_meet(losses, where):
    def loss_fn(w, batch, tower):
        each = losses(w, batch["x"], tower)
        return tj.Weighted.mean(each, tower.weight)

    # step.fn has no rows to audit, and many of these losses are no one tower's.
    how = {"remainder": "pad", "audit": False}
    strategy = tj.Mirrored(("cpu:0", "cpu:1"))
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **how)

    def run(rows):
        batch = {"x": np.ones((rows, 3), np.float32)}
        jax.eval_shape(step.fn, step.init(1.0), batch)

    run(8)
    if where is None:
        run(7)
        return
    at = r"at \S*test_merge.py:\d+ \(.*\) does not depend on tower.weight"
    with pytest.raises(ValueError, match=rf"{where} is given of batch\['x'\] {at}"):
        run(7)
