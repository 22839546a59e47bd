"""How are variables made, changed and read across towers?"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.collectives.reduce import reduced_dtype
from towerjax.mesh.placement import place
from towerjax.towers.cross_tower.values import is_per_tower
from towerjax.towers.variables import (
    MirroredVar,
    TowerLocal,
    Variable,
    check_variable,
    combined,
    fitted,
    named,
    plain,
)
from towerjax.types import Layout, PyTree, Reduction, named_leaves
from towerjax.types.leaves import refuse_unheld


def create_var(
    strategy: Any,
    name: str,
    initial: PyTree | Callable[[], PyTree],
    *,
    reduction: Reduction,
    tower_local: bool,
) -> Any:
    """A new variable on the strategy's devices."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"create_var: name={name!r} must be a word, such as 'scale'.")
    if not isinstance(tower_local, bool):
        raise ValueError(
            f"Invalid variable synchronization mode: {tower_local} for variable:"
            f" {name}. Write tower_local=True for one copy a tower (ON_READ), or False"
            " for one mirrored value (ON_WRITE, AUTO)."
        )
    if not isinstance(reduction, Reduction):
        raise ValueError(
            f"Invalid variable aggregation mode: {reduction} for variable: {name}."
            " Write tj.Reduction.SUM, MEAN, ONLY_FIRST_TOWER or NONE."
        )
    initial = initial() if callable(initial) else initial
    if any(map(is_per_tower, jax.tree.leaves(initial, is_leaf=is_per_tower))):
        raise ValueError(
            f"create_var: initial of {name!r} differs from tower to tower. Start all"
            " towers with one value, and give each its own with"
            " strategy.call_for_each_tower(lambda tower, v, x: tower.assign(v, x), v,"
            " per_tower)."
        )
    initial = plain(initial)
    refuse_unheld(f"create_var: {name!r}", initial)
    value = jax.tree.map(jnp.asarray, initial)
    if not jax.tree.leaves(value):
        raise ValueError(f"create_var: initial of {name!r} holds no arrays: {value!r}.")
    if tower_local:
        rows = copies(value, strategy.num_towers)
        return TowerLocal(placed(rows, strategy, Layout.PER_TOWER), reduction, name)
    return MirroredVar(placed(value, strategy, Layout.MIRRORED), reduction, name)


def placed(tree: PyTree, strategy: Any, layout: Layout) -> PyTree:
    """A copy of the tree on the strategy's devices; as it is where it is traced."""
    return tree if is_traced(tree) else place(tree, strategy.placement, layout)


def is_traced(tree: PyTree) -> bool:
    """Is any leaf without a value, or are we where new arrays have none?"""
    leaves = [*jax.tree.leaves(tree), jnp.arange(1)]
    return any(isinstance(x, Tracer) for x in leaves)


def copies(value: PyTree, num_towers: int) -> PyTree:
    """The value once for each tower, side by side."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_towers, *x.shape)), value)


def shares(variable: TowerLocal, value: PyTree, num_towers: int) -> PyTree:
    """Copies whose aggregate is the value."""
    if variable.reduction is not Reduction.SUM:
        return copies(value, num_towers)

    def one(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.broadcast_to(x / num_towers, (num_towers, *x.shape))
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"{named(variable)} is {x.dtype} with Reduction.SUM: its value has no"
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
    """The towers' parts in the dtype of their copies."""
    if rows.dtype == dtype:
        return rows
    cast = rows.astype(dtype)
    if not is_traced((rows, cast)):
        parts = np.asarray(rows)
        lost = parts[np.asarray(cast) != parts]
        if lost.size:
            raise ValueError(f"gives a tower {lost[0]}, which {dtype} cannot hold")
    return cast


def _dtypes_to_assign(variable: TowerLocal) -> Callable[[Any], Sequence[Any]]:
    """Its own dtype and the one it reads as; first what holds every such value."""

    def takes(dtype: Any) -> Sequence[Any]:
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return (dtype,)
        if variable.reduction is Reduction.SUM and dtype != jnp.bool_:
            return (reduced_dtype(Reduction.SUM, dtype), dtype)
        if variable.reduction is Reduction.MEAN:
            return (dtype, reduced_dtype(Reduction.MEAN, dtype))
        return (dtype,)

    return takes


