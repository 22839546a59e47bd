"""Which outputs of a per-tower function may differ from tower to tower?

The function is traced, not run: we walk its jaxpr and carry a mark along with every
value, which says along which axes it may differ. A value that differs along none is
MIRRORED. A dependence starts at a per-tower input or at `axis_index`, and ends at a
reduction over the tower axes, or at two that together are one: see
`towerjax.proof.marks`. The same walk finds collectives that only some towers reach, and
sums of what is the same on all: see `towerjax.proof.scale`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.proof.equation import (
    IDENTITIES,
    is_foreign,
    is_hidden,
    line_of,
    loop_sizes,
    named_axes,
    open_jaxpr,
    opened,
    refs,
    sub_jaxprs,
)
from towerjax.proof.found import (
    Analysis,
    Collective,
    Dependence,
    Draw,
    Hang,
    Meeting,
    Repeat,
)
from towerjax.proof.marks import (
    FIXED,
    Context,
    Mark,
    communicated,
    hang_of,
    made_at,
    merged,
    under,
)
from towerjax.proof.scale import (
    CONSTANT,
    COUNTS_EACH_TOWER,
    HAS_EXAMPLES,
    MEETINGS,
    SHARED_FACTOR,
    SUMMED_FOR_A_VARIABLE,
    moving_literals,
    of_equation,
    of_summed,
)

_Marks = list[Mark]
# Where what is counted T times meets what differs, no later division can be right.
_ADDITIONS = frozenset("add add_any sub max min select_n".split())
_NO_AXIS = frozenset([""])
_A_MIXTURE = "a value that differs from tower to tower, to which it is added"
_THE_LOSS = "the loss, of which loss_reduction=SUM adds up the towers' values"


def analyse(
    jaxpr: Jaxpr | ClosedJaxpr,
    inputs: Sequence[str | None],
    axes: Sequence[str] | Mapping[str, int],
    *,
    constants: int = 0,
    of_more_towers: Callable[[], Jaxpr | ClosedJaxpr] | None = None,
) -> Analysis:
    """What differs from tower to tower, what communicates, and what would hang."""
    body = open_jaxpr(jaxpr)
    if isinstance(axes, str):
        raise ValueError(f"axes is the string {axes!r}. Write axes=({axes!r},).")
    if len(inputs) != len(body.invars):
        raise ValueError(
            f"inputs has {len(inputs)} entries, but the jaxpr takes {len(body.invars)} "
            "values. Give a name, or None, for each, closed-over values included."
        )
    towers = frozenset(axes)
    ins = [Mark(frozenset()) if n is None else Mark(towers, n) for n in inputs]
    ins[:constants] = [mark._replace(scale=CONSTANT) for mark in ins[:constants]]
    sizes = axes if isinstance(axes, Mapping) else _mesh_sizes(body)
    context = Context(towers, sizes, [])
    if of_more_towers is None:
        return _analysed(body, ins, context)
    none_counts = _analysed(body, ins, context._replace(moving=()))
    if not none_counts.repeats:
        return none_counts
    try:
        more = open_jaxpr(of_more_towers())
    except Exception:  # Code of anybody's, for this number of towers: it may hold it.
        return _analysed(body, ins, context)
    moving = moving_literals(body, more)
    return _analysed(body, ins, context._replace(moving=moving))


def depends(jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[str | None]) -> Analysis:
    """On which named input each output depends; no reduction over towers ends that."""
    return analyse(jaxpr, inputs, tuple(_NO_AXIS))


def _analysed(body: Jaxpr, ins: _Marks, context: Context) -> Analysis:
    found: list[Any] = []
    outs, _ = _walk(body, ins, context._replace(found=found))
    return Analysis(
        outputs=tuple(
            Dependence(m.source, made_at(m)) if m.axes else None for m in outs
        ),
        hangs=tuple(x for x in found if isinstance(x, Hang)),
        collectives=tuple(x for x in found if isinstance(x, Collective)),
        repeats=(*(x for x in found if isinstance(x, Repeat)), *_repeats(outs)),
        draws=tuple(x for x in found if isinstance(x, Draw)),
        factors=tuple(x for x in found if isinstance(x, Dependence)),
        meetings=tuple(x for x in found if isinstance(x, Meeting)),
    )


def _mesh_sizes(body: Jaxpr) -> dict[str, int]:
    """The axes of the mesh that the body stands in; none where it is in none."""
    avals: list[Any] = [
        var.aval for var in body.invars if hasattr(var.aval, "sharding")
    ]
    return {k: n for x in avals for k, n in x.sharding.mesh.shape.items()}


def _repeats(outs: _Marks) -> list[Repeat]:
    """For each sum of what is the same on all, the outputs that hold it whole."""
    lines: dict[str, list[int]] = {}
    for i, mark in enumerate(outs):
        if mark.scale.site is not None:
            lines.setdefault(line_of(mark.scale.site), []).append(i)
    return [Repeat(line, tuple(outputs)) for line, outputs in lines.items()]


def _walk(jaxpr: Jaxpr, ins: _Marks, context: Context) -> tuple[_Marks, dict]:
    """Marks of the outputs, and every mark inside by variable."""
    env = dict(zip(jaxpr.invars, ins, strict=True))

    def read(var: Any) -> Mark:
        return FIXED if isinstance(var, Literal) else env.get(var, FIXED)

    for eqn in jaxpr.eqns:
        outs = _rule_of(eqn, context)(eqn, [read(v) for v in eqn.invars], context)
        env |= zip(eqn.outvars + refs(eqn), outs, strict=True)
    return [read(v) for v in jaxpr.outvars], env


def _rule_of(
    eqn: JaxprEqn, context: Context
) -> Callable[[JaxprEqn, _Marks, Context], _Marks]:
    inner = sub_jaxprs(eqn)
    if not inner and not named_axes(eqn) and is_foreign(eqn, context.towers):
        return _originate
    if eqn.primitive.name not in _RULES and is_hidden(eqn):
        return _hidden
    if refs(eqn):
        return _opaque
    if eqn.primitive.name in _RULES:
        return _RULES[eqn.primitive.name]
    if inner:
        # The jaxpr of a kernel or a reducer works on parts of the operands.
        sides = [(len(c.invars), c.invars + c.outvars) for c in (eqn, *inner)]
        shapes = [(n, [getattr(v.aval, "shape", 0) for v in vs]) for n, vs in sides]
        return _call if shapes[1:] == shapes[:1] else _opaque
    return _communicate if named_axes(eqn) else _compute


def _communicate(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    names = [x for x in MEETINGS if x in str(eqn.source_info.name_stack)]
    if context.towers == _NO_AXIS and names and not context.is_derived(eqn):
        line = line_of((eqn, context.outer))
        context.found.extend(Meeting(names[0], line, bool(m.axes)) for m in ins)
    return communicated(eqn, ins, context)


def _compute(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    mark = merged(ins)
    scales = [m.scale for m in ins]
    scale = CONSTANT
    if ins:
        scale = of_equation(eqn, scales, context.num_towers, context.moving)
    if scale.site and eqn.primitive.name in _ADDITIONS and not context.is_derived(eqn):
        if any(m.axes and m.scale.site is None for m in ins):
            context.found.append(Repeat(line_of(scale.site), (), _A_MIXTURE))
            scale = scale.once()
    if not scale.is_constant or mark.axes:
        # The line is that of the last equation on the way.
        mark = mark._replace(site=(eqn, context.outer), before=mark)
    mark = mark._replace(scale=scale)
    return _everywhere(mark, eqn)


def _everywhere(mark: Mark, eqn: JaxprEqn) -> _Marks:
    """Of each result, and of each Ref, which holds what went into the equation."""
    return [mark] * (len(eqn.outvars) + len(refs(eqn)))


def _originate(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    axes, source = context.towers, eqn.primitive.name
    if source == "axis_index":
        axes, source = axes.intersection(named_axes(eqn)), "tower.id"
    mark = Mark(axes, source, (eqn, context.outer)) if axes else FIXED
    return _everywhere(mark, eqn)


def _draw(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Random numbers: those of rbg are made for all keys of a ``vmap`` at once."""
    key: Any = eqn.invars[0].aval
    kind = str(key.dtype)
    derives = eqn.primitive.name in ("random_fold_in", "random_split")
    is_rbg = "urbg" in kind if derives else "rbg" in kind or kind == "uint32"
    # A while whose predicate differs makes its carry, keys too, one of each tower.
    if is_rbg and (context.control or any(m.axes for m in ins[: 1 + derives])):
        context.found.append(Draw(line_of((eqn, context.outer))))
    return _compute(eqn, ins, context)


