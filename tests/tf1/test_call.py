"""Towers called inside jit, grad, vmap and scan; traced once; nested in a merge."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from layouts import with_verbs as mirrored

import towerjax as tj
from towerjax.tf1.call import Constant

R = tj.Reduction
EPS = np.finfo(np.float32).eps
EXECUTORS = pytest.mark.parametrize(
    "T, D, executor", [(4, 2, "shard_map"), (2, 2, "pmap")]
)
ROWS = np.float32([1.5, -0.25, 3.0, 0.75])
EXACT = ROWS.astype(np.float64)
C = np.array([2.0, -1.0, 0.5, 4.0])


def tower_fn(tower, x, w, c):
    """A mirrored value and one of the tower's own, by each way to meet."""
    total = tower.reduce(R.SUM, x**2 * w)
    merged = tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)), w * x)
    gathered = tower.all_gather(x * w)
    return {"total": total * merged, "own": c * gathered[::-1].sum() * x, "word": "w"}


def whole(strategy, x, w):
    T = strategy.num_towers
    c = tj.PerTower(np.float32(C[:T]))
    out = strategy.call_for_each_tower(tower_fn, tj.PerTower(x), w, c)
    assert out["word"] == "w"
    return out["total"] + out["own"].values.sum()


def oracle(T, w):
    """The value and its gradients by x and by w, in float64."""
    x = EXACT[:T]
    c = C[:T]
    squares = (x**2).sum()
    s = x.sum()
    value = w**2 * squares * s + w * s * (c * x).sum()
    of_x = w**2 * (2 * x * s + squares) + w * ((c * x).sum() + s * c)
    of_w = 2 * w * squares * s + s * (c * x).sum()
    return value, of_x, of_w


@pytest.mark.slow
@EXECUTORS
def test_called_inside_transformations(T, D, executor):
    strategy = mirrored(T, D, executor=executor)
    f = functools.partial(whole, strategy)
    x = jnp.asarray(ROWS[:T])
    w = jnp.float32(0.7)
    value, of_x, of_w = oracle(T, 0.7)
    close = functools.partial(np.testing.assert_allclose, rtol=32 * EPS)
    ws = np.float32([0.7, -0.4, 1.2])
    many = np.stack([x, x, x])  # a batch that the devices do not divide

    @jax.jit
    def in_one(x, w, ws, many):
        def body(total, w):
            found = f(x, w)
            return total + found, found

        return (
            jax.value_and_grad(f, argnums=(0, 1))(x, w),
            jax.vmap(f, in_axes=(None, 0))(x, ws),
            jax.vmap(f, in_axes=(0, None))(many, w),
            lax.scan(body, jnp.float32(0), ws),
        )

    (again, gradients), of_ws, of_many, scanned = in_one(x, w, ws, many)
    close(again, value)
    close(gradients[0], of_x, atol=32 * EPS * np.abs(of_x).max())
    close(gradients[1], of_w)
    values = [oracle(T, float(w))[0] for w in ws]
    close(of_ws, values, atol=1e-6)
    close(of_many, [value] * 3, atol=1e-6)
    close(scanned[0], sum(values), atol=1e-5)
    close(scanned[1], values, atol=1e-6)


@pytest.mark.slow
def test_gradients_of_towers_in_turn():
    strategy = mirrored(4, 2, tower_loop="scan")

    def loss(w):
        out = strategy.call_for_each_tower(
            lambda tower, x, w: jnp.sin(w * x), tj.PerTower(ROWS), w
        )
        return strategy.reduce(R.MEAN, out)

    value, gradient = jax.jit(jax.value_and_grad(loss))(0.7)
    np.testing.assert_allclose(value, np.sin(0.7 * EXACT).mean(), rtol=8 * EPS)
    expected = (np.cos(0.7 * EXACT) * EXACT).mean()
    np.testing.assert_allclose(gradient, expected, rtol=8 * EPS)


@pytest.mark.slow
def test_values_of_the_grad_around_it_may_be_closed_over():
    strategy = mirrored(4, 2)
    x = tj.PerTower(ROWS)

    def loss(w):
        def closes_over_w(tower, x):
            return tower.reduce(R.MEAN, x**2) * w, x * w

        mean, own = strategy.call_for_each_tower(closes_over_w, x)
        assert isinstance(own, tj.PerTower) and not isinstance(mean, tj.PerTower)
        return mean + own.values.sum()

    slope = (EXACT**2).mean() + EXACT.sum()
    value, gradient = jax.value_and_grad(loss)(2.0)
    np.testing.assert_allclose(value, 2 * slope, rtol=8 * EPS)
    np.testing.assert_allclose(gradient, slope, rtol=8 * EPS)


