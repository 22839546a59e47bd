"""Save and restore values of all towers, on any number of towers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import reduced_dtype
from towerjax.mesh.placement import Placement, place, readable
from towerjax.towers.cross_tower.assign import cast_exactly, split_sum
from towerjax.towers.fields import StrategyFields
from towerjax.towers.tower_local import read_local, refuse_own_copy
from towerjax.towers.variables import TowerLocal, is_variable, label, plain
from towerjax.types import Layout, PyTree, Reduction, leaf_name, named_leaves
from towerjax.types.leaves import listed, native, parts_of


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
    return jax.tree.map(readable, read_local(tree))


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
    expected = jax.tree.structure(plain(like))
    if jax.tree.structure(saved) != expected:
        raise ValueError(
            f"restored_values: saved is {jax.tree.structure(saved)}, expected"
            f" {expected}. Pass what saved_values returned of such a tree."
        )

    def one(path: tuple[Any, ...], old: Any, new: PyTree) -> Any:
        layout = Layout.PER_TOWER if isinstance(old, TowerLocal) else Layout.MIRRORED
        where = leaf_name("saved", path) + (
            f", {label(old)}," if is_variable(old) else ""
        )
        leaves = []
        for (name, x), leaf in zip(
            named_leaves(where, new), jax.tree.leaves(old), strict=True
        ):
            try:
                x = _restore_leaf(placement.num_towers, old, leaf, x)
                is_array = isinstance(x, jax.Array)
                leaves.append(place(x, placement, layout) if is_array else x)
            except ValueError as error:
                problems.append(f"{name} {error}")
        return None if problems else jax.tree.structure(old).unflatten(leaves)

    out = jax.tree_util.tree_map_with_path(one, like, saved, is_leaf=is_variable)
    if problems:
        raise ValueError(
            f"restored_values: {listed(problems)}. Pass what saved_values returned"
            " of such a tree, or change the values before."
        )
    return out


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
