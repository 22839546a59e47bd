"""Parameters in the containers that libraries make of them."""

import collections
import dataclasses
import functools
import types

import flax
import jax
import jax.numpy as jnp
import pytest

KINDS = ("dict", "named tuple", "dataclass", "flax.struct", "module")
"""Of containers; a module has a function beside its parameters, as Equinox's have."""


@functools.cache
def class_of(kind, names):
    """A class of such a kind, with these fields."""
    if kind == "named tuple":
        return collections.namedtuple("Params", names)
    if kind == "dataclass":
        made = dataclasses.make_dataclass("Params", names)
        return jax.tree_util.register_dataclass(made, names, ())
    if kind == "module":
        static = dataclasses.field(default=jnp.tanh, metadata={"static": True})
        fields = [*names, ("activation", object, static)]
        made = dataclasses.make_dataclass("Params", fields, frozen=True)
        return jax.tree_util.register_dataclass(made)
    declared = {"__annotations__": dict.fromkeys(names, object)}
    if kind == "flax.struct":
        return flax.struct.dataclass(type("Params", (), declared))
    equinox = pytest.importorskip("equinox")
    return types.new_class(
        "Params", (equinox.Module,), exec_body=lambda x: x.update(declared)
    )


def held(kind, tree):
    """The tree with containers of a kind in place of dicts, in the same order."""
    if isinstance(tree, list):
        return [held(kind, x) for x in tree]
    if not isinstance(tree, dict) or kind == "dict":
        return tree
    names = tuple(sorted(tree))
    return class_of(kind, names)(**{x: held(kind, tree[x]) for x in names})


def as_dicts(tree):
    """The inverse of `held`."""
    if isinstance(tree, list):
        return [as_dicts(x) for x in tree]
    if isinstance(tree, dict):
        return {name: as_dicts(x) for name, x in tree.items()}
    if hasattr(tree, "_fields"):
        return as_dicts(tree._asdict())
    if not dataclasses.is_dataclass(tree):
        return tree
    return as_dicts({x: y for x, y in vars(tree).items() if x != "activation"})
