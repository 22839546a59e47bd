"""What can be done with all towers' values outside a step? Call, unwrap, reduce."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.analysis import analyse, body_of_shard_map
from towerjax.devices import canonical_device_name, find_device
from towerjax.merge import is_mergeable, stacked_rows
from towerjax.placement import (
    Placement,
    TowerAxes,
    jit_on_devices,
    over_devices,
    over_local_towers,
    place,
    trace_one_tower,
)
from towerjax.proof import prove_mirrored
from towerjax.reduce import check_reduction, reduce_stacked
from towerjax.tower import Tower, TowerInputs
from towerjax.tower_local import TowerLocal
from towerjax.types import Layout, PerTower, PyTree, Reduction, Weighted


def _is_per_tower(x: Any) -> bool:
    return isinstance(x, PerTower | TowerLocal)


def _as_per_tower(x: Any) -> PerTower:
    return PerTower(x.value) if isinstance(x, TowerLocal) else x


class _TowerCall:
    """One call of a function on every tower: what it is given and what it returned.

    Values that are no arrays do not pass through JAX: they are kept beside.
    """

    def __init__(self, strategy: Any, fn: Callable[..., PyTree], args: PyTree) -> None:
        self.strategy, self.fn = strategy, fn
        leaves, self.treedef = jax.tree.flatten(args, is_leaf=_is_per_tower)
        self.kinds = [
            "rows" if _is_per_tower(x) else "array" if is_mergeable(x) else "constant"
            for x in leaves
        ]
        self.constants = [
            x for x, kind in zip(leaves, self.kinds, strict=True) if kind == "constant"
        ]
        # pmap wants at least one argument of the towers' own: the first, not used.
        self.rows = [jnp.arange(strategy.num_towers)]
        self.rows += [
            stacked_rows(_as_per_tower(x), strategy.num_towers, "A PerTower argument")
            for x in leaves
            if _is_per_tower(x)
        ]
        self.arrays = [jnp.asarray(x) for x in leaves if is_mergeable(x)]
        self.out_treedef: Any = None
        self.out_constants: list[Any] = []

    def device_fn(self, axes: TowerAxes, rows: list[Any], arrays: list[Any]) -> Any:
        """All towers of a device: the array outputs, leaves ``[k, ...]``."""
        none = jnp.int32(0)
        inputs = TowerInputs(self.strategy, axes, none, jax.random.key(0), none)

        def tower_fn(tower_id: jax.Array, row: list[Any]) -> tuple[PyTree, PyTree]:
            tower = inputs.tower(tower_id, None, none, 0)
            return (), self._call(tower, row[1:], arrays)

        return over_local_towers(tower_fn, axes, rows, stack_sums=False)[1]

    def _call(self, tower: Tower, rows: list[Any], arrays: list[Any]) -> list[Any]:
        pools = {
            "rows": iter(rows),
            "array": iter(arrays),
            "constant": iter(self.constants),
        }
        leaves = [next(pools[kind]) for kind in self.kinds]
        args, kwargs = jax.tree.unflatten(self.treedef, leaves)
        out = self.fn(tower, *args, **kwargs)
        leaves, self.out_treedef = jax.tree.flatten(out)
        traced = [is_mergeable(x) for x in leaves]
        self.out_constants = [
            None if t else (x,) for t, x in zip(traced, leaves, strict=True)
        ]
        return [x for t, x in zip(traced, leaves, strict=True) if t]

    def result(self, arrays: list[Any]) -> PyTree:
        """The function's own tree of results."""
        pool = iter(arrays)
        leaves = [next(pool) if c is None else c[0] for c in self.out_constants]
        return jax.tree.unflatten(self.out_treedef, leaves)


