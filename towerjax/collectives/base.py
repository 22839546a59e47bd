"""The interface of cross-tower ops, and sums over towers with one of them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from towerjax.collectives.packing import Sums
from towerjax.mesh.placement import TowerAxes
from towerjax.proof import tags
from towerjax.types import PyTree


class CrossTowerOps(Protocol):
    """Computes the sum over towers, for example `AllReduce`."""

    @property
    def needs_every_tower(self) -> bool:
        """Whether ``sum_over_towers`` takes leaves ``[k, ...]``, a row a tower."""
        ...

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The sum over all towers, inside a device function.

        Args:
          tree: The sum of the values of this device's towers; with
            ``needs_every_tower`` their values, a row for each.
          axes: The axes of the towers.

        Returns:
          The sums, the same on each device.
        """
        ...


@runtime_checkable
class ChecksDevices(Protocol):
    """A cross-tower op whose options do not fit every set of devices."""

    def check_devices(self, devices: Sequence[str]) -> None:
        """Raise a ValueError unless the op can use these devices, in tower order."""
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A cross-tower op that sums gradients in another way, and keeps a state.

    Used in the last pass of a step, for what towers return as ``"grads"``. The state is
    ``state.own``, a ``TowerLocal`` whose reduction is SUM.
    """

    def init_state(self, gradient: PyTree) -> PyTree:
        """One tower's state before the first step.

        Args:
          gradient: Arrays or shapes like the gradient's, which are the parameters'.

        Returns:
          Arrays, leaves ``[T, ...]`` in the state of all towers; or None, and
          ``state.own`` is None.

        Raises:
          ValueError: The op has nothing to do for such a gradient.
        """
        ...

    def sum_with_state(
        self, tree: PyTree, is_gradient: PyTree, state: PyTree, axes: TowerAxes
    ) -> tuple[Sums, PyTree, dict[str, jax.Array]]:
        """The sum over all towers, inside a device function.

        Args:
          tree: The sum of the values of this device's towers.
          is_gradient: A bool for each leaf.
          state: The state of this device's towers, leaves ``[k, ...]``.
          axes: The axes of the towers.

        Returns:
          ``(sums, state, metrics)``: the sums; the next state of this device's towers;
          and metrics, the same on each device.
        """
        ...


def sum_over_towers(ops: CrossTowerOps, tree: PyTree, axes: TowerAxes) -> Sums:
    """Sum over all towers by the op, in the name scope that marks a step's own sums."""
    with jax.named_scope(tags.SUMMED_BY_STEP):
        return ops.sum_over_towers(tree, axes)


def sum_rows_over_towers(ops: CrossTowerOps, rows: PyTree, axes: TowerAxes) -> PyTree:
    """The sum over all towers of leaves ``[k, ...]``, one row a local tower."""
    if not ops.needs_every_tower:
        rows = jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), rows)
    return sum_over_towers(ops, rows, axes).tree()
