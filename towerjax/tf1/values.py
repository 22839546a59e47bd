"""Send values to devices, select them and regroup them, as TensorFlow did."""

from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import towerjax as tj
from towerjax.towers import variables
from towerjax.towers.values import (
    check_structures,
    copies_by_leaf,
    copy_to,
    copy_to_first_cpu,
    refuse_in_tower,
    tree_of_tower,
    unpad_batches,
)
from towerjax.types import PerTower, PyTree
from towerjax.types.options import check_callable, check_whole
from towerjax.types.refusals import a_type
from towerjax.types.trees import has_tracers, key_data, leaf_name, parts_of

AnyStrategy: TypeAlias = tj.Mirrored | tj.OneDevice


def select_tower(self: AnyStrategy, value: PyTree, tower: Any) -> PyTree:
    """Take the tree of tower ``t`` out of a tree with values of all towers.

    It is the inverse of `regroup`. Each ``PerTower`` leaf and tower-local variable is
    replaced by the tower's value. ``tower`` is the number ``t``, from 0, or the device
    of one tower, a ``jax.Device`` or a name such as ``"gpu:2"``.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(towers=2)
      >>> value = strategy.regroup([{"own": "a", "n": 3}, {"own": "b", "n": 3}])
      >>> strategy.select_tower(value, 1)
      {'n': 3, 'own': 'b'}
    """
    if isinstance(tower, str | jax.Device):
        tower = self.placement.tower_on(tower)
    check_whole("select_tower: tower", tower, 0, self.num_towers - 1)

    def selected(x: Any) -> Any:
        if isinstance(x, PerTower | variables.TowerLocal):
            x = copies_by_leaf(x) if isinstance(x, variables.TowerLocal) else x
            return tree_of_tower(x, tower, self.num_towers)
        if not variables.is_variable(x):
            refuse_in_tower("select_tower", x, "tower.all_gather(x)[1]")
        return x

    def is_whole(x: Any) -> bool:
        return isinstance(x, PerTower | variables.Variable)

    return jax.tree.map(selected, unpad_batches(value), is_leaf=is_whole)


def regroup(self: AnyStrategy, nests: Sequence[PyTree]) -> PyTree:
    """Join the trees of all ``T`` towers, which have one structure, to one tree.

    A leaf is bare if all towers have the same object or equal constants, and otherwise
    a ``PerTower``, in tower order. It is the inverse of `select_tower`.
    """
    if not isinstance(nests, Sequence) or len(nests) != self.num_towers:
        size = f" of {len(nests)}" if isinstance(nests, Sized) else ""
        raise ValueError(
            f"regroup got {a_type(nests)}{size}, but needs a list of {self.num_towers}"
            " trees, one per tower in tower order."
        )
    check_structures(nests, "nests", is_leaf=_is_regrouped_whole)
    return jax.tree_util.tree_map_with_path(
        _regrouped, *nests, is_leaf=_is_regrouped_whole
    )


def _is_regrouped_whole(x: Any) -> bool:
    return x is None or variables.is_variable(x)


def _regrouped(path: tuple[Any, ...], *leaves: Any) -> Any:
    """Join one leaf of each tower, as `regroup` does."""
    where = leaf_name("nests", path)
    if any(isinstance(x, variables.MirroredVar) for x in leaves):
        return _one_mirrored(leaves, where)
    if any(map(_is_regrouped_whole, leaves)):
        check_structures(leaves, where)
        return jax.tree.map(lambda *rows: jnp.stack(rows), *leaves)
    return leaves[0] if _is_one_constant(leaves) else PerTower(leaves)


def _one_mirrored(leaves: tuple[Any, ...], where: str) -> Any:
    """Take the one mirrored variable that all towers returned.

    Raise if they returned different variables.
    """
    first = leaves[0]
    if all(x is first or _bits(x) == _bits(first) for x in leaves):
        return first
    raise ValueError(
        f"{where}: a mirrored variable must be the same on all towers, but has several"
        f" names, reductions or values: {leaves!r:.400}. Use a tj.TowerLocal for values"
        " that differ."
    )


def _is_one_constant(leaves: tuple[Any, ...]) -> bool:
    """Return whether all towers have the same object, or equal constants of Python."""
    first = leaves[0]
    if isinstance(first, str | bytes | int | float | complex):
        return all(type(x) is type(first) and x == first for x in leaves)
    return all(x is first for x in leaves)


def _bits(x: Any) -> tuple[Any, ...]:
    """Take the structure of ``x`` and the bytes of its leaves, to compare exactly.

    The structure includes a variable's name and reduction.
    """
    leaves, treedef = jax.tree.flatten(x)
    return treedef, *(np.asarray(key_data(leaf)).tobytes() for leaf in leaves)


def fetch(
    self: AnyStrategy,
    value: PyTree,
    destination: Any = None,
    fn: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """Send a replicated value, or ``fn`` of it, to one device.

    ``destination`` is a device or its name; None is this process's first CPU. ``fn`` is
    applied where the value lies, so that only its result is sent. While JAX traces,
    None leaves the value where it is.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(towers=2)
      >>> v = strategy.create_var("v", [1.0, 2.0])
      >>> float(strategy.fetch(v, fn=lambda x: x[0] + x[1]))
      3.0
    """
    value = variables.read_local(value)
    refuse_per_tower(value, "strategy.fetch")
    refuse_in_tower("fetch", value, "x itself, which a tower reads as it is")
    if fn is not None:
        check_callable("fn", fn, "fn(value)")
        value = fn(value)
    if destination is None:
        return copy_to_first_cpu(value)
    return copy_to(value, destination)


def broadcast(self: AnyStrategy, value: PyTree, destinations: Any = None) -> PyTree:
    """Copy a replicated value to each of several devices.

    ``destinations=None`` is all devices of the strategy.
    """
    refuse_per_tower(value, "strategy.broadcast")
    refuse_in_tower(
        "broadcast", value, "tower.reduce(tj.Reduction.ONLY_FIRST_TOWER, x)"
    )
    if destinations is None:
        destinations = value if has_tracers(value) else self.placement.devices
    return copy_to(value, destinations)


def refuse_per_tower(values: PyTree, method: str) -> None:
    """Raise if a value differs from tower to tower."""
    if per_tower := parts_of(PerTower | tj.TowerLocal, values):
        raise ValueError(
            f"{method}: Expected value to be mirrored across towers, got a"
            f" {type(per_tower[0]).__name__}. Reduce it first, with strategy.reduce or"
            " strategy.read_var, or assign in a tower, with tower.assign."
        )
