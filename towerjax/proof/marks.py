"""Marks: what the analysis knows of a value, and how an equation makes it of others."""

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from towerjax.proof import lints, tags
from towerjax.proof.equation import (
    REDUCTIONS,
    SUMS,
    Site,
    groups,
    is_full,
    is_in_backward,
    named_axes,
    outwards,
    scopes_of,
    user_line,
)
from towerjax.proof.findings import Collective, Hang, Repeat
from towerjax.proof.scale import (
    CONSTANT,
    PRODUCTS,
    SUMS_OF_TERMS,
    Scale,
    Terms,
    scale_of_equation,
    scale_of_sum,
    scale_of_summed,
    terms_of_equation,
)


class Coordinate(NamedTuple):
    """One of the two coordinates of tower ``i`` in a grid of blocks.

    ``T`` towers are a grid of ``T / L`` blocks of ``L`` neighbours. Groups that are the
    blocks run over the position in the block; the groups ``j, j + L, j + 2 L, ...`` run
    over the number of the block. A value reduced over both is the same on every tower;
    reduced over one, it still depends on the other.
    """

    block: int  # L
    within: bool  # True: the position in the block, i % L; False: its number, i // L


Along: TypeAlias = frozenset[Coordinate]
"""The coordinates of a tower that a value may depend on."""

NOTHING: Along = frozenset()
ALL: Along = frozenset([Coordinate(1, within=False)])
"""A tower is a block of its own: the value may differ on every tower."""


def coordinate_of(groups: Sequence[Sequence[int]], size: int) -> Coordinate | None:
    """The coordinate that differs inside each group while the other does not."""
    rows = [list(group) for group in groups]
    length = len(rows[0])
    if any(len(row) != length for row in rows):
        return None
    if rows == [list(range(i, i + length)) for i in range(0, size, length)]:
        return Coordinate(length, within=True)
    if rows == [list(range(i, size, len(rows))) for i in range(len(rows))]:
        return Coordinate(len(rows), within=False)
    return None


def without_coordinate(along: Along, over: Coordinate) -> Along:
    """What a value may depend on after a reduction in the groups of a coordinate."""
    if along <= {over}:
        return NOTHING
    return frozenset([over._replace(within=not over.within)])


class Mark(NamedTuple):
    """What is known of a value."""

    along: Along = NOTHING  # what it may depend on; nothing for a MIRRORED value
    source: str = ""  # why it may differ: an input, "tower.id" or a primitive
    site: Site | None = None  # None for an input or a constant
    before: Any = None  # the mark of the operand that the dependence comes from
    scale: Scale = Scale()  # how many times it is counted
    # 1: the weight of a gradient, or a sum of such; 2: another function of one.
    weight: int = 0
    rows: lints.Lint = lints.Lint()  # what it has of the tower's rows
    # The sum over towers, in the backward of a `custom_vjp`, that a gradient is.
    added: Site | None = None
    terms: Terms = frozenset()  # the same on all towers, in a sum of a tower's rows


FIXED = Mark(scale=CONSTANT)
"""The mark of a constant."""


def join(marks: Iterable[Mark]) -> Mark:
    """The mark of a value made of several; the first that differs is its origin."""
    joined = FIXED
    for mark in marks:
        if joined is FIXED and not mark.scale.is_constant:
            is_origin = mark.along or mark.weight
            joined = mark if is_origin else mark._replace(**_OF_NO_ORIGIN)
        elif mark is not FIXED or joined.scale.is_constant:
            joined = _join_two(joined, mark)
    return joined


_OF_NO_ORIGIN: dict[str, Any] = {"source": "", "site": None, "before": None}


def _join_two(first: Mark, second: Mark) -> Mark:
    if first is second:
        return first
    ranks = [(bool(m.along), m.weight) for m in (first, second)]
    origin = second if ranks[1] > ranks[0] else first
    along, scale = first.along | second.along, first.scale
    if scale != second.scale:
        scale = scale_of_sum(scale, second.scale)
    weight, added = max(first.weight, second.weight), first.added or second.added
    rows, terms = lints.either(first.rows, second.rows), first.terms | second.terms
    return origin._replace(
        along=along, scale=scale, weight=weight, rows=rows, added=added, terms=terms
    )


def mark_of_choice(mark: Mark, predicate: Mark) -> Mark:
    """The mark of a value that a predicate selects."""
    constant = mark.scale.is_constant and predicate.scale.is_constant
    both = _join_two(mark, predicate)
    rows = both.rows._replace(dims=mark.rows.dims)
    scale = mark.scale._replace(is_constant=constant)
    return both._replace(scale=scale, rows=rows)


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


