"""What of many values at once, one value for many devices, one function of many?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.cross_tower.values import is_per_tower, reduce_values, send
from towerjax.types import PerTower, PyTree, Reduction


def batch_reduce_values(
    strategy: Any, reduction: Reduction, pairs: Sequence[tuple[PyTree, Any]]
) -> list[PyTree]:
    """One value of each pair's towers' values; the sums of all pairs travel together.

    Args:
      strategy: Which towers, and how sums travel.
      reduction: SUM, MEAN or ONLY_FIRST_TOWER.
      pairs: ``(value, destinations)`` each, both as in `reduce_values`; destinations
        None leaves the result on the strategy's devices.

    Returns:
      As many values, in the order of the pairs.

    Raises:
      ValueError: ``pairs`` is no list or tuple of pairs; as `reduce_values`.

    Example:
      >>> import numpy as np
      >>> import towerjax as tj
      >>> a, b = tj.PerTower(np.ones(2)), tj.PerTower(np.ones((2, 3)))
      >>> strategy = tj.Mirrored(towers=2)
      >>> out = strategy.batch_reduce(tj.Reduction.SUM, [(a, None), (b, None)])
      >>> [x.tolist() for x in out]
      [2.0, [2.0, 2.0, 2.0]]
    """
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
    """A copy of one value on each of several devices.

    Args:
      strategy: Whose devices, where ``destinations`` is None.
      value: A pytree of arrays or numbers, which is the same for all towers.
      destinations: As in `destination_names`.

    Returns:
      The tree of mirrored arrays. A traced value, which lies on every device of the
      strategy already, as it is.

    Raises:
      ValueError: ``value`` holds a ``PerTower``; destinations of a traced value; as
        `destination_names`.

    Example:
      >>> import towerjax as tj
      >>> tj.Mirrored(("cpu:0",)).broadcast(1.5).item()
      1.5
    """
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
    """``fn(element, *args)`` of each element, element ``j`` on tower ``j mod T``.

    Args:
      strategy: Which towers.
      fn: A function of one element.
      elements: The elements, arrays or numbers of one shape.
      *args: The same for all elements.

    Returns:
      ``PerTower`` of a tuple: for each tower the results of its elements, stacked.
      The last towers are left out where there are fewer elements than towers.

    Raises:
      ValueError: An argument is ``PerTower``; ``fn`` is no function; ``elements`` is
        no sequence, or empty.
    """
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
