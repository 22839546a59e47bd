"""Reduce or join the values of T towers, inside or outside a tower."""

import dataclasses
import functools
from typing import Any, TypeVar, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.sparse_rows import (
    IndexedRows,
    all_rows_of,
    end_to_end,
    flatten_stack,
    is_rows,
    sum_dtype,
    widen_indices,
)
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.mesh.placement import TowerAxes
from towerjax.types import PyTree, Reduction
from towerjax.types.options import is_whole, refuse_option
from towerjax.types.refusals import a_type
from towerjax.types.trees import is_key, key_data, like_key, named_leaves

_T = TypeVar("_T")


def choose(reduction: Reduction, *, total: _T, mean: _T, first: _T) -> _T:
    """Pick one of three arguments: that for SUM, for MEAN or for ONLY_FIRST_TOWER."""
    match reduction:
        case Reduction.SUM:
            return total
        case Reduction.MEAN:
            return mean
        case Reduction.ONLY_FIRST_TOWER:
            return first
        case Reduction.NONE:
            raise ValueError(
                "Reduction.NONE says that a value must not be reduced, so it has no one"
                " value. Give it SUM, MEAN or ONLY_FIRST_TOWER, or read all values with"
                " unwrap."
            )
        case _:
            assert_never(reduction)


def takes_first(reduction: Reduction) -> bool:
    """Return whether the first tower's value is the result, and nothing is added."""
    return choose(reduction, total=False, mean=False, first=True)


def multiplies(reduction: Reduction) -> bool:
    """Return whether reducing ``T`` equal values gives ``T`` times the value."""
    return choose(reduction, total=True, mean=False, first=False)


def check_reduction(reduction: Any, value: PyTree = ()) -> None:
    """Raise unless ``reduction`` can reduce values of this kind to one value."""
    if not isinstance(reduction, Reduction):
        raise ValueError(
            f"reduction is {reduction!r:.200}, which is not a reduction. Write"
            " tj.Reduction.SUM, MEAN or ONLY_FIRST_TOWER."
        )
    if not takes_first(reduction) and any(map(is_key, jax.tree.leaves(value))):
        raise ValueError(
            f"{reduction!r} got a random key, which is not a number. Use"
            " Reduction.ONLY_FIRST_TOWER for one key that all towers share."
        )


def one_of(reduction: Reduction, stacked: PyTree) -> PyTree:
    """Reduce the towers' values ``[T, ...]`` to one value.

    Arrays are added in pairs; rows of ``IndexedRows`` are joined.
    """

    def reduce_leaf(x: Any) -> Any:
        if is_rows(x):
            return share_of_rows(reduction, flatten_stack(x), len(x.indices))
        x = jnp.asarray(x)
        total = add_pairwise(as_addend(reduction, x))
        return from_total(reduction, total, x.shape[0], x.dtype)

    if takes_first(reduction):
        return jax.tree.map(lambda x: jnp.asarray(x)[0], stacked)
    return jax.tree.map(reduce_leaf, stacked, is_leaf=is_rows)


def share_of_rows(reduction: Reduction, rows: Any, num_towers: int) -> Any:
    """Reduce the towers' ``IndexedRows`` by SUM or MEAN.

    ``rows`` holds the rows of all towers, joined. For a MEAN they are divided by
    ``num_towers``.
    """
    values = from_total(reduction, rows.values, num_towers, rows.values.dtype)
    return dataclasses.replace(rows, values=values)


def reduce_rows(reduction: Reduction, towers: list[Any]) -> IndexedRows:
    """Reduce the towers' ``IndexedRows``, whose numbers of rows may differ.

    A tower may also give an array ``[N, ...]``, which stands for all rows of the table.
    """
    for tower, x in enumerate(towers):
        is_array = isinstance(x, jax.Array | np.ndarray) and np.ndim(x)
        if not (is_rows(x) or is_array):
            raise ValueError(
                f"Tower {tower} has {a_type(x)} where other towers have IndexedRows."
                " Give IndexedRows, or an array [N, ...] for all rows."
            )
    rows = [x if is_rows(x) else all_rows_of(x) for x in towers]
    for tower, x in enumerate(rows):
        if x.dense_shape != rows[0].dense_shape:
            raise ValueError(
                f"Tower {tower} has rows of an array of shape {x.dense_shape} but tower"
                f" 0 of {rows[0].dense_shape}. Give all towers the same shape."
            )
    if takes_first(reduction):
        rows = rows[:1]
    joined = end_to_end(rows, rows[0].dense_shape)
    return share_of_rows(reduction, joined, len(rows))


def reduce_over_towers(
    reduction: Reduction, value: PyTree, tower_id: jax.Array, axes: TowerAxes
) -> PyTree:
    """Reduce the towers' values inside a tower; the result is the same on each."""
    is_first = takes_first(reduction)

    def reduce_leaf(x: Any) -> Any:
        if is_rows(x):  # rows are gathered, never added
            return one_of(reduction, gather_over_towers(x, axes))
        x = drop_weak_type(x)
        if not x.size:  # no collective is needed
            return jnp.zeros(x.shape, reduced_dtype(reduction, x.dtype))
        if is_first:
            return take_first(x, tower_id, axes.names) if axes.names else x
        # Under vmap JAX would add bfloat16 in bfloat16, and elsewhere in float32.
        total = as_addend(reduction, x)
        total = lax.psum(hide_complex(total), axes.names) if axes.names else total
        return from_total(reduction, total, axes.num_towers, x.dtype)

    def with_keys(x: Any) -> Any:
        return like_key(reduce_leaf(key_data(x)), x)

    return jax.tree.map(with_keys, value, is_leaf=None if is_first else is_rows)


