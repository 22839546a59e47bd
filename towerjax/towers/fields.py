"""The fields of a strategy that its methods and its towers read."""

from towerjax.collectives.ops import CrossTowerOps
from towerjax.mesh.placement import Placement


class StrategyFields:
    """What every strategy holds: where its towers are, and how sums travel."""

    placement: Placement
    cross_tower_ops: CrossTowerOps
    prefetch_on_device: int

    @property
    def num_towers(self) -> int:
        """``T``."""
        return self.placement.num_towers
