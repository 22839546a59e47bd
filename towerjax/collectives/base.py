"""What is a cross-tower op? The interface, and a sum over the towers' rows with one."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from towerjax.collectives.packing import Sums
from towerjax.mesh.placement import TowerAxes
from towerjax.proof.scale import SUMMED_BY_STEP
from towerjax.types import PyTree


class CrossTowerOps(Protocol):
    """How the sum over towers is made, for example `AllReduce`."""

    @property
    def needs_every_tower(self) -> bool:
        """Does ``sum_over_towers`` take leaves ``[k, ...]``, one row a local tower?"""
        ...

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers, inside a device function.

        Args:
          tree: This device's towers' values, apart or added.
          axes: The axes that the towers meet over.

        Returns:
          The sums, the same on each device.
        """
        ...


@runtime_checkable
class ChecksDevices(Protocol):
    """A cross-tower op with options that not every set of devices can honour."""

    def check_devices(self, devices: Sequence[str]) -> None:
        """Raise a ValueError when the op cannot be used on these, in tower order."""
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A cross-tower op that sums a gradient in a way of its own, with a state.

    Used in the last pass of a step, for what towers return as ``"grads"``. The state is
    ``state.own``, a ``TowerLocal`` whose reduction is SUM.
    """

    def init_state(self, gradient: PyTree) -> PyTree:
        """What one tower keeps before the first step.

        Args:
          gradient: Arrays or shapes like the gradient's: of the parameters.

        Returns:
          Arrays, or None; once on each tower they are leaves ``[T, ...]``.

        Raises:
          ValueError: Of such a gradient there is nothing to do.
        """
        ...

    def sum_with_state(
        self, tree: PyTree, is_gradient: PyTree, state: PyTree, axes: TowerAxes
    ) -> tuple[Sums, PyTree, dict[str, jax.Array]]:
        """The sum over all towers, inside a device function.

        Args:
          tree: This device's towers' values, added.
          is_gradient: A bool for each leaf.
          state: What this device's towers keep, leaves ``[k, ...]``.
          axes: The axes that the towers meet over.

        Returns:
          ``(sums, state, metrics)``: the sums; what this device's towers keep now; and
          metrics, the same on each device.
        """
        ...


def sum_over_towers(ops: CrossTowerOps, tree: PyTree, axes: TowerAxes) -> Sums:
    """The sum over all towers that a step makes itself, as `CrossTowerOps` does it."""
    with jax.named_scope(SUMMED_BY_STEP):
        return ops.sum_over_towers(tree, axes)


def sum_rows_over_towers(ops: CrossTowerOps, rows: PyTree, axes: TowerAxes) -> PyTree:
    """The sum over all towers of values that lie as one row a local tower."""
    if not ops.needs_every_tower:
        rows = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), rows)
    return sum_over_towers(ops, rows, axes).tree()
