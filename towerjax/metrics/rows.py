"""Check labels, predictions and weights, and give each element its weight."""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.types import ArrayLike
from towerjax.types.refusals import a_type, overflow_of, refuse_no_numbers
from towerjax.types.trees import native, promote_dtypes, widen_dtype

Values: TypeAlias = ArrayLike
"""One value for each element, ``[b, ...]``."""

Weight: TypeAlias = ArrayLike | None
"""The weight of each element, of the leading dims of its values; None is 1."""


def library_of(*arrays: Any) -> Any:
    """Choose ``jax.numpy`` if an array is JAX's; else ``numpy``, which has 64 bits."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def ratio(total: Any, weight: Any) -> Any:
    """Divide ``total / weight``, with 0 where the weight is 0.

    It is meant for a state's ``compute``.

    Args:
      total: Any shape, a NumPy or JAX array.
      weight: The same shape, or ``()``.

    Returns:
      The quotient, in the shape of ``total`` and from the same library. A NaN makes it
      NaN, except a total whose weight is 0.

    Example:
      >>> ratio(np.array([1.0, 0.0]), np.array([4.0, 0.0])).tolist()
      [0.25, 0.0]
    """
    refuse_no_numbers("ratio: total", total)
    refuse_no_numbers("ratio: weight", weight)
    return quotient(total, weight)


def quotient(total: Any, weight: Any) -> Any:
    """Divide ``total / weight`` as `ratio` does, for arrays that were checked."""
    library = library_of(total, weight)
    empty = weight == 0
    # A complex sum is divided by a real weight.
    with jax.numpy_dtype_promotion("standard"):
        return library.where(empty, 0.0, total / library.where(empty, 1, weight))


def is_known(x: Any) -> bool:
    """Return whether the values are on the host, so that they can be checked now.

    Arrays of JAX are not: they may be tracers.
    """
    return isinstance(x, bool | int | float | list | tuple | np.ndarray | np.generic)


def as_array(x: Any) -> Any:
    """Make a NumPy array of a list, and bring an array to native byte order."""
    return np.asarray(x) if isinstance(x, list | tuple) else native(x)


def as_floats(x: Any) -> jax.Array:
    """Cast an array to floats that can be averaged; raise unless it is numeric."""
    if not (is_known(x) or jax.tree_util.all_leaves([x])):
        raise ValueError(
            f"A mean needs one array, but got {a_type(x)}. For the mean of each leaf's"
            " rows write tj.Weighted.mean(tree, weight, axis=0)."
        )
    refuse_no_numbers("What a mean is taken of", x)
    return floats_of(x)


def floats_of(x: Any) -> jax.Array:
    """Cast an array to float32 or wider, so that sums of wide integers fit."""
    x = jnp.asarray(native(x) if overflow_of(x) is None else np.asarray(x, np.float64))
    return x.astype(widen_dtype(x.dtype))


def _as_unsigned(first: Any, second: Any) -> tuple[Any, Any, Any]:
    """Cast two integer arrays to unsigned ones, and mark where signs were equal."""
    library = np if is_known(first) and is_known(second) else jnp
    a, b = (library.asarray(native(x)) for x in (first, second))
    unsigned = f"u{max(a.dtype.itemsize, b.dtype.itemsize)}"
    with jax.numpy_dtype_promotion("standard"):
        have_one_sign = (a < 0) == (b < 0)
    return have_one_sign, a.astype(unsigned), b.astype(unsigned)


def element_weights(
    name: str,
    shape: tuple[int, ...],
    weight: Any,
    values_name: str = "labels",
    *,
    repeats: bool = False,
) -> jax.Array:
    """Spread weights over the elements of values of shape ``shape``.

    With ``repeats`` any dim of ``weight`` may be 1. ``name`` and ``values_name`` name
    the metric and its values in errors.
    """
    if weight is None:
        return jnp.ones(shape, jnp.float32)
    refuse_no_numbers(f"{name}: weight", weight)
    if is_known(weight) and (lowest := np.min(weight, initial=0)) < 0:
        raise ValueError(
            f"{name} got a weight of {lowest}, but weights must be >= 0. Give 0 to mask"
            " an example."
        )
    weight = floats_of(as_array(weight))
    shape_given = weight.shape
    dims = len(shape)
    weight = weight.reshape(shape_given + (1,) * (dims - len(shape_given)))
    leading = [shape[:k] + (1,) * (dims - k) for k in range(1, dims + 1)]
    fits = not shape_given or weight.shape in leading
    if repeats and len(shape_given) == dims:
        fits = all(
            size in (1, whole) for size, whole in zip(shape_given, shape, strict=True)
        )
    if not fits:
        advice = (
            f"Weights must have the shape of the leading dims, {shape[:1]} for one per"
            " example."
        )
        if len(shape_given) == 1 and shape_given[0] in shape[1:]:
            at = shape.index(shape_given[0])
            advice = f"Examples are dim 0: give jnp.moveaxis({values_name}, {at}, 0)."
        raise ValueError(
            f"{name} got {values_name} of shape {shape} and weights of"
            f" shape {shape_given}. {advice}"
        )
    return jnp.broadcast_to(weight, shape)


def weights_where(which: Any, weight: jax.Array) -> jax.Array:
    """Keep the weights where ``which`` is True; take 0 elsewhere.

    A weight NaN stays NaN everywhere, because it marks an invalid value.
    """
    return jnp.where(which | jnp.isnan(weight), weight, 0)


def added_at(
    shape: tuple[int, ...], places: tuple[jax.Array, ...], weights: jax.Array
) -> jax.Array:
    """Add the weights at their places in an array of this shape.

    If one weight is NaN, all of the result is NaN.
    """
    added = jnp.zeros(shape, weights.dtype).at[places].add(weights)
    return added + 0 * weights.sum()


def check_threshold(name: str, threshold: Any) -> None:
    """Raise unless ``threshold`` is one number; ``name`` is the metric's name."""
    if isinstance(threshold, str | list | tuple) or np.shape(threshold):
        raise ValueError(
            f"{name} got threshold={threshold!r}, but a threshold must be one number,"
            f" such as 0.5. Make one metric per threshold: [{name}(..., t) for t in"
            " thresholds]."
        )
    refuse_no_numbers(f"{name}: threshold", threshold)


