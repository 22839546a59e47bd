"""Which tree holds T towers' trees? Regroup T nests into one, and select one back."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.towers.merge import are_apart, is_mergeable, num_rows
from towerjax.towers.variables import MirroredVar, TowerLocal, named
from towerjax.types import PerTower, PyTree
from towerjax.types.leaves import key_data


def select_tower(value: PyTree, tower: int) -> PyTree:
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

    return jax.tree.map(one, value, is_leaf=_is_whole)


def regroup(nests: Sequence[PyTree]) -> PyTree:
    """One tree of ``T`` towers' trees: the inverse of `select_tower`."""
    if not nests:
        raise ValueError("nests is empty; pass one tree for each tower.")
    return _regrouped(list(nests), "nests")


def _is_same(leaves: Sequence[Any]) -> bool:
    """Is it one value on all towers: the same object, or equal constants?"""
    first = leaves[0]
    return all(x is first for x in leaves) or _are_equal_constants(leaves)


def _are_equal_constants(leaves: Sequence[Any]) -> bool:
    first = leaves[0]
    plain = isinstance(first, str | bytes | int | float | complex)
    return plain and all(type(x) is type(first) and x == first for x in leaves)


def _is_whole(x: Any) -> bool:
    return isinstance(x, PerTower | TowerLocal | MirroredVar)


def _regrouped(nests: list[Any], where: str) -> Any:
    first = nests[0]
    if all(x is None for x in nests):
        return None
    if any(isinstance(x, MirroredVar) for x in nests):
        return _one_variable(nests, where)
    children = [_children(x) for x in nests]
    structures = [structure for _, structure in children]
    for tower, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                f"{where} differs in structure from tower to tower: tower 0 has"
                f" {_shown(first)}, tower {tower} {_shown(nests[tower])}. Give all"
                " towers the same lists, tuples and keys."
            )
    if structures[0] == jax.tree.structure(0):  # a leaf, and not an empty list
        return first if _is_same(nests) else PerTower(_side_by_side(nests))
    if isinstance(first, TowerLocal):
        return jax.tree.map(lambda *rows: jnp.stack(rows), *nests)
    rows = zip(*[nodes for nodes, _ in children], strict=True)
    parts = [
        _regrouped([x for _, x in row], where + jax.tree_util.keystr(row[0][0]))
        for row in rows
    ]
    return jax.tree.unflatten(structures[0], parts)


def _children(nest: Any) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten_with_path(nest, is_leaf=lambda x: x is not nest)


def _shown(nest: Any) -> str:
    if isinstance(nest, dict):
        return f"a dict of {sorted(map(str, nest))}"
    if isinstance(nest, tuple | list):
        return f"a {type(nest).__name__} of {len(nest)}"
    if isinstance(nest, TowerLocal):
        return named(nest)
    return "None" if nest is None else f"a leaf, {type(nest).__name__}"


def _side_by_side(leaves: list[Any]) -> Any:
    kinds = {(np.shape(x), jnp.result_type(x)) for x in leaves if is_mergeable(x)}
    if len(kinds) == 1 and all(map(is_mergeable, leaves)):
        return jnp.stack([jnp.asarray(x) for x in leaves])
    return tuple(leaves)


def _one_variable(nests: list[Any], where: str) -> MirroredVar:
    first = nests[0]
    for tower, x in enumerate(nests):
        mirrored = isinstance(x, MirroredVar) and isinstance(first, MirroredVar)
        if not mirrored or (x.name, x.reduction) != (first.name, first.reduction):
            shown = [named(v) if _is_whole(v) else _shown(v) for v in (first, x)]
            raise ValueError(
                f"{where}: towers made variables with a mismatching name or reduction:"
                f" tower 0 {shown[0]}, tower {tower} {shown[1]}. Give a mirrored"
                " variable one name on all towers."
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
