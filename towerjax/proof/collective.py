"""What becomes of a value at a collective? Of its dependence, and of its count."""

import math
from typing import Any

from jax.extend.core import JaxprEqn

from towerjax.proof.equation import (
    REDUCTIONS,
    SUMS,
    groups,
    is_full,
    named_axes,
)
from towerjax.proof.found import Collective, Hang
from towerjax.proof.marks import (
    Context,
    Coordinate,
    Mark,
    along_axes,
    coordinate_of,
    merged,
    without_axes,
    without_coordinate,
)
from towerjax.proof.origin import Site, line_of
from towerjax.proof.scale import Scale


def communicated(eqn: JaxprEqn, ins: list[Mark], context: Context) -> list[Mark]:
    """The marks after a collective, which is recorded."""
    name, site = eqn.primitive.name.removesuffix("_start"), (eqn, context.outer)
    axes = context.towers.intersection(named_axes(eqn))
    _record(eqn, context, bool(axes))
    size = context.size_of(named_axes(eqn))
    given = groups(eqn, size)
    over = _grid_coordinate(eqn, axes, size) if given is not None else None
    if name in REDUCTIONS and (given is None or over):
        scales = [_summed(eqn, name, mark, context) for mark in ins]
        return [
            _reduced(mark, over or axes, site)._replace(scale=scale)
            for mark, scale in zip(ins, scales, strict=True)
        ]
    # Sums over groups of unequal size differ even when their operands are equal.
    even = given is not None and len({len(group) for group in given}) == 1
    if (name in REDUCTIONS and even) or (name == "ppermute" and is_full(eqn, size)):
        axes = frozenset()
    # all_to_all, reduce_scatter, ...: a tower gets a part of its own of equal operands.
    own = [Mark(axes, name, site)] if axes else []
    # What depended on one coordinate may come out anywhere on the axis.
    mark = merged(m._replace(axes=along_axes(m.axes)) for m in [*ins, *own])
    if mark.axes:
        source = next((m for m in [*ins, *own] if m.axes), mark)
        mark = mark._replace(site=site, before=source)
    # It may have added up what all towers have, or not.
    scale = mark.scale._replace(sums=max(1.0, mark.scale.sums))
    mark = mark._replace(scale=scale)
    return [mark] * len(eqn.outvars)


def _summed(eqn: JaxprEqn, name: str, mark: Mark, context: Context) -> Scale:
    scale, axes = mark.scale, context.towers.intersection(named_axes(eqn))
    if name not in SUMS or not axes or context.num_towers < 2:
        return scale
    size = context.size_of(named_axes(eqn))
    is_whole = axes == context.towers and groups(eqn, size) is None
    if mark.axes or scale.is_constant or not is_whole:
        # Of what differs nobody knows whether a sum or a mean is meant.
        return scale.times(Scale(sums=1.0))
    scale = scale.times(Scale(low=1.0, high=1.0))
    if context.is_derived(eqn):
        return scale._replace(site=None)
    site = scale.site or (eqn, context.outer)
    return scale._replace(site=site) if scale.low > 0 else scale


def _reduced(mark: Mark, over: frozenset[str] | Coordinate, site: Site) -> Mark:
    if not mark.axes:
        return mark
    if isinstance(over, Coordinate):
        left = without_coordinate(mark.axes, over)
    else:
        left = without_axes(mark.axes, over)
    if not left:
        return Mark(left, site=site, before=mark)
    return mark._replace(axes=left, site=site, before=mark)


def _grid_coordinate(
    eqn: JaxprEqn, axes: frozenset[str], size: int
) -> Coordinate | None:
    """What the groups run over; None unless they are rows or columns of one axis."""
    if len(axes) != 1 or len(named_axes(eqn)) != 1:
        return None
    [axis] = axes
    return coordinate_of(eqn.params["axis_index_groups"], axis, size) if size else None


def _record(eqn: JaxprEqn, context: Context, over_towers: bool) -> None:
    name, line = eqn.primitive.name, line_of((eqn, context.outer))
    avals: list[Any] = [v.aval for v in eqn.invars]
    size = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    collective = Collective(name, named_axes(eqn), size, context.trips, line)
    context.found.append(collective)
    if over_towers and context.control:
        context.found.append(hang_of(eqn, context))


def hang_of(eqn: JaxprEqn, context: Context) -> Hang:
    """What is wrong with a collective where not every tower comes."""
    assert context.control is not None
    line, control = line_of((eqn, context.outer)), context.control
    return Hang(eqn.primitive.name, line, control[0].primitive.name, line_of(control))
