"""Kill processes of recoverable jobs: the others go on, and end with the same bits.

A job has 12 towers in four processes of one device, with checkpoints and evaluations.
Processes 1 to 3 are killed by SIGKILL or stopped by SIGSTOP: one or two at once, and
later another one, until a job has lost up to three. Some are killed at random moments,
others while they dispatch a step, wait for its collectives, copy the state, save,
compile or evaluate. The last bits are compared with those of one process with one
device that nobody killed.

Run: ``python -m benchmarks.survivors --kills 100``
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import towerjax as tj
from benchmarks.faults import loss_fn
from benchmarks.harness import begin, options_of, parser_of
from towerjax.loop import loop as loops
from towerjax.loop.checkpoint.saving import Saving
from towerjax.loop.recovery import Recovery
from towerjax.step.step import Step

STEPS = 60
TOWERS = 12
PROCESSES = 4
# The last is a random moment. The others are functions in which a process is killed.
PHASES = ("dispatch", "collective", "copy", "save", "compile", "evaluation", "any")
_INSIDE = {
    "dispatch": (Step, "dispatch"),
    "collective": (loops.Loop, "_process_oldest"),
    "copy": (Recovery, "agree_on_copy"),
    "save": (Saving, "save"),
    "compile": (Step, "prepare"),
    "evaluation": (loops, "evaluate"),
}
_HANG_S = 90.0  # after that the launcher kills a process that is stopped
_LIMIT_S = 900.0


@dataclasses.dataclass(frozen=True)
class Strike:
    """What happens to some processes at one moment.

    Attributes:
      ranks: Which processes, of 1 to 3.
      kind: ``"kill"`` or ``"stop"``.
      phase: Of `PHASES`, what they are doing.
      after: Not before this step.
      late_s: How long after the phase began.
    """

    ranks: tuple[int, ...]
    kind: str
    phase: str
    after: int
    late_s: float


def strikes_of(seed: int, kills: int) -> list[Strike]:
    """Draw the strikes of a job, at most ``kills``."""
    draw = random.Random(seed)
    left = [1, 2, 3]
    strikes = list[Strike]()
    step = 0
    while left and len(strikes) < min(kills, 2):
        ranks = draw.sample(left, min(draw.choice((1, 1, 2)), len(left)))
        left = [rank for rank in left if rank not in ranks]
        kind = "stop" if draw.random() < 0.1 else "kill"
        phase = PHASES[(seed + 3 * len(strikes)) % len(PHASES)]
        step = min(step + draw.randrange(1, STEPS // 2 - 5), STEPS - 11)
        if phase == "compile":  # at the start, or after the first loss
            step = len(strikes)
        longest_s = {"compile": 1.0, "any": 0.5}.get(phase, 0.02)
        late_s = draw.uniform(0, longest_s)
        strikes.append(Strike(tuple(sorted(ranks)), kind, phase, step, late_s))
    return strikes


def watch_for(strikes: Sequence[Strike], folder: pathlib.Path) -> Callable[[int], None]:
    """Kill this process in the phases of its strikes; return a function to call.

    The function is told the number of each step.
    """
    me = tj.cluster.initialize().process_id
    mine = [strike for strike in strikes if me in strike.ranks]
    reached = [0]  # the number of the last step

    def end(strike: Strike) -> None:
        time.sleep(strike.late_s)
        with (folder / "kills").open("a") as file:
            file.write(json.dumps([time.time(), me, strike.kind, strike.phase]) + "\n")
        number = signal.SIGSTOP if strike.kind == "stop" else signal.SIGKILL
        os.kill(os.getpid(), number)

    def enter(phase: str) -> None:
        for strike in [x for x in mine if x.phase == phase]:
            if reached[0] >= strike.after:
                mine.remove(strike)
                threading.Thread(target=end, args=(strike,), daemon=True).start()

    for phase, (owner, name) in _INSIDE.items():
        setattr(owner, name, _noted(getattr(owner, name), enter, phase))

    def at_step(number: int) -> None:
        reached[0] = number
        enter("any")

    return at_step


def _noted(function: Callable, enter: Callable[[str], None], phase: str) -> Callable:
    @functools.wraps(function)
    def noted(*args: Any, **options: Any) -> Any:
        enter(phase)
        return function(*args, **options)

    return noted


def train(folder: pathlib.Path, strikes: Sequence[Strike], steps: int) -> None:
    """Train a small model, with all that a run does: the program that is struck."""
    at_step = watch_for(strikes, folder)
    strategy = tj.Mirrored(
        towers=TOWERS, tower_loop="scan", cross_tower_ops=tj.PinnedTree()
    )
    step = tj.build_train_step(loss_fn, optax.adam(0.01), strategy)

    def metric_fn(params: Any, batch: Any, tower: Any) -> Any:
        return {"loss": loss_fn(params, batch, tower)}

    evaluate = tj.build_eval_step(metric_fn, strategy, audit=False)
    x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
    data = {"x": x, "y": np.sin(x.sum(1))}
    params = {"u": np.eye(8, 16, dtype=np.float32), "v": np.ones(16, np.float32)}

    def note(number: int, state: tj.TrainState, metrics: Any) -> None:
        if tj.cluster.is_chief():
            devices = len(state.params["u"].sharding.device_set)
            with (folder / "steps").open("a") as file:
                file.write(f"{number} {devices} {time.time()}\n")
        at_step(number)
        time.sleep(0.03)

    state, history = tj.run(
        step,
        step.init(params),
        tj.batches(data, 2 * TOWERS, epochs=None, seed=0),
        steps=steps,
        evaluate=evaluate,
        eval_batches=tj.batches(data, 4 * TOWERS),
        eval_every=15,
        checkpointer=tj.Checkpointer(folder / "saved", every=10),
        writers=[tj.JsonLines(folder / "run.jsonl")],
        hooks=[tj.loop.WithState(note, every=1)],
        progress=False,
    )
    if tj.cluster.is_chief():
        leaves = jax.tree.leaves((state.params, state.opt_state))
        leaves += [history.steps, history.metrics["loss"]]
        digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves))
        (folder / "digest").write_text(digest.hexdigest())


class Done(NamedTuple):
    """A step that was done, as the first process wrote it down."""

    number: int
    devices: int
    ended: float


@dataclasses.dataclass(frozen=True)
class Effect:
    """The effect of the strikes that hit a job at one moment.

    Attributes:
      at: When, as `time.time` says.
      ranks: The processes.
      kind: As in `Strike`.
      phase: As in `Strike`.
      step: The last step that was done before.
      next: The next new step, on the devices that were left; None if none was done.
    """

    at: float
    ranks: tuple[int, ...]
    kind: str
    phase: str
    step: int
    next: Done | None


@dataclasses.dataclass(frozen=True)
class StruckJob:
    """A job that lost processes, and what became of it.

    Attributes:
      effects: Of its strikes, in order.
      code: The exit code of its launcher.
      digest: Of its last bits and its history; None if it did not end.
      lines: Whether its file has one line for each step and each evaluation.
    """

    effects: list[Effect]
    code: int
    digest: str | None
    lines: bool


def effects_of(
    kills: Sequence[tuple[float, int, str, str]], done: Sequence[Done]
) -> list[Effect]:
    """Return the effect of each strike, from kills and steps in the order of time.

    Processes that are killed within a second are of one strike.
    """
    effects = list[Effect]()
    for at, rank, kind, phase in sorted(kills):
        if effects and at - effects[-1].at < 1:
            ranks = (*effects[-1].ranks, rank)
            effects[-1] = dataclasses.replace(effects[-1], ranks=ranks)
            continue
        before = [x for x in done if x.ended <= at]
        devices = before[-1].devices if before else PROCESSES
        newest = max((x.number for x in done if x.devices >= devices), default=0)
        new = (x for x in done if x.devices < devices and x.number > newest)
        step = max((x.number for x in before), default=0)
        effects.append(Effect(at, (rank,), kind, phase, step, next(new, None)))
    return effects


def launched(
    folder: pathlib.Path, strikes: Sequence[Strike], processes: int, steps: int
) -> int:
    """Launch the job, wait for its end, and return the launcher's exit code."""
    words = f"launch --processes {processes} --devices-per-process 1 --recoverable"
    command = [sys.executable, "-m", "towerjax", *words.split()]
    command += ["--hang-timeout", str(_HANG_S), "--", sys.executable]
    command += ["-m", "benchmarks.survivors", "--train", str(folder)]
    command += ["--strikes", json.dumps([dataclasses.astuple(x) for x in strikes])]
    with (folder / "said").open("w") as file:
        job = subprocess.Popen(
            [*command, "--steps", str(steps)], stdout=file, stderr=file
        )
        try:
            return job.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            job.kill()


