"""How good are scores at every threshold? Histograms, and curves over them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.metrics.rows import (
    check_scores,
    element_weights,
    library_of,
    paired,
    ratio,
    spoiled,
    truths,
)
from towerjax.metrics.state import Additive
from towerjax.types import ArrayLike
from towerjax.types.leaves import widened
from towerjax.types.options import check_choice, check_whole

Curve: TypeAlias = Literal["ROC", "PR"]


class _Outcomes:
    """The weights of the four outcomes at ``n`` thresholds, each ``[n]``."""

    def __init__(self, yes: Any, no: Any) -> None:
        self.library = library_of(yes, no)
        # Between two thresholds, the lower one first: never negative by a rounding.
        self.yes_between, self.no_between = yes[1:-1], no[1:-1]
        # Bucket j has the scores that are above j thresholds: the j lowest.
        above = [x[::-1].cumsum()[::-1] for x in (yes, no)]
        self.true_positives, self.false_positives = (x[1:] for x in above)
        self.all_yes, self.all_no = (x[0] for x in above)

    @property
    def sensitivity(self) -> Any:
        """Of those that are yes, the share above each threshold."""
        return ratio(self.true_positives, self.all_yes)

    @property
    def specificity(self) -> Any:
        """Of those that are no, the share not above each threshold."""
        below = self.all_no - self.false_positives
        return ratio(below, self.all_no)

    @property
    def precision(self) -> Any:
        """Of those above each threshold, the share that is yes."""
        above = self.true_positives + self.false_positives
        return ratio(self.true_positives, above)


class Curves(Additive):
    """Yes and no by how many of the thresholds their scores are above."""

    yes: jax.Array  # [n + 1], the weight of positive labels in each bucket
    no: jax.Array  # [n + 1], of negative ones
    value: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    options: tuple[Any, ...] = dataclasses.field(default=(), metadata={"static": True})

    def compute(self) -> jax.Array:
        """The area, or the rates, that the state was made for."""
        return self.value(_Outcomes(self.yes, self.no), *self.options)


def _rate_at_nearest(found: _Outcomes, name: str, given: str, wanted: float) -> Any:
    """One rate at the threshold at which the other is nearest to a wanted one."""
    distance = abs(getattr(found, given) - wanted)
    nearest = distance.min()
    # Equally near ones differ by a rounding: the best of them, in any precision.
    far = distance > nearest + 1e-6
    return found.library.where(far, 0.0, getattr(found, name)).max() + 0 * nearest


def _area_under_roc(found: _Outcomes) -> Any:
    """Trapezoids between the thresholds' points."""
    heights = found.sensitivity
    widths = ratio(found.no_between, found.all_no)
    return (widths * (heights[:-1] + heights[1:]) / 2).sum()


def _area_under_pr(found: _Outcomes) -> Any:
    """Between two thresholds counts change in proportion, so precision is no line.

    With ``a`` above the higher threshold and ``b`` above the lower one, of which
    ``t_a`` and ``t_b`` are yes, the area between them is the integral of
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
    """``(yes, no)``, ``[n + 1]`` each: weights by how many thresholds are passed."""
    labels, scores = paired(name, labels, predictions)
    elements = element_weights(name, jnp.shape(labels), weight)
    check_scores(name, scores, weight)
    true, right = truths(name, "labels", labels, weight)
    scores = jnp.asarray(scores)
    scores = scores.astype(widened(scores.dtype))
    valid = right & (scores >= 0) & (scores <= 1)
    elements = spoiled(elements, valid).reshape(-1)
    scores, true = scores.reshape(-1), true.reshape(-1)
    edges = jnp.asarray(thresholds, scores.dtype)
    bucket = jnp.searchsorted(edges, scores, side="left")
    none = jnp.zeros(len(thresholds) + 1, elements.dtype)
    # A NaN weight spoils both.
    odd = jnp.isnan(elements)
    yes = none.at[bucket].add(jnp.where(true | odd, elements, 0))
    return yes, none.at[bucket].add(jnp.where(true & ~odd, 0, elements))


def _even_thresholds(name: str, num_thresholds: int) -> np.ndarray:
    """From just below 0 to just above 1: the first lets all pass, the last none."""
    check_whole(f"{name}: num_thresholds", num_thresholds, 2)
    inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
    return np.concatenate([[-1e-7], inner, [1 + 1e-7]])


def auc(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    curve: Curve = "ROC",
    num_thresholds: int = 200,
) -> Curves:
    """The area under the ROC or the precision-recall curve: ``tf.metrics.auc``.

    At ``num_thresholds`` even thresholds from 0 to 1, a score above one (not at it)
    says yes. ROC: trapezoids. PR: between thresholds the counts are interpolated, not
    the precision, which TensorFlow calls ``careful_interpolation``; its default is
    trapezoids, which are too large. More thresholds are nearer to the area of all
    scores: two scores in one bucket count as equal.

    Args:
      labels: ``[b, ...]``: booleans, or numbers 0 and 1.
      predictions: The same shape, scores between 0 and 1. 16 bits are widened.
      weight: Of the leading dims of ``labels``, ``[b]`` or ``[b, 1]`` for one per
        example, >= 0; None counts each once. An element of weight 0 is left out
        whatever it is.
      curve: ``"ROC"`` or ``"PR"``.
      num_thresholds: ``n``, at least 2. A state holds ``2 (n + 1)`` numbers.

    Returns:
      A `Curves` of float32 or wider: exact up to ``2**24`` a batch. The value of one
      class alone is 0.

    Raises:
      ValueError: Shapes differ, a value that is known is out of range, or an option
        is not one that there is. Where a value is not known before tracing, one out
        of range makes the result NaN, unless its weight is 0.

    Example:
      >>> float(auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]).compute())
      0.75

    Source:
      Interpolation: Davis and Goadrich (2006), "The relationship between
      Precision-Recall and ROC curves", https://doi.org/10.1145/1143844.1143874.
    """
    check_choice("auc: curve", curve, get_args(Curve))
    thresholds = _even_thresholds("auc", num_thresholds)
    found = _histograms("auc", labels, predictions, weight, thresholds)
    return Curves(*found, _area_under_roc if curve == "ROC" else _area_under_pr)


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
    """Sensitivity where specificity is nearest to one that is wanted.

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
    """Specificity where sensitivity is nearest to one that is wanted.

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
      thresholds: ``[n]`` numbers, rising; a score above one says yes.
      weight: As for `auc`.

    Returns:
      A `Curves`, whose value is ``[n]``; 0 where none is above.

    Raises:
      ValueError: Thresholds do not rise, or as for `auc`.

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

    0 where none is yes. Arguments, result and errors are those of
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
    edges = np.asarray(thresholds, np.float64)
    rising = edges.ndim == 1 and edges.size and (np.diff(edges) > 0).all()
    if not rising or np.isnan(edges).any():
        raise ValueError(
            f"{name} got thresholds={thresholds!r}; they must be one or more numbers"
            " that rise, such as [0.25, 0.5]."
        )
    return Curves(*_histograms(name, *rows, edges), getattr, (rate,))
