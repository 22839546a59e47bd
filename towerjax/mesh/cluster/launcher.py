"""How do several local processes become one job? Started, watched, ended together."""

import contextlib
import dataclasses
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towerjax.mesh.cluster.forward import LineForwarder, write
from towerjax.mesh.cluster.ports import LOOPBACK, free_port, is_free
from towerjax.types.options import check_whole

# What `initialize` reads.
VARIABLES = ("TOWERJAX_COORDINATOR", "TOWERJAX_NUM_PROCESSES", "TOWERJAX_PROCESS_ID")
NOT_FOUND = 127
_ENDING = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP"))
_TELLING = tuple(signal.Signals[name] for name in ("SIGUSR1", "SIGUSR2"))
_LOOK_S = 0.05
# More than a pipe holds: what left its process group may go on writing for ever.
_MOST_READS = 64


def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices_per_process: int | None = None,
    grace_s: float = 5.0,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """The exit code of a job of several local processes that all run one command.

    `initialize` in each of them joins them. Their output comes line by line, with the
    number of its process in front; there is no input. When one fails, says which and
    why, and ends the others: SIGTERM first, SIGKILL after ``grace_s``. SIGINT, SIGTERM
    and SIGHUP are passed on with the same grace (a second one ends it); SIGUSR1 and
    SIGUSR2 are passed on. What the processes started themselves ends with them, unless
    it moved to another process group; all of it ends also when the launcher is killed.

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

    Returns:
      0 if all returned 0; else the code of the first that failed, 128 + n for signal
      n; 128 + n too if the launcher was told to end by signal n and not all returned
      0; 127 if there is no such program.

    Raises:
      ValueError: An argument cannot be.

    Example:
      >>> launch(["true"], processes=2)
      0
    """
    _check(command, processes, devices_per_process, grace_s, port)
    environ = {**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1"}
    environ |= _device_variables(devices_per_process, environ)
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        _say(f"there is no program {command[0]!r}; write its path, or mend $PATH.")
        return NOT_FOUND
    coordinator = f"{LOOPBACK}:{port or free_port()}"
    with _watchdog() as tell, _signals() as arrived:
        workers: list[_Worker] = []
        try:
            for index in range(processes):
                values = (coordinator, str(processes), str(index))
                member = dict(zip(VARIABLES, values, strict=True))
                workers.append(_start(index, command, environ | member))
                tell(b"+%d\n" % workers[-1].popen.pid)
            return _Job(workers, grace_s, arrived).run()
        finally:
            for worker in workers:
                worker.end()
                tell(b"-%d\n" % worker.popen.pid)
                for pipe in worker.pipes:
                    pipe.close()


def _check(command: Any, processes: Any, devices: Any, grace_s: Any, port: Any) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(
            f"command={command!r} must be a list of a program and its arguments, such"
            " as ['python', 'train.py']."
        )
    for name, number in (("processes", processes), ("devices_per_process", devices)):
        if number is None and name == "devices_per_process":
            continue
        check_whole(name, number, 1)
    if not isinstance(grace_s, int | float) or not 0 <= grace_s < float("inf"):
        raise ValueError(f"grace_s={grace_s!r} must be a number of seconds >= 0.")
    if port is None:
        return
    check_whole("port", port, 1, 65535)
    if not is_free(port):
        raise ValueError(
            f"port={port} is in use. Choose another, or leave it out to get a free one."
        )


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


def _name(number: int) -> str:
    known = number in signal.valid_signals() and number in list(signal.Signals)
    return signal.Signals(number).name if known else "no name"


def _say(text: str) -> None:
    write(sys.stderr, f"towerjax launch: {text}\n".encode())


@dataclasses.dataclass
class _Worker:
    """One process, the group that it leads, and its two pipes."""

    index: int
    popen: subprocess.Popen
    pipes: tuple[LineForwarder, LineForwarder]
    started: float
    is_over: bool = False

    def send(self, number: int) -> None:
        """A signal to the process and to all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def end(self) -> None:
        """Leave nothing of the group; its number may then become another's."""
        if not self.is_over:
            self.send(signal.SIGKILL)
            self.popen.wait()
        self.is_over = True


def _start(index: int, command: Sequence[str], environ: Mapping[str, str]) -> _Worker:
    popen = subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert popen.stdout is not None and popen.stderr is not None
    pipes = (
        LineForwarder(popen.stdout, sys.stdout, f"[{index}] "),
        LineForwarder(popen.stderr, sys.stderr, f"[{index}] "),
    )
    return _Worker(index, popen, pipes, time.monotonic())


class _Job:
    """The workers from their start to the end of the last one."""

    def __init__(
        self, workers: list[_Worker], grace_s: float, arrived: list[int]
    ) -> None:
        self._running = list(workers)
        self._pipes = [pipe for worker in workers for pipe in worker.pipes]
        self._grace_s = grace_s
        self._arrived = arrived
        self._told: int | None = None
        self._code = 0
        self._kill_at: float | None = None

    def run(self) -> int:
        """Forward and watch until all have ended; the code of the job."""
        while self._running:
            self._forward(_LOOK_S)
            self._pass_on()
            for worker in list(self._running):
                if worker.popen.poll() is not None:
                    self._ended(worker)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
        # Nobody writes any more, but for what left its process group.
        until = time.monotonic() + 1
        while self._pipes and time.monotonic() < until:
            self._forward(_LOOK_S)
        if self._code and self._told:
            return 128 + self._told
        return self._code

    def _forward(self, timeout_s: float) -> None:
        self._pipes = [pipe for pipe in self._pipes if pipe.is_open]
        with selectors.PollSelector() as selector:  # which has no limit on numbers
            for pipe in self._pipes:
                selector.register(pipe.source, selectors.EVENT_READ, pipe)
            for ready, _ in selector.select(timeout_s):
                ready.data.forward()

    def _pass_on(self) -> None:
        while self._arrived:
            number = self._arrived.pop(0)
            for worker in self._running:
                worker.send(number)
            if number in _TELLING:
                continue
            if self._told:
                self._kill_at = time.monotonic()
                continue
            self._told = number
            self._kill_at = time.monotonic() + self._grace_s
            _say(
                f"{_name(number)} passed on to {len(self._running)}"
                f" running; SIGKILL follows after {self._grace_s:g} s, or at a second"
                " signal"
            )

    def _ended(self, worker: _Worker) -> None:
        self._running.remove(worker)
        worker.end()
        for pipe in worker.pipes:
            for _ in range(_MOST_READS):
                if not pipe.forward():
                    break
        code = worker.popen.returncode
        if code == 0 or self._code:
            return
        self._code = code if code > 0 else 128 - code
        if not self._told:
            self._fail(worker, code)

    def _fail(self, worker: _Worker, code: int) -> None:
        why = f"exited with code {code}"
        if code < 0:
            why = f"was killed by signal {-code} ({_name(-code)})"
        rest = f"; stopping the other {len(self._running)}" if self._running else ""
        seconds = time.monotonic() - worker.started
        _say(f"process {worker.index} {why} after {seconds:.1f} s{rest}")
        self._kill_at = time.monotonic() + self._grace_s
        for other in self._running:
            other.send(signal.SIGTERM)

    def _kill(self) -> None:
        self._kill_at = None
        names = ", ".join(str(worker.index) for worker in self._running)
        if names:
            _say(f"still running: {names}; ended with SIGKILL")
        self._code = self._code or 128 + signal.SIGKILL
        for worker in self._running:
            worker.send(signal.SIGKILL)


@contextlib.contextmanager
def _watchdog() -> Iterator[Any]:
    """A process that ends the groups it is told of when this one is gone."""
    program = pathlib.Path(__file__).with_name("watchdog.py")
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert popen.stdin is not None
    pipe = popen.stdin

    def tell(line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody ended the watchdog
            os.write(pipe.fileno(), line)

    try:
        yield tell
    finally:
        pipe.close()
        popen.wait()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that arrive, in a list; what was ignored stays ignored."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived  # Python delivers signals to the main thread only
        return
    before = {number: signal.getsignal(number) for number in _ENDING + _TELLING}
    heard = [number for number in before if before[number] is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, lambda got, _: arrived.append(got))
    try:
        yield arrived
    finally:
        for number in heard:
            # None is a handler that was not set from Python; it cannot be put back.
            signal.signal(number, before[number] or signal.SIG_DFL)
