"""Kill parts of a job; compare its last bits with those of an undisturbed job.

A small training of four towers runs in two processes of two devices, under ``towerjax
launch --restarts``. At seeded moments, imports and compilation included, a process is
killed or stopped, or the launcher is killed and started again.

Run: ``python -m benchmarks.faults [--moments 30] [--first 0]``, or ``python -m
benchmarks.faults --kills 100``
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of

STEPS = 60
EVERY = 5
HANG_S = 30.0
FAULTS = ("kill", "stop", "launcher")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the moment at which it happens.

    Attributes:
      kind: Of `FAULTS`.
      victim: Which process.
      after: After which step; 0 is before the first.
      late_s: How long after it.
    """

    kind: str
    victim: int = 0
    after: int = 0
    late_s: float = 0.0

    @classmethod
    def drawn(cls, seed: int) -> "Fault":
        """Draw a fault from ``seed``.

        Of many faults about a sixth strike before the first step, in imports and
        compilation.
        """
        draw = random.Random(seed)
        victim = draw.randrange(2)
        after = max(draw.randrange(-STEPS // 5, STEPS), 0)
        return cls(
            FAULTS[seed % 3], victim, after, draw.uniform(0, 0.1 if after else 4)
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """The effects of one fault.

    Attributes:
      fault: The fault.
      step: After which step it came.
      saved: The newest checkpoint then; 0 for none.
      first: The first step after it.
      named_s: From the fault to the line that names it; for the launcher's death, to
        the end of the last of its processes.
      back_s: From the fault to the end of the first step after it.
      devices: How many there were, from each start to the next.
      same: Did the job end with code 0 on the bits of the undisturbed one?
    """

    fault: Fault
    step: int
    saved: int
    first: int
    named_s: float
    back_s: float
    devices: tuple[int, ...]
    same: bool

    @property
    def is_good(self) -> bool:
        """Return whether nothing was lost after the checkpoint and no value changed.

        The failure must also have been named in time.
        """
        in_time = self.named_s < (HANG_S + 1 if self.fault.kind == "stop" else 5)
        return self.same and in_time and self.first > self.saved


def loss_fn(params: Any, batch: Any, tower: Any) -> Any:
    """Return the loss of a small model with dropout."""
    hidden = jnp.tanh(batch["x"] @ params["u"])
    hidden *= jax.random.bernoulli(tower.rng, 0.9, hidden.shape)
    return tj.Weighted.mean((hidden @ params["v"] - batch["y"]) ** 2, tower.weight)


def train(
    folder: pathlib.Path,
    job: str,
    devices: Sequence[str] | None = None,
    steps: int = STEPS,
    towers: int = 4,
    audit: bool | None = None,
) -> None:
    """Train a small model, and save: the ordinary program that the faults disturb."""
    strategy = tj.Mirrored(
        devices, towers=towers, tower_loop="scan", cross_tower_ops=tj.PinnedTree()
    )
    step = tj.build_train_step(loss_fn, optax.adam(0.01), strategy, remainder="pad")
    x = np.random.default_rng(0).normal(size=(61, 8)).astype(np.float32)
    params = {"u": np.eye(8, 16, dtype=np.float32), "v": np.ones(16, np.float32)}

    def note(number: int, metrics: Any) -> None:
        if tj.cluster.is_chief():
            with (folder / "steps").open("a") as file:
                words = number, jax.device_count(), time.time(), job
                file.write(" ".join(map(str, words)) + "\n")
        time.sleep(0.1 if job else 0)

    state, _ = tj.run(
        step,
        step.init(params),
        tj.batches({"x": x, "y": np.sin(x.sum(1))}, 4 * towers, epochs=None, seed=0),
        steps=steps,
        checkpointer=tj.Checkpointer(folder / "saved", every=EVERY),
        audit=audit,
        hooks=[note],
        progress=False,
    )
    leaves = jax.tree.leaves((state.params, state.opt_state))
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves))
    if tj.cluster.is_chief():
        (folder / "digest").write_text(digest.hexdigest())


class Launched:
    """The launcher as a process, and the lines that it printed, with their times."""

    def __init__(
        self,
        folder: pathlib.Path,
        steps: int,
        *,
        processes: int = 2,
        devices_per_process: int = 2,
        towers: int | None = 4,
        restarts: int = 5,
        hang_timeout_s: float = HANG_S,
        module: str = "benchmarks.faults",
        options: Sequence[str] = (),
    ) -> None:
        launch = (
            f"-m towerjax launch --processes {processes}"
            f" --devices-per-process {devices_per_process} --restarts {restarts}"
            f" --hang-timeout {hang_timeout_s} --grace-seconds 0.5"
        ).split()
        launch += [] if towers is None else ["--towers", str(towers)]
        program = [sys.executable, "-m", module, "--train", str(folder)]
        self.popen = subprocess.Popen(
            [sys.executable, *launch, "--", *program, "--steps", str(steps), *options],
            stdout=subprocess.DEVNULL,  # the transport prints a line per connection
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as lines:
            self.said.extend((time.time(), line) for line in lines)

    def wait(self) -> int:
        """Wait for the launcher's end, and return its exit code."""
        self.popen.wait()
        self._reader.join()
        return self.popen.returncode

    def workers(self) -> dict[int, tuple[int, str]]:
        """Return each process's pid and job by its number, as the system knows them."""
        found = {}
        task = pathlib.Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        for pid in task.read_text().split():
            with contextlib.suppress(OSError):
                text = pathlib.Path(f"/proc/{pid}/environ").read_text()
                variables = dict(x.split("=", 1) for x in text.split("\0") if "=" in x)
                number = variables.get("TOWERJAX_PROCESS_ID")
                if number is not None:
                    found[int(number)] = int(pid), variables["TOWERJAX_COORDINATOR"]
        return found

    def named(self, victim: int) -> float:
        """Return when the launcher said that a process was lost."""
        words = f"process {victim} was killed", f"process {victim} gave no sign of life"
        return next(at for at, line in self.said if any(x in line for x in words))


def until(is_so: Callable[[], Any], timeout_s: float) -> Any:
    """Wait until a function returns a true value, and return that value."""
    end = time.monotonic() + timeout_s
    while not (value := is_so()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came of it in {timeout_s} s")
        time.sleep(0.02)
    return value


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


class DoneStep(NamedTuple):
    """A step that was done, as the first process wrote it down."""

    number: int
    devices: int
    ended: float
    job: str


def steps_of(folder: pathlib.Path) -> list[DoneStep]:
    """Return the steps so far, including those that were run again."""
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    words = (line.split() for line in lines)
    return [DoneStep(int(a), int(b), float(c), d) for a, b, c, d in words]


def undisturbed() -> str:
    """Return the digest of the last bits of a job without a fault."""
    with tempfile.TemporaryDirectory() as path:
        code = Launched(pathlib.Path(path), STEPS).wait()
        if code:
            raise RuntimeError(f"The undisturbed job ended with code {code}.")
        return (pathlib.Path(path) / "digest").read_text()


def disturbed(fault: Fault, digest: str, *, steps: int = STEPS) -> Row:
    """Run a job with a fault, and return its effects.

    ``digest`` is that of an undisturbed job.
    """
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        job = Launched(folder, steps)
        workers = until(lambda: len(x := job.workers()) == 2 and x, 60)
        until(lambda: len(steps_of(folder)) >= fault.after, 300)
        time.sleep(fault.late_s)
        before = len(steps_of(folder))
        saved = max(tj.Checkpointer(folder / "saved").steps, default=0)
        began = time.time()
        if fault.kind == "launcher":
            job.popen.kill()
            job.wait()
            until(lambda: not any(_is_alive(pid) for pid, _ in workers.values()), 60)
            named = time.time()
            job = Launched(folder, steps)
            code = job.wait()
        else:
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            os.kill(workers[fault.victim][0], number)
            code = job.wait()
            named = job.named(fault.victim)
        done = steps_of(folder)
        same = code == 0 and (folder / "digest").read_text() == digest
    last = DoneStep(steps + 1, 0, time.time(), "")  # for a job with nothing left to do
    new = next((x for x in done[before:] if x.job != workers[0][1]), last)
    devices = tuple(k for k, _ in itertools.groupby(x.devices for x in done))
    times = named - began, new.ended - began
    return Row(fault, before, saved, new.number, *times, devices, same)


COLUMNS = {
    "moment": "",
    "what happens": "",
    "after step": "",
    "newest checkpoint": "",
    "named after, s": ".2f",
    "resumes at step": "",
    "done after, s": ".1f",
    "devices": "",
    "bits": "",
}
_WORDS = {
    "kill": "a process is killed",
    "stop": "a process is stopped",
    "launcher": "the launcher is killed",
}


def _values(moment: int, row: Row) -> tuple[Any, ...]:
    """Return the values of a row of the table."""
    return (
        moment,
        _WORDS[row.fault.kind],
        row.step,
        row.saved or None,
        row.named_s,
        row.first,
        row.back_s,
        row.devices,
        "the same" if row.is_good else "**NOT AS IT SHOULD BE**",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if every row is as it should be."""
    parser = parser_of(__doc__)
    parser.add_argument("--moments", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    help_ = "kill jobs that often instead, and start them again on other devices"
    parser.add_argument("--kills", type=int, default=0, help=help_)
    parser.add_argument("--train", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--of-towers", type=int, default=4, help=argparse.SUPPRESS)
    options = options_of(parser, argv, moments=1)
    if options.train is not None:
        job = tj.cluster.initialize().coordinator or ""
        train(options.train, job, steps=options.steps, towers=options.of_towers)
        return 0
    if options.kills:
        from benchmarks import kills  # it imports this module

        return kills.report(options)
    digest = undisturbed()
    table = begin(f"{options.moments} moments", COLUMNS, options)
    good = []
    for moment in range(options.first, options.first + options.moments):
        row = disturbed(Fault.drawn(moment), digest)
        good.append(row.is_good)
        table.row(*_values(moment, row))
    table.note(f"{sum(good)} of {len(good)} moments are as they should be.")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
