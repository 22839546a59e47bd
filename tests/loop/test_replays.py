"""A run that replays steps: what it raises, when, and what it has saved by then."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored, rows

import towerjax as tj


def loss_fn(params, batch, tower):
    """A device whose copy of ``batch["wrong"]`` is 1 computes its last bits wrongly."""
    losses = (batch["x"] @ params - 1) ** 2
    off = jnp.where(batch["wrong"] == 1, jnp.float32(1 + 1e-6), 1)
    return tj.Weighted.mean(losses * off, tower.weight)


def begun(devices=4, **options):
    step = tj.build_train_step(
        loss_fn, optax.sgd(0.01), mirrored(4, devices), **options
    )
    return step, step.init(rows(3))


def batches_of(step, number, wrong_from=99, device=2):
    """Placed batches; from one of them on, a device's own copy of a number is 1."""
    cut = []
    for i in range(number):
        batch = {"x": rows(12, 3, seed=i), "wrong": tj.Whole(np.float32(0))}
        placed = step.place_batch(batch)
        if i >= wrong_from:
            replicated = jax.tree.map(lambda x: on_one(x, device), placed.args[2])
            placed = dataclasses.replace(placed, args=(*placed.args[:2], replicated))
        cut.append(placed)
    return cut


def on_one(x, device):
    pieces = [
        jax.device_put(np.asarray(piece.device.id == device, x.dtype), piece.device)
        for piece in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


@pytest.mark.slow
def test_replays_change_no_bits_and_compile_once(compiled):
    step, state = begun()
    cut = batches_of(step, 7)
    alone, history = tj.run(step, state, cut, progress=False)
    step, state = begun()
    compiled.clear()
    tj.run(step, state, cut[:2], replay_every=2, progress=False)
    once = len(compiled)
    step, state = begun()
    compiled.clear()
    again, replayed = tj.run(step, state, cut, replay_every=2, progress=False)
    assert len(compiled) == once
    assert np.array_equal(alone.params, again.params)
    assert np.array_equal(history.metrics["loss"], replayed.metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_stops_before_the_step_with_the_last_good_checkpoint(tmp_path, every):
    """The device is wrong from step 7 on; steps 2, 4 and 6 agreed, and 8 does not."""
    step, state = begun()
    saving = tj.Checkpointer(tmp_path, every=every, keep=9)
    cut = batches_of(step, 10, wrong_from=6)
    with pytest.raises(
        tj.CorruptionError, match="checkpoint is that of step 6"
    ) as found:
        tj.run(step, state, cut, replay_every=2, checkpointer=saving, progress=False)
    error = found.value
    assert error.report.named == ("cpu:2",) and error.report.step == 8
    assert {(x.part, x.leaf) for x in error.report.wrong} >= {("loss", "loss/sum")}
    assert error.checkpoint == 6 and int(error.state.step) == 7
    assert saving.steps == tuple(range(every, 8, every))
    assert len(error.history.steps) == 7


@pytest.mark.slow
def test_a_fault_from_the_start_has_no_good_checkpoint(tmp_path):
    step, state = begun()
    saving = tj.Checkpointer(tmp_path, every=1)
    cut = batches_of(step, 10, wrong_from=0)
    with pytest.raises(tj.CorruptionError, match="No checkpoint is known") as found:
        tj.run(step, state, cut, replay_every=3, checkpointer=saving, progress=False)
    assert found.value.checkpoint is None and saving.steps == (1, 2)


def test_replays_that_cannot_be_are_refused_before_the_first_step():
    step, state = begun(1)
    with pytest.raises(ValueError, match="one device of cpu:0"):
        tj.run(step, state, [], replay_every=1)
    step, state = begun()
    with pytest.raises(ValueError, match="replay_every=0"):
        tj.run(step, state, [], replay_every=0)
    assert not state.params.is_deleted()
