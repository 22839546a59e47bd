"""Choose the parameters that train, and check that they and gradients fit."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.sparse_rows import dense_shape, is_rows
from towerjax.types import PyTree
from towerjax.types.refusals import few, listed, unlike
from towerjax.types.trees import leaf_name, named_leaves, readable_leaves

Trainable: TypeAlias = Callable[[str, Any], bool] | PyTree
"""``(name, leaf) -> bool``, or a tree of bool that is a prefix of ``params``."""

_SAY_TRAINABLE = "Say trainable=lambda name, leaf: ... (or a tree of bool)"
OF_MODELS = "Put it into tj.TrainState.create(..., extra=...), and read tower.extra,"
"""The advice for a fixed leaf, where there is no argument ``trainable``."""


def trainable_flags(
    params: PyTree, trainable: Trainable | None, *, advice: str = _SAY_TRAINABLE
) -> PyTree:
    """Decide for each leaf whether it trains: a tree of bool.

    Raises if a leaf that trains can have no gradient.
    """
    leaves, treedef = jax.tree.flatten(params)
    dtypes = list(map(jnp.result_type, leaves))
    if trainable is None:
        _refuse_statistics(params, advice)
        # A float of 8 bits cannot train. It is chosen here all the same, so that the
        # error below asks the user to say that it is fixed.
        chosen = [jnp.issubdtype(x, np.inexact) for x in dtypes]
    elif callable(trainable):
        shapes = map(jax.ShapeDtypeStruct, map(np.shape, leaves), dtypes)
        readable = readable_leaves("", treedef.unflatten(shapes))
        chosen = [bool(trainable(name, x)) for name, x in readable]
    else:
        try:
            chosen = jax.tree.leaves(jax.tree.broadcast(trainable, params))
        except ValueError as error:
            raise ValueError(
                f"trainable is not a prefix of params: {_unlike(trainable, params)}."
                " Give it the same containers and names, with True or False for a leaf"
                " or for a whole subtree."
            ) from error
    if trainable is not None and not any(chosen):
        names = [repr(name) for name, _ in readable_leaves("", params)]
        raise ValueError(
            "trainable=... chooses none of the params, so nothing would train. Their"
            f" names are {', '.join(few(names))}."
        )
    # If no leaf trains, the error below names all leaves.
    trains = chosen if any(chosen) else [True] * len(chosen)
    wide = [jnp.issubdtype(d, jnp.inexact) and d.itemsize > 1 for d in dtypes]
    if any([yes and not fits for yes, fits in zip(trains, wide, strict=True)]):
        named = zip(named_leaves("params", params), dtypes, trains, wide, strict=True)
        bad = [f"{x[0]} is {d}" for x, d, yes, fits in named if yes and not fits]
        raise ValueError(
            "Each leaf of params that trains must be floating or complex, of 16 bits or"
            f" more, because it gets a gradient, but {listed(bad)}. {advice} if the"
            " leaf is fixed. If it trains, cast it to its narrow dtype in the loss."
        )
    return treedef.unflatten(chosen)


def _unlike(trainable: PyTree, params: PyTree) -> str:
    """Say where ``trainable`` does not fit the tree ``params``."""
    flags, leaves = (
        [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (trainable, params)
    )

    def above(path: tuple[Any, ...], leaf: tuple[Any, ...]) -> bool:
        return leaf[: len(path)] == path

    unknown = [x for x in flags if not any(above(x, leaf) for leaf in leaves)]
    left_out = [x for x in leaves if not any(above(flag, x) for flag in flags)]
    texts = [f"params have no {leaf_name('', x)}" for x in unknown]
    texts += [f"{leaf_name('params', x)} is left out" for x in left_out]
    treedef = jax.tree.structure(trainable)
    expected = jax.tree.structure(params)
    return listed(texts or [f"it is {treedef}, and params are {expected}"])


def _refuse_statistics(params: PyTree, advice: str) -> None:
    """Raise if Flax's batch statistics are among the parameters that train."""
    is_linen = isinstance(params, Mapping) and {"params", "batch_stats"} <= {*params}
    if is_linen or "BatchStat" in node_types(params):
        raise ValueError(
            "params hold batch statistics, which would be trained, because all floats"
            " are. With flax.linen pass variables['params'], with nnx pass"
            " nnx.split(model, nnx.Param, ...)[1]. Pass statistics as step.init(...,"
            " local=tj.TowerLocal(stats, tj.Reduction.MEAN)), or as extra= if they are"
            f" the same on all towers. {advice} where they are fixed among params."
        )


def check_trainable(trainable: Any) -> None:
    """Raise unless ``trainable`` is a function or a tree of bool."""
    leaves = jax.tree.leaves(trainable)
    if not callable(trainable) and not all(isinstance(x, bool) for x in leaves):
        raise ValueError(
            f"trainable={trainable!r} must be a function (name, leaf) -> bool, or a"
            " tree of True and False that is a prefix of params."
        )


def trained_part(params: PyTree, trainable: Trainable | None) -> PyTree:
    """Keep the leaves that train, with None for others.

    If all leaves train, ``params`` itself is returned.
    """
    flags = trainable_flags(params, trainable)
    if all(jax.tree.leaves(flags)):
        return params
    return jax.tree.map(lambda yes, x: x if yes else None, flags, params)


def with_trained(part: PyTree, params: PyTree) -> PyTree:
    """Put the leaves of ``part`` in their places in ``params``.

    Where ``part`` has None, the leaf of ``params`` stays.
    """
    return jax.tree.map(
        lambda new, old: old if new is None else new,
        part,
        params,
        is_leaf=lambda x: x is None,
    )


def node_types(tree: PyTree) -> set[str]:
    """Collect the names of the types of a tree's nodes."""
    kinds: set[str] = set()
    jax.tree.flatten(tree, is_leaf=lambda x: bool(kinds.add(type(x).__name__)))
    return kinds


def check_like_params(grads: PyTree, params: PyTree) -> None:
    """Raise unless gradients form a tree like the parameters.

    A gradient may be rows of a table.
    """
    needed, got = (
        {n: str([*dense_shape(x)]) for n, x in named_leaves("grads", tree, is_rows)}
        for tree in (params, grads)
    )
    if wrong := unlike(got, needed):
        raise ValueError(
            "The gradients are not a tree like the parameters that train:"
            f" {listed(wrong)}. Pass merged['grads'] of tj.value_and_grad, or a tree"
            " like state.params."
        )
