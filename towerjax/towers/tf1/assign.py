"""Create, assign, update, read, save and restore variables for all towers at once."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import multiplies, reduced_dtype
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import place, readable
from towerjax.towers.executors import is_in_tower_fn
from towerjax.towers.fields import StrategyFields
from towerjax.towers.tf1.values import as_native, of_first_process, unwrap
from towerjax.towers.variables import (
    MirroredVar,
    TowerLocal,
    Variable,
    check_variable,
    fit,
    is_variable,
    label,
    plain,
    read_local,
    refuse_own_copy,
    refuse_per_tower,
)
from towerjax.types import Layout, PyTree, Reduction, leaf_name, named_leaves
from towerjax.types.door import door
from towerjax.types.leaves import is_traced, listed, native, parts_of, refuse_unheld
from towerjax.types.missing import noted
from towerjax.types.options import check_callable, check_methods


def create_var(
    self: StrategyFields,
    name: str,
    initial: PyTree | Callable[[], PyTree],
    *,
    reduction: Reduction = Reduction.NONE,
    tower_local: bool = False,
) -> Variable:
    """A new ``MirroredVar``, or ``TowerLocal`` ``[T, ...]``, on the strategy's devices.

    ``initial`` is a pytree of arrays or numbers, or a function that makes one.
    ``reduction`` says how towers' values become one: for a mirrored variable those that
    they assign, for a tower-local one their copies when it is read. In a tower function
    a ``TowerLocal`` is the tower's own copy.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.Mirrored(towers=2)
      >>> count = strategy.create_var("count", 3, reduction=tj.Reduction.SUM,
      ...     tower_local=True)
      >>> count.value.tolist(), int(strategy.read_var(count))
      ([3, 3], 6)
      >>> strategy.assign(count, 7).value.tolist()
      [4, 3]
      >>> strategy.update(count, lambda x: x + 1).value.tolist()
      [4, 4]
    """
    if not isinstance(tower_local, bool):
        raise ValueError(
            f"Invalid variable synchronization mode: {tower_local} for variable:"
            f" {name}. Write tower_local=True for one copy a tower (ON_READ), or False"
            " for one mirrored value (ON_WRITE, AUTO)."
        )
    initial = initial() if callable(initial) else initial
    refuse_per_tower([initial], f"create_var of {name!r}")
    initial = plain(initial)
    refuse_unheld(f"create_var: {name!r}", initial)
    # With their dtypes, so that none stays weakly typed.
    initial = jax.tree.map(native, initial)
    value = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), initial)
    if not tower_local:
        value = place(value, self.placement, Layout.MIRRORED)
        return MirroredVar(value, reduction, name)
    if is_in_tower_fn():
        return TowerLocal(value, reduction, name)
    rows = replicate(value, self.num_towers)
    return TowerLocal(place(rows, self.placement, Layout.PER_TOWER), reduction, name)


def assign(self: StrategyFields, variable: Variable, value: PyTree) -> Variable:
    """The variable with a new value, one for all towers.

    A tower-local variable reads as the value afterwards: of a SUM each tower gets a
    share, of integers a whole one.
    """
    value = _given(self, variable, value, "assign")
    if isinstance(variable, MirroredVar):
        return _replace_value(variable, fit(variable, value))
    check_towers(variable, self.num_towers)
    return _replace_value(variable, fit_copies(variable, value, self.num_towers))


def assign_add(self: StrategyFields, variable: Variable, value: PyTree) -> Variable:
    """The mirrored variable plus a value; a tower-local one is refused, as unclear."""
    return _combine(self, variable, value, operator.add, "+")


def assign_sub(self: StrategyFields, variable: Variable, value: PyTree) -> Variable:
    """The mirrored variable minus a value, as `assign_add`."""
    return _combine(self, variable, value, operator.sub, "-")


def _combine(
    strategy: StrategyFields,
    variable: Variable,
    value: PyTree,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    sign: str,
) -> Variable:
    what = f"assign_{combine.__name__}"
    value = _given(strategy, variable, value, what)
    if isinstance(variable, MirroredVar):
        new = jax.tree.map(combine, variable.value, fit(variable, value))
        return _replace_value(variable, new)
    raise ValueError(
        f"strategy.{what} of {label(variable)}: shall each copy change? Write"
        f" strategy.update(v, lambda x: x {sign} value). Or what they read as?"
        f" strategy.assign(v, strategy.read_var(v) {sign} value)."
    )


def _given(
    strategy: StrategyFields, variable: Variable, value: PyTree, what: str
) -> PyTree:
    """What all towers are given for a variable; raise where they cannot share it."""
    check_variable(variable, f"strategy.{what}")
    refuse_per_tower([value], f"strategy.{what} of {label(variable)}")
    return of_first_process(as_native("value", plain(value)), strategy.placement)


def update_var(
    self: StrategyFields,
    variable: Variable,
    fn: Callable[..., PyTree],
    /,
    *args: PyTree,
    **kwargs: PyTree,
) -> Variable:
    """The variable after ``fn(value, *args, **kwargs)``, of each copy of a tower-local.

    All towers share the arguments, of which a mirrored variable is its value.
    """
    check_callable("fn", fn, "fn(value, *args)")
    args, kwargs = _given(self, variable, (args, kwargs), "update")
    copies = [variable.value]
    if isinstance(variable, TowerLocal):
        check_towers(variable, self.num_towers)
        copies = unwrap(self, variable)
    with noted("Of update, fn(value) returns the new value: lambda x, g: x - 0.1 * g."):
        news = [plain(fn(own, *args, **kwargs)) for own in copies]
    if isinstance(variable, MirroredVar):
        return _replace_value(variable, fit(variable, news[0]))
    rows = jax.tree.map(lambda *xs: jnp.stack([*map(jnp.asarray, xs)]), *news)
    return _replace_value(variable, fit(variable, rows))


def read_var(self: StrategyFields, value: PyTree) -> PyTree:
    """Replace each variable of a tree by its value, by its reduction if tower-local."""
    for x in parts_of(TowerLocal, value):
        check_towers(x, self.num_towers)
    return read_local(value)


def replicate(value: PyTree, num_towers: int) -> PyTree:
    """Copy the value for each tower, to leaves ``[T, ...]``."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_towers, *x.shape)), value)