def _use_of_weight(eqn: JaxprEqn, ins: Sequence[Mark]) -> int:
    """``Mark.weight`` of the results of an equation that is no collective.

    Sums of weights are weights, and so is a weight times what a tower computes, such as
    a mask. What a tower divides by a weight is a mean, and no weight. A sum over
    towers, or of a row of examples, is no longer followed.
    """
    weight, name = max([m.weight for m in ins], default=0), eqn.primitive.name
    results = [_float_bits(v) for v in eqn.outvars] if weight else []
    if not weight or not all(results):
        return 0
    if name == "reduce_sum":
        return _weight_of_sum(ins[0])
    if name == "div" and ins[0].along and not ins[0].weight:
        return 0
    kept = name in _MOVES
    if name in _JOINS:
        given = [m for v, m in zip(eqn.invars, ins, strict=True) if _float_bits(v)]
        kept = all(m.weight or m.scale.is_constant for m in given)
    elif name in ("mul", "div"):
        others = [m for m in ins if not m.weight]
        kept = len(others) == 1 and bool(others[0].along)
    return weight if kept and min(results) >= 32 else 2


def _weight_of_sum(mark: Mark) -> int:
    return 0 if mark.weight == 1 else mark.weight


def _float_bits(var: Any) -> int:
    """The bits of a floating value; 0 for what is none."""
    dtype = getattr(var.aval, "dtype", None)
    is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return jnp.finfo(dtype).bits if is_float else 0


class Context(NamedTuple):
    """The position of the analysis in nested jaxprs, and what it has found."""

    axis: str | None  # of the towers; None: nothing differs
    num_towers: int  # T; 0 where unknown
    noted: list[Any]  # so far
    outer: Site | None = None  # the equation that holds the jaxpr
    trips: int | None = 1  # product of the lengths of the scans around; None in a while
    control: Site | None = None  # the innermost equation whose predicate differs
    # Which literals may stand for T; None is each that T divides.
    varying: Container[tuple[int, int]] | None = None

    def enter(
        self, eqn: JaxprEqn, trips: int | None = 1, predicate: Mark = FIXED
    ) -> "Context":
        """The context inside an equation."""
        site = (eqn, self.outer)
        outer = self.trips
        trips = None if trips is None or outer is None else trips * outer
        control = site if predicate.along else self.control
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
        scopes = scopes_of((eqn, self.outer))
        return tags.TRANSPOSED in scopes or tags.SUMMED_BY_STEP in scopes

    def is_derived_in_tower(self, eqn: JaxprEqn) -> bool:
        """Whether the derivative is one that a tower function takes by itself."""
        scopes = scopes_of((eqn, self.outer))
        derived = tags.TRANSPOSED in scopes
        before = scopes[: scopes.index(tags.TRANSPOSED)] if derived else []
        return derived and tags.DIFFERENTIATED not in before


def line_of_sum(site: Site) -> str:
    """The line of a sum over towers, and whether a derivative there is what adds up."""
    line = user_line(site)
    if not line or tags.TRANSPOSED not in scopes_of(site):
        return line
    return f"{line}, by a derivative in a tower, which is that of all towers' sum"


# No later division is right once a value counted T times is added to one that differs.
_ADDITIONS = frozenset("add add_any sub max min select_n".split())
_A_MIXTURE = "a value that differs from tower to tower, to which it is added"


def mark_of_equation(eqn: JaxprEqn, ins: Sequence[Mark], context: Context) -> Mark:
    """The mark of the results of an equation that holds no jaxpr and no axis."""
    scales = [m.scale for m in ins]
    scale = scale_of_equation(eqn, scales, context.num_towers, context.varying)
    if scale == CONSTANT and all([m is FIXED for m in ins]):
        return FIXED
    mark, site = join(ins), (eqn, context.outer)
    if scale.site and eqn.primitive.name in _ADDITIONS and not context.is_derived(eqn):
        if any(m.along and m.scale.site is None for m in ins):
            context.noted.append(Repeat(line_of_sum(scale.site), (), _A_MIXTURE))
            scale = scale.once()
    weight = _use_of_weight(eqn, ins) if mark.weight else 0
    if not scale.is_constant or mark.along or weight:
        # The reported line is that of the last equation.
        mark = mark._replace(site=site, before=mark)
    added = _sum_in_backward(eqn, ins) if mark.added else None
    rows = lints.of_equation(eqn, [m.rows for m in ins], site, context.is_derived)
    name = eqn.primitive.name
    is_product = name in PRODUCTS and bool(mark.terms or not mark.along)
    if is_product or (name in SUMS_OF_TERMS and mark.along):
        mark = mark._replace(terms=terms_of_equation(eqn, ins, site))
    return mark._replace(scale=scale, weight=weight, rows=rows, added=added)


