"""The verdicts on a step's guarded value, each read once the step has run."""

import collections
import math
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.step import faults


class Checked(NamedTuple):
    """The guarded value of a step, and what a meeting of its towers found."""

    guarded: jax.Array  # the loss, or a bool
    found: Any  # has ``any_fault`` and ``error(number)``; None where towers meet always


def is_refused(guarded: Any) -> bool:
    """Whether a step was refused, by its guarded value: one element on the host."""
    # A Python number: this runs at every call, and NumPy takes ten times as long.
    found = guarded.item()
    return found is False or not math.isfinite(found)


def error_of(
    step: Checked, number: Any, placement: Placement, *, refusals: bool, index: Any = ()
) -> Exception | None:
    """The error to raise about a step, or None; waits for the step."""
    if step.found is not None and _fetch(step.found.any_fault, placement)[index]:
        found = jax.tree.map(lambda x: x[index], jax.device_get(step.found))
        return found.error(_as_count(number))
    refused = refusals and is_refused(_fetch(step.guarded, placement)[index])
    return faults.NonFiniteError(_as_count(number)) if refused else None


def _as_count(number: Any) -> int:
    return int(number) % 2**32  # as `step_number` counts


def _fetch(x: jax.Array, placement: Placement) -> np.ndarray:
    """The array on the host, by an explicit transfer, which transfer guards allow."""
    if placement.num_devices > 1:  # reading one copy takes half the time
        x = x.addressable_data(0)
    # CPUs transfer nothing, and device_get takes ten times as long as asarray.
    return np.asarray(x) if placement.platform == "cpu" else jax.device_get(x)


class Verdicts:
    """The verdicts on the last steps, each read once its step has run.

    Waiting for each verdict at once would stall the devices at every step.
    """

    def __init__(self, placement: Placement, *, refusals: bool) -> None:
        self._placement, self._refusals = placement, refusals
        # Several processes would read a verdict at different calls, and the first to
        # raise would leave the others waiting for it in the next step.
        self._is_alone = placement.num_processes == 1
        self._pending: collections.deque[tuple[Any, Checked]] = collections.deque()
        self._reading = threading.RLock()  # threads may call one step

    def add(self, number: jax.Array, step: Checked) -> None:
        """Note a step; of several processes any, since another may have died in it."""
        if self._refusals or not self._is_alone or step.found is not None:
            self._pending.append((number, step))

    def check(self) -> None:
        """Read the verdicts of steps that have run; wait for old ones if many pend.

        Called before a step: an error after one would lose the state it returned.
        """
        pending = self._pending
        with self._reading:
            while self._is_alone and pending:
                value: Any = pending[0][1].guarded  # is_ready is not in the stub
                if not value.is_ready():
                    break
                is_found = pending[0][1].found is not None
                if not (is_found or is_refused(_fetch(value, self._placement))):
                    pending.popleft()
                else:
                    self._read_oldest()
            if len(pending) >= 16:
                while len(pending) > 4:
                    self._read_oldest()

    def settle(self) -> None:
        """Wait for all steps so far, and read their verdicts."""
        with self._reading:
            while self._pending:
                self._read_oldest()

    def _read_oldest(self) -> None:
        number, step = self._pending.popleft()
        jax.block_until_ready(step.guarded)  # raises if the devices failed
        error = error_of(step, number, self._placement, refusals=self._refusals)
        if error is not None:
            self._pending.clear()
            raise error
