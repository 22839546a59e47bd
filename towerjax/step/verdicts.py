"""The verdicts on a step's guarded value, each read once the step has run."""

import collections
import itertools
import math
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.step import faults
from towerjax.types import PyTree

SHARED_COPY, SLOW_CALL_S = 8, 0.02
"""So many verdicts are copied from a GPU at once, unless calls come more slowly."""


def is_refused(guarded: Any) -> bool:
    """Whether a step was refused, by its guarded value: one element on the host."""
    return _refuses(guarded.item())


def _refuses(guarded: Any) -> bool:
    # A Python number: this runs at every call, and NumPy takes ten times as long.
    return guarded is False or not math.isfinite(guarded)


@jax.jit
def _in_one(*values: jax.Array) -> jax.Array:
    return jnp.stack(values)


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

    def __init__(self, placement: Placement, *, refusals: bool, guard: str) -> None:
        self._placement, self._refusals, self._guard = placement, refusals, guard
        # Several processes would read a verdict at different calls, and the first to
        # raise would leave the others waiting for it in the next step.
        self._is_alone = placement.num_processes == 1
        # A copy from a GPU ends some time after its step: 0.1 ms on an H100, for which
        # the next call would wait. Two steps later it is there. And it costs the host
        # as long as a small step takes: where calls are fast, several share one.
        self._is_copied = refusals and placement.platform != "cpu"
        self._behind = 2 if self._is_copied else 0
        self._pending: collections.deque[tuple[Any, jax.Array]] = collections.deque()
        # Of how many of these steps, from the oldest on, and where their verdicts are.
        self._copies: collections.deque[tuple[int, jax.Array]] = collections.deque()
        self._num_unsent, self._last_call = 0, -math.inf
        self._reading = threading.RLock()  # threads may call one step

    def add(self, number: jax.Array, guarded: jax.Array) -> None:
        """Note a step; of several processes any, since another may have died in it."""
        if not self._refusals and self._is_alone:
            return
        with self._reading:
            self._pending.append((number, guarded))
            if not self._is_copied:
                self._copies.append((1, guarded))
                return
            self._num_unsent += 1
            before, self._last_call = self._last_call, time.monotonic()
            if (
                self._num_unsent == SHARED_COPY
                or self._last_call - before > SLOW_CALL_S
            ):
                self._send()

    def _send(self) -> None:
        """Start the copy of the verdicts that none is started of."""
        size, self._num_unsent = self._num_unsent, 0
        guarded = [x for _, x in itertools.islice(reversed(self._pending), size)][::-1]
        verdicts = guarded[0]
        if size > 1:
            if self._placement.num_devices > 1:
                guarded = [x.addressable_data(0) for x in guarded]
            # One program for all sizes.
            verdicts = _in_one(*guarded, *[guarded[-1]] * (SHARED_COPY - size))
        send_to_host(verdicts, self._placement)
        self._copies.append((size, verdicts))

    def check(self) -> None:
        """Read the verdicts of steps that have run; wait for old ones if many pend.

        Called before a step: an error after one would lose the state it returned.
        """
        pending = self._pending
        with self._reading:
            while self._is_alone and self._copies:
                at = self._copies[0][0] - 1 + self._behind
                if at >= len(pending):
                    break
                last: Any = pending[at][1]  # the stub has no is_ready
                if not last.is_ready():
                    break
                self._read_oldest()
            if len(pending) >= 2 * SHARED_COPY:
                while len(pending) > SHARED_COPY:
                    self._wait_for_oldest()

    def settle(self) -> None:
        """Wait for all steps so far, and read their verdicts."""
        with self._reading:
            while self._pending:
                self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        if not self._copies:
            self._send()
        # Raises if the devices failed.
        jax.block_until_ready(self._pending[self._copies[0][0] - 1][1])
        self._read_oldest()

    def _read_oldest(self) -> None:
        """Read the oldest copy, and raise about the first step that was refused."""
        size, copy = self._copies[0]
        if self._refusals:
            verdicts = _fetch(copy, self._placement)
            values = (verdicts.item(),) if size == 1 else verdicts.tolist()[:size]
            for i, value in enumerate(values):
                if _refuses(value):
                    before = int(self._pending[i][0]) % 2**32  # as `step_number` counts
                    self._pending.clear()
                    self._copies.clear()
                    self._num_unsent = 0
                    raise faults.NonFiniteError(before + 1, guard=self._guard)
        self._copies.popleft()
        for _ in range(size):
            self._pending.popleft()
