"""What does a checked step look at, every so many steps, and who is told of it?"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import rows_of_all_devices
from towerjax.mesh.placement import Placement, TowerAxes
from towerjax.step.amiss import (
    DesyncError,
    Differing,
    Flags,
    NonFiniteError,
    differing_leaves,
    fingerprints,
)
from towerjax.step.state import TrainState
from towerjax.types import Layout, PyTree, readable_leaves
from towerjax.types.options import check_flag, check_whole, plain_wholes


@dataclasses.dataclass(frozen=True)
class Check:
    """What a train step looks at besides, inside its program.

    Attributes:
      every: ``n``: the steps 0, n, 2n ... are looked at.
      desync: Compare a fingerprint of each mirrored leaf's bits over devices, of the
        state as the step is given it. The step's number is compared at every check
        and stands for the rest where it differs.
      nonfinite: Look for NaN and infinity in the parameters and in each tower's own
        loss, gradient and sums of metrics. Needs ``on_nonfinite="raise"``.

    Raises:
      ValueError: ``every`` is not a whole number >= 1, or nothing is looked at.

    Example:
      >>> Check(every=100, nonfinite=False).desync
      True
    """

    every: int
    desync: bool = True
    nonfinite: bool = True

    def __post_init__(self) -> None:
        check_whole("Check.every", self.every, 1)
        plain_wholes(self)
        check_flag("Check.desync", self.desync)
        check_flag("Check.nonfinite", self.nonfinite)
        if not (self.desync or self.nonfinite):
            raise ValueError(
                "Check(desync=False, nonfinite=False) looks at nothing. Build the step"
                " with check=None."
            )

    def is_due(self, number: Any) -> jax.Array:
        """Is the step looked at?

        Args:
          number: ``()`` int32, which step it is.

        Returns:
          ``()`` bool.
        """
        return number % self.every == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """What the devices have of what is mirrored."""

    prints: jax.Array  # [D, L] uint32, zeros where a device did not look
    numbers: jax.Array  # [D] int32, the step's number on each device
    leaves: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def differing(self, placement: Placement) -> list[Differing]:
        """In words, once it is on the host."""
        numbers: Any = self.numbers
        if (numbers != numbers[0]).any():  # then not all have looked at the rest
            return differing_leaves(numbers[:, None], ("step",), placement)
        prints: Any = self.prints
        return differing_leaves(prints, self.leaves, placement)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Findings:
    """What the check of a step found, the same on every device."""

    amiss: jax.Array  # (): is there anything to be told?
    copies: Copies | None  # None where they are not compared, as on one device
    flags: Flags | None  # [T, M]; None where they are not looked for

    def error(self, number: int, placement: Placement) -> Exception | None:
        """What is to be raised, once this is on the host."""
        if self.copies and (differing := self.copies.differing(placement)):
            return DesyncError(number, differing)
        if self.flags and (places := self.flags.places(number)):
            return NonFiniteError(number, places, refused=False)
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Checked:
    """What is guarded in a step, and what its check found."""

    guarded: jax.Array  # the loss or a bool, as without a check
    found: Findings


def copies_on_device(
    state: TrainState, check: Check, axes: TowerAxes, layout: TrainState
) -> Copies | None:
    """What this device has of what is mirrored, by its own number: nothing is sent."""
    if not (check.desync and axes.device_axis):
        return None
    names = ("params", "opt_state", "seen", "extra", "rng")
    names = [name for name in names if getattr(layout, name) is Layout.MIRRORED]
    mirrored = {name: getattr(state, name) for name in names}
    leaves = tuple(name for name, _ in readable_leaves("", mirrored))
    none = jnp.zeros(len(leaves), jnp.uint32)
    due = check.is_due(state.step)
    prints = lax.cond(due, fingerprints, lambda _: none, mirrored)
    return Copies(prints[None], state.step[None], leaves)


def findings(
    copies: Copies | None, flagged: Flags | None, due: jax.Array, axes: TowerAxes
) -> Findings:
    """What a check found, on all devices."""
    copies, flagged = _on_all_devices((copies, flagged), due, axes)
    amiss = jnp.bool_(False)
    if copies:
        amiss |= (copies.prints != copies.prints[:1]).any()
        amiss |= (copies.numbers != copies.numbers[0]).any()
    if flagged:
        amiss |= flagged.table.any()
    return Findings(amiss, copies, flagged)


def after(done: jax.Array, count: jax.Array) -> jax.Array:
    """The count itself, of which the compiler cannot know without ``done``.

    A step that is computed from it writes over no buffer before ``done`` has read it;
    else XLA copies the whole state for the check, at every step.
    """
    return count + jnp.minimum((done.reshape(-1)[0] >> 1).astype(count.dtype), 0)


def _on_all_devices(own: PyTree, due: jax.Array, axes: TowerAxes) -> PyTree:
    """Each device's rows side by side, when a check is due; else zeros."""
    if not axes.device_axis:
        return own
    shapes = jax.eval_shape(lambda: rows_of_all_devices(own, axes))
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    return lax.cond(due, lambda x: rows_of_all_devices(x, axes), lambda _: zeros, own)


