"""Metrics of scores over many thresholds, computed from histograms."""

from typing import Any, Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np

from towerjax.metrics import rows
from towerjax.metrics.rows import Pairs, Values, Weight, quotient
from towerjax.metrics.tf import share_of
from towerjax.metrics.weighted import Tally
from towerjax.types.options import check_choice, check_whole, is_one_real
from towerjax.types.refusals import refuse_no_numbers

Curve: TypeAlias = Literal["ROC", "PR"]


# ``yes`` and ``no`` are histograms of the scores of positives and of negatives over
# ``n`` thresholds, ``[n + 1]`` weights each. Bucket ``j`` holds the scores above
# exactly the ``j`` lowest thresholds.


def _outcomes_at_thresholds(yes: Any, no: Any) -> tuple[Any, ...]:
    """Add up the four outcomes at each threshold, ``[n]`` each."""
    above = [x[::-1].cumsum()[::-1][1:] for x in (yes, no)]
    return *above, *[x.cumsum()[:-1] for x in (yes, no)]


def _rates(yes: Any, no: Any, rate: str) -> Any:
    """Compute a rate at each threshold, ``[n]``."""
    return quotient(*share_of(rate, _outcomes_at_thresholds(yes, no)))


def _rate_at_nearest(
    yes: Any, no: Any, rate: str, fixed_rate: str, wanted: float
) -> Any:
    """Take a rate at the threshold where ``fixed_rate`` is nearest to ``wanted``."""
    distance = abs(_rates(yes, no, fixed_rate) - wanted)
    nearest = distance.min()
    # If several thresholds are equally near, up to rounding, take the best rate. The
    # result is NaN if one of them is NaN.
    far = distance > nearest + 1e-6
    rates = _rates(yes, no, rate)
    return rows.library_of(rates).where(far, 0.0, rates).max() + 0 * nearest


def _area_under_roc(yes: Any, no: Any) -> Any:
    """Add the trapezoids between the thresholds' points."""
    heights = _rates(yes, no, "sensitivity")
    widths = quotient(no[1:-1], no.sum())
    return (widths * (heights[:-1] + heights[1:]) / 2).sum()


def _area_under_pr(yes: Any, no: Any) -> Any:
    """Integrate the precision over the recall.

    Counts are interpolated between thresholds, and not the precision.
    """
    # The integral of the precision, true / above, over true, along the line between the
    # counts at two thresholds.
    outcomes = _outcomes_at_thresholds(yes, no)
    true, above = (x[1:] for x in share_of("precision", outcomes))
    # These are single buckets. Differences of cumulated sums could become negative by
    # rounding.
    gained = yes[1:-1]
    more = yes[1:-1] + no[1:-1]
    slope = quotient(gained, more)
    stretch = rows.library_of(yes).log1p(quotient(more, above))
    return quotient(
        (slope * (gained + (true - slope * above) * stretch)).sum(), yes.sum()
    )


def _rising(name: str, thresholds: Any) -> tuple[float, ...]:
    """Make a tuple of the thresholds; raise unless they ascend."""
    refuse_no_numbers(f"{name}: thresholds", thresholds)
    edges = np.asarray(thresholds, np.float64)
    rising = edges.ndim == 1 and edges.size and (edges[1:] > edges[:-1]).all()
    if not rising or np.isnan(edges).any():
        raise ValueError(
            f"{name} got thresholds={thresholds!r}, which must be ascending numbers,"
            " such as [0.25, 0.5]."
        )
    return tuple(edges.tolist())


def _curves(
    pairs: Pairs, thresholds: int | tuple[float, ...], value: Any, *options: Any
) -> Tally:
    """Put the scores in histograms, one of positives and one of negatives.

    The thresholds are given, or are a number of evenly spaced ones. ``value`` computes
    the metric from the merged histograms.
    """
    edges: Any = thresholds
    if not isinstance(thresholds, tuple):
        check_whole(f"{pairs.name}: num_thresholds", thresholds, 2)
        edges = np.arange(1, thresholds - 1) / (thresholds - 1)
    # Every score is above the first edge, and none above the last.
    if value is not _rates:
        edges = np.concatenate([[-1e-7], edges, [1 + 1e-7]])
    scores = pairs.predictions
    dtype = jnp.result_type(pairs.predictions)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{pairs.name} got predictions of dtype {dtype}, which must be floating"
            " scores, such as jax.nn.sigmoid(logits)."
        )
    remedy = "scores must lie between 0 and 1. Write jax.nn.sigmoid(logits)."
    pairs.require("scores", scores, (scores >= 0) & (scores <= 1), remedy)
    yes = pairs.as_booleans("labels")
    weights = pairs.weights
    scores = rows.floats_of(scores)
    bucket = jnp.searchsorted(jnp.asarray(edges, scores.dtype), scores)
    right, wrong = (
        rows.added_at((len(edges) + 1,), (bucket,), rows.weights_where(which, weights))
        for which in (yes, ~yes)
    )
    return Tally((right, wrong), value, options, thresholds)


