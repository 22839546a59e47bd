"""Run the local processes of a job, from their start to the end of the last one."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from towerjax.mesh.cluster import heartbeat

# A small program, the first process in a job's process group, which is not the
# launcher's group. Its input ends when the launcher dies, in whatever way; the program
# then kills the group. By then each process of the job has joined the group, because a
# forked process holds the input's pipe until it has joined. The program ignores signals
# to the group, which are meant for the others.
_WATCHDOG = """
import os, signal, sys
for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
os.write(1, b"!")
sys.stdin.buffer.read()
os.killpg(0, signal.SIGKILL)
"""


def _forward(source: IO[bytes], target: Any, prefix: str) -> None:
    """Write each line that a process prints, until it ends or nobody reads them."""
    with source, contextlib.suppress(BrokenPipeError):
        for line in source:
            write(target, prefix.encode() + line.rstrip(b"\n") + b"\n")


def write(target: Any, text: bytes) -> None:
    """Write bytes and flush; decode them for a stream that takes only text."""
    raw = getattr(target, "buffer", None)
    if raw is None:
        target.write(text.decode(errors="replace"))
    else:
        target.flush()
        raw.write(text)
    target.flush()


# The launcher forwards these signals to the processes, and does not end the job.
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.02
# The time to wait for the output of a process that has ended. Its children may still
# hold the pipe.
_DRAIN_S = 0.2

# EX_TEMPFAIL, the exit code of a program that saved itself and is to be started again.
AGAIN = 75


@dataclasses.dataclass
class End:
    """How the processes of a job ended."""

    # The exit code of the process that failed first, or 128 + n after signal n.
    code: int = 0
    lost: int = 0  # how many hung or were killed from outside the job
    ended_by: int | None = None  # the signal that told the launcher to end


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The timeouts of a job, in seconds."""

    grace_s: float  # from SIGTERM to SIGKILL
    failed_s: float  # from SIGTERM to SIGKILL after a process has failed
    hang_s: float = math.inf  # how long one process may give no sign of life
    # After all processes have begun a step, this long none of them may begin another.
    step_s: float = math.inf


def say(text: str) -> None:
    """Print a message of the launcher itself, as a line."""
    write(sys.stderr, f"towerjax launch: {text}\n".encode())


def _signal_name(number: int) -> str:
    return next((x.name for x in signal.Signals if x == number), "no name")


