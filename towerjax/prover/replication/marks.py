"""Marks: between which towers a value may differ, and where that difference began."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Literal

from towerjax.jaxprs import tags
from towerjax.jaxprs.params import groups, is_full, named_axes
from towerjax.jaxprs.primitives import REDUCTIONS, SUMS
from towerjax.jaxprs.sites import Site, is_in_mean, outwards, scopes_of, user_line
from towerjax.prover.replication.findings import Collective, Hang


class Coordinate(NamedTuple):
    """One of the two coordinates of a tower in a grid of towers.

    ``T`` towers are a grid of ``T / L`` blocks of ``L`` neighbours. Tower ``i`` has the
    position ``i % L`` in the block ``i // L``. A collective with the blocks as groups
    reduces over the position. One with the groups ``j, j + L, j + 2 L, ...`` reduces
    over the block. A value that is reduced over both is the same on every tower. A
    value that is reduced over one still depends on the other.
    """

    block: int  # the number of towers in a block, L
    within: bool  # True for the position in the block, i % L; False for i // L


Along: TypeAlias = frozenset[Coordinate]
"""The coordinates of a tower on which a value may depend."""

NOTHING: Along = frozenset()
ALL: Along = frozenset([Coordinate(1, within=False)])
"""Each tower is its own block: the value may differ on every tower."""


def coordinate_of(groups: Sequence[Sequence[int]], size: int) -> Coordinate | None:
    """Find the coordinate by which the towers within each of these groups differ.

    ``groups`` are lists of towers, and ``size`` is the number of towers. The result is
    None if the groups are no rows or columns of a grid of blocks; see `Coordinate`.
    """
    rows = [list(group) for group in groups]
    length = len(rows[0])
    if any(len(row) != length for row in rows):
        return None
    if rows == [list(range(i, i + length)) for i in range(0, size, length)]:
        return Coordinate(length, within=True)
    if rows == [list(range(i, size, len(rows))) for i in range(len(rows))]:
        return Coordinate(len(rows), within=False)
    return None


def without_coordinate(along: Along, over: Coordinate | None) -> Along:
    """Find the coordinates on which a value still depends after a reduction.

    ``along`` are those before it. The reduction is within groups of towers that differ
    by the coordinate ``over``. For None it is over all towers, so none is left.
    """
    if over is None or along <= {over}:
        return NOTHING
    return frozenset([over._replace(within=not over.within)])


class Mark(NamedTuple):
    """The coordinates on which a value may depend, and where the dependence began."""

    along: Along = NOTHING  # NOTHING for a MIRRORED value
    source: str = ""  # why it may differ: an input, "tower.id" or a primitive
    site: Site | None = None  # the equation that made the value; None for an input
    before: Any = None  # the mark of the operand that the dependence comes from


REPLICATED = Mark()
"""The mark of a value that is the same on all towers."""


def join(marks: Iterable[Mark]) -> Mark:
    """Join the marks of several operands into the mark of a value made from them.

    The first operand that differs between towers is the origin of the difference.
    """
    joined = REPLICATED
    for mark in marks:
        if mark.along and mark is not joined:
            origin = joined if joined.along else mark
            joined = origin._replace(along=joined.along | mark.along)
    return joined


def made_at(mark: Mark, site: Site) -> Mark:
    """Mark an equation's result as its operand is marked, and note the site."""
    return mark._replace(site=site, before=mark) if mark.along else mark


def origin_line(mark: Mark | None) -> str:
    """Find the last line of user code that made a value; "" if none did.

    Equations of library code may have changed the value after that line.
    """
    while mark is not None:
        if line := user_line(mark.site):
            return line
        mark = mark.before
    return ""


def is_flag(mark: Mark) -> bool:
    """Return whether a value is computed from a single bool, by scalars only.

    Such a flag does not change if a row of the batch is counted twice.
    """
    at: Any = mark
    while at is not None and at.site is not None:
        eqn = at.site[0]
        at = at.before
        kinds = [v.aval.str_short() for v in (*eqn.invars, *eqn.outvars)]
        if "bool[]" in kinds:
            return True
        if not kinds[-1].endswith("[]"):
            return False
    return False