def auc(
    labels: Values,
    predictions: Values,
    weight: Weight = None,
    *,
    curve: Curve = "ROC",
    num_thresholds: int = 200,
    thresholds: Any = None,
) -> Tally:
    """Measure the area under the ROC or the precision-recall curve; ``tf.metrics.auc``.

    There are ``num_thresholds`` thresholds at equal distances from 0 to 1. A score is
    positive at the thresholds below it. Two scores between the same thresholds count as
    equal, so more thresholds give a more exact area. The ROC area is a sum of
    trapezoids. For the PR area, the counts are interpolated between thresholds, and not
    the precision, as TensorFlow's ``careful_interpolation`` does. TensorFlow's default,
    trapezoids, gives too large an area.

    Args:
      labels: ``[b, ...]``: booleans, or numbers 0 and 1.
      predictions: The same shape, scores between 0 and 1; 16-bit scores are widened.
      weight: As for `mean`. An element of weight 0 is left out, whatever its value.
      curve: ``"ROC"`` or ``"PR"``.
      num_thresholds: The number of thresholds ``n``, at least 2. A state holds ``2 (n +
        1)`` numbers.
      thresholds: Ascending numbers from 0 to 1 to use in place of even ones. A
        threshold below all scores and one above all are added. ``num_thresholds`` is
        then not used.

    Returns:
      A state of histograms, float32 or wider. It is exact up to ``2**24`` per batch.
      Without positives the value is 0. Without negatives it is 0 for ROC and 1 for PR.

    Raises:
      ValueError: The shapes differ, a value is out of range, or an option is unknown.
        If values are not known before tracing, one that is out of range makes the
        result NaN, unless its weight is 0.

    Example:
      >>> float(auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]).compute())
      0.75

    Source:
      Interpolation: Davis and Goadrich (2006), "The relationship between
      Precision-Recall and ROC curves", https://doi.org/10.1145/1143844.1143874.
    """
    check_choice("auc: curve", curve, get_args(Curve))
    area = _area_under_roc if curve == "ROC" else _area_under_pr
    limits = num_thresholds if thresholds is None else _rising("auc", thresholds)
    if isinstance(limits, tuple) and (limits[0] < 0 or limits[-1] > 1):
        raise ValueError(
            f"auc got thresholds={thresholds!r}, which must lie between 0 and 1."
        )
    return _curves(Pairs("auc", labels, predictions, weight), limits, area)


def _at_nearest(
    pairs: Pairs, rate: str, fixed_rate: str, wanted: float, num_thresholds: int
) -> Tally:
    """Measure one rate at the threshold that another rate chooses.

    The threshold is the one at which ``fixed_rate`` is nearest to ``wanted``.
    """
    if not is_one_real(wanted) or not 0 <= wanted <= 1:
        raise ValueError(
            f"{pairs.name} got {fixed_rate}={wanted!r}, which must be between 0 and 1."
        )
    return _curves(
        pairs, num_thresholds, _rate_at_nearest, rate, fixed_rate, float(wanted)
    )


def sensitivity_at_specificity(
    labels: Values,
    predictions: Values,
    specificity: float,
    weight: Weight = None,
    *,
    num_thresholds: int = 200,
) -> Tally:
    """Measure the sensitivity where the specificity is nearest to a given one.

    It is ``tf.metrics.sensitivity_at_specificity``. The specificity is the share of
    negatives that are not above the threshold. The sensitivity is the share of
    positives that are above it. If several thresholds are equally near, within 1e-6,
    the greatest sensitivity counts. Errors are those of `auc`.

    Args:
      labels: As for `auc`.
      predictions: As for `auc`.
      specificity: From 0 to 1.
      weight: As for `auc`.
      num_thresholds: As for `auc`.

    Example:
      >>> labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
      >>> float(sensitivity_at_specificity(labels, scores, 0.9).compute())
      0.5
    """
    pairs = Pairs("sensitivity_at_specificity", labels, predictions, weight)
    return _at_nearest(pairs, "sensitivity", "specificity", specificity, num_thresholds)


def specificity_at_sensitivity(
    labels: Values,
    predictions: Values,
    sensitivity: float,
    weight: Weight = None,
    *,
    num_thresholds: int = 200,
) -> Tally:
    """Measure the specificity where the sensitivity is nearest to a given one.

    It is ``tf.metrics.specificity_at_sensitivity``. It works like
    `sensitivity_at_specificity`, with the two rates exchanged. Errors are those of
    `auc`.

    Args:
      labels: As for `auc`.
      predictions: As for `auc`.
      sensitivity: From 0 to 1.
      weight: As for `auc`.
      num_thresholds: As for `auc`.
    """
    pairs = Pairs("specificity_at_sensitivity", labels, predictions, weight)
    return _at_nearest(pairs, "specificity", "sensitivity", sensitivity, num_thresholds)


def precision_at_thresholds(
    labels: Values, predictions: Values, thresholds: Any, weight: Weight = None
) -> Tally:
    """Measure the precision at several thresholds.

    It is ``tf.metrics.precision_at_thresholds``.

    The value is ``[n]``, and 0 where no score is above the threshold. Errors are those
    of `auc`. Thresholds that do not ascend are an error, too.

    Args:
      labels: As for `auc`.
      predictions: As for `auc`.
      thresholds: ``[n]`` ascending numbers; a score is positive at those below it.
      weight: As for `auc`.

    Example:
      >>> labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
      >>> precision_at_thresholds(labels, scores, [0.3, 0.5]).compute().tolist()
      [0.6666666..., 1.0]
    """
    pairs = Pairs("precision_at_thresholds", labels, predictions, weight)
    return _curves(pairs, _rising(pairs.name, thresholds), _rates, "precision")


def recall_at_thresholds(
    labels: Values, predictions: Values, thresholds: Any, weight: Weight = None
) -> Tally:
    """Measure the recall at several thresholds.

    It is ``tf.metrics.recall_at_thresholds``.

    The value is 0 if there are no positives. Arguments, result and errors are those of
    `precision_at_thresholds`.
    """
    pairs = Pairs("recall_at_thresholds", labels, predictions, weight)
    return _curves(pairs, _rising(pairs.name, thresholds), _rates, "sensitivity")
