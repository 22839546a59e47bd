"""Metrics of scores over many thresholds: histograms, and curves over them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.metrics.rows import (
    as_booleans,
    check_pair,
    check_scores,
    element_weights,
    library_of,
    mark_invalid,
    ratio,
)
from towerjax.metrics.state import Additive
from towerjax.types import ArrayLike
from towerjax.types.leaves import widen_dtype
from towerjax.types.options import check_choice, check_whole

Curve: TypeAlias = Literal["ROC", "PR"]


class _Outcomes:
    """The weights of the four outcomes at ``n`` thresholds, each ``[n]``."""

    def __init__(self, yes: Any, no: Any) -> None:
        self.library = library_of(yes, no)
        # Not as differences of the sums below, which rounding could make negative.
        self.yes_between, self.no_between = yes[1:-1], no[1:-1]
        # Bucket j holds the scores that are above exactly the j lowest thresholds.
        above = [x[::-1].cumsum()[::-1] for x in (yes, no)]
        self.true_positives, self.false_positives = (x[1:] for x in above)
        self.all_yes, self.all_no = (x[0] for x in above)

    @property
    def sensitivity(self) -> Any:
        """The share of positives that are above each threshold."""
        return ratio(self.true_positives, self.all_yes)

    @property
    def specificity(self) -> Any:
        """The share of negatives that are not above each threshold."""
        below = self.all_no - self.false_positives
        return ratio(below, self.all_no)

    @property
    def precision(self) -> Any:
        """The share of scores above each threshold that are positives'."""
        above = self.true_positives + self.false_positives
        return ratio(self.true_positives, above)


class Curves(Additive):
    """Histograms of positives' and negatives' scores over ``n`` thresholds."""

    yes: jax.Array  # [n + 1], the weight of the positives in each bucket
    no: jax.Array  # [n + 1], the weight of the negatives
    value: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    options: tuple[Any, ...] = dataclasses.field(default=(), metadata={"static": True})
    # Those that were given; of even ones the number is the histograms' size.
    given: tuple[float, ...] = dataclasses.field(default=(), metadata={"static": True})

    def compute(self) -> jax.Array:
        """The area, or the rates, that the state was made for."""
        return self.value(_Outcomes(self.yes, self.no), *self.options)


def _rate_at_nearest(found: _Outcomes, name: str, given: str, wanted: float) -> Any:
    """The rate ``name`` where the rate ``given`` is nearest to ``wanted``."""
    distance = abs(getattr(found, given) - wanted)
    nearest = distance.min()
    # Of thresholds equally near, up to rounding, the best rate; NaN if one is NaN.
    far = distance > nearest + 1e-6
    return found.library.where(far, 0.0, getattr(found, name)).max() + 0 * nearest


def _area_under_roc(found: _Outcomes) -> Any:
    """The sum of the trapezoids between the thresholds' points."""
    heights = found.sensitivity
    widths = ratio(found.no_between, found.all_no)
    return (widths * (heights[:-1] + heights[1:]) / 2).sum()


def _area_under_pr(found: _Outcomes) -> Any:
    """The area, where counts, not precision, are linear between two thresholds.

    With ``a`` scores above the higher threshold and ``b`` above the lower one, of which
    ``t_a`` and ``t_b`` are positives', the area between them is the integral of
    ``t / above`` over ``t``, along the line from ``(a, t_a)`` to ``(b, t_b)``.
    """
    true = found.true_positives[1:]
    above = true + found.false_positives[1:]
    gained, more = found.yes_between, found.yes_between + found.no_between
    slope = ratio(gained, more)
    offset = true - slope * above
    stretch = found.library.log1p(ratio(more, above))
    return ratio((slope * (gained + offset * stretch)).sum(), found.all_yes)


