"""Find and check the job's processes, their addresses, and this process's index."""

import dataclasses
import itertools
import json
import re
import socket
from collections.abc import Mapping
from typing import Any, TypeAlias

from towerjax.types.options import check_whole

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """Find a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach that address."""
    host, _, _ = address.rpartition(":")
    return host in ("localhost", "[::1]") or host.startswith("127.")


def is_free(port: int) -> bool:
    """Return whether no process listens at this port; raise if it is not a port.

    JAX does not check this: it would share a port in use, or abort.
    """
    check_whole("port", port, 1, 65535)
    with socket.socket() as probe:
        # With this option a port counts as free even if a job that used it has just
        # ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


# `launch` sets these environment variables, and `initialize` reads them.
VARIABLES = ("TOWERJAX_COORDINATOR", "TOWERJAX_NUM_PROCESSES", "TOWERJAX_PROCESS_ID")


# `launch` sets it to 1 if the job is to go on without processes that are lost.
RECOVERABLE = "TOWERJAX_RECOVERABLE"

SINGLE_PROCESS = "one process: nothing in the environment names a cluster"
# Process 0 is the chief, or worker 0 if there is no chief.
_JOBS = ("chief", "worker")
_EXAMPLE = (
    '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]},'
    ' "task": {"type": "worker", "index": 0}}'
)
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.%\w]+\]):([0-9]+)")
# Each text ends an error's sentence about a wrong part of a specification, and says
# what to write.
_NO_ADDRESS = (
    "is not an address. Write 'host:port' with a port of 1 to 65535, such as"
    " '10.0.0.1:2222'; an IPv6 host stands in brackets, '[::1]:2222'."
)
_NO_JOB = (
    "cannot be here: the jobs are 'chief', once called 'master', and 'worker'. Towers"
    " keep their parameters on every device: leave 'ps' out, and start no process for"
    " it. An evaluator is no part of the job: start it as a process of its own."
)
_NO_CHIEF = "is one chief too many. Make all but one of them workers."
_TWICE = "stands for more than one task. Give each process a port of its own."
_NO_TASK = "is not in the cluster. Name one of its tasks, such as 'worker' and 0:"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a job, and which of them this one is.

    Attributes:
      process_id: The number of this process, from 0.
      num_processes: The number of processes.
      coordinator: ``"host:port"`` at which process 0 listens; None for one process,
        and if only JAX knows it.
      how: What named the cluster, in words.
    """

    process_id: int
    num_processes: int
    coordinator: str | None
    how: str


def parse_spec(
    spec: Any, task_type: Any = None, task_id: Any = None, *, how: str = "cluster_spec"
) -> Cluster:
    """Read the cluster that a specification like ``TF_CONFIG`` describes.

    The processes are the chief, if there is one, and the workers in the order of
    their list. The first is process 0, which listens at its address. The other
    addresses are checked and counted; nothing listens there.

    Args:
      spec: ``{"chief": ["host:port"], "worker": ["host:port", ...]}``, or
        ``{"cluster": {...}, "task": {"type": ..., "index": ...}}``.
      task_type: ``"chief"`` or ``"worker"``; None where ``spec`` names the task.
      task_id: The index in that list, from 0; None where ``spec`` names the task.
      how: What the specification comes from, in words; errors begin with it.

    Raises:
      ValueError: The specification is wrong; says what to write instead.

    Example:
      >>> hosts = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
      >>> parse_spec(hosts, "worker", 1).process_id
      2
    """
    jobs, task = _jobs_and_task(spec, how)
    if task and (task_type, task_id) != (None, None):
        raise ValueError(
            f"{how}: 'task' says {task!r}, and task_type={task_type!r} and"
            f" task_id={task_id!r} name it again. Name the task once."
        )
    mine: Any = (task.get("type"), task.get("index")) if task else (task_type, task_id)
    places = [(job, i) for job in _JOBS for i in range(len(jobs.get(job, ())))]
    addresses = [jobs[job][i] for job, i in places]
    low = [f"{address}".lower() for address in addresses]
    named = [f"{job}[{i}]={jobs[job][i]!r}" for job, i in places]
    bad = [not _is_address(address) for address in addresses]
    task_name = f"the task of type {mine[0]!r} and index {mine[1]!r}"
    for wrong, rule in (
        ([job for job in jobs if job not in _JOBS], _NO_JOB),
        (itertools.compress(named, bad), _NO_ADDRESS),
        (jobs.get("chief", ())[1:], _NO_CHIEF),
        (sorted({x for x in low if low.count(x) > 1}), _TWICE),
        ([task_name] * (mine not in places), f"{_NO_TASK} {named[:8]}."),
    ):
        if texts := ", ".join(map(str, wrong)):
            raise ValueError(f"{how}: {texts} {rule}")
    return Cluster(places.index(mine), len(places), addresses[0], how)


def _jobs_and_task(
    spec: Any, source: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Read a specification's addresses for each job, and the task that it names.

    The task is empty if the specification names none. ``source`` names the
    specification at the start of an error.
    """
    jobs = spec
    task = {}
    if isinstance(spec, Mapping) and spec.keys() & {"cluster", "task"}:
        jobs = spec.get("cluster")
        task = spec.get("task") or {}
    if not (
        isinstance(jobs, Mapping)
        and all(isinstance(tasks, list | tuple) for tasks in jobs.values())
        and any(jobs.values())
        and isinstance(task, Mapping)
    ):
        raise ValueError(
            f"{source} is {spec!r}, which names no list of processes. Write, for"
            f" example, {_EXAMPLE}, or leave all of it out for a job of one process."
        )
    return jobs, task


