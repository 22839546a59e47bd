"""The verdicts on a step's guarded value, each read once the step has run."""

import collections
import math
import threading
from typing import Any

import jax
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.step import faults
from towerjax.types import PyTree


def is_refused(guarded: Any) -> bool:
    """Whether a step was refused, by its guarded value: one element on the host."""
    # A Python number: this runs at every call, and NumPy takes ten times as long.
    found = guarded.item()
    return found is False or not math.isfinite(found)


def error_of(guarded: np.ndarray, number: Any) -> Exception | None:
    """The error to raise about a step with this guarded value, or None."""
    if is_refused(guarded):
        return faults.NonFiniteError(int(number) % 2**32)  # as `step_number` counts
    return None


def send_to_host(tree: PyTree, placement: Placement) -> None:
    """Start the copies of what will be read on the host; CPUs need none."""
    if placement.platform != "cpu":
        with jax.transfer_guard_device_to_host("allow"):
            for x in jax.tree.leaves(tree):
                x.copy_to_host_async()


def _fetch(x: jax.Array, placement: Placement) -> np.ndarray:
    """The array on the host; a transfer is meant, so transfer guards allow it."""
    if placement.platform != "cpu":
        with jax.transfer_guard_device_to_host("allow"):
            return np.asarray(x)
    if len(placement.devices) > 1:  # reading one copy takes half the time
        x = x.addressable_data(0)
    return np.asarray(x)  # device_get takes ten times as long


class Verdicts:
    """The verdicts on the last steps, each read once its step has run.

    Waiting for each verdict at once would stall the devices at every step.
    """

    def __init__(self, placement: Placement, *, refusals: bool) -> None:
        self._placement, self._refusals = placement, refusals
        # Several processes would read a verdict at different calls, and the first to
        # raise would leave the others waiting for it in the next step.
        self._is_alone = placement.num_processes == 1
        # A copy from a GPU ends some time after its step: 0.1 ms on an H100, for which
        # the next call would wait. Two steps later it is there.
        self._behind = 0 if placement.platform == "cpu" else 2
        self._pending: collections.deque[tuple[Any, jax.Array]] = collections.deque()
        self._reading = threading.RLock()  # threads may call one step

    def add(self, number: jax.Array, guarded: jax.Array) -> None:
        """Note a step; of several processes any, since another may have died in it."""
        if self._refusals or not self._is_alone:
            self._pending.append((number, guarded))
            send_to_host(guarded, self._placement)

    def check(self) -> None:
        """Read the verdicts of steps that have run; wait for old ones if many pend.

        Called before a step: an error after one would lose the state it returned.
        """
        pending = self._pending
        with self._reading:
            while self._is_alone and len(pending) > self._behind:
                last: Any = pending[self._behind][1]  # the stub has no is_ready
                if not last.is_ready():
                    break
                if is_refused(_fetch(pending[0][1], self._placement)):
                    self._read_oldest()
                else:
                    pending.popleft()
            if len(pending) >= 16:
                while len(pending) > 4:
                    self._read_oldest()

    def settle(self) -> None:
        """Wait for all steps so far, and read their verdicts."""
        with self._reading:
            while self._pending:
                self._read_oldest()

    def _read_oldest(self) -> None:
        number, guarded = self._pending.popleft()
        jax.block_until_ready(guarded)  # raises if the devices failed
        if not self._refusals:
            return
        if error := error_of(_fetch(guarded, self._placement), number):
            self._pending.clear()
            raise error
