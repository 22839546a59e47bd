"""Orbax's manager of a folder, which writes, commits and deletes checkpoints."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from etils import epath

from towerjax.loop.checkpoint.folder import DELETED
from towerjax.loop.files import is_on_disk
from towerjax.mesh.processes import Exchange, Processes


def open_manager(
    directory: epath.Path,
    seal: Callable[[], None],
    policy: Any,
    processes: Sequence[int],
    name: str | None = None,
) -> Any:
    """Open Orbax's manager of a folder, for saving.

    Orbax is imported here, because the import is slow. ``seal`` is called before each
    commit, and ``policy`` chooses which checkpoints to keep. The ``processes`` that
    write wait for one another; with a ``name`` not for one that is lost. No other
    manager of the job has that name.
    """
    import orbax.checkpoint as ocp

    in_thread = ocp.AsyncOptions(
        # Orbax would give up a save after 20 minutes, counted by the clock of the
        # machine, which may be set forward during a save.
        timeout_secs=10**7,
        post_finalization_callback=seal,
        # With True, two managers in two threads of one process would wait for each
        # other.
        create_directories_asynchronously=False,
        barrier_sync_fn=None if name is None else _barrier_of(processes, name),
    )
    # A checkpoint is moved before it is deleted, so that readers see it disappear at
    # once. Stores cannot rename.
    moved_to = DELETED if is_on_disk(directory) else None
    options = ocp.CheckpointManagerOptions(
        multiprocessing_options=of_processes(processes),
        create=False,
        async_options=in_thread,
        preservation_policy=policy,
        todelete_subdir=moved_to,
    )
    handler = ocp.StandardCheckpointHandler()
    manager = ocp.CheckpointManager(directory, options=options, item_handlers=handler)
    # Orbax would ask JAX, in another thread and about an older step, whether the job
    # was preempted. `is_preempted` allows one question for each step.
    manager.reached_preemption = lambda step: False
    return manager


def _barrier_of(processes: Sequence[int], name: str) -> Callable[..., None]:
    """Make a barrier at which nobody waits for a process that is lost.

    JAX's own would wait for minutes. Orbax uses a key of barriers again and again.
    """
    by_key: dict[str, Exchange] = {}

    def wait(*, key: str, timeout_ms: int) -> None:
        del timeout_ms
        if key not in by_key:
            waits_for = "process {}, to save together"
            by_key[key] = Exchange(f"{name}/{key}", waits_for, processes)
        by_key[key].all_gather(None)

    return wait


def join_counts(processes: Processes) -> None:
    """Let all processes count Orbax's operations the same way, after a loss.

    The names of Orbax's barriers have this number.
    """
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    of_all = processes.gather(int(OperationIdGenerator.get_current_operation_id()))
    while int(OperationIdGenerator.get_current_operation_id()) < max(of_all):
        OperationIdGenerator.next_operation_id()


def of_processes(processes: Sequence[int]) -> Any:
    """Make Orbax's options for the processes that save or restore together."""
    from orbax.checkpoint.options import MultiprocessingOptions

    if len(processes) in (0, jax.process_count()):
        return MultiprocessingOptions()
    return MultiprocessingOptions(
        primary_host=processes[0], active_processes={*processes}
    )


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silence Orbax's logs of failures in this block, because failures are raised."""

    def is_others(line: logging.LogRecord) -> bool:
        return "/orbax/" not in line.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(is_others)
    try:
        yield
    finally:
        logger.removeFilter(is_others)
