"""JAX in several processes: how they find each other, and what a lost one does."""

import contextlib
import itertools
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

from towerjax.mesh.cluster import launch
from towerjax.mesh.cluster.spec import Cluster, free_port
from towerjax.mesh.cluster.start import _check_joined, _other_processes, initialize

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


def until_it_sums(process, how, devices=2):
    """Which process of two took its first step, and its pid."""
    for line in process.stdout:
        if found := re.search(r"process (\d+) of .* sum .* pid (\d+)", line):
            assert said(int(found[1]), 2, how, devices) in line
            return int(found[1]), int(found[2])
    raise AssertionError(process.stderr.read())


def named_by_tf_config(**arguments):
    jobs = {"chief": [f"127.0.0.1:{free_port()}"], "worker": ["127.0.0.1:9"]}
    for job in jobs:
        whole = {"cluster": jobs, "task": {"type": job, "index": 0}}
        yield arguments, {"TF_CONFIG": json.dumps(whole)}


def named_by_slurm(**arguments):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    for i in ("0", "1"):
        yield arguments, {**slurm, "SLURM_PROCID": i, "SLURM_LOCALID": i}


@pytest.mark.slow
def test_one_process_needs_no_cluster_and_is_of_no_other():
    with bare([({"collective_timeout_s": 5}, {})], "again") as (process,):
        out, err = process.communicate(timeout=WAIT_S)
    how = "one process: nothing in the environment names a cluster"
    assert said(0, 1, how) in out, err
    assert "RuntimeError: tj.cluster.initialize() has run already and gave" in out
    assert "all came" in out and process.returncode == 0


def ended(*command):
    """The code of two processes of the launcher's."""
    options = {"processes": 2, "grace_s": 1, "env": environment(2)}
    return launch([sys.executable, *command], **options)


@pytest.mark.slow
def test_an_exception_in_one_process_ends_the_job_with_its_traceback(capfd):
    began = time.monotonic()
    assert ended(JOB, "{}", "raise") == 1
    assert time.monotonic() - began < WAIT_S
    err = capfd.readouterr().err
    assert "[1] towerjax: process 1 of 2 ends with this exception:\n" in err
    assert "[1] ArithmeticError: the loss is a fish\n" in err
    assert "launch: process 1 exited with code 1 after" in err