def _shares(x: jax.Array, num_towers: int) -> jax.Array:
    """The towers' shares ``[T, ...]`` of a sum, of integers whole ones."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return replicate(x / num_towers, num_towers)
    # A small integer may not hold the number of towers.
    x = x.astype(reduced_dtype(Reduction.SUM, x.dtype))
    towers = jnp.arange(num_towers).reshape((-1,) + (1,) * x.ndim)
    whole = x // num_towers
    rest = x % num_towers
    return whole[None] + (towers < rest[None]).astype(x.dtype)


def fit_copies(variable: Variable, value: PyTree, num_towers: int) -> PyTree:
    """The towers' copies of which a tower-local variable reads as the value."""
    refuse_own_copy(variable)
    reduction = variable.reduction
    adds_up = reduction is not Reduction.NONE and multiplies(reduction)
    split = _shares if adds_up else replicate

    def copies(x: jax.Array, old: Any) -> jax.Array:
        rows = split(x, num_towers)
        dtype = jnp.result_type(old)
        if rows.dtype == dtype:
            return rows
        cast = rows.astype(dtype)
        if is_traced((rows, cast)):
            return cast
        if (lost := (parts := np.asarray(rows))[np.asarray(cast) != parts]).size:
            raise ValueError(
                f"The value does not fit {label(variable)}: it gives a tower {lost[0]},"
                f" which {dtype} cannot hold. Create the variable with a larger dtype."
            )
        return cast

    return jax.tree.map(copies, fit(variable, value, reads=True), variable.value)


def check_towers(variable: Variable, num_towers: int) -> None:
    """Raise unless the variable has a copy for each tower."""
    refuse_own_copy(variable)
    for x in jax.tree.leaves(variable.value):
        if np.shape(x)[:1] != (num_towers,):
            raise ValueError(
                f"{label(variable)} has shape {np.shape(x)}, but dim 0 runs over the"
                f" {num_towers} towers. Make it with this strategy's create_var(...,"
                " tower_local=True), or move it, tj.towers.restored_values(strategy, v,"
                " tj.towers.saved_values(v))."
            )


