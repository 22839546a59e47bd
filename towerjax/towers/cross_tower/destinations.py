"""Which devices are meant? Names, devices, or a value that lies on them."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from towerjax.mesh.devices import canonical_device_name, find_device
from towerjax.towers.variables import MirroredVar, TowerLocal
from towerjax.types import PerTower

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
