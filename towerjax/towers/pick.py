"""Choose the devices of a strategy among those of the processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from towerjax.mesh import live
from towerjax.mesh.devices import canonical_device_name


def names_by_process(devices: Sequence[Any]) -> dict[int, list[str]]:
    """Name the devices of each process, without processes that are left out."""
    of_each = {number: list[str]() for number in live.numbers_left()}
    for device in devices:
        if device.process_index in of_each:
            of_each[device.process_index].append(canonical_device_name(device))
    return of_each


def pick_devices(
    of_each: Mapping[int, Sequence[str]],
    towers: int,
    size: int,
    *,
    spares: bool = False,
) -> tuple[str, ...]:
    """Pick the most devices that can share the towers evenly.

    Each process has equally many of them, but with ``spares`` the last ones may have
    none. ``of_each`` has the devices' names by process. A tower has ``size`` devices.
    """
    fewest = min(map(len, of_each.values()))
    if fewest < size:
        count_groups(fewest, size)
    least = 1 if spares else len(of_each)
    fitting = [
        (processes * n, processes, n * size)
        for processes in range(least, len(of_each) + 1)
        for n in range(1, fewest // size + 1)
        if towers % (n * processes) == 0
    ]
    if not fitting:
        count = len(of_each)
        raise ValueError(
            f"towers={towers} is not a multiple of the {count} processes, which"
            " must run equally many towers each. Use"
            f" towers={-(-towers // count) * count}."
        )
    _, processes, number = max(fitting)
    names = [*of_each.values()][:processes]
    return tuple(x for each in names for x in each[:number])


def count_groups(devices: int, devices_each: int) -> int:
    """Count the groups of ``devices_each`` devices; raise if some are left over."""
    if devices % devices_each:
        fitting = [str(n) for n in range(2, devices + 1) if devices % n == 0]
        axes = f"Give towers {' or '.join(fitting)} devices, or name" * bool(fitting)
        enough = -(-devices // devices_each) * devices_each
        raise ValueError(
            f"within=... makes a tower of {devices_each} devices, which does not divide"
            f" the {devices} devices. {axes or 'Name'} a multiple of {devices_each}; on"
            f" CPUs say jax.config.update('jax_num_cpu_devices', {enough}) before JAX"
            " is used."
        )
    return devices // devices_each
