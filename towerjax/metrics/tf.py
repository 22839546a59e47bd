"""The metrics of ``tf.metrics``, by their names there."""

import math
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.metrics import rows
from towerjax.metrics.rows import (
    Pairs,
    Values,
    Weight,
    as_array,
    element_weights,
    quotient,
)
from towerjax.metrics.weighted import Tally, Weighted, mean_of, widen
from towerjax.types import Sum
from towerjax.types.options import check_choice, check_whole
from towerjax.types.refusals import refuse_no_numbers
from towerjax.types.trees import promote_dtypes

AbsentClasses = Literal["left out", "zero"]
Cut: TypeAlias = float | None


def mean(values: Values, weight: Weight = None) -> Weighted:
    """Average the values by weight; ``tf.metrics.mean``.

    Args:
      values: ``[b, ...]`` or ``()``, numbers or booleans.
      weight: Weights >= 0, whose shape is that of the leading dims of ``values``;
        ``[b]`` or ``[b, 1]`` is one weight per example. None counts each element once.
        An element of weight 0 is left out even if it is NaN.

    Returns:
      A ``Weighted`` of two scalars, float32 or wider.

    Raises:
      ValueError: ``weight`` has another shape, or is known before tracing to be
        negative.

    Example:
      >>> float(mean([1.0, 5.0], [3.0, 1.0]).compute())
      2.0
    """
    refuse_no_numbers("mean: values", values)
    values = rows.floats_of(as_array(values))
    return _mean_of(values, element_weights("mean", values.shape, weight, "values"))


def _mean_of(values: jax.Array, weights: jax.Array) -> Weighted:
    dtype = promote_dtypes(values.dtype, weights.dtype)
    return mean_of(values.astype(dtype), weights, None, jnp.finfo(dtype).dtype)


def percentage_below(
    values: Values, threshold: float, weight: Weight = None
) -> Weighted:
    """Count the share of values below a threshold.

    It is ``tf.metrics.percentage_below``.

    Args:
      values: ``[b, ...]``.
      threshold: Values below it count; a value equal to it does not.
      weight: As for `mean`, which also raises the errors.

    Example:
      >>> float(percentage_below([1.0, 2.0, 3.0, 4.0], 2.0).compute())
      0.25
    """
    rows.check_threshold("percentage_below", threshold)
    refuse_no_numbers("percentage_below: values", values)
    below = jnp.asarray(_is_below(as_array(values), threshold))
    weights = element_weights("percentage_below", below.shape, weight, "values")
    return _mean_of(below, weights)


def _is_below(values: Any, threshold: Any) -> Any:
    """Compare values with a threshold, which keeps its own precision.

    For example, integers below 2.5 are those up to 2.
    """
    values = widen(values)
    if not (jnp.issubdtype(values.dtype, jnp.integer) and rows.is_known(threshold)):
        return values < threshold
    limits = np.iinfo(values.dtype)
    threshold = np.asarray(threshold).item()
    if not limits.min < threshold <= limits.max:  # a NaN threshold fails this test, too
        return np.full(values.shape, threshold > limits.max)
    return values < np.asarray(math.ceil(threshold), values.dtype)


def mean_absolute_error(
    labels: Values, predictions: Values, weight: Weight = None
) -> Weighted:
    """Average ``|prediction - label|``; ``tf.metrics.mean_absolute_error``.

    Args:
      labels: ``[b, ...]`` numbers.
      predictions: The same shape.
      weight: As for `mean`.

    Raises:
      ValueError: The shapes differ, or an error of `mean`.

    Example:
      >>> float(mean_absolute_error([1.0, 2.0], [1.0, 5.0]).compute())
      1.5
    """
    pairs = Pairs("mean_absolute_error", labels, predictions, weight)
    return _mean_of(pairs.distances(), pairs.weights)


def accuracy(labels: Values, predictions: Values, weight: Weight = None) -> Weighted:
    """Count the share of predictions that equal the label; ``tf.metrics.accuracy``.

    Labels and predictions are class ids or booleans, not scores. An id that does not
    fit into the devices' integers is refused.
    Arguments, result and other errors are those of `mean_absolute_error`.
    """
    pairs = Pairs("accuracy", labels, predictions, weight)
    return _mean_of(pairs.are_equal(), pairs.weights)


