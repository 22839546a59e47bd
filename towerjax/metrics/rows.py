"""Check labels, predictions and weights, and weigh each element."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.types.leaves import native, overflow_of, promote_dtypes, widen_dtype


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
            f"A mean is of one array, not a {type(x).__name__}. The mean of each leaf's"
            " rows is tj.Weighted.mean(tree, weight, axis=0)."
        )
    x = jnp.asarray(native(x) if overflow_of(x) is None else np.asarray(x, np.float64))
    return x.astype(widen_dtype(x.dtype))


def _as_unsigned(first: Any, second: Any) -> tuple[Any, Any, Any]:
    """Where integers have one sign, and both as unsigned numbers, which wrap alike."""
    library = np if is_known(first) and is_known(second) else jnp
    a, b = (library.asarray(native(x)) for x in (first, second))
    unsigned = f"u{max(a.dtype.itemsize, b.dtype.itemsize)}"
    with jax.numpy_dtype_promotion("standard"):
        have_one_sign = (a < 0) == (b < 0)
    return have_one_sign, a.astype(unsigned), b.astype(unsigned)


def distance(first: Any, second: Any) -> jax.Array:
    """``|first - second|``, float32 or wider; integers are subtracted exactly."""
    pair = first, second
    x, y = map(as_floats, pair)
    dtype = promote_dtypes(x.dtype, y.dtype)
    apart = abs(x.astype(dtype) - y.astype(dtype))
    whole = all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in pair)
    wraps = not all(map(is_known, pair)) and any(map(_wraps, pair))
    if wraps or not whole:
        return apart
    have_one_sign, a, b = _as_unsigned(first, second)
    exact = as_floats(library_of(a, b).where(a > b, a - b, b - a))
    return jnp.where(have_one_sign, exact, apart)


def _wraps(x: Any) -> bool:
    return overflow_of(x) is not None


def are_equal(name: str, labels: Any, predictions: Any) -> Any:
    """Where ids are equal as numbers, whatever their dtypes; raise if one wraps."""
    if not (is_known(labels) and is_known(predictions)):
        for what, x in (("labels", labels), ("predictions", predictions)):
            if _wraps(x):
                raise ValueError(
                    f"{name} got {what} with the id {overflow_of(x)}, which would wrap"
                    " round in 32 bits. Give smaller ids, or enable jax_enable_x64."
                )
    have_one_sign, a, b = _as_unsigned(labels, predictions)
    return have_one_sign & (a == b)


def number_of_rows(leaves: list[jax.Array]) -> int:
    """``b``, the size of dim 0; raise unless all arrays have the same."""
    sizes = {x.shape[:1] for x in leaves}
    if len(sizes) != 1 or sizes == {()}:
        shapes = [x.shape for x in leaves]
        raise ValueError(
            f"With axis=0 leaves must be [b, ...] for one b, got {shapes}."
        )
    return sizes.pop()[0]


def check_pair(name: str, labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Labels and predictions as arrays; raise unless their shapes are equal."""
    labels, predictions = as_array(labels), as_array(predictions)
    if (shapes := (jnp.shape(labels), jnp.shape(predictions)))[0] != shapes[1]:
        raise ValueError(
            f"{name} got labels of shape {shapes[0]} and predictions of shape"
            f" {shapes[1]}. Give one prediction for each label, such as"
            " jnp.argmax(logits, axis=-1), or labels[..., 0]."
        )
    return labels, predictions


def element_weights(
    name: str, shape: tuple[int, ...], weight: Any, what: str = "labels"
) -> jax.Array:
    """The weight of each element, in the given shape."""
    if weight is None:
        return jnp.ones(shape, jnp.float32)
    if is_known(weight) and (lowest := np.min(weight, initial=0)) < 0:
        raise ValueError(f"{name} got a weight of {lowest}; give 0 to mask an example.")
    weight = as_floats(as_array(weight))
    given, dims = weight.shape, len(shape)
    weight = weight.reshape(given + (1,) * (dims - len(given)))
    leading = [shape[:k] + (1,) * (dims - k) for k in range(1, dims + 1)]
    if given and weight.shape not in leading:
        raise ValueError(
            f"{name} got {what} of shape {shape} and weights of shape {given}. Give"
            f" weights of its leading dims, such as {shape[:1]} for one per example."
        )
    return jnp.broadcast_to(weight, shape)


def check_values(
    name: str, what: str, x: Any, weight: Any, valid: Any, remedy: str
) -> jax.Array:
    """Which elements are valid, for `mark_invalid`; raise for a known one that is not.

    An element whose weight is known to be 0 may be anything.
    """
    if is_known(x) and (weight is None or is_known(weight)):
        x, counts = np.asarray(x), np.asarray(1 if weight is None else weight) != 0
        counts = counts.reshape(counts.shape + (1,) * (x.ndim - counts.ndim))
        if (bad := x[counts & ~np.asarray(valid)]).size:
            raise ValueError(f"{name} got {what} with the value {bad[0]}; {remedy}")
    return jnp.asarray(valid)


def mark_invalid(weight: jax.Array, *valid: jax.Array) -> jax.Array:
    """The weights, all NaN where an element of nonzero weight is not valid.

    A compiled program cannot raise, so an invalid element makes the metric NaN.
    """
    bad = [((weight != 0) & ~x).any() for x in valid]
    return jnp.where(functools.reduce(jnp.logical_or, bad), jnp.nan, weight)


def weights_where(which: Any, weight: jax.Array) -> jax.Array:
    """The weights of the elements in ``which``, 0 elsewhere; NaN stays everywhere."""
    return jnp.where(which | jnp.isnan(weight), weight, 0)


def as_booleans(name: str, what: str, x: Any, weight: Any) -> tuple[Any, Any]:
    """``x`` as booleans, and which elements are valid: booleans, 0 or 1."""
    x = np.asarray(x) if is_known(x) else x  # JAX would wrap 2**32 to 0
    remedy = "give booleans, or 0 and 1. For several classes use mean_iou."
    with jax.numpy_dtype_promotion("standard"):
        is_no, is_yes = x == 0, x == 1
    valid = check_values(name, what, x, weight, is_no | is_yes, remedy)
    return jnp.asarray(~is_no), valid


def check_threshold(name: str, threshold: Any) -> None:
    """Raise unless the threshold is one number."""
    if np.shape(threshold) or isinstance(threshold, str):
        raise ValueError(
            f"{name} got threshold={threshold!r}; it is one number, such as 0.5. Make a"
            f" metric of each: [{name}(..., t) for t in thresholds]."
        )


def check_ids(name: str, what: str, ids: Any) -> None:
    """Raise unless ids are integers or booleans."""
    dtype = jnp.result_type(ids)
    if not jnp.issubdtype(dtype, jnp.integer) and dtype != jnp.bool_:
        raise ValueError(
            f"{name} got {what} of dtype {dtype}; class ids are integers or booleans:"
            " write jnp.argmax(logits, axis=-1), probabilities > 0.5, or"
            f" {what}.astype(jnp.int32) of ids that are floats."
        )
