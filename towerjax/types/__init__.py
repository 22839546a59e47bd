"""The nouns: Sum, Rows, PerTower, Reduction, Layout, TowerOutput."""

from towerjax.types.nouns import ArrayLike as ArrayLike
from towerjax.types.nouns import Layout as Layout
from towerjax.types.nouns import LossFn as LossFn
from towerjax.types.nouns import MetricFn as MetricFn
from towerjax.types.nouns import PerTower as PerTower
from towerjax.types.nouns import PredictFn as PredictFn
from towerjax.types.nouns import PyTree as PyTree
from towerjax.types.nouns import Reduction as Reduction
from towerjax.types.nouns import Rows as Rows
from towerjax.types.nouns import Shared as Shared
from towerjax.types.nouns import Sum as Sum
from towerjax.types.nouns import TowerOutput as TowerOutput
from towerjax.types.nouns import leaf_name as leaf_name
from towerjax.types.nouns import name_by_key as name_by_key
from towerjax.types.nouns import named_leaves as named_leaves
from towerjax.types.nouns import readable_leaves as readable_leaves
from towerjax.types.nouns import short_repr as short_repr