def hide_complex(x: jax.Array) -> jax.Array:
    """Put a complex addend of a sum over devices behind a barrier."""
    # XLA aborts the process if all elements of a complex addend are one constant, such
    # as the gradient of an unused parameter (JAX 0.10 to 0.12). A barrier hides the
    # constant.
    return lax.optimization_barrier(x) if jnp.iscomplexobj(x) else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def take_first(x: jax.Array, number: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Send the value of tower (or device) 0 to all, bit for bit.

    ``number`` is the index of this tower or device.
    """
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
    """Read the bits of ``x`` as integers.

    Integers can be added over towers, while a sum of floats changes NaNs and -0.0.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Make the values of ``dtype`` that have these bits; see `as_bits`."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return bits.astype(dtype)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.bitcast_convert_type(bits, dtype)
    parts = lax.bitcast_convert_type(bits, jnp.finfo(dtype).dtype)
    return lax.complex(parts[..., 0], parts[..., 1])


def drop_weak_type(x: Any) -> jax.Array:
    """Make an array of ``x`` that has no weak type."""
    x = jnp.asarray(x)
    return jnp.asarray(x, x.dtype)


def reduced_dtype(reduction: Reduction, dtype: Any) -> Any:
    """Find the dtype that values of ``dtype`` have after a reduction."""
    added = choose(reduction, total=jnp.sum, mean=jnp.mean, first=None)
    if added is None or jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return jax.eval_shape(added, jax.ShapeDtypeStruct((1,), dtype)).dtype


def as_addend(reduction: Reduction, x: jax.Array) -> jax.Array:
    """Cast a value to the dtype in which its SUM or MEAN is added."""
    return x.astype(sum_dtype(reduced_dtype(reduction, x.dtype)))


def from_total(
    reduction: Reduction, total: jax.Array, count: int, dtype: Any
) -> jax.Array:
    """Make the SUM or MEAN of ``count`` values of a dtype from their sum."""
    divisor = choose(reduction, total=None, mean=count, first=None)
    if divisor is not None:
        total = total / divisor
    return total.astype(reduced_dtype(reduction, dtype))


def add_pairwise(rows: jax.Array) -> jax.Array:
    """Add the rows in one fixed order: in neighbouring pairs, again and again."""
    while rows.shape[0] > 1:
        paired = rows.shape[0] // 2 * 2
        sums = rows[0:paired:2] + rows[1:paired:2]
        rows = jnp.concatenate([sums, rows[paired:]]) if paired < len(rows) else sums
    return rows[0]


def add_rows(x: jax.Array) -> jax.Array:
    """Add along the first dim, which has one row for each tower of the device."""
    # XLA:CPU fuses a sum with the product that it adds up, and then computes both
    # element by element. That is 2 to 5 times slower than these additions.
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return add_pairwise(x)
    return x.sum(axis=0, dtype=x.dtype)


def all_gather_rows(rows: PyTree, axes: TowerAxes) -> PyTree:
    """Gather each device's leaves ``[k, ...]`` to ``[D * k, ...]`` on all devices."""
    if not axes.device_axis:
        return rows
    return jax.tree.map(lambda x: lax.all_gather(x, DEVICE_AXIS, tiled=True), rows)


def gather_over_towers(value: PyTree, axes: TowerAxes) -> PyTree:
    """Gather the towers' values to leaves ``[T, ...]``, inside a tower."""

    def gather_leaf(x: jax.Array) -> jax.Array:
        x = drop_weak_type(x)
        shape = (axes.num_towers, *x.shape)
        # JAX cannot gather over an axis of vmap and an axis of a mesh in one call.
        for name in reversed(axes.names):
            x = lax.all_gather(x, name)
        return x.reshape(shape)

    return jax.tree.map(lambda x: like_key(gather_leaf(key_data(x)), x), value)


def check_joins(value: PyTree, axis: Any) -> None:
    """Raise unless the towers' values can be joined along the one dim ``axis``."""
    if not is_whole(axis):
        refuse_option("axis", axis, "an int, one dim of a tower's value")
    for name, x in named_leaves("value", value, is_leaf=is_rows):
        shape = x.dense_shape if is_rows(x) else jnp.shape(x)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"axis={axis} is not a dim of {name} of shape {shape}. Name one of the"
                " dims of a tower's value. For a scalar x, give x[None] with axis=0."
            )
        if is_rows(x) and axis % len(shape):
            raise ValueError(
                f"axis={axis} cannot join IndexedRows of an array of shape {shape},"
                " which are joined only along dim 0. Give rows.to_dense() for another"
                " dim."
            )


def join_rows(rows: Any, axis: int) -> Any:
    """Join the towers' values ``[T, ...]``, or stacked ``IndexedRows``, along a dim."""
    if is_rows(rows):
        (count, _) = rows.indices.shape
        (size, *rest) = rows.dense_shape
        first = size * jnp.arange(count)[:, None]
        indices = _shift_indices(rows, first, count * size)
        return flatten_stack(IndexedRows(rows.values, indices, (count * size, *rest)))
    axis %= rows.ndim - 1
    shape = list(rows.shape[1:])
    shape[axis] *= rows.shape[0]
    return jnp.moveaxis(rows, 0, axis).reshape(shape)


def _shift_indices(rows: IndexedRows, first: Any, size: int) -> jax.Array:
    """Shift a tower's indices to where its rows begin in an array of all towers' rows.

    ``first`` is that position, and ``size`` the number of all rows. An index out of
    range becomes ``size``, so that it names no row of another tower.
    """
    indices = widen_indices(rows.indices)
    exist = (indices >= 0) & (indices < rows.dense_shape[0])
    return jnp.where(exist, indices + jnp.asarray(first, indices.dtype), size)
