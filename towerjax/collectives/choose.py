"""Choose a cross-tower op for given devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towerjax.collectives.ops import AllReduce, CrossTowerOps, Hierarchical
from towerjax.mesh.devices import canonical_device_names, platform_devices
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_list


@dataclasses.dataclass(frozen=True)
class OpsChoice:
    """A cross-tower op, and the reason why it was chosen.

    Attributes:
      ops: The op, for ``tj.Mirrored(cross_tower_ops=...)``.
      reason: One sentence.
    """

    ops: CrossTowerOps
    reason: str


@api_boundary
def choose_cross_tower_ops(devices: Sequence[Any]) -> OpsChoice:
    """Choose the cross-tower op that suits the devices, and say why.

    The choice is `Hierarchical` if there are several processes, which have the same
    number of neighbouring devices, at least 2 each. Otherwise it is `AllReduce`,
    because XLA and NCCL know the links inside a machine.

    Args:
      devices: Names or ``jax.Device`` objects in tower order. A name may be that of a
        device that this machine does not have.

    Returns:
      An `OpsChoice`.

    Raises:
      ValueError: ``devices`` is not a list of different devices of one platform.

    Example:
      >>> choose_cross_tower_ops(["cpu:0"]).reason
      'There is one device, so nothing is sent.'

    Source:
      ``choose_the_best`` of ``tf.contrib.distribute`` (TensorFlow 1.11, 2018), which
      knows one table of links, that of a DGX-1.
    """
    names = canonical_device_names(check_list("devices", devices, "jax.devices()"))
    platform = names[0].split(":")[0]
    numbers = [int(x.split(":")[1]) for x in names]
    present = platform_devices(platform)
    absent = [x for x, i in zip(names, numbers, strict=True) if i >= len(present)]
    machine = f"{len(names)} {platform.upper()} devices"
    if len(names) == 1:
        return OpsChoice(AllReduce(), "There is one device, so nothing is sent.")
    if absent:
        missing = f"(Not on this machine: {', '.join(absent)}.)"
        why = f"Nothing is known of the links of {machine}. {missing}"
        return OpsChoice(AllReduce(), why)
    owners = [present[i].process_index for i in numbers]
    count = len(set(owners))
    size = len(owners) // count
    if count == 1:
        return OpsChoice(
            AllReduce(), f"{machine} of one process, whose links are alike."
        )
    groups = [set(owners[i : i + size]) for i in range(0, len(owners), size)]
    if size > 1 and len(groups) == count and all(len(group) == 1 for group in groups):
        return OpsChoice(
            Hierarchical(),
            f"{count} processes have {machine.replace(str(len(owners)), str(size), 1)}"
            f" each, so only 1/{size} of the sums goes between processes.",
        )
    why = f"The {machine} of {count} processes do not form equal groups of neighbours."
    return OpsChoice(AllReduce(), why)
