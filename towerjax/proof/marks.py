"""Marks: what the analysis knows of a value, and how a collective changes it."""

import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from towerjax.proof.equation import (
    REDUCTIONS,
    SUMS,
    Site,
    groups,
    is_full,
    named_axes,
    outwards,
    user_line,
)
from towerjax.proof.findings import Collective, Found, Hang
from towerjax.proof.scale import CONSTANT, SUMMED_BY_STEP, Scale, scale_of_sum


class Coordinate(NamedTuple):
    """One of the two coordinates of tower ``i`` in a grid of blocks.

    An axis of ``N`` towers is a grid of ``N / L`` blocks of ``L`` neighbours. Groups
    that are the blocks run over the position in the block; the groups ``j, j + L,
    j + 2 L, ...`` run over the number of the block. A value reduced over both is the
    same on every tower; reduced over one, it still depends on the other.
    """

    axis: str
    block: int  # L
    within: bool  # True: the position in the block, i % L; False: its number, i // L


Along: TypeAlias = frozenset[str | Coordinate]
"""What a value may depend on: whole axes, or one coordinate of an axis."""


def along_axes(along: Along) -> frozenset[str]:
    """The axes that a value may depend on, wholly or by a coordinate."""
    return frozenset(x if isinstance(x, str) else x.axis for x in along)


def without_axes(along: Along, axes: Iterable[str]) -> Along:
    """What a value may depend on after a reduction over whole axes."""
    return frozenset(x for x in along if not along_axes(frozenset([x])) & set(axes))


def coordinate_of(
    groups: Sequence[Sequence[int]], axis: str, size: int
) -> Coordinate | None:
    """The coordinate that differs inside each group while the other does not."""
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


class Mark(NamedTuple):
    """What is known of a value."""

    axes: Along  # what it may depend on; empty for a MIRRORED value
    source: str = ""  # why it may differ: an input, "tower.id" or a primitive
    site: Site | None = None  # None for an input or a constant
    before: Any = None  # the mark of the operand that the dependence comes from
    scale: Scale = Scale()  # how many times it is counted
    # 1: the weight of a gradient, or a sum of such; 2: another function of one.
    weight: int = 0


FIXED = Mark(frozenset(), scale=CONSTANT)
"""The mark of a constant."""


def join(marks: Iterable[Mark]) -> Mark:
    """The mark of a value made of several; the first that differs is its origin."""
    return functools.reduce(_join_two, marks, FIXED)


def _join_two(first: Mark, second: Mark) -> Mark:
    origin = max(first, second, key=lambda m: (bool(m.axes), m.weight))
    axes, scale = first.axes | second.axes, scale_of_sum(first.scale, second.scale)
    constant = first.scale.is_constant and second.scale.is_constant
    scale = scale._replace(is_constant=constant)
    weight = max(first.weight, second.weight)
    return origin._replace(axes=axes, scale=scale, weight=weight)


def mark_of_choice(mark: Mark, predicate: Mark) -> Mark:
    """The mark of a value that a predicate selects."""
    constant = mark.scale.is_constant and predicate.scale.is_constant
    return _join_two(mark, predicate)._replace(
        scale=mark.scale._replace(is_constant=constant)
    )


def origin_line(mark: Mark | None) -> str:
    """The last line of user code that made the value; library code may follow it."""
    while mark is not None:
        if line := user_line(mark.site):
            return line
        mark = mark.before
    return ""


_JOINS = frozenset(
    "add add_any concatenate dynamic_update_slice scatter select_n stack".split()
)
_MOVES = frozenset(
    "broadcast_in_dim convert_element_type dynamic_slice gather reshape slice squeeze"
    " transpose".split()
)


def use_of_weight(eqn: JaxprEqn, ins: Sequence[Mark]) -> int:
    """``Mark.weight`` of the results of an equation that is no collective.

    Sums of weights are weights, and so is a weight times what a tower computes, such as
    a mask. What a tower divides by a weight is a mean, and no weight. A sum over
    towers, or of a row of examples, is no longer followed.
    """
    results, name = [_float_bits(v) for v in eqn.outvars], eqn.primitive.name
    found = max((m.weight for m in ins), default=0)
    if not found or not all(results):
        return 0
    if name == "reduce_sum":
        return _weight_of_sum(ins[0])
    if name == "div" and ins[0].axes and not ins[0].weight:
        return 0
    kept = name in _MOVES
    if name in _JOINS:
        given = [m for v, m in zip(eqn.invars, ins, strict=True) if _float_bits(v)]
        kept = all(m.weight or m.scale.is_constant for m in given)
    elif name in ("mul", "div"):
        others = [m for m in ins if not m.weight]
        kept = len(others) == 1 and bool(others[0].axes)
    return found if kept and min(results) >= 32 else 2


def _weight_of_sum(mark: Mark) -> int:
    return 0 if mark.weight == 1 else mark.weight


