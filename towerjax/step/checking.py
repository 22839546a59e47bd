"""The check inside a step's program, and its verdicts, read once a step has run."""

import collections
import dataclasses
import functools
import math
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import all_gather_rows
from towerjax.mesh.placement import Placement, TowerAxes
from towerjax.step import faults
from towerjax.step.state import TrainState
from towerjax.types import Layout, PyTree, readable_leaves
from towerjax.types.options import cast_ints, check_flag, check_whole


@dataclasses.dataclass(frozen=True)
class Check:
    """What a train step checks every ``n`` steps, inside its program.

    Attributes:
      every: ``n``: the steps 0, n, 2n ... are checked.
      desync: Compare a fingerprint of each mirrored leaf's bits over devices, of the
        state as the step is given it and of the batch's `Whole` values. The step's
        number is compared at every check and stands for the rest where it differs.
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
        cast_ints(self)
        check_flag("Check.desync", self.desync)
        check_flag("Check.nonfinite", self.nonfinite)
        if not (self.desync or self.nonfinite):
            raise ValueError(
                "Check(desync=False, nonfinite=False) looks at nothing. Build the step"
                " with check=None."
            )

    def is_due(self, number: Any) -> jax.Array:
        """Whether this step is checked.

        Args:
          number: ``()`` int32, the step's number.

        Returns:
          ``()`` bool.
        """
        return number % self.every == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of the devices' copies of mirrored leaves."""

    prints: jax.Array  # [D, L] uint32, zeros where no check was due
    numbers: jax.Array  # [D] int32, the step's number on each device
    leaves: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def differing(self, placement: Placement) -> list[faults.Differing]:
        """The copies that differ from most devices', once this is on the host."""
        prints: Any = self.prints
        numbers: Any = self.numbers
        leaves, k = self.leaves, placement.num_towers // placement.num_devices
        if (numbers != numbers[0]).any():  # then a check was not due on all devices
            prints, leaves = numbers[:, None], ("step",)
        return [
            faults.Differing(
                placement.devices[d], tuple(range(d * k, d * k + k)), leaves[leaf]
            )
            for d, leaf in np.argwhere(faults.outliers(prints)).tolist()
        ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Findings:
    """What the check of a step found, the same on every device."""

    any_fault: jax.Array  # () bool
    copies: Fingerprints | None  # None where they are not compared, as on one device
    flags: faults.Flags | None  # [T, M]; None where they are not looked for

    def error(self, number: int, placement: Placement) -> Exception | None:
        """The error to raise, once this is on the host; None if all is well."""
        if self.copies and (differing := self.copies.differing(placement)):
            return faults.DesyncError(number, differing)
        if self.flags and (places := self.flags.places(number)):
            return faults.NonFiniteError(number, places, refused=False)
        return None


class Checked(NamedTuple):
    """The guarded value of a step, and what its check found."""

    guarded: jax.Array  # the loss, or a bool
    found: Any  # `Findings` or the like; None without a check


def device_prints(
    state: TrainState, shared: PyTree, check: Check, axes: TowerAxes, layout: TrainState
) -> Fingerprints | None:
    """Fingerprints of this device's mirrored leaves; nothing is sent yet.

    ``shared`` is a batch of the values of its `Whole` leaves alone.
    """
    if not (check.desync and axes.device_axis):
        return None
    fields, layouts = vars(state), vars(layout)
    mirrored = {x: fields[x] for x in fields if layouts[x] is Layout.MIRRORED}
    mirrored |= {"step": None, "batch": shared}  # numbers are compared by themselves
    leaves = tuple(name for name, _ in readable_leaves("", mirrored))
    none = jnp.zeros(len(leaves), jnp.uint32)
    due = check.is_due(state.step)
    prints = lax.cond(due, faults.fingerprints, lambda _: none, mirrored)
    return Fingerprints(prints[None], state.step[None], leaves)


def gather_findings(
    copies: Fingerprints | None,
    flagged: faults.Flags | None,
    due: jax.Array,
    axes: TowerAxes,
) -> Findings:
    """Gather from all devices what a check found, if it is due; else zeros."""
    if axes.device_axis:
        gather, own = functools.partial(all_gather_rows, axes=axes), (copies, flagged)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gather, own))
        copies, flagged = lax.cond(due, gather, lambda _: zeros, own)
    any_fault = jnp.bool_(False)
    if copies:
        any_fault |= (copies.prints != copies.prints[:1]).any()
        any_fault |= (copies.numbers != copies.numbers[0]).any()
    if flagged:
        any_fault |= flagged.table.any()
    return Findings(any_fault, copies, flagged)


def after(done: jax.Array, count: jax.Array) -> jax.Array:
    """``count``, with a data dependence on ``done`` added.

    XLA then computes ``done`` before the step that uses ``count`` overwrites the
    buffers of the state; without it XLA copies the whole state at every step. ``done``
    is unsigned: shifted it is >= 0 in any dtype, so that 0 is added.
    """
    # By lax: each function of jnp is traced by itself, in a step's first call.
    first = done.reshape(-1)[0]
    half = lax.shift_right_logical(first, lax.full_like(first, 1))
    half = lax.convert_element_type(half, count.dtype)
    return lax.add(count, lax.min(half, lax.full_like(half, 0)))


def is_refused(guarded: Any) -> bool:
    """Whether a step was refused, by its guarded value: one element on the host."""
    # A Python number: this runs at every call, and NumPy takes ten times as long.
    found = guarded.item()
    return found is False or not math.isfinite(found)


def error_of(
    step: Checked, number: Any, placement: Placement, *, refusals: bool, index: Any = ()
) -> Exception | None:
    """The error to raise about a step, or None; waits for the step."""
    refused = refusals and is_refused(_fetch(step.guarded, placement)[index])
    error = None
    if step.found is not None and _fetch(step.found.any_fault, placement)[index]:
        found = jax.tree.map(lambda x: x[index], jax.device_get(step.found))
        error = found.error(_as_count(number), placement)
    if isinstance(error, faults.NonFiniteError) and refused and not error.alone:
        return faults.NonFiniteError(error.step, error.places)
    return error or (faults.NonFiniteError(_as_count(number)) if refused else None)


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
                has_check = pending[0][1].found is not None
                if not (has_check or is_refused(_fetch(value, self._placement))):
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
