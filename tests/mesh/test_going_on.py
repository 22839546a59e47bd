"""A job that loses a process goes on in those that are left, and ends as if not."""

import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import sys
import time

import forked
import pytest
from checkout import TESTS

import towerjax as tj
from benchmarks import duel, faults, kills

launch = tj.cluster.launch

STEPS = 40
# Longer than Python takes to start, or a step, where eight others want the processor.
LIMITS = {"stop": {"hang_timeout_s": 15}, "sleep": {"step_timeout_s": 10}}


def moment(seed, folder, fault):
    """The fault of a moment: who, and before which step."""
    draw = random.Random(seed)
    worker = TESTS / "workers" / "fake_training.py"
    words = folder, STEPS, fault, draw.randrange(2), draw.randrange(1, STEPS + 1)
    command = [sys.executable, "-I", "-S", str(worker), *map(str, words)]
    folder.mkdir()
    options = {"grace_s": 0.1, "towers": [2, None][seed % 2], **LIMITS.get(fault, {})}
    return command, {"processes": 2, "restarts": 9, **options}


def assert_as_undisturbed(folder):
    value = "start"
    for number in range(1, STEPS + 1):
        value = hashlib.sha256(f"{number} {value}".encode()).hexdigest()
    assert (folder / "saved").read_text() == f"{STEPS} {value}"
    lines = (folder / "steps").read_text().splitlines()
    steps = [tuple(map(int, line.split())) for line in lines]
    assert (folder / "fault").exists()
    for before, after in itertools.pairwise(steps):
        if after[0] != before[0] + 1:  # it went on from the newest checkpoint
            assert after[0] == after[2] + 1 and before[0] - after[2] <= 5


def in_threads(run, folder, seeds=range(3)):
    with concurrent.futures.ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(lambda seed: run(seed, folder / str(seed)), seeds))


NAMED = {
    "kill": "was killed by signal 9",
    "stop": "gave no sign of life for ",
    "sleep": "began no step for ",
}


