"""How good are predictions of several classes? A mean over the classes."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from towerjax.metrics.rows import (
    check_classes,
    element_weights,
    library_of,
    paired,
    ratio,
    spoiled,
)
from towerjax.metrics.state import Additive
from towerjax.types import ArrayLike
from towerjax.types.options import check_choice

Absent = Literal["left out", "zero"]


class Confusion(Additive):
    """How much weight of each label went to each prediction.

    Attributes:
      matrix: ``[C, C]`` float, labels down and predictions across.
    """

    matrix: jax.Array

    def compute(self) -> jax.Array:
        """The mean of intersection over union; see `mean_iou`."""
        matrix = self.matrix
        library = library_of(matrix)
        both = library.diagonal(matrix)
        either = matrix.sum(axis=0) + matrix.sum(axis=1) - both
        return ratio(ratio(both, either).sum(), (either != 0).sum())


class ClassHits(Additive):
    """Of each class the weight of its examples, and of those that were hit.

    Attributes:
      hits: ``[C]`` float.
      totals: ``[C]`` float.
      absent: What a class without examples is.
    """

    hits: jax.Array
    totals: jax.Array
    absent: Absent = dataclasses.field(metadata={"static": True})

    def compute(self) -> jax.Array:
        """The mean share of hits; see `mean_per_class_accuracy`."""
        shares = ratio(self.hits, self.totals)
        if self.absent == "zero":
            return shares.mean()
        return ratio(shares.sum(), (self.totals != 0).sum())


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
