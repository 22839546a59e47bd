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

from benchmarks import duel, faults
from towerjax.mesh.cluster import launch, launcher
from towerjax.mesh.cluster.group import End
from towerjax.mesh.cluster.launcher import RestartPlan

STEPS = 40
# Longer than Python takes to start, or a step, where eight others want the processor.
LIMITS = {"stop": {"hang_timeout_s": 15}, "sleep": {"step_timeout_s": 10}}


def test_as_many_go_on_as_are_left_and_divide_the_towers():
    whole = RestartPlan(processes=6, towers=12, restarts=9)
    one = whole.after(End(137, lost=1))
    two = one.after(End(137, lost=1))  # 4 of 4 places that are left
    assert [plan.count for plan in (whole, one, two)] == [6, 4, 4]
    assert [one.restarts, two.restarts] == [8, 7]
    three = two.after(End(137, lost=1))
    none = whole.after(End(137, lost=6))
    assert [three.count, none.count] == [3, 1]
    assert whole.after(End(75)).count == 6  # each saved and ended by itself
    assert RestartPlan(6, 6, 9, lost=1).count == 3
    assert RestartPlan(6, None, 9).after(End(137, lost=6)).count == 6


@pytest.mark.parametrize("end, left, code", [
    (End(0), None, 0),
    (End(3), None, 3),
    (End(75), 1, 75),
    (End(137, lost=1), 1, 75),
    (End(1, lost=1), 1, 75),  # another failed since one was lost
    (End(75, ended_by=15), None, 75),
    (End(143, ended_by=15), None, 143),
    (End(1, ended_by=2), None, 130),
    (End(0, ended_by=15), None, 0),
])  # fmt: skip
def test_what_an_end_leads_to(end, left, code):
    plan = RestartPlan(2, restarts=2)
    after = plan.after(end)
    assert (after and after.restarts) == left
    assert plan.code(end) == code
    assert RestartPlan(2, restarts=0).after(end) is None
    if end.lost:
        assert RestartPlan(2).code(end) == end.code


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


@pytest.mark.parametrize("restarts", [0, 2])
def test_restarts_end_with_a_code_that_asks_for_another(restarts, capfd):
    killed = "os.kill(os.getpid(), 9) if me == '1' else time.sleep(60)"
    assert children(killed, restarts=restarts) == 75
    err = capfd.readouterr().err
    assert err.count("process 1 was killed by signal 9 (SIGKILL)") == restarts + 1
    left = re.findall(r"the job goes on; restarts left: (\d)", err)
    assert left == [str(n) for n in reversed(range(restarts))]


@pytest.mark.parametrize("first, code, lost", [
    ("os.kill(os.getpid(), 9)", 137, 1),
    ("os.abort()", 134, 1),
    ("sys.exit(3)", 3, 0),
])  # fmt: skip
def test_those_whom_jax_aborts_since_one_ended_are_not_lost(
    first, code, lost, tmp_path
):
    """In the same moment or later: three of four abort, as JAX does to survivors."""
    program = f"""
signal.signal(15, signal.SIG_IGN)
os.symlink(f"/proc/{{os.getpid()}}/stat", {str(tmp_path)!r} + "/" + me)
while len(os.listdir({str(tmp_path)!r})) < 4: time.sleep(.01)  # until all are there
if me == "0": {first}
try:
    while ") Z " not in open({str(tmp_path / "0")!r}).read(): time.sleep(.01)
except OSError: pass  # the launcher has collected it
time.sleep(.1 * (int(me) - 1))
os.abort()"""
    ends = []
    after = RestartPlan.after
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RestartPlan, "after", lambda *args: ends.append(args[1]) or after(*args)
        )
        children(program, processes=4, restarts=0, grace_s=5)
    assert [(end.code, end.lost) for end in ends] == [(code, lost)]


@pytest.mark.slow
def test_who_waits_for_a_lost_one_is_not_waited_for_and_not_lost_itself(
    capfd, monkeypatch
):
    monkeypatch.setattr(launcher, "_LOSS_GRACE_S", 2)
    waits = "signal.signal(15, signal.SIG_IGN); time.sleep(0.2);"
    killed = "os.kill(os.getpid(), 9) if me == '1' else time.sleep(60)"
    options = {"restarts": 0, "grace_s": 60, "hang_timeout_s": 1.5}
    began = time.monotonic()
    assert children(waits + killed, **options) == 75
    assert 2 < time.monotonic() - began < 50
    assert "still running: 0; ended with SIGKILL" in capfd.readouterr().err


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