def _replace_value(variable: Any, value: PyTree) -> Any:
    """Replace the variable's value by a copy, which is placed as the old one."""

    def put(old: Any, new: Any) -> jax.Array:
        if not isinstance(old, jax.Array) or is_traced((old, new)):
            return jnp.asarray(new)
        return jax.device_put(jnp.copy(new), old.sharding)

    return dataclasses.replace(variable, value=jax.tree.map(put, variable.value, value))


def saved_values(tree: PyTree) -> PyTree:
    """The tree as plain values that do not depend on the number of towers.

    Args:
      tree: A pytree that may hold variables, such as a ``TrainState``.

    Returns:
      The tree: a mirrored variable is its value, a tower-local one its aggregate;
      other leaves do not change. What is sharded over processes, which all call this,
      is mirrored.

    Raises:
      ValueError: Tower-local variables have no aggregate; names all of them.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.Mirrored(towers=2)
      >>> count = strategy.create_var("count", 3, reduction=tj.Reduction.SUM,
      ...     tower_local=True)
      >>> int(saved_values({"count": count})["count"])
      6
    """
    return jax.tree.map(readable, read_local(tree))


@door
def restored_values(strategy: StrategyFields, like: PyTree, saved: PyTree) -> PyTree:
    """A tree like another, holding saved values, on the strategy's towers.

    Args:
      strategy: The towers and devices; any number, whatever strategy saved.
      like: A tree such as `saved_values` was given, such as a new state: its structure,
        reductions, shapes and dtypes are used, its values are not.
      saved: What `saved_values` returned, or the same read from a file.

    Returns:
      The tree: mirrored values on all devices; of a tower-local SUM each tower has
      its share, of MEAN and ONLY_FIRST_TOWER the value.

    Raises:
      ValueError: A structure or shape differs, or a dtype does not hold what was saved;
        names all leaves.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.Mirrored(towers=3)
      >>> like = strategy.create_var("count", 0, reduction=tj.Reduction.SUM,
      ...     tower_local=True)
      >>> restored_values(strategy, like, 7).value.tolist()
      [3, 2, 2]
    """
    check_methods("strategy", strategy, "placement", "tj.Mirrored(), or another")
    return restore_on(strategy.placement, like, saved)


def restore_on(placement: Placement, like: PyTree, saved: PyTree) -> PyTree:
    """As `restored_values`, for the towers of a placement."""
    problems = []

    def restored(path: tuple[Any, ...], old: Any, new: PyTree) -> Any:
        if isinstance(old, str):
            return new
        is_local = isinstance(old, TowerLocal)
        try:
            if is_local:
                value = fit_copies(old, new, placement.num_towers)
            else:
                value = fit(old if is_variable(old) else MirroredVar(old), new)
        except ValueError as error:
            problems.append(f"{leaf_name('saved', path)}: {error}")
            return None
        layout = Layout.PER_TOWER if is_local else Layout.MIRRORED
        value = place(value, placement, layout)
        return dataclasses.replace(old, value=value) if is_variable(old) else value

    _refuse_another_tree(like, saved)
    out = jax.tree_util.tree_map_with_path(restored, like, saved, is_leaf=is_variable)
    if problems:
        raise ValueError(f"restored_values: {listed(problems)}")
    return out


def _refuse_another_tree(like: PyTree, saved: PyTree) -> None:
    """Raise unless ``saved`` has something for each leaf or variable of ``like``."""
    try:
        jax.tree.structure(like, is_leaf=is_variable).flatten_up_to(saved)
    except ValueError as error:
        own, given = (
            [name for name, _ in named_leaves("saved", tree, is_leaf=is_variable)]
            for tree in (like, saved)
        )
        lacks = [x for x in own if not any(y.startswith(x) for y in given)]
        more = [y for y in given if not any(y.startswith(x) for x in own)]
        raise ValueError(
            "restored_values: saved is another tree than like."
            f" It lacks {listed(lacks) or 'nothing'};"
            f" it has besides {listed(more) or 'nothing'}. Choose the variables in"
            " both, with the same containers."
        ) from error
