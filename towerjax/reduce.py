"""What is one value of T towers' values? A Reduction, applied inside or outside."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.placement import DEVICE_AXIS, LOCAL_AXIS, TowerAxes
from towerjax.types import PyTree, Reduction


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


def reduce_stacked(reduction: Reduction, stacked: PyTree) -> PyTree:
    """One value of the towers' values that lie side by side.

    Args:
      reduction: SUM, MEAN (at least float32) or ONLY_FIRST_TOWER.
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

    Args:
      reduction: SUM, MEAN (integers become float32) or ONLY_FIRST_TOWER.
      value: This tower's value, any shapes.
      tower_id: ``()`` int32.
      axes: The axes that the towers meet over.

    Returns:
      Like ``value``.

    Raises:
      ValueError: ``reduction`` gives no one value.
    """
    check_reduction(reduction)

    def one(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if reduction is Reduction.ONLY_FIRST_TOWER:
            x = jnp.where(tower_id == 0, x, jnp.zeros_like(x))
        if reduction is Reduction.MEAN:
            x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
        total = sum_over_axes(x, axes.names)
        return total / axes.num_towers if reduction is Reduction.MEAN else total

    return jax.tree.map(one, value)


def sum_over_axes(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The sum over mesh and vmap axes, 16-bit floats added in float32.

    Under ``vmap`` JAX would add bfloat16 in bfloat16, and elsewhere in float32.

    Args:
      x: This tower's value.
      names: Axis names; none returns ``x``.

    Returns:
      Like ``x``.
    """
    if not names:
        return x
    small = x.dtype in (jnp.bfloat16, jnp.float16)
    wide = x.astype(jnp.float32) if small else x
    if x.dtype == jnp.bool_:
        wide = x.astype(jnp.int32)
    return lax.psum(wide, names).astype(x.dtype if small else wide.dtype)


def gather_over_towers(value: PyTree, axes: TowerAxes) -> PyTree:
    """The towers' values side by side, from inside a tower; the same on each.

    Args:
      value: This tower's value, any shapes, the same shapes on all towers.
      axes: The axes that the towers meet over.

    Returns:
      Leaves ``[T, ...]`` in tower order.
    """

    def one(x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        shape = (axes.num_towers, *x.shape)
        # One axis at a time: JAX gathers over a vmap axis and a mesh axis apart.
        if LOCAL_AXIS in axes.names:
            x = lax.all_gather(x, LOCAL_AXIS)
        if axes.device_axis:
            x = lax.all_gather(x, DEVICE_AXIS)
        return x.reshape(shape)

    return jax.tree.map(one, value)
