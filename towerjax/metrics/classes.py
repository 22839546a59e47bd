"""Metrics of predicted classes: counts of two classes, and means over several."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from towerjax.metrics.rows import (
    as_booleans,
    as_positives,
    check_classes,
    check_pair,
    element_weights,
    library_of,
    mark_invalid,
    ratio,
)
from towerjax.metrics.state import Additive, widen
from towerjax.metrics.weighted import Weighted
from towerjax.types import ArrayLike, Sum
from towerjax.types.options import check_choice

AbsentClasses = Literal["left out", "zero"]


def _outcomes(
    name: str,
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None,
    threshold: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which elements are positive, which are predicted so, and their weights."""
    labels, predictions = check_pair(name, labels, predictions)
    elements = element_weights(name, jnp.shape(labels), weight)
    true, has_label = as_booleans(name, "labels", labels, weight)
    guess, has_guess = as_positives(name, predictions, weight, threshold)
    return true, guess, mark_invalid(elements, has_label & has_guess)


def _weights_where(weight: jax.Array, which: jax.Array) -> jax.Array:
    """The weights of the elements in ``which``, 0 elsewhere; NaN stays everywhere."""
    return jnp.where(which | jnp.isnan(weight), weight, 0)


def _count(found: tuple[jax.Array, ...], *, is_true: bool, is_guess: bool) -> Sum:
    true, guess, weight = found
    return Sum(_weights_where(weight, (true == is_true) & (guess == is_guess)).sum())


def _share(which: jax.Array, among: jax.Array, weight: jax.Array) -> Weighted:
    weight = _weights_where(weight, among)
    return Weighted(_weights_where(weight, which).sum(), weight.sum())


def true_positives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many positives are predicted positive: ``tf.metrics.true_positives``.

    Args:
      labels: ``[b, ...]``: booleans, or numbers 0 and 1.
      predictions: The same shape: booleans, integers 0 and 1, or scores where there
        is a threshold.
      weight: Of the leading dims of ``labels``, ``[b]`` or ``[b, 1]`` for one per
        example, >= 0; None counts each once. An element of weight 0 is left out
        whatever its value.
      threshold: A score above it is positive; one equal to it is not.

    Returns:
      A ``Sum``, float32 or wider: exact up to ``2**24`` a batch.

    Raises:
      ValueError: Shapes differ, a value is neither 0 nor 1, scores come without a
        threshold, or a weight is negative. Where such a value is not known before
        tracing, the metric is NaN.

    Example:
      >>> float(true_positives([1, 0, 1, 1], [1, 1, 0, 1]).compute())
      2.0
    """
    found = _outcomes("true_positives", labels, predictions, weight, threshold)
    return _count(found, is_true=True, is_guess=True)


def true_negatives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many negatives are predicted negative: ``tf.metrics.true_negatives``.

    Arguments, result and errors are those of `true_positives`.

    Example:
      >>> float(true_negatives([1, 0, 0, 1], [1, 1, 0, 1]).compute())
      1.0
    """
    found = _outcomes("true_negatives", labels, predictions, weight, threshold)
    return _count(found, is_true=False, is_guess=False)


def false_positives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many negatives are predicted positive: ``tf.metrics.false_positives``.

    Arguments, result and errors are those of `true_positives`.

    Example:
      >>> scores = [1.0, 0.75, 0.5, 0.25]
      >>> float(false_positives([1, 0, 0, 1], scores, threshold=0.5).compute())
      1.0
    """
    found = _outcomes("false_positives", labels, predictions, weight, threshold)
    return _count(found, is_true=False, is_guess=True)


def false_negatives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many positives are predicted negative: ``tf.metrics.false_negatives``.

    Arguments, result and errors are those of `true_positives`.

    Example:
      >>> float(false_negatives([1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 2, 1]).compute())
      2.0
    """
    found = _outcomes("false_negatives", labels, predictions, weight, threshold)
    return _count(found, is_true=True, is_guess=False)


