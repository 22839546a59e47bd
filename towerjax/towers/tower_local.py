"""Stack, check and read tower-local variables: one copy a tower."""

import dataclasses
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
    from_total,
    one_of,
    take_first,
)
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes, wait_on_cpus
from towerjax.mesh.processes import says_if_alone
from towerjax.towers.executors import is_of_one_tower
from towerjax.towers.tower_axis import first_tower_of_device
from towerjax.towers.variables import TowerLocal, Variable, is_variable, label, plain
from towerjax.types import PyTree, Reduction, named_leaves
from towerjax.types.leaves import (
    few,
    is_key,
    key_data,
    like_key,
    listed,
    native,
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

    def stack(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(shape=(num_towers, *x.shape))
        is_host = not (is_key(x) or isinstance(x, Tracer))
        x = native(np.asarray(x)) if is_host else x
        broadcast = np.broadcast_to if is_host else jnp.broadcast_to
        return broadcast(x, (num_towers, *x.shape))

    return jax.tree.map(stack, check_tower_local(local, shapes=shapes))


def check_tower_local(local: PyTree, *, shapes: bool = False) -> PyTree:
    """Raise unless all of ``local`` are tower-local variables; None becomes {}."""
    local = {} if local is None else local
    named = named_leaves("local", local, is_leaf=is_local)
    if bare := [name for name, leaf in named if not is_local(leaf)]:
        raise ValueError(
            f"{', '.join(few(bare))}: a tower-local variable says how it is read as one"
            " value. Wrap it: tj.TowerLocal(value, tj.Reduction.MEAN)."
        )
    refuse_unheld("local", plain(local), shapes=shapes)
    return local


def read_local(local: PyTree) -> PyTree:
    """Replace each variable of a tree by its one value, from outside a step.

    Args:
      local: A ``TowerLocal`` of a ``TrainState``, or any pytree; what is no variable
        does not change.

    Returns:
      The tree: SUM, MEAN or ONLY_FIRST_TOWER of the towers' copies.

    Raises:
      ValueError: A tower-local variable has no one value; names all of them.

    Example:
      >>> read_local(TowerLocal(jnp.array([1.0, 3.0]), Reduction.MEAN)).item()
      2.0
    """
    found, problems = named_leaves("tree", local, is_leaf=is_variable), []
    for name, x in found:
        if not is_local(x):
            continue
        refuse_own_copy(x)
        has_keys = any(map(is_key, jax.tree.leaves(x.value)))
        adds = x.reduction is not Reduction.ONLY_FIRST_TOWER
        if x.reduction is Reduction.NONE or (adds and has_keys):
            problems.append(f"{name}: {label(x)} has {x.reduction!r}")
    if problems:
        raise ValueError(
            f"These tower-local variables have no one value: {listed(problems)}. Give"
            " them SUM, MEAN or ONLY_FIRST_TOWER (random keys: ONLY_FIRST_TOWER), leave"
            " them out of the tree, or read each tower's own with strategy.unwrap."
        )
    with says_if_alone("tower-local values are read"):
        values = wait_on_cpus(_read_all([x for _, x in found if is_local(x)]))
    return plain(put_parts(TowerLocal, local, values))


@jax.jit
def _read_all(local: PyTree) -> PyTree:
    """Read all in one program, added in pairs: bits do not depend on ``D``."""
    return jax.tree.map(lambda x: one_of(x.reduction, x.value), local, is_leaf=is_local)


def read_local_over_towers(
    local: PyTree, ops: CrossTowerOps, axes: TowerAxes
) -> PyTree:
    """Tower-local variables as one value each, inside a device function."""
    first_tower = first_tower_of_device(axes)

    def adds(variable: TowerLocal) -> bool:
        return variable.reduction in (Reduction.SUM, Reduction.MEAN)

    def addend(variable: TowerLocal) -> PyTree:
        to_addend = partial(as_addend, variable.reduction)
        return jax.tree.map(to_addend, variable.value) if adds(variable) else None

    def of_first(x: jax.Array) -> jax.Array:
        first = key_data(x)[0]
        if axes.device_axis:
            first = take_first(first, first_tower, (DEVICE_AXIS,))
        return like_key(first, x)

    def of_total(reduction: Reduction, total: jax.Array, x: jax.Array) -> jax.Array:
        return from_total(reduction, total, axes.num_towers, x.dtype)

    def finish(variable: TowerLocal, total: PyTree) -> PyTree:
        if adds(variable):
            one = partial(of_total, variable.reduction)
            return jax.tree.map(one, total, variable.value)
        is_first = variable.reduction is Reduction.ONLY_FIRST_TOWER
        return jax.tree.map(of_first, variable.value) if is_first else None

    rows = jax.tree.map(addend, local, is_leaf=is_local)
    totals = sum_rows_over_towers(ops, rows, axes) if jax.tree.leaves(rows) else rows
    return jax.tree.map(finish, local, totals, is_leaf=is_local)