class Pairs:
    """The labels and predictions of one metric, of equal shapes, and their weights.

    A compiled program cannot raise an error. So an invalid value that is not known
    before tracing gets the weight NaN, unless its weight is 0. Each sum of weights is
    then NaN, and so is the metric.
    """

    def __init__(self, name: str, labels: Any, predictions: Any, weight: Any) -> None:
        for part, x in (("labels", labels), ("predictions", predictions)):
            # NumPy integers need no check, because they can be compared at any number
            # of bits.
            is_array = isinstance(x, np.ndarray)
            if not (is_array and jnp.issubdtype(x.dtype, jnp.integer)):
                refuse_no_numbers(f"{name}: {part}", x)
        self.labels = as_array(labels)
        self.predictions = as_array(predictions)
        shapes = jnp.shape(self.labels), jnp.shape(self.predictions)
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{name} got labels of shape {shapes[0]} and predictions of shape"
                f" {shapes[1]}. Give one prediction for each label, such as"
                " jnp.argmax(logits, axis=-1), or labels[..., 0]."
            )
        self.name = name
        self._given = 1 if weight is None else weight
        self.weights = element_weights(name, shapes[0], weight)

    def require(self, part: str, x: Any, valid: Any, remedy: str) -> None:
        """Raise for a known invalid value; give a traced one the weight NaN."""
        if is_known(x) and is_known(self._given):
            x = np.asarray(x)
            counts = np.asarray(self._given) != 0
            counts = counts.reshape(counts.shape + (1,) * (x.ndim - counts.ndim))
            if (bad := x[counts & ~np.asarray(valid)]).size:
                raise ValueError(
                    f"{self.name} got {part} with the value {bad[0]}: {remedy}"
                )
        self.mark(valid)

    def mark(self, valid: Any) -> None:
        """Make the weights of invalid elements NaN, unless they are 0."""
        is_bad = (self.weights != 0) & ~jnp.asarray(valid)
        self.weights = jnp.where(is_bad, jnp.nan, self.weights)

    def as_booleans(self, part: Literal["labels", "predictions"]) -> jax.Array:
        """Read the labels or predictions as booleans; raise unless all are 0 or 1."""
        x = getattr(self, part)
        x = np.asarray(x) if is_known(x) else x  # JAX would wrap 2**32 to 0
        remedy = "give booleans, or 0 and 1. For several classes use mean_iou."
        with jax.numpy_dtype_promotion("standard"):
            is_no = x == 0
            is_yes = x == 1
        self.require(part, x, is_no | is_yes, remedy)
        return jnp.asarray(~is_no)

    def ids(self) -> tuple[tuple[str, Any], ...]:
        """Name the labels and predictions; raise unless they are ids.

        Ids are integers or booleans.
        """
        both = ("labels", self.labels), ("predictions", self.predictions)
        for name, x in both:
            dtype = jnp.result_type(x)
            if not jnp.issubdtype(dtype, jnp.integer) and dtype != jnp.bool_:
                raise ValueError(
                    f"{self.name} got {name} of dtype {dtype}, but class ids must be"
                    " integers or booleans. Write jnp.argmax(logits, axis=-1),"
                    f" probabilities > 0.5, or {name}.astype(jnp.int32) of ids that are"
                    " floats."
                )
        return both

    def are_equal(self) -> jax.Array:
        """Compare ids of any dtypes; raise if one overflows."""
        ids = self.ids()
        for name, x in ids if not all(is_known(x) for _, x in ids) else ():
            if (wrapped := overflow_of(x)) is not None:
                raise ValueError(
                    f"{self.name} got {name} with the id {wrapped}, which would wrap"
                    " round in 32 bits. Give smaller ids, or enable jax_enable_x64."
                )
        have_one_sign, a, b = _as_unsigned(self.labels, self.predictions)
        return jnp.asarray(have_one_sign & (a == b))

    def distances(self) -> jax.Array:
        """Compute ``|label - prediction|``, in float32 or wider; exact for integers."""
        pair = self.labels, self.predictions
        x, y = map(as_floats, pair)
        dtype = promote_dtypes(x.dtype, y.dtype)
        apart = abs(x.astype(dtype) - y.astype(dtype))
        are_whole = all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in pair)
        are_known = all(map(is_known, pair))
        wraps = not are_known and any(overflow_of(x) is not None for x in pair)
        if wraps or not are_whole:
            return apart
        have_one_sign, a, b = _as_unsigned(*pair)
        exact = floats_of(library_of(a, b).where(a > b, a - b, b - a))
        return jnp.where(have_one_sign, exact, apart)
