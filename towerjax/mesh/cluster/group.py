"""The local processes of a job from their start to the end of the last one."""

import contextlib
import dataclasses
import io
import math
import os
import pathlib
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TextIO, TypeAlias

from towerjax.mesh.cluster.heartbeat import VARIABLE, Heartbeat, name_of

Target: TypeAlias = TextIO | io.TextIOBase
# What JAX's transport on CPUs prints for each connection, on stdout and for no reader.
# Several threads may print to one line, and the rest of one stand on the next.
_PIECES = (
    rb"(\s*(\[Gloo\]|Rank|\d+|is connected to|peer ranks\.|"
    rb"Expected number of connected peer ranks is :))*\s*"
)
_TRANSPORT = re.compile(rb"(?=.*(\[Gloo\]|peer ranks))" + _PIECES)
_REST = re.compile(_PIECES)


class LineForwarder:
    """Reads a process' pipe without waiting, and writes complete lines of it.

    All of them but the transport's own "[Gloo] Rank 0 is connected ...".
    """

    def __init__(self, source: IO[bytes], target: Target, prefix: str) -> None:
        self.source = source  # closed at its end
        self._target = target
        self._prefix = prefix.encode()
        self._rest = b""
        self._ends_to_come = 0  # of lines of the transport that stood on one
        os.set_blocking(source.fileno(), False)

    def forward(self) -> bool:
        """Pass on what there is now; False where there was nothing."""
        if self.source.closed:
            return False
        try:
            chunk = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk:
            lines = [self._rest] if self._rest else []
            self.source.close()
        shown = [line for line in lines if not self._is_of_transport(line)]
        write(self._target, b"".join(self._prefix + line + b"\n" for line in shown))
        return True

    def _is_of_transport(self, line: bytes) -> bool:
        """Is it no output? Nor is the rest of a text that stood on one with others."""
        of_transport = _TRANSPORT.fullmatch(line) is not None
        if of_transport or (self._ends_to_come and _REST.fullmatch(line)):
            more = line.count(b"[Gloo]") - 1
            self._ends_to_come = max(0, self._ends_to_come + more)
            return True
        return False


def write(target: Target, text: bytes) -> None:
    """Write bytes as they are, at once; as text where the stream takes only that."""
    if not text:
        return
    raw = getattr(target, "buffer", None)
    if raw is None:
        target.write(text.decode(errors="replace"))
    else:
        target.flush()
        raw.write(text)
    target.flush()


# Signals that are passed on, and end nothing.
TELLING = tuple(signal.Signals[name] for name in ("SIGUSR1", "SIGUSR2"))
_LOOK_S = 0.05
# More than a pipe holds: what left its process group may go on writing for ever.
_MOST_READS = 64


# What a program says that has saved itself and is to be started again: EX_TEMPFAIL.
AGAIN = 75


@dataclasses.dataclass
class End:
    """How the processes of a job ended."""

    code: int  # 0, or the code of the first that failed; 128 + n for signal n
    lost: int = 0  # how many were killed by others than the launcher, or stood still
    told: int | None = None  # the signal by which the launcher was told to end
    # Whether the launcher asked them to end, because more of them fit again.
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long is waited for what?"""

    grace_s: float  # from SIGTERM to SIGKILL
    failed_s: float  # the same, for those that one that failed has left
    hang_s: float = math.inf  # for a sign of life of each process
    step_s: float = math.inf  # for a step of any of them, once all have begun one
    # Until the processes that do steps are asked to end, by time.monotonic; None is for
    # ever.
    ask_at: float | None = None


def say(text: str) -> None:
    """A line of the launcher's own."""
    write(sys.stderr, f"towerjax launch: {text}\n".encode())


def _name(number: int) -> str:
    return next((x.name for x in signal.Signals if x == number), "no name")


@dataclasses.dataclass
class _Worker:
    """One process, and the pipes that come from it."""

    index: int
    popen: subprocess.Popen
    pipes: list[LineForwarder]
    heartbeat: Heartbeat
    started: float
    hangs: str | None = None

    @property
    def signal(self) -> int | None:
        """What ended it, also inside of a shell that says so by its code."""
        code = self.popen.returncode
        number = -code if code < 0 else code - 128
        return number if number in signal.valid_signals() else None


