"""Choose a cross-tower op for given devices, or parse the text that names one."""

import ast
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from towerjax.collectives.base import CrossTowerOps
from towerjax.collectives.compressed import Compressed
from towerjax.collectives.ops import AllReduce, Hierarchical, Packed, ReduceToOneDevice
from towerjax.collectives.pinned_tree import PinnedTree
from towerjax.mesh.devices import canonical_device_names, platform_devices
from towerjax.types.options import is_whole

_OPS = (AllReduce, PinnedTree, Packed, ReduceToOneDevice, Hierarchical, Compressed)


def parse_ops(text: str) -> CrossTowerOps:
    """The cross-tower op that a text such as ``"AllReduce()"`` constructs."""
    kinds = {kind.__name__: kind for kind in _OPS}
    try:
        call: Any = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError(f"{text} is no call; write {text}().")
        func: Any = call.func
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        if call.args:
            raise ValueError("Name each option.")
        return kinds[func.id](**arguments)
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"cross_tower_ops={text!r} is not one of {', '.join(kinds)}, its options"
            f" named, such as 'AllReduce()' or 'Packed(num_packs=2)': {error}"
        ) from error


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
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ValueError(
            f"choose_cross_tower_ops: devices={devices!r} must be a list of names or"
            " jax.Device objects, such as ['gpu:0', 'gpu:1'] or jax.devices()."
        )
    names = canonical_device_names(list(devices))
    if links is not None:
        _check_links(links, len(names))
    if len(names) == 1:
        return OpsChoice(AllReduce(), "One device: nothing travels.")
    if links is not None:
        return _choose_by_links(names, links)
    return _choose_by_processes(names)


def _choose_by_links(names: tuple[str, ...], links: Sequence[Sequence[int]]) -> Any:
    count = len(names)

    def is_linked(size: int) -> bool:
        return all(
            j in links[i] and i in links[j]
            for start in range(0, count, size)
            for i in range(start, start + size)
            for j in range(start, i)
        )

    ops: CrossTowerOps = AllReduce()
    sizes = [n for n in range(2, count) if count % n == 0 and is_linked(n)]
    if is_linked(count):
        reason = f"All {count} devices are directly linked to each other."
    elif not sizes:
        reason = f"The links of the {count} devices make no groups of equal size."
    else:
        ops, size = Hierarchical(group_size=sizes[-1]), sizes[-1]
        reason = (
            f"The {count} devices are directly linked to each other inside groups of"
            f" {size} but not across, so only 1/{size} of the sums goes across."
        )
    return OpsChoice(ops, reason + _note_absent(names))


def _choose_by_processes(names: tuple[str, ...]) -> OpsChoice:
    platform = names[0].split(":")[0]
    present = platform_devices(platform)
    if absent := _note_absent(names):
        reason = f"Nothing is known of the {len(names)} devices but that they are "
        return OpsChoice(AllReduce(), f"{reason}{platform.upper()}s.{absent}")
    owners = [present[int(name.split(":")[1])].process_index for name in names]
    count = len(set(owners))
    if count == 1:
        by = "their library knows its links" if platform == "gpu" else "links are alike"
        reason = f"{len(names)} {platform.upper()} devices of one process: {by}."
        return OpsChoice(AllReduce(), reason)
    size = len(names) // count
    groups = [set(owners[i : i + size]) for i in range(0, len(names), size)]
    if len(groups) == count and all(len(group) == 1 for group in groups) and size > 1:
        reason = (
            f"{count} processes have {size} {platform.upper()} devices each, next to"
            f" each other, so only 1/{size} of the sums goes between processes."
        )
        return OpsChoice(Hierarchical(), reason)
    reason = (
        f"The {count} processes do not have several neighbouring"
        f" {platform.upper()} devices each, equally many, that could make groups."
    )
    return OpsChoice(AllReduce(), reason)


def _note_absent(names: tuple[str, ...]) -> str:
    """A sentence that names the devices that this machine lacks; "" for none."""
    num_present = len(platform_devices(names[0].split(":")[0]))
    missing = [name for name in names if int(name.split(":")[1]) >= num_present]
    if not missing:
        return ""
    return f" (Not on this machine: {', '.join(missing)}.)"


def _check_links(links: Sequence[Sequence[int]], count: int) -> None:
    if not isinstance(links, list | tuple) or len(links) != count:
        raise ValueError(
            f"links={links!r} must be a list with one list of ints for each of the"
            f" {count} devices, in the same order, such as [[1], [0]]."
        )

    def fits(linked: Any) -> bool:
        is_list = hasattr(linked, "__iter__") and not isinstance(linked, str)
        return is_list and all(is_whole(x) and int(x) >= 0 for x in linked)

    for device, linked in enumerate(links):
        if not fits(linked):
            raise ValueError(
                f"links[{device}]={linked!r} must be a list of positions in devices,"
                " ints >= 0, such as [1, 2], and [] for none."
            )
