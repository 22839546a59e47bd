"""How good are predicted classes? Yes and no counted, or a mean over several."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from towerjax.metrics.rows import (
    check_classes,
    element_weights,
    library_of,
    paired,
    positives,
    ratio,
    spoiled,
    truths,
)
from towerjax.metrics.state import Additive
from towerjax.metrics.weighted import Weighted
from towerjax.types import ArrayLike, Sum
from towerjax.types.options import check_choice

Absent = Literal["left out", "zero"]


def _outcomes(
    name: str,
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None,
    threshold: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which elements are yes, which are predicted so, and what each counts."""
    labels, predictions = paired(name, labels, predictions)
    elements = element_weights(name, jnp.shape(labels), weight)
    true, right = truths(name, "labels", labels, weight)
    said, told = positives(name, predictions, weight, threshold)
    return true, said, spoiled(elements, right & told)


def _chosen(weight: jax.Array, which: jax.Array) -> jax.Array:
    """The weights of some elements; one that is NaN spoils whatever is asked."""
    return jnp.where(which | jnp.isnan(weight), weight, 0)


def _count(
    true: jax.Array, said: jax.Array, weight: jax.Array, *, is_true: bool, is_said: bool
) -> Sum:
    return Sum(_chosen(weight, (true == is_true) & (said == is_said)).sum())


def _share(which: jax.Array, among: jax.Array, weight: jax.Array) -> Weighted:
    weight = _chosen(weight, among)
    return Weighted(_chosen(weight, which).sum(), weight.sum())


def true_positives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many are yes and predicted so: ``tf.metrics.true_positives``.

    Args:
      labels: ``[b, ...]``: booleans, or numbers 0 and 1.
      predictions: The same shape: booleans, integers 0 and 1, or with a threshold
        scores.
      weight: Of the leading dims of ``labels``, ``[b]`` or ``[b, 1]`` for one per
        example, >= 0; None counts each once. An element of weight 0 is left out
        whatever it is.
      threshold: A score above it (not at it) says yes.

    Returns:
      A ``Sum``, float32 or wider: exact up to ``2**24`` a batch.

    Raises:
      ValueError: Shapes differ, values that are known are neither 0 nor 1, scores
        come without a threshold, or a known weight is negative. Where such labels
        are not known before tracing, the value is NaN.

    Example:
      >>> float(true_positives([1, 0, 1, 1], [1, 1, 0, 1]).compute())
      2.0
    """
    found = _outcomes("true_positives", labels, predictions, weight, threshold)
    return _count(*found, is_true=True, is_said=True)


def true_negatives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many are no and predicted so: ``tf.metrics.true_negatives``.

    Arguments, result and errors are those of `true_positives`.

    Example:
      >>> float(true_negatives([1, 0, 0, 1], [1, 1, 0, 1]).compute())
      1.0
    """
    found = _outcomes("true_negatives", labels, predictions, weight, threshold)
    return _count(*found, is_true=False, is_said=False)