def _start(
    index: int, command: Sequence[str], environ: Mapping[str, str], group: int
) -> _Worker:
    """A process in the group, which can tell what it does."""
    hears, tells = os.pipe()
    popen = subprocess.Popen(
        list(command),
        env={**environ, VARIABLE: name_of(tells)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=group,
        pass_fds=(tells,),
    )
    os.close(tells)
    assert popen.stdout is not None and popen.stderr is not None
    heartbeat = Heartbeat()
    pipes = [
        LineForwarder(popen.stdout, sys.stdout, f"[{index}] "),
        LineForwarder(popen.stderr, sys.stderr, f"[{index}] "),
        LineForwarder(os.fdopen(hears, "rb"), heartbeat, ""),
    ]
    return _Worker(index, popen, pipes, heartbeat, time.monotonic())


def run_group(
    command: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    patience: Patience,
    arrived: list[int],
) -> End:
    """Run the command once with each of the environments, as one job.

    ``arrived`` are the signals that the launcher gets meanwhile.
    """
    workers: list[_Worker] = []
    with _group() as group:
        try:
            for index, environ in enumerate(environs):
                workers.append(_start(index, command, environ, group))
            return _Job(group, workers, patience, arrived).run()
        finally:
            _send(group, signal.SIGKILL)
            for worker in workers:
                worker.popen.kill()
                worker.popen.wait()
                for pipe in worker.pipes:
                    pipe.source.close()


@contextlib.contextmanager
def _group() -> Iterator[int]:
    """A process group that ends with the block, or with this process."""
    program = pathlib.Path(__file__).with_name("watchdog.py")
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    with popen:
        assert popen.stdout is not None
        popen.stdout.read(1)  # from now on no signal takes it away
        try:
            yield popen.pid
        finally:
            _send(popen.pid, signal.SIGKILL)


def _send(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class _Job:
    """The workers until the last one has ended."""

    def __init__(
        self,
        group: int,
        workers: list[_Worker],
        patience: Patience,
        arrived: list[int],
    ) -> None:
        self._group = group
        self._running = list(workers)
        self._pipes = [pipe for worker in workers for pipe in worker.pipes]
        self._patience = patience
        self._arrived = arrived
        self._sent: set[int] = set()
        self._end = End(0)
        self._kill_at: float | None = None

    def run(self) -> End:
        """Forward and watch until all have ended; says how they did."""
        while self._running:
            self._forward(_LOOK_S)
            self._pass_on()
            self._look_for_hangs()
            self._ask()
            over = [x for x in self._running if x.popen.poll() is not None]
            # What was killed is why others failed in the same moment.
            for worker in sorted(over, key=lambda worker: worker.signal is None):
                self._ended(worker)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
        self._send(signal.SIGKILL)  # what they started
        # Nobody writes any more, but for what left its process group.
        until = time.monotonic() + 1
        while self._pipes and time.monotonic() < until:
            self._forward(_LOOK_S)
        return self._end

    def _send(self, number: int) -> None:
        self._sent.add(number)
        _send(self._group, number)

    def _forward(self, timeout_s: float) -> None:
        self._pipes = [pipe for pipe in self._pipes if not pipe.source.closed]
        with selectors.PollSelector() as selector:  # which has no limit on numbers
            for pipe in self._pipes:
                selector.register(pipe.source, selectors.EVENT_READ, pipe)
            for ready, _ in selector.select(timeout_s):
                ready.data.forward()

    def _pass_on(self) -> None:
        while self._arrived:
            number = self._arrived.pop(0)
            self._send(number)
            if number in TELLING:
                continue
            if self._end.told:
                self._kill_at = time.monotonic()
                continue
            self._end.told = number
            self._kill_at = time.monotonic() + self._patience.grace_s
            say(
                f"{_name(number)} passed on to {len(self._running)}"
                f" running; SIGKILL follows after {self._patience.grace_s:g} s, or at a"
                " second signal"
            )

    def _look_for_hangs(self) -> None:
        if self._kill_at is not None:
            return  # who ends, or waits for one that is lost, does no steps
        now, running = time.monotonic(), self._running
        for worker in running:
            silent_s = now - worker.heartbeat.last
            if silent_s > self._patience.hang_s:
                self._replace(worker, f"gave no sign of life for {silent_s:.1f} s")
        still_s = now - max((x.heartbeat.stepped for x in running), default=now)
        if still_s > self._patience.step_s and self._do_steps():
            fewest = min(x.heartbeat.steps for x in running)
            for worker in [x for x in running if x.heartbeat.steps == fewest]:
                self._replace(worker, f"began no step for {still_s:.1f} s")

    def _replace(self, worker: _Worker, why: str) -> None:
        worker.hangs = worker.hangs or why
        worker.popen.kill()

    def _do_steps(self) -> bool:
        return all(worker.heartbeat.steps for worker in self._running)

    def _ask(self) -> None:
        at = self._patience.ask_at
        if at is None or time.monotonic() < at or not self._do_steps():
            return
        if self._end.asked or self._kill_at is not None:
            return
        self._end.asked = True
        say(
            "more processes fit again; those that run are asked to save and end:"
            f" {len(self._running)}"
        )
        self._send(signal.SIGTERM)

    def _ended(self, worker: _Worker) -> None:
        self._running.remove(worker)
        for pipe in worker.pipes:
            for _ in range(_MOST_READS):
                if not pipe.forward():
                    break
        code = worker.popen.returncode
        if worker.signal is not None and worker.signal not in self._sent:
            self._end.lost += 1
        if code == 0 or self._end.code:
            return
        self._end.code = code if code > 0 else 128 - code
        as_asked = self._end.asked and code in (AGAIN, -signal.SIGTERM)
        if not self._end.told and not as_asked:
            self._fail(worker)
        if self._kill_at is None:
            patience = self._patience
            seconds = patience.grace_s if as_asked else patience.failed_s
            self._kill_at = time.monotonic() + seconds

    def _fail(self, worker: _Worker) -> None:
        code, rest = worker.popen.returncode, len(self._running)
        why = f"exited with code {code}"
        if code < 0:
            why = f"was killed by signal {-code} ({_name(-code)})"
        if worker.hangs is not None:
            why = f"{worker.hangs} and was killed"
        others = f"; stopping the other {rest}" if rest else ""
        seconds = time.monotonic() - worker.started
        say(f"process {worker.index} {why} after {seconds:.1f} s{others}")
        self._send(signal.SIGTERM)

    def _kill(self) -> None:
        self._kill_at = None
        names = ", ".join(str(worker.index) for worker in self._running)
        if names:
            say(f"still running: {names}; ended with SIGKILL")
        self._end.code = self._end.code or 128 + signal.SIGKILL
        self._send(signal.SIGKILL)
