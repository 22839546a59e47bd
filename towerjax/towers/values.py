"""Take values of all towers apart, stack them, and copy them to devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.collectives.ops import CrossTowerOps
from towerjax.collectives.sparse_rows import is_rows
from towerjax.data.placer import PlacedBatch
from towerjax.mesh import live
from towerjax.mesh.devices import (
    canonical_device_names,
    find_devices,
    host_device,
)
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import place
from towerjax.towers import variables
from towerjax.towers.executors import is_of_one_tower
from towerjax.types import Layout, PerTower, PyTree
from towerjax.types.refusals import refuse_unheld
from towerjax.types.trees import (
    has_tracers,
    is_key,
    is_traced,
    map_parts,
    native,
    parts_of,
)


class StrategyFields:
    """The fields of every strategy: its towers' places and its communication."""

    placement: Placement
    cross_tower_ops: CrossTowerOps
    prefetch_on_device: int

    @property
    def num_towers(self) -> int:
        """The number of towers, ``T``."""
        return self.placement.num_towers


def is_mergeable(leaf: Any) -> bool:
    """Return whether ``leaf`` is an array, and so may differ from tower to tower."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def as_native(root: str, tree: PyTree) -> PyTree:
    """Bring the arrays of a tree to the machine's byte order.

    Raises, with the name ``root``, if devices cannot hold an array.
    """
    arrays = jax.tree.map(lambda x: x if is_mergeable(x) else None, tree)
    refuse_unheld(root, arrays)
    return jax.tree.map(native, tree)


def unpad_batches(tree: PyTree) -> PyTree:
    """Replace each placed batch in a tree by its towers' rows."""
    has_batch = parts_of(PlacedBatch, tree)  # otherwise the same objects are returned
    return map_parts(PlacedBatch, PlacedBatch.unpadded, tree) if has_batch else tree


def stack_towers(value: PerTower, num_towers: int, name: str) -> PyTree:
    """Stack the towers' values to leaves ``[T, ...]``; raise unless there are ``T``."""
    start = name[0].upper() + name[1:]

    def stack(*leaves: Any) -> jax.Array:
        shapes = [np.shape(leaf) for leaf in leaves]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"{start} holds values of shapes {', '.join(map(str, shapes))}, which"
                " cannot be stacked. Pad them, or join them:"
                " jnp.concatenate(strategy.unwrap(x))."
            )
        return jnp.stack([jnp.asarray(leaf) for leaf in leaves])

    rows = value.values
    if is_tuple(rows):
        refuse_unheld(f"{name}'s values", rows)
        check_structures(rows, name)
        rows = jax.tree.map(stack, *rows) if rows else np.zeros(0)
    for x in jax.tree.leaves(rows):
        if np.shape(x)[:1] != (num_towers,):
            raise ValueError(
                f"{start} has shape {np.shape(x)}, but dim 0 runs over the {num_towers}"
                " towers. Stack one value for each tower, or pass a tuple of them; a"
                " list is a tree of such arrays."
            )
    return rows


def stack_local(local: PyTree, num_towers: int) -> PyTree:
    """Repeat the first values of tower-local variables per tower, to ``[T, ...]``.

    If a value is a ``PerTower``, each tower gets its own part of it.
    """

    def as_array(x: Any) -> Any:
        is_made = is_key(x) or isinstance(x, Tracer)
        return x if is_made else native(np.asarray(x))

    def stack(x: Any) -> Any:
        if isinstance(x, PerTower):
            rows = stack_towers(x, num_towers, "a PerTower of a tower-local variable")
            return jax.tree.map(as_array, rows)
        x = as_array(x)
        broadcast = np.broadcast_to if isinstance(x, np.ndarray) else jnp.broadcast_to
        return broadcast(x, (num_towers, *x.shape))

    local = variables.check_tower_local(local)
    return jax.tree.map(stack, local, is_leaf=lambda x: isinstance(x, PerTower))


def is_tuple(values: Any) -> bool:
    """Return whether ``values`` is a tuple with one tree per tower.

    Otherwise it is one tree with leaves ``[T, ...]``.
    """
    return type(values) is tuple


def check_structures(rows: Sequence[PyTree], name: str, is_leaf: Any = None) -> None:
    """Raise unless all towers' values have the same structure."""
    treedefs = [jax.tree.structure(row, is_leaf=is_leaf) for row in rows]
    for tower, treedef in enumerate(treedefs):
        if treedef != treedefs[0]:
            raise ValueError(
                f"{name} holds {treedefs[0]} of tower 0 and {treedef} of tower {tower},"
                " which cannot be stacked. Give all towers the same structure."
            )


