"""What of many values at once, one value for many devices, one function of many?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.towers.cross_tower.values import is_per_tower, reduce_values, send
from towerjax.types import PerTower, PyTree, Reduction


def batch_reduce_values(
    strategy: Any, reduction: Reduction, pairs: Sequence[tuple[PyTree, Any]]
) -> list[PyTree]:
    """One value of each pair's towers' values; all pairs' sums travel together."""
    if not isinstance(pairs, list | tuple):
        raise ValueError(
            f"batch_reduce got a {type(pairs).__name__}; give a list of pairs (value,"
            " destinations)."
        )
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2:
            what = f"a tuple of {len(pair)}" if isinstance(pair, tuple) else repr(pair)
            raise ValueError(
                f"batch_reduce: pair {number} is {what}; write (value, destinations),"
                " or (value, None) for the strategy's devices."
            )
    values = [value for value, _ in pairs]
    reduced = reduce_values(strategy, reduction, values)
    return [
        x if destinations is None else send(x, destinations)
        for x, (_, destinations) in zip(reduced, pairs, strict=True)
    ]


def broadcast_value(strategy: Any, value: PyTree, destinations: Any = None) -> PyTree:
    """A copy of one value on each of several devices."""
    leaves = jax.tree.leaves(value, is_leaf=is_per_tower)
    if any(map(is_per_tower, leaves)):
        raise ValueError(
            "broadcast of a PerTower, which has a value for each tower. Make it one"
            " first, with strategy.reduce, or name a tower: strategy.unwrap(value)[0]."
        )
    if destinations is not None:
        return send(value, destinations)
    if any(isinstance(x, Tracer) for x in leaves):
        return value
    return send(value, strategy.worker_devices)


def map_over_towers(
    strategy: Any, fn: Callable[..., PyTree], elements: Sequence[Any], *args: PyTree
) -> PerTower:
    """``fn(element, *args)`` of each element, element ``j`` on tower ``j mod T``."""
    if any(map(is_per_tower, jax.tree.leaves(args, is_leaf=is_per_tower))):
        raise ValueError(
            "map: args are the same for all elements, but one of them is PerTower. Use"
            " call_for_each_tower for values that differ from tower to tower."
        )
    if not callable(fn):
        raise ValueError(
            f"map: the function comes first, and is a {type(fn).__name__}. Write"
            " strategy.map(fn, elements, *args)."
        )
    if is_per_tower(elements):
        raise ValueError(
            "map: elements are a PerTower, of which each tower has its own. Use"
            " call_for_each_tower, or pass a list."
        )
    arrays = isinstance(elements, np.ndarray | jax.Array) and elements.ndim
    if not arrays and not isinstance(elements, Sequence):
        raise ValueError(
            f"map: elements are a {type(elements).__name__}, which does not say how"
            " many there are. Make it a list: list(elements)."
        )
    if not len(elements):
        raise ValueError("map: there are no elements.")
    num_towers = strategy.num_towers
    results = [fn(x, *args) for x in elements]
    by_tower = [results[t::num_towers] for t in range(num_towers)]

    def stack(*leaves: Any) -> jax.Array:
        return jnp.stack([jnp.asarray(x) for x in leaves])

    return PerTower(tuple(jax.tree.map(stack, *group) for group in by_tower if group))
