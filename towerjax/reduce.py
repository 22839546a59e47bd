"""What is one value of T towers' values? A Reduction, applied inside or outside."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.placement import DEVICE_AXIS, LOCAL_AXIS, TowerAxes
from towerjax.types import PyTree, Reduction, named_leaves


def check_reduction(reduction: Any) -> None:
    """Raise unless it is a member of ``Reduction`` that gives one value.

    Args:
      reduction: What the caller passed.

    Raises:
      ValueError: It is ``Reduction.NONE``, a string, or anything else.
    """
    if not isinstance(reduction, Reduction):
        raise ValueError(
            f"reduction is {reduction!r}; write tj.Reduction.SUM, MEAN or"
            " ONLY_FIRST_TOWER."
        )
    if reduction is Reduction.NONE:
        raise ValueError(
            "Reduction.NONE says that the value is not to be reduced, so it has no one"
            " value. Give it SUM, MEAN or ONLY_FIRST_TOWER, or read each tower's own"
            " with unwrap."
        )


def check_addable(reduction: Any, value: PyTree) -> None:
    """Raise unless the reduction gives one value of such values.

    Args:
      reduction: What the caller passed.
      value: A pytree of arrays.

    Raises:
      ValueError: ``reduction`` gives no one value, or would add random keys.
    """
    check_reduction(reduction)
    if reduction is not Reduction.ONLY_FIRST_TOWER and any(
        map(_is_key, jax.tree.leaves(value))
    ):
        raise ValueError(
            f"{reduction!r} of a random key, which is no number. Use"
            " Reduction.ONLY_FIRST_TOWER for one key that all towers share."
        )


def reduce_stacked(reduction: Reduction, stacked: PyTree) -> PyTree:
    """One value of the towers' values that lie side by side.

    Args:
      reduction: SUM, MEAN (integers become floats) or ONLY_FIRST_TOWER.
      stacked: Leaves ``[T, ...]``.

    Returns:
      Leaves ``[...]``.

    Raises:
      ValueError: ``reduction`` gives no one value.

    Example:
      >>> reduce_stacked(Reduction.MEAN, jnp.array([1.0, 4.0])).item()
      2.5
    """
    check_reduction(reduction)

    def one(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if reduction is Reduction.ONLY_FIRST_TOWER:
            return x[0]
        # jnp.sum and jnp.mean add bfloat16 in float32 and round once.
        return x.sum(axis=0) if reduction is Reduction.SUM else x.mean(axis=0)

    return jax.tree.map(one, stacked)


def reduce_over_towers(
    reduction: Reduction, value: PyTree, tower_id: jax.Array, axes: TowerAxes
) -> PyTree:
    """One value of the towers' values, from inside a tower; the same on each.

    The same dtypes as `reduce_stacked`, on one tower as on many.

    Args:
      reduction: SUM (booleans and small integers become int32), MEAN (integers
        become float32, or float64 in x64 mode) or ONLY_FIRST_TOWER (bit for bit).
      value: This tower's value, any shapes.
      tower_id: ``()`` int32.
      axes: The axes that the towers meet over.

    Returns:
      Like ``value``.

    Raises:
      ValueError: ``reduction`` gives no one value.
    """
    check_addable(reduction, value)

    def one(x: jax.Array) -> jax.Array:
        x = strong(x)
        dtype = reduced_dtype(reduction, x.dtype)
        if reduction is Reduction.ONLY_FIRST_TOWER:
            return _first_towers(x, tower_id, axes.names) if axes.names else x
        # Under vmap JAX would add bfloat16 in bfloat16, and elsewhere in float32.
        x = x.astype(addable(dtype))
        total = lax.psum(x, axes.names) if axes.names else x
        if reduction is Reduction.MEAN:
            total = total / axes.num_towers
        return total.astype(dtype)

    return jax.tree.map(lambda x: like_key(one(key_data(x)), x), value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _first_towers(
    x: jax.Array, tower_id: jax.Array, names: tuple[str, ...]
) -> jax.Array:
    bits = as_bits(x)
    bits = jnp.where(tower_id == 0, bits, jnp.zeros_like(bits))
    return from_bits(lax.psum(bits, names), x.dtype)


@_first_towers.defjvp
def _first_towers_jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    x, tower_id = primals
    if tangents[0].dtype == jax.dtypes.float0:
        return _first_towers(x, tower_id, names), tangents[0]
    tangent = jnp.where(tower_id == 0, tangents[0], jnp.zeros_like(tangents[0]))
    return _first_towers(x, tower_id, names), lax.psum(tangent, names)


def as_bits(x: jax.Array) -> jax.Array:
    """Numbers as integers of the same bits, to which adding 0 changes nothing.

    As floats, -0.0 would become 0.0, and NaNs lose their bits.

    Args:
      x: Booleans, integers, floats or complex numbers ``[...]``.

    Returns:
      Integers ``[...]``, or ``[..., 2]`` for complex numbers.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_bits`.

    Args:
      bits: What became of ``as_bits(x)``.
      dtype: That of ``x``.

    Returns:
      Numbers ``[...]``.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bits.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.bitcast_convert_type(bits, dtype)
    parts = lax.bitcast_convert_type(bits, jnp.finfo(dtype).dtype)
    return lax.complex(parts[..., 0], parts[..., 1])


def strong(x: Any) -> jax.Array:
    """The array with a dtype that others do not override.

    Args:
      x: An array or a Python number.

    Returns:
      The array, of no weak type.
    """
    x = jnp.asarray(x)
    return jnp.asarray(x, x.dtype)


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_data(x: jax.Array) -> jax.Array:
    """The numbers of a typed key, which no collective takes; else the array itself.

    Args:
      x: An array or typed keys.

    Returns:
      An array of numbers.
    """
    return jax.random.key_data(x) if _is_key(x) else x


def like_key(data: jax.Array, x: jax.Array) -> jax.Array:
    """The inverse of `key_data`.

    Args:
      data: What became of ``key_data(x)``.
      x: An array or typed keys.

    Returns:
      ``data``, as keys where ``x`` is keys.
    """
    if not _is_key(x):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def reduced_dtype(reduction: Reduction, dtype: Any) -> Any:
    """The dtype of a reduced value.

    Args:
      reduction: SUM, MEAN or ONLY_FIRST_TOWER.
      dtype: Of the towers' values.

    Returns:
      A dtype.
    """
    # A sum or mean of floats is of their dtype.
    if reduction is Reduction.ONLY_FIRST_TOWER or jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    reduce = jnp.sum if reduction is Reduction.SUM else jnp.mean
    return jax.eval_shape(reduce, jax.ShapeDtypeStruct((1,), dtype)).dtype


def addable(dtype: Any) -> Any:
    """The dtype to add in: 16-bit floats in float32, booleans as integers.

    Args:
      dtype: Of the result.

    Returns:
      A dtype.
    """
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype


def add_pairwise(rows: jax.Array) -> jax.Array:
    """The rows added in one fixed order: neighbours, then their sums, and so on.

    Args:
      rows: ``[n, ...]``; an odd last one waits.

    Returns:
      ``[...]``.
    """
    while rows.shape[0] > 1:
        paired = rows.shape[0] // 2 * 2
        sums = rows[0:paired:2] + rows[1:paired:2]
        rows = jnp.concatenate([sums, rows[paired:]]) if paired < len(rows) else sums
    return rows[0]


def check_axis(axis: Any) -> None:
    """Raise unless it is the number of one dim.

    Args:
      axis: What the caller passed.

    Raises:
      ValueError: It is no int.
    """
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise ValueError(
            f"axis={axis!r} must be an int, one dim of a tower's value. For several"
            " dims, call once and then use jnp on the result."
        )


def check_dim(value: PyTree, axis: int) -> None:
    """Raise unless every leaf has the dim.

    Args:
      value: A pytree of arrays.
      axis: The dim, negative from the end.

    Raises:
      ValueError: A leaf has no such dim; names it. ``axis`` is no int.
    """
    check_axis(axis)
    for name, x in named_leaves("value", value):
        if not -jnp.ndim(x) <= axis < jnp.ndim(x):
            raise ValueError(
                f"axis={axis} is not a dim of {name} of shape {jnp.shape(x)}."
            )


def join_rows(rows: jax.Array, axis: int) -> jax.Array:
    """Values that lie side by side, joined along a dim of theirs.

    Args:
      rows: ``[T, ...]``.
      axis: A dim of the values, negative from the end.

    Returns:
      ``[...]`` with ``T`` times the size along ``axis``.
    """
    axis %= rows.ndim - 1
    shape = list(rows.shape[1:])
    shape[axis] *= rows.shape[0]
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


def gather_over_towers(value: PyTree, axes: TowerAxes) -> PyTree:
    """The towers' values side by side, from inside a tower; the same on each.

    Args:
      value: This tower's value, any shapes, the same shapes on all towers.
      axes: The axes that the towers meet over.

    Returns:
      Leaves ``[T, ...]`` in tower order.
    """

    def one(x: jax.Array) -> jax.Array:
        x = strong(x)
        shape = (axes.num_towers, *x.shape)
        # One axis at a time: JAX gathers over a vmap axis and a mesh axis apart.
        if LOCAL_AXIS in axes.names:
            x = lax.all_gather(x, LOCAL_AXIS)
        if axes.device_axis:
            x = lax.all_gather(x, DEVICE_AXIS)
        return x.reshape(shape)

    return jax.tree.map(lambda x: like_key(one(key_data(x)), x), value)