class Context(NamedTuple):
    """The position of the analysis in nested jaxprs, and its findings so far."""

    axis: str | None  # the axis of the towers; with None no value differs
    num_towers: int  # the number of towers, T; 0 if it is not known
    noted: list[Any]  # the findings so far
    outer: Site | None = None  # the equation that has this jaxpr in its params
    trips: int | None = 1  # lengths of the scans around, multiplied; None in a while
    control: Site | None = None  # the innermost equation whose predicate differs

    def enter(
        self, eqn: JaxprEqn, trips: int | None = 1, predicate: Mark = REPLICATED
    ) -> "Context":
        """Enter the jaxprs inside an equation.

        ``trips`` is how often they run. ``predicate`` is the mark of what decides
        whether they run.
        """
        site = (eqn, self.outer)
        outer = self.trips
        trips = None if trips is None or outer is None else trips * outer
        control = site if predicate.along else self.control
        return self._replace(outer=site, trips=trips, control=control)

    def is_inside(self, eqn: JaxprEqn) -> bool:
        """Return whether ``eqn`` is one of the equations around this jaxpr.

        Such an equation is recursive; looking into it would never end.
        """
        for outer in outwards(self.outer):
            params = zip(outer.params.values(), eqn.params.values(), strict=False)
            if outer.primitive is eqn.primitive and all(a is b for a, b in params):
                return True
        return False

    def is_derived(self, eqn: JaxprEqn) -> bool:
        """Return whether JAX's derivative, or the step, wrote an equation.

        Otherwise the user did.
        """
        scopes = scopes_of((eqn, self.outer))
        return tags.TRANSPOSED in scopes or tags.SUMMED_BY_STEP in scopes

    def note_hang(self, eqn: JaxprEqn) -> None:
        """Record that ``eqn`` hangs, if a predicate keeps some towers from it."""
        if control := self.control:
            line = user_line((eqn, self.outer))
            name = control[0].primitive.name
            hang = Hang(eqn.primitive.name, line, name, user_line(control))
            self.noted.append(hang)

    def note_call(self, eqn: JaxprEqn, ins: Sequence[Mark]) -> None:
        """Record a collective, and that it hangs if only some towers reach it."""
        names = named_axes(eqn)
        avals = list[Any]([v.aval for v in eqn.invars])
        pairs = zip(eqn.invars, ins, strict=True)
        operands = [mark for v, mark in pairs if not isinstance(v, Literal)]
        is_sum = self.axis in names and eqn.primitive.name.split("_start")[0] in SUMS
        is_of_equals = is_sum and operands and not join(operands).along
        collective = Collective(
            eqn.primitive.name,
            names,
            sum(x.size * x.dtype.itemsize for x in avals),
            self.trips,
            user_line((eqn, self.outer)),
            _use_of_sum(eqn, avals)
            if is_of_equals and not self.is_derived(eqn)
            else "",
        )
        self.noted.append(collective)
        if self.axis in names:
            self.note_hang(eqn)


def _use_of_sum(eqn: JaxprEqn, avals: Sequence[Any]) -> str:
    """Tell what a sum of equal values is for; see `Collective.of_equals`."""
    if is_in_mean(eqn):
        return "averaged"
    is_count = all(x.dtype.kind in "iu" for x in avals)
    return "counted" if is_count else "added up"


def apply_collective(eqn: JaxprEqn, ins: list[Mark], context: Context) -> list[Mark]:
    """Record a collective, and return the marks of its results."""
    context.note_call(eqn, ins)
    names = named_axes(eqn)
    site = (eqn, context.outer)
    name = eqn.primitive.name.split("_start")[0]
    is_over_towers = context.axis in names
    num_towers = context.num_towers if names == (context.axis,) else 0
    of_axis = groups(eqn, num_towers)
    over = None
    if of_axis is not None and num_towers:
        over = coordinate_of(of_axis, num_towers)
    if name in REDUCTIONS and (of_axis is None or over):
        outs = [made_at(x, site) for x in ins]
        left = [without_coordinate(x.along, over) for x in ins]
        pairs = zip(outs, left, strict=True)
        return [x._replace(along=a) if is_over_towers else x for x, a in pairs]
    # A tower's coordinates are its device, and its number there. Any other collective
    # may mix them, so a value that depended on one may then depend on both.
    marks = [m._replace(along=ALL if m.along else NOTHING) for m in ins]
    if is_over_towers and not _keeps_equals(eqn, name, of_axis, num_towers):
        marks.append(Mark(ALL, name, site))
    return [made_at(join(marks), site)] * len(eqn.outvars)


def _keeps_equals(eqn: JaxprEqn, name: str, members: Any, num_towers: int) -> bool:
    """Decide whether a collective gives equal results of equal operands.

    ``all_to_all``, ``reduce_scatter`` and others do not, because each tower gets
    another piece. ``members`` are the groups of towers within which it communicates.
    """
    if name in REDUCTIONS:
        # A sum of equal values is a multiple of the value, by the size of the group.
        return members is not None and len({len(group) for group in members}) == 1
    return name == "ppermute" and is_full(eqn, num_towers)
