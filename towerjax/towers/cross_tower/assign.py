"""Create, assign, update and read variables for all towers at once."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import reduced_dtype
from towerjax.mesh.placement import place
from towerjax.towers.cross_tower.destinations import of_first_process
from towerjax.towers.cross_tower.values import unwrap
from towerjax.towers.executors import is_in_tower_fn
from towerjax.towers.fields import StrategyFields
from towerjax.towers.merge import as_native
from towerjax.towers.tower_local import read_variables, refuse_own_copy
from towerjax.towers.variables import (
    MirroredVar,
    TowerLocal,
    Variable,
    any_per_tower,
    check_variable,
    fit,
    label,
    next_value,
    plain,
)
from towerjax.types import Layout, PerTower, PyTree, Reduction, named_leaves
from towerjax.types.leaves import is_traced, listed, native, parts_of, refuse_unheld
from towerjax.types.options import check_text


class VariableMethods(StrategyFields):
    """The methods of strategies for variables; all of them pure."""

    def create_var(
        self,
        name: str,
        initial: PyTree | Callable[[], PyTree],
        *,
        reduction: Reduction = Reduction.NONE,
        tower_local: bool = False,
    ) -> Any:
        """A new variable on the strategy's devices.

        Args:
          name: Its name in error messages.
          initial: A pytree of arrays or numbers, or a function that makes one; called
            once, so that random values are the same on all towers.
          reduction: How towers' values become one: for a mirrored variable those that
            they assign, for a tower-local one their copies when it is read.
          tower_local: Whether each tower has a copy, and not all one mirrored value.

        Returns:
          ``MirroredVar``, or ``TowerLocal`` with leaves ``[T, ...]``; in a tower
          function a ``TowerLocal`` of the tower's own copy.

        Raises:
          ValueError: An option is of another type, or ``initial`` holds no arrays.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> count = strategy.create_var("count", 3, reduction=tj.Reduction.SUM,
          ...     tower_local=True)
          >>> count.value.tolist(), int(strategy.read_var(count))
          ([3, 3], 6)
        """
        check_text("create_var: name", name, "a word, such as 'scale'")
        if not isinstance(tower_local, bool):
            raise ValueError(
                f"Invalid variable synchronization mode: {tower_local} for variable:"
                f" {name}. Write tower_local=True for one copy a tower (ON_READ), or"
                " False for one mirrored value (ON_WRITE, AUTO)."
            )
        if not isinstance(reduction, Reduction):
            raise ValueError(
                f"Invalid variable aggregation mode: {reduction} for variable: {name}."
                " Write tj.Reduction.SUM, MEAN, ONLY_FIRST_TOWER or NONE."
            )
        initial = initial() if callable(initial) else initial
        if any_per_tower(initial):
            raise ValueError(
                f"create_var: initial of {name!r} differs from tower to tower. Start"
                " with one value, and give each tower its own with call_for_each_tower("
                "lambda tower, v, x: tower.assign(v, x), v, per_tower)."
            )
        initial = plain(initial)
        refuse_unheld(f"create_var: {name!r}", initial)
        # With their dtypes, so that none stays weakly typed.
        initial = jax.tree.map(native, initial)
        value = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), initial)
        if not jax.tree.leaves(value):
            raise ValueError(
                f"create_var: initial of {name!r} holds no arrays: {value!r}."
            )
        if tower_local and is_in_tower_fn():
            return TowerLocal(value, reduction, name)
        if tower_local:
            rows = replicate(value, self.placement.num_towers)
            rows = place(rows, self.placement, Layout.PER_TOWER)
            return TowerLocal(rows, reduction, name)
        value = place(value, self.placement, Layout.MIRRORED)
        return MirroredVar(value, reduction, name)

    def assign(self, variable: Variable, value: PyTree) -> Any:
        """The variable with a new value, assigned for all towers at once.

        Args:
          variable: Mirrored: takes the value. Tower-local: reads as the value
            afterwards; of a SUM each tower gets a share, of integers a whole one.
          value: One value, the same for all towers.

        Returns:
          The new variable.

        Raises:
          ValueError: The value differs from tower to tower, or does not fit.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> count = strategy.create_var("count", 0, reduction=tj.Reduction.SUM,
          ...     tower_local=True)
          >>> strategy.assign(count, 7).value.tolist()
          [4, 3]
        """
        return self._assign(variable, value, None, "assign")

    def assign_add(self, variable: Variable, value: PyTree) -> Any:
        """The mirrored variable with a value added to it.

        Args:
          variable: ``MirroredVar``.
          value: One value, the same for all towers.

        Returns:
          The new variable.

        Raises:
          ValueError: As `assign`; the variable is tower-local, so that either its
            copies or their sum could be meant.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> v = strategy.create_var("v", 1.0)
          >>> float(strategy.assign_add(v, 6).value)
          7.0
        """
        return self._assign(variable, value, operator.add, "assign_add")

    def assign_sub(self, variable: Variable, value: PyTree) -> Any:
        """As `assign_add`, but subtracts the value."""
        return self._assign(variable, value, operator.sub, "assign_sub")

    def _assign(
        self,
        variable: Variable,
        value: PyTree,
        combine: Callable[[jax.Array, jax.Array], jax.Array] | None,
        what: str,
    ) -> Any:
        """Assign for all towers at once: the new variable."""
        check_variable(variable, f"strategy.{what}")
        refuse_per_tower([value], f"strategy.{what} of {label(variable)}")
        value = of_first_process(as_native("value", plain(value)), self.placement)
        if isinstance(variable, MirroredVar):
            new = fit(variable, value)
            if combine is not None:
                new = next_value(variable, combine, new)
            return _replace_value(variable, new)
        if combine is not None:
            sign = "-" if what == "assign_sub" else "+"
            raise ValueError(
                f"strategy.{what} of {label(variable)}, across towers: shall each copy"
                f" change? Write strategy.update(v, lambda x: x {sign} value). Or what"
                f" they read as? strategy.assign(v, strategy.read_var(v) {sign} value)."
                f" Or write tower.{what} in a tower."
            )
        num_towers = self.placement.num_towers
        check_towers(variable, num_towers)
        return _replace_value(variable, _fit_copies(variable, value, num_towers))

    def update(
        self,
        variable: Variable,
        fn: Callable[..., PyTree],
        /,
        *args: PyTree,
        **kwargs: PyTree,
    ) -> Any:
        """The variable after ``fn(value, *args, **kwargs)`` of each of its copies.

        Args:
          variable: Mirrored: ``fn`` is called once. Tower-local: once for each
            tower's copy.
          fn: Returns the new value, of the same structure and shapes.
          *args: Values that all towers share; for a mirrored variable its value. Of
            several processes the first one's are used.
          **kwargs: As ``args``.

        Returns:
          The new variable.

        Raises:
          ValueError: It is no variable, an argument differs from tower to tower, or
            the result does not fit.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> count = strategy.create_var("count", 1.0, reduction=tj.Reduction.SUM,
          ...     tower_local=True)
          >>> float(strategy.read_var(strategy.update(count, lambda x, y: y, 5.0)))
          10.0
        """
        check_variable(variable, "strategy.update")
        refuse_per_tower([args, kwargs], f"strategy.update of {label(variable)}")
        given = as_native("fn's arguments", plain((args, kwargs)))
        args, kwargs = of_first_process(given, self.placement)
        if isinstance(variable, MirroredVar):
            new = plain(fn(variable.value, *args, **kwargs))
            return _replace_value(variable, fit(variable, new))
        check_towers(variable, self.placement.num_towers)
        news = [plain(fn(own, *args, **kwargs)) for own in unwrap(variable)]
        rows = [fit(variable, new, copies=True) for new in news]
        return _replace_value(variable, jax.tree.map(lambda *xs: jnp.stack(xs), *rows))

    def read_var(self, value: PyTree) -> PyTree:
        """Replace each variable of a tree by its one value.

        Args:
          value: A pytree that may hold variables.

        Returns:
          The tree: a ``MirroredVar`` is its value, a ``TowerLocal`` is read by its
          own reduction.

        Raises:
          ValueError: A tower-local variable's reduction is NONE, or it lacks a copy for
            a tower.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> float(strategy.read_var(strategy.create_var("v", 2.5)))
          2.5
        """
        for x in parts_of(TowerLocal, value):
            check_towers(x, self.placement.num_towers)
        return read_variables(value)


def replicate(value: PyTree, num_towers: int) -> PyTree:
    """Copy the value for each tower, to leaves ``[T, ...]``."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_towers, *x.shape)), value)


