"""Save and restore values without a copy per tower, for any number of towers."""

import dataclasses
from typing import Any

import jax

from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import readable
from towerjax.towers.values import StrategyFields
from towerjax.towers.variables import (
    MirroredVar,
    TowerLocal,
    fit,
    fit_copies,
    is_variable,
    place_by_type,
    read_local,
)
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_methods
from towerjax.types.refusals import listed
from towerjax.types.trees import leaf_name, named_leaves


def saved_values(tree: PyTree) -> PyTree:
    """Turn a tree into plain values, which any number of towers can restore.

    Args:
      tree: A pytree that may hold variables, such as a ``TrainState``.

    Returns:
      The tree. A mirrored variable becomes its value, a tower-local one its aggregate;
      other leaves do not change. Arrays that are sharded over processes become whole;
      all processes must call this function.

    Raises:
      ValueError: Tower-local variables have no aggregate; names all of them.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(towers=2)
      >>> count = strategy.create_var("count", 3, reduction=tj.Reduction.SUM,
      ...     tower_local=True)
      >>> int(saved_values({"count": count})["count"])
      6
    """
    return jax.tree.map(readable, read_local(tree))


@api_boundary
def restored_values(strategy: StrategyFields, like: PyTree, saved: PyTree) -> PyTree:
    """Put saved values in a tree like ``like``, placed for the strategy.

    Args:
      strategy: The towers and devices; their number may differ from when it was saved.
      like: A tree such as `saved_values` was given, for example a new state. Its
        structure, reductions, shapes and dtypes are used, its values are not.
      saved: The result of `saved_values`, perhaps read from a file.

    Returns:
      The tree, with mirrored values on all devices. Each tower gets its share of a
      tower-local SUM, and the whole value of a MEAN or ONLY_FIRST_TOWER.

    Raises:
      ValueError: A structure or shape differs, or a dtype cannot hold a saved value;
        names all such leaves.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(towers=3)
      >>> like = strategy.create_var("count", 0, reduction=tj.Reduction.SUM,
      ...     tower_local=True)
      >>> restored_values(strategy, like, 7).value.tolist()
      [3, 2, 2]
    """
    check_methods("strategy", strategy, "placement", "tj.Mirrored(), or another")
    return restore_on(strategy.placement, like, saved)


def restore_on(placement: Placement, like: PyTree, saved: PyTree) -> PyTree:
    """Restore saved values as `restored_values` does, on the devices of a placement."""
    problems = []

    def restored(path: tuple[Any, ...], old: Any, new: PyTree) -> Any:
        if isinstance(old, str):
            return new
        is_local = isinstance(old, TowerLocal)
        try:
            if is_local:
                value = fit_copies(old, new, placement.num_towers)
            else:
                value = fit(old if is_variable(old) else MirroredVar(old), new)
        except ValueError as error:
            problems.append(f"{leaf_name('saved', path)}: {error}")
            return None
        if is_variable(old):
            value = dataclasses.replace(old, value=value)
        return place_by_type(value, placement)

    _refuse_another_tree(like, saved)
    out = jax.tree_util.tree_map_with_path(restored, like, saved, is_leaf=is_variable)
    if problems:
        raise ValueError(f"restored_values: {listed(problems)}")
    return out


def _refuse_another_tree(like: PyTree, saved: PyTree) -> None:
    """Raise unless ``saved`` has a value for each leaf or variable of ``like``."""
    try:
        jax.tree.structure(like, is_leaf=is_variable).flatten_up_to(saved)
    except ValueError as error:
        names, names_given = (
            [name for name, _ in named_leaves("saved", tree, is_leaf=is_variable)]
            for tree in (like, saved)
        )
        lacks = [x for x in names if not any(y.startswith(x) for y in names_given)]
        more = [y for y in names_given if not any(y.startswith(x) for x in names)]
        raise ValueError(
            "restored_values: the tree saved has another structure than the tree like."
            f" It lacks {listed(lacks) or 'nothing'}; it has besides"
            f" {listed(more) or 'nothing'}. Choose the variables in both, with the same"
            " containers."
        ) from error
