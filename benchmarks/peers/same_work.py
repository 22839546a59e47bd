"""The work of a peer: parameters, batch and losses of the hand-written step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.peers.trials import (
    NUM_LOSSES,
    ROUNDS,
    SECONDS_PER_ROUND,
    Trial,
    work_of,
)
from benchmarks.steps import by_hand
from towerjax.mesh.placement import Placement
from towerjax.sweeps.bench import Contender, check_losses
from towerjax.sweeps.turns import calls_in, in_turns
from towerjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Job:
    """The work of a peer, in NumPy.

    Attributes:
      trial: What is measured.
      params: Of ``mlp``, a list of ``{"w", "b"}``; of ``cnn``, ``{"convs", "dense"}``.
      batch: The global batch.
      expected: The first losses of the hand-written step.
      device: The kind of device that the peer runs on.
    """

    trial: Trial
    params: PyTree
    batch: PyTree
    expected: tuple[float, ...]
    device: str


def job_of(trial: Trial, device: str) -> Job:
    """Return the work of ``trial`` for a peer.

    Raise where the peers do not have this model or dtype.
    """
    if trial.model not in ("mlp", "cnn") or trial.dtype != "float32":
        raise NotImplementedError("The peers have only mlp and cnn, in float32.")
    work = work_of(trial)
    here = Placement((f"{jax.default_backend()}:0",), 1, "vmap", "shard_map")
    hand = by_hand(work, here)
    own = Contender(hand.call, hand.state, hand.batch)
    expected = tuple(own.loss() for _ in range(NUM_LOSSES))
    return Job(trial, work.params, work.batch, expected, device)


def measured(job: Job, step: Callable[[], Any], losses: Sequence[float]) -> dict:
    """Check a peer's losses, time its step in this process and return the figures."""
    check_losses(job.trial.by, losses[:NUM_LOSSES], job.expected, 1e-4)
    calls = calls_in(SECONDS_PER_ROUND, [step])
    return as_figures(job, losses, calls, timed_rounds(step, calls))


def timed_rounds(step: Callable[[], Any], calls: int) -> np.ndarray:
    """Time a step; return its seconds in each round, of shape ``[rounds, 1, 2]``."""
    return in_turns([step], rounds=ROUNDS, calls=calls, trim=0.1)


def as_figures(
    job: Job, losses: Sequence[float], calls: int, table: np.ndarray
) -> dict[str, Any]:
    """Return the figures of a peer as the entries of the record."""
    return {
        "device": job.device,
        "calls": calls,
        "losses": list(losses)[:NUM_LOSSES],
        "examples": job.trial.batch,
        "rounds_s": table[:, 0, 0].tolist(),
    }
