"""What are the towers' values together? Unwrap, reduce, gather, send."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from towerjax.collectives.reduce import (
    addable,
    check_addable,
    check_axis,
    check_dim,
    check_reduction,
    reduce_stacked,
    reduced_dtype,
)
from towerjax.collectives.rows_over_towers import (
    check_joins,
    join_tower_rows,
    reduce_rows,
    reduce_stacked_rows,
)
from towerjax.collectives.sparse_rows import IndexedRows, is_rows
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.devices import canonical_device_name, find_device
from towerjax.mesh.placement import Placement, place, place_rows, waited
from towerjax.metrics.weighted import Weighted
from towerjax.towers.executors import is_of_one_tower, over_devices
from towerjax.towers.merge import (
    are_apart,
    check_structures,
    held,
    num_rows,
    stacked_rows,
)
from towerjax.towers.tower_local import read_local_over_towers
from towerjax.towers.variables import (
    MirroredVar,
    TowerLocal,
    any_per_tower,
    is_per_tower,
)
from towerjax.types import Layout, PerTower, PyTree, Reduction
from towerjax.types.leaves import has_tracers, is_traced, map_parts

_ALLOWED = (
    " destinations may be a device name such as 'cpu:1', a jax.Device, a tuple or list"
    " of these, or a value that lies on the devices: a jax.Array, a PerTower or a"
    " variable."
)


def destination_names(destinations: Any) -> tuple[str, ...]:
    """The canonical names of the devices that are meant."""
    names = tuple(canonical_device_name(device) for device in _devices(destinations))
    if not names:
        raise ValueError("destinations is empty; name at least one device.")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"destinations names {name} more than once in {names}.")
    if jax.process_count() > 1 and not isinstance(destinations, jax.Device):
        _refuse_other_processes(names)
    return names


def _refuse_other_processes(names: tuple[str, ...]) -> None:
    """Raise, on every process alike, where a name is not every process's own."""
    owners = [find_device(name).process_index for name in names]
    if len({owners.count(p) for p in range(jax.process_count())}) > 1:
        raise ValueError(
            f"destinations {', '.join(names)} belong to the processes {owners} of"
            f" {jax.process_count()}: names count the devices of all processes. Pass a"
            " device of each process's own, jax.local_devices()[0], or leave"
            " destinations out and read the value with np.asarray."
        )


def _devices(destinations: Any) -> list[Any]:
    if isinstance(destinations, tuple | list):
        for each in destinations:
            if not isinstance(each, str | jax.Device):
                raise ValueError(
                    f"destinations has {each!r}, which is not a device.{_ALLOWED}"
                )
        return list(destinations)
    if isinstance(destinations, str | jax.Device):
        return [destinations]
    if isinstance(destinations, jax.Array | PerTower | TowerLocal | MirroredVar):
        return _devices_of_value(destinations)
    raise ValueError(f"destinations={destinations!r} names no devices.{_ALLOWED}")


def _devices_of_value(value: Any) -> list[Any]:
    """The devices of all arrays of a value, each once."""
    found: dict[Any, None] = {}
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            what = "is traced" if isinstance(leaf, Tracer) else "lies on the host"
            raise ValueError(
                f"destinations is a {type(value).__name__} whose {type(leaf).__name__}"
                f" {what}, so that no device is named by it.{_ALLOWED}"
            )
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            devices: Any = sharding.mesh.devices
            found |= dict.fromkeys(devices.flat)
        else:
            found |= dict.fromkeys(sorted(leaf.devices(), key=lambda d: d.id))
    return list(found)


def reduce_side_by_side(strategy: Any, reduction: Reduction, stacked: PyTree) -> PyTree:
    """One value of the towers' values that lie side by side.

    SUM and MEAN of arrays that are there travel together, in one compiled program by
    the strategy's cross-tower ops. Where JAX is tracing, as inside a ``merge_call``,
    and for ONLY_FIRST_TOWER nothing travels.
    """
    nothing = not jax.tree.leaves(stacked) or reduction is Reduction.ONLY_FIRST_TOWER
    if nothing or is_traced(stacked):
        return reduce_stacked(reduction, stacked)
    placement: Placement = strategy.placement
    rows = place_rows(stacked, placement, Layout.PER_TOWER)
    return waited(_reduced(rows, strategy=strategy, reduction=reduction))


