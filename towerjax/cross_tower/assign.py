"""How are variables made, changed and read across towers?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from towerjax.cross_tower.values import is_per_tower, send
from towerjax.merge import stacked_rows
from towerjax.placement import place
from towerjax.tower_local import read_local
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.variables import (
    MirroredVar,
    TowerLocal,
    Variable,
    check_variable,
    fitted,
    named,
    plain,
)


def create_var(
    strategy: Any,
    name: str,
    initial: PyTree | Callable[[], PyTree],
    *,
    reduction: Reduction,
    tower_local: bool,
) -> Any:
    """A new variable on the strategy's devices.

    Args:
      strategy: Which towers, where.
      name: What errors call it.
      initial: A pytree of arrays or numbers, or a function that makes one; called
        once, so that random values are the same on all towers.
      reduction: How towers' values become one: assigned ones, or copies when read.
      tower_local: A copy a tower instead of one mirrored value?

    Returns:
      ``MirroredVar``, or ``TowerLocal`` with leaves ``[T, ...]``.

    Raises:
      ValueError: ``name`` or an option is of another type; ``initial`` holds nothing.
    """
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
    value = jax.tree.map(jnp.asarray, initial() if callable(initial) else initial)
    if not jax.tree.leaves(value):
        raise ValueError(f"create_var: initial of {name!r} holds no arrays: {value!r}.")
    if tower_local:
        rows = copies(value, strategy.num_towers)
        return TowerLocal(placed(rows, strategy, Layout.PER_TOWER), reduction, name)
    return MirroredVar(placed(value, strategy, Layout.MIRRORED), reduction, name)


def placed(tree: PyTree, strategy: Any, layout: Layout) -> PyTree:
    """A copy of the tree on the strategy's devices; as it is where it is traced.

    Args:
      tree: A pytree of arrays.
      strategy: Which devices.
      layout: How it lies on them.

    Returns:
      The tree.
    """
    return tree if is_traced(tree) else place(tree, strategy.placement, layout)


def is_traced(tree: PyTree) -> bool:
    """Is any leaf without a value, or are we where new arrays have none?

    Args:
      tree: A pytree.

    Returns:
      True inside jit and the like.
    """
    leaves = [*jax.tree.leaves(tree), jnp.arange(1)]
    return any(isinstance(x, Tracer) for x in leaves)


def copies(value: PyTree, num_towers: int) -> PyTree:
    """The value once for each tower, side by side.

    Args:
      value: A pytree of arrays ``[...]``.
      num_towers: ``T``.

    Returns:
      Leaves ``[T, ...]``.
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_towers, *x.shape)), value)


def shares(variable: TowerLocal, value: PyTree, num_towers: int) -> PyTree:
    """Copies whose aggregate is the value.

    Args:
      variable: Whose reduction and dtypes they have.
      value: Leaves ``[...]``, of the variable's dtypes.
      num_towers: ``T``.

    Returns:
      Leaves ``[T, ...]``: of a SUM its ``T``-th part, or for integers whole parts
      that add up exactly, the first towers' being one larger; else the value itself.

    Raises:
      ValueError: SUM of keys or booleans, which have no parts.
    """
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
        towers = jnp.arange(num_towers).reshape((-1,) + (1,) * x.ndim)
        whole, rest = x // num_towers, x % num_towers
        return whole + (towers < rest).astype(x.dtype)

    return jax.tree.map(one, value)


def assigned(
    strategy: Any,
    variable: Variable,
    value: PyTree,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None,
    what: str,
) -> Any:
    """The variable after an assignment to all towers at once.

    Args:
      strategy: Which towers.
      variable: Mirrored, or tower-local (only as a whole).
      value: One value, of the structure and shapes that the variable reads as.
      combine: ``(old, new) -> next`` leaf by leaf; None is ``new``.
      what: The call, for errors.

    Returns:
      The new variable, where the old one is.

    Raises:
      ValueError: The value differs from tower to tower or does not fit; a tower-local
        variable is added to.
    """
    check_variable(variable, f"strategy.{what}")
    _check_mirrored([value], f"strategy.{what} of {named(variable)}")
    value = plain(value)
    if isinstance(variable, MirroredVar):
        new = fitted(variable, value)
        if combine is not None:
            new = jax.tree.map(combine, variable.value, new)
        return _replaced(variable, new)
    if combine is not None:
        raise ValueError(
            f"strategy.{what} of {named(variable)}, across towers: shall each tower's"
            " copy change by the value, or what they read as together? Write"
            " strategy.update(v, lambda x: x + value) for each copy,"
            " strategy.assign(v, strategy.read_var(v) + value) for the whole, or"
            f" tower.{what} in a tower."
        )
    check_towers(variable, strategy)
    value = fitted(variable, value, copies=True)
    return _replaced(variable, shares(variable, value, strategy.num_towers))


def check_towers(variable: TowerLocal, strategy: Any) -> None:
    """Raise unless the variable has one copy for each tower.

    Args:
      variable: A tower-local variable, as `create_var` makes it.
      strategy: Which towers.

    Raises:
      ValueError: It has another number of copies.
    """
    for x in jax.tree.leaves(variable.value):
        if np.shape(x)[:1] != (strategy.num_towers,):
            raise ValueError(
                f"{named(variable)} has shape {np.shape(x)}, but dim 0 runs over the"
                f" {strategy.num_towers} towers. Make it with strategy.create_var(...,"
                " tower_local=True)."
            )


