"""A process of a recoverable job is lost, and the others go on with the same bits."""

import json
import os
import re
import sys

import jax
import numpy as np
import optax
import pytest
from checkout import TESTS

import towerjax as tj
from benchmarks import survivors
from benchmarks.survivors import Done, Effect, Strike
from towerjax.contrib import DiLoCo

STEPS = 24


@pytest.fixture
def as_users(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture
def alone(as_users):
    """The digest of one process with one device that nobody killed."""
    return survivors.undisturbed(STEPS)


def told_by(folder, case, code=0):
    """What process 0 of three writes, in a recoverable job."""
    folder.mkdir(exist_ok=True)
    worker = str(TESTS / "workers" / "recoverable.py")
    command = [sys.executable, worker, str(folder), case]
    options = {"processes": 3, "devices_per_process": 1, "recoverable": True}
    assert tj.cluster.launch(command, **options) == code
    return None if code else json.loads((folder / "told").read_text())


@pytest.mark.slow
def test_three_of_four_are_lost_and_the_bits_are_those_of_one_device(alone):
    """`python -m benchmarks.survivors --kills 100` does it a hundred times.

    Two are killed at once while they wait for a collective, and then one compiles.
    """
    strikes = [
        Strike((1, 3), "kill", "collective", 7, 0.0),
        Strike((2,), "kill", "compile", 1, 0.0),
    ]
    job = survivors.struck_job(strikes, STEPS)
    assert job.code == 0 and job.digest == alone and job.lines
    assert {rank for effect in job.effects for rank in effect.ranks} == {1, 2, 3}
    assert all(effect.next.devices < 4 for effect in job.effects)
    assert all(x.next.number == x.step + 1 for x in job.effects[:1])


@pytest.mark.slow
def test_one_that_is_stopped_is_given_up(alone):
    job = survivors.struck_job([Strike((2,), "stop", "any", 9, 0.0)], STEPS)
    assert job.code == 0 and job.digest == alone and job.lines
    assert job.effects[0].next.devices == 3


@pytest.mark.slow
def test_a_function_of_the_context_is_called_again(as_users, tmp_path):
    """Grain's elastic iterator gives the same global batches to any processes.

    Other towers get a row then, so sums are rounded in another way.
    """
    told = told_by(tmp_path / "killed", "elastic")
    undisturbed = told_by(tmp_path / "undisturbed", "elastic")
    assert undisturbed.pop("contexts") == [[0, 3]]
    assert told.pop("contexts") == [[0, 3], [0, 2]]
    assert len(told["loss"]) == 12
    for name in ("loss", "params"):
        # Sums of 3,072 numbers in float32.
        np.testing.assert_allclose(told[name], undisturbed[name], rtol=1e-5)


@pytest.mark.slow
def test_shards_of_a_lost_process_come_from_the_newest_checkpoint(
    as_users, tmp_path, capfd
):
    """The step after step 8 is done again, on other shards, and has the same bits."""
    told = told_by(tmp_path / "killed", "sharded")
    assert "process 2 was lost; goes on from the newest ch" in capfd.readouterr().err
    assert told == told_by(tmp_path / "undisturbed", "sharded")
    lines = (tmp_path / "killed" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 17)]


@pytest.mark.slow
def test_all_save_if_one_is_told_to_end(as_users, tmp_path):
    told_by(tmp_path, "told_to_end", code=75)
    [saved] = tj.Checkpointer(tmp_path / "saved").steps
    assert 5 <= saved < 2000
    steps = told_by(tmp_path, "told_to_end")
    assert steps == [*range(saved + 1, 2001)]


@pytest.mark.slow
def test_an_error_of_one_process_is_raised_on_all(as_users, tmp_path, capfd):
    """The others wait for it in a collective. They do not go on without it."""
    told_by(tmp_path, "fails", code=1)
    told = capfd.readouterr().err
    fish = "PeerFailedError: process 1 failed with ValueError: the loss is a fish"
    for process in (0, 2):
        assert re.search(rf"^\[{process}\] .*{fish}", told, re.MULTILINE)
    assert "was lost; goes on" not in told


@pytest.mark.slow
@pytest.mark.parametrize("extend", [None, DiLoCo(every=2)])
def test_a_moved_step_has_the_bits_of_one_that_was_built_there(extend):
    def loss_fn(params, batch, tower):
        drawn = jax.random.normal(tower.rng, batch.shape)
        return tj.Weighted.mean((params - batch + drawn) ** 2, tower.weight)

    def strategy(*devices):
        ops = tj.PinnedTree()
        options = {"towers": 4, "tower_loop": "scan", "cross_tower_ops": ops}
        return tj.Mirrored(devices, **options)

    def built(strategy):
        options = {"extend": extend, "audit": False}
        return tj.build_train_step(loss_fn, optax.adam(0.1), strategy, **options)

    def bits(step):
        state = step.init(np.float32(1))
        for batch in np.arange(24, dtype=np.float32).reshape(3, 8):
            state, _ = step(state, batch)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(state.opt_state)]

    there = strategy("cpu:4", "cpu:1")
    moved = built(strategy("cpu:0", "cpu:1", "cpu:2", "cpu:3")).on(there)
    assert bits(moved) == bits(built(there))


@pytest.mark.slow
def test_a_run_that_could_not_go_on_is_refused_before_it_begins(as_users, tmp_path):
    told = told_by(tmp_path / "refused", "refused")
    for text, says in zip(
        told,
        (
            "its batches cannot go back. Pass tj.batches",
            "must return Grain's ElasticIterator",
            "a lost process takes its shards with it. Pass a tj.Checkpointer",
            "evaluate is an Evaluation, which cannot be moved",
        ),
        strict=True,
    ):
        assert "this run could not go on without a lost process" in text
        assert says in text


def test_kills_of_one_second_are_one_loss():
    done = [Done(1, 4, 10.0), Done(2, 4, 11.0), Done(3, 4, 12.1)]
    done += [Done(3, 2, 30.0), Done(4, 2, 31.0)]
    kills = [(12.0, 1, "kill", "copy"), (12.2, 3, "kill", "copy")]
    effects = survivors.effects_of(kills, done)
    assert effects == [Effect(12.0, (1, 3), "kill", "copy", 2, done[-1])]


def test_strikes_leave_process_0():
    for seed in range(40):
        strikes = survivors.strikes_of(seed, 9)
        struck = [rank for strike in strikes for rank in strike.ranks]
        assert len(struck) == len({*struck}) and {*struck} <= {1, 2, 3}
    assert len(survivors.strikes_of(0, 1)) == 1