@pytest.mark.slow
def test_a_lost_process_is_named_and_the_job_ends_as_undisturbed(tmp_path, capfd):
    """In three ways at three moments each, at once: most of the time they wait."""

    def run(seed, folder):
        fault = [*NAMED][seed // 3]
        command, options = moment(seed % 3, folder, fault)
        assert launch(command, **options) == 0
        assert_as_undisturbed(folder)
        return fault, command[-2]

    lost = in_threads(run, tmp_path, range(9))
    err = capfd.readouterr().err
    for fault, words in NAMED.items():
        named = re.findall(rf"launch: process (\d) {words}", err)
        assert sorted(named) == sorted(who for how, who in lost if how == fault), fault


def alive(folder):
    """The processes that have the folder's name among their arguments."""
    paths = pathlib.Path("/proc").glob("[0-9]*/cmdline")
    return [path for path in paths if str(folder).encode() in read(path)]


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_nobody_and_goes_on_when_started(tmp_path):
    def run(seed, folder):
        command, options = moment(seed, folder, "launcher")
        first = forked.process(launch, command, **options)
        first.start()
        first.join(60)
        assert first.exitcode == -9
        until = time.monotonic() + 200
        while alive(folder):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert launch(command, **options) == 0
        assert_as_undisturbed(folder)

    in_threads(run, tmp_path)


@pytest.mark.slow
def test_a_real_training_ends_on_the_bits_of_the_undisturbed(tmp_path, monkeypatch):
    """`python -m benchmarks.faults` does it at thirty moments, in three ways."""
    steps = 20
    faults.train(tmp_path, "", ["cpu:0"], steps)
    digest = (tmp_path / "digest").read_text()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    fault = faults.Fault("kill", victim=1, after=12)
    row = faults.disturbed(fault, digest, steps=steps)
    assert row.is_good and row.devices == (4, 2), row


def test_a_kill_is_recovered_from_if_the_job_goes_on_after_its_checkpoint():
    def step(number, ended, job):
        return faults.DoneStep(number, 2, ended, job)

    kill = kills.Kill(10.0, 1, 2, 4, job="a", step=7, saved=5)
    before = [step(7, 9.0, "a"), step(8, 10.1, "a")]  # one that was under way
    assert kill.next_step(before) is None and not kill.is_recovered(before)
    for number, is_recovered in [(5, False), (6, True), (8, True), (9, False)]:
        done = [*before, step(number, 12.0, "b")]
        assert kill.next_step(done) == done[-1]
        assert kill.is_recovered(done) is is_recovered


@pytest.mark.slow
def test_a_job_that_is_killed_twice_ends_on_the_bits_of_one_device(
    tmp_path, monkeypatch
):
    """`python -m benchmarks.faults --kills 100` does it a hundred times."""
    monkeypatch.setattr(kills, "STEPS", 20)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    faults.train(tmp_path, "", ["cpu:0"], 20, towers=kills.TOWERS)
    job = kills.killed_job(0, 2)
    assert job.code == 0 and job.digest == (tmp_path / "digest").read_text()
    assert len(job.kills) == 2 and all(x.is_recovered(job.done) for x in job.kills)


def test_a_duel_is_told_from_what_its_processes_wrote(tmp_path):
    """`python -m benchmarks.duel` has its processes write it."""
    steps = "1 4 10 a\n2 4 11 a\n3 4 12.5 a\n2 4 21 b\n3 4 22 b\n4 4 23 b\n"
    (tmp_path / "steps").write_text(steps)  # step 3 of a was written after the kill
    ends = {"began": 13, "imported": 15, "connected": 16, "restored": 17}
    for process, compiled in [(0, 18.5), (1, 19)]:
        file = tmp_path / f"starts.b.{process}"
        file.write_text(json.dumps({**ends, "compiled": compiled}))
        ends.pop("restored", None)  # which only the first process says
    kills = [duel.Kill(12, "a"), duel.Kill(23.5, "b")]  # the second at the job's end
    (took,) = duel.recoveries(tmp_path, kills)
    assert [*took.values()] == [1, 2, 1, 1, 2, 2]
    told = duel.report(tmp_path, kills, whole_s=6.5)
    assert [*told.values()][:4] == ["2 in 0.2 min", "66.7%", "2.00", "9.0 s"]
    (tmp_path / "starts.b.0").write_text(json.dumps({**ends, "compiled": 19}))
    (took,) = duel.recoveries(tmp_path, kills)  # before there was a checkpoint
    assert [*took.values()] == [1, 2, 1, 0, 3, 2]


def children(program, **options):
    start = "import os, signal, sys, time; me = os.environ['TOWERJAX_PROCESS_ID'];"
    command = [sys.executable, "-I", "-S", "-c", start + program]
    return launch(command, **{"processes": 2, "grace_s": 0.1, **options})


def test_a_program_that_fails_by_itself_is_not_started_again(capfd):
    assert children("print('here'); sys.exit(3)", restarts=5) == 3
    assert capfd.readouterr().out.count("here") <= 2


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 2])
def test_restarts_end_with_a_code_that_asks_for_another(restarts, capfd):
    killed = "os.kill(os.getpid(), 9) if me == '1' else time.sleep(60)"
    assert children(killed, restarts=restarts) == 75
    err = capfd.readouterr().err
    assert err.count("process 1 was killed by signal 9 (SIGKILL)") == restarts + 1
    left = re.findall(r"the job goes on; restarts left: (\d)", err)
    assert left == [str(n) for n in reversed(range(restarts))]


def test_a_shell_that_says_so_was_killed_too():
    command = ["sh", "-c", "sh -c 'kill -9 $$'; exit $?"]
    assert launch(command, processes=1, restarts=0) == 75
    assert launch(command, processes=1) == 137
    assert launch(["sh", "-c", "exit 255"], processes=1, restarts=0) == 255


def test_who_is_told_to_end_and_saves_is_to_be_started_again(capfd):
    """The program tells the launcher, which is this process."""
    saves = (
        "signal.signal(15, lambda *_: sys.exit(75));"
        "os.kill(os.getppid(), 15); time.sleep(60)"
    )
    assert children(saves, restarts=5, processes=1, grace_s=60) == 75
    assert "SIGTERM passed on to 1 running" in capfd.readouterr().err
