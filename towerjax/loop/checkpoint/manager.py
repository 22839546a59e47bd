"""Orbax's manager of a folder, which writes, commits and deletes checkpoints."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from towerjax.loop.checkpoint.folder import DELETED
from towerjax.loop.files import is_on_disk


def open_manager(directory: epath.Path, seal: Callable[[], None], policy: Any) -> Any:
    """Open Orbax's manager of a folder, for saving.

    Orbax is imported here, because the import is slow. ``seal`` is called before each
    commit, and ``policy`` chooses which checkpoints to keep.
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
    )
    # A checkpoint is moved before it is deleted, so that readers see it disappear at
    # once. Stores cannot rename.
    moved_to = DELETED if is_on_disk(directory) else None
    options = ocp.CheckpointManagerOptions(
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