@functools.partial(jax.jit, static_argnames=("strategy", "reduction"))
def _reduced(rows: PyTree, *, strategy: Any, reduction: Reduction) -> PyTree:
    placement: Placement = strategy.placement

    def device_fn(rows: PyTree) -> PyTree:
        ops, axes = strategy.cross_tower_ops, placement.axes
        return read_local_over_towers(TowerLocal(rows, reduction), ops, axes)

    per_tower, mirrored = (Layout.PER_TOWER,), Layout.MIRRORED
    out = over_devices(device_fn, placement, per_tower, mirrored)(rows)
    return jax.lax.with_sharding_constraint(out, placement.sharding(mirrored))


def as_per_tower(x: Any) -> PerTower:
    """The towers' values, without the reduction of a tower-local variable."""
    if not isinstance(x, TowerLocal):
        return x
    # A tuple that a variable holds is a tree, of copies side by side.
    apart = are_apart(x.value)
    return PerTower(tuple(_rows(x.value)) if apart else x.value)


def opened(tree: PyTree) -> PyTree:
    """The tree with each element of a data set as its towers' rows."""

    def is_placed(x: Any) -> bool:
        return isinstance(x, PlacedBatch)

    if not any(map(is_placed, jax.tree.leaves(tree, is_placed))):
        return tree  # the same objects
    return map_parts(PlacedBatch, PlacedBatch.unpadded, tree)


def unwrap(value: Any) -> list[Any]:
    """The towers' values, or trees, as a list; ``[value]`` when it is one value."""
    value = opened(value)
    if not any_per_tower(value):
        return [value]
    parts, treedef = jax.tree.flatten(value, is_leaf=is_per_tower)
    columns = [
        _each(as_per_tower(x).values) if is_per_tower(x) else itertools.repeat(x)
        for x in parts
    ]
    return [treedef.unflatten(row) for row in zip(*columns, strict=False)]


def _each(rows: Any) -> list[Any]:
    return list(rows) if are_apart(rows) else _rows(rows)


def _rows(side_by_side: PyTree) -> list[PyTree]:
    """Each tower's tree of leaves ``[T, ...]``."""
    towers = range(num_rows(side_by_side))
    return [jax.tree.map(lambda x, t=t: x[t], side_by_side) for t in towers]


def reduce_values(
    strategy: Any,
    reduction: Reduction,
    value: PyTree,
    *,
    axis: int | None = None,
    destinations: Any = None,
) -> PyTree:
    """One value of all towers' values."""
    check_reduction(reduction)
    value = held("value", opened(value))
    if axis is not None:
        check_axis(axis)
    if axis is not None and reduction is Reduction.ONLY_FIRST_TOWER:
        raise ValueError(
            f"axis={axis} adds up elements or takes their mean, which"
            " Reduction.ONLY_FIRST_TOWER does not say. Write SUM or MEAN, or reduce"
            " without axis and then over the dim."
        )
    value = _whole(Weighted | IndexedRows, value, strategy.num_towers)

    def one(x: Any) -> Any:
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


def _whole(kind: Any, tree: PyTree, num_towers: int) -> PyTree:
    """The tree with each part of a class ``PerTower`` as a whole, where a field is.

    So a ``Weighted`` adds up together, of towers that all have one weight too.
    """

    def side_by_side(x: Any) -> Any:
        if is_per_tower(x):
            return stacked_rows(as_per_tower(x), num_towers, "A field")
        return jnp.broadcast_to(x, (num_towers, *np.shape(x)))

    def one(part: Any) -> Any:
        fields, treedef = jax.tree.flatten(part, is_leaf=is_per_tower)
        own = [as_per_tower(x).values for x in fields if is_per_tower(x)]
        if not own:
            return part
        if any(map(are_apart, own)):
            return PerTower(tuple(unwrap(part)))
        return PerTower(treedef.unflatten(map(side_by_side, fields)))

    return map_parts(kind, one, tree)


def _reduce_sparse(strategy: Any, reduction: Reduction, rows: Any, axis: Any) -> Any:
    num_towers, name = strategy.num_towers, "The PerTower value"
    if axis is not None:
        raise ValueError(f"axis={axis} of IndexedRows: reduce without axis first.")
    if not are_apart(rows):
        leaves, treedef = jax.tree.flatten(rows, is_leaf=is_rows)
        out = [
            reduce_stacked_rows(reduction, x, num_towers)
            if is_rows(x)
            else PerTower(stacked_rows(PerTower(x), num_towers, name))
            for x in leaves
        ]
        return jax.tree.unflatten(treedef, out)
    if len(rows) != num_towers:
        raise ValueError(
            f"The PerTower value holds {len(rows)} towers' rows, but the strategy has"
            f" {num_towers} towers. Give one IndexedRows, or array, for each tower."
        )
    check_structures(rows, name, is_leaf=is_rows)

    def one(*leaves: Any) -> Any:
        if any(map(is_rows, leaves)):
            return reduce_rows(reduction, list(leaves))
        return PerTower(stacked_rows(PerTower(leaves), num_towers, name))

    return jax.tree.map(one, *rows, is_leaf=is_rows)


