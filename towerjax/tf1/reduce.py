"""Reduce several values together, and map a function over elements."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import towerjax as tj
from towerjax.tf1.values import AnyStrategy, refuse_per_tower
from towerjax.towers import values
from towerjax.types import PerTower, PyTree, Reduction
from towerjax.types.options import check_callable, check_list
from towerjax.types.trees import parts_of


def batch_reduce(
    self: AnyStrategy, reduction: Reduction, pairs: Sequence[tuple[PyTree, Any]]
) -> list[PyTree]:
    """Reduce the value of each ``(value, destinations)``, in one reduction.

    ``reduction`` and ``destinations`` are as for `reduce`.
    """
    pairs = check_list("pairs", pairs, "[(value, None), ...]")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(
                f"batch_reduce: pairs[{i}] is {pair!r:.200}, but must be a pair (value,"
                " destinations). Write None for all devices of the strategy."
            )
    reduced = self.reduce(reduction, [value for value, _ in pairs])
    return [values.copy_to(x, to) for x, (_, to) in zip(reduced, pairs, strict=True)]


def map_elements(
    self: AnyStrategy,
    fn: Callable[..., PyTree],
    elements: Sequence[Any],
    *args: PyTree,
    **kwargs: PyTree,
) -> PerTower:
    """Call ``fn(element, *args)`` for each element, and deal the results to towers.

    Tower ``t`` gets the results of elements ``t``, ``t + T``, ``t + 2 T`` and so on,
    stacked, so all results must have one shape.
    """
    check_callable("map: fn", fn, "fn(element); map(fn, elements) is the order")
    refuse_per_tower((elements, args, kwargs), "map")
    elements = check_list("elements", elements)
    if not elements:
        raise ValueError("map got no elements. Pass at least one.")
    elements, args, kwargs = values.of_first_process(
        (elements, args, kwargs), self.placement
    )
    results = [fn(x, *args, **kwargs) for x in elements]
    if parts_of(tj.sparse.IndexedRows, results):
        raise ValueError(
            "map: fn returned IndexedRows, which cannot be stacked. Return"
            " rows.to_dense()."
        )
    by_tower = [results[t :: self.num_towers] for t in range(self.num_towers)]

    def stack(*xs: Any) -> Any:
        return jnp.stack([jnp.asarray(x) for x in xs])

    return PerTower(tuple(jax.tree.map(stack, *group) for group in by_tower if group))
