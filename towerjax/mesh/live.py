"""Which processes of a job are left, if the job goes on without those that are lost."""

import os
import threading
import types
from collections.abc import Iterable

import jax

from towerjax.mesh.lines import print_line
from towerjax.mesh.private_jax import live_processes, take_number

_POLL_S = 0.2

# What this process knows of the others. Like JAX's own state, there is one per process.
_job = types.SimpleNamespace(
    # A thread that asks JAX who is alive; None in a job that ends when it loses a
    # process.
    watcher=None,
    is_over=threading.Event(),
    first=dict[int, int](),  # JAX's number of each process's start
    silent=frozenset[int](),  # those that JAX no longer counts as alive
    left_out=frozenset[int](),  # those without which all others have agreed to go on
)


class LostError(RuntimeError):
    """Raised where a process waits for another one that was lost.

    Attributes:
      processes: The numbers of the lost processes.
    """

    def __init__(self, processes: Iterable[int]) -> None:
        """Name the processes by their numbers."""
        self.processes = tuple(sorted(processes))
        super().__init__(f"{named(self.processes)} lost")


def named(processes: Iterable[int]) -> str:
    """Word processes: "process 1 was", or "processes 1 and 3 were"."""
    numbers = [str(number) for number in sorted(processes)]
    if len(numbers) == 1:
        return f"process {numbers[0]} was"
    return f"processes {', '.join(numbers[:-1])} and {numbers[-1]} were"


def is_recoverable() -> bool:
    """Return whether the job goes on if it loses a process."""
    return _job.watcher is not None


def silent() -> frozenset[int]:
    """Collect the processes that this process knows to be lost.

    Others may learn it later. What all must decide in one way, they agree on first.
    """
    return _job.silent | _job.left_out


def leave_out(processes: Iterable[int]) -> None:
    """Go on without these processes, as all others have agreed."""
    _job.left_out |= frozenset(processes)


def numbers_left() -> tuple[int, ...]:
    """List the numbers of the job's processes, without those left out."""
    return tuple(i for i in range(jax.process_count()) if i not in _job.left_out)


def refuse_to_rejoin() -> None:
    """Raise a ``RuntimeError`` in a process that has the number of an earlier one."""
    if take_number() is None:
        raise RuntimeError(
            "This process was started again under the number of one that the job has"
            " lost. The others go on without it, and it cannot join them. Let it end;"
            " to use its devices again, end the job and start all processes."
        )


def begin() -> None:
    """Watch the other processes from now on, in a thread."""
    _job.is_over.clear()
    numbers = tuple(range(jax.process_count()))
    _job.first = live_processes(numbers)
    args = {"target": _watch, "args": (numbers,), "name": "towerjax-live"}
    _job.watcher = threading.Thread(**args, daemon=True)
    _job.watcher.start()


def _watch(numbers: tuple[int, ...]) -> None:
    """Ask JAX who is alive, again and again.

    JAX answers when all live processes have asked, so each has such a thread.
    """
    # The answer names all processes, so that many of them ask less often.
    while not _job.is_over.wait(max(_POLL_S, len(numbers) / 200)):
        try:
            now = live_processes(numbers)
        except jax.errors.JaxRuntimeError as error:
            # If process 0 is gone, JAX ends this process and says why.
            if not _job.is_over.is_set() and "UNAVAILABLE" not in str(error):
                end_given_up()
            return
        same = {i for i in now if now[i] == _job.first.get(i)}
        _job.silent = frozenset(numbers) - same


def end_given_up() -> None:
    """End this process, because the others count it as lost and go on without it."""
    print_line(
        f"process {jax.process_index()} gave no sign of life for too long, so the"
        " others go on without it, and it ends"
    )
    os._exit(1)


def end() -> None:
    """Leave the job. The others go on without this process.

    Process 0 waits until the others have left. They would end with an error if JAX's
    coordinator, which it holds, were gone.
    """
    if _job.is_over.is_set():
        return
    _job.is_over.set()
    if jax.process_index():
        jax.distributed.shutdown()
    else:
        _job.watcher.join()
        live_processes(range(jax.process_count()))
    _job.watcher = None
