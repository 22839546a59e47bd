"""The work of a peer: parameters, batch and losses of the hand-written step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.tools.bench.protocol import TimingProtocol, Trial, calls_in, in_turns
from towerjax.tools.bench.trials import (
    NUM_LOSSES,
    by_hand,
    check_losses,
    figures,
    first_losses,
    work_of,
)
from towerjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of a peer, in NumPy.

    Attributes:
      trial: What is measured.
      timing: How.
      params: Of ``mlp``, a list of ``{"w", "b"}``; of ``cnn``, ``{"convs", "dense"}``.
      batch: The global batch.
      expected: The first losses of the hand-written step.
      device: The kind of device that the peer runs on.
    """

    trial: Trial
    timing: TimingProtocol
    params: PyTree
    batch: PyTree
    expected: tuple[float, ...]
    device: str


@dataclasses.dataclass
class Step:
    """A peer's step, as `in_turns` wants it.

    Attributes:
      step: Does one step and waits for it; returns its loss.
    """

    step: Callable[[], Any]

    def run(self) -> None:
        """One step."""
        self.step()


def job_of(trial: Trial, timing: TimingProtocol, device: str) -> Job:
    """The work of a trial, where it is one that the peers have."""
    if trial.model not in ("mlp", "cnn") or trial.dtype != "float32":
        raise NotImplementedError("For the peers mlp and cnn are written, in float32.")
    work = work_of(trial)
    here = Placement((f"{jax.default_backend()}:0",), 1, "vmap", "shard_map")
    expected = first_losses(by_hand(work, here))
    return Job(trial, timing, work.params, work.batch, tuple(expected), device)


def measured(job: Job, step: Callable[[], Any], losses: Sequence[float]) -> dict:
    """The figures of a peer's step, in this process."""
    check_losses(losses, job.expected, job.trial)
    timed, timing = [Step(step)], job.timing
    calls = calls_in(timing.seconds_per_round, timed)
    return as_figures(job, losses, calls, timed_rounds(job, step, calls))


def timed_rounds(job: Job, step: Callable[[], Any], calls: int) -> np.ndarray:
    """Seconds of a step in each round, ``[rounds, 1, 2]``."""
    timing = job.timing
    return in_turns([Step(step)], rounds=timing.rounds, calls=calls, trim=0.1)


def as_figures(
    job: Job, losses: Sequence[float], calls: int, table: np.ndarray
) -> dict[str, Any]:
    """What goes into the record."""
    found = figures(table, ["own"], 1)
    losses = list(losses)[:NUM_LOSSES]
    return {"device": job.device, "calls": calls, "losses": losses, **found}
