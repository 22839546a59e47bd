"""Join this process to the others of its job, and leave it."""

import atexit
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

from towerjax.mesh.cluster import heartbeat
from towerjax.mesh.cluster.spec import (
    SINGLE_PROCESS,
    Cluster,
    connection_error,
    find_cluster,
    is_free,
    is_loopback,
    manager_name,
    split_address,
)
from towerjax.types.options import check_whole

_SILENCE_S = 5
_COLLECTIVE_FLAG = "--xla_cpu_collective_timeout_seconds"


@dataclasses.dataclass
class _Process:
    """The state of `initialize`, which like JAX's own is one per process."""

    cluster: Cluster | None = None
    excepthook: Any = None


_process = _Process()


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `initialize` besides the cluster."""

    heartbeat_timeout_s: int
    initialization_timeout_s: int
    shutdown_timeout_s: int
    collective_timeout_s: int | None
    exit_on_exception: bool

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("_s"):
                check_whole(name, value, or_none=name == "collective_timeout_s")


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
    """Join this process to the others of its job; JAX then has the devices of all.

    The cluster is taken from the first of: the arguments; ``cluster_spec``; what
    ``towerjax launch`` set; ``TF_CONFIG``; what JAX detects (Slurm, Open MPI,
    Kubernetes, TPU). If none of them names one, this is a job of one process and
    nothing is started, so that the same program runs everywhere. A second call
    returns the running cluster.

    Call it before JAX is used, after changes of ``jax.config``. Process 0 listens at
    the coordinator's port; at a loopback address to this machine only.

    Note: from then on JAX holds SIGTERM back, so that a job can save before it is
    preempted: `run` with a `Checkpointer` saves; other programs are ended by SIGKILL.
    After ``sys.exit(1)`` the process waits for the others at its end, up to
    ``shutdown_timeout_s``: raise an exception instead.

    Args:
      coordinator: ``"host:port"`` at which process 0 listens.
      num_processes: How many processes there are.
      process_id: Which one this is, from 0; process 0 is the chief.
      cluster_spec: ``{"chief": [...], "worker": ["host:port", ...]}``, or a mapping
        like the whole of ``TF_CONFIG``.
      task_type: ``"chief"`` or ``"worker"``: the list that names this process.
      task_id: Its index in that list, from 0.
      heartbeat_timeout_s: JAX ends the other processes after so long without a sign of
        life from one.
      initialization_timeout_s: How long to wait for the others to join. Then the
        process prints which are missing and exits with code 1: no exception can end
        this wait.
      shutdown_timeout_s: How long to wait for the others at the end.
      collective_timeout_s: How long a collective on CPUs waits for a lost process
        before it fails; None waits for the heartbeat.
      exit_on_exception: Whether an uncaught exception ends this process of several at
        once, by ``os._exit``. Otherwise it waits for the others, which wait for it.

    Returns:
      The `Cluster`.

    Raises:
      ValueError: The cluster is named wrongly or incompletely, or a timeout is invalid.
      RuntimeError: JAX or the port is in use already; this process belongs to another
        cluster already; JAX counts another number of processes.
      TimeoutError: No process listens at the coordinator's address.

    Example:
      >>> initialize()  # doctest: +SKIP
      Cluster(process_id=0, num_processes=1, coordinator=None, how='one process: ...
    """
    options = _Options(
        heartbeat_timeout_s=heartbeat_timeout_s,
        initialization_timeout_s=initialization_timeout_s,
        shutdown_timeout_s=shutdown_timeout_s,
        collective_timeout_s=collective_timeout_s,
        exit_on_exception=exit_on_exception,
    )
    named = find_cluster(
        os.environ,
        explicit=(coordinator, num_processes, process_id),
        spec=(cluster_spec, task_type, task_id),
    )
    if _process.cluster is not None:
        return _require_same(_process.cluster, named)
    _refuse_if_in_use()
    heartbeat.start()
    _set_collective_timeout(collective_timeout_s)
    if named is None:
        _process.cluster = _join_detected(options)
    else:
        _process.cluster = _join_named(named, options)
    if _process.cluster.num_processes == 1:
        _restore_excepthook()
    else:
        _report_waiting_at_exit(_process.cluster, shutdown_timeout_s)
    return _process.cluster


def _report_waiting_at_exit(cluster: Cluster, timeout_s: int) -> None:
    """Print to stderr if this process has ended and waits long for the others."""
    ended = threading.Event()
    atexit.register(ended.set)  # called before JAX's, which was registered earlier

    def speak() -> None:
        ended.wait()
        time.sleep(_SILENCE_S)
        print(
            f"process {cluster.process_id} of {cluster.num_processes} has ended and"
            f" waits for the others, up to {timeout_s} s: did all do as many steps?",
            file=sys.stderr,
            flush=True,
        )

    threading.Thread(target=speak, name="towerjax-end", daemon=True).start()


def shutdown() -> None:
    """Wait for the other processes and leave the job; without a job do nothing.

    Every process does this at its end. Call it to know that all came this far.
    """
    _restore_excepthook()
    _process.cluster = None
    jax.distributed.shutdown()


def is_chief() -> bool:
    """Whether this is process 0, which writes what one process alone must write."""
    return jax.process_index() == 0


def _require_same(running: Cluster, named: Cluster | None) -> Cluster:
    """Return the running cluster; raise if a second call names another one."""
    if named is not None and dataclasses.replace(named, how=running.how) != running:
        raise RuntimeError(
            f"tj.cluster.initialize() has run already and gave {running}; this call"
            f" means {named}. A process is one of one cluster: call it once."
        )
    return running


def _set_collective_timeout(timeout_s: int | None) -> None:
    if timeout_s is None:
        return
    platforms = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    if platforms.split(",")[0] != "cpu":
        raise ValueError(
            f"collective_timeout_s={timeout_s} is for collectives on CPUs, and JAX's"
            f" platform is {platforms or 'not chosen'!r}. Set JAX_PLATFORMS=cpu, or"
            " leave it out: heartbeat_timeout_s counts everywhere."
        )
    flags = os.environ.get("XLA_FLAGS", "")
    said = f"{_COLLECTIVE_FLAG}={timeout_s}"
    if _COLLECTIVE_FLAG in flags and said not in flags.split():
        raise ValueError(
            f"collective_timeout_s={timeout_s}, but XLA_FLAGS is {flags!r} already. Say"
            " it once."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {said}".strip()


def _refuse_if_in_use() -> None:
    """Raise if JAX is in use already, before waiting for other processes."""
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "jax.distributed.initialize() has run already. Call"
            " tj.cluster.initialize() in its place."
        )
    try:
        # JAX first raises if it is in use; then, without a cluster, it starts nothing.
        jax.distributed.initialize(cluster_detection_method="deactivate")
    except ValueError:
        return
    except RuntimeError as error:
        raise RuntimeError(
            "tj.cluster.initialize() came after the first use of JAX, which then knows"
            " only this process' devices. Put it at the start of the program, before"
            " jax.devices(), any array and any strategy; only imports and"
            " jax.config.update(...) may come before it."
        ) from error


def _join_named(cluster: Cluster, options: _Options) -> Cluster:
    """Join a cluster that the arguments or the environment name."""
    address, me = cluster.coordinator, cluster.process_id
    assert address is not None
    until = time.monotonic() + options.initialization_timeout_s
    who = f"process {me} of {cluster.num_processes}"
    with _startup_timeout(f"{who}, at {address},", _other_processes(cluster), options):
        if me == 0:
            _check_port(address)
        else:
            _wait_for_coordinator(who, address, until)
        _initialize_jax(
            options,
            who,
            coordinator_address=address,
            num_processes=cluster.num_processes,
            process_id=me,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address if is_loopback(address) else None,
        )
    # All have joined. Starting the devices may take longer than the timeout.
    _check_joined(cluster, jax.process_count(), jax.process_index())
    return cluster


def _join_detected(options: _Options) -> Cluster:
    """Join the cluster that JAX detects; a job of one process if it detects none."""
    manager = manager_name(os.environ)
    try:
        with _startup_timeout("this process", f"the others of {manager}", options):
            _initialize_jax(options, "this process")
    except ValueError as error:
        if "coordinator_address should be defined" in str(error):
            return Cluster(0, 1, None, SINGLE_PROCESS)
        raise ValueError(
            f"The environment names a part of a cluster to JAX, which says: {error}"
            " Unset JAX_COORDINATOR_ADDRESS and the like, or give coordinator,"
            " num_processes and process_id."
        ) from error
    return Cluster(jax.process_index(), jax.process_count(), None, manager)


def _initialize_jax(options: _Options, who: str, **where: Any) -> None:
    jax.distributed.initialize(
        heartbeat_timeout_seconds=options.heartbeat_timeout_s,
        # Our timeout ends first: JAX's aborts the process and names no missing one.
        initialization_timeout=options.initialization_timeout_s + 5,
        shutdown_timeout_seconds=options.shutdown_timeout_s,
        **where,
    )
    if options.exit_on_exception:
        _process.excepthook = sys.excepthook
        sys.excepthook = _exit_at_once(who, sys.excepthook)


def _check_joined(cluster: Cluster, num_processes: int, process_id: int) -> None:
    if (num_processes, process_id) != (cluster.num_processes, cluster.process_id):
        raise RuntimeError(
            f"{cluster.how}: this is process {cluster.process_id} of"
            f" {cluster.num_processes}, but to JAX it is {process_id} of"
            f" {num_processes}. Its devices do not communicate between processes, or"
            " in another order: check the platform, or leave the cluster to JAX to"
            " detect."
        )


def _check_port(address: str) -> None:
    _, port = split_address(address)
    if not is_free(port):
        raise RuntimeError(
            f"process 0 is to listen at {address}, but something on this machine does"
            f" already. End it, or choose another port than {port} for all processes."
        )


def _wait_for_coordinator(who: str, address: str, until: float) -> None:
    began = time.monotonic()
    while (error := connection_error(address, timeout_s=1)) is not None:
        if time.monotonic() > until - 0.5:
            raise TimeoutError(
                f"{who} found that nobody listens at {address} after"
                f" {time.monotonic() - began:.0f} s ({error}). Process 0 does once it"
                " calls tj.cluster.initialize(): does it run, and is the address right?"
            ) from error
        time.sleep(0.1)


def _other_processes(cluster: Cluster) -> str:
    ids = [str(i) for i in range(cluster.num_processes) if i != cluster.process_id]
    names = ", ".join(ids if len(ids) < 9 else [*ids[:7], "...", ids[-1]])
    return f"process{'es' * (len(ids) > 1)} {names}"


@contextlib.contextmanager
def _startup_timeout(who: str, others: str, options: _Options) -> Iterator[None]:
    """Print what the block waits for; exit if it does not end within the timeout."""
    done = threading.Event()
    timeout_s = options.initialization_timeout_s
    first = min(_SILENCE_S, timeout_s / 2)

    def watch() -> None:
        if done.wait(first):
            return
        _say(f"{who} waits for {others} (up to {timeout_s} s)")
        # The block waits in C++, which no exception can end.
        if not done.wait(timeout_s - first):
            _say(
                f"{who} waited {timeout_s} s and ends: {others} did not come, or not"
                " all of them. Do they run, and call tj.cluster.initialize()?"
            )
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _say(text: str) -> None:
    print(f"towerjax: {text}", file=sys.stderr, flush=True)


def _restore_excepthook() -> None:
    if _process.excepthook is not None:
        sys.excepthook, _process.excepthook = _process.excepthook, None


def _exit_at_once(who: str, previous: Any) -> Any:
    """An excepthook that exits without waiting for the others, which wait for it."""

    def hook(kind: Any, error: Any, trace: Any) -> None:
        try:
            _say(f"{who} ends with this exception:")
            previous(kind, error, trace)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    return hook
