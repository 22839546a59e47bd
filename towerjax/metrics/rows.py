"""Check labels, predictions and weights, and weigh each element."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.types import ArrayLike
from towerjax.types.leaves import native, overflow_of, promote_dtypes, widen_dtype
from towerjax.types.options import check_whole


def library_of(*arrays: Any) -> Any:
    """``jax.numpy`` if an array is JAX's, else ``numpy``, which keeps its precision."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def ratio(total: Any, weight: Any) -> Any:
    """``total / weight``, and 0 where the weight is 0, for a state's ``compute``.

    Args:
      total: Any shape, of NumPy or JAX.
      weight: The same shape, or ``()``.

    Returns:
      An array of that shape, of the operands' library. NaN stays NaN.

    Example:
      >>> ratio(np.array([1.0, 0.0]), np.array([4.0, 0.0])).tolist()
      [0.25, 0.0]
    """
    library = library_of(total, weight)
    empty = weight == 0
    with jax.numpy_dtype_promotion("standard"):  # complex sums have real weights
        return library.where(empty, 0.0, total / library.where(empty, 1, weight))


def is_known(x: Any) -> bool:
    """Whether the values are on the host, known before tracing."""
    return isinstance(x, bool | int | float | list | tuple | np.ndarray | np.generic)


def as_array(x: Any) -> Any:
    """A list as a NumPy array; anything else as it is, in native byte order."""
    return np.asarray(x) if isinstance(x, list | tuple) else native(x)


def as_floats(x: Any) -> jax.Array:
    """An array to be summed, float32 or wider; wide integers do not wrap round."""
    if not (is_known(x) or jax.tree_util.all_leaves([x])):
        raise ValueError(
            f"One array of numbers is averaged, not a {type(x).__name__}. The mean over"
            " rows of each leaf of a tree is tj.Weighted.mean(tree, weight, axis=0)."
        )
    x = jnp.asarray(native(x) if overflow_of(x) is None else np.asarray(x, np.float64))
    return x.astype(widen_dtype(x.dtype))


def _signs_and_sizes(*arrays: Any) -> list[tuple[Any, Any]]:
    """For each array of integers which are negative, and the sizes, of one dtype."""
    library = np if all(map(is_known, arrays)) else jnp
    arrays = tuple(library.asarray(native(x)) for x in arrays)
    dtype = np.dtype(f"u{max(x.dtype.itemsize for x in arrays)}")
    negative = [x < np.zeros((), x.dtype) for x in arrays]
    sizes = [x.astype(dtype) for x in arrays]
    return [(n, library.where(n, -x, x)) for n, x in zip(negative, sizes, strict=True)]


def distance(first: Any, second: Any) -> jax.Array:
    """``|first - second|``, float32 or wider; integers are cast when subtracted."""
    pair = first, second
    whole = all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in pair)
    wraps = any(overflow_of(x) is not None for x in pair)
    if not whole or (wraps and not all(map(is_known, pair))):
        first, second = map(as_floats, pair)
        dtype = promote_dtypes(first.dtype, second.dtype)
        return abs(first.astype(dtype) - second.astype(dtype))
    (less, x), (below, y) = _signs_and_sizes(*pair)
    apart = as_floats(library_of(x, y).where(x > y, x - y, y - x))
    return jnp.where(less == below, apart, as_floats(x) + as_floats(y))


def are_equal(name: str, labels: Any, predictions: Any) -> Any:
    """Where ids are equal as numbers, whatever their dtypes; raise if one wraps."""
    on_devices = not (is_known(labels) and is_known(predictions))
    for what, x in (("labels", labels), ("predictions", predictions)):
        if on_devices and (wide := overflow_of(x)) is not None:
            raise ValueError(
                f"{name} got {what} with the id {wide}, which would wrap round on the"
                " devices. Give smaller ids, or say"
                " jax.config.update('jax_enable_x64', True)."
            )
    (less, x), (below, y) = _signs_and_sizes(labels, predictions)
    return (less == below) & (x == y)


def number_of_rows(leaves: list[jax.Array]) -> int:
    """``b``, the size of dim 0; raise unless all arrays have the same."""
    sizes = {x.shape[:1] for x in leaves}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            "With axis=0 the rows of arrays [b, ...] are averaged, b the same for all,"
            f" but these have the shapes {[x.shape for x in leaves]}."
        )
    return sizes.pop()[0]


