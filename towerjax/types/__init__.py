"""The types that users see; modules beside them: trees, options, refusals, texts."""

from towerjax.types.values import ArrayLike as ArrayLike
from towerjax.types.values import Layout as Layout
from towerjax.types.values import LossFn as LossFn
from towerjax.types.values import MetricFn as MetricFn
from towerjax.types.values import Metrics as Metrics
from towerjax.types.values import PerTower as PerTower
from towerjax.types.values import PredictFn as PredictFn
from towerjax.types.values import PyTree as PyTree
from towerjax.types.values import Reduction as Reduction
from towerjax.types.values import Rows as Rows
from towerjax.types.values import Sum as Sum
from towerjax.types.values import TowerOutput as TowerOutput
from towerjax.types.values import Whole as Whole