def _float_bits(var: Any) -> int:
    """The bits of a floating value; 0 for what is none."""
    dtype = getattr(var.aval, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return jnp.finfo(dtype).bits if is_float else 0


class Context(NamedTuple):
    """The position of the analysis in nested jaxprs, and what it has found."""

    towers: frozenset[str]  # the tower axes
    sizes: Mapping[str, int]  # of the axes, where known
    found: list[Found]  # so far
    outer: Site | None = None  # the equation that holds the jaxpr
    trips: int | None = 1  # product of the lengths of the scans around; None in a while
    control: Site | None = None  # the innermost equation whose predicate differs
    # Which literals may stand for T; None is each that T divides.
    varying: Container[tuple[int, int]] | None = None

    def size_of(self, axes: Iterable[str]) -> int:
        """The number of towers along these axes; 0 where unknown."""
        return math.prod(self.sizes.get(axis, 0) for axis in axes)

    @property
    def num_towers(self) -> int:
        """``T``; 0 where unknown."""
        return self.size_of(self.towers)

    def enter(
        self, eqn: JaxprEqn, trips: int | None = 1, predicate: Mark = FIXED
    ) -> "Context":
        """The context inside an equation."""
        site = (eqn, self.outer)
        outer = self.trips
        trips = None if trips is None or outer is None else trips * outer
        control = site if predicate.axes else self.control
        return self._replace(outer=site, trips=trips, control=control)

    def is_inside(self, eqn: JaxprEqn) -> bool:
        """Whether ``eqn`` contains itself, so that opening it would not end."""
        for outer in outwards(self.outer):
            params = zip(outer.params.values(), eqn.params.values(), strict=False)
            if outer.primitive is eqn.primitive and all(a is b for a, b in params):
                return True
        return False

    def is_derived(self, eqn: JaxprEqn) -> bool:
        """Whether a derivative or a step, and not the user, wrote the equation."""
        around = outwards((eqn, self.outer))
        scopes = [str(x.source_info.name_stack) for x in around]
        return any("transpose(" in x or SUMMED_BY_STEP in x for x in scopes)


def apply_collective(eqn: JaxprEqn, ins: list[Mark], context: Context) -> list[Mark]:
    """Record a collective, and return the marks of its results."""
    name, site = eqn.primitive.name.removesuffix("_start"), (eqn, context.outer)
    axes = context.towers.intersection(named_axes(eqn))
    _record_collective(eqn, context, bool(axes))
    size = context.size_of(named_axes(eqn))
    given = groups(eqn, size)
    over = _grid_coordinate(eqn, axes, size) if given is not None else None
    if name in REDUCTIONS and (given is None or over):
        scales = [_scale_after_sum(eqn, name, mark, context) for mark in ins]
        return [
            _reduce_mark(mark, over or axes, site)._replace(
                scale=scale, weight=_weight_of_sum(mark)
            )
            for mark, scale in zip(ins, scales, strict=True)
        ]
    # Sums over groups of unequal size differ even when their operands are equal.
    even = given is not None and len({len(group) for group in given}) == 1
    if (name in REDUCTIONS and even) or (name == "ppermute" and is_full(eqn, size)):
        axes = frozenset()
    # all_to_all, reduce_scatter, ...: each tower gets another part of equal operands.
    own = [Mark(axes, name, site)] if axes else []
    # A dependence on one coordinate becomes one on the whole axis.
    mark = join(m._replace(axes=along_axes(m.axes)) for m in [*ins, *own])
    if mark.axes:
        source = next((m for m in [*ins, *own] if m.axes), mark)
        mark = mark._replace(site=site, before=source)
    # The collective may have added up a value that is the same on all towers.
    scale = mark.scale._replace(sums=max(1.0, mark.scale.sums))
    mark = mark._replace(scale=scale)
    return [mark] * len(eqn.outvars)


def _scale_after_sum(eqn: JaxprEqn, name: str, mark: Mark, context: Context) -> Scale:
    scale, axes = mark.scale, context.towers.intersection(named_axes(eqn))
    if name not in SUMS or not axes or context.num_towers < 2:
        return scale
    size = context.size_of(named_axes(eqn))
    is_whole = axes == context.towers and groups(eqn, size) is None
    if mark.axes or scale.is_constant or not is_whole:
        # Values that differ may be meant to be summed, or averaged by a later division.
        return scale.times(Scale(sums=1.0))
    scale = scale.times(Scale(low=1.0, high=1.0))
    if context.is_derived(eqn):
        return scale._replace(site=None)
    site = scale.site or (eqn, context.outer)
    return scale._replace(site=site) if scale.low > 0 else scale


def _reduce_mark(mark: Mark, over: frozenset[str] | Coordinate, site: Site) -> Mark:
    if not mark.axes:
        return mark
    if isinstance(over, Coordinate):
        left = without_coordinate(mark.axes, over)
    else:
        left = without_axes(mark.axes, over)
    return mark._replace(axes=left, site=site, before=mark)


def _grid_coordinate(
    eqn: JaxprEqn, axes: frozenset[str], size: int
) -> Coordinate | None:
    """The coordinate that the groups run over; None unless they form a grid."""
    if len(axes) != 1 or len(named_axes(eqn)) != 1:
        return None
    [axis] = axes
    return coordinate_of(eqn.params["axis_index_groups"], axis, size) if size else None


def _record_collective(eqn: JaxprEqn, context: Context, over_towers: bool) -> None:
    name, line = eqn.primitive.name, user_line((eqn, context.outer))
    avals: list[Any] = [v.aval for v in eqn.invars]
    size = sum(aval.size * aval.dtype.itemsize for aval in avals)
    collective = Collective(name, named_axes(eqn), size, context.trips, line)
    context.found.append(collective)
    if over_towers and context.control:
        context.found.append(hang_of(eqn, context))


def hang_of(eqn: JaxprEqn, context: Context) -> Hang:
    """The finding for a collective that not every tower reaches."""
    assert context.control is not None
    line, control = user_line((eqn, context.outer)), context.control
    return Hang(eqn.primitive.name, line, control[0].primitive.name, user_line(control))