def _check_mirrored(values: Any, what: str) -> None:
    for x in jax.tree.leaves(values, is_leaf=is_per_tower):
        if is_per_tower(x):
            raise ValueError(
                f"{what}: Expected value to be mirrored across towers, got a"
                f" {type(x).__name__}. Reduce it first, with strategy.reduce or"
                " strategy.read_var, or assign in a tower, with tower.assign."
            )


def _replaced(variable: Any, value: PyTree) -> Any:
    """The variable with a value that lies as the old one does."""
    new = jax.tree.map(_like, variable.value, value)
    return dataclasses.replace(variable, value=new)


def _like(old: Any, new: Any) -> jax.Array:
    """A copy, so that the caller's buffer is not shared."""
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
    """The variable after ``fn(value, *args, **kwargs)`` of each of its copies.

    Args:
      strategy: Which towers.
      variable: Mirrored: ``fn`` is called once. Tower-local: once for each tower's
        copy.
      fn: ``(value, *args, **kwargs) -> new value``, of the same structure and shapes.
      args: Values that all towers share; a mirrored variable is its value.
      kwargs: As ``args``.

    Returns:
      The new variable.

    Raises:
      ValueError: It is no variable; an argument differs from tower to tower; the
        result does not fit.
    """
    check_variable(variable, "strategy.update")
    _check_mirrored([args, kwargs], f"strategy.update of {named(variable)}")
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


def update_non_slot(
    devices: Any,
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """``fn(*args, **kwargs)``, mirrored on the devices.

    Args:
      devices: Their names.
      fn: Called once.
      args: Values that all towers share; a mirrored variable is its value.
      kwargs: As ``args``.

    Returns:
      ``fn``'s tree of arrays, a copy on each device.

    Raises:
      ValueError: No devices, one twice or absent; an argument differs from tower to
        tower.
    """
    _check_mirrored([args, kwargs], "strategy.update_non_slot")
    if isinstance(devices, tuple | list) and not devices:
        raise ValueError(
            "strategy.update_non_slot: devices is empty; name at least one, or pass"
            " strategy.non_slot_devices()."
        )
    args, kwargs = plain((args, kwargs))
    return send(plain(fn(*args, **kwargs)), devices)


def read_var(value: PyTree) -> PyTree:
    """Each variable's one value; any other value as it is.

    Args:
      value: A pytree that may hold variables.

    Returns:
      The tree; a tower-local variable is read by its own reduction.

    Raises:
      ValueError: A tower-local variable's reduction is NONE.
    """

    def one(x: Any) -> Any:
        return read_local(x) if isinstance(x, TowerLocal) else plain(x)

    return jax.tree.map(
        one, value, is_leaf=lambda x: isinstance(x, MirroredVar | TowerLocal)
    )


def placed_like(value: PyTree, new: PyTree, num_towers: int) -> PyTree:
    """New values where another value lies: mirrored or a copy a tower.

    Args:
      value: An array, ``PerTower`` or variable; one leaf says where.
      new: A pytree of arrays; ``PerTower`` where there is one a tower already.
      num_towers: ``T``.

    Returns:
      The new tree, as ``PerTower`` where ``value`` holds a value a tower.

    Raises:
      ValueError: ``value`` holds no array; ``new`` differs from tower to tower and
        ``value`` does not.
    """
    arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
    if not arrays:
        raise ValueError(
            "colocate_vars_with: the value holds no jax.Array and so lies nowhere. Pass"
            " a variable, or an array that strategy.create_var placed."
        )
    if not is_per_tower(value):
        _check_mirrored(new, "colocate_vars_with a mirrored value")
        return jax.tree.map(lambda x: _like(arrays[0], jnp.asarray(x)), plain(new))
    if is_per_tower(new):
        rows = new if isinstance(new, PerTower) else PerTower(new.value)
        rows = stacked_rows(rows, num_towers, "The PerTower value")
    else:
        rows = copies(jax.tree.map(jnp.asarray, plain(new)), num_towers)
    return PerTower(jax.tree.map(lambda x: _like(arrays[0], x), rows))


def fetch(
    value: PyTree, destination: Any, fn: Callable[[PyTree], PyTree] | None
) -> PyTree:
    """The value, or ``fn`` of it, on one device.

    Args:
      value: What all towers share; variables are read.
      destination: A device or its name.
      fn: Applied where the value lies, before it is sent; None sends all of it.

    Returns:
      A tree of arrays.

    Raises:
      ValueError: The value differs from tower to tower; the device is none.
    """
    value = read_var(value)
    _check_mirrored(value, "strategy.fetch")
    return send(value if fn is None else fn(value), destination)


def group(values: tuple[PyTree, ...]) -> PyTree:
    """The values, once all of them are computed.

    Args:
      values: Pytrees.

    Returns:
      The tuple; a lone value as it is. Inside jit none is used before all are there.
    """
    leaves, treedef = jax.tree.flatten(values)
    which = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    if is_traced(leaves):
        tied = lax.optimization_barrier([leaves[i] for i in which])
        for i, x in zip(which, tied, strict=True):
            leaves[i] = x
        values = jax.tree.unflatten(treedef, leaves)
    else:
        jax.block_until_ready(leaves)
    return values[0] if len(values) == 1 else values