def precision(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Weighted:
    """The share of predicted positives that are positive: ``tf.metrics.precision``.

    A ``Weighted``: 0 where none is predicted so. Arguments and errors are those of
    `true_positives`.

    Example:
      >>> float(precision([1, 0, 1, 1], [1, 1, 0, 0]).compute())
      0.5
    """
    true, guess, weight = _outcomes("precision", labels, predictions, weight, threshold)
    return _share(true, guess, weight)


def recall(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Weighted:
    """The share of positives that are predicted positive: ``tf.metrics.recall``.

    A ``Weighted``: 0 where none is positive. Arguments and errors are those of
    `true_positives`.

    Example:
      >>> float(recall([1, 1, 1, 1], [0, 0, 1, 0]).compute())
      0.25
    """
    true, guess, weight = _outcomes("recall", labels, predictions, weight, threshold)
    return _share(guess, true, weight)


class Confusion(Additive):
    """A confusion matrix, in weights."""

    matrix: jax.Array  # [C, C], of [label, prediction]

    def compute(self) -> jax.Array:
        """The mean over classes of intersection over union; see `mean_iou`."""
        matrix = self.matrix
        library = library_of(matrix)
        both = library.diagonal(matrix)
        either = matrix.sum(axis=0) + matrix.sum(axis=1) - both
        return ratio(ratio(both, either).sum(), (either != 0).sum(dtype=both.dtype))


class ClassHits(Additive):
    """For each class, the weight of its examples and of those predicted right."""

    hits: jax.Array  # [C]
    totals: jax.Array  # [C]
    absent: AbsentClasses = dataclasses.field(metadata={"static": True})

    def compute(self) -> jax.Array:
        """The mean accuracy over classes; see `mean_per_class_accuracy`."""
        shares = ratio(self.hits, self.totals)
        if self.absent == "zero":
            return shares.mean()
        return ratio(shares.sum(), (self.totals != 0).sum(dtype=shares.dtype))


def _ids_and_weights(
    name: str,
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weight: ArrayLike | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Labels, predictions and weights, flat; the weight of an unknown class is NaN."""
    labels, predictions = check_pair(name, labels, predictions)
    elements = element_weights(name, jnp.shape(labels), weight)
    check_classes(name, "labels", labels, weight, num_classes)
    check_classes(name, "predictions", predictions, weight, num_classes)
    ids = []
    for x in map(widen, (labels, predictions)):
        # Compared before the cast, in which an id of 64 bits would wrap round.
        valid = jnp.asarray((x >= 0) & (x < num_classes))
        elements = mark_invalid(elements, valid)
        ids.append(jnp.where(valid, x, 0).astype(jnp.int32).reshape(-1))
    return *ids, elements.reshape(-1)


def mean_iou(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weight: ArrayLike | None = None,
) -> Confusion:
    """Intersection over union, averaged over classes: ``tf.metrics.mean_iou``.

    For each class: the weight of elements with this label and this prediction, over
    the weight of those with either. Classes that are neither a label nor a prediction
    do not count.

    Args:
      labels: ``[b, ...]`` class ids from 0 to ``num_classes - 1``.
      predictions: The same shape.
      num_classes: ``C``.
      weight: Of the leading dims of ``labels``, ``[b]`` or ``[b, 1]`` for one per
        example, >= 0; None counts each once.

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
    labels, predictions, weight = _ids_and_weights(
        "mean_iou", labels, predictions, num_classes, weight
    )
    matrix = jnp.zeros((num_classes, num_classes), weight.dtype)
    return Confusion(matrix.at[labels, predictions].add(weight))


def mean_per_class_accuracy(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weight: ArrayLike | None = None,
    *,
    absent: AbsentClasses = "left out",
) -> ClassHits:
    """Accuracy of each class, averaged over those that occur as labels.

    ``tf.metrics.mean_per_class_accuracy`` counts a class without examples as 0, as
    ``absent="zero"`` does. By default it does not count, as in `mean_iou`.

    Args:
      labels: As for `mean_iou`.
      predictions: As for `mean_iou`.
      num_classes: ``C``.
      weight: As for `mean_iou`.
      absent: A class without examples in the merged state is ``"left out"`` of the
        mean, or counts as ``"zero"``.

    Returns:
      A `ClassHits`.

    Raises:
      ValueError: As for `mean_iou`, or ``absent`` is another word.

    Example:
      >>> float(mean_per_class_accuracy([0, 0, 1, 1], [0, 1, 1, 1], 3).compute())
      0.75
    """
    check_choice("absent", absent, get_args(AbsentClasses))
    labels, predictions, weight = _ids_and_weights(
        "mean_per_class_accuracy", labels, predictions, num_classes, weight
    )
    none = jnp.zeros(num_classes, weight.dtype)
    # A NaN weight makes the totals NaN, also where the prediction is wrong.
    hits = jnp.where(labels == predictions, weight, 0)
    return ClassHits(none.at[labels].add(hits), none.at[labels].add(weight), absent)
