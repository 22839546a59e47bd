"""The verdict on a step's calls: one number, which travels from call to call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import place_own
from towerjax.step.state.next_state import NONE
from towerjax.types import Layout, PyTree

ASKED_EACH = 8
"""After how many calls what they tell is read, where each would stall the devices."""


def next_verdict(before: jax.Array, refused: jax.Array) -> jax.Array:
    """In a program: the verdict of the call before, or else that on this step."""
    return jnp.where(before != NONE, before, refused)


def send_to_host(tree: PyTree, placement: Placement) -> None:
    """Start the copies of what will be read on the host; CPUs need none."""
    if placement.platform != "cpu":
        with jax.transfer_guard_device_to_host("allow"):
            for x in jax.tree.leaves(tree):
                x.copy_to_host_async()


class Verdicts:
    """The newest verdict of a step's calls, read now and then.

    Nothing is lost by reading late, since a refused step changed nothing; waiting for
    each verdict would stall the devices. Each eighth call reads what the eighth before
    has asked for, on all of several processes, and asks for the newest, whose copy then
    begins. CPUs of one process need no copy: each call reads it if its step has run.
    """

    def __init__(
        self, placement: Placement, error: Callable[[int], Exception] | None
    ) -> None:
        """``error``: of a refused step's number, what to raise; None: nothing."""
        self._placement, self._error, raises = placement, error, error is not None
        several = placement.num_processes > 1
        self._is_read = raises or several  # another may have died, which reading tells
        self._polls = placement.platform == "cpu" and not several
        # Threads at once each take one and bring one back; read twice does no harm.
        self._newest: list[Any] = []  # arrays, whose stub has no is_ready
        self._asked: list[jax.Array] = []
        self._calls = 0

    @functools.cached_property
    def none(self) -> jax.Array:
        """`NONE`, on the devices."""
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return place_own(np.int32(NONE), self._placement, Layout.MIRRORED)

    def take(self) -> jax.Array:
        """What the next call's program is given."""
        try:
            return self._newest.pop()
        except IndexError:
            return self.none

    def put(self, verdict: jax.Array) -> None:
        """What a call's program returned, or was given where the call failed."""
        if self._is_read:
            self._newest.append(verdict)

    def check(self) -> None:
        """Read verdicts; called before a step, whose returned state an error loses."""
        if not self._is_read:
            return
        self._calls += 1
        if self._calls % ASKED_EACH == 0:
            asked, self._asked = self._asked, [*self._newest]
            send_to_host(self._asked, self._placement)
            self._read(asked)
        elif self._polls:
            self._read([x for x in [*self._newest] if x.is_ready()])

    def settle(self) -> None:
        """Wait for all steps so far, and read their verdicts."""
        self._asked, newest, self._newest = [], self._newest, []
        self._read(newest)

    def _read(self, verdicts: list[jax.Array]) -> None:
        for verdict in verdicts:
            number = self._fetch(verdict)  # raises if the devices failed
            if number != NONE and self._error is not None:
                self._newest, self._asked = [], []
                raise self._error(number)

    def _fetch(self, x: jax.Array) -> int:
        """A number on the host; a transfer is meant, so transfer guards allow it."""
        if self._placement.platform != "cpu":
            with jax.transfer_guard_device_to_host("allow"):
                return np.asarray(x).item()
        if len(self._placement.devices) > 1:  # reading one copy takes half the time
            x = x.addressable_data(0)
        return np.asarray(x).item()  # device_get takes ten times as long
