"""merge_call, and the checks and stacking of the towers' values that it needs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import gather_over_towers
from towerjax.mesh.placement import TowerAxes
from towerjax.proof.scale import MERGED
from towerjax.towers.executors import in_merge_fn
from towerjax.towers.fields import StrategyFields
from towerjax.towers.variables import TowerLocal, is_per_tower, is_variable
from towerjax.types import PerTower, PyTree
from towerjax.types.leaves import native, parts_of, refuse_unheld


def refuse_in_turn(axes: TowerAxes, what: str) -> None:
    """Raise under ``local="scan"``, where a device's towers cannot communicate."""
    if axes.in_turn:
        raise ValueError(
            f"{what} needs all towers at once, but local='scan' runs the towers of a"
            " device one after another. Use local='vmap', or return the value as"
            " tj.Weighted in TowerOutput(metrics=...) and let the step reduce it; what"
            " a loss needs of all rows comes from an earlier pass of tj.build_step;"
            " what strategy.call_for_each_tower returns, strategy.reduce reduces."
        )


def refuse_all_towers(value: PyTree, what: str) -> None:
    """Raise where a tower would gather a value that all towers already hold."""
    if parts_of(PerTower, value):
        raise ValueError(
            f"{what} of a PerTower, which holds all towers' values. In a merge function"
            " they have met: write strategy.reduce(tj.Reduction.MEAN, value), or"
            " strategy.unwrap(value)."
        )


def is_mergeable(leaf: Any) -> bool:
    """Whether ``leaf`` is an array, which may differ from tower to tower."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def as_native(root: str, tree: PyTree) -> PyTree:
    """The tree in native byte order; raise where devices cannot hold an array."""
    arrays = jax.tree.map(lambda x: x if is_mergeable(x) else None, tree)
    refuse_unheld(root, arrays)
    return jax.tree.map(native, tree)


def stack_towers(value: PerTower, num_towers: int, name: str) -> PyTree:
    """Stack the towers' values to leaves ``[T, ...]``."""
    rows = value.values
    if is_tuple(rows):
        check_structures(rows, name)
        rows = jax.tree.map(lambda *leaves: _stack_leaves(leaves, name), *rows or [()])
        rows = rows if value.values else np.zeros(0)
    for x in jax.tree.leaves(rows):
        if np.shape(x)[:1] != (num_towers,):
            raise ValueError(
                f"{name} has shape {np.shape(x)}, but dim 0 runs over the"
                f" {num_towers} towers. Stack one value for each tower. A tuple of them"
                " will do; a list is a tree of such arrays."
            )
    return rows


def is_tuple(values: Any) -> bool:
    """Whether ``values`` is a tuple of one value a tower, and no tree ``[T, ...]``."""
    return type(values) is tuple


def num_stacked(rows: PyTree) -> int:
    """The number of towers whose values are stacked in ``rows``."""
    counts = {np.shape(x)[:1] for x in jax.tree.leaves(rows)}
    if len(counts) == 1 and counts != {()}:
        return counts.pop()[0]
    raise ValueError(
        f"PerTower(values={rows!r:.200}) holds no value for each tower: all of its"
        " arrays need the same dim 0, which runs over towers. Stack one value for"
        " each tower, or pass a tuple of them; what all towers share needs no PerTower."
    )


def check_structures(rows: Sequence[PyTree], name: str, is_leaf: Any = None) -> None:
    """Raise unless all towers' values have the same structure."""
    treedefs = [jax.tree.structure(row, is_leaf=is_leaf) for row in rows]
    for tower, treedef in enumerate(treedefs):
        if treedef != treedefs[0]:
            raise ValueError(
                f"{name} holds {treedefs[0]} of tower 0 and {treedef} of tower {tower},"
                " which cannot lie side by side. Give all towers one structure."
            )


def _stack_leaves(leaves: Sequence[Any], name: str) -> jax.Array:
    shapes = [np.shape(leaf) for leaf in leaves]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{name} holds values of shapes {', '.join(map(str, shapes))}, which"
            " cannot lie side by side. Pad them to one shape, join them with"
            " strategy.gather, or reduce them with axis=..."
        )
    for tower, leaf in enumerate(leaves):
        if not is_mergeable(leaf) and not isinstance(leaf, int | float | complex):
            raise ValueError(
                f"{name} holds {leaf!r} of tower {tower}, which is no array and no"
                " number. Pass it to all towers alike, or number such values and pass"
                " the numbers."
            )
    return jnp.stack([jnp.asarray(leaf) for leaf in leaves])


def merge_over_towers(
    strategy: StrategyFields,
    axes: TowerAxes,
    tower_id: jax.Array,
    merge_fn: Callable[..., PyTree],
    values: tuple[PyTree, ...],
    named: dict[str, PyTree],
) -> PyTree:
    """``merge_fn`` of all towers' values, the same on every tower.

    Every tower computes the same function of the same gathered values, so nothing is
    sent back, and JAX can differentiate it.
    """
    refuse_in_turn(axes, "tower.merge_call")
    refuse_all_towers((values, named), "tower.merge_call")

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, TowerLocal):
            return jax.tree.map(lambda x: gather_over_towers(x, axes), leaf)
        return PerTower(gather_over_towers(leaf, axes)) if is_mergeable(leaf) else leaf

    def row_of(rows: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(rows, tower_id, keepdims=False)

    def own_row(leaf: Any) -> Any:
        if isinstance(leaf, TowerLocal):
            return jax.tree.map(lambda x: own_row(PerTower(x)), leaf)
        if not isinstance(leaf, PerTower):
            return leaf
        what = "A PerTower that merge_fn returned"
        return jax.tree.map(row_of, stack_towers(leaf, axes.num_towers, what))

    with jax.named_scope(MERGED):
        values, named = jax.tree.map(gather, (values, named), is_leaf=is_variable)
    with in_merge_fn():
        merged = merge_fn(strategy, *values, **named)
    return jax.tree.map(own_row, merged, is_leaf=is_per_tower)
