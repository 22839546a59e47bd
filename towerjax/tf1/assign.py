"""Create, assign, update and read variables for all towers at once."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.tf1.values import AnyStrategy, refuse_per_tower
from towerjax.towers.values import as_native, of_first_process, unwrap
from towerjax.towers.variables import (
    MirroredVar,
    TowerLocal,
    Variable,
    check_variable,
    fit,
    fit_copies,
    label,
    make_local,
    place_by_type,
    plain,
    read_local,
    refuse_own_copy,
)
from towerjax.types import PyTree, Reduction
from towerjax.types.boundary import warn_if_dropped
from towerjax.types.options import check_callable
from towerjax.types.refusals import refuse_unheld
from towerjax.types.trees import is_traced, native, parts_of


def create_var(
    self: AnyStrategy,
    name: str,
    initial: PyTree | Callable[[], PyTree],
    *,
    reduction: Reduction = Reduction.NONE,
    tower_local: bool = False,
) -> Variable:
    """Make a new variable, stored on the strategy's devices.

    It is a ``MirroredVar``, or with ``tower_local`` a ``TowerLocal`` with leaves ``[T,
    ...]``. ``initial`` is a pytree of arrays or numbers, or a function that returns
    one. ``reduction`` says how towers' values become one: the values that they assign
    to a mirrored variable, or the copies of a tower-local variable when it is read. In
    a tower function a ``TowerLocal`` is the tower's own copy.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(towers=2)
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
    # Each leaf gets its dtype explicitly, so that no variable stays weakly typed.
    initial = jax.tree.map(native, initial)
    value = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), initial)
    if not tower_local:
        return place_by_type(MirroredVar(value, reduction, name), self.placement)
    return make_local(value, reduction, name, self.placement)


def assign(self: AnyStrategy, variable: Variable, value: PyTree) -> Variable:
    """Assign a new value to the variable, for all towers.

    For a tower-local variable, ``value`` is what `read_var` will return. So with the
    reduction SUM each tower gets a share of it, which for integers is a whole number.
    """
    value = _given(self, variable, value, "assign")
    if isinstance(variable, MirroredVar):
        new = fit(variable, value)
    else:
        check_towers(variable, self.num_towers)
        new = fit_copies(variable, value, self.num_towers)
    _warn_if_dropped("assign")
    return _replace_value(variable, new)


def assign_add(self: AnyStrategy, variable: Variable, value: PyTree) -> Variable:
    """Add a value to the mirrored variable.

    A tower-local variable is refused, because the value could be meant for each copy or
    for what the copies reduce to.
    """
    return _combine(self, variable, value, operator.add, "+")


def assign_sub(self: AnyStrategy, variable: Variable, value: PyTree) -> Variable:
    """Subtract a value from the mirrored variable; see `assign_add` for errors."""
    return _combine(self, variable, value, operator.sub, "-")


def _combine(
    strategy: AnyStrategy,
    variable: Variable,
    value: PyTree,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
    sign: str,
) -> Variable:
    verb = f"assign_{combine.__name__}"
    value = _given(strategy, variable, value, verb)
    if isinstance(variable, MirroredVar):
        new = jax.tree.map(combine, variable.value, fit(variable, value))
        _warn_if_dropped(verb)
        return _replace_value(variable, new)
    raise ValueError(
        f"strategy.{verb} of {label(variable)} is unclear. To change each tower's copy"
        f" write strategy.update(v, lambda x: x {sign} value). To change the one value"
        " that strategy.read_var(v) makes of the copies write strategy.assign(v,"
        f" strategy.read_var(v) {sign} value)."
    )


def _warn_if_dropped(verb: str) -> None:
    call = f"strategy.{verb}"
    warn_if_dropped(call, f"A variable is never changed. Write v = {call}(v, ...).")


def _given(
    strategy: AnyStrategy, variable: Variable, value: PyTree, verb: str
) -> PyTree:
    """Refuse a value that differs by tower; bring it to all processes.

    ``verb`` names the method in the error.
    """
    check_variable(variable, f"strategy.{verb}")
    refuse_per_tower([value], f"strategy.{verb} of {label(variable)}")
    return of_first_process(as_native("value", plain(value)), strategy.placement)


def update_var(
    self: AnyStrategy,
    variable: Variable,
    fn: Callable[..., PyTree],
    /,
    *args: PyTree,
    **kwargs: PyTree,
) -> Variable:
    """Assign ``fn(value, *args, **kwargs)`` to the variable.

    ``fn`` is called for each copy of a tower-local variable. All towers get the same
    arguments; a mirrored variable among them is replaced by its value.
    """
    check_callable("fn", fn, "fn(value, *args)")
    args, kwargs = _given(self, variable, (args, kwargs), "update")
    copies = [variable.value]
    if isinstance(variable, TowerLocal):
        check_towers(variable, self.num_towers)
        copies = unwrap(self, variable)
    try:
        news = [plain(fn(copy_of_tower, *args, **kwargs)) for copy_of_tower in copies]
    except AttributeError as error:
        error.add_note(
            "For update, fn(value) must return the new value: lambda x, g: x - 0.1 * g."
        )
        raise
    if isinstance(variable, MirroredVar):
        new = fit(variable, news[0])
    else:
        rows = jax.tree.map(lambda *xs: jnp.stack([*map(jnp.asarray, xs)]), *news)
        new = fit(variable, rows)
    _warn_if_dropped("update")
    return _replace_value(variable, new)


def read_var(self: AnyStrategy, value: PyTree) -> PyTree:
    """Replace each variable in a tree by its value.

    The copies of a tower-local variable are reduced by its own reduction.
    """
    for x in parts_of(TowerLocal, value):
        check_towers(x, self.num_towers)
    return read_local(value)


def _replace_value(variable: Any, value: PyTree) -> Any:
    """Copy a new value to where the variable's old one lies."""

    def put(old: Any, new: Any) -> jax.Array:
        if not isinstance(old, jax.Array) or is_traced((old, new)):
            return jnp.asarray(new)
        return jax.device_put(jnp.copy(new), old.sharding)

    return dataclasses.replace(variable, value=jax.tree.map(put, variable.value, value))


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