def call_for_each_tower(
    strategy: Any, fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """What ``fn(tower, *args, **kwargs)`` returns on every tower.

    Compiles at each call: for looking at towers and for tests, not for a loop.

    Args:
      strategy: Which towers, where.
      fn: The tower function; may use ``tower.merge_call`` and the like.
      *args: Each ``PerTower`` leaf is replaced by the tower's own row; other
        leaves are the same on all towers.
      **kwargs: As ``args``.

    Returns:
      ``fn``'s tree. An array that is the same on every tower, by proof, is
      returned bare; another as ``PerTower``; what is no array as it is.

    Raises:
      ValueError: A ``PerTower`` argument has another number of rows than there
        are towers; a collective stands where not every tower would reach it.
    """
    placement: Placement = strategy.placement
    call = _TowerCall(strategy, fn, (args, kwargs))
    in_layouts = (Layout.PER_TOWER, Layout.MIRRORED)
    values = (call.rows, call.arrays)

    def on(axes: TowerAxes, mirrored: list[bool]) -> Callable[..., Any]:
        def device_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
            out = call.device_fn(axes, rows, arrays)
            return [x[0] if m else x for x, m in zip(out, mirrored, strict=True)]

        return device_fn

    def trace_fn(rows: list[Any], arrays: list[Any]) -> list[Any]:
        return call.device_fn(placement.abstract_axes, rows, arrays)

    jaxpr, _ = trace_one_tower(
        trace_fn, placement.abstract_axes, in_layouts, Layout.PER_TOWER, values
    )
    body, per_tower = body_of_shard_map(jaxpr), len(jax.tree.leaves(call.rows))
    # Arrays that the function closes over come first, the same on all towers.
    closed_over = len(body.invars) - per_tower - len(call.arrays)
    names = [None] * closed_over + ["argument"] * per_tower + [None] * len(call.arrays)
    found = analyse(body, names, placement.abstract_axes.names)
    prove_mirrored(found, [None] * len(found.outputs))
    mirrored = [dependence is None for dependence in found.outputs]
    out_layouts = [Layout.MIRRORED if m else Layout.PER_TOWER for m in mirrored]
    global_fn = over_devices(
        on(placement.axes, mirrored), placement, in_layouts, out_layouts
    )
    run = jit_on_devices(global_fn, placement, in_layouts, out_layouts, donate=False)
    out = run(*place(values, placement, in_layouts))
    return call.result(
        [x if m else PerTower(x) for x, m in zip(out, mirrored, strict=True)]
    )


def unwrap(value: Any) -> list[Any]:
    """The towers' values as a list; ``[value]`` when it is one value.

    Args:
      value: ``PerTower``, ``TowerLocal`` or anything else.

    Returns:
      ``T`` values in tower order, or one.

    Example:
      >>> unwrap(PerTower((1, 2))), unwrap(5)
      ([1, 2], [5])
    """
    if not _is_per_tower(value):
        return [value]
    rows = _as_per_tower(value).values
    if isinstance(rows, tuple | list):
        return list(rows)
    return [
        jax.tree.map(lambda x, t=t: x[t], rows)
        for t in range(jax.tree.leaves(rows)[0].shape[0])
    ]


def reduce_values(
    strategy: Any,
    reduction: Reduction,
    value: PyTree,
    *,
    axis: int | None = None,
    destinations: Any = None,
) -> PyTree:
    """One value of all towers' values.

    Args:
      strategy: Which towers.
      reduction: SUM, MEAN or ONLY_FIRST_TOWER.
      value: A pytree of ``PerTower``; a leaf that is the same on all towers is its
        own MEAN and ONLY_FIRST_TOWER, and 0 its own SUM. A ``TowerLocal`` is reduced
        as asked here, not as it asks itself: for that see ``read_var``.
      axis: Also reduce over this dim of each tower's value, by SUM or MEAN; MEAN
        then divides by the number of elements, and sizes may differ from tower to
        tower.
      destinations: A device name, or several: where the result shall lie. Inside a
        ``merge_call`` none: every tower gets the result.

    Returns:
      The tree with one value a leaf.

    Raises:
      ValueError: ``reduction`` gives no one value; SUM of a value that is the same
        on all of several towers; another number of towers' values than there are
        towers; an unknown or empty destination.
    """
    check_reduction(reduction)
    if axis is not None and reduction is Reduction.ONLY_FIRST_TOWER:
        raise ValueError(
            f"axis={axis} adds up elements or takes their mean, which"
            " Reduction.ONLY_FIRST_TOWER does not say. Write SUM or MEAN, or reduce"
            " without axis and then over the dim."
        )

    def one(x: Any) -> Any:
        if not _is_per_tower(x):
            x = _reduce_mirrored(strategy, reduction, x)
            return x if axis is None else _reduce_with_axis(reduction, [x], axis)
        x = _as_per_tower(x)
        if axis is not None:
            rows = _rows_of_towers(strategy, x)
            return jax.tree.map(
                lambda *r, axis=axis: _reduce_with_axis(reduction, r, axis), *rows
            )
        rows = stacked_rows(x, strategy.num_towers, "The PerTower value")
        return reduce_stacked(reduction, rows)

    out = jax.tree.map(one, value, is_leaf=_is_per_tower)
    return out if destinations is None else send(out, destinations)


def _reduce_mirrored(strategy: Any, reduction: Reduction, value: Any) -> Any:
    if reduction is not Reduction.SUM or strategy.num_towers == 1:
        return value
    if not isinstance(value, Tracer) and np.ndim(value) == 0 and value == 0:
        return value
    if np.ndim(value):
        value = f"an array of shape {np.shape(value)}"
    raise ValueError(
        f"SUM of {value}, which is the same on all {strategy.num_towers} towers:"
        f" did you mean {strategy.num_towers} times the value, or the value? Use"
        " Reduction.MEAN for the value itself, or multiply by num_towers."
    )


def _rows_of_towers(strategy: Any, value: PerTower) -> list[Any]:
    """Each tower's value; a tuple from ``map`` may leave out the last towers."""
    rows = unwrap(value)
    too_few = len(rows) < strategy.num_towers and not isinstance(value.values, tuple)
    if not rows or too_few or len(rows) > strategy.num_towers:
        raise ValueError(
            f"The PerTower value holds {len(rows)} towers' values, but the strategy has"
            f" {strategy.num_towers} towers. Stack one value for each tower."
        )
    return rows


def _check_axis(row: jax.Array, axis: int) -> None:
    if not -row.ndim <= axis < row.ndim:
        raise ValueError(
            f"axis={axis} is not a dim of a tower's value of shape {row.shape}."
        )


def _reduce_with_axis(reduction: Reduction, rows: Sequence[Any], axis: int) -> Any:
    rows = [jnp.asarray(row) for row in rows]
    for row in rows:
        _check_axis(row, axis)
    # Joined and not added up row by row, so that bfloat16 is rounded once.
    joined = _join(rows, axis, "reduce with")
    if reduction is Reduction.SUM:
        return joined.sum(axis=axis)
    if joined.shape[axis]:
        return joined.mean(axis=axis)
    return Weighted(joined.sum(axis=axis), 0).value  # no elements: 0, never NaN


def send(value: PyTree, destinations: Any) -> PyTree:
    """The value on one device, or a copy on each of several.

    Args:
      value: A pytree of arrays or numbers.
      destinations: A device or its name, or a sequence of them.

    Returns:
      The tree of arrays; one that lies on several devices is one mirrored array.

    Raises:
      ValueError: No destinations, one twice, or one that this machine does not
        have; the value is traced.
    """
    several = isinstance(destinations, tuple | list)
    names = tuple(destinations) if several else (destinations,)
    if not names:
        raise ValueError("destinations is empty; name at least one device.")
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
        raise ValueError(
            f"destinations={destinations!r} inside a tower function or a step: a value"
            " there lies on every device already. Leave destinations out."
        )
    names = tuple(canonical_device_name(name) for name in names)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"destinations names {name} more than once in {names}.")
        find_device(name)
    there = Placement(names, len(names), local="vmap", executor="shard_map")
    return place(value, there, Layout.MIRRORED)