def _refuse_own(what: str, value: Any, instead: str) -> None:
    """Raise in a tower function for a value of the tower's, which has met no other."""
    if is_of_one_tower(value):
        raise ValueError(
            f"strategy.{what} in a tower function of a value that is one tower's. Write"
            f" {instead}, or meet first: tower.merge_call(lambda strategy, x:"
            f" strategy.{what}(...), x) gives its function all towers' values."
        )


def _reduce_mirrored(strategy: Any, reduction: Reduction, value: Any) -> Any:
    _refuse_own("reduce", value, f"tower.reduce(tj.{reduction!r}, x)")
    if reduction is not Reduction.SUM or strategy.num_towers == 1:
        # A copy: the caller may go on writing into a NumPy array.
        numpys = np.ndarray | np.generic
        return jax.tree.map(
            lambda x: jnp.array(x) if isinstance(x, numpys) else x, value
        )
    known = not isinstance(value, Tracer) and not is_rows(value)
    # Such as the gradient of an unused parameter. In NumPy: while JAX traces, its own
    # comparison would have no value.
    if known and not np.any(np.asarray(value)):
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
    too_few = len(rows) < strategy.num_towers and not are_apart(value.values)
    if not rows or too_few or len(rows) > strategy.num_towers:
        raise ValueError(
            f"The PerTower value holds {len(rows)} towers' values, but the strategy has"
            f" {strategy.num_towers} towers. Stack one value for each tower."
        )
    return rows


def _reduce_with_axis(reduction: Reduction, rows: Sequence[Any], axis: int) -> Any:
    rows = [jnp.asarray(row) for row in rows]
    check_dim(rows, axis)
    # Joined and not added up row by row, so that bfloat16 is rounded once.
    joined = _join(rows, axis, "reduce with")
    dtype = reduced_dtype(reduction, joined.dtype)
    total = joined.astype(addable(dtype)).sum(axis=axis)
    if reduction is Reduction.MEAN:
        total = total / max(joined.shape[axis], 1)  # no elements: 0, never NaN
    return total.astype(dtype)


def send(value: PyTree, destinations: Any) -> PyTree:
    """The value on one device, or a copy on each of several."""
    if has_tracers(destinations):  # which lie on every device, as the value does there
        return value
    if has_tracers(value):
        raise ValueError(
            f"destinations={destinations!r} inside a tower function or a step: a value"
            " there lies on every device already. Leave destinations out."
        )
    names = destination_names(destinations)
    for name in names:
        find_device(name)
    there = Placement(names, len(names), local="vmap", executor="shard_map")
    return place(value, there, Layout.MIRRORED)


def gather_values(strategy: Any, value: PyTree, axis: int) -> PyTree:
    """All towers' values joined along a dim; sizes may differ along it alone."""
    check_axis(axis)
    value = _whole(IndexedRows, held("value", value), strategy.num_towers)
    if not is_per_tower(value):
        if any_per_tower(value):
            one = functools.partial(gather_values, strategy, axis=axis)
            stops = lambda x: is_per_tower(x) or is_rows(x)  # noqa: E731
            return jax.tree.map(one, value, is_leaf=stops)
        _refuse_own("gather", value, "tower.all_gather(x)")
        if strategy.num_towers > 1:
            raise ValueError(
                f"gather of a value that is the same on all {strategy.num_towers}"
                " towers: it is one value and not a PerTower. Use it as it is, or tile"
                " it for as many copies as there are towers."
            )
        value = PerTower((value,))
    rows = _rows_of_towers(strategy, as_per_tower(value))
    # A shape of IndexedRows is part of their structure, and may differ.
    bare = [jax.tree.map(lambda x: 0, row, is_leaf=is_rows) for row in rows]
    check_structures(bare, "gather: the PerTower value")

    def joined(*leaves: Any) -> Any:
        check_joins(leaves, axis)
        if any(map(is_rows, leaves)):
            return waited(join_tower_rows(list(leaves)))
        return _join(tuple(map(jnp.asarray, leaves)), axis, "gather along")

    return jax.tree.map(joined, *rows, is_leaf=is_rows)


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
