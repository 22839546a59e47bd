"""Which outputs of a per-tower function may differ from tower to tower?

The function is traced, not run: we walk its jaxpr and carry a mark along with every
value that may differ. A value without a mark is MIRRORED. A mark starts at a per-tower
input or at `axis_index`, and ends at a reduction over the tower axes, or at two that
together are one: see `towerjax.proof.grid`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.proof.grid import (
    Along,
    Coordinate,
    along_axes,
    coordinate_of,
    without_axes,
    without_coordinate,
)
from towerjax.proof.origin import Site, line_of

_REDUCTIONS = frozenset(
    "psum psum_invariant pmax pmin unreduced_psum unreduced_pmax unreduced_pmin "
    "all_gather all_gather_invariant all_gather_reduced pbroadcast".split()
)
# Output i is operand i; some of these have an `axes` param, yet communicate nothing.
_IDENTITIES = (
    "optimization_barrier pvary pcast preduced vary_unreduced_cast_p "
    "reduced_vary_cast_p device_put copy sharding_constraint"
).split()
_Marks = list["_Mark | None"]


@dataclasses.dataclass(frozen=True)
class Dependence:
    """Why a value differs: an input, "tower.id" or a primitive; and who made it.

    `line` is like "train.py:12 (loss_fn)"; "" for an input returned as it came in.
    """

    source: str
    line: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as written; XLA may merge or remove it. `bytes`: its operands'.

    `trips`: product of the lengths of the scans around it; None under a while.
    """

    primitive: str
    axes: tuple[str, ...]
    bytes: int
    trips: int | None
    line: str


@dataclasses.dataclass(frozen=True)
class Hang:
    """A collective that some towers reach and others do not: on devices, a hang."""

    primitive: str
    line: str
    control: str
    control_line: str


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the walk found; `outputs[i]` is None where output i is MIRRORED."""

    outputs: tuple[Dependence | None, ...]
    hangs: tuple[Hang, ...]
    collectives: tuple[Collective, ...]


def analyse(
    jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[str | None], axes: Sequence[str]
) -> Analysis:
    """What differs from tower to tower, what communicates, and what would hang.

    Args:
        jaxpr: the per-tower body, traced with `check_vma=False`.
        inputs: for each input of the body, its name, or None when it is MIRRORED.
        axes: names of the tower axes. A value reduced over one of two may still
            differ along the other; reducing over that too makes it MIRRORED.

    Returns:
        An `Analysis`. It errs to one side only: what it calls MIRRORED is.

    Raises:
        ValueError: `inputs` does not fit the jaxpr, or `axes` is a single string.

    Example:
        >>> import jax
        >>> tower = lambda x: (x, jax.lax.psum(x, "device"))
        >>> jaxpr = jax.make_jaxpr(tower, axis_env=[("device", 2)])(1.0)
        >>> analyse(jaxpr, ["x"], ["device"]).outputs
        (Dependence(source='x', line=''), None)
    """
    body = _open(jaxpr)
    if isinstance(axes, str):
        raise ValueError(f"axes is the string {axes!r}. Write axes=({axes!r},).")
    if len(inputs) != len(body.invars):
        raise ValueError(
            f"inputs has {len(inputs)} entries, but the jaxpr takes {len(body.invars)} "
            "values. Give a name, or None, for each, closed-over values included."
        )
    towers = frozenset(axes)
    ins = [None if name is None else _Mark(towers, name, None) for name in inputs]
    found = []
    outs, _ = _walk(body, ins, _Context(towers, found, None, 1, None))
    return Analysis(
        outputs=tuple(m and Dependence(m.source, _made_at(m)) for m in outs),
        hangs=tuple(hang for _, hang in found if hang),
        collectives=tuple(collective for collective, _ in found),
    )


def body_of_shard_map(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The per-tower body: the jaxpr inside the one `shard_map`, found through jit.

    Args:
        jaxpr: of a function that calls `jax.shard_map`.

    Returns:
        The body, its closed-over values as leading inputs.

    Raises:
        ValueError: there is no `shard_map`, or more than one.
    """
    bodies, jaxprs = [], [_open(jaxpr)]
    while jaxprs:
        for eqn in jaxprs.pop().eqns:
            found = bodies if eqn.primitive.name == "shard_map" else jaxprs
            found += sub_jaxprs(eqn)
    if len(bodies) != 1:
        raise ValueError(
            f"The jaxpr has {len(bodies)} shard_map equations, expected 1. Trace a "
            "function that calls jax.shard_map once, under jit or not."
        )
    return bodies[0]


class _Mark(NamedTuple):  # the value may differ along `axes`; made at `site`
    axes: Along
    source: str
    site: Site | None
    before: Any = None  # the operand's mark


