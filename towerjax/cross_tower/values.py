"""What are the towers' values together? Unwrap, reduce, gather, map, send."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.cross_tower.destinations import destination_names
from towerjax.cross_tower.travel import reduce_side_by_side
from towerjax.devices import find_device
from towerjax.merge import check_structures, num_rows, stacked_rows
from towerjax.placement import Placement, place, waited
from towerjax.reduce import check_addable, check_axis, check_reduction
from towerjax.sparse import IndexedRows, is_rows, reduce_rows, reduce_stacked_rows
from towerjax.types import Layout, PerTower, PyTree, Reduction, Weighted
from towerjax.variables import TowerLocal


def is_per_tower(x: Any) -> bool:
    """Does it hold one value a tower?

    Args:
      x: Anything.

    Returns:
      True for ``PerTower`` and ``TowerLocal``.
    """
    return isinstance(x, PerTower | TowerLocal)


def as_per_tower(x: Any) -> PerTower:
    """The towers' values, without the reduction of a tower-local variable.

    Args:
      x: ``PerTower`` or ``TowerLocal``.

    Returns:
      ``PerTower``.
    """
    return PerTower(x.value) if isinstance(x, TowerLocal) else x


def unwrap(value: Any) -> list[Any]:
    """The towers' values as a list; ``[value]`` when it is one value.

    Args:
      value: ``PerTower``, ``TowerLocal`` or anything else.

    Returns:
      ``T`` values in tower order, or one.

    Raises:
      ValueError: A ``PerTower`` does not hold one value for each tower.

    Example:
      >>> unwrap(PerTower((1, 2))), unwrap(5)
      ([1, 2], [5])
    """
    if not is_per_tower(value):
        return [value]
    rows = as_per_tower(value).values
    if isinstance(rows, tuple | list):
        return list(rows)
    return [jax.tree.map(lambda x, t=t: x[t], rows) for t in range(num_rows(rows))]


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
        as asked here, not as it asks itself: for that see ``read_var``. A ``PerTower``
        of ``IndexedRows`` gives ``IndexedRows``.
      axis: Also reduce over this dim of each tower's value, by SUM or MEAN; MEAN
        then divides by the number of elements, and sizes may differ from tower to
        tower.
      destinations: Where the result shall lie, as in ``destination_names``. Inside a
        ``merge_call`` none: every tower gets the result.

    Returns:
      The tree with one value a leaf. Sums travel together, by the strategy's
      ``cross_tower_ops``, and lie on its devices; where JAX is tracing, they are added
      where they are.

    Raises:
      ValueError: ``reduction`` gives no one value; SUM of a value that is the same
        on all of several towers; another number of towers' values than there are
        towers; an unknown or empty destination.
    """
    check_reduction(reduction)
    if axis is not None:
        check_axis(axis)
    if axis is not None and reduction is Reduction.ONLY_FIRST_TOWER:
        raise ValueError(
            f"axis={axis} adds up elements or takes their mean, which"
            " Reduction.ONLY_FIRST_TOWER does not say. Write SUM or MEAN, or reduce"
            " without axis and then over the dim."
        )

    if reduction is not Reduction.ONLY_FIRST_TOWER:
        value = _whole_weighted(value, strategy.num_towers)

    def one(x: Any) -> Any:
        x = _per_tower_rows(x, strategy.num_towers)
        if not is_per_tower(x):
            x = _reduce_mirrored(strategy, reduction, x)
            return x if axis is None else _reduce_with_axis(reduction, [x], axis)
        x = as_per_tower(x)
        check_addable(reduction, x)
        if any(map(is_rows, jax.tree.leaves(x, is_leaf=is_rows))):
            return _reduce_sparse(strategy, reduction, x.values, axis)
        if axis is not None:
            rows = _rows_of_towers(strategy, x)
            return jax.tree.map(
                lambda *r, axis=axis: _reduce_with_axis(reduction, r, axis), *rows
            )
        return PerTower(stacked_rows(x, strategy.num_towers, "The PerTower value"))

    out = jax.tree.map(one, value, is_leaf=lambda x: is_per_tower(x) or is_rows(x))
    leaves, treedef = jax.tree.flatten(out, is_leaf=is_per_tower)
    stacked = [x.values for x in leaves if is_per_tower(x)]
    one_value = iter(reduce_side_by_side(strategy, reduction, stacked))
    leaves = [next(one_value) if is_per_tower(x) else x for x in leaves]
    out = jax.tree.unflatten(treedef, leaves)
    return out if destinations is None else send(out, destinations)


def _whole_weighted(value: PyTree, num_towers: int) -> PyTree:
    """Each ``Weighted`` with both fields per tower, where one is: they add together.

    The weight of towers that all have as many examples comes back as one value.
    """

    def one(x: Any) -> Any:
        fields = (x.sum, x.weight) if isinstance(x, Weighted) else ()
        if not any(map(is_per_tower, fields)):
            return x
        return Weighted(*(_on_each_tower(field, num_towers) for field in fields))

    return jax.tree.map(one, value, is_leaf=lambda x: isinstance(x, Weighted))


def _on_each_tower(x: Any, num_towers: int) -> Any:
    if is_per_tower(x):
        return x
    return PerTower(jnp.broadcast_to(x, (num_towers, *np.shape(x))))