@pytest.mark.slow
def test_a_killed_process_ends_the_launchers_job():
    with launched("loop") as job:
        pids = dict(until_it_sums(job, "towerjax launch") for _ in range(2))
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        _, err = job.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 5
    assert job.returncode == 128 + 9
    assert re.search(r"launch: process 1 was killed by signal 9 \(SIGKILL\)", err)
    assert all(not pathlib.Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.slow
def test_sigterm_ends_a_job_that_does_not_look_at_it_after_the_grace():
    with launched("loop") as job:
        pids = dict(until_it_sums(job, "towerjax launch") for _ in range(2))
        began = time.monotonic()
        job.terminate()
        _, err = job.communicate(timeout=WAIT_S)
        assert 0.9 < time.monotonic() - began < 5
    assert job.returncode == 128 + 15
    assert "still running: 0, 1; ended with SIGKILL" in err
    assert all(not pathlib.Path(f"/proc/{pid}").exists() for pid in pids.values())


@pytest.mark.slow
def test_without_exit_on_exception_a_process_waits_for_the_others():
    arguments = {"exit_on_exception": False, "shutdown_timeout_s": 1}
    with bare(named_by_tf_config(**arguments), "raise") as processes:
        until_it_sums(processes[1], "TF_CONFIG")
        began = time.monotonic()
        _, err = processes[1].communicate(timeout=WAIT_S)
        assert 0.8 < time.monotonic() - began
    assert "ArithmeticError: the loss is a fish" in err
    assert "ends with this exception" not in err


@pytest.mark.slow
def test_the_heartbeat_ends_the_others_and_names_the_lost():
    """SIGSTOP stands for all that keeps a process from running and not from being."""
    with contextlib.ExitStack() as stack:
        jobs = []
        for lost in range(2):
            pairs = [(member, {}) for member in members(2, heartbeat_timeout_s=5)]
            processes = stack.enter_context(bare(pairs, "loop"))
            jobs.append((processes[lost], processes[1 - lost]))
        for process in itertools.chain(*jobs):
            until_it_sums(process, "explicit arguments")
        for there, _ in jobs:
            there.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        errs = [other.communicate(timeout=WAIT_S)[1] for _, other in jobs]
        assert time.monotonic() - began < 15
        for there, _ in jobs:
            there.send_signal(signal.SIGCONT)
            there.communicate(timeout=WAIT_S)
    assert all(there.returncode != 0 for there, _ in jobs)  # it finds the job ended
    assert [other.returncode for _, other in jobs] == [-signal.SIGABRT] * 2
    assert "heartbeat" in errs[0].lower()
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in errs[1]


@pytest.mark.slow
def test_the_collective_timeout_comes_before_the_heartbeat():
    arguments = {"collective_timeout_s": 3, "heartbeat_timeout_s": 40}
    # Of two devices that wait, the second may see what the first one closed.
    with bare(named_by_slurm(**arguments), "loop", devices=1) as (other, there):
        for process in (other, there):
            until_it_sums(process, "Slurm, detected by JAX", devices=1)
        there.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        _, err = other.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 11
        there.send_signal(signal.SIGCONT)
        there.communicate(timeout=WAIT_S)
    assert there.returncode != 0
    assert "towerjax: this process ends with this exception:" in err
    assert "Gloo all-reduce failed" in err and "Timed out waiting 3000ms" in err
    assert other.returncode == 1


@pytest.mark.slow
def test_who_does_not_come_is_named():
    member = members(3, initialization_timeout_s=1)[0]
    with bare([(member, {})], "sum") as (process,):
        began = time.monotonic()
        _, err = process.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < 10
    who = f"towerjax: process 0 of 3, at {member['coordinator']},"
    assert f"{who} waits for processes 1, 2 (up to 1 s)\n" in err
    assert (
        f"{who} waited 1 s and ends: processes 1, 2 did not come, or not all of them."
        " Do they run, and call tj.cluster.initialize()?"
    ) in err
    assert process.returncode == 1


@pytest.mark.slow
def test_what_cannot_be_is_refused():
    """By one process, which lives on each time."""
    taken, absent = members(1)[0], members(3, initialization_timeout_s=2)[1]
    host, port = taken["coordinator"].split(":")
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}
    flags = "--xla_cpu_collective_timeout_seconds=30"
    late = "RuntimeError: tj.cluster.initialize() came after the first use of JAX"
    tries = [
        ({}, address, "a part of a cluster to JAX, which says: Number of processes mu"),
        (
            {"collective_timeout_s": 3},
            {"XLA_FLAGS": flags},
            f"but XLA_FLAGS is '{flags}' already.",
        ),
        (taken, {}, f"process 0 is to listen at {host}:{port}, but something on this"),
        (
            absent,
            {},
            "process 1 of 3 found that nobody listens at"
            f" {absent['coordinator']} after",
        ),
        (
            {"collective_timeout_s": 3},
            {"JAX_PLATFORMS": ""},
            "JAX's platform is 'not chosen'. Set JAX_PLATFORMS=cpu, or leave it out",
        ),
        ({}, {}, late),
        (members(2)[1], {}, late),
    ]
    given = [[arguments, variables] for arguments, variables, _ in tries]
    given.insert(-2, None)  # JAX is used
    with socket.create_server((host, int(port))):
        with bare([(given, {})], "tries") as (process,):
            out, err = process.communicate(timeout=WAIT_S)
    told = json.loads(out)
    assert told.pop(-3) == 2
    for (_, _, says), text in zip(tries, told, strict=True):
        assert says in text, err
    assert "Put it at the start of the program" in told[-1]
    waits = f"towerjax: process 1 of 3, at {absent['coordinator']}, waits for"
    assert f"{waits} processes 0, 2 (up to 2 s)\n" in err


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
    _check_joined(cluster, 4, 1)
    for counted in ((1, 0), (4, 2)):
        with pytest.raises(RuntimeError, match="TF_CONFIG: this is process 1 of 4"):
            _check_joined(cluster, *counted)


def test_many_others_are_named_in_short():
    cluster = Cluster(0, 1000, "a:1", "x")
    assert _other_processes(cluster) == "processes 1, 2, 3, 4, 5, 6, 7, ..., 999"


@pytest.mark.slow
def test_a_process_that_comes_or_ends_early_says_that_it_waits(capfd):
    program = (
        "import time, jax, towerjax as tj; from towerjax.mesh import processes;"
        "from towerjax.mesh.cluster import start;"
        "start._SILENCE_S = processes._PATIENCE_S = 0.2; tj.cluster.initialize();"
        "time.sleep(jax.process_index()); processes.require_same('This', '', '');"
        "count = tj.Mirrored().create_var('count', 1., tower_local=True,"
        "reduction=tj.Reduction.SUM);"
        "time.sleep(jax.process_index()); tj.towers.saved_values(count.value);"
        "time.sleep(jax.process_index()); tj.towers.read_local(count);"
        "time.sleep(2 * jax.process_index())"
    )
    assert ended("-c", program) == 0
    err = capfd.readouterr().err
    assert "[0] process 0 of 2 has ended and waits for the others, up to" in err
    assert "process 1 of 2 has ended" not in err
    assert "[0] process 0 waits for the others: This is to be compared. Do all" in err
    assert "process 1 waits for the others: This" not in err
    for what in ("a value of all towers is", "tower-local values are"):
        assert f"[0] process 0 waits for the others: {what} read. Do all" in err
        assert f"process 1 waits for the others: {what}" not in err
