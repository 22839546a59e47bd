"""Cross-tower ops: ways to compute a sum over towers on several devices.

A cross-tower op is a frozen dataclass with ``needs_every_tower`` (whether it takes
each local tower's values separately, ``[k, ...]``, instead of their sum) and
``sum_over_towers(tree, axes) -> Sums``; ``check_devices(devices)`` if its options do
not fit every set of devices.
"""

from towerjax.collectives.base import CrossTowerOps as CrossTowerOps
from towerjax.collectives.choose import OpsChoice as OpsChoice
from towerjax.collectives.choose import choose_cross_tower_ops as choose_cross_tower_ops
from towerjax.collectives.ops import AllReduce as AllReduce
from towerjax.collectives.ops import Hierarchical as Hierarchical
from towerjax.collectives.ops import Packed as Packed
from towerjax.collectives.ops import PinnedTree as PinnedTree
from towerjax.collectives.ops import ReduceToOneDevice as ReduceToOneDevice
