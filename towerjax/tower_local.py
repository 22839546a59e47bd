"""What has each tower of its own? Tower-local variables, and how they are read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives import CrossTowerOps, sum_rows_over_towers
from towerjax.executors import first_tower_of_device
from towerjax.placement import TowerAxes, waited
from towerjax.reduce import (
    add_pairwise,
    addable,
    as_bits,
    check_addable,
    from_bits,
    key_data,
    like_key,
    reduced_dtype,
)
from towerjax.types import Layout, PyTree, Reduction, named_leaves
from towerjax.variables import TowerLocal, is_variable, named


def is_local(x: Any) -> bool:
    """Is it a tower-local variable?

    Args:
      x: Anything.

    Returns:
      True for ``TowerLocal``.
    """
    return isinstance(x, TowerLocal)


def layouts_of(variables: PyTree) -> PyTree:
    """Where each part of the variables lies.

    Args:
      variables: Any pytree, which may hold ``TowerLocal``.

    Returns:
      A prefix tree of layouts: one for each ``TowerLocal`` and each other leaf.
    """
    return jax.tree.map(
        lambda x: Layout.PER_TOWER if is_local(x) else Layout.MIRRORED,
        variables,
        is_leaf=is_local,
    )


def local_values(local: PyTree) -> PyTree:
    """The tree with each ``TowerLocal`` replaced by its value.

    Args:
      local: A pytree of ``TowerLocal``.

    Returns:
      The values alone.
    """
    return jax.tree.map(lambda x: x.value, local, is_leaf=is_local)


def with_local_values(local: PyTree, values: PyTree) -> PyTree:
    """The inverse of `local_values`.

    Args:
      local: A pytree of ``TowerLocal``.
      values: What `local_values` returned, changed.

    Returns:
      The tree of ``TowerLocal`` with these values.
    """
    return jax.tree.map(
        lambda x, value: dataclasses.replace(x, value=value),
        local,
        values,
        is_leaf=is_local,
    )


def stacked_local(local: PyTree, num_towers: int) -> PyTree:
    """Initial tower-local variables, one copy a tower.

    Args:
      local: A pytree of ``TowerLocal``, or None.
      num_towers: ``T``.

    Returns:
      The tree with leaves ``[T, ...]``.

    Raises:
      ValueError: A leaf is not inside a ``TowerLocal``.
    """
    local = checked_local(local)

    def stack(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return jnp.broadcast_to(x, (num_towers, *x.shape))
        return np.broadcast_to(np.asarray(x), (num_towers, *np.shape(x)))

    return jax.tree.map(stack, local)


def checked_local(local: PyTree) -> PyTree:
    """Tower-local variables, once each says how it is read.

    Args:
      local: A pytree of ``TowerLocal``, or None.

    Returns:
      The pytree; an empty one for None.

    Raises:
      ValueError: A leaf is not inside a ``TowerLocal``.
    """
    local = {} if local is None else local
    bare = [
        name
        for name, leaf in named_leaves("local", local, is_leaf=is_local)
        if not is_local(leaf)
    ]
    if bare:
        raise ValueError(
            f"{', '.join(bare)}: a tower-local variable says how it is read as one"
            " value. Wrap it: tj.TowerLocal(value, tj.Reduction.MEAN)."
        )
    return local


def read_local(local: PyTree) -> PyTree:
    """Tower-local variables as one value each, from outside a step.

    Args:
      local: A ``TowerLocal`` of a ``TrainState``, or a pytree of them.

    Returns:
      The values, SUM, MEAN or ONLY_FIRST_TOWER of the towers' copies.

    Raises:
      ValueError: A variable's reduction is NONE.

    Example:
      >>> read_local(TowerLocal(jnp.array([1.0, 3.0]), Reduction.MEAN)).item()
      2.0
    """
    variables = jax.tree.leaves(local, is_leaf=is_local)
    for variable in variables:
        if variable.reduction is Reduction.NONE:
            raise ValueError(
                f"{named(variable)} has Reduction.NONE, so it has no one value. Give it"
                " SUM, MEAN or ONLY_FIRST_TOWER, or read each tower's own with unwrap."
            )
        check_addable(variable.reduction, variable.value)
    return waited(_read(local))


def read_variables(tree: PyTree) -> PyTree:
    """The tree with each variable as its one value.

    Args:
      tree: A pytree that may hold ``TowerLocal`` and ``MirroredVar``.

    Returns:
      The tree; tower-local variables are read together.

    Raises:
      ValueError: A tower-local variable's reduction is NONE.
    """
    nodes = jax.tree.leaves(tree, is_leaf=is_variable)
    values = iter(read_local([x for x in nodes if is_local(x)]))

    def one(x: Any) -> Any:
        if is_local(x):
            return next(values)
        return x.value if is_variable(x) else x

    return jax.tree.map(one, tree, is_leaf=is_variable)


@jax.jit
def _read(local: PyTree) -> PyTree:
    """All in one program; added in tower order, so that bits do not depend on ``D``."""

    def one(reduction: Reduction, x: jax.Array) -> jax.Array:
        if reduction is Reduction.ONLY_FIRST_TOWER:
            return x[0]
        dtype = reduced_dtype(reduction, x.dtype)
        total = add_pairwise(x.astype(addable(dtype)))
        if reduction is Reduction.MEAN:
            total = total / x.shape[0]
        return total.astype(dtype)

    def read(variable: TowerLocal) -> PyTree:
        return jax.tree.map(lambda x: one(variable.reduction, x), variable.value)

    return jax.tree.map(read, local, is_leaf=is_local)


def read_local_over_towers(
    local: PyTree, ops: CrossTowerOps, axes: TowerAxes
) -> PyTree:
    """Tower-local variables as one value each, inside a device function.

    Args:
      local: A pytree of ``TowerLocal`` with leaves ``[k, ...]``.
      ops: How the sums travel.
      axes: The axes that the towers meet over.

    Returns:
      The values, mirrored; None for a variable whose reduction is NONE.
    """
    ids = first_tower_of_device(axes) + jnp.arange(axes.num_local)

    def addend(variable: TowerLocal) -> PyTree:
        def one(x: jax.Array) -> jax.Array:
            if variable.reduction is Reduction.ONLY_FIRST_TOWER:
                bits = as_bits(x)
                first = (ids == 0).reshape((-1,) + (1,) * (bits.ndim - 1))
                return jnp.where(first, bits, jnp.zeros_like(bits))
            return x.astype(addable(reduced_dtype(variable.reduction, x.dtype)))

        if variable.reduction is Reduction.NONE:
            return None
        return jax.tree.map(lambda x: one(key_data(x)), variable.value)

    def finish(variable: TowerLocal, total: PyTree) -> PyTree:
        def one(total: jax.Array, x: jax.Array) -> jax.Array:
            data = key_data(x)
            if variable.reduction is Reduction.ONLY_FIRST_TOWER:
                total = total.astype(as_bits(data).dtype)  # a sum of uint8 is uint32
                return like_key(from_bits(total, data.dtype), x)
            if variable.reduction is Reduction.MEAN:
                total = total / axes.num_towers
            total = total.astype(reduced_dtype(variable.reduction, data.dtype))
            return like_key(total, x)

        if variable.reduction is Reduction.NONE:
            return None
        return jax.tree.map(one, total, variable.value)

    rows = jax.tree.map(addend, local, is_leaf=is_local)
    totals = sum_rows_over_towers(ops, rows, axes) if jax.tree.leaves(rows) else rows
    return jax.tree.map(finish, local, totals, is_leaf=is_local)
