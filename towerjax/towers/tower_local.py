"""Stack, check and read tower-local variables: one copy a tower."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.collectives import CrossTowerOps
from towerjax.collectives.base import sum_rows_over_towers
from towerjax.collectives.reduce import (
    as_addend,
    check_addable,
    from_total,
    reduce_stacked,
    take_first,
)
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes, wait_on_cpus
from towerjax.mesh.processes import says_if_alone
from towerjax.towers.executors import is_of_one_tower
from towerjax.towers.tower_axis import first_tower_of_device
from towerjax.towers.variables import TowerLocal, Variable, label, plain
from towerjax.types import Layout, PyTree, Reduction, named_leaves
from towerjax.types.leaves import (
    few,
    is_key,
    key_data,
    like_key,
    native,
    parts_of,
    put_parts,
    refuse_unheld,
)


def is_local(x: Any) -> bool:
    """Whether ``x`` is a tower-local variable."""
    return isinstance(x, TowerLocal)


def refuse_own_copy(variable: Variable) -> None:
    """Raise in a tower function for the tower's own copy of a variable."""
    if is_of_one_tower(variable.value):
        raise ValueError(
            f"{label(variable)} is the tower's own copy in a tower function: read"
            " .value, change it with tower.assign, or meet first, with"
            " tower.merge_call(fn, variable), whose function gets all copies."
        )


def layouts_of(tree: PyTree, is_own: Callable[[Any], bool] = is_local) -> PyTree:
    """The layout of each part: PER_TOWER for those that ``is_own`` finds."""
    return jax.tree.map(
        lambda x: Layout.PER_TOWER if is_own(x) else Layout.MIRRORED,
        tree,
        is_leaf=is_own,
    )


def with_local_values(local: PyTree, values: PyTree) -> PyTree:
    """Replace the values of tower-local variables: the inverse of `plain`."""
    return jax.tree.map(
        lambda x, value: dataclasses.replace(x, value=value),
        local,
        values,
        is_leaf=is_local,
    )


def stack_local(local: PyTree, num_towers: int, *, shapes: bool = False) -> PyTree:
    """Copy initial tower-local variables for each tower, to leaves ``[T, ...]``."""
    local = check_tower_local(local, shapes=shapes)

    def stack(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((num_towers, *x.shape), x.dtype)
        if is_key(x) or isinstance(x, Tracer):
            return jnp.broadcast_to(x, (num_towers, *x.shape))
        return np.broadcast_to(native(np.asarray(x)), (num_towers, *np.shape(x)))

    return jax.tree.map(stack, local)


def check_tower_local(local: PyTree, *, shapes: bool = False) -> PyTree:
    """Raise unless all of ``local`` are tower-local variables; None becomes {}."""
    local = {} if local is None else local
    bare = [
        name
        for name, leaf in named_leaves("local", local, is_leaf=is_local)
        if not is_local(leaf)
    ]
    if bare:
        raise ValueError(
            f"{', '.join(few(bare))}: a tower-local variable says how it is read as one"
            " value. Wrap it: tj.TowerLocal(value, tj.Reduction.MEAN)."
        )
    refuse_unheld("local", plain(local), shapes=shapes)
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
        refuse_own_copy(variable)
        if variable.reduction is Reduction.NONE:
            raise ValueError(
                f"{label(variable)} has Reduction.NONE, so it has no one value. Give it"
                " SUM, MEAN or ONLY_FIRST_TOWER, or read each tower's own with unwrap."
            )
        check_addable(variable.reduction, variable.value)
    with says_if_alone("tower-local values are read"):
        return wait_on_cpus(_read_all(local))


def read_variables(tree: PyTree) -> PyTree:
    """Replace each variable in the tree by its one value."""
    values = read_local(parts_of(TowerLocal, tree))
    return plain(put_parts(TowerLocal, tree, values))


@jax.jit
def _read_all(local: PyTree) -> PyTree:
    """Read all in one program, added in pairs: bits do not depend on ``D``."""
    return jax.tree.map(
        lambda x: reduce_stacked(x.reduction, x.value), local, is_leaf=is_local
    )


def read_local_over_towers(
    local: PyTree, ops: CrossTowerOps, axes: TowerAxes
) -> PyTree:
    """Tower-local variables as one value each, inside a device function."""
    first_tower = first_tower_of_device(axes)

    def of_first(x: jax.Array) -> jax.Array:
        first = key_data(x)[0]
        if axes.device_axis:
            first = take_first(first, first_tower, (DEVICE_AXIS,))
        return like_key(first, x)

    def addend(variable: TowerLocal) -> PyTree:
        if variable.reduction in (Reduction.NONE, Reduction.ONLY_FIRST_TOWER):
            return None
        return jax.tree.map(partial(as_addend, variable.reduction), variable.value)

    def finish(variable: TowerLocal, total: PyTree) -> PyTree:
        def one(total: jax.Array, x: jax.Array) -> jax.Array:
            return from_total(variable.reduction, total, axes.num_towers, x.dtype)

        if variable.reduction is Reduction.NONE:
            return None
        if variable.reduction is Reduction.ONLY_FIRST_TOWER:
            return jax.tree.map(of_first, variable.value)
        return jax.tree.map(one, total, variable.value)

    rows = jax.tree.map(addend, local, is_leaf=is_local)
    totals = sum_rows_over_towers(ops, rows, axes) if jax.tree.leaves(rows) else rows
    return jax.tree.map(finish, local, totals, is_leaf=is_local)
