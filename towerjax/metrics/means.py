"""Metrics that are means over examples: of values, hits and errors."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.metrics import rows
from towerjax.metrics.rows import Pairs, Values, Weight, as_array, element_weights
from towerjax.metrics.weighted import Additive, Weighted, mean_of, widen
from towerjax.types.leaves import promote_dtypes, refuse_no_numbers


def mean(values: Values, weight: Weight = None) -> Weighted:
    """The weighted mean of values: ``tf.metrics.mean``.

    Args:
      values: ``[b, ...]`` or ``()``, numbers or booleans.
      weight: Of the leading dims of ``values``, ``[b]`` or ``[b, 1]`` for one per
        example, >= 0; None counts each once. An element of weight 0 is left out even
        when NaN.

    Returns:
      A ``Weighted`` of two scalars, float32 or wider.

    Raises:
      ValueError: The weight has another shape, or is negative where that is known.

    Example:
      >>> float(mean([1.0, 5.0], [3.0, 1.0]).compute())
      2.0
    """
    refuse_no_numbers("mean: values", values)
    values = rows.named_if_square(rows.floats_of(as_array(values)), weight)
    return _mean_of(values, element_weights("mean", values.shape, weight, "values"))


def _mean_of(values: jax.Array, weights: jax.Array) -> Weighted:
    dtype = promote_dtypes(values.dtype, weights.dtype)
    return mean_of(values.astype(dtype), weights, None, jnp.finfo(dtype).dtype)


def percentage_below(
    values: Values, threshold: float, weight: Weight = None
) -> Weighted:
    """The share of values below a threshold: ``tf.metrics.percentage_below``.

    Args:
      values: ``[b, ...]``.
      threshold: Values less than it count; a value equal to it does not.
      weight: As for `mean`, whose errors this function has.

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
    """Whether each value is below the threshold, which is not cast to its dtype."""
    values = widen(values)
    if not (jnp.issubdtype(values.dtype, jnp.integer) and rows.is_known(threshold)):
        return values < threshold
    limits, threshold = np.iinfo(values.dtype), np.asarray(threshold).item()
    if not limits.min < threshold <= limits.max:  # it may be NaN
        return np.full(values.shape, threshold > limits.max)
    return values < np.asarray(math.ceil(threshold), values.dtype)


def mean_absolute_error(
    labels: Values, predictions: Values, weight: Weight = None
) -> Weighted:
    """The mean of ``|prediction - label|``: ``tf.metrics.mean_absolute_error``.

    Args:
      labels: ``[b, ...]`` numbers.
      predictions: The same shape.
      weight: As for `mean`.

    Raises:
      ValueError: Shapes differ, or as for `mean`.

    Example:
      >>> float(mean_absolute_error([1.0, 2.0], [1.0, 5.0]).compute())
      1.5
    """
    pairs = Pairs("mean_absolute_error", labels, predictions, weight)
    return _mean_of(pairs.distances(), pairs.weights)


def accuracy(labels: Values, predictions: Values, weight: Weight = None) -> Weighted:
    """The share of predictions that equal the label: ``tf.metrics.accuracy``.

    Both are class ids or booleans, not scores; an id that would wrap round on the
    devices is refused. Arguments, result and other errors are those of
    `mean_absolute_error`.
    """
    pairs = Pairs("accuracy", labels, predictions, weight)
    return _mean_of(pairs.are_equal(), pairs.weights)


def mean_squared_error(
    labels: Values, predictions: Values, weight: Weight = None
) -> Weighted:
    """The mean of ``(prediction - label)**2``: ``tf.metrics.mean_squared_error``.

    Arguments, result and errors are those of `mean_absolute_error`.
    """
    pairs = Pairs("mean_squared_error", labels, predictions, weight)
    return _mean_of(pairs.distances() ** 2, pairs.weights)


class RootMean(Additive):
    """The square root of a mean, taken once, after all sums are added."""

    mean: Weighted

    def compute(self) -> jax.Array:
        """``sqrt(sum / weight)``; 0 where the weight is 0."""
        square = self.mean.compute()
        return rows.library_of(square).sqrt(square)


def root_mean_squared_error(
    labels: Values, predictions: Values, weight: Weight = None
) -> RootMean:
    """The root of `mean_squared_error`: ``tf.metrics.root_mean_squared_error``.

    A `RootMean`. Arguments and errors are those of `mean_absolute_error`.
    """
    pairs = Pairs("root_mean_squared_error", labels, predictions, weight)
    return RootMean(_mean_of(pairs.distances() ** 2, pairs.weights))