def mean_squared_error(
    labels: Values, predictions: Values, weight: Weight = None
) -> Weighted:
    """Average ``(prediction - label)**2``.

    It is ``tf.metrics.mean_squared_error``.

    Arguments, result and errors are those of `mean_absolute_error`.
    """
    pairs = Pairs("mean_squared_error", labels, predictions, weight)
    return _mean_of(pairs.distances() ** 2, pairs.weights)


def root_mean_squared_error(
    labels: Values, predictions: Values, weight: Weight = None
) -> Tally:
    """Take the root of `mean_squared_error`.

    It is ``tf.metrics.root_mean_squared_error``.

    The root is taken once, after all sums are added. Arguments and errors are those of
    `mean_absolute_error`.
    """
    pairs = Pairs("root_mean_squared_error", labels, predictions, weight)
    return Tally((_mean_of(pairs.distances() ** 2, pairs.weights),), _root_of)


def _root_of(mean: Weighted) -> Any:
    square = mean.compute()
    return rows.library_of(square).sqrt(square)


# Outcomes are four weights: of true positives (0), false positives (1), false negatives
# (2) and true negatives (3). A rate is one of them, divided by the sum of it and
# another one. Each pair has the indices of these two outcomes.
_RATES = {"precision": (0, 1), "sensitivity": (0, 2), "specificity": (3, 1)}


def share_of(rate: str, outcomes: Any) -> tuple[Any, Any]:
    """Pick the numerator and the denominator of a rate, such as "precision"."""
    part, other = (outcomes[i] for i in _RATES[rate])
    return part, part + other


