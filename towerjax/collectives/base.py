"""The interface of cross-tower ops, and sums over towers with one of them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from towerjax.collectives.packing import Sums
from towerjax.collectives.reduce import add_rows
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
        """The sum over all towers of the sum, or the rows, of this device's towers."""
        ...


@runtime_checkable
class ChecksDevices(Protocol):
    """A cross-tower op whose options do not fit every set of devices."""

    def check_devices(self, devices: Sequence[str]) -> None:
        """Raise a ValueError unless the op can use these devices, in tower order."""
        ...


def sum_over_towers(ops: CrossTowerOps, tree: PyTree, axes: TowerAxes) -> Sums:
    """Sum over all towers by the op, in the name scope that marks a step's own sums."""
    with jax.named_scope(tags.SUMMED_BY_STEP):
        return ops.sum_over_towers(tree, axes)


def sum_rows_over_towers(ops: CrossTowerOps, rows: PyTree, axes: TowerAxes) -> PyTree:
    """The sum over all towers of leaves ``[k, ...]``, one row a local tower."""
    if not ops.needs_every_tower:
        rows = jax.tree.map(add_rows, rows)
    return sum_over_towers(ops, rows, axes).tree()