def apply_collective(eqn: JaxprEqn, ins: list[Mark], context: Context) -> list[Mark]:
    """Record a collective, and return the marks of its results."""
    names, site = named_axes(eqn), (eqn, context.outer)
    avals: list[Any] = [v.aval for v in eqn.invars]
    size = sum(aval.size * aval.dtype.itemsize for aval in avals)
    call = Collective(eqn.primitive.name, names, size, context.trips, user_line(site))
    context.noted.append(call)
    if over_towers := context.axis in names:
        note_hang(eqn, context)
        if tags.SUMMED_BY_STEP in scopes_of((eqn, None)):
            for line in {user_line(m.added) for m in ins if _counts_again(m)}:
                context.noted.append(Repeat(line, (), _IN_BACKWARD))
    name = _kind_of(eqn)
    num_towers = context.num_towers if names == (context.axis,) else 0
    given = groups(eqn, num_towers)
    over = None
    if given is not None and num_towers:
        over = coordinate_of(given, num_towers)
    if name in REDUCTIONS and (given is None or over):
        return [_reduce_mark(eqn, i, x, over, context) for i, x in enumerate(ins)]
    # Sums over groups of unequal size differ even when their operands are equal.
    even = given is not None and len({len(group) for group in given}) == 1
    is_same = name in REDUCTIONS and even
    is_same |= name == "ppermute" and is_full(eqn, num_towers)
    # all_to_all, reduce_scatter, ...: each tower gets another part of equal operands.
    own = [Mark(ALL, name, site)] if over_towers and not is_same else []
    marks = [*ins, *own]
    # A dependence on one coordinate becomes one on both.
    mark = join(m._replace(along=ALL if m.along else NOTHING) for m in marks)
    if mark.along:
        source = next(m for m in marks if m.along)
        mark = mark._replace(site=site, before=source)
    # The collective may have added up a value that is the same on all towers.
    scale = mark.scale._replace(sums=max(1.0, mark.scale.sums))
    rows = lints.merged(mark.rows, is_whole=not mark.along)
    return [mark._replace(scale=scale, rows=rows, added=None)] * len(eqn.outvars)


def _reduce_mark(
    eqn: JaxprEqn, at: int, mark: Mark, over: Coordinate | None, context: Context
) -> Mark:
    """The mark of operand ``at`` reduced in a coordinate's groups; for None, in one."""
    name = _kind_of(eqn)
    new = mark._replace(weight=_weight_of_sum(mark), added=None, terms=frozenset())
    if context.axis in named_axes(eqn):
        along = without_coordinate(mark.along, over) if over else NOTHING
        rows = lints.merged(mark.rows, is_whole=not along)
        new = new._replace(along=along, rows=rows)
        if name in SUMS and context.num_towers > 1:
            is_whole = over is None
            new = new._replace(scale=_scale_of_sum(eqn, at, mark, is_whole, context))
            if context.is_derived(eqn) and is_in_backward(eqn):
                # What may have counted towers before is no division of this sum.
                scale = mark.scale if mark.scale.site else Scale(sums=1.0)
                new = new._replace(added=(eqn, context.outer), scale=scale)
    if mark.along:
        new = new._replace(site=(eqn, context.outer), before=mark)
    return new


def _kind_of(eqn: JaxprEqn) -> str:
    return eqn.primitive.name.removesuffix("_start")


def _scale_of_sum(
    eqn: JaxprEqn, at: int, mark: Mark, is_whole: bool, context: Context
) -> Scale:
    """The scale of the sum over towers of operand ``at``, of all or in groups.

    Values that differ may be meant to be summed, or averaged by a later division, and
    constants to be counted, but not in a derivative that a tower takes: of what is the
    same on all towers it begins with one number, which all of them add up.
    """
    in_tower, scale = context.is_derived_in_tower(eqn), mark.scale
    if mark.along or not is_whole or (scale.is_constant and not in_tower):
        return scale.times(Scale(sums=1.0))
    if scale.is_constant:
        scale = scale_of_summed(eqn, at, scale, context.num_towers, context.varying)
    scale = scale.times(Scale(low=1.0, high=1.0))
    if context.is_derived(eqn) and not in_tower:
        return scale._replace(site=None)
    site = scale.site or (eqn, context.outer)
    return scale._replace(site=site) if scale.low > 0 else scale


_IN_BACKWARD = (
    "a gradient, added up over towers in the backward of a jax.custom_vjp, and by the"
    " step again"
)


def _counts_again(mark: Mark) -> bool:
    """Whether a sum is not divided by the number of towers, as a mean would be."""
    return mark.added is not None and max(mark.scale.sums, mark.scale.low) >= 1


def _sum_in_backward(eqn: JaxprEqn, ins: Sequence[Mark]) -> Site | None:
    """``Mark.added`` of the results: a sum that no value of a tower's own has met."""
    added = [m.added for m in ins if m.added]
    apart = all([m.added or not m.along for m in ins])
    kept = apart and eqn.primitive.name not in _CONTRACTIONS
    kept |= eqn.primitive.name == "concatenate"
    return added[0] if added and kept else None


# What is summed over rows was a cotangent of rows, and no gradient yet.
_CONTRACTIONS = frozenset("conv_general_dilated dot_general reduce_sum".split())


def note_hang(eqn: JaxprEqn, context: Context) -> None:
    """Record that a collective hangs, if not every tower reaches it."""
    if control := context.control:
        line, name = user_line((eqn, context.outer)), control[0].primitive.name
        hang = Hang(eqn.primitive.name, line, name, user_line(control))
        context.noted.append(hang)


def is_flag(mark: Mark) -> bool:
    """Whether one bool decides the value, for which a row may count twice."""
    at: Any = mark
    while at is not None and at.site is not None:
        eqn, at = at.site[0], at.before
        kinds = [v.aval.str_short() for v in (*eqn.invars, *eqn.outvars)]
        if "bool[]" in kinds:
            return True
        if not kinds[-1].endswith("[]"):
            return False
    return False