def _name(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """What towers assign to a variable, a loss that a step adds up, a mean's factor."""
    if eqn.params["name"] == SHARED_FACTOR and ins[0].axes:
        context.found.append(Dependence(ins[0].source, made_at(ins[0])))
    if eqn.params["name"] == SUMMED_FOR_A_VARIABLE:
        scale = of_summed(eqn.invars[0], ins[0].scale, context.num_towers)
        return [ins[0]._replace(scale=scale)]
    if eqn.params["name"] == HAS_EXAMPLES and context.towers == _NO_AXIS:
        return [FIXED]
    [mark], counts = ins, eqn.params["name"] == COUNTS_EACH_TOWER
    is_same = not mark.axes and not mark.scale.is_constant and mark.scale.low >= 0
    if counts and is_same and context.num_towers > 1 and not context.is_derived(eqn):
        context.found.append(Repeat(made_at(mark), (), _THE_LOSS))
    return ins


def _hidden(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """What its own code does, where that can be traced; else it may do anything."""
    program = None if context.is_inside(eqn) else opened(eqn, context.sizes)
    if program is not None:
        return _walk(program.jaxpr, ins, context.enter(eqn))[0]
    if context.control:
        context.found.append(hang_of(eqn, context))
    return _originate(eqn, ins, context)


def _call(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    return _walk(sub_jaxprs(eqn)[0], ins, context.enter(eqn))[0]


def _solve(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Its first operands are what four jaxprs close over, of which `solve` runs."""
    lengths, [solve] = eqn.params["const_lengths"], sub_jaxprs(eqn)
    start = lengths.matvec + lengths.vecmat
    ins = ins[start : start + lengths.solve] + ins[sum(lengths) :]
    return _walk(solve, ins, context.enter(eqn))[0]


def _cond(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    inner = context.enter(eqn, predicate=ins[0])
    outs = [_walk(branch, ins[1:], inner)[0] for branch in sub_jaxprs(eqn)]
    return _chosen(eqn, [merged(m) for m in zip(*outs, strict=True)], ins[0], context)


def _chosen(eqn: JaxprEqn, outs: _Marks, predicate: Mark, context: Context) -> _Marks:
    if predicate.axes:
        predicate = predicate._replace(site=(eqn, context.outer), before=predicate)
    return [under(mark, predicate) for mark in outs]


def _while(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test = open_jaxpr(eqn.params["cond_jaxpr"])
    body = open_jaxpr(eqn.params["body_jaxpr"])

    def trip(marks: _Marks) -> _Marks:
        *carry, predicate = marks
        inner = context.enter(eqn, trips=None, predicate=predicate)
        outs = _walk(body, ins[tests : tests + bodies] + carry, inner)[0]
        # The test sees the carry as it comes in too, though it may never run again.
        return outs + _walk(test, ins[:tests] + carry, inner)[0]

    carry = ins[tests + bodies :]
    # The body may not run at all: then the carry comes out as it went in.
    *outs, predicate = _fixed_point(trip, [*carry, FIXED], context.found)[1]
    return _chosen(eqn, outs, predicate, context)


def _scan(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    length, body = eqn.params["length"], open_jaxpr(eqn.params["jaxpr"])
    consts, carry = loop_sizes(eqn)
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
        more = [merged(pair) for pair in zip(outs, marks, strict=False)]
        if _grown(more) == _grown(marks):
            return outs, more
        marks = more


def _grown(marks: _Marks) -> list[Any]:
    """What grows from trip to trip, without who it is from."""
    return [(m.axes, m.scale._replace(site=None)) for m in marks]


def _opaque(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Everything depends on everything: kernels, Refs, unknown control flow."""

    def trip(marks: _Marks) -> _Marks:
        choice = {"cond": ins[:1], "while": marks}.get(eqn.primitive.name, [FIXED])
        inner = context.enter(eqn, trips=None, predicate=choice[0])
        for jaxpr in sub_jaxprs(eqn):
            env = _walk(jaxpr, marks * len(jaxpr.invars), inner)[1]
            marks = [merged([*marks, *env.values()])]
        return marks

    outs, _ = _fixed_point(trip, [merged(ins)], context.found)
    whole = _compute(eqn, outs, context)[0]
    if sub_jaxprs(eqn):
        # What a kernel or a reducer does with the numbers is not followed.
        whole = whole._replace(scale=whole.scale.once())
    return _everywhere(whole, eqn)


_RULES: dict[str, Callable] = dict.fromkeys(IDENTITIES, lambda eqn, ins, context: ins)
_RULES |= {"axis_index": _originate, "cond": _cond, "name": _name}
_RULES |= dict.fromkeys(
    "random_bits random_fold_in random_gamma random_split rng_bit_generator".split(),
    _draw,
)
_RULES |= {
    "while": _while,
    "scan": _scan,
    "shard_map": _call,
    "custom_linear_solve": _solve,
}