def _histograms(
    name: str,
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None,
    thresholds: np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """``(yes, no)``, ``[n + 1]`` each: weights by the thresholds that are passed."""
    labels, scores = check_pair(name, labels, predictions)
    elements = element_weights(name, jnp.shape(labels), weight)
    check_scores(name, scores, weight)
    true, has_label = as_booleans(name, "labels", labels, weight)
    scores = jnp.asarray(scores)
    scores = scores.astype(widen_dtype(scores.dtype))
    valid = has_label & (scores >= 0) & (scores <= 1)
    elements = mark_invalid(elements, valid).reshape(-1)
    scores, true = scores.reshape(-1), true.reshape(-1)
    edges = jnp.asarray(thresholds, scores.dtype)
    bucket = jnp.searchsorted(edges, scores, side="left")
    none = jnp.zeros(len(thresholds) + 1, elements.dtype)
    # A NaN weight makes both histograms NaN.
    is_nan = jnp.isnan(elements)
    yes = none.at[bucket].add(jnp.where(true | is_nan, elements, 0))
    return yes, none.at[bucket].add(jnp.where(true & ~is_nan, 0, elements))


def _even_thresholds(name: str, num_thresholds: int) -> np.ndarray:
    """Thresholds from just below 0, which all scores pass, to just above 1."""
    check_whole(f"{name}: num_thresholds", num_thresholds, 2)
    return _with_ends(np.arange(1, num_thresholds - 1) / (num_thresholds - 1))


def _with_ends(inner: np.ndarray) -> np.ndarray:
    return np.concatenate([[-1e-7], inner, [1 + 1e-7]])


def _check_rising(name: str, thresholds: Any) -> np.ndarray:
    edges = np.asarray(thresholds, np.float64)
    rising = edges.ndim == 1 and edges.size and (np.diff(edges) > 0).all()
    if not rising or np.isnan(edges).any():
        raise ValueError(
            f"{name} got thresholds={thresholds!r}; they must be one or more numbers"
            " that rise, such as [0.25, 0.5]."
        )
    return edges


def auc(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    curve: Curve = "ROC",
    num_thresholds: int = 200,
    thresholds: Any = None,
) -> Curves:
    """The area under the ROC or the precision-recall curve: ``tf.metrics.auc``.

    There are ``num_thresholds`` even thresholds from 0 to 1; a score is positive at
    those below it. ROC: trapezoids. PR: between thresholds counts are interpolated, not
    the precision, which TensorFlow calls ``careful_interpolation``; its default is
    trapezoids, which are too large. Two scores between the same thresholds count as
    equal, so more thresholds give a more exact area.

    Args:
      labels: ``[b, ...]``: booleans, or numbers 0 and 1.
      predictions: The same shape, scores between 0 and 1. 16 bits are widened.
      weight: Of the leading dims of ``labels``, ``[b]`` or ``[b, 1]`` for one per
        example, >= 0; None counts each once. An element of weight 0 is left out
        whatever its value.
      curve: ``"ROC"`` or ``"PR"``.
      num_thresholds: ``n``, at least 2. A state holds ``2 (n + 1)`` numbers.
      thresholds: Ascending numbers from 0 to 1 in place of even ones; one below all
        scores and one above all are added. ``num_thresholds`` is not used then.

    Returns:
      A `Curves` of float32 or wider: exact up to ``2**24`` a batch. Without
      positives the value is 0; without negatives 0 for ROC and 1 for PR.

    Raises:
      ValueError: Shapes differ, a value is out of range, or an option is unknown.
        Where values are not known before tracing, one out of range makes the result
        NaN, unless its weight is 0.

    Example:
      >>> float(auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]).compute())
      0.75

    Source:
      Interpolation: Davis and Goadrich (2006), "The relationship between
      Precision-Recall and ROC curves", https://doi.org/10.1145/1143844.1143874.
    """
    check_choice("auc: curve", curve, get_args(Curve))
    if thresholds is None:
        edges, given = _even_thresholds("auc", num_thresholds), ()
    else:
        edges = _with_ends(_check_rising("auc", thresholds))
        given = tuple(edges[1:-1].tolist())
        if given[0] < 0 or given[-1] > 1:
            raise ValueError(f"auc got thresholds={thresholds!r}; give 0 to 1.")
    found = _histograms("auc", labels, predictions, weight, edges)
    area = _area_under_roc if curve == "ROC" else _area_under_pr
    return Curves(*found, area, given=given)


def _at_nearest(
    name: str, rows: tuple[Any, Any, Any], wanted: float, num_thresholds: int
) -> Curves:
    rate, _, given = name.split("_")
    if not 0 <= wanted <= 1:
        raise ValueError(f"{name} got {given}={wanted!r}; it lies between 0 and 1.")
    thresholds = _even_thresholds(name, num_thresholds)
    options = rate, given, float(wanted)
    return Curves(*_histograms(name, *rows, thresholds), _rate_at_nearest, options)


def sensitivity_at_specificity(
    labels: ArrayLike,
    predictions: ArrayLike,
    specificity: float,
    weight: ArrayLike | None = None,
    *,
    num_thresholds: int = 200,
) -> Curves:
    """The sensitivity at the threshold whose specificity is nearest to a given one.

    ``tf.metrics.sensitivity_at_specificity``: of the thresholds whose specificity
    (share of the negatives not above) is nearest, within 1e-6, the greatest
    sensitivity (share of the positives above).

    Args:
      labels: As for `auc`.
      predictions: As for `auc`.
      specificity: From 0 to 1.
      weight: As for `auc`.
      num_thresholds: As for `auc`.

    Returns:
      A `Curves`.

    Raises:
      ValueError: ``specificity`` is out of range, or as for `auc`.

    Example:
      >>> labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
      >>> float(sensitivity_at_specificity(labels, scores, 0.9).compute())
      0.5
    """
    name = "sensitivity_at_specificity"
    return _at_nearest(name, (labels, predictions, weight), specificity, num_thresholds)


def specificity_at_sensitivity(
    labels: ArrayLike,
    predictions: ArrayLike,
    sensitivity: float,
    weight: ArrayLike | None = None,
    *,
    num_thresholds: int = 200,
) -> Curves:
    """The specificity at the threshold whose sensitivity is nearest to a given one.

    ``tf.metrics.specificity_at_sensitivity``; as `sensitivity_at_specificity`, with
    the rates exchanged.

    Args:
      labels: As for `auc`.
      predictions: As for `auc`.
      sensitivity: From 0 to 1.
      weight: As for `auc`.
      num_thresholds: As for `auc`.

    Returns:
      A `Curves`.

    Raises:
      ValueError: ``sensitivity`` is out of range, or as for `auc`.

    Example:
      >>> labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
      >>> float(specificity_at_sensitivity(labels, scores, 0.9).compute())
      0.5
    """
    name = "specificity_at_sensitivity"
    return _at_nearest(name, (labels, predictions, weight), sensitivity, num_thresholds)


def precision_at_thresholds(
    labels: ArrayLike,
    predictions: ArrayLike,
    thresholds: Any,
    weight: ArrayLike | None = None,
) -> Curves:
    """Precision at several thresholds: ``tf.metrics.precision_at_thresholds``.

    Args:
      labels: As for `auc`.
      predictions: As for `auc`.
      thresholds: ``[n]`` ascending numbers; a score is positive at those below it.
      weight: As for `auc`.

    Returns:
      A `Curves`, whose value is ``[n]``; 0 where no score is above.

    Raises:
      ValueError: Thresholds do not ascend, or as for `auc`.

    Example:
      >>> labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
      >>> precision_at_thresholds(labels, scores, [0.3, 0.5]).compute().tolist()
      [0.6666666..., 1.0]
    """
    rows = labels, predictions, weight
    return _at_thresholds("precision_at_thresholds", rows, thresholds, "precision")


def recall_at_thresholds(
    labels: ArrayLike,
    predictions: ArrayLike,
    thresholds: Any,
    weight: ArrayLike | None = None,
) -> Curves:
    """Recall at several thresholds: ``tf.metrics.recall_at_thresholds``.

    0 where there are no positives. Arguments, result and errors are those of
    `precision_at_thresholds`.

    Example:
      >>> labels, scores = [0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]
      >>> recall_at_thresholds(labels, scores, [0.3, 0.5]).compute().tolist()
      [1.0, 0.5]
    """
    rows = labels, predictions, weight
    return _at_thresholds("recall_at_thresholds", rows, thresholds, "sensitivity")


def _at_thresholds(
    name: str, rows: tuple[Any, Any, Any], thresholds: Any, rate: str
) -> Curves:
    edges = _check_rising(name, thresholds)
    found = _histograms(name, *rows, edges)
    return Curves(*found, getattr, (rate,), tuple(edges.tolist()))