def gather_values(strategy: Any, value: PerTower, axis: int) -> jax.Array:
    """All towers' values joined along a dim; sizes may differ along it alone.

    Args:
      strategy: Which towers.
      value: ``PerTower`` of an array ``[T, ...]`` or of a tuple of ``T`` arrays.
      axis: The dim to join along.

    Returns:
      One array, in tower order.

    Raises:
      ValueError: Shapes differ in another dim; names the tower. The value is the
        same on all of several towers; has another number of towers; has no such dim.

    Example:
      >>> import towerjax as tj
      >>> value = PerTower((np.ones((1, 1)), np.ones((1, 2))))
      >>> tj.Mirrored(towers=2).gather(value, axis=1).shape
      (1, 3)
    """
    if not _is_per_tower(value):
        if strategy.num_towers > 1:
            raise ValueError(
                f"gather of a value that is the same on all {strategy.num_towers}"
                " towers: it is one value and not a PerTower. Use it as it is, or tile"
                " it for as many copies as there are towers."
            )
        value = PerTower((value,))
    rows = [jnp.asarray(x) for x in _rows_of_towers(strategy, _as_per_tower(value))]
    _check_axis(rows[0], axis)
    return _join(rows, axis, "gather along")


def _join(rows: Sequence[jax.Array], axis: int, what: str) -> jax.Array:
    def others(row: jax.Array) -> tuple[int, ...]:
        return tuple(np.delete(row.shape, axis).tolist())

    for tower, row in enumerate(rows):
        if row.ndim != rows[0].ndim or others(row) != others(rows[0]):
            raise ValueError(
                f"{what} axis {axis}: tower {tower} has shape {row.shape} and"
                f" tower 0 {rows[0].shape}; only dim {axis} may differ."
            )
    return jnp.concatenate(rows, axis=axis)


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
      ValueError: An argument is ``PerTower``; there are no elements.
    """
    if any(map(_is_per_tower, jax.tree.leaves(args, is_leaf=_is_per_tower))):
        raise ValueError(
            "map: args are the same for all elements, but one of them is PerTower. Use"
            " call_for_each_tower for values that differ from tower to tower."
        )
    if not len(elements):
        raise ValueError("map: there are no elements.")
    num_towers = strategy.num_towers
    results = [fn(x, *args) for x in elements]
    by_tower = [results[t::num_towers] for t in range(num_towers)]

    def stack(*leaves: Any) -> jax.Array:
        return jnp.stack([jnp.asarray(x) for x in leaves])

    return PerTower(tuple(jax.tree.map(stack, *group) for group in by_tower if group))
