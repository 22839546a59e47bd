"""When does this process become one of several? `initialize` and `shutdown`."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from towerjax.cluster.find import NONE_NAMED, find_cluster, manager_name
from towerjax.cluster.ports import is_free, is_loopback, someone_listens, split_address
from towerjax.cluster.spec import Cluster

_PATIENCE_S = 5
_COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"


@dataclasses.dataclass
class _Process:
    """What this process has become; JAX, too, can become that once a process."""

    cluster: Cluster | None = None
    excepthook: Any = None


_process = _Process()


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    cluster_spec: Any = None,
    task_type: str | None = None,
    task_id: int | None = None,
    heartbeat_timeout_s: int = 100,
    initialization_timeout_s: int = 300,
    shutdown_timeout_s: int = 300,
    collective_timeout_s: int | None = None,
    exit_on_exception: bool = True,
) -> Cluster:
    """This process joined to the others of its job, all devices known to all.

    The cluster is taken from the first of: the arguments; ``cluster_spec``; what
    ``towerjax launch`` set; ``TF_CONFIG``; what JAX detects (Slurm, Open MPI,
    Kubernetes, TPU). Where none is there, this is a job of one process and nothing is
    started, so that the same program runs everywhere. A second call returns the
    running cluster.

    Call it before JAX is used, after changes of ``jax.config``. Process 0 listens at
    the coordinator's port; on a loopback address, to this machine only.

    Note: after the start JAX holds SIGTERM back, so that a job can save before it is
    preempted: such a process is ended by SIGKILL. ``sys.exit(1)`` is no exception: the
    process waits at its end for the others, up to ``shutdown_timeout_s``. Raise.

    Args:
      coordinator: ``"host:port"`` at which process 0 shall listen.
      num_processes: How many processes there are.
      process_id: Which one this is, from 0; process 0 is the chief.
      cluster_spec: ``{"chief": [...], "worker": ["host:port", ...]}``, or the whole of
        what ``TF_CONFIG`` holds, as a mapping.
      task_type: ``"chief"`` or ``"worker"``: the list in which this process is.
      task_id: Its place there, from 0.
      heartbeat_timeout_s: After so long without a sign of life from one process JAX
        ends the others.
      initialization_timeout_s: How long to wait for the others to come.
      shutdown_timeout_s: How long to wait for the others at the end.
      collective_timeout_s: After so long a collective on CPUs fails whose peer is
        gone; None waits for the heartbeat.
      exit_on_exception: Whether an exception that nobody catches ends this process of
        several at once, by ``os._exit``. Otherwise it waits for the others, which wait
        for it.

    Returns:
      The `Cluster`.

    Raises:
      ValueError: What names the cluster is wrong or incomplete, or a timeout cannot be.
      RuntimeError: JAX is in use already, or the port is; this process is already one
        of another cluster; JAX does not count as many processes as there should be.
      TimeoutError: Nobody listens at the coordinator's address.

    Example:
      >>> initialize()  # doctest: +SKIP
      Cluster(process_id=0, num_processes=1, coordinator=None, how='one process: ...
    """
    timeouts = {
        "heartbeat_timeout_s": heartbeat_timeout_s,
        "initialization_timeout_s": initialization_timeout_s,
        "shutdown_timeout_s": shutdown_timeout_s,
        "collective_timeout_s": collective_timeout_s,
    }
    _check_timeouts(timeouts)
    named = find_cluster(
        os.environ,
        explicit=(coordinator, num_processes, process_id),
        spec=(cluster_spec, task_type, task_id),
    )
    if _process.cluster is not None:
        return _same(_process.cluster, named)
    _set_collective_timeout(collective_timeout_s)
    cluster = _start_detected(timeouts) if named is None else _start(named, timeouts)
    _process.cluster = cluster
    if exit_on_exception and cluster.num_processes > 1:
        _process.excepthook = sys.excepthook
        sys.excepthook = _exit_at_once(cluster, sys.excepthook)
    return cluster


def shutdown() -> None:
    """Wait for the others at the end of the job and leave it; nothing if there is none.

    Every process ends with this by itself. Call it to know that all came this far.
    """
    if _process.excepthook is not None:
        sys.excepthook = _process.excepthook
    _process.cluster = _process.excepthook = None
    jax.distributed.shutdown()


def is_chief() -> bool:
    """Whether this is process 0, which writes what is to be written once."""
    return jax.process_index() == 0


def _check_timeouts(timeouts: dict[str, Any]) -> None:
    for name, value in timeouts.items():
        if value is None and name == "collective_timeout_s":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be an int of seconds, >= 1.")


def _same(running: Cluster, named: Cluster | None) -> Cluster:
    """The running cluster, if the second call means it too."""
    if named is not None and dataclasses.replace(named, how=running.how) != running:
        raise RuntimeError(
            f"tj.cluster.initialize() has run already and gave {running}; this call"
            f" means {named}. A process is one of one cluster: call it once."
        )
    return running


def _set_collective_timeout(timeout_s: int | None) -> None:
    if timeout_s is None:
        return
    platforms = jax.config.read("jax_platforms") or ""
    if platforms.split(",")[0] != "cpu":
        raise ValueError(
            f"collective_timeout_s={timeout_s} is for collectives on CPUs, and JAX's"
            f" platform is {platforms or 'not chosen'!r}. Set JAX_PLATFORMS=cpu, or"
            " leave it out: heartbeat_timeout_s counts everywhere."
        )
    flags = os.environ.get("XLA_FLAGS", "")
    if _COLLECTIVE_FLAG in flags and f"{_COLLECTIVE_FLAG}={timeout_s}" not in flags:
        raise ValueError(
            f"collective_timeout_s={timeout_s}, but XLA_FLAGS is {flags!r} already. Say"
            " it once."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {_COLLECTIVE_FLAG}={timeout_s}".strip()


def _start(cluster: Cluster, timeouts: dict[str, Any]) -> Cluster:
    """Join the cluster that was named."""
    address, me = cluster.coordinator, cluster.process_id
    assert address is not None
    until = time.monotonic() + timeouts["initialization_timeout_s"]
    who = f"process {me} of {cluster.num_processes}"
    with _patience(who, _others(cluster), timeouts["initialization_timeout_s"]):
        if me == 0:
            _check_port(address)
        else:
            _wait_for_coordinator(who, address, until)
        bind = {"coordinator_bind_address": address} if is_loopback(address) else {}
        _call_jax(
            timeouts,
            coordinator_address=address,
            num_processes=cluster.num_processes,
            process_id=me,
            cluster_detection_method="deactivate",
            **bind,
        )
        counted = (jax.process_count(), jax.process_index())
    if counted != (cluster.num_processes, me):
        raise RuntimeError(
            f"{cluster.how} says that this is {who}; JAX's platform"
            f" {jax.default_backend()!r} counts {counted[0]} and calls this process"
            f" {counted[1]}. Does it communicate between processes? On CPUs"
            " jax_cpu_collectives_implementation must not be 'none'."
        )
    return cluster


def _start_detected(timeouts: dict[str, Any]) -> Cluster:
    """Join the cluster that JAX detects; one process where it detects none."""
    manager = manager_name(os.environ)
    try:
        with _patience("this process", manager, timeouts["initialization_timeout_s"]):
            _call_jax(timeouts)
    except ValueError as error:
        if "coordinator_address should be defined" in str(error):
            return Cluster(0, 1, None, NONE_NAMED)
        raise ValueError(
            f"The environment names a part of a cluster to JAX, which says: {error}"
            " Unset JAX_COORDINATOR_ADDRESS and the like, or give coordinator,"
            " num_processes and process_id."
        ) from error
    return Cluster(jax.process_index(), jax.process_count(), None, manager)


def _call_jax(timeouts: dict[str, Any], **where: Any) -> None:
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "jax.distributed.initialize() has run already. Call"
            " tj.cluster.initialize() in its place."
        )
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=timeouts["heartbeat_timeout_s"],
            # Ours comes first: JAX's ends the process with SIGABRT and names nobody.
            initialization_timeout=timeouts["initialization_timeout_s"] + 5,
            shutdown_timeout_seconds=timeouts["shutdown_timeout_s"],
            **where,
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise RuntimeError(
            "tj.cluster.initialize() came after the first use of JAX, which then knows"
            " only this process' devices. Put it at the start of the program, before"
            " jax.devices(), any array and any strategy; only imports and"
            " jax.config.update(...) may come before it."
        ) from error


def _check_port(address: str) -> None:
    _, port = split_address(address)
    if not is_free(port):
        raise RuntimeError(
            f"process 0 is to listen at {address}, but something on this machine does"
            f" already. End it, or choose another port than {port} for all processes."
        )


def _wait_for_coordinator(who: str, address: str, until: float) -> None:
    began = time.monotonic()
    while (error := someone_listens(address, timeout_s=1)) is not None:
        if time.monotonic() > until - 0.5:
            raise TimeoutError(
                f"{who}: nobody listens at {address} after"
                f" {time.monotonic() - began:.0f} s ({error}). Process 0 does once it"
                " calls tj.cluster.initialize(): does it run, and is the address right?"
            ) from error
        time.sleep(0.1)


def _others(cluster: Cluster) -> str:
    ids = [str(i) for i in range(cluster.num_processes) if i != cluster.process_id]
    names = ", ".join(ids if len(ids) < 9 else [*ids[:7], "...", ids[-1]])
    return f"process{'es' * (len(ids) > 1)} {names} at {cluster.coordinator}"


@contextlib.contextmanager
def _patience(who: str, others: str, timeout_s: int) -> Iterator[None]:
    """Say what is waited for; end the process when it has not come in time."""
    done = threading.Event()
    first = min(_PATIENCE_S, timeout_s / 2)

    def watch() -> None:
        if done.wait(first):
            return
        _say(f"{who} waits for {others} (up to {timeout_s} s)")
        # What is waited in is C++ that no exception ends.
        if not done.wait(timeout_s - first):
            _say(
                f"{who} ends: after {timeout_s} s not all of {others} have come. Do"
                " they run, and call tj.cluster.initialize()?"
            )
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _say(text: str) -> None:
    sys.stderr.write(f"towerjax: {text}\n")
    sys.stderr.flush()


def _exit_at_once(cluster: Cluster, previous: Any) -> Any:
    """An excepthook that does not wait for the others, which wait for this process."""

    def hook(kind: Any, error: Any, trace: Any) -> None:
        try:
            _say(
                f"process {cluster.process_id} of {cluster.num_processes} ends with"
                " this exception:"
            )
            previous(kind, error, trace)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    return hook
