"""JAX in several processes: how they find each other, and what a lost one does."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import forked
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import towerjax as tj
from towerjax.mesh import processes

OPEN_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
# Nothing may take longer than its own limit; those of a test are never reached.
WAIT_S = 600


def sums(arguments):
    """Join, sum over all devices, and say so; returns the sum to be done again."""
    cluster = tj.cluster.initialize(**arguments)
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    add = functools.partial(jax.lax.psum, axis_name="all")
    add = jax.shard_map(add, mesh=mesh, in_specs=P("all"), out_specs=P())
    rows = np.full(jax.local_device_count(), 1.0 + cluster.process_id, np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("all")), rows)
    total = jax.jit(add)
    same = tj.cluster.initialize(**arguments) == cluster
    print(
        f"\nprocess {cluster.process_id} of {cluster.num_processes} from {cluster.how}:"
        f" {jax.device_count()} devices, sum {float(total(x)[0]):g}, chief"
        f" {tj.cluster.is_chief()}, same {same}",
        flush=True,
    )
    return lambda: float(total(x)[0])


def loop(arguments):
    step = sums(arguments)
    while True:
        step()
        time.sleep(0.05)


def trains(arguments):
    """A loop that never looks at a result."""
    tj.cluster.initialize(**arguments)

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch) ** 2, tower.weight)

    options = {"on_nonfinite": "ignore"}
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(), **options)
    # A shorter program would run while it is dispatched, and fail there.
    state = step.init(np.zeros(4096, np.float32))
    rows = np.ones((8, 4096), np.float32)
    for number in range(10**9):
        state, _ = step(state, rows)
        if number == 9:
            print("trains", flush=True)
        time.sleep(0.01)


def fail(arguments):
    step = sums(arguments)
    if jax.process_index() == 1:
        raise ArithmeticError("the loss is a fish")
    while True:
        step()


def again(arguments):
    sums(arguments)
    another = {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 1}
    print(error_of(another, {}))
    tj.cluster.shutdown()
    print("all came", flush=True)


def joined(arguments):
    """What JAX says where it was initialized before, with these arguments."""
    jax.distributed.initialize(*arguments, initialization_timeout=120)
    cluster = tj.cluster.initialize()
    assert cluster == tj.cluster.initialize(*arguments)
    with pytest.raises(RuntimeError, match="was called before and joined"):
        tj.cluster.initialize("127.0.0.1:1", 3, 2)
    print(f"\n{cluster}, chief {tj.cluster.is_chief()}", flush=True)


def error_of(arguments, variables):
    """What it says to call it so, with variables of the environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    try:
        tj.cluster.initialize(**arguments)
    except (ValueError, RuntimeError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(before)
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def tries(given):
    said = [error_of(*each) if each else len(jax.devices()) for each in given]
    print(json.dumps(said), flush=True)


def early(arguments):
    """Process 1 comes late to each meeting."""
    processes._PATIENCE_S = 0.2
    me = tj.cluster.initialize(**arguments).process_id
    all_of_them = tj.Mirrored().placement.processes
    how = {"tower_local": True, "reduction": tj.Reduction.SUM}
    count = tj.tf1.MirroredStrategy().create_var("count", 1.0, **how)
    for meet in (
        lambda: all_of_them.require_same("This", "", ""),
        lambda: tj.towers.saved_values(count.value),
        lambda: tj.towers.read_local(count),
    ):
        time.sleep(0.5 * me)
        meet()


class Member:
    def __init__(self, path, run, arguments, options):
        self.path = path
        path.touch()
        args = str(path), run, arguments
        self.process = forked.process(forked.member, *args, **options)
        self.process.start()

    @property
    def text(self):
        return self.path.read_text()

    def until(self, text):
        until = time.monotonic() + WAIT_S
        while text not in self.text:
            assert time.monotonic() < until and self.process.is_alive(), self.text
            time.sleep(0.02)

    def ended(self):
        """Its exit code."""
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, self.text
        return self.process.exitcode


@pytest.fixture
def job(tmp_path):
    """Start processes, ``(variables, arguments)`` each, that run a function."""
    started = []

    def run(function, members, devices=2):
        for variables, arguments in members:
            path = tmp_path / f"{len(started)}"
            options = {"devices": devices, **variables}
            started.append(Member(path, function, arguments, options))
        return started[-len(members) :]

    yield run
    for one in started:
        one.process.kill()
        one.process.join()


def named(num_processes, **arguments):
    """The arguments of each process of a cluster on this machine."""
    coordinator = f"127.0.0.1:{forked.free_port()}"
    arguments = {"initialization_timeout_s": 120, **arguments}
    arguments |= {"coordinator": coordinator, "num_processes": num_processes}
    return [({}, arguments | {"process_id": i}) for i in range(num_processes)]


def named_by_tf_config(**arguments):
    jobs = {"chief": [f"127.0.0.1:{forked.free_port()}"], "worker": ["127.0.0.1:9"]}
    tasks = [{"type": job, "index": 0} for job in jobs]
    texts = [json.dumps({"cluster": jobs, "task": task}) for task in tasks]
    return [({"TF_CONFIG": text}, arguments) for text in texts]


def named_by(rank, size, **arguments):
    """As a launcher names the processes of one machine."""
    both = {
        size: "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(forked.free_port()),
    }
    return [(both | {rank: i}, arguments) for i in ("0", "1")]


def said(i, count, how, devices=2):
    total = devices * count * (count + 1) // 2
    return (
        f"process {i} of {count} from {how}: {count * devices} devices, sum {total},"
        f" chief {i == 0}, same True"
    )


@pytest.mark.slow
def test_one_process_needs_no_cluster_and_is_of_no_other(job):
    (one,) = job(again, [({}, {})])
    assert one.ended() == 0
    how = "one process: nothing in the environment names a cluster"
    assert said(0, 1, how) in one.text
    assert "tj.cluster.initialize() was called before and joined" in one.text
    assert "all came" in one.text


@pytest.mark.slow
def test_a_job_of_another_launcher_is_one_job(job):
    """And what JAX says counts where it was initialized before."""
    launchers = [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", OPEN_MPI_SIZE)]
    jobs = [job(sums, named_by(*names)) for names in launchers]
    address = f"127.0.0.1:{forked.free_port()}"
    before = job(joined, [({}, (address, 2, i)) for i in range(2)])
    for members, how in zip(jobs, ("torchrun", "Open MPI"), strict=True):
        for i, one in enumerate(members):
            assert one.ended() == 0, one.text
            assert said(i, 2, how) in one.text
    for i, one in enumerate(before):
        assert one.ended() == 0, one.text
        assert f"Cluster(process_id={i}, num_processes=2, coordinator=None" in one.text
        assert f"before'), chief {i == 0}" in one.text


@pytest.mark.slow
def test_an_exception_ends_its_process_at_once(job):
    _, there = job(fail, named_by_tf_config())
    there.until(said(1, 2, "TF_CONFIG"))
    there.until("ArithmeticError: the loss is a fish\n")
    assert there.ended() != 0
    assert "towerjax: process 1 of 2, at" in there.text
    assert "ends with this exception:\n" in there.text


EXITS = """
import sys, towerjax as tj
me = tj.cluster.initialize().process_id
try:
    sys.exit(4)
except SystemExit as caught:
    assert caught.code == 4
if me == 1:
    sys.exit({status!r})
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
multihost_utils.process_allgather(jnp.ones(2))
"""


@contextlib.contextmanager
def job_of(program, variables=({}, {})):
    """Two processes that run a program as Python does, which no fork can."""
    coordinator = f"127.0.0.1:{forked.free_port()}"
    environs = [
        os.environ
        | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        | {"TOWERJAX_COORDINATOR": coordinator, "TOWERJAX_NUM_PROCESSES": "2"}
        | {"TOWERJAX_PROCESS_ID": f"{i}", **more}
        for i, more in enumerate(variables)
    ]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in environs
    ]
    for one, environ in zip(started, environs, strict=True):
        one.env = environ
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


RECOVERABLE = """
import os, pathlib, time, towerjax as tj
me = tj.cluster.initialize(recoverable=True, heartbeat_timeout_s=5).process_id
print("joined", flush=True)
if me == 1:
    os.kill(os.getpid(), 9)
while not pathlib.Path({path!r}).exists():
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_lost_process_that_is_started_again_does_not_join(tmp_path):
    path = tmp_path / "end"
    program = RECOVERABLE.format(path=str(path))
    with job_of(program) as (first, lost):
        assert lost.wait(120) == -9
        again = subprocess.run(
            lost.args, env=lost.env, text=True, capture_output=True, timeout=120
        )
        assert again.returncode == 1 and "joined" not in again.stdout
        assert "started again under the number of one that" in again.stderr
        path.touch()
        text, _ = first.communicate(timeout=120)
        assert first.returncode == 0, text


@pytest.mark.slow
@pytest.mark.parametrize("status, code", [(3, 3), ("no data", 1)])
def test_sys_exit_ends_its_process_at_once(status, code):
    with job_of(EXITS.format(status=status)) as (_, there):
        text, _ = there.communicate(timeout=120)
    assert there.returncode == code
    assert f"ends with sys.exit({status!r})" in text
    assert "towerjax: process 1 of 2, at" in text
    assert "no data" not in str(status) or text.endswith("\nno data\n")


@pytest.mark.slow
def test_other_settings_are_named_when_a_process_joins():
    program = "import towerjax as tj; tj.cluster.initialize()"
    said = "jax_enable_x64 is False on process 0, but True on process 1. Give all"
    with job_of(program, ({}, {"JAX_ENABLE_X64": "1"})) as job:
        for one in job:
            text, _ = one.communicate(timeout=120)
            assert one.returncode == 1 and f"of this job differ: {said}" in text


@pytest.mark.slow
def test_the_heartbeat_ends_the_others_and_names_the_lost(job):
    """SIGSTOP stands for all that keeps a process from running and not from being."""
    options = {"heartbeat_timeout_s": 10}
    slurm = named_by("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", **options)
    first, lost = both = job(loop, slurm)
    for i, one in enumerate(both):
        one.until(said(i, 2, "Slurm"))
    os.kill(lost.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert first.ended() == -signal.SIGABRT
    assert time.monotonic() - began < 90  # of 100 by default
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in first.text
    os.kill(lost.process.pid, signal.SIGCONT)
    assert lost.ended() != 0  # it finds the job ended


@pytest.mark.slow
def test_a_loop_that_ignores_results_learns_of_a_dead_process_from_its_steps(job):
    """On CPU devices, whose collectives fail; and not from the heartbeat."""
    survivor, dead = job(trains, named(2, heartbeat_timeout_s=40), devices=1)
    for one in (survivor, dead):
        one.until("trains")
    began = time.monotonic()
    os.kill(dead.process.pid, signal.SIGKILL)
    assert survivor.ended() == 1
    assert time.monotonic() - began < 35
    assert "towerjax: process 0 of 2" in survivor.text
    why = "ends with this exception:\n.*all-reduce failed"
    assert re.search(why, survivor.text, re.S)


@pytest.mark.slow
def test_who_does_not_come_is_named(job):
    first, second, _ = named(3, initialization_timeout_s=1)
    there = job(loop, [first, second])
    for i, others in enumerate(("1, 2", "0, 2")):
        assert there[i].ended() == 1
        who = f"towerjax: process {i} of 3, at {first[1]['coordinator']},"
        assert f"{who} waits for processes {others} (up to 1 s)\n" in there[i].text
        ends = f"ends: processes {others} did not join, or not all of them did."
        assert f"{who} waited 1 s and {ends}" in there[i].text


@pytest.mark.slow
def test_what_cannot_be_is_refused(job):
    """By one process, which lives on each time."""
    ((_, taken),) = named(1)
    host, port = taken["coordinator"].split(":")
    address = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}
    one_of_several = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    open_mpi = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    of_two_machines = {f"OMPI_COMM_WORLD_{x}": n for x, n in open_mpi.items()}
    late = "RuntimeError: jax.distributed.initialize() must be called before any JAX"
    given = [
        ({}, address, "Number of processes must be defined"),
        ({}, one_of_several, "PMI_SIZE=4 is the number of processes in a job of"),
        ({}, of_two_machines, "OMPI_COMM_WORLD_SIZE=4 is the number of processes in"),
        ({}, {"PMIX_RANK": "1"}, "PMIX_RANK=1 is the number of this process in a"),
        ({}, {"PMIX_RANK": "2", "SLURM_STEP_NUM_TASKS": "1"}, "PMIX_RANK=2 is the"),
        (taken, {}, f"process 0 must listen at {host}:{port}, but another program"),
        None,  # JAX is used
        ({}, {}, late),
        (named(2)[1][1], {}, late),
    ]
    with socket.create_server((host, int(port))):
        (process,) = job(tries, [({}, [each and each[:2] for each in given])])
        assert process.ended() == 0, process.text
    told = json.loads(re.search(r"^\[.*\]$", process.text, re.MULTILINE)[0])
    assert told.pop(6) == 2
    for each, text in zip(filter(None, given), told, strict=True):
        assert each[2] in text


@pytest.mark.slow
def test_a_process_that_comes_early_says_that_it_waits(job):
    first, late = job(early, named(2))
    assert (first.ended(), late.ended()) == (0, 0)
    values = "a value of all towers is read", "tower-local values are read"
    this = "process 0 waits for process 1: This is compared between processes. Do all"
    assert this in first.text
    for what in values:
        assert f"process 0 waits for the others: {what}. Do all" in first.text


@pytest.mark.parametrize("value", [0, 1.5, "7"])
@pytest.mark.parametrize("name", ["heartbeat", "initialization", "shutdown"])
def test_a_timeout_is_an_int_of_seconds(name, value):
    name = f"{name}_timeout_s"
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number"):
        tj.cluster.initialize(**{name: value})
