"""Variables: made, assigned in towers and across them, updated, read, saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import with_verbs as mirrored

import towerjax as tj

R = tj.Reduction
EPS = np.finfo(np.float32).eps
T = 4
D = 2
ROWS = np.float32([1.5, -0.25, 3.0, 0.75])


def expected_of(reduction, rows):
    return {R.SUM: np.sum, R.MEAN: np.mean, R.ONLY_FIRST_TOWER: lambda x: x[0]}[
        reduction
    ](rows.astype(np.float64))


def refuses(text):
    return pytest.raises(ValueError, match=text)


def test_a_variable_is_placed_on_all_devices():
    strategy = mirrored(T, D)
    v = strategy.create_var("v", {"a": np.arange(3.0), "b": 2})
    assert v.value["a"].tolist() == [0, 1, 2] and v.value["b"].dtype == jnp.int32
    local = strategy.create_var("n", [7, 8], reduction=R.SUM, tower_local=True)
    assert local.value[1].tolist() == [8] * T
    devices = {jax.devices("cpu")[i] for i in range(D)}
    for x in jax.tree.leaves((v, local)):
        assert x.devices() == devices
    assert v.value["a"].sharding.is_fully_replicated
    shapes = {shard.data.shape for shard in local.value[0].addressable_shards}
    assert shapes == {(T // D,)}
    assert (v.name, v.reduction) == ("v", R.NONE)
    assert (local.name, local.reduction) == ("n", R.SUM)


@pytest.mark.slow
def test_the_initial_value_is_made_once():
    calls = []

    def initial():
        calls.append(0)
        return np.random.default_rng().normal(size=2)

    v = mirrored(3, 3).create_var("v", initial, reduction=R.MEAN, tower_local=True)
    assert len(calls) == 1
    assert (np.asarray(v.value) == np.asarray(v.value[0])[None]).all()


def test_a_variable_is_a_copy():
    x = np.ones(1024, np.float32)
    v = mirrored(2, 2).create_var("v", x)
    w = mirrored(2, 2).assign(v, x)
    x[:] = 0
    assert float(v.value.sum()) == float(w.value.sum()) == 1024


def test_variables_are_made_and_changed_inside_jit():
    strategy = mirrored(2, 2)

    @jax.jit
    def program(x):
        v = strategy.create_var("v", x, reduction=R.SUM)
        n = strategy.create_var("n", x, reduction=R.SUM, tower_local=True)
        v = strategy.assign_add(v, 2.0)
        v = strategy.update(v, lambda x: 10 * x)
        n = strategy.assign(n, 6.0)
        v, n = strategy.call_for_each_tower(
            lambda tower, v, n: (
                tower.assign_sub(v, tower.id + 1),
                tower.assign_add(n, tower.id),
            ),
            v,
            n,
        )
        return v, n

    v, n = program(1.0)
    assert isinstance(v, tj.towers.MirroredVar) and float(v.value) == 30 - 3
    assert isinstance(n, tj.TowerLocal) and n.value.tolist() == [3, 4]


@pytest.mark.slow
def test_assigning_keeps_the_dtype():
    strategy = mirrored(2)
    v = strategy.create_var("v", jnp.bfloat16(1), reduction=R.MEAN)
    n = strategy.create_var("n", jnp.int8(1), reduction=R.NONE, tower_local=True)

    def tower_fn(tower, v, n):
        return tower.assign_add(v, tower.id), tower.assign_add(n, 2)

    v, n = strategy.call_for_each_tower(tower_fn, v, n)
    assert (v.value.dtype, n.value.dtype) == (jnp.bfloat16, jnp.int8)
    assert float(v.value) == 1.5 and n.value.tolist() == [3, 3]


def test_a_sum_of_zero_or_on_one_tower_is_no_question():
    for T, value in ((2, 0.0), (1, 5.0)):
        strategy = mirrored(T)
        v = strategy.create_var("v", 1.0, reduction=R.SUM)
        out = strategy.call_for_each_tower(lambda t, v: t.assign(v, value), v)  # noqa: B023
        assert float(out.value) == value


def test_towers_make_variables():
    def tower_fn(tower):
        own = tj.TowerLocal(tower.id * 2, R.SUM, "own")
        same = tj.TowerLocal(jnp.float32(3), R.MEAN)
        v = tj.towers.MirroredVar(jnp.ones(2), name="v")
        return {"v": v, "own": own, "same": same}

    out = mirrored(T, D).call_for_each_tower(tower_fn)
    assert out["v"].value.tolist() == [1, 1]
    assert out["own"].value.tolist() == [2 * t for t in range(T)]
    assert (out["own"].name, out["own"].reduction) == ("own", R.SUM)
    assert out["same"].value.tolist() == [3] * T  # a copy a tower, though all equal


@pytest.mark.slow
def test_variables_meet_in_a_merge_as_such():
    strategy = mirrored(T, D)
    v = strategy.create_var("v", (1.0, 2.0))
    n = strategy.create_var("n", (1, 5), reduction=R.SUM, tower_local=True)

    def merge_fn(strategy, v, n):
        assert isinstance(v, tj.towers.MirroredVar) and isinstance(n, tj.TowerLocal)
        assert n.value[0].shape == (T,)
        total = strategy.read_var(n)
        v = strategy.assign(v, (total[0], 0.5))
        return v, strategy.update(n, lambda x, y: (x[0] + 1, x[1] * y), 2), total[1]

    def tower_fn(tower, v, n):
        n = tower.assign_add(n, (tower.id, 0))
        return tower.merge_call(merge_fn, v, n)

    v, n, total = strategy.call_for_each_tower(tower_fn, v, n)
    ids = np.arange(T)
    assert [float(x) for x in v.value] == [(1 + ids).sum(), 0.5]
    assert n.value[0].tolist() == (2 + ids).tolist()
    assert n.value[1].tolist() == [10] * T
    assert isinstance(total, jax.Array) and int(total) == 5 * T


@pytest.mark.slow
def test_assigning_is_differentiable():
    T = 4
    D = 2
    strategy = mirrored(T, D)
    v = strategy.create_var("v", 2.0, reduction=R.MEAN)

    def loss(x, v):
        def tower_fn(tower, v, x):
            return tower.assign_add(v, x**2)

        return strategy.call_for_each_tower(tower_fn, v, tj.PerTower(x)).value ** 2

    value, (of_x, of_v) = jax.value_and_grad(loss, argnums=(0, 1))(
        jnp.asarray(ROWS[:T]), v
    )
    x = ROWS[:T].astype(np.float64)
    new = 2 + (x**2).mean()
    np.testing.assert_allclose(value, new**2, rtol=8 * EPS)
    np.testing.assert_allclose(of_x, 2 * new * 2 * x / T, rtol=8 * EPS)
    np.testing.assert_allclose(of_v.value, 2 * new, rtol=8 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", R)
def test_a_tower_local_variable_reads_as_assigned(reduction):
    strategy = mirrored(T, D)
    wholes = [7, -7, 0, 2]
    zeros = [np.zeros(4, np.int32), 0.0]
    n = strategy.create_var("n", zeros, reduction=reduction, tower_local=True)
    new = strategy.assign(n, [np.array(wholes), 1.5])
    if reduction is not R.NONE:
        read, half = strategy.read_var(new)
        assert read.tolist() == wholes
        np.testing.assert_allclose(half, 1.5, rtol=4 * EPS)
    found, last = (np.asarray(x).T.tolist() for x in new.value)
    for whole, parts in zip(wholes, found, strict=True):
        expected = [whole] * T
        if reduction is R.SUM:
            expected = [len(part) for part in np.array_split(np.arange(abs(whole)), T)]
            expected = expected if whole >= 0 else [-part for part in expected[::-1]]
        assert parts == expected
    each = 1.5 / T if reduction is R.SUM else 1.5
    np.testing.assert_allclose(last, [each] * T, rtol=EPS)
    assert new.value[0].dtype == jnp.int32
    assert new.value[0].sharding == n.value[0].sharding


@pytest.mark.slow
def test_a_tower_makes_and_reduces_a_variable_of_its_own():
    strategy = mirrored(T, D)

    def tower_fn(tower):
        n = strategy.create_var("n", [1, 2], reduction=R.SUM, tower_local=True)
        n = tower.assign_add(n, [tower.id, 0])
        total = tower.reduce(R.SUM, n)
        rows = tower.all_gather(n)
        return n, [x + tower.id for x in total], rows

    n, (first, _), rows = strategy.call_for_each_tower(tower_fn)
    own = np.arange(1, T + 1)
    total = T * (T + 1) // 2
    assert isinstance(n, tj.TowerLocal) and n.value[0].tolist() == own.tolist()
    assert [int(x) for x in strategy.read_var(n)] == [total, 2 * T]
    assert first.values.tolist() == [total + t for t in range(T)]
    assert rows[0].tolist() == own.tolist() and rows[1].tolist() == [2] * T


@pytest.mark.parametrize("where", ["outside", "tower", "merge"])
def test_a_variable_of_a_number_has_its_own_dtype(where):
    strategy = mirrored(2)

    def make(*_):
        v = strategy.create_var("v", 1.0)
        n = strategy.create_var("n", 1.0, reduction=R.MEAN, tower_local=True)
        own = n.value if where == "tower" else n.value[0]
        return v.value * jnp.bfloat16(1), own * jnp.bfloat16(1)

    if where == "outside":
        found = make()
    elif where == "tower":
        found = strategy.call_for_each_tower(make)
    else:
        found = strategy.call_for_each_tower(lambda tower: tower.merge_call(make))
    assert [x.dtype for x in found] == [np.float32] * 2


def test_in_a_tower_a_mirrored_variable_is_every_towers():
    strategy = mirrored(2)
    v = mirrored(2).create_var("v", 1.0)
    out = strategy.call_for_each_tower(lambda _, v: strategy.select_tower(v, 1), v)
    assert float(out.value) == 1


@pytest.mark.slow
def test_update_calls_once_for_each_copy():
    strategy = mirrored(T, D)
    v = strategy.create_var("v", {"x": 2.0})
    scale = strategy.create_var("scale", 10.0)
    n = strategy.create_var("n", 1.0, reduction=R.SUM, tower_local=True)
    n = strategy.call_for_each_tower(lambda t, n: t.assign_add(n, t.id), n)
    calls = []

    def fn(x, scale, *, plus):
        calls.append(float(jax.tree.leaves(x)[0]))
        return jax.tree.map(lambda x: x * scale + plus, x)

    assert float(strategy.update(v, fn, scale, plus=1).value["x"]) == 21
    new = strategy.update(n, fn, scale, plus=1)
    assert new.value.tolist() == [10 * (1 + t) + 1 for t in range(T)]
    assert calls == [2.0] + [1.0 + t for t in range(T)]
    assert new.value.sharding == n.value.sharding and new.name == "n"


def test_read_var_reads_every_variable():
    strategy = mirrored(2)
    n = tj.TowerLocal(np.float32([1, 4]), R.MEAN)
    v = strategy.create_var("v", (3.0, 4.0))
    out = strategy.read_var({"n": n, "v": v, "word": "w", "own": tj.PerTower((1, 2))})
    assert float(out["n"]) == 2.5 and [float(x) for x in out["v"]] == [3, 4]
    assert out["word"] == "w" and out["own"] == tj.PerTower((1, 2))


def test_fetch_reads_on_one_device():
    strategy = mirrored(2, 2)
    v = strategy.create_var("v", np.arange(3.0))
    n = strategy.create_var("n", 2, reduction=R.SUM, tower_local=True)
    out = strategy.fetch({"v": v, "n": n}, "cpu:5")
    assert out["v"].tolist() == [0, 1, 2] and int(out["n"]) == 4
    assert out["v"].devices() == out["n"].devices() == {jax.devices("cpu")[5]}
    total = strategy.fetch(v, fn=lambda x: x.sum())
    assert float(total) == 3 and total.devices() == {jax.devices("cpu")[0]}


def test_regroup_of_variables():
    strategy = mirrored(2)
    v = strategy.create_var("v", (1.0, 2.0))
    n = strategy.create_var("n", (1.0, 2.0), tower_local=True)
    n = strategy.call_for_each_tower(lambda t, n: t.assign(n, (t.id, 3.0)), n)
    parts = [strategy.select_tower({"v": v, "n": n}, t) for t in range(2)]
    assert parts[1]["v"] is v and [float(x) for x in parts[1]["n"].value] == [1, 3]
    grouped = strategy.regroup(parts)
    assert grouped["v"] is v
    assert grouped["n"].value[0].tolist() == [0, 1]
    assert (grouped["n"].name, grouped["n"].reduction) == ("n", R.NONE)


def test_regroup_keeps_numbers_apart_that_only_seem_equal():
    assert mirrored(2).regroup([1, True]) == tj.PerTower((1, True))
    x = np.ones(2)
    assert mirrored(2).regroup([x, x]) is x
    ragged = mirrored(2).regroup([np.ones(1), np.ones(2)])
    assert [len(row) for row in ragged.values] == [1, 2]
    kinds = mirrored(2).regroup([np.float32(1), np.int32(1)]).values
    assert isinstance(kinds, tuple) and kinds[1].dtype == np.int32


def test_select_tower_takes_the_towers_device():
    value = tj.PerTower((7, 8, 9))
    strategy = mirrored(3, 3)
    for device in ("cpu:1", "/device:CPU:1", strategy.placement.jax_devices[1]):
        assert strategy.select_tower({"x": value}, device) == {"x": 8}
    assert strategy.select_tower(value, np.int64(2)) == 9


KEYS = np.random.default_rng(3).integers(2**32, size=(4, 2), dtype=np.uint32)


@functools.cache
def variables():
    """Different on every tower."""
    strategy = mirrored(T, D)

    def local(rows, reduction):
        sharding = strategy.placement.sharding(tj.towers.Layout.PER_TOWER)
        rows = jax.device_put(rows[:T], sharding)
        return tj.TowerLocal(rows, reduction, reduction.name.lower())

    keys = jax.random.wrap_key_data(KEYS)
    return {
        "v": strategy.create_var("v", {"w": np.float32([1, 2])}, reduction=R.MEAN),
        "sum": local(ROWS, R.SUM),
        "mean": local(ROWS, R.MEAN),
        "first": local(ROWS, R.ONLY_FIRST_TOWER),
        "count": local(np.int32([3, 1, 0, 3]), R.SUM),
        "small": local(np.int8([100, 100, 7, 20]), R.SUM),
        "flags": local(np.array([True, False, True, True]), R.SUM),
        "key": local(keys, R.ONLY_FIRST_TOWER),
        "plain": np.float32([5, 6]),
        "word": "w",
    }


@functools.cache
def saved():
    return tj.towers.saved_values(variables())


@pytest.mark.slow
def test_saved_on_four_towers_and_restored_on_others():
    assert saved()["v"]["w"].tolist() == [1, 2]
    counts = [int(saved()[name]) for name in ("count", "small", "flags")]
    assert counts == [7, 227, 3]
    assert (saved()["key"] == jax.random.wrap_key_data(KEYS)[0]).item()
    strategy = mirrored(T, D)
    like = variables()
    restored = tj.towers.restored_values(strategy, like, saved())
    again = strategy.read_var(restored)
    for name in ("sum", "mean", "first"):
        expected = expected_of(like[name].reduction, ROWS)
        np.testing.assert_allclose(again[name], expected, rtol=4 * EPS)
        spread = np.ptp(np.asarray(restored[name].value))
        assert spread == 0 and restored[name].value.shape == (T,)
    assert restored["count"].value.tolist() == [2, 2, 2, 1]
    assert restored["flags"].value.tolist() == [True, True, True, False]
    assert jax.random.key_data(restored["key"].value).tolist() == [KEYS[0].tolist()] * T
    assert restored["plain"].tolist() == [5, 6] and restored["word"] == "w"
    assert restored["v"].name == "v" and restored["v"].reduction is R.MEAN
    for x in jax.tree.leaves((restored["v"], restored["plain"])):
        assert x.sharding.is_fully_replicated and len(x.devices()) == D
    assert restored["sum"].value.sharding == like["sum"].value.sharding
    # 227 = 57 + 57 + 57 + 56
    assert restored["small"].value.dtype == jnp.int8 and int(again["small"]) == 227
    two = mirrored(2).create_var("n", jnp.int8(0), reduction=R.SUM, tower_local=True)
    moved = tj.towers.restored_values(mirrored(2), two, saved()["count"])
    assert moved.value.tolist() == [4, 3]


@pytest.mark.slow
def test_a_train_state_moves_to_another_number_of_towers():
    def loss_fn(w, batch, tower):
        local = {
            "n": tower.local["n"] + 1 + tower.id,
            "m": tower.local["m"] + batch.mean(),
        }
        return tj.TowerOutput(
            tj.Weighted.mean((w - batch) ** 2, tower.weight), local=local
        )

    local = {
        "n": tj.TowerLocal(np.int32(0), R.SUM, "n"),
        "m": tj.TowerLocal(np.float32(0), R.MEAN, "m"),
    }
    batch = np.arange(12, dtype=np.float32) ** 1.5
    four, three = (
        tj.build_train_step(loss_fn, optax.adam(0.1), mirrored(T, D), donate=False)
        for T, D in ((4, 2), (3, 3))
    )
    key = jax.random.key(7)
    state, _ = four(four.init(np.float32(1), local=local, rng=key), batch)
    like = three.init(np.float32(0), local=local)
    moved = tj.towers.restored_values(
        three.strategy, like, tj.towers.saved_values(state)
    )
    assert int(moved.step) == 1 and (moved.rng == key).item()
    assert moved.local["n"].value.tolist() == [4, 3, 3]  # 1 + 2 + 3 + 4
    np.testing.assert_allclose(moved.local["m"].value, [batch.mean()] * 3, rtol=4 * EPS)
    for name in ("params", "opt_state"):
        for x, y in zip(
            jax.tree.leaves(getattr(state, name)),
            jax.tree.leaves(getattr(moved, name)),
            strict=True,
        ):
            assert np.asarray(x).tolist() == np.asarray(y).tolist()
    after4, _ = four(state, batch)
    after3, _ = three(moved, batch)
    np.testing.assert_allclose(after4.params, after3.params, rtol=1e-6)
    assert int(tj.towers.read_local(after3.local["n"])) == 10 + 6
    assert after3.local["n"].name == "n"


@pytest.mark.slow
@pytest.mark.parametrize("change, text", [
    (dict(v={"u": 1}), r"saved\['v'\]: The value for variable 'v' is PyTreeDef"),
    (dict(plain=np.ones(3, np.float32), flags=np.int32(5)),
        r"'flags'\]: .* tower's share is 2, which .*; saved\['plain'\]: .* \(3,\)"),
    (dict(plain=np.ones(2, np.complex64)), "complex64, which float32 cannot hold"),
    (dict(count=np.float32(1)), "'sum': value is float32, which int32 cannot"),
    (dict(mean=np.ones(2, np.float32)), r"'mean': value has shape \(2,\), expected"),
    (dict(key=np.uint32(1)), "is uint32, which key<fry> cannot hold"),
])  # fmt: skip
def test_what_does_not_fit_is_not_restored(change, text):
    with refuses(text):
        tj.towers.restored_values(mirrored(T, D), variables(), {**saved(), **change})


@pytest.mark.slow
def test_very_many_variables_are_read_at_once():
    """More than 32: read one by one they stop 8 CPU devices for good."""
    strategy = tj.tf1.MirroredStrategy(devices=[f"cpu:{i}" for i in range(8)])
    values = {f"v{i}": np.full(16, i, np.float32) for i in range(40)}
    v = strategy.create_var("v", values, reduction=R.MEAN, tower_local=True)
    read = tj.towers.saved_values(v)
    assert {name: float(x[3]) for name, x in read.items()} == {
        f"v{i}": i for i in range(40)
    }


@pytest.mark.slow
def test_reading_has_the_same_bits_on_any_devices():
    rows = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32)
    reads = []
    for devices in (1, 2, 8):
        strategy = mirrored(8, devices)
        placed = jax.device_put(
            rows, strategy.placement.sharding(tj.towers.Layout.PER_TOWER)
        )
        reads.append(np.asarray(strategy.read_var(tj.TowerLocal(placed, R.MEAN))))
    np.testing.assert_allclose(reads[0], rows.mean(0, np.float64), atol=8 * 2**-23)
    for other in reads[1:]:
        np.testing.assert_array_equal(other, reads[0])
