"""Losses of other libraries that are a sum and a weight under other names.

The names are those of tunix and maxtext: ``WeightedMetric(unreduced_sum, denominator)``
and ``LossOutput(primary_loss, aux_metrics)``. Neither library is imported.
"""

from typing import Any

from towerjax.metrics.weighted import Weighted
from towerjax.types import TowerOutput


def as_ours(returned: Any) -> Any:
    """Return such a loss as `Weighted` or `TowerOutput`, and anything else unchanged.

    A ``WeightedMetric`` may have an ``eps``, which guards its quotient against 0. It is
    left out, because the weights of all towers are added before they divide.
    """
    if _is_weighted(returned):
        return Weighted(returned.unreduced_sum, returned.denominator)
    if hasattr(returned, "primary_loss") and hasattr(returned, "aux_metrics"):
        metrics = {name: as_ours(x) for name, x in returned.aux_metrics.items()}
        return TowerOutput(as_ours(returned.primary_loss), metrics)
    return returned


def _is_weighted(x: Any) -> bool:
    return hasattr(x, "unreduced_sum") and hasattr(x, "denominator")