def false_positives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many are no and predicted yes: ``tf.metrics.false_positives``.

    Arguments, result and errors are those of `true_positives`.

    Example:
      >>> scores = [1.0, 0.75, 0.5, 0.25]
      >>> float(false_positives([1, 0, 0, 1], scores, threshold=0.5).compute())
      1.0
    """
    found = _outcomes("false_positives", labels, predictions, weight, threshold)
    return _count(*found, is_true=False, is_said=True)


def false_negatives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Sum:
    """How many are yes and predicted no: ``tf.metrics.false_negatives``.

    Arguments, result and errors are those of `true_positives`.

    Example:
      >>> float(false_negatives([1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 2, 1]).compute())
      2.0
    """
    found = _outcomes("false_negatives", labels, predictions, weight, threshold)
    return _count(*found, is_true=True, is_said=False)


def precision(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Weighted:
    """Of those predicted yes, the share that is: ``tf.metrics.precision``.

    A ``Weighted``: 0 where none is predicted yes. Arguments and errors are those of
    `true_positives`.

    Example:
      >>> float(precision([1, 0, 1, 1], [1, 1, 0, 0]).compute())
      0.5
    """
    true, said, weight = _outcomes("precision", labels, predictions, weight, threshold)
    return _share(true, said, weight)


def recall(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Weighted:
    """Of those that are yes, the share predicted so: ``tf.metrics.recall``.

    A ``Weighted``: 0 where none is yes. Arguments and errors are those of
    `true_positives`.

    Example:
      >>> float(recall([1, 1, 1, 1], [0, 0, 1, 0]).compute())
      0.25
    """
    true, said, weight = _outcomes("recall", labels, predictions, weight, threshold)
    return _share(said, true, weight)


class Confusion(Additive):
    """How much weight of each label went to each prediction."""

    matrix: jax.Array  # [C, C], labels down and predictions across

    def compute(self) -> jax.Array:
        """The mean of intersection over union; see `mean_iou`."""
        matrix = self.matrix
        library = library_of(matrix)
        both = library.diagonal(matrix)
        either = matrix.sum(axis=0) + matrix.sum(axis=1) - both
        return ratio(ratio(both, either).sum(), (either != 0).sum(dtype=both.dtype))


class ClassHits(Additive):
    """Of each class the weight of its examples, and of those that were hit."""

    hits: jax.Array  # [C]
    totals: jax.Array  # [C]
    absent: Absent = dataclasses.field(metadata={"static": True})

    def compute(self) -> jax.Array:
        """The mean share of hits; see `mean_per_class_accuracy`."""
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
    """Labels, predictions and weights, flat; NaN weight for an id of no class."""
    labels, predictions = paired(name, labels, predictions)
    elements = element_weights(name, jnp.shape(labels), weight)
    check_classes(name, "labels", labels, weight, num_classes)
    check_classes(name, "predictions", predictions, weight, num_classes)
    ids = [jnp.asarray(x).astype(jnp.int32) for x in (labels, predictions)]
    for x in ids:
        elements = spoiled(elements, (x >= 0) & (x < num_classes))
    labels, predictions = (x.clip(0, num_classes - 1).reshape(-1) for x in ids)
    return labels, predictions, elements.reshape(-1)


def mean_iou(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    weight: ArrayLike | None = None,
) -> Confusion:
    """Intersection over union, averaged over classes: ``tf.metrics.mean_iou``.

    Of a class: the weight of elements with this label and this prediction, over the
    weight of those with either. Classes that are neither a label nor a prediction
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
      ValueError: Shapes differ, ids are no integers or of no class, or a known
        weight is negative. Where an id is not known before tracing, one of no class
        makes the value NaN, unless its weight is 0.

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
    absent: Absent = "left out",
) -> ClassHits:
    """Accuracy of each class, averaged over those that occur as labels.

    ``tf.metrics.mean_per_class_accuracy`` counts a class without examples as 0:
    write ``absent="zero"`` for its number. Else it does not count, as in `mean_iou`.

    Args:
      labels: As for `mean_iou`.
      predictions: As for `mean_iou`.
      num_classes: ``C``.
      weight: As for `mean_iou`.
      absent: A class without examples, of all that is merged, is ``"left out"`` of
        the mean, or ``"zero"``.

    Returns:
      A `ClassHits`.

    Raises:
      ValueError: As for `mean_iou`, or ``absent`` is another word.

    Example:
      >>> float(mean_per_class_accuracy([0, 0, 1, 1], [0, 1, 1, 1], 3).compute())
      0.75
    """
    check_choice("absent", absent, get_args(Absent))
    labels, predictions, weight = _ids_and_weights(
        "mean_per_class_accuracy", labels, predictions, num_classes, weight
    )
    none = jnp.zeros(num_classes, weight.dtype)
    # A NaN weight spoils the totals even where the prediction is wrong.
    hits = jnp.where(labels == predictions, weight, 0)
    return ClassHits(none.at[labels].add(hits), none.at[labels].add(weight), absent)