@pytest.mark.parametrize("num_rows, num_shared", [(3, 0), (0, 2)])
def test_pmap_hands_out_rows_whatever_the_number_of_arguments(num_rows, num_shared):
    strategy = tj.tf1.MirroredStrategy([f"cpu:{i}" for i in range(4)], executor="pmap")
    rows = [tj.PerTower(np.arange(4.0) + 10 * i) for i in range(num_rows)]
    shared = [np.arange(2.0) - i for i in range(num_shared)]
    out = strategy.call_for_each_tower(
        lambda tower, rows, shared: (tower.id, rows, shared[1:]), rows, [None, *shared]
    )
    ids, own, same = out
    assert ids.values.tolist() == [0, 1, 2, 3]
    assert [x.values.tolist() for x in own] == [x.values.tolist() for x in rows]
    assert [x.tolist() for x in same] == [x.tolist() for x in shared]


def test_pmap_refuses_what_it_would_get_wrong():
    strategy = mirrored(2, 2, executor="pmap")

    def f(w):
        return strategy.call_for_each_tower(lambda tower: w * tower.id)

    text = "closes over a value of the jit, grad or scan around it, which executor='pm"
    for use in (jax.jit(f), jax.grad(lambda w: f(w).values.sum())):
        with pytest.raises(ValueError, match=text):
            use(1.0)
    constants = jnp.float32([4, 5])  # a value of its own is no trap
    out = strategy.call_for_each_tower(lambda tower: constants * (tower.id + 1))
    assert out.values.tolist() == [[4, 5], [8, 10]]


# Compiled once.


@pytest.mark.slow
@EXECUTORS
def test_called_again_it_is_not_traced_again(T, D, executor):
    strategy = mirrored(T, D, executor=executor)
    traces = []

    def counted(tower, x, w, word, options):
        traces.append(word)
        return x * w + tower.id, [word], options["n"]

    for i in range(10):
        rows = tj.PerTower(ROWS[:T] * (i + 1))
        again = mirrored(T, D, executor=executor)
        out = again.call_for_each_tower(
            counted, rows, np.float32(i), "a", options={"n": 3}
        )
        if i == 0:
            first = len(traces)
        expected = ROWS[:T] * (i + 1) * i + np.arange(T)
        np.testing.assert_allclose(out[0].values, expected, rtol=4 * EPS)
        assert out[1:] == (["a"], 3)
    assert len(traces) == first == 1  # what is proved is what is compiled
    strategy.call_for_each_tower(counted, rows, 1.0, "b", options={"n": 3})
    assert traces[-1] == "b"


def test_unhashable_results_that_are_no_arrays_come_back():
    value = {1, 2}
    for _ in range(2):
        out = mirrored(2).call_for_each_tower(lambda tower: (value, tower.id, [None]))
        assert out[0] is value and out[2] == [None]


def test_results_lie_on_the_strategys_devices():
    strategy = tj.tf1.MirroredStrategy(devices=("cpu:5", "cpu:3"), towers=4)
    own, same = strategy.call_for_each_tower(lambda tower: (tower.id, jnp.ones(2)))
    five = jax.devices("cpu")[5]
    three = jax.devices("cpu")[3]
    assert own.values.devices() == same.devices() == {five, three}
    assert {s.device: s.data.tolist() for s in own.values.addressable_shards} == {
        five: [0, 1],
        three: [2, 3],
    }
    assert same.sharding.is_fully_replicated
    one = tj.tf1.OneDeviceStrategy("cpu:6")
    alone = one.call_for_each_tower(lambda tower, x: x + 1, np.ones(2))
    assert alone.devices() == {jax.devices("cpu")[6]}


def test_run_concurrently_changes_nothing():
    def fn(tower, x, **named):
        assert not named
        return x + tower.id

    strategy = mirrored(2)
    outs = [
        strategy.call_for_each_tower(fn, 1.0, run_concurrently=flag).values.tolist()
        for flag in (True, False)
    ]
    assert outs == [[1, 2], [1, 2]]


# Towers called by towers that have met.


