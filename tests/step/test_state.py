"""What a step carries over: dtypes, keys, None, places, tower-local variables."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored

import towerjax as tj

PINNED = {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()}


def data(rows=16):
    rng = np.random.default_rng(0)
    return {
        "x": rng.integers(-2, 3, size=(rows, 3)).astype(np.float32),
        "row": np.arange(rows),
        "nested": (np.ones((rows, 2), np.float32), None),
    }


def loss_fn(params, batch, tower):
    out = batch["x"].astype(jnp.bfloat16) @ params["w"]
    local = {
        "key": jax.random.split(tower.local["key"])[0],
        "seen": tower.local["seen"] + batch["row"].shape[0],
        "last": jnp.maximum(tower.local["last"], batch["row"].max()),
    }
    metrics = {"deep/mean": tj.Weighted.mean(out, tower.weight)}
    return tj.TowerOutput(tj.Weighted.mean(out**2, tower.weight), metrics, local)


@pytest.mark.slow
def test_bfloat16_keys_counters_and_none_live_in_a_state():
    labels = {"w": "train", "frozen": "keep", "none": None}
    optimizer = optax.multi_transform(
        {"train": optax.sgd(0.125), "keep": optax.set_to_zero()}, labels
    )
    step = tj.build_train_step(
        loss_fn, optimizer, mirrored(4, 2, **PINNED), micro_batches=2
    )
    zero = np.int32(0)
    none = tj.Reduction.NONE
    params = {
        "w": jnp.ones(3, jnp.bfloat16),
        "frozen": np.ones(2, np.float32),
        "none": None,
    }
    state = step.init(
        params,
        local={
            "key": tj.TowerLocal(jax.random.key(3), none),
            "seen": tj.TowerLocal(zero, tj.Reduction.SUM),
            "last": tj.TowerLocal(zero, none),
        },
    )
    batch = data()
    state, metrics = step(state, batch)
    x = batch["x"].astype(np.float64)
    ones = np.ones(3)
    gradient = (2 * (x @ ones)[:, None] * x).mean(0)
    assert state.params["w"].dtype == jnp.bfloat16
    # One rounding to bfloat16 of the gradient and one of the update.
    moved = 1 - np.asarray(state.params["w"], np.float64)
    np.testing.assert_allclose(moved / 0.125, gradient, rtol=0, atol=2**-4)
    np.testing.assert_array_equal(state.params["frozen"], np.ones(2))
    np.testing.assert_allclose(metrics["loss"], ((x @ ones) ** 2).mean(), rtol=2**-7)
    assert metrics["deep/mean"].shape == ()
    assert int(tj.towers.read_local(state.local["seen"])) == 16
    last = [3, 7, 11, 15]
    np.testing.assert_array_equal(state.local["last"].value, last)
    key = jax.random.split(jax.random.split(jax.random.key(3))[0])[0]
    keys = jax.random.key_data(state.local["key"].value)
    np.testing.assert_array_equal(keys, [jax.random.key_data(key)] * 4)


def test_place_moves_a_state_and_leaves_the_old_one():
    here, there = (
        tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(4, n)) for n in (4, 2)
    )
    local = {
        "key": tj.TowerLocal(jax.random.key(3), tj.Reduction.NONE),
        "seen": tj.TowerLocal(np.int32(1), tj.Reduction.SUM),
        "last": tj.TowerLocal(np.int32(2), tj.Reduction.NONE),
    }
    state = here.init({"w": jnp.ones(3, jnp.bfloat16)}, local=local)
    moved = there.place(state)
    assert there.start(moved) is moved and here.start(state) is state
    assert moved.params["w"].devices() == set(jax.devices()[:2])
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        assert a.dtype == b.dtype and not a.is_deleted()
    assert np.asarray(moved.local["last"].value).tolist() == [2] * 4


def collected(w, batch, tower):
    """What each tower has of its own, with the rows that it has seen."""
    own = {**tower.local, "seen": tower.local["seen"] + tower.weight @ batch}
    return tj.TowerOutput(tj.Weighted.mean((w - batch) ** 2, tower.weight), local=own)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tower_loop": "scan"}, {"state": "sharded"}])
def test_each_tower_may_start_with_its_own_value(options):
    """An array, a tuple, or parts of one variable beside what all towers share."""
    rows = np.arange(4, dtype=np.float32)
    step = tj.build_train_step(collected, optax.sgd(0.1), mirrored(4, 2, **options))
    own = {"by": tj.PerTower(tuple(rows[:, None] + [0, 5])), "all": np.float32(3)}
    local = {
        "own": tj.TowerLocal(own, tj.Reduction.NONE),
        "seen": tj.TowerLocal(tj.PerTower(10 * rows), tj.Reduction.SUM),
    }
    step.check(np.float32(0), jax.ShapeDtypeStruct((8,), jnp.float32), local=local)
    state, _ = step(step.init(np.float32(0), local=local), np.ones(8, np.float32))
    assert state.local["seen"].value.tolist() == [2, 12, 22, 32]
    kept = jax.tree.map(np.asarray, state.local["own"].value)
    assert kept["by"].tolist() == [[0, 5], [1, 6], [2, 7], [3, 8]]
    assert kept["all"].tolist() == [3] * 4


def test_own_values_are_as_many_as_the_towers():
    step = tj.build_train_step(collected, optax.sgd(0.1), mirrored(4, 2))
    for values in (np.zeros((3, 2)), (0.0, 1.0, 2.0)):
        local = tj.TowerLocal(tj.PerTower(values), tj.Reduction.NONE)
        with pytest.raises(ValueError, match="dim 0 runs over the 4 towers"):
            step.init(np.float32(0), local=local)


def mean_square(params, batch, tower):
    return tj.Weighted.mean((params["w"] - batch) ** 2, tower.weight)


RATED = optax.inject_hyperparams(optax.sgd)(learning_rate=0.125)


@functools.cache
def rated(devices):
    return tj.build_train_step(mean_square, RATED, mirrored(2, devices))


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.25, 1, np.float64(0.25), "on another device"])
def test_a_number_of_the_host_goes_into_a_state_at_any_step(rate):
    step = rated(2)
    if isinstance(rate, str):
        rate = jax.device_put(np.float32(0.25), jax.devices()[3])
    batch = np.array([1, 2, 4, 9], np.float32)
    w = 0.0
    for rates in ([rate, None, rate], [None, rate, 0.5, None]):
        state = step.init({"w": np.float32(0)})
        w = 0.0
        now = 0.125
        for new in rates:
            if new is not None:
                state.opt_state.hyperparams["learning_rate"] = new
                now = float(np.asarray(new))
            state, _ = step(state, batch)
            w -= now * 2 * (w - 4)
            assert float(state.params["w"]) == w
            kept = state.opt_state.hyperparams["learning_rate"]
            assert kept.dtype == np.float32 and float(kept) == now
    assert len(step.programs.compiled) == 1


@pytest.mark.slow
def test_a_state_whose_step_number_is_int64_trains_on():
    step = rated.__wrapped__(2)
    with jax.enable_x64(True):
        state = step.init({"w": np.float32(0)})
        state = step.place(state.replace(step=jnp.array(3, jnp.int64)))
        for _ in range(3):
            state, _ = step(state, np.array([1, 2, 4, 9], np.float32))
        step.settle()
    assert int(state.step) == 6


def test_a_number_that_a_state_cannot_hold_is_refused():
    step = rated(2)
    batch = np.array([1, 2, 4, 9], np.float32)
    state = step.init({"w": np.float32(0)})
    for known in (rated.__wrapped__(2), step):  # its first call, and perhaps a later
        with pytest.raises(ValueError, match=r"state\.step is 0\.5, but .* takes int"):
            known(dataclasses.replace(state, step=0.5), batch)
    with pytest.raises(ValueError, match=r"numbers, but state\.step is a str"):
        step(dataclasses.replace(state, step="7"), batch)
    with pytest.raises(ValueError, match=r"state\.params\['w'\] is on the host"):
        step(dataclasses.replace(state, params={"w": np.zeros(1)}), batch)
    rate = state.opt_state.hyperparams["learning_rate"]
    after, _ = step(state, batch)
    with pytest.raises(ValueError, match=r"^state\.opt\S+count, state\.opt.* was don"):
        step(dataclasses.replace(after, opt_state=state.opt_state), batch)
    after.opt_state.hyperparams["learning_rate"] = rate  # donated a step ago
    with pytest.raises(ValueError, match=r"^state\.opt.*rate'\] was donated"):
        step(after, batch)
    after.opt_state.hyperparams["learning_rate"] = 0.25
    after, _ = step(after, batch)
    assert int(after.step) == 2


def test_what_devices_cannot_hold_is_refused_where_a_state_is_made():
    step = rated(2)
    for make, name in itertools.product(
        (step.init, step.shapes), ("opt_state", "extra")
    ):
        with pytest.raises(ValueError, match=rf"{name}\['at'\] is a str"):
            make({"w": np.float32(0)}, **{name: {"at": "text"}})
    given = dict.fromkeys(("opt_state", "extra"), jax.ShapeDtypeStruct((3,), np.int8))
    shapes = step.shapes({"w": np.float32(0)}, **given)
    assert {name: getattr(shapes, name) for name in given} == given


def test_a_state_is_replaced_as_in_flax():
    state = tj.TrainState.create({"w": 1.0}, optax.sgd(0.1))
    after = state.replace(params={"w": 2.0}, extra=3)
    assert (after.params, after.extra) == ({"w": 2.0}, 3)
    assert after.opt_state is state.opt_state and state.extra is None
    with pytest.raises(TypeError, match="'weights'"):
        state.replace(weights=1)


@pytest.mark.slow
def test_steps_and_a_donated_state_say_what_they_are():
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)

    step = tj.build_train_step(
        loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2), remainder="pad"
    )
    assert repr(step) == "Step(Mirrored(towers=2), StepOptions(remainder='pad'))"
    evaluates = repr(tj.build_eval_step(loss_fn, tj.Mirrored(towers=2)))
    assert "on_nonfinite='ignore', donate=False, max_programs=None" in evaluates
    state = step.init({"w": np.ones((2, 3), np.float32)[0, 0]})
    assert "Shaped" not in repr(state) and "w': Array(1., dtype=float32" in repr(state)
    step(state, {"x": np.ones(4, np.float32)})
    text = repr(state)
    assert text.startswith("TrainState(step=Array(0, dtype=int32")
    assert "params={'w': ShapedArray(float32[])}" in text
    assert "rng=Array(()" in text  # kept
    assert f"{state}" == "TrainState(step=0: 3 leaves, 16 B; 12 B on each device)"


@pytest.mark.slow
def test_an_evaluation_reads_variables_that_are_no_dict():
    def metric_fn(params, batch, tower):
        (scale,) = tower.local
        return {"mean": tj.Weighted.mean(scale * params * batch, tower.weight)}

    strategy = tj.Mirrored(towers=2)
    scales = tj.PerTower(values=jnp.array([1.0, 3.0]))
    local = [tj.TowerLocal(scales, tj.Reduction.MEAN)]

    def loss_fn(params, batch, tower):
        return metric_fn(params, batch, tower)["mean"]

    train = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    state = train.init(jnp.float32(2), local=local)
    step = tj.build_eval_step(metric_fn, strategy)
    found = step(state, np.array([1, 2, 3, 4], np.float32))["mean"]
    assert float(found.value) == 2 * 2 * 2.5  # by the mean of the variable
