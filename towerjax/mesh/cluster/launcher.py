"""How do several local processes become one job? Started, watched, ended together."""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towerjax.mesh.cluster.group import AGAIN, TELLING, End, Patience, run_group, say
from towerjax.mesh.cluster.spec import LOOPBACK, VARIABLES, free_port, is_free
from towerjax.types.options import check_number, check_whole

NOT_FOUND = 127
# Processes of JAX that one has left wait for it, and hold SIGTERM back.
_LEFT_S = 5.0
_SECONDS = "a number of seconds >= 0"
_ENDING = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP"))


@dataclasses.dataclass(frozen=True)
class GoingOn:
    """How many processes may be started now, and how often again."""

    processes: int  # how many there are where none is lost
    divided: int  # as many processes fit as divide this
    restarts: int | None = None  # how many losses the job may still have
    regrow_s: float = 60.0  # seconds until the place of a lost process is used again
    # When each place that is left alone may be used again.
    free_at: tuple[float, ...] = ()

    def count(self, now: float) -> int:
        """The largest number of processes that has places and fits; at least one."""
        places = self.processes - sum(at > now for at in self.free_at)
        return max(n for n in range(1, max(places, 1) + 1) if self.divided % n == 0)

    def grows_at(self, count: int) -> float | None:
        """From when on more than so many fit; None if never."""
        times = (at for at in sorted(self.free_at) if self.count(at) > count)
        return next(times, None)

    def after(self, end: End, now: float) -> "GoingOn | None":
        """What goes on after an end; None if nothing does."""
        if not end.code or end.told:
            return None
        if not end.lost and end.asked and end.code in (AGAIN, 128 + signal.SIGTERM):
            return self
        if not self.restarts or not (end.lost or end.code == AGAIN):
            return None
        lost = (now + self.regrow_s,) * end.lost
        free_at = tuple(at for at in self.free_at if at > now) + lost
        return dataclasses.replace(self, restarts=self.restarts - 1, free_at=free_at)

    def code(self, end: End) -> int:
        """The exit code of a job that does not go on."""
        if end.told and end.code not in (0, AGAIN):
            return 128 + end.told
        return AGAIN if end.lost and self.restarts is not None else end.code


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
    regrow_s: float = 60.0,
) -> int:
    """The exit code of a job of several local processes that all run one command.

    `initialize` in each of them joins them. Their output comes line by line, with the
    number of its process in front; there is no input. When one fails, says which and
    why, and ends the others: SIGTERM first, SIGKILL after ``grace_s``. SIGINT, SIGTERM
    and SIGHUP are passed on with the same grace (a second one ends it); SIGUSR1 and
    SIGUSR2 are passed on. What the processes started themselves ends with the job,
    unless it moved to another process group; all of it ends also when the launcher is
    killed.

    With ``restarts`` the job goes on after the loss of a process, which is killed or
    hangs, in as many as are left and fit. The program is to save itself and go on from
    there, as `run` with a `Checkpointer` does; see ``docs/how_to/restarts.md``.

    Note: JAX holds SIGTERM back in a process that called `initialize`, so that a job
    can save before it is preempted. Such processes run on until ``grace_s``.

    Args:
      command: The program and its arguments.
      processes: How many, >= 1.
      devices_per_process: CPU devices of each; None leaves it to JAX. Chooses the CPU
        as JAX's platform.
      grace_s: Seconds between SIGTERM and SIGKILL, >= 0.
      port: Where process 0 listens, on the loopback interface; None finds a free one.
      env: Variables to add to the environment.
      restarts: How many losses the job may have; None ends it with the first, with its
        code, and 0 with 75.
      towers: Of the program's strategy: fewer processes fit if their devices divide it.
        None lets those fit that divide ``processes``.
      hang_timeout_s: After how long without a sign of life a process hangs: one that
        is stopped. The first sign comes with `initialize`.
      step_timeout_s: After how long without a step of any process those hang that have
        done the fewest, once `run` with a `Checkpointer` has begun; longer than an
        evaluation and a checkpoint take.
      regrow_s: Seconds until the place of a lost process is used again, >= 0.

    Returns:
      0 if all returned 0; else the code of the first that failed, 128 + n for signal
      n; 75, "start me again", if all have saved and ended with it when told to, and
      with ``restarts`` if those did not suffice; 128 + n if the launcher was told to
      end by signal n and they did not; 127 if there is no such program.

    Raises:
      ValueError: An argument cannot be.

    Example:
      >>> launch(["true"], processes=2)
      0
    """
    _check(command, processes, devices_per_process, port)
    check_number("grace_s", grace_s, _SECONDS)
    check_number("regrow_s", regrow_s, _SECONDS)
    check_number("hang_timeout_s", hang_timeout_s, _SECONDS, math.inf)
    check_number("step_timeout_s", step_timeout_s, _SECONDS, math.inf)
    check_whole("restarts", restarts, 0, or_none=True)
    divided = _divided(towers, processes, devices_per_process)
    environ = {**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1"}
    environ |= _device_variables(devices_per_process, environ)
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        say(f"there is no program {command[0]!r}; write its path, or mend $PATH.")
        return NOT_FOUND
    going_on = GoingOn(processes, divided, restarts, regrow_s)
    with _signals() as arrived:
        while True:
            count = going_on.count(time.monotonic())
            patience = Patience(
                grace_s,
                grace_s if restarts is None else min(grace_s, _LEFT_S),
                hang_timeout_s,
                step_timeout_s,
                going_on.grows_at(count),
            )
            environs = [environ | member for member in _members(count, port)]
            end = run_group(command, environs, patience, arrived)
            after = going_on.after(end, time.monotonic())
            if after is None:
                return going_on.code(end)
            going_on = after
            say(f"the job goes on; restarts left: {going_on.restarts}")


def _members(count: int, port: int | None) -> Iterator[dict[str, str]]:
    """What `initialize` reads in each process of a job."""
    coordinator = f"{LOOPBACK}:{port or free_port()}"
    for index in range(count):
        values = (coordinator, str(count), str(index))
        yield dict(zip(VARIABLES, values, strict=True))


def _check(command: Any, processes: Any, devices: Any, port: Any) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(
            f"command={command!r} must be a list of a program and its arguments, such"
            " as ['python', 'train.py']."
        )
    check_whole("processes", processes, 1)
    check_whole("devices_per_process", devices, or_none=True)
    if port is None:
        return
    check_whole("port", port, 1, 65535)
    if not is_free(port):
        raise ValueError(
            f"port={port} is in use. Choose another, or leave it out to get a free one."
        )


def _divided(towers: Any, processes: int, devices: int | None) -> int:
    """The number that as many processes divide as fit."""
    if towers is None:
        return processes
    check_whole("towers", towers, 1)
    if devices is None:
        raise ValueError(
            f"towers={towers} says how many devices fit, but not how many processes."
            " Say devices_per_process too, or leave towers out."
        )
    if towers % (processes * devices):
        raise ValueError(
            f"towers={towers} cannot be shared out to {processes} processes of"
            f" {devices} devices: {processes * devices} does not divide {towers}."
        )
    return towers // devices


def _device_variables(devices: int | None, environ: Mapping[str, str]) -> dict:
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
def _signals() -> Iterator[list[int]]:
    """The signals that arrive, in a list; what was ignored stays ignored."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived  # Python delivers signals to the main thread only
        return
    before = {number: signal.getsignal(number) for number in _ENDING + TELLING}
    heard = [number for number in before if before[number] is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, lambda got, _: arrived.append(got))
    try:
        yield arrived
    finally:
        for number in heard:
            # None is a handler that was not set from Python; it cannot be put back.
            signal.signal(number, before[number] or signal.SIG_DFL)
