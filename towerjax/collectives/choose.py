"""Choose a cross-tower op for given devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towerjax.collectives.ops import AllReduce, CrossTowerOps, Hierarchical
from towerjax.mesh.devices import canonical_device_names, platform_devices
from towerjax.types.options import check_list, is_whole


@dataclasses.dataclass(frozen=True)
class OpsChoice:
    """A cross-tower op and why it was chosen.

    Attributes:
      ops: For ``tj.Mirrored(cross_tower_ops=...)``.
      reason: One sentence.
    """

    ops: CrossTowerOps
    reason: str


def choose_cross_tower_ops(
    devices: Sequence[Any], links: Sequence[Sequence[int]] | None = None
) -> OpsChoice:
    """Choose the cross-tower op that suits the devices, and say why.

    With ``links``: `AllReduce` where each device is linked to each other one, or
    where no groups are; `Hierarchical` where neighbours make groups of equal size
    that are fully linked inside, not to each other. Without: `Hierarchical` for several
    processes with the same number >= 2 of neighbouring devices, else `AllReduce`.

    Args:
      devices: Names or ``jax.Device`` objects in tower order; the names may be of
        devices that this machine does not have.
      links: For each device the positions in ``devices`` of those that it has a
        direct link to. A link counts where both ends name it; links to itself and
        to devices that are not in ``devices`` do not.

    Returns:
      An `OpsChoice`.

    Raises:
      ValueError: ``devices`` is not a list of different devices of one platform;
        ``links`` has not one list of ints >= 0 for each.

    Example:
      >>> names = [f"gpu:{i}" for i in range(4)]
      >>> choose_cross_tower_ops(names, [[1], [0], [3], [2]]).ops
      Hierarchical(group_size=2)

    Source:
      ``choose_the_best`` of ``tf.contrib.distribute`` (TensorFlow 1.11, 2018), which
      knows one table of links, that of a DGX-1.
    """
    names = canonical_device_names(check_list("devices", devices, "jax.devices()"))
    if links is not None:
        _check_links(links, len(names))
    platform, numbers = names[0].split(":")[0], [int(x.split(":")[1]) for x in names]
    present = platform_devices(platform)
    absent = [x for x, i in zip(names, numbers, strict=True) if i >= len(present)]
    what = f"{len(names)} {platform.upper()} devices"
    if len(names) == 1:
        return OpsChoice(AllReduce(), "One device: nothing travels.")
    if links is not None:
        ops, reason = _by_links(links)
    elif absent:
        ops, reason = AllReduce(), f"Nothing is known of the links of {what}."
    else:
        ops, reason = _by_processes([present[i].process_index for i in numbers], what)
    note = f" (Not on this machine: {', '.join(absent)}.)" if absent else ""
    return OpsChoice(ops, reason + note)


def _by_links(links: Sequence[Sequence[int]]) -> tuple[CrossTowerOps, str]:
    count = len(links)

    def is_linked(size: int) -> bool:
        return all(
            j in links[i] and i in links[j]
            for start in range(0, count, size)
            for i in range(start, start + size)
            for j in range(start, i)
        )

    size = max(n for n in range(1, count + 1) if count % n == 0 and is_linked(n))
    if size == count:
        return AllReduce(), f"All {count} devices are directly linked to each other."
    if size == 1:
        why = f"Links of the {count} devices make no groups of equal size."
        return AllReduce(), why
    return Hierarchical(group_size=size), (
        f"The {count} devices are directly linked to each other inside groups of"
        f" {size} but not across, so only 1/{size} of the sums goes across."
    )


def _by_processes(owners: list[int], what: str) -> tuple[CrossTowerOps, str]:
    count = len(set(owners))
    size = len(owners) // count
    if count == 1:
        return AllReduce(), f"{what} of one process, whose links are alike."
    groups = [set(owners[i : i + size]) for i in range(0, len(owners), size)]
    if size > 1 and len(groups) == count and all(len(group) == 1 for group in groups):
        return Hierarchical(), (
            f"{count} processes have {what.replace(str(len(owners)), str(size), 1)}"
            f" each, so only 1/{size} of the sums goes between processes."
        )
    return AllReduce(), f"The {what} of {count} processes make no groups of neighbours."


def _check_links(links: Any, count: int) -> None:
    is_list = isinstance(links, list | tuple) and len(links) == count
    fits = is_list and all(
        isinstance(linked, list | tuple) and all(is_whole(x) and x >= 0 for x in linked)
        for linked in links
    )
    if not fits:
        raise ValueError(
            f"links={links!r} must have for each of the {count} devices, in the same"
            " order, a list of positions in devices, such as [[1], [0]]."
        )
