"""Launch several local processes as one job, and restart it after losses."""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence

from towerjax.mesh.cluster import spec
from towerjax.mesh.cluster.group import AGAIN, FORWARDED, End, Timeouts, run_group, say
from towerjax.types.boundary import api_boundary
from towerjax.types.options import (
    check_choice,
    check_flag,
    check_list,
    check_number,
    check_whole,
)

NOT_FOUND = 127
# After a loss the other processes wait inside JAX for the lost one, and ignore SIGTERM.
_LOSS_GRACE_S = 5.0
_SECONDS = "a number of seconds >= 0"
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *FORWARDED)


@dataclasses.dataclass(frozen=True)
class RestartPlan:
    """How many processes to start next, and how often the job may be restarted."""

    processes: int  # the number of processes at the first start
    towers: int | None = None  # None: each start starts all processes
    restarts: int | None = None  # the restarts that are left
    lost: int = 0  # the number of processes that were lost

    @property
    def count(self) -> int:
        """The number of processes to start.

        With ``towers`` it is the largest number that divides the towers, and needs no
        process more than those that were not lost.
        """
        if self.towers is None:
            return self.processes
        left = max(self.processes - self.lost, 1)
        return max(n for n in range(1, left + 1) if self.towers % n == 0)

    def after(self, end: End) -> "RestartPlan | None":
        """Plan the next start; None if the job is over."""
        if not end.code or end.ended_by:
            return None
        if not self.restarts or not (end.lost or end.code == AGAIN):
            return None
        lost = self.lost + end.lost
        return dataclasses.replace(self, restarts=self.restarts - 1, lost=lost)

    def code(self, end: End) -> int:
        """Choose the exit code of a job that is over."""
        if end.ended_by and end.code not in (0, AGAIN):
            return 128 + end.ended_by
        is_unfinished = end.code and end.lost and self.restarts is not None
        return AGAIN if is_unfinished else end.code


