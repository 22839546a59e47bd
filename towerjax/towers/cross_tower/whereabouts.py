"""Where do values lie? Fetch, select, regroup."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.mesh.devices import canonical_device_name
from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower.assign import check_mirrored
from towerjax.towers.cross_tower.values import opened, send
from towerjax.towers.merge import are_apart, check_structures, is_mergeable, num_rows
from towerjax.towers.tower_local import read_variables
from towerjax.towers.variables import MirroredVar, TowerLocal, is_variable, named
from towerjax.types import PerTower, PyTree, leaf_name
from towerjax.types.leaves import key_data


class WhereaboutsMethods:
    """What every strategy can do with where values lie."""

    placement: Placement

    def fetch(
        self,
        value: PyTree,
        destination: Any = None,
        fn: Callable[[PyTree], PyTree] | None = None,
    ) -> PyTree:
        """The value, or ``fn`` of it, on one device.

        Args:
          value: What all towers share; variables are read.
          destination: A device or its name; None is this process's first CPU.
          fn: Applied where the value lies, before it is sent: send what is small.

        Returns:
          A tree of arrays.

        Raises:
          ValueError: The value differs from tower to tower; the device is none.

        Example:
          >>> import towerjax as tj
          >>> strategy = tj.Mirrored(towers=2)
          >>> v = strategy.create_var("v", [1.0, 2.0])
          >>> float(strategy.fetch(v, fn=lambda x: x[0] + x[1]))
          3.0
        """
        value = read_variables(value)
        check_mirrored(value, "strategy.fetch")
        if destination is None:
            destination = jax.local_devices(backend="cpu")[0]
        return send(value if fn is None else fn(value), destination)

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
        return tree_of_tower(opened(value), tower)

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
        if not isinstance(nests, Sequence):  # a dict by device, as TensorFlow had it
            raise ValueError(
                f"regroup: got a {type(nests).__name__}. Pass a list of one tree for"
                " each tower, in the order of the towers."
            )
        if len(nests) != self.placement.num_towers:
            raise ValueError(
                f"regroup: got {len(nests)} trees, but there are"
                f" {self.placement.num_towers} towers. Pass one tree for each tower."
            )
        return tree_of_all(nests)


def tree_of_tower(value: PyTree, tower: int) -> PyTree:
    """Tower ``t``'s own tree of a tree that holds all towers' values."""
    try:
        tower = operator.index(tower)
    except TypeError as error:
        raise ValueError(
            f"select_tower: got {tower!r} as the tower, expected its number, counted"
            ' from 0, or strategy.select_tower(value, "gpu:2").'
        ) from error

    def row(rows: Any) -> Any:
        count = len(rows) if are_apart(rows) else num_rows(rows)
        if not 0 <= tower < count:
            raise ValueError(
                f"There is no tower {tower} among the values of {count} towers. Towers"
                f" count from 0 to {count - 1}."
            )
        return rows[tower]

    def one(x: Any) -> Any:
        if isinstance(x, TowerLocal):
            return jax.tree.map(row, x)
        if not isinstance(x, PerTower):
            return x
        return row(x.values) if are_apart(x.values) else jax.tree.map(row, x.values)

    return jax.tree.map(
        one, value, is_leaf=lambda x: isinstance(x, PerTower) or is_variable(x)
    )


def tree_of_all(nests: Sequence[PyTree]) -> PyTree:
    """One tree of ``T`` towers' trees: the inverse of `tree_of_tower`."""

    def is_whole(x: Any) -> bool:
        return x is None or is_variable(x)

    def one(path: tuple[Any, ...], *leaves: Any) -> Any:
        where = leaf_name("nests", path)
        if any(isinstance(x, MirroredVar) for x in leaves):
            return _one_variable(leaves, where)
        if any(map(is_whole, leaves)):
            check_structures(leaves, where)
            return jax.tree.map(lambda *rows: jnp.stack(rows), *leaves)
        return leaves[0] if _are_one(leaves) else PerTower(_side_by_side(leaves))

    check_structures(nests, "nests", is_leaf=is_whole)
    return jax.tree_util.tree_map_with_path(one, *nests, is_leaf=is_whole)


def _are_one(leaves: Sequence[Any]) -> bool:
    """Is it one value on all towers: the same object, or equal constants?"""
    first = leaves[0]
    if isinstance(first, str | bytes | int | float | complex):
        return all(type(x) is type(first) and x == first for x in leaves)
    return all(x is first for x in leaves)


def _side_by_side(leaves: Sequence[Any]) -> Any:
    kinds = {(np.shape(x), jnp.result_type(x)) for x in leaves if is_mergeable(x)}
    if len(kinds) == 1 and all(map(is_mergeable, leaves)):
        return jnp.stack([jnp.asarray(x) for x in leaves])
    return tuple(leaves)


def _one_variable(leaves: Sequence[Any], where: str) -> MirroredVar:
    first = leaves[0]
    told = [
        (named(x), x.reduction) if is_variable(x) else (f"a {type(x).__name__}", None)
        for x in leaves
    ]
    for tower, x in enumerate(leaves):
        if told[tower] != told[0]:
            raise ValueError(
                f"{where}: towers made variables with a mismatching name or reduction:"
                f" tower 0 {told[0][0]}, tower {tower} {told[tower][0]}. Give a"
                " mirrored variable one name on all towers."
            )
        if x is not first and not _have_equal_values(x, first):
            raise ValueError(
                f"{where} is mirrored {named(x)}, but tower {tower} holds another value"
                " than tower 0. Reduce before you make it, or change it by"
                " tower.assign."
            )
    return first


def _have_equal_values(x: MirroredVar, y: MirroredVar) -> bool:
    if jax.tree.structure(x) != jax.tree.structure(y):
        return False
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    bits = [[np.asarray(key_data(leaf)).tobytes() for leaf in pair] for pair in pairs]
    return all(one == other for one, other in bits)
