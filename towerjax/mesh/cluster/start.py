"""Join this process to the others of its job, and leave it."""

import atexit
import dataclasses
import importlib.metadata
import os
import types
from typing import Any

import jax

from towerjax.mesh import live
from towerjax.mesh.cluster import ends, heartbeat, spec
from towerjax.mesh.cluster.leaving import Leaving
from towerjax.mesh.lines import calls_after, print_line
from towerjax.mesh.private_jax import coordinator_client, detects_cluster
from towerjax.mesh.processes import Exchange, begun
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_flag, check_whole
from towerjax.types.refusals import listed
from towerjax.types.version import __version__

_SILENCE_S = 5
_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_timeout_seconds"


# The cluster that this process has joined, and how it leaves it. Like JAX's own state,
# there is one of each per process.
_process = types.SimpleNamespace(cluster=None, leaving=None)


@api_boundary
def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_s: int | None = None,
    initialization_timeout_s: int = 300,
    shutdown_timeout_s: int = 300,
    recoverable: bool = False,
    collective_timeout_s: int | None = None,
) -> spec.Cluster:
    """Join this process to the others of its job; JAX then has the devices of all.

    The first of these that names a cluster counts: the arguments; what ``towerjax
    launch`` set; ``TF_CONFIG``; the variables of a launcher with ``MASTER_ADDR`` and
    ``MASTER_PORT``, as torchrun sets them; what JAX detects (Slurm, Open MPI 4,
    Kubernetes, TPU). If none names one, this is a job of one process and nothing is
    started, so that the same program runs everywhere. If JAX is initialized already, or
    at a second call, the cluster is the one that this process has joined.

    Call it before JAX is used, after changes of ``jax.config``. Process 0 listens at
    the coordinator's port; at a loopback address to this machine only.

    Note: in a job of several processes an uncaught exception ends its process at once,
    by ``os._exit``, and so does ``sys.exit`` with another status than 0. Otherwise this
    process would wait for the others, and they for it.

    Note: a process whose program ends waits for the others, in ``atexit``. It says so
    after 5 s. If another process waits for it in a later step, the job ends after 10 s.

    Note: if the job is ``recoverable``, a process whose program ends is lost to the
    others, which go on; process 0 waits for them. SIGTERM ends a process as usual,
    except in `run` with a `Checkpointer`.

    Note: otherwise JAX holds SIGTERM back, so that a job can save before it is
    preempted. `run` with a `Checkpointer` saves; other programs go on until SIGKILL.

    Args:
      coordinator: ``"host:port"`` at which process 0 listens.
      num_processes: The number of processes.
      process_id: The number of this process, from 0; process 0 is the chief.
      heartbeat_timeout_s: The seconds without a sign of life from one process, after
        which JAX ends the others; 100 if it is None. If ``recoverable``, the others go
        on, after 10.
      initialization_timeout_s: The seconds to wait for the others to join. After these
        the process prints whom it waited for and exits with code 1: no exception can
        end this wait.
      shutdown_timeout_s: The seconds to wait for the others at the end.
      recoverable: Whether the job goes on if a process other than process 0 is lost, as
        `run` does then. ``towerjax launch --recoverable`` says it for all processes.
      collective_timeout_s: If ``recoverable``: how many seconds one process may come
        later than the others to a step, 30 if it is None; on CPUs only.

    Returns:
      The `Cluster`.

    Raises:
      ValueError: The cluster is named wrongly or incompletely, or a timeout is invalid.
      RuntimeError: JAX or the port is in use already; this process belongs to another
        cluster already; JAX counts another number of processes; a launcher started
        several processes, and nothing says how they connect; the processes have other
        versions or settings, such as ``JAX_ENABLE_X64``; or JAX was initialized before,
        so that it is too late for ``recoverable``.

    Example:
      >>> initialize()  # doctest: +SKIP
      Cluster(process_id=0, num_processes=1, coordinator=None, how='one process: ...
    """
    check_whole("heartbeat_timeout_s", heartbeat_timeout_s, or_none=True)
    check_whole("collective_timeout_s", collective_timeout_s, or_none=True)
    check_flag("recoverable", recoverable)
    check_whole("initialization_timeout_s", initialization_timeout_s)
    check_whole("shutdown_timeout_s", shutdown_timeout_s)
    named = spec.find_cluster(os.environ, coordinator, num_processes, process_id)
    if (running := _process.cluster) is not None:
        # If JAX detected the cluster that runs, we do not know its address, and take
        # the named one as equal.
        known = running.coordinator or (named and named.coordinator)
        if named and named != dataclasses.replace(
            running, coordinator=known, how=named.how
        ):
            raise RuntimeError(
                f"tj.cluster.initialize() was called before and joined {running}, but"
                f" this call names {named}. A process joins one cluster: call it once."
            )
        return running
    heartbeat.start(begun)
    recoverable |= os.environ.get(spec.RECOVERABLE) == "1"
    if recoverable:
        _make_recoverable(collective_timeout_s)
    silence_s = 10 if recoverable else 100
    options = {
        "heartbeat_timeout_seconds": heartbeat_timeout_s or silence_s,
        "initialization_timeout": initialization_timeout_s,
        "shutdown_timeout_seconds": shutdown_timeout_s,
    }
    cluster = _process.cluster = _join_cluster(named, options)
    if cluster.num_processes > 1:
        _require_same_settings()
        name = _name_of(cluster)
        ends.end_at_once(name)
        if recoverable:
            live.begin()
            atexit.register(live.end)
        else:
            client = coordinator_client()
            _process.leaving = Leaving(client, cluster, name, shutdown_timeout_s)
    return cluster


