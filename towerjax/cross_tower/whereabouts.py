"""Where do values lie, and when are they there? Colocate, fetch, group."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.cross_tower.assign import (
    check_mirrored,
    copies,
    copy_like,
    is_traced,
    read_var,
)
from towerjax.cross_tower.values import as_per_tower, is_per_tower, send
from towerjax.merge import stacked_rows
from towerjax.types import PerTower, PyTree
from towerjax.variables import plain


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
    check_mirrored([args, kwargs], "strategy.update_non_slot")
    if isinstance(devices, tuple | list) and not devices:
        raise ValueError(
            "strategy.update_non_slot: devices is empty; name at least one, or pass"
            " strategy.non_slot_devices()."
        )
    args, kwargs = plain((args, kwargs))
    return send(plain(fn(*args, **kwargs)), devices)


def placer_like(value: PyTree, num_towers: int) -> Callable[[PyTree], PyTree]:
    """A function that places new values where another value lies.

    Args:
      value: An array, ``PerTower`` or variable; one leaf says where.
      num_towers: ``T``.

    Returns:
      ``new -> placed``: as ``PerTower``, a copy a tower, where ``value`` holds a
      value a tower; refuses values that differ from tower to tower where it does not.

    Raises:
      ValueError: ``value`` holds no array.
    """
    arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
    if not arrays:
        raise ValueError(
            "colocate_vars_with: the value holds no jax.Array and so lies nowhere. Pass"
            " a variable, or an array that strategy.create_var placed."
        )

    def mirrored(new: PyTree) -> PyTree:
        check_mirrored(new, "colocate_vars_with a mirrored value")
        return jax.tree.map(lambda x: copy_like(arrays[0], jnp.asarray(x)), plain(new))

    def per_tower(new: PyTree) -> PerTower:
        if is_per_tower(new):
            rows = stacked_rows(as_per_tower(new), num_towers, "The PerTower value")
        else:
            rows = copies(jax.tree.map(jnp.asarray, plain(new)), num_towers)
        return PerTower(jax.tree.map(lambda x: copy_like(arrays[0], x), rows))

    return per_tower if is_per_tower(value) else mirrored


def fetch(
    value: PyTree, destination: Any, fn: Callable[[PyTree], PyTree] | None
) -> PyTree:
    """The value, or ``fn`` of it, on one device.

    Args:
      value: What all towers share; variables are read.
      destination: A device or its name; None is this process's first CPU.
      fn: Applied where the value lies, before it is sent; None sends all of it.

    Returns:
      A tree of arrays.

    Raises:
      ValueError: The value differs from tower to tower; the device is none.
    """
    value = read_var(value)
    check_mirrored(value, "strategy.fetch")
    if destination is None:
        destination = jax.local_devices(backend="cpu")[0]
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
