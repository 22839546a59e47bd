"""Where do values lie, and when are they there? Colocate, fetch, group."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.towers.cross_tower.assign import (
    check_mirrored,
    copies,
    copy_like,
    is_traced,
)
from towerjax.towers.cross_tower.values import as_per_tower, is_per_tower, send
from towerjax.towers.merge import are_apart, stacked_rows
from towerjax.towers.tower_local import read_variables
from towerjax.towers.variables import plain
from towerjax.types import PerTower, PyTree


def update_non_slot(
    devices: Any,
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """``fn(*args, **kwargs)``, mirrored on the devices."""
    check_mirrored([args, kwargs], "strategy.update_non_slot")
    if isinstance(devices, tuple | list) and not devices:
        raise ValueError(
            "strategy.update_non_slot: devices is empty; name at least one, or pass"
            " strategy.non_slot_devices()."
        )
    args, kwargs = plain((args, kwargs))
    return send(plain(fn(*args, **kwargs)), devices)


def placer_like(value: PyTree, num_towers: int) -> Callable[[PyTree], PyTree]:
    """A function that places new values where another value lies."""
    arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.Array)]
    if not arrays:
        raise ValueError(
            "colocate_vars_with: the value holds no jax.Array and so lies nowhere. Pass"
            " a variable, or an array that strategy.create_var placed."
        )

    def mirrored(new: PyTree) -> PyTree:
        check_mirrored(new, "colocate_vars_with a mirrored value")
        return jax.tree.map(lambda x: copy_like(arrays[0], jnp.asarray(x)), plain(new))

    def per_tower(new: PyTree) -> PyTree:
        if is_per_tower(new):
            rows = stacked_rows(as_per_tower(new), num_towers, "The PerTower value")
        else:
            rows = copies(jax.tree.map(jnp.asarray, plain(new)), num_towers)
        there = jax.tree.map(lambda x: copy_like(arrays[0], x), rows)
        return jax.tree.map(PerTower, there) if are_apart(there) else PerTower(there)

    return per_tower if is_per_tower(value) else mirrored


def fetch(
    value: PyTree, destination: Any, fn: Callable[[PyTree], PyTree] | None
) -> PyTree:
    """The value, or ``fn`` of it, on one device."""
    value = read_variables(value)
    check_mirrored(value, "strategy.fetch")
    if destination is None:
        destination = jax.local_devices(backend="cpu")[0]
    return send(value if fn is None else fn(value), destination)


def group(values: tuple[PyTree, ...]) -> PyTree:
    """The values, once all of them are computed."""
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
