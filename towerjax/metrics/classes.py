"""Metrics of predicted classes: counts of two classes, and means over several."""

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from towerjax.metrics import rows
from towerjax.metrics.rows import Pairs, Values, Weight, quotient
from towerjax.metrics.weighted import Additive, Weighted, widen
from towerjax.types import Sum
from towerjax.types.options import check_choice, check_whole

AbsentClasses = Literal["left out", "zero"]
Cut: TypeAlias = float | None

# Outcomes are the weights of true and false positives, and of false and true negatives.
# A rate is the share that one of them has in its sum with another.
_RATES = {"precision": (0, 1), "sensitivity": (0, 2), "specificity": (3, 1)}


def share_of(rate: str, outcomes: Any) -> tuple[Any, Any]:
    """The numerator and the denominator of a rate."""
    part, other = (outcomes[i] for i in _RATES[rate])
    return part, part + other


def _outcomes(
    name: str, labels: Any, predictions: Any, weight: Any, threshold: Cut
) -> list[jax.Array]:
    """The outcomes of all elements, ``()`` each."""
    pairs = Pairs(name, labels, predictions, weight)
    yes, said = pairs.as_booleans("labels"), pairs.predictions
    dtype = jnp.result_type(said)
    if jnp.issubdtype(dtype, jnp.floating) != (threshold is not None):
        raise ValueError(
            f"{name} got predictions of dtype {dtype} and threshold={threshold!r}."
            " Scores need a threshold, such as 0.5; booleans, 0 and 1 take none."
        )
    if threshold is None:
        said = pairs.as_booleans("predictions")
    else:
        rows.check_threshold(name, threshold)
        scores = rows.floats_of(said)
        said = scores > jnp.asarray(threshold, scores.dtype)
        pairs.mark(scores == scores)
    outcomes = yes & said, ~yes & said, yes & ~said, ~yes & ~said
    return [rows.weights_where(which, pairs.weights).sum() for which in outcomes]