def shutdown() -> None:
    """Wait for the other processes and leave the job; without a job do nothing.

    Every process does this by itself when it ends. When the call returns, all processes
    have called it.
    """
    ends.end_as_before()
    if live.is_recoverable():
        live.end()
    if _process.leaving is not None:
        _process.leaving.leave()
        _process.leaving = None
    _process.cluster = None
    jax.distributed.shutdown()


def _make_recoverable(collective_timeout_s: int | None) -> None:
    """Set what JAX needs so that the job goes on if it loses a process."""
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "recoverable=True must be set before jax.distributed.initialize(), which"
            " was called already. Leave that call out: tj.cluster.initialize() makes"
            " it."
        )
    jax.config.update("jax_enable_recoverability", True)
    # After a loss, JAX's own agreement on a step at which to stop would wait for the
    # lost process.
    jax.config.update("jax_enable_preemption_service", False)
    # A survivor may wait in a collective for another one that has seen the loss and has
    # left. Only this timeout ends that wait.
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags_kept = [x for x in flags if not x.startswith(f"{_COLLECTIVE_TIMEOUT}=")]
    if collective_timeout_s is not None or flags_kept == flags:
        flags = [*flags_kept, f"{_COLLECTIVE_TIMEOUT}={collective_timeout_s or 30}"]
    os.environ["XLA_FLAGS"] = " ".join(flags)


def is_chief() -> bool:
    """Return whether this is process 0, which alone writes files for the job."""
    return jax.process_index() == 0


def require_joined() -> None:
    """Raise if a launcher started several processes, and this one joined no other."""
    if _process.cluster is not None or jax.distributed.is_initialized():
        return
    text = spec.forgotten(os.environ)
    if text is not None and jax.process_count() == 1:
        raise RuntimeError(text)


# Options of JAX that change what a program computes.
_SETTINGS = """
    jax_enable_x64 jax_default_matmul_precision jax_default_prng_impl
    jax_threefry_partitionable
""".split()


