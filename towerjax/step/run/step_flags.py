"""The step flag: a number, handed from call to call, that tells of a refused step."""

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
    """Keep the first refusal: an old step flag wins over this call's.

    If ``before``, the step flag of the call before, tells of a refused step, it is
    returned. Otherwise ``refused``, the step flag of this call, is.
    """
    return jnp.where(before != NONE, before, refused)


def send_to_host(tree: PyTree, placement: Placement) -> None:
    """Start copies to the host of values that are read later; CPUs need none."""
    if placement.platform != "cpu":
        with jax.transfer_guard_device_to_host("allow"):
            for x in jax.tree.leaves(tree):
                x.copy_to_host_async()


@dataclasses.dataclass(eq=False)
class Lineage:
    """A line of calls, each of which took the state that the call before returned."""

    at: Any  # the array ``state.step`` that the last call returned
    step_flag: Any  # an array; Any, since JAX's stub lacks is_ready
    asked: Any = None  # an earlier call's step flag, on its way to the host
    calls: int = 0


class StepFlags:
    """The newest step flag of each state of a step, which is read now and then.

    Nothing is lost by reading late, because a refused step changed nothing. Waiting for
    each step flag would stall the devices. Every eighth call asks for the newest step
    flag, whose copy to the host then begins, and reads the one that the eighth call
    before it asked for. With several processes all read at the same calls. CPUs of one
    process need no copy: each call reads its step flag as soon as the step has run.
    """

    def __init__(
        self, placement: Placement, error: Callable[[int], Exception] | None
    ) -> None:
        """Prepare to read step flags; ``error(number)`` makes the error to raise.

        ``number`` is that of the refused step. If ``error`` is None, nothing is raised.
        """
        self._placement = placement
        self._error = error
        raises = error is not None
        several = placement.num_processes > 1
        self._is_read = raises or several  # reading fails if another process has died
        self._polls = placement.platform == "cpu" and not several
        # Threads share this list. Each takes a line of calls out and puts it back. If
        # two threads read one line's step flag, no harm is done.
        self._lines: list[Lineage] = []

    @functools.cached_property
    def none(self) -> jax.Array:
        """The step flag `NONE`, on the devices."""
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return place_own(np.int32(NONE), self._placement, Layout.MIRRORED)

    def take(self, at: Any) -> Lineage:
        """Take out and return the line of calls whose last ``step`` array this is."""
        for line in [*self._lines]:
            if line.at is at:
                self._drop(line)
                return line
        return Lineage(at, self.none)

    def put(self, line: Lineage) -> None:
        """Put back a line, with the step flag that the last call's program returned."""
        if not self._is_read:
            return
        self._lines.append(line)
        if len(self._lines) > MOST_STATES:
            old = [self._lines.pop(0) for _ in range(MOST_STATES // 2)]
            self._lines += [x for x in old if self._number(x.step_flag) != NONE]

    def check(self, at: Any, state: Any = None) -> None:
        """Read step flags that are due, before the next step takes the state.

        ``at`` is the ``step`` of that state. A refused step has not changed ``state``,
        so it names the parameters that were not finite.
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
        try:  # `contextlib.suppress` takes ten times as long
            self._lines.remove(line)
        except ValueError:  # another thread was first
            pass

    def _read(self, line: Lineage, step_flag: jax.Array | None) -> None:
        number = NONE if step_flag is None else self._number(step_flag)
        if number != NONE and self._error is not None:
            self._drop(line)
            raise self._error(number)

    def _number(self, x: jax.Array) -> int:
        """Read a step flag on the host; raise if the devices have failed.

        The transfer is intended, so transfer guards are told to allow it.
        """
        if self._placement.platform != "cpu":
            with jax.transfer_guard_device_to_host("allow"):
                return np.asarray(x).item()
        # Reading one device's copy takes half the time.
        if len(self._placement.devices) > 1:
            x = x.addressable_data(0)
        return np.asarray(x).item()  # device_get takes ten times as long