def struck_job(strikes: Sequence[Strike], steps: int = STEPS) -> StruckJob:
    """Run a job with these strikes to its end."""
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        code = launched(folder, strikes, PROCESSES, steps)
        done = [
            Done(int(a), int(b), float(c))
            for a, b, c in map(str.split, _lines(folder / "steps"))
        ]
        kills = [tuple(json.loads(line)) for line in _lines(folder / "kills")]
        digest = (folder / "digest").read_text() if code == 0 else None
        if digest is None:
            print((folder / "said").read_text()[-4000:], file=sys.stderr)
        records = map(json.loads, _lines(folder / "run.jsonl"))
        steps_told = [x["step"] for x in records if x["kind"] == "train"]
        has_each = steps_told == [*range(1, steps + 1)]
        return StruckJob(effects_of(kills, done), code, digest, has_each)


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def undisturbed(steps: int = STEPS) -> str:
    """Return the digest of the job on one device of one process."""
    with tempfile.TemporaryDirectory() as path:
        code = launched(pathlib.Path(path), [], 1, steps)
        if code:
            raise RuntimeError(f"The undisturbed job ended with code {code}.")
        return (pathlib.Path(path) / "digest").read_text()


COLUMNS = {
    "job": "",
    "what happened": "",
    "processes": "",
    "in": "",
    "after step": "",
    "next new step": "",
    "on devices": "",
    "done after, s": ".1f",
    "bits": "",
}