@pytest.mark.slow
@EXECUTORS
def test_towers_are_called_in_a_merge(T, D, executor):
    def inner(tower, x, scale):
        return scale * x + tower.reduce(R.SUM, x) * tower.id, tower.reduce(R.MEAN, x)

    def merge_fn(strategy, v):
        own, mean = strategy.call_for_each_tower(inner, v, 10.0)
        assert not isinstance(mean, tj.PerTower)
        return own, mean, strategy.reduce(R.SUM, own)

    def outer(tower, x):
        def loss(x):
            own, mean, total = tower.merge_call(merge_fn, x)
            return own + mean, (own, mean, total)

        gradient, out = jax.grad(loss, has_aux=True)(x)
        return (*out, gradient)

    x = EXACT[:T]
    t = np.arange(T)
    strategy = mirrored(T, D, executor=executor)
    found = strategy.call_for_each_tower(outer, tj.PerTower(ROWS[:T]))
    own, mean, total, gradient = found
    expected = 10 * x + x.sum() * t
    close = functools.partial(np.testing.assert_allclose, rtol=16 * EPS)
    close(own.values, expected, atol=1e-6)
    close(mean, x.mean())
    close(total, expected.sum())
    gradients = gradient.values if isinstance(gradient, tj.PerTower) else [gradient] * T
    # Of all towers' losses: 10 x_t, the sum in each tower's, and T times the mean.
    close(gradients, [10 + t.sum() + 1] * T)


def test_all_gather_of_vectors_is_differentiable():
    """`L_t = sum_jk c_tjk x_jk^2`: of all losses by `x_jk`: `2 x_jk sum_t c_tjk`."""
    T = 4
    rng = np.random.default_rng(0)
    x = rng.normal(size=(T, 3))
    c = rng.normal(size=(T, T, 3))

    def tower_fn(tower, x, c):
        return jax.grad(lambda x: (tower.all_gather(x) ** 2 * c).sum())(x)

    out = mirrored(T, 2).call_for_each_tower(
        tower_fn, tj.PerTower(np.float32(x)), tj.PerTower(np.float32(c))
    )
    expected = 2 * x * c.sum(axis=0)
    np.testing.assert_allclose(out.values, expected, rtol=16 * EPS, atol=16 * EPS)


def test_a_total_is_differentiated_in_a_tower_by_its_share():
    """Of `w sum_tj x_tj^2` by a tower's own `x`: `2 w x`; by `w` the tower's part."""
    x = np.random.default_rng(0).normal(size=(4, 3))

    def tower_fn(tower, x):
        def share(x, w):
            return tower.reduce(R.SUM, w * (x**2).sum()) / tower.num_towers

        by_x, by_w = jax.grad(share, argnums=(0, 1))(x, 3.0)
        return by_x, tower.reduce(R.SUM, by_w)

    by_x, by_w = mirrored(4, 2).call_for_each_tower(
        tower_fn, tj.PerTower(np.float32(x))
    )
    np.testing.assert_allclose(by_x.values, 6 * x, rtol=16 * EPS)
    np.testing.assert_allclose(by_w, (x**2).sum(), rtol=16 * EPS)


def branch(tower):
    return 1.0 if tower.id == 0 else 2.0


def of_a_step(strategy):
    def loss_fn(w, batch, tower):
        return tj.Weighted.mean(w * batch * branch(tower))

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    return step(step.init(jnp.float32(1)), np.ones(2, np.float32))


def of_a_prediction(strategy):
    predict = tj.build_predict_step(lambda w, b, tower: b * branch(tower), strategy)
    return predict(jnp.float32(1), np.ones(2, np.float32))


def in_towers(use):
    return lambda strategy: strategy.call_for_each_tower(use)


MEAN = tj.Weighted.mean(jnp.ones(2))
# fmt: off
# Uses that JAX refuses, by its error, and what a note says besides.
EXPLAINED = {
    (jax.errors.TracerBoolConversionError,
        "Write jnp.where or lax.cond; to see values, jax.debug.print"):
        [in_towers(branch), of_a_step, of_a_prediction],
    ((TypeError, IndexError),
        r"tower.id, the batch and.*write jnp.asarray\(values\)\[tower.id\]"): [
        in_towers(lambda tower, use=use: use(tower.id)) for use in (range,
            [5.0, 3.0].__getitem__, np.asarray, lambda id: jnp.ones(2)[id[None] > 0])],
    (TypeError, r"tj.value_and_grad\(loss_fn\)"): [
        in_towers(lambda tower: jnp.sqrt(MEAN)),
        in_towers(lambda tower: jax.grad(lambda _: MEAN)(1.0))],
    (NameError, r"tj.Mirrored\(axis_name='batch'\).*tower.reduce\("):
        [in_towers(lambda tower: lax.psum(1.0, "batch"))],
}
# fmt: on
USES = [(*told, use) for told, uses in EXPLAINED.items() for use in uses]