def copies_by_leaf(variable: variables.TowerLocal) -> variables.TowerLocal:
    """Wrap each leaf ``[T, ...]`` of the variable in a ``PerTower``."""
    variables.refuse_own_copy(variable)
    return jax.tree.map(PerTower, variable, is_leaf=is_rows)


def values_of_towers(value: Any, num_towers: int) -> list[Any]:
    """List each tower's tree; a replicated value gives a list of one."""
    if not parts_of(PerTower | variables.TowerLocal, value):
        return [value]
    value = map_parts(variables.TowerLocal, lambda x: copies_by_leaf(x).value, value)
    parts = [x.values for x in parts_of(PerTower, value)]
    counts = [len(x) if is_tuple(x) else num_towers for x in parts]
    towers = range(min(counts, default=num_towers))
    return [tree_of_tower(value, tower, num_towers) for tower in towers]


def tree_of_tower(value: PyTree, tower: Any, num_towers: int) -> PyTree:
    """Replace each ``PerTower`` in a tree by one tower's value."""

    def value_of(x: PerTower) -> PyTree:
        if is_tuple(x.values):
            return x.values[tower]
        rows = stack_towers(x, num_towers, "the PerTower value")
        return jax.tree.map(lambda x: x[tower], rows)

    return map_parts(PerTower, value_of, value)


def unwrap(self: StrategyFields, value: Any) -> list[Any]:
    """List the ``T`` towers' values; ``[value]`` if the value is replicated."""
    return values_of_towers(unpad_batches(value), self.num_towers)


def refuse_in_tower(method: str, value: Any, instead: str) -> None:
    """Raise in a tower function if ``value`` is one tower's value, not merged yet."""
    if is_of_one_tower(value):
        raise ValueError(
            f"strategy.{method} needs all towers' values, but in a tower function it"
            f" got one tower's value. Write {instead}, or merge first: in"
            f" tower.merge_call(lambda strategy, x: strategy.{method}(...), x) the"
            " function gets all towers' values."
        )


def copy_to(value: PyTree, destinations: Any) -> PyTree:
    """Copy the value to one device, or to each of several; with None do not move it."""
    # A traced destination means every device.
    if destinations is None or has_tracers(destinations):
        return value
    if has_tracers(value):
        raise ValueError(
            f"destinations={destinations!r:.200} cannot be used inside a tower function"
            " or a step, where a value already lies on every device. Leave destinations"
            " out."
        )
    names = _names_of(destinations)
    return place(value, Placement(names, len(names)), Layout.MIRRORED)


def copy_to_first_cpu(value: PyTree) -> PyTree:
    """Copy the value to this process's first CPU; while JAX traces, leave it there."""
    return value if has_tracers(value) else copy_to(value, host_device())


def of_first_process(tree: PyTree, placement: Placement) -> PyTree:
    """Replace a tree's arrays and numbers by those of the first process."""
    if placement.num_processes == 1 or is_traced(tree):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    scalars = (bool, int, float, complex)
    held = [i for i, x in enumerate(leaves) if is_mergeable(x) or type(x) in scalars]
    placed = place([leaves[i] for i in held], placement, Layout.MIRRORED)
    for i, x in zip(held, placed, strict=True):
        # A Python number stays a Python number, which takes the dtype of its operands.
        leaves[i] = x.item() if type(leaves[i]) in scalars else x
    return treedef.unflatten(leaves)


def _names_of(destinations: Any) -> tuple[str, ...]:
    """Find the canonical names of the devices of ``destinations``."""
    arrays = jax.tree.leaves(destinations)
    devices = destinations
    if arrays and all(isinstance(x, jax.Array) for x in arrays):
        all_devices = {device for x in arrays for device in x.devices()}
        devices = sorted(all_devices, key=lambda device: device.id)
    if isinstance(destinations, str | jax.Device):
        devices = [destinations]
    if not isinstance(devices, Sequence) or isinstance(devices, str) or not devices:
        raise ValueError(
            f"destinations={destinations!r:.200} must be a device name, such as"
            " 'gpu:0', a jax.Device, a tuple of these, or a value that lies on devices."
            " Leave it out for all devices of the strategy."
        )
    names = canonical_device_names(devices)
    if jax.process_count() > 1 and not isinstance(destinations, jax.Device):
        owners = [x.process_index for x in find_devices(names)]
        if len({owners.count(p) for p in live.numbers_left()}) > 1:
            raise ValueError(
                f"destinations {', '.join(names)} belong to the processes {owners}, but"
                f" each of the {jax.process_count()} processes must have equally many."
                " Pass jax.local_devices()[0], a device of each process, or leave"
                " destinations out."
            )
    return names
