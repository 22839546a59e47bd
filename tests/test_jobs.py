"""JAX in several processes: how they find each other, and what a lost one does."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from towerjax.mesh.cluster.ports import free_port
from towerjax.mesh.cluster.spec import Cluster
from towerjax.mesh.cluster.start import _check_counts, _others, initialize

ROOT = pathlib.Path(__file__).parent.parent
JOB = str(ROOT / "tests" / "workers" / "job.py")
# Nothing may take longer than its own limit; those of a test are never reached.
WAIT_S = 60


def environment(devices, **variables):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environ.pop("XLA_FLAGS", None)
    return {**environ, "JAX_NUM_CPU_DEVICES": str(devices), **variables}


@contextlib.contextmanager
def bare(members, task, *, devices=2):
    """Processes without a launcher, a pair ``(arguments, environment)`` each."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-u", JOB, json.dumps(arguments), task],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(devices, **variables),
        )
        for arguments, variables in members
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def members(num_processes, **arguments):
    """The arguments of each process of a cluster on this machine."""
    coordinator = f"127.0.0.1:{free_port()}"
    return [
        {
            "coordinator": coordinator,
            "num_processes": num_processes,
            "process_id": i,
            "initialization_timeout_s": 40,
            **arguments,
        }
        for i in range(num_processes)
    ]


@contextlib.contextmanager
def launched(task, *, processes=2, devices=2, grace_s=1, **arguments):
    """The same under ``towerjax launch``."""
    arguments = {"initialization_timeout_s": 40, **arguments}
    job = subprocess.Popen(
        [sys.executable, "-m", "towerjax", "launch", f"--processes={processes}"]
        + [f"--devices-per-process={devices}", f"--grace-seconds={grace_s}", "--"]
        + [sys.executable, JOB, json.dumps(arguments), task],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(1),
    )
    try:
        yield job
    finally:
        job.kill()
        job.communicate()


def said(i, count, how, devices=2):
    total = devices * count * (count + 1) // 2
    return (
        f"process {i} of {count} from {how}: {count * devices} devices, sum {total},"
        f" chief {i == 0}, same True"
    )


def until_it_sums(process):
    """Which process took its first step, and its pid."""
    for line in process.stdout:
        if found := re.search(r"process (\d+) of .* sum .* pid (\d+)", line):
            return int(found[1]), int(found[2])
    raise AssertionError(process.stderr.read())


@pytest.mark.slow
def test_the_launchers_processes_find_each_other():
    processes, devices = 2, 2
    with launched("shutdown", processes=processes, devices=devices) as job:
        out, err = job.communicate(timeout=WAIT_S)
    assert job.returncode == 0, err
    for i in range(processes):
        assert f"[{i}] all came\n" in out
        assert f"[{i}] {said(i, processes, 'towerjax launch', devices)}" in out, err


def every_source():
    address = f"127.0.0.1:{free_port()}"
    jobs = {"chief": [address], "worker": ["127.0.0.1:9"]}
    tasks = [("chief", 0), ("worker", 0)]
    wholes = [{"cluster": jobs, "task": {"type": t, "index": i}} for t, i in tasks]
    yield "TF_CONFIG", [({}, {"TF_CONFIG": json.dumps(whole)}) for whole in wholes]
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    ids = ({"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2))
    yield "Slurm, detected by JAX", [({}, {**slurm, **own}) for own in ids]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["TF_CONFIG", "Slurm, detected by JAX"])
def test_every_source_makes_the_same_job(how):
    with bare(dict(every_source())[how], "sum") as processes:
        for i, process in enumerate(processes):
            out, err = process.communicate(timeout=WAIT_S)
            assert said(i, 2, how) in out, err
            assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"collective_timeout_s": 5}])
def test_one_process_needs_no_cluster(arguments):
    with bare([(arguments, {})], "shutdown") as (process,):
        out, err = process.communicate(timeout=WAIT_S)
    how = "one process: nothing in the environment names a cluster"
    assert said(0, 1, how) in out, err
    assert "all came" in out and process.returncode == 0


