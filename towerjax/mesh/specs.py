"""How parameters are split over the devices of one tower."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from towerjax.types import PyTree
from towerjax.types.refusals import listed
from towerjax.types.trees import leaf_name, readable_leaves

Keys: TypeAlias = tuple[str, ...]
"""The path to a leaf in its tree, each key as text."""


@dataclasses.dataclass(frozen=True)
class Specs:
    """The `PartitionSpec` of each parameter, by its path or by a function."""

    # Pairs of a path and a spec. The path leads to a leaf, or to a subtree whose leaves
    # all have the spec.
    by_keys: tuple[tuple[Keys, PartitionSpec], ...] = ()
    # A function of a leaf's name and the leaf, which returns the spec. If it is None,
    # ``by_keys`` is used.
    by_name: Callable[[str, Any], PartitionSpec] | None = None

    def __repr__(self) -> str:
        """Show the specs by name, or the name of the function."""
        if self.by_name is not None:
            return getattr(self.by_name, "__name__", repr(self.by_name))
        named = [f"{'/'.join(keys)!r}: {spec}" for keys, spec in self.by_keys]
        return f"{{{listed(named)}}}"

    @classmethod
    def of(cls, specs: Any) -> "Specs | None":
        """Make `Specs` of a tree of specs, of a prefix of it, or of a function.

        None stays None.
        """
        if specs is None or isinstance(specs, Specs):
            return specs
        if callable(specs):
            by_name: Any = specs
            return cls(by_name=by_name)

        def is_spec(x: Any) -> bool:
            return x is None or isinstance(x, PartitionSpec) or hasattr(x, "spec")

        pairs = []
        for path, x in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
            spec = getattr(x, "spec", x)  # takes the spec out of a NamedSharding
            if not isinstance(spec, PartitionSpec | None):
                raise ValueError(
                    f"{leaf_name('specs', path)} is {x!r:.200}. specs= must be a tree"
                    " of jax.sharding.PartitionSpec that is a prefix of the parameters,"
                    " or a function (name, leaf) -> PartitionSpec."
                )
            pairs.append((_keys(path), PartitionSpec() if spec is None else spec))
        return cls(tuple(pairs))

    def table(
        self, params: PyTree, sizes: Mapping[str, int]
    ) -> dict[Keys, tuple[tuple[int, ...], PartitionSpec]]:
        """Look up the shape and the spec of each parameter, by its path.

        ``sizes`` has the names and sizes of the axes within a tower.
        """
        flat = jax.tree_util.tree_leaves_with_path(params)
        names = [name for name, _ in readable_leaves("", params)]
        table = {}
        used = set[Keys]()
        for (path, x), name in zip(flat, names, strict=True):
            keys = _keys(path)
            shape = np.shape(x)
            if self.by_name is not None:
                spec = self.by_name(name, x)
                spec = PartitionSpec() if spec is None else spec
            else:
                # If several paths match the leaf, the longest one counts.
                fits = [x for x in self.by_keys if keys[: len(x[0])] == x[0]]
                if not fits:
                    raise ValueError(
                        f"specs= has no entry for {leaf_name('params', path)}. Write"
                        " jax.sharding.PartitionSpec() for a leaf that each device of a"
                        " tower holds whole."
                    )
                entry, spec = max(fits, key=lambda x: len(x[0]))
                used.add(entry)
            check_split(leaf_name("params", path), shape, spec, sizes)
            table[keys] = shape, spec
        if names := ["/".join(x) for x, _ in self.by_keys if x not in used]:
            raise ValueError(
                f"specs= has entries that match no parameter: {listed(names)}. Give a"
                " tree like params, or a prefix of it."
            )
        return table


def _keys(path: tuple[Any, ...]) -> Keys:
    return tuple(jax.tree_util.keystr((x,), simple=True) for x in path)


def specs_like(
    values: PyTree, table: Mapping[Keys, tuple[tuple[int, ...], PartitionSpec]]
) -> list[PartitionSpec]:
    """Choose a spec for each leaf: that of the parameter to which it belongs.

    A leaf of the optimizer's state belongs to a parameter of the same shape if the
    leaf's path ends with the parameter's path. A leaf without such a parameter is not
    split.
    """

    def of(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        keys = _keys(path)
        shape = np.shape(x)
        ends = (table.get(keys[i:]) for i in range(len(keys) + 1))
        fitting = (spec for end in ends if end for (s, spec) in [end] if s == shape)
        return next(fitting, PartitionSpec())

    return [of(*pair) for pair in jax.tree_util.tree_leaves_with_path(values)]


def axes_of(entry: Any) -> tuple[str, ...]:
    """Name the axes in one entry of a spec; none for None."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def check_split(
    name: str, shape: tuple[int, ...], spec: Any, sizes: Mapping[str, int]
) -> None:
    """Raise unless an array of this shape can be split as ``spec`` says."""
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"specs= gives {spec!r:.200} for {name}. Return a"
            " jax.sharding.PartitionSpec, or None for a leaf that is not split."
        )
    fault = f"specs= gives {spec} for {name}{list(shape)}"
    named = [axis for entry in spec for axis in axes_of(entry)]
    if unknown := [x for x in named if x not in sizes]:
        raise ValueError(
            f"{fault}, but {', '.join(map(repr, unknown))} is not an axis within a"
            f" tower; within=... has {', '.join(map(repr, sizes)) or 'none'}. To split"
            " over towers write tj.Mirrored(state=...)."
        )
    if len(spec) > len(shape):
        raise ValueError(
            f"{fault}, which has more entries than the array has dims. Give at most one"
            " entry for each dim."
        )
    for i, entry in enumerate(spec):
        count = math.prod(sizes[axis] for axis in axes_of(entry))
        if shape[i] % count:
            raise ValueError(
                f"{fault}, but {shape[i]}, the size of dim {i}, is not a multiple of"
                f" the {count} devices. Split another dim, or make it"
                f" {-(-shape[i] // count) * count}."
            )
