"""How do towers meet? merge_call: one function sees all towers' values side by side."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from towerjax.placement import TowerAxes
from towerjax.reduce import gather_over_towers
from towerjax.types import PerTower, PyTree


def refuse_in_turn(axes: TowerAxes, what: str) -> None:
    """Raise when the towers of a device run one after another and cannot meet.

    Args:
      axes: The axes of the running towers.
      what: The call that wants them to meet.

    Raises:
      ValueError: They run in turn.
    """
    if axes.in_turn:
        raise ValueError(
            f"{what} needs all towers at once, but local='scan' runs the towers of a"
            " device one after another. Use local='vmap', or return the value as"
            " tj.Weighted in TowerOutput(metrics=...) and let the step reduce it."
        )


def is_mergeable(leaf: Any) -> bool:
    """Is it a value that may differ from tower to tower, an array?

    Args:
      leaf: A leaf of an argument of ``merge_call``.

    Returns:
      False for strings and Python constants: those are the same on every tower.
    """
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def merge_over_towers(
    strategy: Any,
    axes: TowerAxes,
    tower_id: jax.Array,
    merge_fn: Callable[..., PyTree],
    values: tuple[PyTree, ...],
) -> PyTree:
    """``merge_fn(strategy, *per_tower_values)``, seen by every tower alike.

    Every tower computes the same function of the same gathered values, so the
    result needs no sending back, and it differentiates as it stands.

    Args:
      strategy: Handed to ``merge_fn``; its ``unwrap`` and ``reduce`` take the
        per-tower values.
      axes: The axes that the towers meet over.
      tower_id: ``()`` int32.
      merge_fn: The function of all towers' values.
      values: This tower's values; each array leaf becomes ``PerTower``, other
        leaves are handed on as they are.

    Returns:
      What ``merge_fn`` returned, with this tower's own row of each ``PerTower``.

    Raises:
      ValueError: The towers of a device run one after another.
    """
    refuse_in_turn(axes, "tower.merge_call")

    def gather(leaf: Any) -> Any:
        return PerTower(gather_over_towers(leaf, axes)) if is_mergeable(leaf) else leaf

    def own_row(leaf: Any) -> Any:
        if not isinstance(leaf, PerTower):
            return leaf
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, tower_id, keepdims=False), leaf.values
        )

    merged = merge_fn(strategy, *jax.tree.map(gather, values))
    return jax.tree.map(own_row, merged, is_leaf=lambda x: isinstance(x, PerTower))