def _is_address(x: Any) -> bool:
    match = _ADDRESS.fullmatch(x) if isinstance(x, str) else None
    return match is not None and 1 <= int(match[2]) <= 65535


def find_cluster(environ: Mapping[str, str], *explicit: Any) -> Cluster | None:
    """Find the cluster that arguments, the launcher or TF_CONFIG names, or None.

    The first of these three that names a cluster counts.
    """
    names = ("coordinator", "num_processes", "process_id")
    passed: dict[str, Any] = dict(zip(names, explicit or (None,) * 3, strict=True))
    launched: dict[str, Any] = {name: environ.get(name) or None for name in VARIABLES}
    for values, source in (
        (passed, "explicit arguments"),
        (launched, "towerjax launch"),
    ):
        if any(value is not None for value in values.values()):
            return cluster_of_three(values, source)
    if not (text := environ.get("TF_CONFIG")):
        return None
    try:
        return parse_spec(json.loads(text), how="TF_CONFIG")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"TF_CONFIG: {text!r} is not JSON ({error}). Write, for example,"
            f" {_EXAMPLE}."
        ) from error


def cluster_of_three(values: Mapping[str, Any], source: str) -> Cluster:
    """Make the cluster that three values name.

    They are the coordinator's address, the number of processes, and this process's
    index. ``source`` names them at the start of an error.
    """
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(
            f"{source}: {', '.join(values)} belong together, got {dict(values)}. Give"
            f" {' and '.join(missing)} too, or none of them."
        )
    coordinator, num_processes, process_id = values.values()
    # Environment variables are text, so they are converted.
    if source != "explicit arguments":
        num_processes = int(num_processes)
        process_id = int(process_id)
    if not _is_address(coordinator):
        raise ValueError(f"{source}: coordinator={coordinator!r} {_NO_ADDRESS}")
    check_whole(f"{source}: num_processes", num_processes)
    check_whole(f"{source}: process_id", process_id, 0, num_processes - 1)
    return Cluster(process_id, num_processes, coordinator, source)


# Launchers, ordered so that one that may run inside another comes first. Each sets
# variables for this process's index and the number of processes, and then for its index
# and their number on this machine.
_OPEN_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in _OPEN_MPI),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
# JAX's names of the launchers that it can detect.
_DETECTED = {"Slurm": "slurm", "Open MPI": "ompi"}
# These variables say which process this is, but not how many there are.
_RANKS = ("PMIX_RANK", "JOB_COMPLETION_INDEX")
_MEET = (
    "Set MASTER_ADDR and MASTER_PORT in all processes, to the host of process 0 and a"
    " free port there, and RANK and WORLD_SIZE if they are not set. On Kubernetes"
    " install jax[k8s]."
)