def _copies_for(variable: TowerLocal, value: PyTree, num_towers: int) -> PyTree:
    value = fitted(variable, value, copies=True, takes=_dtypes_to_assign(variable))
    rows, treedef = jax.tree.flatten(shares(variable, value, num_towers))
    names = [name for name, _ in named_leaves("value", value)]
    old, problems = jax.tree.leaves(variable.value), []
    for i, name in enumerate(names):
        try:
            rows[i] = cast_exactly(rows[i], old[i].dtype)
        except ValueError as error:
            problems.append(f"{name} {error}")
    if problems:
        raise ValueError(
            f"The value does not fit {named(variable)}: {'; '.join(problems)}. Create"
            " the variable with a larger dtype, or pass a value that fits."
        )
    return treedef.unflatten(rows)


def assigned(
    strategy: Any,
    variable: Variable,
    value: PyTree,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None,
    what: str,
) -> Any:
    """The variable after an assignment to all towers at once."""
    check_variable(variable, f"strategy.{what}")
    check_mirrored([value], f"strategy.{what} of {named(variable)}")
    value = plain(value)
    if isinstance(variable, MirroredVar):
        new = fitted(variable, value)
        if combine is not None:
            new = combined(variable, combine, new)
        return _replaced(variable, new)
    if combine is not None:
        sign = "-" if what == "assign_sub" else "+"
        raise ValueError(
            f"strategy.{what} of {named(variable)}, across towers: shall each tower's"
            " copy change by the value, or what they read as together? Write"
            f" strategy.update(v, lambda x: x {sign} value) for each copy,"
            f" strategy.assign(v, strategy.read_var(v) {sign} value) for the whole, or"
            f" tower.{what} in a tower."
        )
    check_towers(variable, strategy)
    return _replaced(variable, _copies_for(variable, value, strategy.num_towers))


def check_towers(variable: TowerLocal, strategy: Any) -> None:
    """Raise unless the variable has one copy for each tower."""
    for x in jax.tree.leaves(variable.value):
        if np.shape(x)[:1] != (strategy.num_towers,):
            raise ValueError(
                f"{named(variable)} has shape {np.shape(x)}, but dim 0 runs over the"
                f" {strategy.num_towers} towers. Make it with strategy.create_var(...,"
                " tower_local=True)."
            )


def check_mirrored(values: PyTree, what: str) -> None:
    """Raise when a value differs from tower to tower."""
    for x in jax.tree.leaves(values, is_leaf=is_per_tower):
        if is_per_tower(x):
            raise ValueError(
                f"{what}: Expected value to be mirrored across towers, got a"
                f" {type(x).__name__}. Reduce it first, with strategy.reduce or"
                " strategy.read_var, or assign in a tower, with tower.assign."
            )


def _replaced(variable: Any, value: PyTree) -> Any:
    """The variable with a value that lies as the old one does."""
    new = jax.tree.map(copy_like, variable.value, value)
    return dataclasses.replace(variable, value=new)


def copy_like(old: Any, new: Any) -> jax.Array:
    """A copy of ``new`` where ``old`` lies; the caller's buffer is not shared."""
    if not isinstance(old, jax.Array) or is_traced((old, new)):
        return jnp.asarray(new)
    return jax.device_put(jnp.copy(new), old.sharding)


def update(
    strategy: Any,
    variable: Variable,
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Any:
    """The variable after ``fn(value, *args, **kwargs)`` of each of its copies."""
    check_variable(variable, "strategy.update")
    check_mirrored([args, kwargs], f"strategy.update of {named(variable)}")
    args, kwargs = plain((args, kwargs))
    if isinstance(variable, MirroredVar):
        return _replaced(
            variable, fitted(variable, plain(fn(variable.value, *args, **kwargs)))
        )
    check_towers(variable, strategy)
    rows = []
    for t in range(strategy.num_towers):
        own = jax.tree.map(lambda x, t=t: x[t], variable.value)
        new = plain(fn(own, *args, **kwargs))
        rows.append(fitted(variable, new, copies=True))
    return _replaced(variable, jax.tree.map(lambda *xs: jnp.stack(xs), *rows))