def _per_tower_rows(x: Any, num_towers: int) -> Any:
    """``IndexedRows`` of ``PerTower`` values or indices as ``PerTower`` of it."""
    if not is_rows(x) or not (is_per_tower(x.values) or is_per_tower(x.indices)):
        return x

    def side_by_side(field: Any) -> Any:
        if is_per_tower(field):
            return stacked_rows(as_per_tower(field), num_towers, "A field")
        return jnp.broadcast_to(field, (num_towers, *np.shape(field)))

    values, indices = side_by_side(x.values), side_by_side(x.indices)
    return PerTower(IndexedRows(values, indices, x.dense_shape))


def _reduce_sparse(strategy: Any, reduction: Reduction, rows: Any, axis: Any) -> Any:
    num_towers = strategy.num_towers
    if axis is not None:
        raise ValueError(f"axis={axis} of IndexedRows: reduce without axis first.")
    if not isinstance(rows, tuple | list):
        leaves, treedef = jax.tree.flatten(rows, is_leaf=is_rows)
        out = [
            reduce_stacked_rows(reduction, x, num_towers)
            if is_rows(x)
            else PerTower(stacked_rows(PerTower(x), num_towers, "The PerTower value"))
            for x in leaves
        ]
        return jax.tree.unflatten(treedef, out)
    if len(rows) != num_towers:
        raise ValueError(
            f"The PerTower value holds {len(rows)} towers' rows, but the strategy has"
            f" {num_towers} towers. Give one IndexedRows, or array, for each tower."
        )
    if not any(map(is_rows, rows)):
        return _reduce_sparse_trees(strategy, reduction, rows)
    return reduce_rows(reduction, list(rows))


def _reduce_sparse_trees(strategy: Any, reduction: Reduction, rows: Any) -> Any:
    """Of towers' trees that hold ``IndexedRows`` among others, leaf by leaf."""
    treedefs = [jax.tree.structure(row, is_leaf=is_rows) for row in rows]
    for tower, treedef in enumerate(treedefs):
        if treedef != treedefs[0]:
            raise ValueError(
                f"The PerTower value holds {treedefs[0]} of tower 0 and {treedef} of"
                f" tower {tower}. Give all towers one structure."
            )

    def one(*leaves: Any) -> Any:
        if any(map(is_rows, leaves)):
            return reduce_rows(reduction, list(leaves))
        value = PerTower(tuple(leaves))
        return PerTower(stacked_rows(value, strategy.num_towers, "The PerTower value"))

    return jax.tree.map(one, *rows, is_leaf=is_rows)


def _reduce_mirrored(strategy: Any, reduction: Reduction, value: Any) -> Any:
    if reduction is not Reduction.SUM or strategy.num_towers == 1:
        # A copy: the caller may go on writing into a NumPy array.
        numpys = np.ndarray | np.generic
        return jax.tree.map(
            lambda x: jnp.array(x) if isinstance(x, numpys) else x, value
        )
    known = not isinstance(value, Tracer) and not is_rows(value)
    if known and np.ndim(value) == 0 and value == 0:
        return value
    if is_rows(value):
        value = "IndexedRows"
    elif np.ndim(value):
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
      destinations: As in ``destination_names``.

    Returns:
      The tree of arrays; one that lies on several devices is one mirrored array.

    Raises:
      ValueError: No destinations, one twice, or one that this machine does not
        have; the value is traced.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
        raise ValueError(
            f"destinations={destinations!r} inside a tower function or a step: a value"
            " there lies on every device already. Leave destinations out."
        )
    names = destination_names(destinations)
    for name in names:
        find_device(name)
    there = Placement(names, len(names), local="vmap", executor="shard_map")
    return place(value, there, Layout.MIRRORED)


def gather_values(strategy: Any, value: PerTower, axis: int) -> PyTree:
    """All towers' values joined along a dim; sizes may differ along it alone.

    Args:
      strategy: Which towers.
      value: ``PerTower`` of an array ``[T, ...]`` or of a tuple of ``T`` arrays, or of
        trees of them.
      axis: The dim to join along.

    Returns:
      One array, or tree of them, in tower order.

    Raises:
      ValueError: Shapes differ in another dim; names the tower. The value is the
        same on all of several towers; has another number of towers; has no such dim.

    Example:
      >>> import towerjax as tj
      >>> value = PerTower((np.ones((1, 1)), np.ones((1, 2))))
      >>> tj.Mirrored(towers=2).gather(value, axis=1).shape
      (1, 3)
    """
    check_axis(axis)
    if not is_per_tower(value):
        if strategy.num_towers > 1:
            raise ValueError(
                f"gather of a value that is the same on all {strategy.num_towers}"
                " towers: it is one value and not a PerTower. Use it as it is, or tile"
                " it for as many copies as there are towers."
            )
        value = PerTower((value,))
    rows = _rows_of_towers(strategy, as_per_tower(value))
    check_structures(rows, "gather: the PerTower value")

    def joined(*leaves: Any) -> jax.Array:
        leaves = tuple(map(jnp.asarray, leaves))
        _check_axis(leaves[0], axis)
        return _join(leaves, axis, "gather along")

    return jax.tree.map(joined, *rows)


def _join(rows: Sequence[jax.Array], axis: int, what: str) -> jax.Array:
    def others(row: jax.Array) -> tuple[int, ...]:
        return tuple(np.delete(row.shape, axis).tolist())

    for tower, row in enumerate(rows):
        if row.ndim != rows[0].ndim or others(row) != others(rows[0]):
            raise ValueError(
                f"{what} axis {axis}: tower {tower} has shape {row.shape} and"
                f" tower 0 {rows[0].shape}; only dim {axis} may differ."
            )
    return waited(jnp.concatenate(rows, axis=axis))