def _require_same_settings() -> None:
    """Raise on every process unless versions and settings are the same on all.

    They are compared as text, through the coordinator and not by a program on the
    devices, because the processes would compile different programs.
    """
    settings = {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    compared = versions | {"towerjax": __version__} | settings
    exchange = Exchange(
        "settings", "the settings of process {}", range(jax.process_count())
    )
    of_all = exchange.all_gather(compared)
    problems = [
        f"{name} is {first} on process 0, but {other[name]} on process {process}"
        for process, other in enumerate(of_all)
        for name, first in of_all[0].items()
        if other[name] != first
    ]
    if problems:
        raise RuntimeError(
            f"The processes of this job differ: {listed(problems)}. Give all the same"
            " packages, the same environment variables (JAX_ENABLE_X64), and the same"
            " jax.config.update(...) before tj.cluster.initialize()."
        )


def _join_cluster(named: spec.Cluster | None, options: dict[str, Any]) -> spec.Cluster:
    """Join the named cluster, or the one that a launcher started or JAX detects."""
    origin = "JAX, which was initialized before"
    if not jax.distributed.is_initialized():
        origin = "a cluster that JAX detected"
        if named is None and (named := spec.started_cluster(os.environ)):
            options = {**options, "local_device_ids": spec.own_devices(os.environ)}
        if named is not None:
            _join_named(named, options)
        elif not _join_detected(options):
            return spec.Cluster(0, 1, None, spec.SINGLE_PROCESS)
        if getattr(jax.config, "jax_enable_recoverability"):  # noqa: B009
            live.refuse_to_rejoin()
    # All processes have joined. The next call starts the devices, which may take longer
    # than the timeout for joining.
    me = jax.process_index()
    count = jax.process_count()
    if named is not None and (count, me) != (named.num_processes, named.process_id):
        raise RuntimeError(
            f"{named.how}: this is {_name_of(named)} but to JAX it is process {me} of"
            f" {count}. Either this platform does not connect processes, or JAX"
            " numbers them in another order, or JAX was initialized before. Check the"
            " platform, or let JAX detect the cluster."
        )
    if named is None and count == 1:
        _refuse_to_be_alone("to JAX it is the only one")
    return named or spec.Cluster(me, count, None, origin)


def _refuse_to_be_alone(but: str, cause: Exception | None = None) -> None:
    if text := spec.refusal(os.environ, but):
        raise RuntimeError(text) from cause


def _join_named(named: spec.Cluster, options: dict[str, Any]) -> None:
    address = str(named.coordinator)
    if named.process_id == 0 and not spec.is_free(int(address.rpartition(":")[2])):
        raise RuntimeError(
            f"process 0 must listen at {address}, but another program on this machine"
            " does already. End that program, or choose another port for all processes."
        )
    options = {
        **options,
        "coordinator_address": address,
        "num_processes": named.num_processes,
        "process_id": named.process_id,
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": address if spec.is_loopback(address) else None,
    }
    _initialize_jax(options, _name_of(named), _other_processes(named))


def _join_detected(options: dict[str, Any]) -> bool:
    """Join the job that JAX detects; return False if it detects none."""
    method = spec.detection(os.environ)
    # JAX would try a method even if its own test says that the method does not work
    # here.
    finds_none = not detects_cluster(method)
    method = "deactivate" if finds_none else method
    try:
        _initialize_jax({**options, "cluster_detection_method": method})
    except (ValueError, RuntimeError) as error:
        # A RuntimeError means that JAX was used before, so the cluster may be there.
        finds_none &= isinstance(error, ValueError)
        why = "nothing says how they connect" if finds_none else f"{error}"
        _refuse_to_be_alone(why.rstrip("."), error)
        if finds_none:
            return False
        raise
    return True


def _initialize_jax(
    options: dict[str, Any],
    who: str = "this process",
    others: str = "the others of the cluster",
) -> None:
    """Join the cluster; print who is waited for, and exit after the timeout."""
    limit_s = options["initialization_timeout"]

    def end() -> None:
        print_line(
            f"{who} waited {limit_s} s and ends: {others} did not join, or not all of"
            " them did. Do they call tj.cluster.initialize(), and is the address right?"
        )
        os._exit(1)

    waits = f"{who} waits for {others} (up to {limit_s} s)"
    with (
        calls_after(min(_SILENCE_S, limit_s / 2), lambda: print_line(waits)),
        # This ends the process, because no exception ends JAX's wait in C++.
        calls_after(limit_s, end),
    ):
        # JAX's timeout is longer than ours, because JAX would abort without naming the
        # missing process.
        jax.distributed.initialize(**{**options, "initialization_timeout": limit_s + 5})


def _name_of(cluster: Any) -> str:
    at = f", at {cluster.coordinator}," * bool(cluster.coordinator)
    return f"process {cluster.process_id} of {cluster.num_processes}{at}"


def _other_processes(cluster: spec.Cluster) -> str:
    ids = [str(i) for i in range(cluster.num_processes) if i != cluster.process_id]
    names = ", ".join(ids if len(ids) < 9 else [*ids[:7], "...", ids[-1]])
    return f"process{'es' * (len(ids) > 1)} {names}"
