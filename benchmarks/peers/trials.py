"""Steps of a grid for `tj.tools.bench`, by towerjax, by hand and by other libraries."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import devices_of
from benchmarks.models import MODELS
from benchmarks.steps import Work, by_hand, by_towerjax
from towerjax import collectives
from towerjax.towers.strategies import Mirrored, OneDevice, Strategy

NUM_LOSSES = 3
# These two are for libraries that time themselves.
ROUNDS = 9
SECONDS_PER_ROUND = 0.1
LIBRARIES = {
    "keras": "keras_parallel",
    "tensorflow": "tensorflow_mirrored",
    "torch": "torch_ddp",
}
"""Libraries that time themselves, and the modules here that do it."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A step to time: the arguments of `build`."""

    model: str
    batch: int  # the global batch size
    by: str = "towerjax"  # or one of WAYS or of LIBRARIES
    strategy: str = "mirrored"  # or "mirrored_scan", "mirrored_pmap", "one_device"
    towers: int = 1
    devices: int = 1
    cross_tower_ops: str = "AllReduce"
    guard: str = "gradients"  # what a step by towerjax looks at
    dtype: str = "float32"
    micro_batches: int = 1


def build(**config: Any) -> Any:
    """Build the step that ``config`` describes, or let another library time its own.

    ``config`` holds the fields of `Trial`. Return the step, its state and its batch, or
    the figures of a library that times itself.
    """
    config.setdefault("devices", config.get("towers", 1))
    trial = Trial(**config)
    if trial.by != "towerjax":
        _refuse_options_of_towerjax(trial)
    if trial.by in LIBRARIES:
        module = importlib.import_module(f"benchmarks.peers.{LIBRARIES[trial.by]}")
        return module.run(trial)
    strategy = strategy_of(trial)
    work = work_of(trial)
    if trial.by == "towerjax":
        found = by_towerjax(work, strategy, guard=trial.guard)
    else:
        found = by_hand(work, strategy.placement, trial.by)
    return found.call, found.state, found.batch


def _refuse_options_of_towerjax(trial: Trial) -> None:
    """Raise if a trial of another way has an option that only towerjax has."""
    for name in ("strategy", "cross_tower_ops", "guard"):
        value = getattr(trial, name)
        if value != (default := getattr(Trial, name)):
            raise ValueError(
                f"{name}={value!r} is an option of towerjax, and the step is by"
                f" {trial.by!r}. Write {name}={default!r}."
            )


def build_by_hand(**config: Any) -> Any:
    """Build the hand-written step on the same devices, with one tower on each."""
    config.setdefault("devices", config.get("towers", 1))
    trial = Trial(**config)
    found = by_hand(work_of(trial), strategy_of(trial).placement)
    return found.call, found.state, found.batch


def strategy_of(trial: Trial) -> Strategy:
    """Return the strategy that ``trial`` names, on this process's first devices."""
    names = devices_of(trial.devices)
    if trial.strategy == "one_device":
        return OneDevice(names[0])
    return Mirrored(
        devices=names,
        towers=trial.towers,
        tower_loop="scan" if trial.strategy == "mirrored_scan" else "vmap",
        executor="pmap" if trial.strategy == "mirrored_pmap" else "shard_map",
        cross_tower_ops=getattr(collectives, trial.cross_tower_ops)(),
    )


def work_of(trial: Trial) -> Work:
    """Return the `Work` of a trial's step."""
    model = MODELS[trial.model](jnp.dtype(trial.dtype))
    params = jax.tree.map(np.asarray, model.init(0))  # contenders donate theirs
    batch = model.make_batch(1, trial.batch)
    return Work(model, params, batch, trial.micro_batches)
