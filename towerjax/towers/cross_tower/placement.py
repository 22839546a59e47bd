"""Fetch, select, regroup, save and restore the towers' values."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import check_addable, reduced_dtype
from towerjax.mesh.devices import canonical_device_name, host_device
from towerjax.mesh.placement import Placement, place, readable
from towerjax.towers.cross_tower.assign import (
    cast_exactly,
    refuse_per_tower,
    split_sum,
)
from towerjax.towers.cross_tower.destinations import copy_to
from towerjax.towers.cross_tower.values import refuse_in_tower, unpad_batches
from towerjax.towers.executors import is_of_one_tower
from towerjax.towers.fields import StrategyFields
from towerjax.towers.merge import check_structures, is_mergeable, is_tuple, num_stacked
from towerjax.towers.tower_local import read_variables, refuse_own_copy
from towerjax.towers.variables import MirroredVar, TowerLocal, is_variable, label, plain
from towerjax.types import Layout, PerTower, PyTree, Reduction, leaf_name
from towerjax.types.leaves import has_tracers, key_data, listed, native, parts_of


class PlacementMethods(StrategyFields):
    """The methods of strategies that move values between devices and trees."""

    def fetch(
        self,
        value: PyTree,
        destination: Any = None,
        fn: Callable[[PyTree], PyTree] | None = None,
    ) -> PyTree:
        """The value, or ``fn`` of it, on one device.

        Args:
          value: A value that all towers share; variables are read.
          destination: A device or its name; None is this process's first CPU, or no
            transfer while JAX traces.
          fn: Applied where the value lies, so that only its result is sent.

        Returns:
          A tree of arrays.

        Raises:
          ValueError: The value differs from tower to tower; there is no such device.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> v = strategy.create_var("v", [1.0, 2.0])
          >>> float(strategy.fetch(v, fn=lambda x: x[0] + x[1]))
          3.0
        """
        value = read_variables(value)
        refuse_per_tower(value, "strategy.fetch")
        value = value if fn is None else fn(value)
        if destination is None:
            destination = value if has_tracers(value) else host_device()
        return copy_to(value, destination)

    def select_tower(self, value: PyTree, tower: Any) -> PyTree:
        """Tower ``t``'s own tree of a tree that holds all towers' values.

        Args:
          value: A pytree with ``PerTower`` leaves and variables.
          tower: ``t``, from 0 to ``T - 1``; or the one tower's device, a
            ``jax.Device`` or a name such as ``"gpu:2"``.

        Returns:
          The tree with the tower's own values; the inverse of `regroup`.

        Raises:
          ValueError: There is no such tower, or the device has several.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> strategy.select_tower({"own": tj.PerTower(("a", "b")), "n": 3}, 1)
          {'n': 3, 'own': 'b'}
        """
        if isinstance(tower, str | jax.Device):
            tower = self.placement.tower_on(canonical_device_name(tower))
        try:
            tower = operator.index(tower)
        except TypeError as error:
            raise ValueError(
                f"select_tower: got {tower!r:.200} as the tower, expected its number,"
                ' counted from 0, or strategy.select_tower(value, "gpu:2").'
            ) from error

        def row(rows: Any) -> Any:
            count = len(rows) if is_tuple(rows) else num_stacked(rows)
            if not 0 <= tower < count:
                raise ValueError(
                    f"There is no tower {tower} among the values of {count} towers."
                    f" Towers count from 0 to {count - 1}."
                )
            return rows[tower]

        def one(x: Any) -> Any:
            if isinstance(x, TowerLocal):
                refuse_own_copy(x)
                return jax.tree.map(row, x)
            if not isinstance(x, PerTower):
                if not is_variable(x):
                    refuse_in_tower("select_tower", x, "tower.all_gather(x)[1]")
                return x
            return row(x.values) if is_tuple(x.values) else jax.tree.map(row, x.values)

        return jax.tree.map(
            one,
            unpad_batches(value),
            is_leaf=lambda x: isinstance(x, PerTower) or is_variable(x),
        )

    def regroup(self, nests: Sequence[PyTree]) -> PyTree:
        """One tree of ``T`` towers' trees.

        Args:
          nests: Tower ``t``'s tree at index ``t``, all of one structure.

        Returns:
          The tree: one leaf where all towers have the same object or equal constants,
          else ``PerTower``; the inverse of `select_tower`.

        Raises:
          ValueError: Another number of trees than towers; structures differ.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> strategy.regroup([{"a": "x", "n": 3}, {"a": "y", "n": 3}])
          {'a': PerTower(values=('x', 'y')), 'n': 3}
        """
        if not isinstance(nests, Sequence):  # such as TensorFlow's dict by device
            raise ValueError(
                f"regroup: got a {type(nests).__name__}. Pass a list of one tree for"
                " each tower, in the order of the towers."
            )
        if len(nests) != self.placement.num_towers:
            raise ValueError(
                f"regroup: got {len(nests)} trees, but there are"
                f" {self.placement.num_towers} towers. Pass one tree for each tower."
            )

        def is_whole(x: Any) -> bool:
            return x is None or is_variable(x)

        def one(path: tuple[Any, ...], *leaves: Any) -> Any:
            where = leaf_name("nests", path)
            if any(isinstance(x, MirroredVar) for x in leaves):
                return _check_one_variable(leaves, where)
            if any(map(is_whole, leaves)):
                check_structures(leaves, where)
                return jax.tree.map(lambda *rows: jnp.stack(rows), *leaves)
            return leaves[0] if _is_same(leaves) else PerTower(_stack_or_tuple(leaves))

        check_structures(nests, "nests", is_leaf=is_whole)
        return jax.tree_util.tree_map_with_path(one, *nests, is_leaf=is_whole)


def _is_same(leaves: Sequence[Any]) -> bool:
    """Whether all towers hold the same object, or equal constants."""
    first = leaves[0]
    if isinstance(first, str | bytes | int | float | complex):
        return all(type(x) is type(first) and x == first for x in leaves)
    return all(x is first for x in leaves)


def _stack_or_tuple(leaves: Sequence[Any]) -> Any:
    kinds = {(np.shape(x), jnp.result_type(x)) for x in leaves if is_mergeable(x)}
    if len(kinds) == 1 and all(map(is_mergeable, leaves)):
        return jnp.stack([jnp.asarray(x) for x in leaves])
    return tuple(leaves)


def _check_one_variable(leaves: Sequence[Any], where: str) -> MirroredVar:
    first = leaves[0]
    labels = [
        (label(x), x.reduction) if is_variable(x) else (f"a {type(x).__name__}", None)
        for x in leaves
    ]
    for tower, x in enumerate(leaves):
        if labels[tower] != labels[0]:
            raise ValueError(
                f"{where}: towers made variables with a mismatching name or reduction:"
                f" tower 0 {labels[0][0]}, tower {tower} {labels[tower][0]}. Give a"
                " mirrored variable one name on all towers."
            )
        if x is not first and _bits(x) != _bits(first):
            raise ValueError(
                f"{where} is mirrored {label(x)}, but tower {tower} holds another value"
                " than tower 0. Reduce before you make it, or change it by"
                " tower.assign."
            )
    return first


def _bits(x: MirroredVar) -> tuple[Any, list[bytes]]:
    leaves, treedef = jax.tree.flatten(x)
    return treedef, [np.asarray(key_data(leaf)).tobytes() for leaf in leaves]


def saved_values(tree: PyTree) -> PyTree:
    """The tree as plain values that do not depend on the number of towers.

    Of several processes every one calls it, and may then read all values.

    Args:
      tree: A pytree that may hold variables, such as a ``TrainState``.

    Returns:
      The tree: a mirrored variable is its value, a tower-local one its aggregate;
      other leaves do not change. What is sharded over processes is mirrored.

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
    problems = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
        try:
            if isinstance(x, TowerLocal) and not is_of_one_tower(x.value):
                check_addable(x.reduction, x.value)
        except ValueError:
            problems.append(f"{leaf_name('tree', path)}, {label(x)}, {x.reduction!r}")
    if problems:
        raise ValueError(
            "These tower-local variables have no one value to save:"
            f" {listed(problems)}. Give them SUM, MEAN or ONLY_FIRST_TOWER (random"
            " keys: ONLY_FIRST_TOWER), or leave them out of the tree."
        )
    return jax.tree.map(readable, read_variables(tree))


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
      ValueError: Structure, shape or dtype differ, or a number does not fit its dtype;
        names all leaves.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.Mirrored(towers=3)
      >>> like = strategy.create_var("count", 0, reduction=tj.Reduction.SUM,
      ...     tower_local=True)
      >>> restored_values(strategy, like, 7).value.tolist()
      [3, 2, 2]
    """
    for x in parts_of(TowerLocal, like):
        refuse_own_copy(x)
    return restore_on(strategy.placement, like, saved)


def restore_on(placement: Placement, like: PyTree, saved: PyTree) -> PyTree:
    """As `restored_values`, for the towers of a placement."""
    problems: list[str] = []
    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_variable)
    expected = plain(like)
    if jax.tree.structure(saved) != jax.tree.structure(expected):
        raise ValueError(
            f"restored_values: saved is {jax.tree.structure(saved)}, expected"
            f" {jax.tree.structure(expected)}. Pass what saved_values returned of such"
            " a tree."
        )
    parts = treedef.flatten_up_to(saved)
    out = [
        _restore_node(placement, leaf_name("saved", path), x, part, problems)
        for (path, x), part in zip(nodes, parts, strict=True)
    ]
    if problems:
        raise ValueError(
            f"restored_values: {listed(problems)}. Pass what saved_values returned"
            " of such a tree, or change the values before."
        )
    return treedef.unflatten(out)


def _restore_node(
    placement: Placement, where: str, like: Any, saved: PyTree, problems: list[str]
) -> Any:
    """Restore a node; adds to ``problems`` the leaves that do not fit."""
    layout = Layout.PER_TOWER if isinstance(like, TowerLocal) else Layout.MIRRORED
    where += f", {label(like)}," if is_variable(like) else ""
    leaves, pairs = [], jax.tree_util.tree_leaves_with_path(saved)
    for (path, new), old in zip(pairs, jax.tree.leaves(like), strict=True):
        try:
            leaf = _restore_leaf(placement.num_towers, like, old, new)
        except ValueError as error:
            problems.append(f"{leaf_name(where, path)} {error}")
        else:
            numbers = isinstance(leaf, jax.Array)
            leaves.append(place(leaf, placement, layout) if numbers else leaf)
    if problems:
        return None
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _restore_leaf(num_towers: int, like: Any, old: Any, new: Any) -> Any:
    if isinstance(old, str):
        return new
    local = isinstance(like, TowerLocal)
    if local and like.reduction is Reduction.NONE:
        raise ValueError("has Reduction.NONE, so nothing of it was saved")
    shape, dtype = np.shape(old), jnp.result_type(old)
    shape, new = shape[1:] if local else shape, jnp.asarray(native(new))
    read = reduced_dtype(like.reduction, dtype) if local else dtype
    if new.shape != shape:
        raise ValueError(f"has shape {new.shape}, expected {shape}")
    if new.dtype not in (read, dtype):
        raise ValueError(f"is {new.dtype}, expected {read}")
    # Split before the cast: a sum of int8 may not fit int8.
    rows = split_sum(like, new, num_towers) if local else new
    return cast_exactly(rows, dtype)