def is_refused(guarded: Any) -> bool:
    """Was a step refused? Of its verdict on the host, an array of a single element."""
    # As a number of Python's: asked at every call, where NumPy takes ten times as long.
    found = guarded.item()
    return found is False or not math.isfinite(found)


def in_brief(guarded: Any) -> tuple[jax.Array, jax.Array | None]:
    """The little that has to be read of every step."""
    if isinstance(guarded, Checked):
        return guarded.guarded, guarded.found.amiss
    return guarded, None


def error_of(
    guarded: Any,
    number: Any,
    placement: Placement,
    *,
    refusals: bool,
    index: Any = (),
) -> Exception | None:
    """What is to be raised about a step. Waits for it."""
    value, amiss = in_brief(guarded)
    refused = refusals and is_refused(_fetched(value, placement)[index])
    error = None
    if amiss is not None and _fetched(amiss, placement)[index]:
        found = jax.tree.map(lambda x: x[index], jax.device_get(guarded.found))
        error = found.error(int(number), placement)
    if isinstance(error, NonFiniteError) and refused and not error.alone:
        return NonFiniteError(error.step, error.places)
    return error or (NonFiniteError(int(number)) if refused else None)


def _fetched(x: jax.Array, placement: Placement) -> np.ndarray:
    """The array on the host; asked for, so that ``jax.transfer_guard`` lets it by."""
    # Of CPUs nothing is transferred, and device_get takes ten times as long.
    return np.asarray(x) if placement.platform == "cpu" else jax.device_get(x)


class Verdicts:
    """Were the last steps refused, or found amiss? Looked at once they have run.

    Waiting for each at once would stall the devices at every step.
    """

    def __init__(self, placement: Placement, *, refusals: bool) -> None:
        self._placement, self._refusals = placement, refusals
        # Several processes would see it at different calls, and the one that raises
        # first would leave the others waiting for it in the next step.
        self._is_alone = placement.num_processes == 1
        self._is_spread = placement.num_devices > 1
        self._pending: collections.deque[tuple[Any, Any]] = collections.deque()

    def add(self, number: jax.Array, guarded: Any) -> None:
        """Note a step."""
        if self._refusals or isinstance(guarded, Checked):
            self._pending.append((number, guarded))

    def check(self) -> None:
        """Look at the steps that have run; wait for old ones when there are many.

        To be called before a step, whose state would be lost with an error after it.
        """
        pending = self._pending
        while self._is_alone and pending:
            brief: Any = in_brief(pending[0][1])  # is_ready is not in the stub
            value, amiss = brief
            if not value.is_ready():
                break
            if self._is_spread:  # a copy's is read in half the time of the whole's
                value = value.addressable_data(0)
            if amiss is None and not is_refused(_fetched(value, self._placement)):
                pending.popleft()
            else:
                self._look()
        if len(pending) >= 16:
            while len(pending) > 4:
                self._look()

    def settle(self) -> None:
        """Look at all steps so far, waiting for them."""
        while self._pending:
            self._look()

    def _look(self) -> None:
        number, guarded = self._pending.popleft()
        error = error_of(guarded, number, self._placement, refusals=self._refusals)
        if error is not None:
            self._pending.clear()
            raise error
