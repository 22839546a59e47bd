"""Cross-tower ops: ways to compute a sum over towers on several devices."""

from towerjax.collectives.choose import OpsChoice as OpsChoice
from towerjax.collectives.choose import choose_cross_tower_ops as choose_cross_tower_ops
from towerjax.collectives.ops import AllReduce as AllReduce
from towerjax.collectives.ops import CrossTowerOps as CrossTowerOps
from towerjax.collectives.ops import Hierarchical as Hierarchical
from towerjax.collectives.ops import Packed as Packed
from towerjax.collectives.ops import PinnedTree as PinnedTree
from towerjax.collectives.ops import ReduceToOneDevice as ReduceToOneDevice
