"""Find and check the processes of the job, their addresses, and this one's number."""

import dataclasses
import json
import re
import socket
from collections.abc import Mapping
from typing import Any

from towerjax.types.options import check_whole

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def split_address(address: str) -> tuple[str, int]:
    """Split an address into its host, without an IPv6 host's brackets, and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach that address."""
    host, _ = split_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def is_free(port: int) -> bool:
    """Whether a process of this machine could listen at that port.

    JAX's server would share a port with another job's server, and it aborts the process
    if it may not use the port.
    """
    with socket.socket() as probe:
        # A port of a job that has just ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def connection_error(address: str, timeout_s: float) -> OSError | None:
    """None where a connection to that address succeeds, else why it does not."""
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except OSError as error:
        return error
    return None


# The variables that `initialize` reads.
VARIABLES = ("TOWERJAX_COORDINATOR", "TOWERJAX_NUM_PROCESSES", "TOWERJAX_PROCESS_ID")
# Process 0 is the chief, or worker 0 if there is no chief.
JOBS = ("chief", "worker")
EXAMPLE = (
    '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]},'
    ' "task": {"type": "worker", "index": 0}}'
)
_NOT_JOBS = {
    "ps": "towers keep their parameters on every device, so there are no parameter"
    " servers: leave 'ps' out, and start no process for it",
    "evaluator": "the evaluator is not part of the job: leave it out, and start it as"
    " a process of its own",
    "master": "that job is called 'chief' here",
}
_ADDRESS = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:.%\w]+\]):(?P<port>[0-9]+)")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a job, and which of them this one is.

    Attributes:
      process_id: The number of this process, from 0.
      num_processes: How many processes there are.
      coordinator: ``"host:port"`` at which process 0 listens; None for one process,
        and if JAX detected the cluster.
      how: What named the cluster, in words.
    """

    process_id: int
    num_processes: int
    coordinator: str | None
    how: str


def check_address(address: Any, name: str) -> str:
    """Return the address, or raise unless it is a ``"host:port"``."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None:
        raise ValueError(
            f"{name}={address!r} is not an address. Write 'host:port', such as"
            " '10.0.0.1:2222'; an IPv6 host stands in brackets, '[::1]:2222'."
        )
    if not 1 <= int(found["port"]) <= 65535:
        raise ValueError(
            f"{name}={address!r} has port {found['port']}; a port is one of 1 to 65535."
        )
    return address


def check_member(
    coordinator: Any, num_processes: Any, process_id: Any, *, how: str
) -> Cluster:
    """The cluster of these three values, checked."""
    check_address(coordinator, f"{how}: coordinator")
    check_whole(f"{how}: num_processes", num_processes)
    check_whole(f"{how}: process_id", process_id, 0, num_processes - 1)
    return Cluster(process_id, num_processes, coordinator, how)


def parse_spec(
    spec: Any, task_type: Any = None, task_id: Any = None, *, how: str = "cluster_spec"
) -> Cluster:
    """The cluster that a specification like ``TF_CONFIG`` describes.

    The processes are the chief, if there is one, and the workers in the order of
    their list. The first is process 0, which listens at its address. The other
    addresses are checked and counted; nothing listens there.

    Args:
      spec: ``{"chief": ["host:port"], "worker": ["host:port", ...]}``, or
        ``{"cluster": {...}, "task": {"type": ..., "index": ...}}``.
      task_type: ``"chief"`` or ``"worker"``; None where ``spec`` names the task.
      task_id: The index in that list, from 0; None where ``spec`` names the task.
      how: What the specification comes from, in words; errors begin with it.

    Returns:
      A `Cluster`.

    Raises:
      ValueError: The specification is wrong; says what to write instead.

    Example:
      >>> hosts = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
      >>> parse_spec(hosts, "worker", 1).process_id
      2
    """
    jobs = spec = _mapping(spec, how, EXAMPLE)
    if "cluster" in spec or "task" in spec:
        if "cluster" not in spec:
            raise ValueError(
                f"{how} has no 'cluster'. Write such as {EXAMPLE}, or leave all of it"
                " out for a job of one process."
            )
        jobs = spec["cluster"]
        task_type, task_id = _task_of(spec, task_type, task_id, how)
    addresses = _addresses(jobs, how)
    _check_task(addresses, task_type, task_id, how)
    order = [(job, i) for job in JOBS for i in range(len(addresses.get(job, ())))]
    first, index = order[0]
    return Cluster(
        order.index((task_type, task_id)), len(order), addresses[first][index], how
    )


def parse_json(text: str, *, how: str) -> Cluster:
    """The cluster that a JSON text like ``TF_CONFIG`` describes."""
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{how}: {text!r} is not JSON ({error}). Write such as {EXAMPLE}."
        ) from error
    if isinstance(spec, dict) and "cluster" not in spec:
        spec.setdefault("task", None)  # so that `parse_spec` asks for 'cluster'
    return parse_spec(spec, how=how)


