"""Apply a Reduction to the values of T towers, inside a tower or outside."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, Reduction, named_leaves
from towerjax.types.leaves import is_key, key_data, like_key, widen_dtype
from towerjax.types.options import is_whole


def check_reduction(reduction: Any) -> None:
    """Raise unless it is a member of ``Reduction`` that gives one value."""
    if not isinstance(reduction, Reduction):
        raise ValueError(
            f"reduction is {reduction!r:.200}; write tj.Reduction.SUM, MEAN or"
            " ONLY_FIRST_TOWER."
        )
    if reduction is Reduction.NONE:
        raise ValueError(
            "Reduction.NONE says that the value is not to be reduced, so it has no one"
            " value. Give it SUM, MEAN or ONLY_FIRST_TOWER, or read each tower's own"
            " with unwrap."
        )


def check_addable(reduction: Any, value: PyTree) -> None:
    """Raise unless the reduction can reduce values of such dtypes."""
    check_reduction(reduction)
    if reduction is not Reduction.ONLY_FIRST_TOWER and any(
        map(is_key, jax.tree.leaves(value))
    ):
        raise ValueError(
            f"{reduction!r} of a random key, which is no number. Use"
            " Reduction.ONLY_FIRST_TOWER for one key that all towers share."
        )


def reduce_stacked(reduction: Reduction, stacked: PyTree) -> PyTree:
    """Reduce leaves ``[T, ...]`` to one value, adding neighbours in pairs."""
    check_reduction(reduction)

    def one(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if reduction is Reduction.ONLY_FIRST_TOWER:
            return x[0]
        total = add_pairwise(as_addend(reduction, x))
        return from_total(reduction, total, x.shape[0], x.dtype)

    return jax.tree.map(one, stacked)


def reduce_over_towers(
    reduction: Reduction, value: PyTree, tower_id: jax.Array, axes: TowerAxes
) -> PyTree:
    """Reduce the towers' values inside a tower; the result is the same on each."""
    check_addable(reduction, value)

    def one(x: jax.Array) -> jax.Array:
        x = drop_weak_type(x)
        if not x.size:  # the same on all towers without a collective
            return jnp.zeros(x.shape, reduced_dtype(reduction, x.dtype))
        if reduction is Reduction.ONLY_FIRST_TOWER:
            return take_first(x, tower_id, axes.names) if axes.names else x
        # JAX would add bfloat16 in bfloat16 under vmap, and in float32 elsewhere.
        total = as_addend(reduction, x)
        total = lax.psum(total, axes.names) if axes.names else total
        return from_total(reduction, total, axes.num_towers, x.dtype)

    return jax.tree.map(lambda x: like_key(one(key_data(x)), x), value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def take_first(x: jax.Array, number: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The value of the tower or device with ``number == 0``, bit for bit, on each."""
    bits = as_bits(x)
    bits = jnp.where(number == 0, bits, jnp.zeros_like(bits))
    return from_bits(lax.psum(bits, names), x.dtype)


@take_first.defjvp
def _take_first_jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    x, number = primals
    if tangents[0].dtype == jax.dtypes.float0:
        return take_first(x, number, names), tangents[0]
    tangent = jnp.where(number == 0, tangents[0], jnp.zeros_like(tangents[0]))
    return take_first(x, number, names), lax.psum(tangent, names)


def as_bits(x: jax.Array) -> jax.Array:
    """The same bits as integers, since a sum of floats changes -0.0 and NaNs."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_bits`."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bits.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.bitcast_convert_type(bits, dtype)
    parts = lax.bitcast_convert_type(bits, jnp.finfo(dtype).dtype)
    return lax.complex(parts[..., 0], parts[..., 1])


def drop_weak_type(x: Any) -> jax.Array:
    """The array without a weak type."""
    x = jnp.asarray(x)
    return jnp.asarray(x, x.dtype)


def reduced_dtype(reduction: Reduction, dtype: Any) -> Any:
    """The dtype of a reduced value."""
    if reduction is Reduction.ONLY_FIRST_TOWER or jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    reduce = jnp.sum if reduction is Reduction.SUM else jnp.mean
    return jax.eval_shape(reduce, jax.ShapeDtypeStruct((1,), dtype)).dtype


def as_addend(reduction: Reduction, x: jax.Array) -> jax.Array:
    """A value in the dtype in which its SUM or MEAN is added."""
    return x.astype(sum_dtype(reduced_dtype(reduction, x.dtype)))


def from_total(
    reduction: Reduction, total: jax.Array, count: int, dtype: Any
) -> jax.Array:
    """The SUM or MEAN of ``count`` values of a dtype, from their sum."""
    if reduction is Reduction.MEAN:
        total = total / count
    return total.astype(reduced_dtype(reduction, dtype))


def sum_dtype(dtype: Any) -> Any:
    """The dtype to add in: float32 for 16-bit floats, int32 for booleans."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return widen_dtype(dtype)
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype


def add_pairwise(rows: jax.Array) -> jax.Array:
    """Add the rows in one fixed order: neighbours, then their sums, and so on."""
    while rows.shape[0] > 1:
        paired = rows.shape[0] // 2 * 2
        sums = rows[0:paired:2] + rows[1:paired:2]
        rows = jnp.concatenate([sums, rows[paired:]]) if paired < len(rows) else sums
    return rows[0]


def check_dim(value: PyTree, axis: Any) -> None:
    """Raise unless ``axis`` is one whole number, and a dim of every leaf."""
    if not is_whole(axis):
        raise ValueError(
            f"axis={axis!r} must be an int, one dim of a tower's value. For several"
            " dims, call once and then use jnp on the result."
        )
    for name, x in named_leaves("value", value):
        if not -jnp.ndim(x) <= axis < jnp.ndim(x):
            raise ValueError(
                f"axis={axis} is not a dim of {name} of shape {jnp.shape(x)}. Name one"
                " of a tower's own dims; a number gets one by x[None]."
            )


def join_rows(rows: jax.Array, axis: int) -> jax.Array:
    """Concatenate the rows of ``[T, ...]`` along dim ``axis`` of a row."""
    axis %= rows.ndim - 1
    shape = list(rows.shape[1:])
    shape[axis] *= rows.shape[0]
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


def all_gather_rows(rows: PyTree, axes: TowerAxes) -> PyTree:
    """Gather each device's leaves ``[k, ...]`` to ``[D * k, ...]`` on all devices."""
    if not axes.device_axis:
        return rows
    return jax.tree.map(lambda x: lax.all_gather(x, DEVICE_AXIS, tiled=True), rows)


def gather_over_towers(value: PyTree, axes: TowerAxes) -> PyTree:
    """Gather the towers' values to leaves ``[T, ...]``, inside a tower."""

    def one(x: jax.Array) -> jax.Array:
        x = drop_weak_type(x)
        shape = (axes.num_towers, *x.shape)
        # JAX cannot gather over a vmap axis and a mesh axis in one call.
        for name in reversed(axes.names):
            x = lax.all_gather(x, name)
        return x.reshape(shape)

    return jax.tree.map(lambda x: like_key(one(key_data(x)), x), value)
