"""How good are yes and no? Counts of right and wrong ones, precision and recall."""

import jax
import jax.numpy as jnp

from towerjax.metrics.rows import (
    element_weights,
    paired,
    positives,
    ratio,
    spoiled,
    truths,
)
from towerjax.metrics.state import Additive
from towerjax.types import ArrayLike


class Count(Additive):
    """The weight of the elements that were counted.

    Attributes:
      total: ``()`` float.
    """

    total: jax.Array

    def compute(self) -> jax.Array:
        """``total``."""
        return self.total


class Share(Additive):
    """The weight of the elements that were counted, as a share of two kinds.

    Attributes:
      counted: ``()`` float.
      others: ``()`` float, the weight of the second kind.
    """

    counted: jax.Array
    others: jax.Array

    def compute(self) -> jax.Array:
        """``counted / (counted + others)``; 0 where both are 0."""
        return ratio(self.counted, self.counted + self.others)


class _Outcomes:
    """The weights of the four outcomes, each ``()``."""

    def __init__(
        self,
        name: str,
        labels: ArrayLike,
        predictions: ArrayLike,
        weight: ArrayLike | None,
        threshold: float | None,
    ) -> None:
        labels, predictions = paired(name, labels, predictions)
        elements = element_weights(name, jnp.shape(labels), weight)
        self.true, right = truths(name, "labels", labels, weight)
        self.said, told = positives(name, predictions, weight, threshold)
        self.weight = spoiled(elements, right & told)

    def total(self, *, true: bool, said: bool) -> jax.Array:
        chosen = (self.true == true) & (self.said == said)
        # A weight that is NaN spoils all four.
        counts = jnp.isnan(self.weight) | (chosen & (self.weight != 0))
        return jnp.where(counts, self.weight, 0).sum()


def true_positives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Count:
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
      A `Count`, float32 or wider: exact up to ``2**24`` a batch.

    Raises:
      ValueError: Shapes differ, values that are known are neither 0 nor 1, scores
        come without a threshold, or a known weight is negative. Where such labels
        are not known before tracing, the value is NaN.

    Example:
      >>> float(true_positives([1, 0, 1, 1], [1, 1, 0, 1]).compute())
      2.0
    """
    found = _Outcomes("true_positives", labels, predictions, weight, threshold)
    return Count(found.total(true=True, said=True))


def true_negatives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Count:
    """How many are no and predicted so: ``tf.metrics.true_negatives``.

    Args:
      labels: As for `true_positives`.
      predictions: As for `true_positives`.
      weight: As for `true_positives`.
      threshold: As for `true_positives`.

    Returns:
      A `Count`.

    Raises:
      ValueError: As for `true_positives`.

    Example:
      >>> float(true_negatives([1, 0, 0, 1], [1, 1, 0, 1]).compute())
      1.0
    """
    found = _Outcomes("true_negatives", labels, predictions, weight, threshold)
    return Count(found.total(true=False, said=False))


def false_positives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Count:
    """How many are no and predicted yes: ``tf.metrics.false_positives``.

    Args:
      labels: As for `true_positives`.
      predictions: As for `true_positives`.
      weight: As for `true_positives`.
      threshold: As for `true_positives`.

    Returns:
      A `Count`.

    Raises:
      ValueError: As for `true_positives`.

    Example:
      >>> float(false_positives([1, 0, 0], [1.0, 0.75, 0.5], threshold=0.5).compute())
      1.0
    """
    found = _Outcomes("false_positives", labels, predictions, weight, threshold)
    return Count(found.total(true=False, said=True))


def false_negatives(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Count:
    """How many are yes and predicted no: ``tf.metrics.false_negatives``.

    Args:
      labels: As for `true_positives`.
      predictions: As for `true_positives`.
      weight: As for `true_positives`.
      threshold: As for `true_positives`.

    Returns:
      A `Count`.

    Raises:
      ValueError: As for `true_positives`.

    Example:
      >>> float(false_negatives([1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 2, 1]).compute())
      2.0
    """
    found = _Outcomes("false_negatives", labels, predictions, weight, threshold)
    return Count(found.total(true=True, said=False))


def precision(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Share:
    """Of those predicted yes, the share that is: ``tf.metrics.precision``.

    Args:
      labels: As for `true_positives`.
      predictions: As for `true_positives`.
      weight: As for `true_positives`.
      threshold: As for `true_positives`.

    Returns:
      A `Share`: 0 where none is predicted yes.

    Raises:
      ValueError: As for `true_positives`.

    Example:
      >>> float(precision([1, 0, 1, 1], [1, 1, 0, 0]).compute())
      0.5
    """
    found = _Outcomes("precision", labels, predictions, weight, threshold)
    right = found.total(true=True, said=True)
    return Share(right, found.total(true=False, said=True))


def recall(
    labels: ArrayLike,
    predictions: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    threshold: float | None = None,
) -> Share:
    """Of those that are yes, the share predicted so: ``tf.metrics.recall``.

    Args:
      labels: As for `true_positives`.
      predictions: As for `true_positives`.
      weight: As for `true_positives`.
      threshold: As for `true_positives`.

    Returns:
      A `Share`: 0 where none is yes.

    Raises:
      ValueError: As for `true_positives`.

    Example:
      >>> float(recall([1, 0, 1, 1, 1], [1, 1, 0, 0, 0]).compute())
      0.25
    """
    found = _Outcomes("recall", labels, predictions, weight, threshold)
    right = found.total(true=True, said=True)
    return Share(right, found.total(true=True, said=False))