class _Context(NamedTuple):  # around the walk: equations, trips, split control
    towers: frozenset[str]
    found: list[tuple[Collective, Hang | None]]
    outer: Site | None
    trips: int | None
    control: Site | None

    def enter(
        self, eqn: JaxprEqn, trips: int | None = 1, predicate: Any = None
    ) -> "_Context":
        site = (eqn, self.outer)
        outer = self.trips
        trips = None if trips is None or outer is None else trips * outer
        control = self.control if predicate is None else site
        return self._replace(outer=site, trips=trips, control=control)


def _walk(jaxpr: Jaxpr, ins: _Marks, context: _Context) -> tuple[_Marks, dict]:
    """Marks of the outputs, and every mark inside by variable."""
    env = {v: m for v, m in zip(jaxpr.invars, ins, strict=True) if m is not None}
    for eqn in jaxpr.eqns:
        marks = [None if isinstance(v, Literal) else env.get(v) for v in eqn.invars]
        outs = _rule_of(eqn)(eqn, marks, context)
        written = zip(eqn.outvars + _refs(eqn), outs, strict=True)
        env |= {var: mark for var, mark in written if mark is not None}
    outs = [None if isinstance(v, Literal) else env.get(v) for v in jaxpr.outvars]
    return outs, env


def _rule_of(eqn: JaxprEqn) -> Callable[[JaxprEqn, _Marks, _Context], _Marks]:
    if _refs(eqn):
        return _opaque
    if eqn.primitive.name in _RULES:
        return _RULES[eqn.primitive.name]
    if inner := sub_jaxprs(eqn):
        # The jaxpr of a kernel or a reducer works on parts of the operands.
        sides = [(len(c.invars), c.invars + c.outvars) for c in (eqn, *inner)]
        shapes = [(n, [getattr(v.aval, "shape", 0) for v in vs]) for n, vs in sides]
        return _call if shapes[1:] == shapes[:1] else _opaque
    if _named_axes(eqn):
        return _communicate
    # IO, a foreign call, a hidden collective: any of them may differ between towers.
    effects = {type(effect).__name__ for effect in eqn.effects}
    return _originate if effects - {"InternalMutableArrayEffect"} else _compute


