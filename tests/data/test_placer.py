"""Batches of a kind that was seen before: checked and placed as the first one was."""

import functools

import guards
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl

import towerjax as tj


def build(devices=2, **options):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(devices)], towers=4)

    def loss_fn(w, batch, tower):
        x = batch["x"].astype(jnp.float32)
        return tj.Weighted.mean((w - x) ** 2, tower.weight)

    return tj.build_train_step(loss_fn, optax.sgd(0.5), strategy, **options)


@functools.cache
def known(devices):
    """A step that is compiled for `rows`."""
    step = build(devices)
    step(step.init(np.float32(0)), rows())
    return step


def rows(size=8, seed=0, dtype=np.float32):
    return {"x": np.random.default_rng(seed).integers(0, 100, size).astype(dtype)}


def as_placed(batch):
    return np.asarray(batch.arrays["x"]), batch.counts.tolist(), batch.num_examples


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_next_of_a_kind_has_its_own_values(devices):
    step = build(devices)
    first = step.place_batch(rows(seed=1))
    for seed in (2, 3):
        batch = rows(seed=seed)
        for given in (
            batch,
            jax.tree.map(jnp.asarray, batch),
            {"x": first.arrays["x"]},
        ):
            placed = step.place_batch(given)
            np.testing.assert_array_equal(placed.arrays["x"], np.asarray(given["x"]))
            assert placed.signature is first.signature
            assert as_placed(placed)[1:] == as_placed(first)[1:]
    assert step.place_batch({"x": first.arrays["x"]}).arrays["x"] is first.arrays["x"]


def aligned(count, dtype):
    """An array of which XLA:CPU would share the memory, without a copy."""
    room = np.zeros(8 * count + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + count * np.dtype(dtype).itemsize].view(dtype)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("count", [0, 8, 2**16, 2**19])
def test_a_buffer_that_is_written_again_changes_no_batch(devices, count):
    step = build(devices)
    x = aligned(count, np.float32).reshape(8, -1)
    placed = []
    for number in range(3):
        x[:] = number
        placed.append(step.place_batch({"x": x}))
    for number, one in enumerate(placed):
        assert (np.asarray(one.arrays["x"]) == number).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, dtype", [(1, np.float32), (2, np.float32), (1, np.int64), (2, bool)]
)
def test_a_call_takes_host_rows_as_they_are_when_it_is_made(devices, dtype):
    """Their copies travel with the call; a large aligned array would be shared."""
    step = build(devices)
    x = aligned(2**18, dtype)
    for value in (1, 0, 1):
        x[:] = value
        state = step.init(np.float32(3.0))
        state, metrics = step(state, {"x": x})
        x[:] = 1 - value
        assert float(metrics["loss"]) == (3 - value) ** 2


@pytest.mark.slow
def test_where_rows_lie_is_looked_at_each_time():
    """Rows on the step's devices are handed on; those of one device are not."""
    step = known(2)
    right = step.place_batch(rows()).arrays["x"].sharding
    state = step.init(np.float32(3.0))
    w = 3.0
    for seed in range(3):
        for where in (right, *jax.devices()[::5]):
            x = rows(seed=seed)["x"]
            state, metrics = step(state, {"x": jax.device_put(x, where)})
            assert float(metrics["loss"]) == pytest.approx(np.mean((w - x) ** 2))
            w = float(state.params)


def test_values_are_looked_at_each_time():
    step = build()
    good = rows(dtype=np.int64)
    step.place_batch(good)
    wide = {"x": good["x"] + 2**40}
    with pytest.raises(ValueError, match=r"batch\['x'\] .* holds .* would wrap"):
        step.place_batch(wide)
    gone = jax.tree.map(jnp.asarray, rows())
    step.place_batch(gone)
    gone["x"].delete()
    with pytest.raises(ValueError, match=r"batch\['x'\] is .* donated and deleted"):
        step.place_batch(gone)


def test_the_first_batch_of_a_kind_is_not_kept_alive():
    step = build()
    first = step.place_batch(rows())
    step.place_batch(rows())
    alive = len(jax.live_arrays())
    del first
    assert len(jax.live_arrays()) == alive - 1


