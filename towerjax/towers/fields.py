"""The fields of a strategy that its methods and its towers read."""

from towerjax.collectives.ops import CrossTowerOps
from towerjax.mesh.placement import Placement


class StrategyFields:
    """The fields of every strategy: its towers' places and its communication."""

    placement: Placement
    cross_tower_ops: CrossTowerOps
    prefetch_on_device: int

    @property
    def num_towers(self) -> int:
        """The number of towers, ``T``."""
        return self.placement.num_towers
