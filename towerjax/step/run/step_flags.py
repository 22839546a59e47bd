"""The step flag, which tells whether a step was refused: a number from call to call."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import place_own
from towerjax.step.state.next_state import NONE
from towerjax.step.state.nonfinite import NonFiniteError, explain_params
from towerjax.types import Layout, PyTree

ASKED_EACH = 8
"""The number of calls after which a step flag is read, if reading stalls devices."""

MOST_STATES = 64
"""The number of states whose step flags are kept until they are read."""


def next_step_flag(before: jax.Array, refused: jax.Array) -> jax.Array:
    """In a program: the step flag of the call before, or else that of this step."""
    return jnp.where(before != NONE, before, refused)


def send_to_host(tree: PyTree, placement: Placement) -> None:
    """Start the copies of what will be read on the host; CPUs need none."""
    if placement.platform != "cpu":
        with jax.transfer_guard_device_to_host("allow"):
            for x in jax.tree.leaves(tree):
                x.copy_to_host_async()


@dataclasses.dataclass(eq=False)
class Lineage:
    """The step flags of calls, each of which made the state of the next."""

    at: Any  # ``state.step`` after the last call, the array itself
    step_flag: Any  # an array, whose stub has no is_ready
    asked: Any = None  # the step flag of an earlier call, which is being copied
    calls: int = 0


class StepFlags:
    """The newest step flag of each state of a step, read now and then.

    Nothing is lost by reading late, since a refused step changed nothing; waiting for
    each step flag would stall the devices. Each eighth call reads what the eighth call
    before it has asked for, on all of several processes, and asks for the newest, whose
    copy then begins. CPUs of one process need no copy: each call reads its step flag if
    the step has run.
    """

    def __init__(
        self, placement: Placement, error: Callable[[int], Exception] | None
    ) -> None:
        """``error(number)`` is raised for a refused step; with None nothing is."""
        self._placement = placement
        self._error = error
        raises = error is not None
        several = placement.num_processes > 1
        self._is_read = raises or several  # another may have died, which reading tells
        self._polls = placement.platform == "cpu" and not several
        # Threads at once each take one and bring one back; read twice does no harm.
        self._lines: list[Lineage] = []

    @functools.cached_property
    def none(self) -> jax.Array:
        """`NONE`, on the devices."""
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return place_own(np.int32(NONE), self._placement, Layout.MIRRORED)

    def take(self, at: Any) -> Lineage:
        """Return the line of calls that made the state with this ``state.step``."""
        for line in [*self._lines]:
            if line.at is at:
                self._drop(line)
                return line
        return Lineage(at, self.none)

    def put(self, line: Lineage) -> None:
        """Bring back a line, with what a call's program returned if it did not fail."""
        if not self._is_read:
            return
        self._lines.append(line)
        if len(self._lines) > MOST_STATES:
            old = [self._lines.pop(0) for _ in range(MOST_STATES // 2)]
            self._lines += [x for x in old if self._number(x.step_flag) != NONE]

    def check(self, at: Any, state: Any = None) -> None:
        """Read step flags, before a step whose returned state an error would lose.

        ``state`` is the state of that step, which a refused step has not changed.
        """
        try:
            for line in [*self._lines]:
                if line.at is at:
                    line.calls += 1
                    if line.calls % ASKED_EACH == 0:
                        asked = line.asked
                        line.asked = line.step_flag
                        send_to_host(line.asked, self._placement)
                        self._read(line, asked)
                    elif self._polls and line.step_flag.is_ready():
                        self._read(line, line.step_flag)
        except NonFiniteError as error:
            explain_params(error, state)
            raise

    def settle(self) -> None:
        """Wait for all steps so far, and read their step flags."""
        while self._lines:
            line = self._lines.pop(0)
            self._read(line, line.step_flag)

    def _drop(self, line: Lineage) -> None:
        with contextlib.suppress(ValueError):  # another thread was first
            self._lines.remove(line)

    def _read(self, line: Lineage, step_flag: jax.Array | None) -> None:
        number = NONE if step_flag is None else self._number(step_flag)
        if number != NONE and self._error is not None:
            self._drop(line)
            raise self._error(number)

    def _number(self, x: jax.Array) -> int:
        """Read a number on the host; a transfer is meant, so transfer guards allow it.

        Raises what the devices failed with.
        """
        if self._placement.platform != "cpu":
            with jax.transfer_guard_device_to_host("allow"):
                return np.asarray(x).item()
        if len(self._placement.devices) > 1:  # reading one copy takes half the time
            x = x.addressable_data(0)
        return np.asarray(x).item()  # device_get takes ten times as long