def split_sum(variable: Variable, value: PyTree, num_towers: int) -> PyTree:
    """The towers' copies ``[T, ...]`` that reduce to the value."""
    if variable.reduction is not Reduction.SUM:
        return replicate(value, num_towers)

    def one(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return replicate(x / num_towers, num_towers)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"{label(variable)} is {x.dtype} with Reduction.SUM: its value has no"
                f" parts for {num_towers} towers. Use strategy.update for each tower's"
                " copy, or create it with ONLY_FIRST_TOWER."
            )
        # A small integer may not hold the number of towers.
        x = x.astype(reduced_dtype(Reduction.SUM, x.dtype))
        towers = jnp.arange(num_towers).reshape((-1,) + (1,) * x.ndim)
        whole, rest = x // num_towers, x % num_towers
        return whole + (towers < rest).astype(x.dtype)

    return jax.tree.map(one, value)


def cast_exactly(rows: jax.Array, dtype: Any) -> jax.Array:
    """Cast the towers' copies; raise where the dtype cannot hold a number."""
    if rows.dtype == dtype:
        return rows
    cast = rows.astype(dtype)
    if not is_traced((rows, cast)):
        parts = np.asarray(rows)
        lost = parts[np.asarray(cast) != parts]
        if lost.size:
            raise ValueError(f"gives a tower {lost[0]}, which {dtype} cannot hold")
    return cast


