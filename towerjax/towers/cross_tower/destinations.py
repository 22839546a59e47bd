"""Copy values to the devices that a name, a device or another value stands for."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from towerjax.mesh.devices import canonical_device_name, find_device
from towerjax.mesh.placement import Placement, place
from towerjax.towers.variables import MirroredVar, TowerLocal
from towerjax.types import Layout, PerTower, PyTree
from towerjax.types.leaves import has_tracers, is_traced

_ALLOWED = (
    " destinations may be a device name such as 'cpu:1', a jax.Device, a tuple or list"
    " of these, or a value that lies on the devices: a jax.Array, a PerTower or a"
    " variable."
)


def copy_to(value: PyTree, destinations: Any) -> PyTree:
    """Copy the value to one device, or to each of several."""
    if has_tracers(destinations):  # on every device, as is the value
        return value
    if has_tracers(value):
        raise ValueError(
            f"destinations={destinations!r:.200} inside a tower function or a step: a"
            " value there lies on every device already. Leave destinations out."
        )
    names = _names_of(destinations)
    return place(value, Placement(names, len(names)), Layout.MIRRORED)


def of_first_process(tree: PyTree, placement: Placement) -> PyTree:
    """The tree; of several processes the first one's numbers, on all devices."""
    if placement.num_processes == 1 or is_traced(tree):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    scalars = (bool, int, float, complex)
    kinds = (jax.Array, np.ndarray, np.generic, *scalars)
    held = [i for i, x in enumerate(leaves) if isinstance(x, kinds)]
    placed = place([leaves[i] for i in held], placement, Layout.MIRRORED)
    for i, x in zip(held, placed, strict=True):
        # A Python number stays one, which takes the dtype of what it meets.
        leaves[i] = x.item() if type(leaves[i]) in scalars else x
    return treedef.unflatten(leaves)


def _names_of(destinations: Any) -> tuple[str, ...]:
    """The canonical names of the devices of ``destinations``."""
    names = tuple(canonical_device_name(device) for device in _devices_in(destinations))
    if not names:
        raise ValueError("destinations is empty; name at least one device.")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"destinations names {name} more than once in {names}.")
    if jax.process_count() > 1 and not isinstance(destinations, jax.Device):
        _refuse_other_processes(names)
    return names


def _refuse_other_processes(names: tuple[str, ...]) -> None:
    """Raise, on all processes, unless each owns equally many of the devices."""
    owners = [find_device(name).process_index for name in names]
    if len({owners.count(p) for p in range(jax.process_count())}) > 1:
        raise ValueError(
            f"destinations {', '.join(names)} belong to the processes {owners} of"
            f" {jax.process_count()}: names count the devices of all processes. Pass a"
            " device of each process's own, jax.local_devices()[0], or leave"
            " destinations out and read the value with np.asarray."
        )


def _devices_in(destinations: Any) -> list[Any]:
    if isinstance(destinations, tuple | list):
        for each in destinations:
            if not isinstance(each, str | jax.Device):
                raise ValueError(
                    f"destinations has {each!r:.200}, which is not a device.{_ALLOWED}"
                )
        return list(destinations)
    if isinstance(destinations, str | jax.Device):
        return [destinations]
    if isinstance(destinations, jax.Array | PerTower | TowerLocal | MirroredVar):
        return _devices_of_value(destinations)
    raise ValueError(f"destinations={destinations!r:.200} names no devices.{_ALLOWED}")


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
