"""merge_call, and the checks and stacking of the towers' values that it needs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import gather_over_towers
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.placement import TowerAxes
from towerjax.proof.scale import MERGED
from towerjax.towers.executors import in_merge_fn
from towerjax.towers.fields import StrategyFields
from towerjax.towers.variables import TowerLocal, is_per_tower, is_variable
from towerjax.types import PerTower, PyTree
from towerjax.types.leaves import map_parts, native, parts_of, refuse_unheld


def check_meeting(axes: TowerAxes, what: str, values: PyTree = None) -> None:
    """Raise where a device's towers cannot communicate, or have already met."""
    if axes.in_turn:
        raise ValueError(
            f"{what} needs all towers at once, but local='scan' runs the towers of a"
            " device one after another. Use local='vmap', or return the value as"
            " tj.Weighted; what a loss needs of all rows comes from an earlier pass of"
            " tj.build_step; what call_for_each_tower returns, strategy.reduce reduces."
        )
    if parts_of(PerTower, values):
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


def unpad_batches(tree: PyTree) -> PyTree:
    """Replace each placed batch of a tree by its towers' rows."""
    if not parts_of(PlacedBatch, tree):
        return tree  # the same objects
    return map_parts(PlacedBatch, PlacedBatch.unpadded, tree)


def stack_towers(value: PerTower, num_towers: int, name: str) -> PyTree:
    """Stack the towers' values to leaves ``[T, ...]``; raise unless there are ``T``."""

    def stack(leaves: Sequence[Any]) -> jax.Array:
        shapes = [np.shape(leaf) for leaf in leaves]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"{name} holds values of shapes {', '.join(map(str, shapes))}, which"
                " cannot lie side by side. Pad or join them: strategy.gather, or axis="
            )
        return jnp.stack([jnp.asarray(leaf) for leaf in leaves])

    rows = value.values
    if is_tuple(rows):
        refuse_unheld(name, rows)
        check_structures(rows, name)
        rows = jax.tree.map(lambda *leaves: stack(leaves), *rows or [()])
        rows = rows if value.values else np.zeros(0)
    for x in jax.tree.leaves(rows):
        if np.shape(x)[:1] != (num_towers,):
            raise ValueError(
                f"{name} has shape {np.shape(x)}, but dim 0 runs over the {num_towers}"
                " towers. Stack one value for each tower, or pass a tuple of them; a"
                " list is a tree of such arrays."
            )
    return rows


def is_tuple(values: Any) -> bool:
    """Whether ``values`` is a tuple of one value a tower, and no tree ``[T, ...]``."""
    return type(values) is tuple


def check_structures(rows: Sequence[PyTree], name: str, is_leaf: Any = None) -> None:
    """Raise unless all towers' values have the same structure."""
    treedefs = [jax.tree.structure(row, is_leaf=is_leaf) for row in rows]
    for tower, treedef in enumerate(treedefs):
        if treedef != treedefs[0]:
            raise ValueError(
                f"{name} holds {treedefs[0]} of tower 0 and {treedef} of tower {tower},"
                " which cannot lie side by side. Give all towers one structure."
            )


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
    check_meeting(axes, "tower.merge_call", (values, named))

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, TowerLocal):
            return gather_over_towers(leaf, axes)
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