def check_pair(name: str, labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Labels and predictions as arrays; raise unless their shapes are equal."""
    labels, predictions = as_array(labels), as_array(predictions)
    shapes = jnp.shape(labels), jnp.shape(predictions)
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{name} got labels of shape {shapes[0]} and predictions of shape"
            f" {shapes[1]}. They must be equal, one prediction for each label: reduce"
            " scores of several classes first, jnp.argmax(logits, axis=-1), and drop"
            " dims of 1, labels[..., 0]."
        )
    return labels, predictions


def element_weights(
    name: str, shape: tuple[int, ...], weight: Any, what: str = "labels"
) -> jax.Array:
    """The weight of each element, in the given shape."""
    if weight is None:
        return jnp.ones(shape, jnp.float32)
    if is_known(weight) and (lowest := np.min(weight, initial=0)) < 0:
        raise ValueError(
            f"{name} got a weight of {lowest}; weights must be >= 0. Mask an example"
            " with weight 0."
        )
    weight = as_floats(as_array(weight))
    given, dims = weight.shape, len(shape)
    weight = weight.reshape(given + (1,) * (dims - len(given)))
    leading = [shape[:k] + (1,) * (dims - k) for k in range(1, dims + 1)]
    if given and weight.shape not in leading:
        raise ValueError(
            f"{name} got {what} of shape {shape} and weights of shape {given}."
            f" Weights must have the leading dims of the {what}, here {shape[:1]} for"
            " one weight per example."
        )
    return jnp.broadcast_to(weight, shape)


def _known_values(x: Any, weight: Any) -> np.ndarray:
    """``[n]``, the values of nonzero weight; none where they are not known yet."""
    if not is_known(x) or not (weight is None or is_known(weight)):
        return np.zeros(0)
    x = np.asarray(x)
    if weight is None:
        return x.reshape(-1)
    weight = np.asarray(weight)
    counts = (weight != 0).reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
    return x[np.broadcast_to(counts, x.shape)]


def mark_invalid(weight: jax.Array, valid: jax.Array) -> jax.Array:
    """The weights, NaN where an element of nonzero weight is not valid.

    A compiled program cannot raise, so an invalid element makes the metric NaN.
    """
    return jnp.where(valid | (weight == 0), weight, jnp.nan)


def as_booleans(
    name: str, what: str, x: Any, weight: Any
) -> tuple[jax.Array, jax.Array]:
    """``x`` as booleans, and which elements are valid: booleans, 0 or 1."""
    counted = _known_values(x, weight)
    if (bad := counted[~np.isin(counted, (0, 1))]).size:
        raise ValueError(
            f"{name} got {what} with the value {bad[0]}; they must be booleans, or 0"
            " and 1. For several classes use mean_iou or mean_per_class_accuracy."
        )
    if jnp.result_type(x) == jnp.bool_:
        return jnp.asarray(x), jnp.ones_like(x, bool)
    # Compared before JAX holds it, which would wrap 2**32 to 0.
    return jnp.asarray(x != 0), jnp.asarray((x == 0) | (x == 1))


def as_positives(
    name: str, predictions: ArrayLike, weight: Any, threshold: float | None
) -> tuple[jax.Array, jax.Array]:
    """Which predictions are positive, and which are valid."""
    scores = jnp.issubdtype(jnp.result_type(predictions), jnp.floating)
    if scores != (threshold is not None):
        raise ValueError(
            f"{name} got predictions of dtype {jnp.result_type(predictions)} and"
            f" threshold={threshold!r}. Scores need a threshold, such as 0.5;"
            " booleans, and integers 0 and 1, take none."
        )
    if threshold is None:
        return as_booleans(name, "predictions", predictions, weight)
    check_threshold(name, threshold)
    x = jnp.asarray(predictions)
    x = x.astype(widen_dtype(x.dtype))
    return x > jnp.asarray(threshold, x.dtype), ~jnp.isnan(x)


def check_threshold(name: str, threshold: Any) -> None:
    """Raise unless the threshold is one number."""
    if np.shape(threshold) or isinstance(threshold, str):
        raise ValueError(
            f"{name} got threshold={threshold!r}; it is one number, such as 0.5. For"
            f" several make a metric of each: [{name}(..., t) for t in thresholds]."
        )


def check_scores(name: str, predictions: ArrayLike, weight: Any) -> None:
    """Raise unless predictions are floating and the known ones are from 0 to 1."""
    dtype = jnp.result_type(predictions)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name} got predictions of dtype {dtype}; they must be floating scores"
            " between 0 and 1."
        )
    scores = _known_values(predictions, weight)
    if (bad := scores[~((scores >= 0) & (scores <= 1))]).size:
        raise ValueError(
            f"{name} got a score of {bad[0]}; scores lie between 0 and 1. Use"
            " jax.nn.sigmoid(logits)."
        )


def check_classes(
    name: str, what: str, ids: ArrayLike, weight: Any, num_classes: int
) -> None:
    """Raise unless ids are integers and the known ones are class ids."""
    check_whole(f"{name}: num_classes", num_classes)
    dtype = jnp.result_type(ids)
    if not jnp.issubdtype(dtype, jnp.integer) and dtype != jnp.bool_:
        raise ValueError(
            f"{name} got {what} of dtype {dtype}; class ids are integers. Write"
            " jnp.argmax(logits, axis=-1) for scores."
        )
    counted = _known_values(ids, weight)
    if (bad := counted[(counted < 0) | (counted >= num_classes)]).size:
        raise ValueError(
            f"{name} got {what} with the class id {bad[0]}, but"
            f" num_classes={num_classes} has ids 0 to {num_classes - 1}. Pass more"
            " classes, or give such examples weight 0."
        )