@pytest.mark.parametrize("error, text, use", USES)
def test_what_jax_refuses_is_explained_wherever_it_stands(error, text, use):
    with pytest.raises(error) as caught:
        use(tj.tf1.MirroredStrategy(devices=("cpu:0",), towers=2))
    assert re.search(text, " ".join(caught.value.__notes__))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_axis_of_all_towers_has_the_name_that_it_is_given(devices):
    strategy = mirrored(4, devices, axis_name="batch")
    out = strategy.call_for_each_tower(lambda tower: jax.lax.psum(tower.id, "batch"))
    assert int(out) == 6


def counted(tower, x):
    return tower.reduce(R.SUM, 1.0), 3 * tower.reduce(R.SUM, x / tower.num_towers)


def test_a_sum_of_what_all_towers_share_is_refused():
    strategy = mirrored(2, 2)
    x = np.float32(-2)
    for fn in (lambda tower, x: 2 * x, lambda tower, x: jnp.float32(-4)):
        out = strategy.call_for_each_tower(fn, x)
        assert float(out) == -4  # one value and no PerTower, by proof
        with pytest.raises(ValueError, match="SUM of -4.0, which is the same on all 2"):
            strategy.reduce(R.SUM, out)
    for given in (x, 1.0, np.float32(1)):

        def assigned(tower, _, x=given):
            return tower.assign_add(tj.towers.MirroredVar(x, R.SUM), x)

        def merged(tower, _, x=given):
            return tower.merge_call(lambda s: s.reduce(R.SUM, x))

        with pytest.raises(ValueError, match="cannot be reduced|the same on all 2"):
            strategy.call_for_each_tower(assigned, x)
        with pytest.raises(ValueError, match="SUM of .* the same on all 2 towers"):
            strategy.call_for_each_tower(merged, x)
    assert [*map(float, strategy.call_for_each_tower(counted, x))] == [2, -6]


def test_what_is_equal_by_chance_is_a_value_a_tower():
    strategy = mirrored(2)
    rows = tj.PerTower(np.float32([[1, 2], [3, 0]]))
    out = strategy.call_for_each_tower(
        lambda tower, x: (x.sum(), tower.reduce(R.SUM, x.sum())), rows
    )
    assert out[0].values.tolist() == [3, 3] and float(out[1]) == 6
    assert float(strategy.reduce(R.SUM, out[0])) == 6


@dataclasses.dataclass(frozen=True)
class Factor:
    n: object


class Model:
    w = 3


def test_constants_are_one_by_hash_and_equality_as_under_jit():
    numbers = [1, True, 1.0, 0.0, -0.0, "1", 0, False, 1 + 0j, b"1", np.int64(1)]
    constants = [jnp.tanh, jax.jit(jnp.sin), jax.nn.relu, np.add, abs, Model, np, len]
    constants += ["word", 2, 2.5, Factor(2), Factor((1, "a")), object(), ..., None]
    constants += [functools.partial(jnp.sum, axis=0), R.SUM, jnp.dtype("int32")]
    constants += [mirrored(2), jax.devices()[0], frozenset({1, 2}), {1, 3}, Model()]
    constants += [float("nan"), *numbers]
    keys = [Constant(x) for x in constants]
    for x, key in zip(constants, keys, strict=True):
        assert Constant(x) == key and hash(Constant(x)) == hash(key), x
    assert len(set(keys)) == len(keys)
    used = mirrored(2)
    fresh = mirrored(2)
    assert used.placement.mesh.size and Constant(used) == Constant(fresh)
    for x in (types.SimpleNamespace(n=3), Factor([1])):  # without a hash
        assert Constant(x) != Constant(x)


def test_what_has_no_hash_is_traced_in_each_call():
    strategy = mirrored(2)
    seen = []

    def tower_fn(tower, model, kinds):
        seen.append(model.n)
        return kinds

    for n in (3, 3, 10):
        model = types.SimpleNamespace(n=n)
        assert strategy.call_for_each_tower(tower_fn, model, {1}) == {1}
    assert set(seen) == {3, 10} and seen.count(3) == 2 * seen.count(10)


@pytest.mark.slow
def test_towers_may_meet_in_a_branch_that_all_take():
    def tower_fn(tower, x):
        total = tower.merge_call(lambda strategy, v: sum(strategy.unwrap(v)), tower.id)
        return jax.lax.cond(
            total + x > 6,
            lambda: tower.reduce(tj.Reduction.SUM, tower.id),
            lambda: jnp.int32(-1),
        )

    for x, expected in ((0, -1), (1, 6)):
        assert int(mirrored(4, 4).call_for_each_tower(tower_fn, x)) == expected
