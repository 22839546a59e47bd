"""Several real processes train what one process trains, to the bit where promised."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
WORKER = str(ROOT / "tests" / "workers" / "train.py")


def run(argv, devices=1, timeout=120):
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    done = subprocess.run(
        argv, env=env, capture_output=True, encoding="utf-8", timeout=timeout, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(processes, devices, **options):
    """The run's result, as each process told it; ``devices`` of each."""
    argv = [sys.executable, WORKER, json.dumps(options)]
    if processes > 1:
        launch = [sys.executable, "-m", "towerjax", "launch"]
        launch += ["--processes", str(processes), "--devices-per-process", str(devices)]
        argv = [*launch, "--", *argv]
    lines = re.findall(r"^(?:\[\d+\] )?(\{.*\})$", run(argv, devices), re.M)
    results = sorted(map(json.loads, lines), key=lambda result: result["process"])
    assert [result["process"] for result in results] == list(range(processes))
    assert all(result["processes"] == processes for result in results)
    return results


def without_its_place(result):
    places = ("process", "processes", "devices", "should_checkpoint", "between_graph")
    return {name: value for name, value in result.items() if name not in places}


def assert_same_bits(results, expected):
    for result in results:
        assert without_its_place(result) == without_its_place(expected)


@pytest.fixture(scope="module")
def one_process():
    (result,) = train(1, 8)
    assert (result["steps"], result["examples"], result["seen"]) == (15, 303, 303.0)
    assert result["loss"][-1] < 0.5 * result["loss"][0]
    return result


def test_two_processes_train_to_the_bits_of_one(one_process):
    results = train(2, 4)
    assert_same_bits(results, one_process)
    assert [result["devices"] for result in results] == [8, 8]
    assert [result["should_checkpoint"] for result in results] == [True, False]
    assert all(result["between_graph"] for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_virtual_towers_train_to_the_same_bits(one_process, devices):
    assert_same_bits(train(1, devices), one_process)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_four_processes_train_to_the_bits_of_one(one_process, devices):
    assert_same_bits(train(4, devices), one_process)


@pytest.mark.slow
@pytest.mark.parametrize("fed", ["own", "raw"])
def test_input_of_its_own_or_of_all_is_the_same_training(one_process, fed):
    assert_same_bits(train(2, 2, input=fed), one_process)


@pytest.mark.slow
def test_several_steps_a_program_and_micro_batches(one_process):
    options = {"steps_per_call": 4, "micro_batches": 3}
    (alone,) = train(1, 4, **options)
    assert alone["bits"] != one_process["bits"]  # dropout is of each micro-batch
    for fed in ("global", "own"):
        assert_same_bits(train(2, 2, input=fed, **options), alone)


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["AllReduce", "PinnedTree"])
def test_one_tower_is_the_same_run_up_to_rounding(ops):
    """1 tower; 8 towers on 1 device, on 8, and on 2 processes of 4 devices."""
    (one_tower,) = train(1, 1, towers=1, dropout=0.0, local="vmap", ops=ops)
    runs = [train(1, 1, dropout=0.0, ops=ops), train(1, 8, dropout=0.0, ops=ops)]
    runs.append(train(2, 4, dropout=0.0, ops=ops))
    for result in [result for run in runs for result in run]:
        for name in ("loss", "mae", "params"):
            # 15 Adam steps amplify some roundings of 24 examples' sums.
            np.testing.assert_allclose(
                result[name], one_tower[name], rtol=2e-4, atol=2e-5
            )
