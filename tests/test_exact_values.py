"""Values to the last bit, in every dtype, on every path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.reduce import reduced_dtype

R = tj.Reduction
LAYOUTS = pytest.mark.parametrize("T, D", [(4, 1), (4, 2), (4, 4)])


def mirrored(T, D=1, **options):
    return tj.Mirrored([f"cpu:{i}" for i in range(D)], towers=T, **options)


def bits(x):
    return np.asarray(x).tobytes()


SPECIAL = {
    "float32": np.float32([-0.0, 0.0, np.nan, -np.inf, 1e-45]),
    "bfloat16": jnp.array([-0.0, 3.14, jnp.inf], jnp.bfloat16),
    "complex64": np.array([complex(-0.0, -0.0), complex(0.0, -0.0)], np.complex64),
    "bool": np.array([True, False]),
    "int8": np.array([-128, 127, 0], np.int8),
    "uint32": np.array([2**32 - 1, 0], np.uint32),
}


@pytest.mark.parametrize("name", SPECIAL)
@LAYOUTS
def test_the_first_towers_value_comes_bit_for_bit(T, D, name):
    first = jnp.asarray(SPECIAL[name])
    rows = jnp.stack([first, *[jnp.ones_like(first)] * (T - 1)])
    out = mirrored(T, D).call_for_each_tower(
        lambda tower, x: tower.reduce(R.ONLY_FIRST_TOWER, x), tj.PerTower(rows)
    )
    assert out.dtype == first.dtype and bits(out) == bits(first)


@LAYOUTS
def test_the_first_towers_value_is_differentiable(T, D):
    strategy = mirrored(T, D)

    def total(rows):
        def tower_fn(tower, x):
            return (tower.id + 1.0) * tower.reduce(R.ONLY_FIRST_TOWER, x) ** 2

        return strategy.call_for_each_tower(tower_fn, tj.PerTower(rows)).values.sum()

    rows = jnp.arange(T) + 3.0
    expected = jnp.zeros(T).at[0].set(2 * 3.0 * T * (T + 1) / 2)
    np.testing.assert_allclose(jax.grad(total)(rows), expected)
    np.testing.assert_allclose(jax.jvp(total, (rows,), (rows,))[1], 180.0)


@LAYOUTS
def test_a_tower_local_minus_zero_is_evaluated_bit_for_bit(T, D):
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(batch * params, tower.weight)

    def metric_fn(params, batch, tower):
        sign = tj.Weighted.mean(batch * 0 + jnp.signbit(tower.local["z"].real))
        imag = tj.Weighted.mean(batch * 0 + jnp.signbit(tower.local["z"].imag))
        flag = tj.Weighted.mean(batch * 0 + tower.local["flag"])
        return {"real": sign, "imag": imag, "flag": flag}

    strategy = mirrored(T, D)
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


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "float32", "uint8"])
@LAYOUTS
def test_means_and_sums_have_one_dtype_on_all_paths_in_x64(T, D, dtype):
    with jax.enable_x64(True):
        strategy = mirrored(T, D)
        rows = np.array([1, 0, 1, 1]).astype(dtype)
        own = strategy.create_var("v", rows[0], reduction=R.MEAN, tower_local=True)
        for reduction in (R.MEAN, R.SUM):
            outs = [
                strategy.reduce(reduction, tj.PerTower(rows)),
                jax.jit(lambda x, r=reduction: strategy.reduce(r, tj.PerTower(x)))(
                    rows
                ),
                *[
                    strategy.call_for_each_tower(
                        lambda tower, x, r=reduction: tower.reduce(r, x),
                        tj.PerTower(rows),
                        run_concurrently=concurrently,
                    )
                    for concurrently in (True, False)
                ],
            ]
            numpys = jnp.mean if reduction is R.MEAN else jnp.sum
            expected = numpys(jnp.asarray(rows))
            assert [(x.dtype, float(x)) for x in outs] == [
                (expected.dtype, float(expected))
            ] * len(outs)
            assert reduced_dtype(reduction, jnp.dtype(dtype)) == expected.dtype
        assert strategy.read_var(own).dtype == jnp.mean(jnp.asarray(rows)).dtype


@pytest.mark.parametrize("concurrently", [True, False])
def test_gathered_and_reduced_python_numbers_are_strong(concurrently):
    def tower_fn(tower):
        first = tower.reduce(R.ONLY_FIRST_TOWER, 2.5)
        return tower.all_gather(2.5), first, tower.reduce(R.MEAN, 2.5)

    out = mirrored(2).call_for_each_tower(tower_fn, run_concurrently=concurrently)
    assert [x.weak_type for x in jax.tree.leaves(out)] == [False] * 3
