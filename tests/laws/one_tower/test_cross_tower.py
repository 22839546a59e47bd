"""All towers' values from outside: call, unwrap, reduce, map, read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import with_verbs as mirrored

import towerjax as tj

R = tj.Reduction
EPS = np.finfo(np.float32).eps
T = 4
D = 2
ROWS = np.array([1.5, -0.25, 3.0, 0.75])


SIZES = (2, 0, 2)  # of the towers' own values


def per_tower(T=T):
    return tj.PerTower(ROWS[:T].astype(np.float32))


# call_for_each_tower


@pytest.mark.parametrize(
    "tower_loop, executor", [("vmap", "shard_map"), ("scan", "pmap")]
)
def test_arguments_are_the_towers_own_or_shared(tower_loop, executor):
    def tower_fn(tower, own, shared, word, *, scale, nothing, tree):
        assert own.shape == () and shared.shape == (2,)
        assert (word, nothing, tree["n"], tower.num_towers) == ("word", None, 7, T)
        return scale * own * shared + tree["own"][0] + tower.id

    out = mirrored(T, D, tower_loop=tower_loop, executor=executor).call_for_each_tower(
        tower_fn,
        per_tower(T),
        np.float32([2, 10]),
        "word",
        scale=jnp.float32(0.5),
        nothing=None,
        tree={"own": [tj.PerTower(np.arange(T) * 100)], "n": 7},
    )
    ids = np.arange(T)[:, None]
    expected = 0.5 * ROWS[:T, None] * [2, 10] + 100 * ids + ids
    assert out.values.shape == (T, 2)
    np.testing.assert_allclose(out.values, expected, rtol=4 * EPS)


def test_any_keyword_belongs_to_the_tower_function():
    def tower_fn(tower, /, **kwargs):
        return kwargs

    named = dict(fn=5, form=6, strategy=7, self=8)
    assert mirrored(2).call_for_each_tower(tower_fn, **named) == named


def test_what_is_the_same_by_proof_comes_back_bare():
    def tower_fn(tower, own, shared):
        total = tower.reduce(R.SUM, own)
        return {
            "shared": shared * 2,
            "reduced": total,
            "of reduced": total * shared,
            "gathered": tower.all_gather(own),
            "new": jnp.arange(3),
            "own": own,
            "equal, unproved": own - own,
            "mixed": total * own,
            "constants": ("word", 7, None, 2.5),
        }

    out = mirrored(T, D).call_for_each_tower(tower_fn, per_tower(T), np.float32(2))
    bare = {name for name, x in out.items() if isinstance(x, jax.Array)}
    assert bare == {"shared", "reduced", "of reduced", "gathered", "new"}
    assert out["constants"] == ("word", 7, None, 2.5)
    assert float(out["shared"]) == 4
    np.testing.assert_allclose(out["of reduced"], 2 * ROWS[:T].sum(), rtol=4 * EPS)
    assert out["gathered"].tolist() == ROWS[:T].tolist()
    assert out["own"].values.shape == (T,)
    np.testing.assert_allclose(
        out["mixed"].values, ROWS[:T].sum() * ROWS[:T], rtol=4 * EPS
    )


@pytest.mark.slow
def test_arrays_closed_over_are_the_same_on_all_towers():
    weights = jnp.float32([2, 3])
    key = jax.random.key(3)

    def tower_fn(tower, own):
        drawn = jax.random.uniform(key)
        return (weights * 2, drawn, weights * own + jnp.float32([0, 10]))

    bare, drawn, out = mirrored(T, D).call_for_each_tower(tower_fn, per_tower(T))
    assert bare.tolist() == [4, 6]
    assert float(drawn) == float(jax.random.uniform(key))
    assert out.values.tolist() == (ROWS[:T, None] * [2, 3] + [0, 10]).tolist()


class OurError(Exception):
    pass


@pytest.mark.parametrize("depth", ["tower", "merge", "nested"])
def test_exceptions_keep_their_type(depth):
    def fail(*_):
        raise OurError(depth)

    def tower_fn(tower):
        if depth == "tower":
            fail()
        if depth == "merge":
            return tower.merge_call(fail, tower.id)
        return tower.merge_call(
            lambda strategy, v: tower.merge_call(fail, strategy.unwrap(v)[0]), tower.id
        )

    with pytest.raises(OurError, match=f"^{depth}"):
        mirrored(T, D).call_for_each_tower(tower_fn)


# unwrap


def test_unwrap_is_a_list_in_tower_order():
    unwrap = mirrored(3).unwrap
    assert [float(x) for x in unwrap(per_tower(3))] == ROWS[:3].tolist()
    assert unwrap(tj.PerTower((1, "two"))) == [1, "two"]
    assert unwrap(5) == [5] and unwrap("word") == ["word"] and unwrap(None) == [None]
    rows = unwrap(tj.PerTower({"a": np.arange(6).reshape(3, 2)}))
    assert [row["a"].tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    local = tj.TowerLocal(np.float32([4, 5, 6]), R.NONE)
    assert [float(x) for x in unwrap(local)] == [4, 5, 6]
    unwrap = mirrored(2).unwrap
    local = tj.TowerLocal(np.float32([4, 5]), R.NONE)
    tree = {"a": tj.PerTower((1, 2)), "b": [local, "word", None]}
    assert unwrap(tree) == [{"a": t + 1, "b": [t + 4, "word", None]} for t in (0, 1)]
    assert unwrap({"a": [5]}) == [{"a": [5]}]


# reduce


def test_a_parameter_without_a_gradient_does_not_hinder_the_sum():
    strategy = mirrored(3)
    x = per_tower(3)

    def tower_fn(tower, params, x):
        return jax.grad(lambda params: params["w"] * x**2)(params)

    params = {"unused": np.float32([5, 7]), "w": np.float32(2)}
    grads = strategy.call_for_each_tower(tower_fn, params, x)
    out = strategy.reduce(R.SUM, grads)
    np.testing.assert_allclose(out["w"], (ROWS[:3] ** 2).sum(), rtol=4 * EPS)
    assert out["unused"].tolist() == [0, 0]


@pytest.mark.slow
def test_values_of_unequal_sizes_are_joined_by_jax():
    rows = [np.float32(t + np.arange(2 * n)).reshape(n, 2) for t, n in enumerate(SIZES)]
    strategy = mirrored(3)
    joined = np.concatenate(rows)

    def mean_of(rows):
        own = strategy.unwrap(tj.PerTower(rows))
        return jnp.concatenate(own).mean(0)

    np.testing.assert_allclose(mean_of(tuple(rows)), joined.mean(0), rtol=4 * EPS)
    gradients = jax.jit(jax.jacrev(mean_of))(tuple(rows))
    assert [g.shape for g in gradients] == [(2, n, 2) for n in SIZES]
    for gradient in gradients:
        np.testing.assert_allclose(gradient.sum((1, 2)), gradient.shape[1] / 4)


# map


@pytest.mark.slow
def test_map_deals_elements_out_in_turn():
    T = 3
    strategy = mirrored(3)
    out = strategy.map(lambda x, y: {"product": x * y}, np.arange(10), 2)
    rows = [row["product"].tolist() for row in strategy.unwrap(out)]
    assert rows == [[2 * j for j in range(10) if j % T == t] for t in range(T)]
    named = strategy.map(lambda x, *, y: x * y, np.arange(9), y=2)
    assert strategy.reduce(R.SUM, named).tolist() == [6, 24, 42]


def test_map_of_fewer_elements_than_towers():
    strategy = mirrored(4, 2)
    out = strategy.map(lambda x: x + 1, [1, 2, 6])
    assert [row.tolist() for row in strategy.unwrap(out)] == [[2], [3], [7]]
    with pytest.raises(ValueError, match=r"holds values of 3 towers, but the"):
        strategy.reduce(R.SUM, out)


@pytest.mark.slow
def test_a_weighted_mean_of_towers_of_equal_weight():
    strategy = mirrored(T, D)
    rows = np.arange(4.0 * T, dtype=np.float32).reshape(T, 4) ** 2
    losses = strategy.call_for_each_tower(
        lambda tower, x: tj.Weighted.mean(x), tj.PerTower(rows)
    )
    assert not isinstance(losses.weight, tj.PerTower)  # 4 on every tower, by proof
    for reduction in (R.SUM, R.MEAN):
        total = strategy.reduce(reduction, losses)
        np.testing.assert_allclose(total.value, rows.mean(), rtol=4 * T * EPS)
    assert float(strategy.reduce(R.SUM, losses).weight) == 4 * T


@pytest.mark.parametrize("kind", ["masked", "text", "wide", "swapped"])
def test_what_no_device_holds_is_refused_wherever_it_is_given(kind):
    strategy = mirrored(2)
    v = tj.towers.MirroredVar(np.zeros(2, np.float32))
    x = {
        "masked": np.ma.array([1.0, 2.0], mask=[0, 1]),
        "text": np.array(["a", "b"]),
        "wide": np.array([1, 2**40]),
        "swapped": np.array([1, 2], ">f4"),
    }[kind]
    ways = [
        lambda: strategy.call_for_each_tower(lambda tower, x: x, x),
        lambda: strategy.reduce(R.ONLY_FIRST_TOWER, tj.PerTower((x, x))),
        lambda: strategy.reduce(R.MEAN, tj.PerTower((x, x))),
        lambda: strategy.assign(v, x).value,
        lambda: strategy.update(v, lambda _, x: jnp.asarray(x), x).value,
        lambda: strategy.create_var("v", x).value,
    ]
    for way in ways:
        if kind == "swapped":
            assert np.asarray(way()).tolist() == [1, 2]
        else:
            with pytest.raises(ValueError, match="can hold only arrays of numbers"):
                way()
