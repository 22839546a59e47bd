"""What of a tree with variables is saved, and how is it restored on other towers?"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import check_addable, reduced_dtype
from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower.assign import cast_exactly, placed, shares
from towerjax.towers.tower_local import read_variables
from towerjax.towers.variables import TowerLocal, is_variable, named
from towerjax.types import Layout, PyTree, Reduction, leaf_name
from towerjax.types.leaves import listed


def saved_values(tree: PyTree) -> PyTree:
    """The tree as plain values that do not know how many towers there were.

    Args:
      tree: A pytree that may hold variables, such as a ``TrainState``.

    Returns:
      The tree: a mirrored variable is its value, a tower-local one its aggregate;
      what is no variable as it is.

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
            check_addable(x.reduction, x.value) if isinstance(x, TowerLocal) else None
        except ValueError:
            problems.append(f"{leaf_name('tree', path)}, {named(x)}, {x.reduction!r}")
    if problems:
        raise ValueError(
            "These tower-local variables have no one value to save:"
            f" {listed(problems)}. Give them SUM, MEAN or ONLY_FIRST_TOWER (random"
            " keys: ONLY_FIRST_TOWER), or leave them out of the tree."
        )
    return read_variables(tree)


def restored_values(strategy: Any, like: PyTree, saved: PyTree) -> PyTree:
    """A tree like another, holding saved values, on the strategy's towers.

    Args:
      strategy: Which towers, where; any number, whoever saved.
      like: What `saved_values` was given, or its like, such as a new state: says
        structure, reductions, shapes and dtypes; its values are not used.
      saved: What `saved_values` returned, maybe read from a file.

    Returns:
      The tree: mirrored values on all devices; of a tower-local SUM each tower has
      its share, of MEAN and ONLY_FIRST_TOWER the value.

    Raises:
      ValueError: Structure, shape or dtype differ, or a whole number would be cut;
        names all leaves.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.Mirrored(towers=3)
      >>> like = strategy.create_var("count", 0, reduction=tj.Reduction.SUM,
      ...     tower_local=True)
      >>> restored_values(strategy, like, 7).value.tolist()
      [3, 2, 2]
    """
    return restored_on(strategy.placement, like, saved)


def restored_on(placement: Placement, like: PyTree, saved: PyTree) -> PyTree:
    """As `restored_values`, on the towers of a placement."""
    problems: list[str] = []
    nodes, treedef = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_variable)
    expected = treedef.unflatten(_held(x) for _, x in nodes)
    if jax.tree.structure(saved) != jax.tree.structure(expected):
        raise ValueError(
            f"restored_values: saved is {jax.tree.structure(saved)}, expected"
            f" {jax.tree.structure(expected)}. Pass what saved_values returned of such"
            " a tree."
        )
    parts = treedef.flatten_up_to(saved)
    out = [
        _restored(placement, leaf_name("saved", path), x, part, problems)
        for (path, x), part in zip(nodes, parts, strict=True)
    ]
    if problems:
        raise ValueError(
            f"restored_values: {listed(problems)}. Pass what saved_values returned"
            " of such a tree, or change the values before."
        )
    return treedef.unflatten(out)


def _held(x: Any) -> Any:
    return x.value if is_variable(x) else x


def _restored(
    placement: Placement, where: str, like: Any, saved: PyTree, problems: list[str]
) -> Any:
    """The node on the strategy's towers; says in ``problems`` what does not fit."""
    layout = Layout.PER_TOWER if isinstance(like, TowerLocal) else Layout.MIRRORED
    where += f", {named(like)}," if is_variable(like) else ""
    leaves, old = [], jax.tree.leaves(_held(like))
    pairs = zip(jax.tree_util.tree_leaves_with_path(saved), old, strict=True)
    for (path, new), old in pairs:
        try:
            leaf = _restored_leaf(placement.num_towers, like, old, new)
        except ValueError as error:
            problems.append(f"{leaf_name(where, path)} {error}")
        else:
            numbers = isinstance(leaf, jax.Array)
            leaves.append(placed(leaf, placement, layout) if numbers else leaf)
    if problems:
        return None
    value = jax.tree.unflatten(jax.tree.structure(_held(like)), leaves)
    return dataclasses.replace(like, value=value) if is_variable(like) else value


def _restored_leaf(num_towers: int, like: Any, old: Any, new: Any) -> Any:
    if isinstance(old, str):
        return new
    local = isinstance(like, TowerLocal)
    if local and like.reduction is Reduction.NONE:
        raise ValueError("has Reduction.NONE, so nothing of it was saved")
    shape, dtype = np.shape(old), jnp.result_type(old)
    shape, new = shape[1:] if local else shape, jnp.asarray(new)
    read = reduced_dtype(like.reduction, dtype) if local else dtype
    if new.shape != shape:
        raise ValueError(f"has shape {new.shape}, expected {shape}")
    if new.dtype not in (read, dtype):
        raise ValueError(f"is {new.dtype}, expected {read}")
    # Divided before it is cast: a sum of small integers may not be a small integer.
    rows = shares(like, new, num_towers) if local else new
    return cast_exactly(rows, dtype)
