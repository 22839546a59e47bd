"""A process that leaves its job alone: the job says who, and ends."""

import re
import sys
import time

import pytest

import towerjax as tj

JOB = """
import sys, time
from sys import exit as early_exit
import numpy as np, optax, towerjax as tj

me = tj.cluster.initialize().process_id


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch) ** 2, tower.weight)


step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored())
state = step.init(np.float32(0))


def steps(number):
    global state
    for _ in range(number):
        state, metrics = step(state, np.ones(4, np.float32))
"""


def job(program, **options):
    """Run a job of two processes; return its exit code, and how long it took."""
    began = time.monotonic()
    command = [sys.executable, "-c", JOB + program]
    code = tj.cluster.launch(command, processes=2, devices_per_process=1, **options)
    return code, time.monotonic() - began


SOON = """
from towerjax.mesh.cluster import leaving
leaving._SILENCE_S = 0.5
leaving._PATIENCE_S = 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "who, program",
    [
        (1, "steps(3)\nif me == 1: sys.exit(0)\nsteps(5)"),
        (1, SOON + "steps(3)\nif me == 1: early_exit(3)\nsteps(5)"),
        (0, SOON + "steps(3)\nif me == 0: raise SystemExit(1)\nsteps(5)"),
        # a loop that ends two steps early
        (0, SOON + "steps(5 - 2 * (me == 0))"),
    ],
    ids=["sys.exit", "exit", "SystemExit", "short loop"],
)
def test_a_process_that_leaves_alone_is_named_and_the_job_ends(who, program, capfd):
    code, _ = job("print('starts', time.time(), flush=True)\n" + program)
    ended = time.time()
    out, err = capfd.readouterr()
    assert code == 1
    assert ended - max(float(x) for x in re.findall(r"starts (\S+)", out)) < 30
    address = r"at 127\.0\.0\.1:\d+,"
    left = f"process {who} of 2, {address} has left the job after 3 steps: its program"
    assert re.search(left, err)
    waits = (
        f"process {1 - who} of 2, {address} ends: it has begun 4 steps, and waits for"
        rf" process {who}, which left the job after 3\."
    )
    assert re.search(waits, err)


@pytest.mark.slow
def test_work_after_the_last_step_may_take_long_in_one_process(capfd):
    code, seconds = job("steps(3)\nif me == 0: time.sleep(16)")
    assert code == 0 and seconds > 16
    assert "process 1 of 2" in (err := capfd.readouterr().err)
    assert "has left the job after 3 steps" in err and " ends: " not in err


@pytest.mark.slow
def test_a_step_timeout_counts_the_steps_of_an_own_loop(capfd):
    code, seconds = job(
        "steps(3)\nif me == 1: time.sleep(300)\nsteps(5)", step_timeout_s=4
    )
    assert code == 137 and seconds < 100
    assert "process 1 began no step for " in capfd.readouterr().err