class _Worker:
    """One process of a job, its reports so far, and threads that read its pipes."""

    def __init__(
        self, index: int, command: Sequence[str], environ: Mapping[str, str], group: int
    ) -> None:
        """Start the process in the group, with a pipe for its heartbeat."""
        read_end, write_end = os.pipe()
        self.popen = popen = subprocess.Popen(
            list(command),
            env={**environ, heartbeat.VARIABLE: heartbeat.pipe_name(write_end)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=group,
            pass_fds=(write_end,),
        )
        os.close(write_end)
        self.index = index
        self.steps = 0
        self.why_hung = ""
        self.started = self.last_sign = self.last_step = time.monotonic()
        self.readers: list[threading.Thread] = []
        for read, *args in (
            (_forward, popen.stdout, sys.stdout, f"[{index}] "),
            (_forward, popen.stderr, sys.stderr, f"[{index}] "),
            (self.listen, os.fdopen(read_end, "rb")),
        ):
            self.readers.append(threading.Thread(target=read, args=args, daemon=True))
            self.readers[-1].start()

    def listen(self, pipe: IO[bytes]) -> None:
        """Count the process's steps and note its signs of life, until the pipe ends."""
        with pipe:
            for word in pipe:
                self.last_sign = time.monotonic()
                if word == heartbeat.STEP:
                    self.last_step = self.last_sign
                    self.steps = self.steps + 1

    def kill(self, why: str) -> None:
        """Kill a process that hangs; ``why`` says how that was noticed."""
        self.why_hung = self.why_hung or why
        self.popen.kill()

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, or None.

        A shell that ran the process returns 128 + n if signal n ended it.
        """
        code = self.popen.returncode
        number = -code if code < 0 else code - 128
        return number if number in signal.valid_signals() else None


def run_group(
    command: Sequence[str],
    environs: Sequence[Mapping[str, str]],
    timeouts: Timeouts,
    arrived: list[int],
    recoverable: bool = False,
) -> End:
    """Run the command once in each environment, as one job that gets the signals.

    ``arrived`` is a list of signals that the launcher's handlers append to. If
    ``recoverable``, the others go on when a process other than the first fails.
    """
    workers: list[_Worker] = []
    with _process_group() as group:
        try:
            for index, environ in enumerate(environs):
                workers.append(_Worker(index, command, environ, group))
            return _Job(group, list(workers), timeouts, arrived, recoverable).run()
        finally:
            _send(group, signal.SIGKILL)
            for worker in workers:
                worker.popen.kill()
                worker.popen.wait()
            _drain(workers, 1)


def _drain(workers: Sequence[_Worker], timeout_s: float) -> None:
    """Wait until all output of the processes is forwarded, or ``timeout_s`` is over."""
    until = time.monotonic() + timeout_s
    for worker in workers:
        for reader in worker.readers:
            reader.join(max(0, until - time.monotonic()))


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """Make a process group that ends with this ``with`` block, or if we are killed."""
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHDOG],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    with popen:
        assert popen.stdout is not None
        popen.stdout.read(1)  # one byte tells that the watchdog now ignores signals
        try:
            yield popen.pid
        finally:
            _send(popen.pid, signal.SIGKILL)


def _send(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


@dataclasses.dataclass
class _Job:
    """The running processes of a job, and how the job ended so far."""

    group: int
    running: list[_Worker]
    timeouts: Timeouts
    arrived: list[int]
    recoverable: bool = False
    end: End = dataclasses.field(default_factory=End)
    kill_at: float = math.inf
    # The signals that the launcher sent; a process that they end is not lost. SIGPIPE
    # is among them, because it ends a process whose output nobody reads any more.
    sent: set[int] = dataclasses.field(default_factory=lambda: {signal.SIGPIPE})

    def run(self) -> End:
        """Watch the processes until all have ended; return how they ended."""
        while self.running:
            time.sleep(_POLL_S)
            self._forward_signals()
            if self.kill_at == math.inf:
                # Hangs are not looked for once the processes are being ended, because
                # they then do no steps.
                self._look_for_hangs()
            over = [x for x in self.running if x.popen.poll() is not None]
            # If two processes have ended since the last look, one may have ended
            # because of the other. The likelier cause is handled first: a signal other
            # than SIGABRT, then an exit code, then SIGABRT, by which JAX ends processes
            # that wait.
            likely = {None: 1, signal.SIGABRT: 2}
            for worker in sorted(over, key=lambda x: likely.get(x.signal, 0)):
                self._handle_end(worker)
            if self.running and time.monotonic() >= self.kill_at:
                names = ", ".join(str(worker.index) for worker in self.running)
                say(f"still running: {names}; ended with SIGKILL")
                self.kill_at = math.inf
                self.end.code = self.end.code or 128 + signal.SIGKILL
                self._send(signal.SIGKILL)
        return self.end

    def _send(self, number: int) -> None:
        self.sent.add(number)
        _send(self.group, number)

    def _forward_signals(self) -> None:
        while self.arrived:
            number = self.arrived.pop(0)
            self._send(number)
            if number in FORWARDED:
                continue
            grace_s = 0 if self.end.ended_by else self.timeouts.grace_s
            self.kill_at = time.monotonic() + grace_s
            if not self.end.ended_by:
                self.end.ended_by = number
                say(
                    f"{_signal_name(number)} passed on to {len(self.running)} running;"
                    f" SIGKILL follows after {grace_s:g} s, or at a second signal"
                )

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        running = self.running
        still_s = now - max((x.last_step for x in running), default=now)
        do_steps = all(worker.steps for worker in running)
        stand = do_steps and still_s > self.timeouts.step_s
        fewest = min((x.steps for x in running), default=0)
        for worker in running:
            if (silent_s := now - worker.last_sign) > self.timeouts.hang_s:
                worker.kill(f"gave no sign of life for {silent_s:.1f} s")
            elif stand and worker.steps == fewest:
                worker.kill(f"began no step for {still_s:.1f} s")

    def _handle_end(self, worker: _Worker) -> None:
        self.running.remove(worker)
        _drain([worker], _DRAIN_S)
        code = worker.popen.returncode
        # JAX aborts processes that wait for a lost one. They are not counted as lost.
        not_lost = self.sent | ({signal.SIGABRT} if self.end.code else set())
        if worker.signal is not None and worker.signal not in not_lost:
            self.end.lost += 1
        if code == 0 or self.end.code:
            return
        goes_on = self.recoverable and worker.index > 0 and not self.end.ended_by
        if not goes_on:
            self.end.code = code if code > 0 else 128 - code
        if not self.end.ended_by:
            rest = len(self.running)
            ending = f"was killed by signal {-code} ({_signal_name(-code)})"
            ending = f"exited with code {code}" if code > 0 else ending
            why = f"{worker.why_hung} and was killed" if worker.why_hung else ending
            does = "the others go on:" if goes_on else "stopping the other"
            others = f"; {does} {rest}" if rest else ""
            seconds = time.monotonic() - worker.started
            say(f"process {worker.index} {why} after {seconds:.1f} s{others}")
            if goes_on:
                return
            self._send(signal.SIGTERM)
        if self.kill_at == math.inf:
            self.kill_at = time.monotonic() + self.timeouts.failed_s
