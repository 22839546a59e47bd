"""Kill jobs many times, start them again on other devices, and compare their bits.

A job has 12 towers, in two to four processes. One process or more are killed at a
random moment, imports and compilation included. The launcher continues in the processes
that are left. At every second kill it has no restart left, and the job is launched
again with another number of processes and devices. After ten kills a job runs to its
end. Its last bits are compared with those of one process with one device that nobody
killed.

Run: ``python -m benchmarks.faults --kills 100``
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import statistics
import tempfile
import time

import towerjax as tj
from benchmarks.faults import DoneStep, Launched, steps_of, until
from benchmarks.harness import begin

STEPS = 130
TOWERS = 12
KILLS_PER_JOB = 10
# Each pair is a number of processes, and of devices in each process. All devices
# together divide the number of towers.
FLEETS = ((2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 3))
_AGAIN = 75  # the launcher's exit code for "start it again"
_HANG_S = 120.0  # four processes share two cores at import


@dataclasses.dataclass(frozen=True)
class Kill:
    """Processes that were killed at one moment.

    Attributes:
      at: When, as `time.time` says.
      killed: How many processes.
      processes: How many there were.
      devices: How many devices these had together.
      job: The run of the job that they were of, as `DoneStep` names it.
      step: The last step that was done before, by any run of the job; 0 for none.
      saved: The newest checkpoint then; 0 for none.
    """

    at: float
    killed: int
    processes: int
    devices: int
    job: str
    step: int
    saved: int

    def next_step(self, done: list[DoneStep]) -> DoneStep | None:
        """Return the first step after the kill, which another run of the job did."""
        after = (x for x in done if x.ended > self.at and x.job != self.job)
        return next(after, None)

    def is_recovered(self, done: list[DoneStep]) -> bool:
        """Return whether the job went on, and lost nothing that a checkpoint held."""
        step = self.next_step(done)
        return step is not None and self.saved < step.number <= self.step + 1


@dataclasses.dataclass(frozen=True)
class KilledJob:
    """A job that was killed again and again.

    Attributes:
      kills: Its kills, in order.
      done: Its steps, those that were run again included.
      code: The exit code of its last launch.
      digest: Of its last bits; None if it did not end.
    """

    kills: list[Kill]
    done: list[DoneStep]
    code: int
    digest: str | None


def launched(folder: pathlib.Path, fleet: tuple[int, int]) -> Launched:
    """Launch the job in a number of processes with a number of devices each."""
    processes, devices = fleet
    return Launched(
        folder,
        STEPS,
        processes=processes,
        devices_per_process=devices,
        towers=TOWERS,
        restarts=1,
        hang_timeout_s=_HANG_S,
        options=["--of-towers", str(TOWERS)],
    )


def strike(
    job: Launched, folder: pathlib.Path, devices: int, before: str, draw: random.Random
) -> Kill | None:
    """Kill processes of a job at a random moment.

    Args:
      job: The launched job.
      folder: Its folder.
      devices: How many devices each process has.
      before: The run of the job that was killed before, which may still be ending.
      draw: Draws the moment and the processes.

    Returns:
      What was killed; None if the job ended by itself.
    """
    steps = max(draw.randrange(-3, 13), 0)
    late_s = draw.uniform(0.0, 0.1) if steps else draw.uniform(0.2, 5.0)

    def runs() -> set[str]:
        return {name for _, name in job.workers().values()} - {before}

    def has_ended() -> bool:
        return job.popen.poll() is not None

    until(lambda: has_ended() or runs(), 120)
    if has_ended():
        return None
    [run] = runs()
    until(
        lambda: has_ended() or sum(x.job == run for x in steps_of(folder)) >= steps, 300
    )
    time.sleep(late_s)
    if has_ended():
        return None
    workers = [pid for pid, _ in job.workers().values()]
    victims = draw.sample(workers, draw.randint(1, len(workers)))
    done = steps_of(folder)
    saved = max(tj.Checkpointer(folder / "saved").steps, default=0)
    at = time.time()
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return Kill(
        at=at,
        killed=len(victims),
        processes=len(workers),
        devices=devices * len(workers),
        job=run,
        step=max((x.number for x in done), default=0),
        saved=saved,
    )


def killed_job(seed: int, kills: int) -> KilledJob:
    """Run a job to its end, and kill it ``kills`` times meanwhile."""
    draw = random.Random(seed)
    fleet = FLEETS[0]
    kills_done = list[Kill]()
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        while True:
            fleet = draw.choice([x for x in FLEETS if x != fleet])
            job = launched(folder, fleet)
            strikes = min(2, kills - len(kills_done))
            for _ in range(strikes):
                before = kills_done[-1].job if kills_done else ""
                kill = strike(job, folder, fleet[1], before, draw)
                kills_done += [] if kill is None else [kill]
            code = job.wait()
            if code != _AGAIN or strikes < 2:
                break
        digest = (folder / "digest").read_text() if code == 0 else None
        return KilledJob(kills_done, steps_of(folder), code, digest)


def undisturbed() -> str:
    """Return the digest of the job's last bits on one device of one process."""
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(path)
        code = launched(folder, (1, 1)).wait()
        if code:
            raise RuntimeError(f"The undisturbed job ended with code {code}.")
        return (folder / "digest").read_text()


COLUMNS = {
    "job": "",
    "processes killed": "",
    "after step": "",
    "newest checkpoint": "",
    "resumes at step": "",
    "on devices": "",
    "done after, s": ".1f",
    "recovered": "",
}


def report(options: argparse.Namespace) -> int:
    """Print a row for each kill; return 0 if all jobs end with the same bits."""
    with tempfile.TemporaryDirectory() as cache:  # kills may strike its writes
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        return _report(options)


def _report(options: argparse.Namespace) -> int:
    digest = undisturbed()
    table = begin(
        f"{options.kills} kills of jobs with {TOWERS} towers", COLUMNS, options
    )
    seconds = list[float]()
    jobs = list[KilledJob]()
    for start in range(0, options.kills, KILLS_PER_JOB):
        job = killed_job(
            options.first + len(jobs), min(KILLS_PER_JOB, options.kills - start)
        )
        jobs.append(job)
        for kill in job.kills:
            step = kill.next_step(job.done)
            took = None if step is None else step.ended - kill.at
            is_recovered = kill.is_recovered(job.done)
            seconds += [] if took is None or not is_recovered else [took]
            table.row(
                len(jobs),
                f"{kill.killed} of {kill.processes}",
                kill.step,
                kill.saved or None,
                step and step.number,
                (kill.devices, step.devices) if step else (kill.devices,),
                took,
                "yes" if is_recovered else "**NO**",
            )
    same = sum(job.digest == digest for job in jobs)
    table.note(f"{len(seconds)} of {options.kills} kills were recovered from.")
    table.note(f"{same} of {len(jobs)} jobs ended with the undisturbed job's hash.")
    if seconds:
        middle = statistics.median(seconds)
        table.note(
            f"From a kill to the next step: median {middle:.1f} s,"
            f" worst {max(seconds):.1f} s."
        )
    return 0 if same == len(jobs) and len(seconds) == options.kills else 1