def report(options: argparse.Namespace) -> int:
    """Print a row for each strike; return 0 if all jobs went on to the same bits."""
    digest = undisturbed()
    title = f"{options.kills} losses of jobs with {TOWERS} towers in {PROCESSES}"
    table = begin(f"{title} processes", COLUMNS, options)
    seconds = list[float]()
    count = same = jobs = 0
    while count < options.kills:
        strikes = strikes_of(options.first + jobs, options.kills - count)
        job = struck_job(strikes)
        jobs += 1
        is_same = job.digest == digest and job.lines
        same += is_same
        count += max(len(job.effects), 1)
        for effect in job.effects:
            new = effect.next
            took = None if new is None else new.ended - effect.at
            seconds += [] if took is None else [took]
            table.row(
                jobs,
                "killed" if effect.kind == "kill" else "stopped",
                ", ".join(map(str, sorted(effect.ranks))),
                "a random moment" if effect.phase == "any" else effect.phase,
                effect.step,
                new and new.number,
                new and new.devices,
                took,
                "the same" if is_same else "**NOT THE SAME**",
            )
    table.note(f"{len(seconds)} of {count} losses were followed by a new step.")
    table.note(f"{same} of {jobs} jobs ended with the undisturbed job's bits.")
    if seconds:
        middle = statistics.median(seconds)
        table.note(
            f"From a loss to the next new step: median {middle:.1f} s,"
            f" worst {max(seconds):.1f} s."
        )
    return 0 if same == jobs and len(seconds) == count else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if every job went on to the same bits."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--train", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--strikes", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    options = options_of(parser, argv, kills=2)
    if options.train is None:
        return report(options)
    strikes = [Strike(tuple(x[0]), *x[1:]) for x in json.loads(options.strikes)]
    train(options.train, strikes, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
