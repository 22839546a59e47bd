"""Read from the environment what a launcher of several processes says of this one."""

import os
import pathlib
import re
from collections.abc import Mapping

from towerjax.mesh.cluster.spec import LOOPBACK, Cluster, cluster_of_three

# Of each launcher, the innermost first, the variables of a process's number, of how
# many there are, and of the same on its machine.
_OPEN_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in _OPEN_MPI),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
# They say which process this is, and not how many there are.
_RANKS = ("PMIX_RANK", "JOB_COMPLETION_INDEX")


def _innermost(environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
    """The innermost launcher that started several, and its variables."""
    for launcher, names in _LAUNCHERS.items():
        me, count = (environ.get(name, "") for name in names[:2])
        if me.isdecimal() and count.isdecimal() and int(count) > 1:
            return launcher, names
    return None


def refusal(environ: Mapping[str, str], but: str) -> str | None:
    """Why this process, ``but`` ..., may not work by itself; None if it may."""
    launched = _innermost(environ)
    number = (x for x in _RANKS if (n := environ.get(x, "")).isdecimal() and int(n))
    name = launched[1][1] if launched else next(number, None)
    if name is None:
        return None
    what = "the number of processes" if launched else "the number of this process"
    return (
        f"{name}={environ[name]} is {what} in a job of several, but {but}: each would"
        " be a job of its own, and write the same files. Set MASTER_ADDR and"
        " MASTER_PORT alike in all, to the host of process 0 and a free port there, and"
        " RANK and WORLD_SIZE if they are not set. On Kubernetes install jax[k8s]. If"
        f" each is to be a job of its own, set {name} to nothing."
    )


def started_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster of the innermost launcher; None if it does not say where it is."""
    if (launched := _innermost(environ)) is None:
        return None
    launcher, names = launched
    if (coordinator := _coordinator(environ, names)) is None:
        return None
    three = {"coordinator": coordinator, **{x: environ[x] for x in names[1::-1]}}
    return cluster_of_three(three, launcher)


def is_lone_step(environ: Mapping[str, str]) -> bool:
    """Whether Slurm started this process alone, in an allocation of any size."""
    return environ.get("SLURM_STEP_NUM_TASKS") == "1" and _innermost(environ) is None


def own_devices(environ: Mapping[str, str]) -> list[int] | None:
    """Which of its machine's accelerators a process takes that shares it; None: all."""
    if (launched := _innermost(environ)) is None or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    _, (_, count, local, local_count) = launched
    has_one = re.fullmatch("[^,]+", environ.get("CUDA_VISIBLE_DEVICES", ""))
    is_alone = environ.get(local_count) == "1" or (
        environ.get("SLURM_STEP_NUM_NODES") == environ[count] and not local_count
    )
    if has_one or is_alone or not environ.get(local, "").isdecimal():
        return None
    return [int(environ[local])]


def _coordinator(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The address where process 0 is to listen, the same in all; None if unknown."""
    if address := environ.get("JAX_COORDINATOR_ADDRESS"):
        return address
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "")
    is_here = environ.get(names[3]) == environ[names[1]]  # all are on this machine
    # The processes of a step may have PMI's variables too.
    slurm = zip(names[:2], _LAUNCHERS["Slurm"], strict=False)
    is_of_step = all(environ[own] == environ.get(of_step) for own, of_step in slurm)
    if is_of_step and names[3] not in environ:
        is_here = environ.get("SLURM_STEP_NUM_NODES") == "1"
        # Of node1,x2 and of gpu[007-009],x1 the first.
        nodes = re.match(r"([^,[]*)\[?(\w*)", environ.get("SLURM_STEP_NODELIST", ""))
        host = nodes and nodes[1] + nodes[2]
        job, step = (int(environ.get(f"SLURM_{x}_ID", 0)) for x in ("JOB", "STEP"))
        port = _port(61 * job + step)
    elif port.isdecimal():  # there torchrun itself may listen
        port = int(port) + (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    elif is_here and (pid := _launcher_pid(names[0], os.getpid())):
        port = _port(pid)
    host = LOOPBACK if is_here else host
    port = environ.get("JAX_COORDINATOR_PORT") or port
    return f"{f'[{host}]' if ':' in host else host}:{port}" if host and port else None


def _port(number: int) -> int:
    """A port above those that systems give out; of steps of one job not the same."""
    return 61440 + number % 4096


def _launcher_pid(name: str, pid: int) -> int | None:
    """The ancestor that started all on this machine, which lacks the variable."""
    start = f"{name}=".encode()
    while True:
        try:
            own = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(variable.startswith(start) for variable in own):
                return pid
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # no such system, or another user's process
            return None
        pid = int(stat.rpartition(")")[2].split()[1])