def _mapping(value: Any, what: str, example: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {value!r}, no mapping. Write such as {example}.")
    return value


def _task_of(spec: Any, task_type: Any, task_id: Any, how: str) -> tuple[Any, Any]:
    """The task that the specification or the arguments name, not both."""
    if spec.get("task") is None:
        return task_type, task_id
    if task_type is not None or task_id is not None:
        raise ValueError(
            f"{how}: 'task' says {spec['task']!r}, and task_type={task_type!r} and"
            f" task_id={task_id!r} say it again. Name the task once."
        )
    task = _mapping(spec["task"], f"{how}: 'task'", '{"type": "worker", "index": 0}')
    return task.get("type"), task.get("index")


def _addresses(jobs: Any, how: str) -> dict[str, list[str]]:
    """Job -> addresses, checked."""
    example = '{"worker": ["host-a:2222", "host-b:2222"]}'
    for job, tasks in _mapping(jobs, f"{how}: 'cluster'", example).items():
        if job not in JOBS:
            advice = _NOT_JOBS.get(job, "the jobs are 'chief' and 'worker'")
            raise ValueError(f"{how}: job {job!r} cannot be here: {advice}.")
        if not isinstance(tasks, list | tuple):
            raise ValueError(
                f"{how}: job {job!r} is {tasks!r}, which is not a list. Write such as"
                ' ["host-a:2222"].'
            )
        for index, address in enumerate(tasks):
            check_address(address, f"{how}: {job}[{index}]")
    _check_addresses(jobs, how)
    return {job: list(tasks) for job, tasks in jobs.items() if tasks}


def _check_addresses(jobs: Any, how: str) -> None:
    named = [address.lower() for tasks in jobs.values() for address in tasks]
    if not named:
        raise ValueError(
            f"{how}: the cluster {dict(jobs)!r} has no tasks. Write such as"
            ' {"worker": ["host-a:2222", "host-b:2222"]}, or leave all of it out for'
            " a job of one process."
        )
    chiefs = jobs.get("chief", ())
    if len(chiefs) > 1:
        raise ValueError(
            f"{how}: there are {len(chiefs)} chiefs, {list(chiefs)!r}; there can be"
            " one. Make the others workers."
        )
    twice = sorted({address for address in named if named.count(address) > 1})
    if twice:
        raise ValueError(
            f"{how}: {', '.join(twice)} stands for more than one task. Give each"
            " process a port of its own."
        )


def _check_task(
    addresses: dict[str, list[str]], task_type: Any, task_id: Any, how: str
) -> None:
    """Raise unless the task is one of the cluster's."""
    if task_type is None or task_id is None:
        raise ValueError(
            f"{how}: which task is this process? Got type {task_type!r} and index"
            f" {task_id!r}; both are needed, such as 'worker' and 0."
        )
    if not isinstance(task_type, str) or task_type not in addresses:
        advice = "Use one of " + " or ".join(repr(job) for job in addresses) + "."
        if isinstance(task_type, str) and task_type in _NOT_JOBS:
            advice = _NOT_JOBS[task_type].capitalize() + "."
        raise ValueError(
            f"{how}: this process is of job {task_type!r}, which the cluster does not"
            f" have. {advice}"
        )
    last = len(addresses[task_type]) - 1
    check_whole(f"{how}: the index of the task", task_id, 0, last)


SINGLE_PROCESS = "one process: nothing in the environment names a cluster"
_MANAGERS = {
    "SLURM_JOB_ID": "Slurm",
    "OMPI_MCA_orte_hnp_uri": "Open MPI",
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
}


def find_cluster(
    environ: Mapping[str, str],
    *,
    explicit: tuple[Any, Any, Any] = (None, None, None),
    spec: tuple[Any, Any, Any] = (None, None, None),
) -> Cluster | None:
    """The cluster of the arguments, else the launcher, else TF_CONFIG, else None."""
    names = ("coordinator", "num_processes", "process_id")
    if any(value is not None for value in explicit):
        if any(value is not None for value in spec):
            raise ValueError(
                "Both coordinator, num_processes, process_id and cluster_spec,"
                " task_type, task_id are given. Give one of the two."
            )
        _check_complete(dict(zip(names, explicit, strict=True)), "arguments")
        return check_member(*explicit, how="explicit arguments")
    if any(value is not None for value in spec):
        if spec[0] is None:
            raise ValueError(
                f"task_type={spec[1]!r} and task_id={spec[2]!r} are given without"
                " cluster_spec. Give it too, or set TF_CONFIG and leave these out."
            )
        return parse_spec(*spec, how="cluster_spec")
    launched = {name: environ.get(name) for name in VARIABLES}
    if any(launched.values()):
        return _cluster_of_launcher(launched)
    if environ.get("TF_CONFIG"):
        return parse_json(environ["TF_CONFIG"], how="TF_CONFIG")
    return None


def manager_name(environ: Mapping[str, str]) -> str:
    """The manager of the cluster that JAX detected, in words."""
    found = [name for key, name in _MANAGERS.items() if key in environ]
    return f"{(found or ['a cluster'])[0]}, detected by JAX"


def _check_complete(values: Mapping[str, Any], kind: str) -> None:
    missing = [name for name, value in values.items() if value in (None, "")]
    if missing:
        given = ", ".join(f"{k}={v!r}" for k, v in values.items() if k not in missing)
        raise ValueError(
            f"The {kind} {', '.join(values)} belong together: there is only {given}."
            f" Give {' and '.join(missing)} too, or none of them."
        )


def _cluster_of_launcher(values: Mapping[str, Any]) -> Cluster:
    _check_complete(values, "variables")
    coordinator, *numbers = values.values()
    for name, number in zip(VARIABLES[1:], numbers, strict=True):
        if not number.isdecimal():
            raise ValueError(
                f"{name}={number!r} is not a number. `towerjax launch` sets it; where"
                " something else does, write such as '0'."
            )
    return check_member(coordinator, *map(int, numbers), how="towerjax launch")
