"""Choose a cross-tower op for given devices, or parse the text that names one."""

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from towerjax.collectives.base import CrossTowerOps
from towerjax.collectives.compressed import Compressed
from towerjax.collectives.ops import (
    AllReduce,
    Hierarchical,
    Packed,
    PinnedTree,
    ReduceToOneDevice,
)
from towerjax.mesh.devices import canonical_device_names
from towerjax.types.options import check_list, is_whole

_OPS = (AllReduce, PinnedTree, Packed, ReduceToOneDevice, Hierarchical, Compressed)


def parse_ops(text: str) -> CrossTowerOps:
    """The cross-tower op that a text such as ``"AllReduce()"`` constructs."""
    kinds = {kind.__name__: kind for kind in _OPS}
    try:
        call: Any = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        positional = [ast.literal_eval(x) for x in call.args]
        return kinds[call.func.id](*positional, **arguments)
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"cross_tower_ops={text!r} is not one of {', '.join(kinds)} with its"
            f" options, such as 'AllReduce()' or 'Packed(num_packs=2)': {error}"
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
    devices: Sequence[Any], links: Sequence[Sequence[int]]
) -> OpsChoice:
    """Choose the cross-tower op that suits the links of devices, and say why.

    `AllReduce` where each device is linked to each other one, or where no groups are;
    `Hierarchical` where neighbours make groups of equal size that are fully linked
    inside, not to each other.

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
    _check_links(links, count := len(names))

    def is_linked(size: int) -> bool:
        return all(
            j in links[i] and i in links[j]
            for start in range(0, count, size)
            for i in range(start, start + size)
            for j in range(start, i)
        )

    sizes = [n for n in range(2, count) if count % n == 0 and is_linked(n)]
    if is_linked(count):
        why = f"Each of the {count} devices is directly linked to each other one."
        return OpsChoice(AllReduce(), why)
    if not sizes:
        why = f"Links of the {count} devices make no groups of equal size."
        return OpsChoice(AllReduce(), why)
    why = (
        f"The {count} devices are directly linked to each other inside groups of"
        f" {sizes[-1]} but not across, so only 1/{sizes[-1]} of the sums goes across."
    )
    return OpsChoice(Hierarchical(group_size=sizes[-1]), why)


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