@api_boundary
def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices_per_process: int | None = None,
    grace_s: float = 5.0,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    restarts: int | None = None,
    towers: int | None = None,
    hang_timeout_s: float = math.inf,
    step_timeout_s: float = math.inf,
    recoverable: bool = False,
) -> int:
    """Run one command as a job of several local processes; return its exit code.

    `initialize` in each process joins it to the job. Their output is printed line by
    line, each with the number of its process; they have no input. When one fails,
    this prints which and why, and ends the others: SIGTERM first, SIGKILL after
    ``grace_s``. SIGINT, SIGTERM and SIGHUP are forwarded with the same grace, which a
    second signal ends; SIGUSR1 and SIGUSR2 are forwarded and end nothing. The children
    of processes end with the job, unless they moved to another process group. All end
    when the launcher is killed.

    With ``restarts`` the job is started again after a process is lost, because it was
    killed or hangs, and after one exits with 75. The program must save itself and
    resume, as `run` with a `Checkpointer` does.

    Args:
      command: The program and its arguments.
      processes: The number of processes to start.
      devices_per_process: The number of CPU devices of each process, on JAX's platform
        CPU; None leaves the devices to JAX.
      grace_s: Seconds between SIGTERM and SIGKILL.
      port: Where process 0 listens, on the loopback interface; None finds a free one.
      env: Variables to add to the environment.
      restarts: How often the job may be started again. None ends the job at the first
        loss, with the code of that process; 0 ends it there with 75.
      towers: The number of towers of the program's strategy. The job is then started
        again without lost processes, with the largest number of processes that divides
        the towers. None starts all processes again.
      hang_timeout_s: Seconds without a sign of life after which a process is killed,
        counted from its start; `initialize` gives the first sign.
      step_timeout_s: Seconds without a step of any process, after which the processes
        with the fewest steps are killed. It counts once each process has called a step,
        in `run` or in a loop of its own.
      recoverable: Whether the others go on if a process is lost, as `run` does then.
        If process 0 is lost, the job ends, or is started again. No process is started
        again alone.

    Returns:
      0 if all returned 0; else the code of the first that failed, 128 + n for signal
      n; 75, "start me again", if all saved and exited with it, and if ``restarts`` did
      not suffice; 128 + n if the launcher was told to end by signal n and they did not
      save; 127 if there is no such program.

    Raises:
      ValueError: An argument is invalid, or another launcher started several of this.

    Example:
      >>> launch(["true"], processes=2)
      0
    """
    parts = () if isinstance(command, str) else check_list("command", command)
    if not parts or not all(isinstance(x, str | os.PathLike) for x in parts):
        raise ValueError(
            f"command={command!r} must be a list of a program and its arguments, such"
            " as ['python', 'train.py'], all of them strings."
        )
    texts = [*map(os.fspath, parts), *(env or {}).values()]
    if null := [x for x in texts if "\0" in str(x)]:
        raise ValueError(
            f"{null[0]!r} contains a null byte, which no argument or variable may have."
        )
    check_whole("restarts", restarts, 0, or_none=True)
    check_flag("recoverable", recoverable)
    check_number("grace_s", grace_s, _SECONDS)
    check_number("hang_timeout_s", hang_timeout_s, _SECONDS, math.inf)
    check_number("step_timeout_s", step_timeout_s, _SECONDS, math.inf)
    check_whole("processes", processes)
    check_whole("devices_per_process", devices_per_process, or_none=True)
    check_whole("towers", towers, or_none=True)
    if towers is not None and towers % processes:
        raise ValueError(
            f"{towers=} cannot be divided among {processes} processes. Start a number"
            " of processes that divides the number of towers."
        )
    if port is not None and not spec.is_free(port):
        raise ValueError(
            f"port={port} is in use. Choose another, or leave it out to get a free one."
        )
    environ = {**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1"}
    if text := spec.refusal(environ, "towerjax launch starts all processes of its job"):
        raise ValueError(text)
    environ |= _device_variables(devices_per_process, environ)
    environ |= {spec.RECOVERABLE: "1"} if recoverable else {}
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        say(f"there is no program {command[0]!r}; write its path, or mend $PATH.")
        return NOT_FOUND
    plan = RestartPlan(processes, towers, restarts)
    failed_s = grace_s if restarts is None else min(grace_s, _LOSS_GRACE_S)
    timeouts = Timeouts(grace_s, failed_s, hang_timeout_s, step_timeout_s)
    with _collect_signals() as arrived:
        while True:
            address = f"{spec.LOOPBACK}:{port or spec.free_port()}"
            triples = [(address, f"{plan.count}", f"{i}") for i in range(plan.count)]
            environs = [
                environ | dict(zip(spec.VARIABLES, x, strict=True)) for x in triples
            ]
            end = run_group(command, environs, timeouts, arrived, recoverable)
            if (after := plan.after(end)) is None:
                return plan.code(end)
            plan = after
            say(f"the job goes on; restarts left: {plan.restarts}")


def _device_variables(devices: int | None, environ: Mapping[str, str]) -> dict:
    for name, value in environ.items():
        check_choice(f"env[{name!r}]", value, [str(value)])
    if devices is None:
        return {}
    platforms = environ.get("JAX_PLATFORMS") or "cpu"
    if platforms.split(",")[0] != "cpu":
        raise ValueError(
            f"devices_per_process={devices} counts CPU devices, but JAX_PLATFORMS is"
            f" {platforms!r}. Set JAX_PLATFORMS=cpu, or leave devices_per_process out."
        )
    return {"JAX_PLATFORMS": platforms, "JAX_NUM_CPU_DEVICES": str(devices)}


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Yield a list, to which handlers add each signal that arrives in the block.

    Signals that the process ignores stay ignored.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived  # only Python's main thread can handle signals
        return
    heard = [n for n in _HEARD if signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(n, lambda got, _: arrived.append(got)) for n in heard]
    try:
        yield arrived
    finally:
        for number, handler in zip(heard, before, strict=True):
            # None stands for a handler that was not set from Python, which cannot be
            # put back.
            signal.signal(number, handler or signal.SIG_DFL)
