"""Metric states that merge: the value is exact over any split of the data."""

from towerjax.metrics.rows import ratio as ratio
from towerjax.metrics.state import compute as compute
from towerjax.metrics.state import from_clu as from_clu
from towerjax.metrics.state import is_metric as is_metric
from towerjax.metrics.state import merge as merge
from towerjax.metrics.tf import accuracy as accuracy
from towerjax.metrics.tf import false_negatives as false_negatives
from towerjax.metrics.tf import false_positives as false_positives
from towerjax.metrics.tf import mean as mean
from towerjax.metrics.tf import mean_absolute_error as mean_absolute_error
from towerjax.metrics.tf import mean_iou as mean_iou
from towerjax.metrics.tf import mean_per_class_accuracy as mean_per_class_accuracy
from towerjax.metrics.tf import mean_squared_error as mean_squared_error
from towerjax.metrics.tf import percentage_below as percentage_below
from towerjax.metrics.tf import precision as precision
from towerjax.metrics.tf import recall as recall
from towerjax.metrics.tf import root_mean_squared_error as root_mean_squared_error
from towerjax.metrics.tf import true_negatives as true_negatives
from towerjax.metrics.tf import true_positives as true_positives
from towerjax.metrics.thresholds import auc as auc
from towerjax.metrics.thresholds import (
    precision_at_thresholds as precision_at_thresholds,
)
from towerjax.metrics.thresholds import recall_at_thresholds as recall_at_thresholds
from towerjax.metrics.thresholds import (
    sensitivity_at_specificity as sensitivity_at_specificity,
)
from towerjax.metrics.thresholds import (
    specificity_at_sensitivity as specificity_at_sensitivity,
)
from towerjax.metrics.weighted import Additive as Additive