def _outcomes(
    name: str, labels: Any, predictions: Any, weight: Any, threshold: Cut
) -> list[jax.Array]:
    """Add the weights of the elements of each of the four outcomes, ``()`` each."""
    pairs = Pairs(name, labels, predictions, weight)
    yes = pairs.as_booleans("labels")
    said = pairs.predictions
    dtype = jnp.result_type(said)
    if jnp.issubdtype(dtype, jnp.floating) != (threshold is not None):
        raise ValueError(
            f"{name} got predictions of dtype {dtype} with threshold={threshold!r}."
            " Scores need a threshold, such as 0.5; booleans and the numbers 0 and 1"
            " take none."
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
    """Count positives that are predicted positive; ``tf.metrics.true_positives``.

    Args:
      labels: ``[b, ...]``: booleans, or numbers 0 and 1.
      predictions: The same shape: booleans, the integers 0 and 1, or scores if there is
        a threshold.
      weight: As for `mean`. An element of weight 0 is left out, whatever its value.
      threshold: A score above it counts as positive; a score equal to it does not.

    Returns:
      A ``Sum``, float32 or wider. It is exact up to ``2**24`` per batch.

    Raises:
      ValueError: The shapes differ, a value is neither 0 nor 1, scores come without a
        threshold, or a weight is negative. If such a value is not known before tracing,
        the metric is NaN.

    Example:
      >>> scores = [1.0, 0.75, 0.5, 0.25]
      >>> float(true_positives([1, 0, 1, 1], scores, threshold=0.4).compute())
      2.0
    """
    return Sum(_outcomes("true_positives", labels, predictions, weight, threshold)[0])


def false_positives(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Sum:
    """Count negatives that are predicted positive.

    It is ``tf.metrics.false_positives``.

    Arguments, result and errors are those of `true_positives`.
    """
    return Sum(_outcomes("false_positives", labels, predictions, weight, threshold)[1])


def false_negatives(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Sum:
    """Count positives that are predicted negative.

    It is ``tf.metrics.false_negatives``.

    Arguments, result and errors are those of `true_positives`.
    """
    return Sum(_outcomes("false_negatives", labels, predictions, weight, threshold)[2])


def true_negatives(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Sum:
    """Count negatives that are predicted negative.

    It is ``tf.metrics.true_negatives``.

    Arguments, result and errors are those of `true_positives`.
    """
    return Sum(_outcomes("true_negatives", labels, predictions, weight, threshold)[3])


def precision(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Weighted:
    """Count the share of predicted positives that are positive.

    It is ``tf.metrics.precision``.

    The result is a ``Weighted``, 0 if nothing is predicted positive.
    Arguments and errors are those of `true_positives`.
    """
    outcomes = _outcomes("precision", labels, predictions, weight, threshold)
    return Weighted(*share_of("precision", outcomes))


def recall(
    labels: Values, predictions: Values, weight: Weight = None, *, threshold: Cut = None
) -> Weighted:
    """Count the share of positives that are predicted positive.

    It is ``tf.metrics.recall``.

    The result is a ``Weighted``, 0 if nothing is positive.
    Arguments and errors are those of `true_positives`.
    """
    outcomes = _outcomes("recall", labels, predictions, weight, threshold)
    return Weighted(*share_of("sensitivity", outcomes))


def _mean_over_classes(part: Any, whole: Any, absent: AbsentClasses) -> Any:
    """Average ``part / whole`` over the classes.

    A class whose ``whole`` is 0 is left out, or counts 0, as ``absent`` says.
    """
    shares = quotient(part, whole)
    if absent == "zero":
        return shares.mean()
    return quotient(shares.sum(), (whole != 0).sum(dtype=shares.dtype))


def _mean_iou(matrix: Any) -> Any:
    """Average the classes' IoU, from weights of each ``[label, prediction]``."""
    both = rows.library_of(matrix).diagonal(matrix)
    either = matrix.sum(axis=0) + matrix.sum(axis=1) - both
    return _mean_over_classes(both, either, "left out")


def _ids_and_weights(pairs: Pairs, num_classes: int) -> tuple[jax.Array, ...]:
    """Flatten labels, predictions and weights; an invalid id weighs NaN."""
    check_whole(f"{pairs.name}: num_classes", num_classes)
    ids = []
    remedy = f"num_classes={num_classes} has ids 0 to {num_classes - 1}."
    for name, x in pairs.ids():
        x = widen(x)  # checked before the cast below, which would wrap 64 bits
        valid = (x >= 0) & (x < num_classes)
        pairs.require(name, x, valid, remedy)
        ids.append(jnp.where(valid, x, 0).astype(jnp.int32).reshape(-1))
    return *ids, pairs.weights.reshape(-1)


def mean_iou(
    labels: Values, predictions: Values, num_classes: int, weight: Weight = None
) -> Tally:
    """Average the intersection over union over classes.

    It is ``tf.metrics.mean_iou``.

    The IoU of a class divides two weights. The numerator is the weight of the elements
    whose label and prediction are both the class. The denominator is the weight of
    those with at least one of the two. A class that is neither a label nor a prediction
    does not count.

    Args:
      labels: ``[b, ...]`` class ids from 0 to ``num_classes - 1``.
      predictions: The same shape.
      num_classes: The number of classes.
      weight: As for `mean`.

    Returns:
      A state that holds the confusion matrix, float32 or wider. It is exact up to
      ``2**24`` per batch.

    Raises:
      ValueError: The shapes differ, ids are not integers or out of range, or a weight
        is negative. If ids are not known before tracing, one that is out of range makes
        the value NaN, unless its weight is 0.

    Example:
      >>> float(mean_iou([0, 0, 1, 1], [0, 1, 1, 1], num_classes=3).compute())
      0.5833333...
    """
    pairs = Pairs("mean_iou", labels, predictions, weight)
    labels, predictions, weights = _ids_and_weights(pairs, num_classes)
    shape = (num_classes, num_classes)
    matrix = rows.added_at(shape, (labels, predictions), weights)
    return Tally((matrix,), _mean_iou)


def mean_per_class_accuracy(
    labels: Values,
    predictions: Values,
    num_classes: int,
    weight: Weight = None,
    *,
    absent: AbsentClasses = "left out",
) -> Tally:
    """Average the accuracy of each class over classes that are labels.

    It is ``tf.metrics.mean_per_class_accuracy``.

    By default a class without examples does not count, as in `mean_iou`. TensorFlow
    counts it as 0; ``absent="zero"`` does the same. Errors are those of `mean_iou`. An
    unknown ``absent`` is an error, too.

    Args:
      labels: As for `mean_iou`.
      predictions: As for `mean_iou`.
      num_classes: The number of classes.
      weight: As for `mean_iou`.
      absent: ``"left out"`` leaves a class without examples in the merged state out of
        the mean. ``"zero"`` counts it as 0.

    Example:
      >>> float(mean_per_class_accuracy([0, 0, 1, 1], [0, 1, 1, 1], 3).compute())
      0.75
    """
    check_choice("absent", absent, get_args(AbsentClasses))
    pairs = Pairs("mean_per_class_accuracy", labels, predictions, weight)
    labels, predictions, weights = _ids_and_weights(pairs, num_classes)
    counted = rows.weights_where(labels == predictions, weights)
    hits = rows.added_at((num_classes,), (labels,), counted)
    all_of_class = rows.added_at((num_classes,), (labels,), weights)
    return Tally((hits, all_of_class), _mean_over_classes, (absent,))