@pytest.mark.slow
def test_batches_are_placed_where_a_guard_refuses_transfers_that_nobody_asked_for():
    step = build()
    with jax.transfer_guard("disallow"):
        state = step.init(0.0)
        for seed in range(2):
            state, _ = step(state, step.place_batch(rows(seed=seed)))
        for remainder in ("pad", "drop"):
            other = build(remainder=remainder)
            state, _ = other(state, jax.device_put(rows(13)))
        state, _ = tj.run(step, state, [rows()] * 2, progress=False)
        predict = tj.build_predict_step(lambda w, x, tower: x["x"], step.strategy)
        found = predict(state.params, rows(5))
    np.testing.assert_array_equal(found, rows(5)["x"])


@pytest.mark.slow
def test_what_a_run_reads_of_its_state_is_asked_for(monkeypatch, tmp_path):
    read = ArrayImpl._value.fget
    refused = []

    def value(array):
        refused.extend([] if guards.asked_for() else [array.shape])
        return read(array)

    step = build(1)
    state = step.init(np.float32(0))
    evaluate = tj.build_eval_step(
        lambda w, batch, tower: {"x": tj.Weighted.mean(w - batch["x"], tower.weight)},
        step.strategy,
    )
    options = {"evaluate": evaluate, "eval_batches": [rows()], "eval_every": 2}
    saves = tj.Checkpointer(tmp_path, every=2)
    monkeypatch.setattr(ArrayImpl, "_value", property(value))
    for steps in (2, 4):
        tj.run(step, state, [rows()] * 4, steps=steps, checkpointer=saves, **options)
        state = step.init(np.float32(0))
    assert not refused


def test_no_state_is_told_of_another_and_each_is_told_once():
    """Two trainings of one step; the second's batch is at fault."""
    step = build(on_nonfinite="raise")
    states = [step.init(np.float32(0)) for _ in range(2)]
    for _ in range(2):
        states[0], _ = step(states[0], rows())
    states[1], metrics = step(states[1], {"x": rows()["x"] * np.float32(np.nan)})
    jax.block_until_ready((states, metrics))
    kept = states[1].replace(rng=states[1].rng)
    states[0], _ = step(states[0], rows())  # which has nothing to do with it
    with pytest.raises(tj.NonFiniteError, match="of step 1 "):
        step(kept, rows())
    states[1], _ = step(kept, rows())
    step.settle()
    assert [int(state.step) for state in states] == [3, 2]


@pytest.mark.slow
def test_a_mesh_that_the_program_has_set_is_told_of():
    step = build()
    state = step.init(np.float32(0))
    fn = tj.tf1.with_verbs(step.strategy).call_for_each_tower
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    known(2)  # not in the mesh
    with jax.set_mesh(mesh):
        for call in (
            lambda: step.init(np.float32(0)),
            lambda: step(state, rows()),
            lambda: known(2)(state, rows()),
            lambda: fn(lambda tower: tower.id),
        ):
            with pytest.raises(ValueError, match=r"set a mesh of axes \('x',\), but"):
                call()


@pytest.mark.slow
def test_without_jit_a_step_says_what_to_write():
    for step in build(), known(2):
        state = step.init(np.float32(0))
        with jax.disable_jit(), pytest.raises(ValueError, match=r"set, .*breakpoint"):
            step(state, rows())


@pytest.mark.slow
@pytest.mark.parametrize("state", ["mirrored", "sharded"])
def test_parameters_that_lie_right_are_not_copied_for_an_evaluation(state):
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(4)], towers=4, state=state)

    def metric_fn(w, batch, tower):
        return {"mean": tj.Weighted.mean(w[0] * batch["x"], tower.weight)}

    evaluate = tj.build_eval_step(metric_fn, strategy)
    train = tj.build_train_step(
        lambda *a: metric_fn(*a)["mean"], optax.sgd(0), strategy
    )
    host = np.arange(8, dtype=np.float32) + 1
    params = train.init(host).params
    assert evaluate.place(params).params is params
    for given in (params, host, params, jnp.asarray(host)):
        found = evaluate(given, rows())["mean"].value
        np.testing.assert_allclose(found, rows()["x"].mean(), rtol=1e-6)
    host[:] = 0
    np.testing.assert_array_equal(params, np.arange(8) + 1)
