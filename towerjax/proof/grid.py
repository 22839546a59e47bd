"""Over which coordinate of a tower axis does a collective in groups run?

An axis of ``N`` towers is a grid of ``N / L`` blocks of ``L`` neighbours. Groups that
are the blocks run over the position in the block; the groups ``j, j + L, j + 2 L, ...``
run over the number of the block. A value reduced over both is the same on every tower,
reduced over one it still depends on the other.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias


class Coordinate(NamedTuple):
    """One of the two coordinates of tower ``i`` in a grid of blocks.

    Attributes:
      axis: The axis that is seen as a grid.
      block: ``L``, towers in a block.
      within: Is it the position in the block, ``i % L``? Else ``i // L``.
    """

    axis: str
    block: int
    within: bool


Along: TypeAlias = frozenset[str | Coordinate]
"""What a value may depend on: whole axes, or one coordinate of an axis."""


def along_axes(along: Along) -> frozenset[str]:
    """The axes of which a value may depend on any part."""
    return frozenset(x if isinstance(x, str) else x.axis for x in along)


def without_axes(along: Along, axes: Iterable[str]) -> Along:
    """What a value may depend on after a reduction over whole axes."""
    return frozenset(x for x in along if not along_axes(frozenset([x])) & set(axes))


def coordinate_of(
    groups: Sequence[Sequence[int]], axis: str, size: int
) -> Coordinate | None:
    """The coordinate that differs inside each group, the other being the same."""
    rows = [list(group) for group in groups]
    length = len(rows[0])
    if any(len(row) != length for row in rows):
        return None
    if rows == [list(range(i, i + length)) for i in range(0, size, length)]:
        return Coordinate(axis, length, within=True)
    if rows == [list(range(i, size, len(rows))) for i in range(len(rows))]:
        return Coordinate(axis, len(rows), within=False)
    return None


def without_coordinate(along: Along, over: Coordinate) -> Along:
    """What a value may depend on after a reduction in the groups of a coordinate."""
    left = without_axes(along, [over.axis])
    if along - left <= {over}:
        return left
    return left | {over._replace(within=not over.within)}