@pytest.mark.slow
def test_an_exception_in_one_process_ends_the_job_with_its_traceback():
    with launched("raise") as job:
        until_it_sums(job)
        began = time.monotonic()
        _, err = job.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 6
    assert job.returncode == 1
    assert "[1] towerjax: process 1 of 2 ends with this exception:\n" in err
    assert "[1] ArithmeticError: the loss is a fish\n" in err
    assert "launch: process 1 exited with code 1 after" in err


@pytest.mark.slow
def test_a_killed_process_ends_the_launchers_job():
    with launched("loop", grace_s=2) as job:
        pids = dict(until_it_sums(job) for _ in range(2))
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        _, err = job.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 5
    assert job.returncode == 128 + 9
    assert re.search(r"launch: process 1 was killed by signal 9 \(SIGKILL\)", err)
    assert all(not pathlib.Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.slow
def test_sigterm_ends_a_job_that_does_not_look_at_it_after_the_grace():
    with launched("loop", grace_s=2) as job:
        pids = dict(until_it_sums(job) for _ in range(2))
        began = time.monotonic()
        job.terminate()
        _, err = job.communicate(timeout=WAIT_S)
        assert 1.9 < time.monotonic() - began < 5
    assert job.returncode == 128 + 15
    assert "still running: 0, 1; ended with SIGKILL" in err
    assert all(not pathlib.Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.slow
def test_without_exit_on_exception_a_process_waits_for_the_others():
    arguments = {"exit_on_exception": False, "shutdown_timeout_s": 3}
    pairs = [(member, {}) for member in members(2, **arguments)]
    with bare(pairs, "raise") as processes:
        until_it_sums(processes[1])
        began = time.monotonic()
        _, err = processes[1].communicate(timeout=WAIT_S)
        assert 2.5 < time.monotonic() - began
    assert "ArithmeticError: the loss is a fish" in err
    assert "ends with this exception" not in err


@pytest.mark.slow
def test_the_heartbeat_ends_the_others_and_names_the_dead():
    pairs = [(member, {}) for member in members(3, heartbeat_timeout_s=5)]
    with bare(pairs, "loop") as processes:
        for process in processes:
            until_it_sums(process)
        processes[2].kill()
        began = time.monotonic()
        errs = [process.communicate(timeout=WAIT_S)[1] for process in processes]
        assert time.monotonic() - began < 15
    assert all(process.returncode != 0 for process in processes)
    assert "tasks are unhealthy (stopped sending heartbeats):\n2\n" in errs[0]


@pytest.mark.slow
def test_the_collective_timeout_comes_before_the_heartbeat():
    arguments = {"collective_timeout_s": 2, "heartbeat_timeout_s": 50}
    pairs = [(member, {}) for member in members(2, **arguments)]
    with bare(pairs, "loop") as processes:
        for process in processes:
            until_it_sums(process)
        processes[1].kill()
        began = time.monotonic()
        _, err = processes[0].communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 8
    assert "towerjax: process 0 of 2 ends with this exception:" in err
    assert "Gloo all-reduce failed" in err
    assert processes[0].returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "heartbeat_s, collective_s, stopped", [(5, None, 0), (40, 3, 1)]
)
def test_a_stopped_process_counts_as_lost(stopped, heartbeat_s, collective_s):
    """SIGSTOP stands for all that keeps a process from running and not from being."""
    arguments = {"heartbeat_timeout_s": heartbeat_s}
    if collective_s is not None:
        arguments["collective_timeout_s"] = collective_s
    pairs = [(member, {}) for member in members(2, **arguments)]
    with bare(pairs, "loop") as processes:
        for process in processes:
            until_it_sums(process)
        there, other = processes[stopped], processes[1 - stopped]
        there.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        _, err = other.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 2 * (collective_s or heartbeat_s) + 5
        there.send_signal(signal.SIGCONT)
        there.communicate(timeout=WAIT_S)
    assert there.returncode != 0  # gone on, it finds the job ended
    if collective_s is not None:
        assert "towerjax: process" in err and "Timed out waiting 3000ms" in err
        assert other.returncode == 1
    else:
        assert "heartbeat" in err.lower()
        assert other.returncode == -signal.SIGABRT


@pytest.mark.parametrize(
    "there, line, end",
    [
        (
            0,
            "towerjax: process 0 of 3, at ADDRESS, waits for processes 1, 2 (up to",
            "towerjax: process 0 of 3, at ADDRESS, waited 3 s and ends: processes 1, 2"
            " did not come, or not all of them. Do they run, and call"
            " tj.cluster.initialize()?",
        ),
        (
            1,
            "towerjax: process 1 of 3, at ADDRESS, waits for processes 0, 2 (up to",
            "TimeoutError: process 1 of 3 found that nobody listens at ADDRESS after",
        ),
    ],
)
@pytest.mark.slow
def test_what_is_missing_is_named(there, line, end):
    arguments = members(3, initialization_timeout_s=3)[there]
    with bare([(arguments, {})], "sum") as (process,):
        began = time.monotonic()
        _, err = process.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 10
    address = arguments["coordinator"]
    assert line.replace("ADDRESS", address) + " 3 s)\n" in err
    assert end.replace("ADDRESS", address) in err
    assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_a_late_call_is_refused_at_once(named):
    arguments = members(2)[1] if named else {}
    with bare([(arguments, {})], "late") as (process,):
        began = time.monotonic()
        _, err = process.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 10
    assert "initialize() came after the first use of JAX" in err
    assert "Put it at the start of the program" in err


@pytest.mark.slow
def test_a_second_call_for_another_cluster_is_refused():
    with bare([(members(1)[0], {})], "again") as (process,):
        _, err = process.communicate(timeout=WAIT_S)
    assert "RuntimeError: tj.cluster.initialize() has run already and gave" in err


@pytest.mark.slow
def test_a_taken_port_is_refused():
    (member,) = members(1)
    port = int(member["coordinator"].split(":")[1])
    with socket.create_server(("127.0.0.1", port)):
        with bare([(member, {})], "sum") as (process,):
            _, err = process.communicate(timeout=WAIT_S)
    assert f"process 0 is to listen at 127.0.0.1:{port}, but something on this" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, variables, says",
    [
        (
            {},
            {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"},
            "a part of a cluster to JAX, which says: Number of processes must be def",
        ),
        (
            {"collective_timeout_s": 3},
            {"JAX_PLATFORMS": ""},
            "JAX's platform is 'not chosen'. Set JAX_PLATFORMS=cpu, or leave it out",
        ),
        (
            {"collective_timeout_s": 3},
            {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=4"},
            "but XLA_FLAGS is '--xla_cpu_collective_timeout_seconds=4' already.",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments, variables, says):
    with bare([(arguments, variables)], "sum") as (process,):
        _, err = process.communicate(timeout=WAIT_S)
    assert says in err
    assert process.returncode == 1


@pytest.mark.parametrize(
    "name",
    ["heartbeat_timeout_s", "initialization_timeout_s", "shutdown_timeout_s"]
    + ["collective_timeout_s"],
)
@pytest.mark.parametrize("value", [0, 1.5, True, "7"])
def test_a_timeout_is_an_int_of_seconds(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number"):
        initialize(**{name: value})


def test_jax_must_count_as_many_processes():
    cluster = Cluster(1, 4, "a:1", "TF_CONFIG")
    _check_counts(cluster, 4, 1)
    for counted in ((1, 0), (4, 2)):
        with pytest.raises(RuntimeError, match="TF_CONFIG: this is process 1 of 4"):
            _check_counts(cluster, *counted)


def test_many_others_are_named_in_short():
    cluster = Cluster(0, 1000, "a:1", "x")
    assert _others(cluster) == "processes 1, 2, 3, 4, 5, 6, 7, ..., 999"


@pytest.mark.slow
def test_a_process_that_ends_early_says_that_it_waits():
    program = (
        "import time, jax, towerjax as tj; tj.cluster.initialize();"
        "time.sleep(7 * jax.process_index())"
    )
    done = subprocess.run(
        [sys.executable, "-m", "towerjax", "launch", "--processes", "2", "--"]
        + [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "[0] process 0 of 2 has ended and waits for the others, up to" in done.stderr
    assert "process 1 of 2 has ended" not in done.stderr