def _compute(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    mark = functools.reduce(_merge, ins, None)
    mark = mark and mark._replace(site=(eqn, context.outer), before=mark)
    # A Ref is written in place: from here on it holds what went into the equation.
    return [mark] * (len(eqn.outvars) + len(_refs(eqn)))


def _originate(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    axes, source = context.towers, eqn.primitive.name
    if source == "axis_index":
        axes, source = axes.intersection(_named_axes(eqn)), "tower.id"
    mark = _Mark(axes, source, (eqn, context.outer)) if axes else None
    return [mark] * len(eqn.outvars)


def _communicate(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    name, site = eqn.primitive.name.removesuffix("_start"), (eqn, context.outer)
    axes = context.towers.intersection(_named_axes(eqn))
    _record(eqn, context, bool(axes))
    groups = eqn.params.get("axis_index_groups")
    over = _grid_coordinate(eqn, axes) if groups is not None else None
    if name in _REDUCTIONS and (groups is None or over):
        return [_reduced(mark, over or axes, site) for mark in ins]
    # Sums over groups of unequal size differ even when their operands are equal.
    even = groups is not None and len({len(group) for group in groups}) == 1
    if (name in _REDUCTIONS and even) or (name == "ppermute" and _is_full(eqn)):
        axes = frozenset()
    # all_to_all, reduce_scatter, ...: a tower gets a part of its own of equal operands.
    own = _Mark(axes, name, site) if axes else None
    # What depended on one coordinate may come out anywhere on the axis.
    wide = [m and m._replace(axes=along_axes(m.axes)) for m in ins]
    return _compute(eqn, [*wide, own], context)


def _reduced(
    mark: _Mark | None, over: frozenset[str] | Coordinate, site: Site
) -> _Mark | None:
    if mark is None:
        return None
    if isinstance(over, Coordinate):
        left = without_coordinate(mark.axes, over)
    else:
        left = without_axes(mark.axes, over)
    return mark._replace(axes=left, site=site, before=mark) if left else None


def _grid_coordinate(eqn: JaxprEqn, axes: frozenset[str]) -> Coordinate | None:
    """What the groups run over; None unless they are rows or columns of one axis."""
    if len(axes) != 1 or len(_named_axes(eqn)) != 1:
        return None
    [axis], size = axes, _num_towers(eqn)
    return coordinate_of(eqn.params["axis_index_groups"], axis, size) if size else None


def _record(eqn: JaxprEqn, context: _Context, over_towers: bool) -> None:
    name, line = eqn.primitive.name, line_of((eqn, context.outer))
    avals: list[Any] = [v.aval for v in eqn.invars]
    size = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    control = context.control if over_towers else None
    hang = control and Hang(name, line, control[0].primitive.name, line_of(control))
    collective = Collective(name, _named_axes(eqn), size, context.trips, line)
    context.found.append((collective, hang))


def _call(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    return _walk(sub_jaxprs(eqn)[0], ins, context.enter(eqn))[0]


def _cond(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    inner = context.enter(eqn, predicate=ins[0])
    outs = [_walk(branch, ins[1:], inner)[0] for branch in sub_jaxprs(eqn)]
    chosen = _compute(eqn, ins[:1], context)
    return [functools.reduce(_merge, m) for m in zip(*outs, chosen, strict=True)]


def _while(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])

    def trip(marks: _Marks) -> _Marks:
        *carry, predicate = marks
        inner = context.enter(eqn, trips=None, predicate=predicate)
        outs = _walk(body, ins[tests : tests + bodies] + carry, inner)[0]
        return outs + _walk(test, ins[:tests] + carry, inner)[0]

    carry = ins[tests + bodies :]
    *outs, predicate = _fixed_point(trip, [*carry, None], context.found)[1]
    chosen = _compute(eqn, [predicate], context)
    return [_merge(m, c) for m, c in zip(outs, chosen, strict=True)]


def _scan(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    length, body = eqn.params["length"], _open(eqn.params["jaxpr"])
    if "ft_in" in eqn.params:  # JAX 0.12
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
    else:
        consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    inner, end = context.enter(eqn, trips=length), consts + carry

    def trip(marks: _Marks) -> _Marks:
        return _walk(body, ins[:consts] + marks + ins[end:], inner)[0]

    outs, _ = _fixed_point(trip, ins[consts:end], context.found)
    # The last trip decides: a carry that the body reduces comes out reduced.
    return outs if length else ins[consts:end] + outs[carry:]


def _fixed_point(trip: Callable, marks: _Marks, found: list) -> tuple[_Marks, _Marks]:
    """Outputs of a trip, and marks before each trip, once no trip adds to them."""
    start = len(found)
    while True:
        del found[start:]  # so that nothing is recorded once per round
        outs = trip(marks)
        more = [_merge(out, mark) for out, mark in zip(outs, marks, strict=False)]
        if [m and m.axes for m in more] == [m and m.axes for m in marks]:
            return outs, more
        marks = more


def _opaque(eqn: JaxprEqn, ins: _Marks, context: _Context) -> _Marks:
    """Everything depends on everything: kernels, Refs, unknown control flow."""

    def trip(marks: _Marks) -> _Marks:
        choice = {"cond": ins[:1], "while": marks}.get(eqn.primitive.name, [None])
        inner = context.enter(eqn, trips=None, predicate=choice[0])
        for jaxpr in sub_jaxprs(eqn):
            env = _walk(jaxpr, marks * len(jaxpr.invars), inner)[1]
            marks = [functools.reduce(_merge, env.values(), marks[0])]
        return marks

    outs, _ = _fixed_point(trip, [functools.reduce(_merge, ins, None)], context.found)
    return _compute(eqn, outs, context)


_RULES = dict.fromkeys(_IDENTITIES, lambda eqn, ins, context: ins)
_RULES |= {"axis_index": _originate, "rng_uniform": _originate, "cond": _cond}
_RULES |= {"while": _while, "scan": _scan, "shard_map": _call}


def _merge(first: _Mark | None, second: _Mark | None) -> _Mark | None:
    """The mark of a value that may be either; it tells the origin of `first`."""
    if first and second and not second.axes <= first.axes:
        return first._replace(axes=first.axes | second.axes)
    return first or second


def _named_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    # Under vmap, and in reduce_sum, an axis is the number of a dimension.
    return tuple(axis for axis in axes if isinstance(axis, str))


def _is_full(eqn: JaxprEqn) -> bool:
    """Whether a ppermute gives every tower a value; the others would get zeros."""
    return len({target for _, target in eqn.params["perm"]}) == _num_towers(eqn)


def _num_towers(eqn: JaxprEqn) -> int:
    """How many meet over the named axes; 0 where the mesh is not known."""
    aval: Any = eqn.invars[0].aval
    sizes = aval.sharding.mesh.shape
    return math.prod(sizes.get(name, 0) for name in _named_axes(eqn))


def _made_at(mark: _Mark | None) -> str:
    """The last line of the user's on the way to the value; ours may have come after."""
    while mark is not None:
        if line := line_of(mark.site):
            return line
        mark = mark.before
    return ""


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that an equation holds: a call's first one is what it runs."""
    values = list(eqn.params.values())
    if eqn.primitive.name == "custom_linear_solve":  # the others are for derivatives
        values = [eqn.params["jaxprs"].solve]
    if "_prim" in eqn.params:  # JAX 0.12 keeps the params of some in an object
        inner = vars(eqn.params["_prim"])
        values += [*inner.values(), *inner.get("params", {}).values()]
    flat = [w for v in values for w in (v if isinstance(v, tuple) else (v,))]
    return [_open(v) for v in flat if isinstance(v, (Jaxpr, ClosedJaxpr))]


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _refs(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if type(v.aval).__name__ == "AbstractRef"]
