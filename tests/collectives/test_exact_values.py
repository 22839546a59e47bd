"""Values to the last bit, in every dtype, on every path."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import with_verbs as mirrored

import towerjax as tj
from towerjax.contrib import LocalSGD

R = tj.Reduction


def bits(x):
    return np.asarray(x).tobytes()


SPECIAL = {
    "float32": np.float32([-0.0, 0.0, np.nan, -np.inf, 1e-45]),
    "bfloat16": np.array([-0.0, 3.14, np.inf], jnp.bfloat16),
    "complex64": np.array([complex(-0.0, -0.0), complex(0.0, -0.0)], np.complex64),
    "bool": np.array([True, False]),
    "int8": np.array([-128, 127, 0], np.int8),
    "uint32": np.array([2**32 - 1, 0], np.uint32),
}


def test_the_first_towers_value_comes_bit_for_bit():
    T = 4
    D = 2
    rows = {
        name: np.stack([first, *[np.ones_like(first)] * (T - 1)])
        for name, first in SPECIAL.items()
    }
    out = mirrored(T, D).call_for_each_tower(
        lambda tower, x: tower.reduce(R.ONLY_FIRST_TOWER, x),
        jax.tree.map(tj.PerTower, rows),
    )
    for name, first in SPECIAL.items():
        assert out[name].dtype == first.dtype and bits(out[name]) == bits(first), name


@pytest.mark.slow
def test_the_first_towers_value_is_differentiable():
    T = 4
    D = 2
    strategy = mirrored(T, D)

    def total(rows):
        def tower_fn(tower, x):
            return (tower.id + 1.0) * tower.reduce(R.ONLY_FIRST_TOWER, x) ** 2

        return strategy.call_for_each_tower(tower_fn, tj.PerTower(rows)).values.sum()

    rows = jnp.arange(T) + 3.0
    expected = [2 * 3.0 * T * (T + 1) / 2, 0, 0, 0]
    np.testing.assert_allclose(jax.grad(total)(rows), expected)
    np.testing.assert_allclose(jax.jvp(total, (rows,), (rows,))[1], 180.0)


@pytest.mark.sampled
@pytest.mark.parametrize("T, D, options", [
    (4, 1, {"tower_loop": "scan"}),
    (8, 4, {"cross_tower_ops": tj.collectives.ReduceToOneDevice()}),
])  # fmt: skip
@pytest.mark.slow
def test_a_tower_local_minus_zero_is_evaluated_bit_for_bit(T, D, options):
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(batch * params, tower.weight)

    def metric_fn(params, batch, tower):
        sign = tj.Weighted.mean(batch * 0 + jnp.signbit(tower.local["z"].real))
        imag = tj.Weighted.mean(batch * 0 + jnp.signbit(tower.local["z"].imag))
        flag = tj.Weighted.mean(batch * 0 + tower.local["flag"])
        return {"real": sign, "imag": imag, "flag": flag}

    strategy = mirrored(T, D, **options)
    local = {
        "z": tj.TowerLocal(np.complex64(complex(-0.0, -0.0)), R.ONLY_FIRST_TOWER),
        "flag": tj.TowerLocal(np.bool_(True), R.ONLY_FIRST_TOWER),
    }
    train = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    state = train.init(np.float32(1), local=local)
    evaluate = tj.build_eval_step(metric_fn, strategy)
    out = evaluate(state, np.ones(8, np.float32))
    assert {k: float(v.value) for k, v in out.items()} == {
        "real": 1.0,
        "imag": 1.0,
        "flag": 1.0,
    }


@pytest.mark.slow
def test_means_and_sums_have_one_dtype_on_all_paths_in_x64():
    T = 4
    D = 2
    dtypes = ("int64", "int32", "bool", "float32", "uint8")
    with jax.enable_x64(True):
        strategy = mirrored(T, D)
        rows = {dtype: np.array([1, 0, 1, 1]).astype(dtype) for dtype in dtypes}
        first = {k: x[0] for k, x in rows.items()}
        rows = tj.PerTower(rows)
        own = strategy.create_var("v", first, reduction=R.MEAN, tower_local=True)
        read = strategy.read_var(own)
        both = ((R.MEAN, jnp.mean, 0.75), (R.SUM, jnp.sum, 3))

        def all_of(owner, x):
            return [owner.reduce(reduction, x) for reduction, *_ in both]

        ways = [
            all_of(strategy, rows),
            jax.jit(lambda x: all_of(strategy, x))(rows),
            strategy.call_for_each_tower(all_of, rows),
        ]
        for (reduction, numpys, value), *outs in zip(both, *ways, strict=True):
            for name, x in rows.values.items():
                expected = jax.eval_shape(numpys, x).dtype
                assert [out[name].dtype for out in outs] == [expected] * len(outs)
                assert [float(out[name]) for out in outs] == [value] * len(outs)
                if reduction is R.MEAN:
                    assert read[name].dtype == expected


@pytest.mark.slow
def test_sums_of_a_step_are_of_their_dtype_on_all_layouts_in_x64():
    def loss_fn(w, batch, tower):
        loss = tj.Weighted.mean((w - batch) ** 2, tower.weight)
        return tj.TowerOutput(loss, {"rows": tj.Sum(jnp.int32(len(batch)))})

    with jax.enable_x64(True):
        batch = np.ones(8, np.float32)
        found = []
        for devices in (1, 2, 4):
            strategy = mirrored(4, devices)
            step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
            state = step.init(np.float32(0))
            found.append(jax.eval_shape(step.fn, state, batch)[1]["rows"].dtype)
        assert found == [jnp.int32] * 3
        args = (optax.sgd(0.1), mirrored(4))
        way = LocalSGD(every=2)
        step = tj.build_train_step(lambda *a: loss_fn(*a).loss, *args, extend=way)
        jax.eval_shape(step.fn, step.init(np.float32(0)), batch)


def test_gathered_and_reduced_python_numbers_are_strong():
    def tower_fn(tower):
        first = tower.reduce(R.ONLY_FIRST_TOWER, 2.5)
        return tower.all_gather(2.5), first, tower.reduce(R.MEAN, 2.5)

    out = mirrored(2).call_for_each_tower(tower_fn)
    assert [x.weak_type for x in jax.tree.leaves(out)] == [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype, T, value", [("int8", 200, 2500), ("int32", 3, -7)])
def test_integers_are_shared_out_whatever_the_number_of_towers(dtype, T, value):
    strategy = mirrored(T)
    v = strategy.create_var("v", np.zeros((), dtype), reduction=R.SUM, tower_local=True)
    saved = np.asarray(value, jnp.sum(jnp.zeros(1, dtype)).dtype)
    outs = [strategy.assign(v, value), tj.towers.restored_values(strategy, v, saved)]
    if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        own = np.asarray(value, dtype)
        outs += [strategy.assign(v, own), tj.towers.restored_values(strategy, v, own)]
    for out in outs:
        assert out.value.dtype == dtype
        assert int(strategy.read_var(out)) == value
        parts = np.asarray(out.value).astype(int)
        assert parts.max() - parts.min() <= 1 and (np.diff(parts) <= 0).all()


@pytest.mark.slow
def test_what_a_mean_of_integers_reads_as_may_be_assigned_if_it_is_whole():
    strategy = mirrored(4)
    v = strategy.create_var("v", np.int32(3), reduction=R.MEAN, tower_local=True)
    assert strategy.assign(v, strategy.read_var(v)).value.tolist() == [3] * 4
    assert strategy.assign(v, 2**24 + 1).value.tolist() == [2**24 + 1] * 4
    with pytest.raises(ValueError, match="share is 3.5, which int32 cannot hold"):
        strategy.assign(v, strategy.read_var(v) + 0.5)
    b = strategy.create_var("b", np.bool_(1), reduction=R.MEAN, tower_local=True)
    assert strategy.assign(b, strategy.read_var(b)).value.tolist() == [True] * 4


# What an evaluation reads of towers' variables, and hands back row by row.

W = np.ones(5, np.float32)


def plain_loss(w, batch, tower):
    return tj.Weighted.mean(batch @ w, tower.weight)


@pytest.mark.slow
def test_predictions_may_be_keys_where_a_batch_is_padded():
    keys = jax.random.split(jax.random.key(0), 3)
    strategy = tj.Mirrored(devices=("cpu:0",), towers=2)
    predict = tj.build_predict_step(lambda params, keys, tower: keys, strategy)
    out = predict(np.float32(0), keys)
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))


@pytest.mark.slow
def test_evaluation_reads_tower_local_values_by_their_reduction():
    towers = 3
    ops = tj.PinnedTree()
    strategy = tj.Mirrored(towers=towers, cross_tower_ops=ops)
    kinds = {
        "sum": R.SUM,
        "mean": R.MEAN,
        "first": R.ONLY_FIRST_TOWER,
        "none": R.NONE,
    }
    own = np.float32([2, 3, 4])
    zero = np.zeros((), np.float32)
    local = {name: tj.TowerLocal(zero, kind) for name, kind in kinds.items()}
    step = tj.build_train_step(plain_loss, optax.sgd(0.1), strategy)
    state = step.init(W, local=local)
    local = {name: tj.TowerLocal(own, kind) for name, kind in kinds.items()}
    state = step.place(dataclasses.replace(state, local=local))

    def metric_fn(params, batch, tower):
        assert "none" not in tower.local  # which has no one value
        rows = tower.weight.sum()
        return {
            name: tj.Weighted(tower.local[name] * rows, rows)
            for name in ("sum", "mean", "first")
        }

    batch = np.ones((2 * towers - 1, 5), np.float32)
    # It reads statistics that depend on the towers.
    evaluate = tj.build_eval_step(metric_fn, strategy, audit=False)
    metrics = evaluate(state, batch)
    read = tj.towers.read_local(
        {name: state.local[name] for name in kinds if name != "none"}
    )
    for name, expected in {"sum": own.sum(), "mean": own.mean(), "first": 2}.items():
        np.testing.assert_allclose(metrics[name].value, expected, rtol=1e-6)
        np.testing.assert_allclose(read[name], expected, rtol=1e-6, err_msg=name)
    with pytest.raises(ValueError, match="Reduction.NONE"):
        tj.towers.read_local(state.local)


@pytest.mark.slow
def test_local_values_of_any_dtype_are_read_alike_inside_and_outside():
    strategy = mirrored(4, 2)
    values = [np.int8(100), True, np.float16(0.1)]
    kinds = (R.SUM, R.MEAN, R.ONLY_FIRST_TOWER)
    local = {
        f"{i} {kind.name}": tj.TowerLocal(value, kind)
        for i, value in enumerate(values)
        for kind in kinds
    }
    first = R.ONLY_FIRST_TOWER
    local["key"] = tj.TowerLocal(jax.random.key(7), first)
    step = tj.build_train_step(plain_loss, optax.sgd(0.1), strategy)
    state = step.init(W, local=local)
    seen = {}

    def metric_fn(params, batch, tower):
        seen.update({name: x.dtype for name, x in tower.local.items()})
        read = {k: x.astype(jnp.float32) for k, x in tower.local.items() if k != "key"}
        draw = jax.random.key_data(tower.local["key"])
        return {**read, "draw": draw, "n": tj.Weighted(tower.weight.sum(), 1.0)}

    # Its sum over towers is what one tower has, and "n" counts for each tower.
    evaluate = tj.build_eval_step(metric_fn, strategy, audit=False)
    metrics = evaluate(state, np.ones((8, 5), np.float32))
    outside = tj.towers.read_local({k: v for k, v in state.local.items() if k != "key"})
    for name, value in outside.items():
        assert seen[name] == value.dtype, name
        np.testing.assert_array_equal(metrics[name], np.asarray(value, np.float32))
    np.testing.assert_array_equal(metrics["draw"], [0, 7])