def _dtypes_to_assign(variable: Variable) -> Callable[[Any], Sequence[Any]]:
    """The dtypes of values that fit, preferred first: its own and its reduction's."""

    def takes(dtype: Any) -> Sequence[Any]:
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return (dtype,)
        if variable.reduction is Reduction.SUM and dtype != jnp.bool_:
            return (reduced_dtype(Reduction.SUM, dtype), dtype)
        if variable.reduction is Reduction.MEAN:
            return (dtype, reduced_dtype(Reduction.MEAN, dtype))
        return (dtype,)

    return takes


def _fit_copies(variable: Variable, value: PyTree, num_towers: int) -> PyTree:
    value = fit(variable, value, copies=True, takes=_dtypes_to_assign(variable))
    rows, treedef = jax.tree.flatten(split_sum(variable, value, num_towers))
    names = [name for name, _ in named_leaves("value", value)]
    old, problems = jax.tree.leaves(variable.value), []
    for i, name in enumerate(names):
        try:
            rows[i] = cast_exactly(rows[i], old[i].dtype)
        except ValueError as error:
            problems.append(f"{name} {error}")
    if problems:
        raise ValueError(
            f"The value does not fit {label(variable)}: {listed(problems)}. Create"
            " the variable with a larger dtype, or pass a value that fits."
        )
    return treedef.unflatten(rows)


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


def refuse_per_tower(values: PyTree, what: str) -> None:
    """Raise when a value differs from tower to tower."""
    if found := parts_of(PerTower | TowerLocal, values):
        raise ValueError(
            f"{what}: Expected value to be mirrored across towers, got a"
            f" {type(found[0]).__name__}. Reduce it first, with strategy.reduce or"
            " strategy.read_var, or assign in a tower, with tower.assign."
        )


def _replace_value(variable: Any, value: PyTree) -> Any:
    """Replace the variable's value, placed as the old one."""
    new = jax.tree.map(copy_like, variable.value, value)
    return dataclasses.replace(variable, value=new)


def copy_like(old: Any, new: Any) -> jax.Array:
    """Copy ``new`` to the placement of ``old``, so that no buffer is shared."""
    if not isinstance(old, jax.Array) or is_traced((old, new)):
        return jnp.asarray(new)
    return jax.device_put(jnp.copy(new), old.sharding)