def true_positives(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Sum:
    """How many positives are predicted positive: ``tf.metrics.true_positives``.

    Args:
      labels: ``[b, ...]``: booleans, or numbers 0 and 1.
      predictions: The same shape: booleans, integers 0 and 1, or scores where there
        is a threshold.
      weight: As for `mean`. An element of weight 0 is left out whatever its value.
      threshold: A score above it is positive; one equal to it is not.

    Returns:
      A ``Sum``, float32 or wider: exact up to ``2**24`` a batch.

    Raises:
      ValueError: Shapes differ, a value is neither 0 nor 1, scores come without a
        threshold, or a weight is negative. Where such a value is not known before
        tracing, the metric is NaN.

    Example:
      >>> scores = [1.0, 0.75, 0.5, 0.25]
      >>> float(true_positives([1, 0, 1, 1], scores, threshold=0.4).compute())
      2.0
    """
    return Sum(_outcomes("true_positives", labels, predictions, weight, threshold)[0])


def false_positives(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Sum:
    """How many negatives are predicted positive: ``tf.metrics.false_positives``.

    Arguments, result and errors are those of `true_positives`.
    """
    return Sum(_outcomes("false_positives", labels, predictions, weight, threshold)[1])


def false_negatives(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Sum:
    """How many positives are predicted negative: ``tf.metrics.false_negatives``.

    Arguments, result and errors are those of `true_positives`.
    """
    return Sum(_outcomes("false_negatives", labels, predictions, weight, threshold)[2])


def true_negatives(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Sum:
    """How many negatives are predicted negative: ``tf.metrics.true_negatives``.

    Arguments, result and errors are those of `true_positives`.
    """
    return Sum(_outcomes("true_negatives", labels, predictions, weight, threshold)[3])


def precision(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Weighted:
    """The share of predicted positives that are positive: ``tf.metrics.precision``.

    A ``Weighted``: 0 where none is predicted so. Arguments and errors are those of
    `true_positives`.
    """
    outcomes = _outcomes("precision", labels, predictions, weight, threshold)
    return Weighted(*share_of("precision", outcomes))


def recall(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Weighted:
    """The share of positives that are predicted positive: ``tf.metrics.recall``.

    A ``Weighted``: 0 where none is positive. Arguments and errors are those of
    `true_positives`.
    """
    outcomes = _outcomes("recall", labels, predictions, weight, threshold)
    return Weighted(*share_of("sensitivity", outcomes))


def _mean_over_classes(part: Any, whole: Any) -> Any:
    """The mean of ``part / whole`` over the classes whose whole is not 0."""
    shares = quotient(part, whole)
    return quotient(shares.sum(), (whole != 0).sum(dtype=shares.dtype))


class Confusion(Additive):
    """A confusion matrix, in weights."""

    matrix: jax.Array  # [C, C], of [label, prediction]

    def compute(self) -> jax.Array:
        """The mean over classes of intersection over union; see `mean_iou`."""
        both = rows.library_of(self.matrix).diagonal(self.matrix)
        either = self.matrix.sum(axis=0) + self.matrix.sum(axis=1) - both
        return _mean_over_classes(both, either)


class ClassHits(Additive):
    """For each class, the weight of its examples and of those predicted right."""

    hits: jax.Array  # [C]
    totals: jax.Array  # [C]
    absent: AbsentClasses = dataclasses.field(metadata={"static": True})

    def compute(self) -> jax.Array:
        """The mean accuracy over classes; see `mean_per_class_accuracy`."""
        if self.absent == "zero":
            return quotient(self.hits, self.totals).mean()
        return _mean_over_classes(self.hits, self.totals)


def _ids_and_weights(pairs: Pairs, num_classes: int) -> tuple[jax.Array, ...]:
    """Labels, predictions and weights, flat; NaN if one that counts is no class."""
    check_whole(f"{pairs.name}: num_classes", num_classes)
    ids = []
    remedy = f"num_classes={num_classes} has ids 0 to {num_classes - 1}."
    for what, x in pairs.ids():
        x = widen(x)  # compared before the cast, in which 64 bits would wrap round
        valid = (x >= 0) & (x < num_classes)
        pairs.require(what, x, valid, remedy)
        ids.append(jnp.where(valid, x, 0).astype(jnp.int32).reshape(-1))
    return *ids, pairs.weights.reshape(-1)


def mean_iou(
    labels: Values, predictions: Values, num_classes: int, weight: Weight = None
) -> Confusion:
    """Intersection over union, averaged over classes: ``tf.metrics.mean_iou``.

    For each class: the weight of elements with this label and this prediction, over
    the weight of those with either. Classes that are neither a label nor a prediction
    do not count.

    Args:
      labels: ``[b, ...]`` class ids from 0 to ``num_classes - 1``.
      predictions: The same shape.
      num_classes: ``C``.
      weight: As for `mean`.

    Returns:
      A `Confusion`, float32 or wider: exact up to ``2**24`` a batch.

    Raises:
      ValueError: Shapes differ, ids are no integers or out of range, or a weight is
        negative. Where ids are not known before tracing, one out of range makes the
        value NaN, unless its weight is 0.

    Example:
      >>> float(mean_iou([0, 0, 1, 1], [0, 1, 1, 1], num_classes=3).compute())
      0.5833333...
    """
    pairs = Pairs("mean_iou", labels, predictions, weight)
    labels, predictions, weights = _ids_and_weights(pairs, num_classes)
    matrix = jnp.zeros((num_classes, num_classes), weights.dtype)
    return Confusion(matrix.at[labels, predictions].add(weights))


def mean_per_class_accuracy(
    labels: Values,
    predictions: Values,
    num_classes: int,
    weight: Weight = None,
    *,
    absent: AbsentClasses = "left out",
) -> ClassHits:
    """Accuracy of each class, averaged over those that occur as labels.

    ``tf.metrics.mean_per_class_accuracy`` counts a class without examples as 0, as
    ``absent="zero"`` does. By default it does not count, as in `mean_iou`, whose errors
    this function has, and that of another word.

    Args:
      labels: As for `mean_iou`.
      predictions: As for `mean_iou`.
      num_classes: ``C``.
      weight: As for `mean_iou`.
      absent: A class without examples in the merged state is ``"left out"`` of the
        mean, or counts as ``"zero"``.

    Example:
      >>> float(mean_per_class_accuracy([0, 0, 1, 1], [0, 1, 1, 1], 3).compute())
      0.75
    """
    check_choice("absent", absent, get_args(AbsentClasses))
    pairs = Pairs("mean_per_class_accuracy", labels, predictions, weight)
    labels, predictions, weights = _ids_and_weights(pairs, num_classes)
    none = jnp.zeros(num_classes, weights.dtype)
    hits = rows.weights_where(labels == predictions, weights)
    return ClassHits(none.at[labels].add(hits), none.at[labels].add(weights), absent)
