"""Which parameters are trained? The floating ones, or as was said; others are fixed."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.types import PyTree, name_by_key, named_leaves

Trainable: TypeAlias = Callable[[str, Any], bool] | PyTree
"""``(name, leaf) -> bool``, or a tree of bool of which ``params`` may be longer."""


def trainable_flags(params: PyTree, trainable: Trainable | None) -> PyTree:
    """A bool for each leaf: is it trained? Raises where it cannot be."""
    if trainable is None:
        # Of narrow floats and complex numbers it has to be said that they are fixed.
        flags = jax.tree.map(lambda x: jnp.issubdtype(_dtype(x), np.inexact), params)
    elif callable(trainable):
        flags = jax.tree_util.tree_map_with_path(
            lambda path, x: bool(trainable(name_by_key(path), _shape(x))), params
        )
    else:
        flags = _spread(trainable, params)
    named, chosen = named_leaves("params", params), jax.tree.leaves(flags)
    if any(chosen):
        named = [pair for pair, yes in zip(named, chosen, strict=True) if yes]
    bad = [f"{name} is {_dtype(x)}" for name, x in named if not _has_gradient(x)]
    if not any(chosen):
        bad = bad or ["trainable=... leaves none"]
    if bad:
        raise ValueError(
            "Every leaf of params that is trained gets a gradient and so is floating,"
            f" of 16 bits or more, but {'; '.join(bad)}. Say trainable=lambda name,"
            " leaf: ... (or a tree of bool) where it is fixed; cast inside the loss"
            " function to what is narrower."
        )
    return flags


def check_trainable(trainable: Any) -> None:
    """Raise unless it is a function, or a tree of bool."""
    leaves = jax.tree.leaves(trainable)
    if not callable(trainable) and not all(isinstance(x, bool) for x in leaves):
        raise ValueError(
            f"trainable={trainable!r} must be a function (name, leaf) -> bool, or a"
            " tree of True and False like params or its upper part."
        )


def trained_part(params: PyTree, flags: PyTree) -> PyTree:
    """The leaves that are trained, None for the others; ``params`` if all are."""
    if all(jax.tree.leaves(flags)):
        return params
    return jax.tree.map(lambda yes, x: x if yes else None, flags, params)


def with_trained(part: PyTree, params: PyTree, flags: PyTree) -> PyTree:
    """``params`` with other values of the leaves that are trained."""
    left = iter(jax.tree.leaves(part))
    return jax.tree.map(lambda yes, x: next(left) if yes else x, flags, params)


def _spread(trainable: PyTree, params: PyTree) -> PyTree:
    """A bool for each leaf of ``params``, of a tree that ends sooner."""
    try:
        return jax.tree.map(
            lambda yes, part: jax.tree.map(lambda _: yes, part), trainable, params
        )
    except ValueError as error:
        raise ValueError(
            f"trainable is not the upper part of params: {error}. Give it the same"
            " containers, and True or False for a leaf or for all below."
        ) from error


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), _dtype(x))


def _has_gradient(x: Any) -> bool:
    return jnp.issubdtype(_dtype(x), jnp.floating) and _dtype(x).itemsize > 1