def _innermost(environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
    """Find the innermost launcher of several processes, and its variables.

    Returns None if no launcher started several processes.
    """
    several = []
    for launcher, names in _LAUNCHERS.items():
        me, count = (environ.get(name, "") for name in names[:2])
        if me.isdecimal() and count.isdecimal() and int(count) > 1:
            several.append((launcher, names))
    # `srun --mpi=pmi2` sets the variables of both.
    if len(several) > 1 and several[0][0] == "MPICH":
        mpich, slurm = ([environ[x] for x in names[:2]] for _, names in several)
        several = several[mpich == slurm :]
    return several[0] if several else None


def refusal(environ: Mapping[str, str], but: str) -> str | None:
    """Write an error if a launcher started several processes, else None.

    ``but`` is a clause that says why this process would be alone.
    """
    return _alone(_sign_of_several(environ, _RANKS), but, _MEET)


def forgotten(environ: Mapping[str, str]) -> str | None:
    """Write an error if this process should have joined others of its job.

    It is called in a process that is alone to JAX. Returns None if nothing in the
    environment tells of other processes.
    """
    count = environ.get(VARIABLES[1], "")
    if count.isdecimal() and int(count) > 1:
        sign = f"{VARIABLES[1]}={count} {_COUNTS}", VARIABLES
    elif (tasks := _count_tasks(environ)) > 1:
        sign = f"TF_CONFIG names {tasks} processes of one job", ("TF_CONFIG",)
    else:  # a pod's index alone tells nothing: it may number separate jobs
        sign = _sign_of_several(environ, _RANKS[:1])
    # With ``srun --pty`` only the first task has the terminal. It may run a shell, in
    # which a program is meant to run alone.
    is_shell = "SLURM_PTY_PORT" in environ and environ.get("SLURM_PROCID") == "0"
    if is_shell and sign is not None and sign[1][0] in _LAUNCHERS["Slurm"]:
        return None
    remedy = "Call tj.cluster.initialize() at the start, before JAX is used."
    return _alone(sign, "JAX knows of this one only", remedy)


_COUNTS = "is the number of processes in a job of several"
# A clause that says that there are several processes, and the variables that show it.
_Sign: TypeAlias = tuple[str, tuple[str, ...]] | None


def _sign_of_several(environ: Mapping[str, str], ranks: tuple[str, ...]) -> _Sign:
    if (launched := _innermost(environ)) is not None:
        name = launched[1][1]
        return f"{name}={environ[name]} {_COUNTS}", (name,)
    for name in ranks:
        if (number := environ.get(name, "")).isdecimal() and int(number):
            meaning = "is the number of this process in a job of several"
            return f"{name}={number} {meaning}", (name,)
    return None


def _count_tasks(environ: Mapping[str, str]) -> int:
    """Count the processes that ``TF_CONFIG`` names for this process's job."""
    try:
        jobs, task = _jobs_and_task(json.loads(environ.get("TF_CONFIG", "")), "")
    except ValueError:  # `initialize` explains the error
        return 0
    if task.get("type") == "evaluator":
        return 1
    return sum(len(tasks) for job, tasks in jobs.items() if job != "evaluator")


def _alone(sign: _Sign, but: str, remedy: str) -> str | None:
    if sign is None:
        return None
    meaning, names = sign
    return (
        f"{meaning}, but {but}: each would be a job of its own, and write the same"
        f" files. {remedy} If each is to be a job of its own, set {', '.join(names)} to"
        " nothing."
    )


def started_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """Find the cluster of the innermost launcher; None if its address is unknown."""
    if (launched := _innermost(environ)) is None:
        return None
    launcher, names = launched
    host = environ.get("MASTER_ADDR")
    port = environ.get("MASTER_PORT", "")
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    if not address and host and port.isdecimal():
        # torchrun itself may listen at MASTER_PORT, so the next port is taken.
        port = int(port) + (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        # Whether all processes are on this machine.
        is_here = environ.get(names[3]) == environ[names[1]]
        host = LOOPBACK if is_here else f"[{host}]" if ":" in host else host
        address = f"{host}:{port}"
    if not address:
        return None
    three = {"coordinator": address, **{x: environ[x] for x in names[1::-1]}}
    return cluster_of_three(three, launcher)


def detection(environ: Mapping[str, str]) -> str | None:
    """Choose how JAX shall detect the cluster; None lets JAX choose."""
    if (launched := _innermost(environ)) is not None:
        return _DETECTED.get(launched[0], "deactivate")
    # JAX would make a cluster for a single task of Slurm, too. It would take a port
    # that other steps of the same allocation use:
    # https://github.com/jax-ml/jax/pull/12152.
    return "deactivate" if environ.get("SLURM_STEP_NUM_TASKS") == "1" else None


def own_devices(environ: Mapping[str, str]) -> list[int] | None:
    """List the index of this process's accelerator; None for all of them.

    A launcher's process that shares its machine with others uses one accelerator.
    """
    if (launched := _innermost(environ)) is None or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    local, local_count = (environ.get(name, "") for name in launched[1][2:])
    has_one = re.fullmatch("[^,]+", environ.get("CUDA_VISIBLE_DEVICES", ""))
    if has_one or local_count == "1" or not local.isdecimal():
        return None
    return [int(local)]
