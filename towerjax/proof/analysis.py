"""Find the outputs of a tower function that may differ from tower to tower.

The function is traced, not run. The analysis propagates a mark through its jaxpr with
every value, which says between which towers the value may differ. A value that differs
between none is MIRRORED. A dependence starts at a per-tower input or at `axis_index`,
and ends at a reduction over all towers, or at two that together are one: see
`towerjax.proof.marks`. The analysis also finds collectives that only some towers reach,
and sums of values that are the same on all: see `towerjax.proof.scale`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from towerjax.mesh.placement import DEVICE_AXIS, TOWER_AXIS
from towerjax.proof import findings, lints, tags
from towerjax.proof.equation import (
    EXTREMES,
    IDENTITIES,
    OF_OTHER_INPUT,
    PLAIN,
    SUMS,
    given_name,
    is_foreign,
    is_hidden,
    loop_sizes,
    meshes_of,
    named_axes,
    names_in,
    open_jaxpr,
    refs,
    scopes_of,
    sub_jaxprs,
    trace_hidden,
    user_line,
)
from towerjax.proof.marks import (
    ALL,
    FIXED,
    NOTHING,
    Context,
    Mark,
    apply_collective,
    is_flag,
    join,
    line_of_sum,
    mark_of_choice,
    mark_of_equation,
    note_hang,
    origin_line,
)
from towerjax.proof.scale import (
    MAY_COUNT_TOWERS,
    LossPart,
    scale_of_summed,
    terms_of_loss,
    varying_constants,
)

_Marks = list[Mark]
_NO_AXIS = ""  # which no collective names, so that none ends a dependence


def analyse(
    jaxpr: Jaxpr | ClosedJaxpr,
    inputs: Sequence[str | None],
    axis: str | None,
    num_towers: int,
    *,
    of_more_towers: Callable[[], Jaxpr | ClosedJaxpr] | None = None,
) -> findings.Analysis:
    """Find what differs from tower to tower, what communicates, and what would hang.

    ``inputs`` has a name for each per-tower input, and None for one that is the same on
    all. ``axis`` is that of the towers; None: nothing differs. ``of_more_towers``
    traces the function for another ``T``, which shows the literals that may stand for
    ``T``.
    """
    body, along = open_jaxpr(jaxpr), NOTHING if axis is None else ALL
    ins = [Mark() if name is None else Mark(along, name) for name in inputs]
    avals: list[Any] = [v.aval for v in body.invars]
    for i, (name, aval) in enumerate(zip(inputs, avals, strict=False)):
        if name is not None and name.startswith("batch"):
            ins[i] = ins[i]._replace(rows=lints.of_batch(name, aval.shape))
    context = Context(axis, num_towers, [])
    if of_more_towers is None:
        return _analyse_once(body, ins, context)
    strict = _analyse_once(body, ins, context._replace(varying=()))  # no literal is T
    if not strict.repeats and not any([x.line for x in strict.terms]):
        return strict
    try:
        varying = varying_constants(jaxpr, of_more_towers())
    except OF_OTHER_INPUT:  # The function takes this number of towers alone.
        varying = None
    return _analyse_once(body, ins, context._replace(varying=varying))


def depends(
    jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[str | None]
) -> findings.Analysis:
    """Which named input each output depends on, reductions over towers included."""
    return analyse(jaxpr, inputs, _NO_AXIS, 0)


def _analyse_once(body: Jaxpr, ins: _Marks, context: Context) -> findings.Analysis:
    noted: list[Any] = []
    outs, _ = _propagate(body, ins, context._replace(noted=noted))
    # For each sum of a value that is the same on all, the outputs that hold it.
    lines: dict[str, list[int]] = {}
    for i, mark in enumerate(outs):
        if mark.scale.site is not None:
            lines.setdefault(line_of_sum(mark.scale.site), []).append(i)
    noted += [findings.Repeat(line, tuple(outputs)) for line, outputs in lines.items()]

    def each(kind: Any) -> tuple[Any, ...]:
        return tuple([x for x in noted if isinstance(x, kind)])

    outputs = [
        findings.Dependence(m.source, origin_line(m)) if m.along else None for m in outs
    ]
    return findings.Analysis(
        outputs=tuple(outputs),
        hangs=each(findings.Hang),
        collectives=each(findings.Collective),
        repeats=each(findings.Repeat),
        draws=each(findings.Draw),
        factors=each(findings.Dependence),
        changed=each(findings.Changed),
        lints=(*sorted(join(outs).rows.met), *each(lints.OwnRows)),
        terms=each(LossPart),
        rows=tuple(mark.rows.dims for mark in outs),
        meshes=each(findings.OwnMesh),
        tower_calls=each(findings.TowerCall),
    )


def _propagate(jaxpr: Jaxpr, ins: _Marks, context: Context) -> tuple[_Marks, dict]:
    """Propagate marks through a jaxpr: those of its outputs, and all by variable."""
    env = dict(zip(jaxpr.invars, ins, strict=True))
    for var in jaxpr.constvars:
        may_count = (id(var), -1) in (context.varying or ())
        env[var] = FIXED._replace(scale=MAY_COUNT_TOWERS) if may_count else FIXED

    known = env.get
    for eqn in jaxpr.eqns:
        ins = [FIXED if isinstance(v, Literal) else known(v, FIXED) for v in eqn.invars]
        if eqn.primitive in PLAIN:
            env |= dict.fromkeys(eqn.outvars, mark_of_equation(eqn, ins, context))
        else:
            outs = _rule_of(eqn, context)(eqn, ins, context)
            env |= zip(eqn.outvars + refs(eqn), outs, strict=True)
    outs = [FIXED if isinstance(v, Literal) else known(v, FIXED) for v in jaxpr.outvars]
    return outs, env


def _rule_of(
    eqn: JaxprEqn, context: Context
) -> Callable[[JaxprEqn, _Marks, Context], _Marks]:
    if given_name(eqn) is not None:
        return _checkpoint_name
    inner = sub_jaxprs(eqn)
    if not inner and not named_axes(eqn) and is_foreign(eqn, context.axis):
        return _originate
    if eqn.primitive.name not in _RULES and is_hidden(eqn):
        return _hidden
    if refs(eqn):
        return _opaque
    if eqn.primitive.name in _RULES:
        return _RULES[eqn.primitive.name]
    if inner:
        # The jaxprs of kernels and reducers take parts of the operands.
        sides = [(len(c.invars), c.invars + c.outvars) for c in (eqn, *inner)]
        shapes = [(n, [getattr(v.aval, "shape", 0) for v in vs]) for n, vs in sides]
        return _call if shapes[1:] == shapes[:1] else _opaque
    return _communicate if named_axes(eqn) else _compute


def _communicate(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    name, scopes = eqn.primitive.name, scopes_of((eqn, None))
    is_sum = name in SUMS or name == "reduce_scatter"
    is_over = {DEVICE_AXIS, TOWER_AXIS}.intersection(named_axes(eqn))
    over_towers = is_over and name not in EXTREMES
    if context.axis == _NO_AXIS and over_towers and not context.is_derived(eqn):
        line = user_line((eqn, context.outer))
        known = (tags.BATCH_NORM, *tags.TOWER_CALLS)
        what = next((x for x in known if x in scopes), name)
        for m in ins:
            passes = not m.along or (what not in tags.TOWER_CALLS and is_flag(m))
            source = "" if passes else m.source
            context.noted.append(findings.TowerCall(what, line, is_sum, source))
    return apply_collective(eqn, ins, context)


def _compute(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    return _for_each_result(mark_of_equation(eqn, ins, context), eqn)


def _for_each_result(mark: Mark, eqn: JaxprEqn) -> _Marks:
    """The mark once for each result and for each Ref, which the equation may write."""
    return [mark] * (len(eqn.outvars) + len(refs(eqn)))


def _originate(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    source, differs = eqn.primitive.name, context.axis is not None
    if source == "axis_index":
        source, differs = "tower.id", context.axis in named_axes(eqn)
    rows, site = lints.of_part(join(ins).rows), (eqn, context.outer)
    mark = Mark(ALL, source, site, rows=rows) if differs else FIXED
    return _for_each_result(mark, eqn)


def _draw(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Random numbers; under ``vmap``, rbg draws for all keys at once."""
    key: Any = eqn.invars[0].aval
    kind = str(key.dtype)
    derives = eqn.primitive.name in ("random_fold_in", "random_split")
    is_rbg = "urbg" in kind if derives else "rbg" in kind or kind == "uint32"
    # vmap batches the carry of a while whose predicate differs, keys included.
    if is_rbg and (context.control or any(m.along for m in ins[: 1 + derives])):
        context.noted.append(findings.Draw(user_line((eqn, context.outer))))
    return _compute(eqn, ins, context)


def _checkpoint_name(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """A value that towerjax named: see `towerjax.proof.tags`."""
    name, [mark] = given_name(eqn) or "", ins
    if name == tags.ONE or (name == tags.HAS_EXAMPLES and context.axis == _NO_AXIS):
        return [FIXED]
    if name == tags.UNKNOWN_GRADIENT and context.axis == _NO_AXIS:
        return [Mark(ALL, "a gradient", (eqn, context.outer))]
    if name == tags.ROW_WEIGHTS and lints.NUM_VALID in mark.rows.leaves:
        weights: Any = eqn.outvars[0].aval
        rows = lints.of_batch(lints.WEIGHTS, weights.shape)
        return [mark._replace(rows=rows)]
    if name == tags.OF_ALL_ROWS:
        return [mark._replace(scale=mark.scale.once())]
    if name == tags.SUMMED_FOR_A_VARIABLE:
        of_towers = context.num_towers, context.varying
        scale = scale_of_summed(eqn, 0, mark.scale, *of_towers)
        return [mark._replace(scale=scale)]
    of = "loss" if name == tags.LOSS_WEIGHT else name.partition(tags.WEIGHT_OF)[2]
    site = eqn, context.outer
    own_rows = lints.of_named(name, mark.rows, lambda: origin_line(mark), site)
    context.noted.extend([*own_rows, *terms_of_loss(name, mark, is_flag)])
    if name == tags.GRADIENT_WEIGHT:
        return [mark._replace(weight=1)]
    if name == tags.SHARED and mark.along:
        context.noted.append(findings.Dependence(mark.source, origin_line(mark)))
    if of and mark.weight == 2:
        context.noted.append(findings.Changed(of, origin_line(mark)))
    is_same = not mark.along and not mark.scale.is_constant and mark.scale.low >= 0
    if name.startswith(tags.COUNTS_EACH_TOWER) and is_same and context.num_towers > 1:
        if not context.is_derived(eqn):
            what = name.removeprefix(tags.COUNTS_EACH_TOWER)
            context.noted.append(findings.Repeat(origin_line(mark), (), what))
    return ins


def _hidden(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Analyse the hidden code if it can be traced; else its results may differ."""
    env = {} if context.axis is None else {context.axis: context.num_towers}
    hidden = None if context.is_inside(eqn) else trace_hidden(eqn, env)
    if hidden is not None:
        return _propagate(hidden.jaxpr, ins, context.enter(eqn))[0]
    note_hang(eqn, context)
    return _originate(eqn, ins, context)


def _call(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    return _propagate(sub_jaxprs(eqn)[0], ins, context.enter(eqn))[0]


def _on_a_mesh(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """A program's own `shard_map`, or sharding."""
    name, line = eqn.primitive.name, user_line((eqn, context.outer))
    is_map = name == "shard_map"
    along = along_each_axis(eqn) if is_map and context.axis != _NO_AXIS else {}
    for mesh in meshes_of(eqn):
        own_mesh = findings.OwnMesh(name, mesh.axis_names, mesh.size, line, along)
        context.noted.append(own_mesh)
    return _call(eqn, ins, context) if is_map else ins


def along_each_axis(eqn: JaxprEqn) -> dict[str, findings.Analysis]:
    """What a `shard_map` does along each of its axes, as towers do along theirs.

    An output that ``out_specs`` split may differ.
    """
    params, found = eqn.params, {}
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    for axis, size in params["mesh"].shape.items():
        if axis not in manual or size == 1:
            continue
        ins, outs = (
            [axis in names_in(spec) for spec in params[name]]
            for name in ("in_specs", "out_specs")
        )
        inputs = ["what in_specs split" if is_split else None for is_split in ins]
        analysis = analyse(params["jaxpr"], inputs, axis, size)
        pairs = zip(analysis.outputs, outs, strict=True)
        alike = tuple([None if is_split else x for x, is_split in pairs])
        found[axis] = dataclasses.replace(analysis, outputs=alike)
    return found


def _solve(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """The first operands are the constants of four jaxprs, of which `solve` runs."""
    lengths, [solve] = eqn.params["const_lengths"], sub_jaxprs(eqn)
    start = lengths.matvec + lengths.vecmat
    ins = ins[start : start + lengths.solve] + ins[sum(lengths) :]
    return _propagate(solve, ins, context.enter(eqn))[0]


def _cond(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    inner = context.enter(eqn, predicate=ins[0])
    outs = [_propagate(branch, ins[1:], inner)[0] for branch in sub_jaxprs(eqn)]
    return _pick(eqn, [join(m) for m in zip(*outs, strict=True)], ins[0], context)


def _pick(eqn: JaxprEqn, outs: _Marks, predicate: Mark, context: Context) -> _Marks:
    if predicate.along:
        predicate = predicate._replace(site=(eqn, context.outer), before=predicate)
    return [mark_of_choice(mark, predicate) for mark in outs]


def _while(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test = open_jaxpr(eqn.params["cond_jaxpr"])
    body = open_jaxpr(eqn.params["body_jaxpr"])

    def trip(marks: _Marks) -> _Marks:
        *carry, predicate = _carried(marks, eqn)
        inner = context.enter(eqn, trips=None, predicate=predicate)
        outs = _propagate(body, ins[tests : tests + bodies] + carry, inner)[0]
        # The test sees the initial carry too, even if the body never runs.
        return outs + _propagate(test, ins[:tests] + carry, inner)[0]

    carry = ins[tests + bodies :]
    # The body may not run at all: then the results are the initial carry.
    *outs, predicate = _fixed_point(trip, [*carry, FIXED], context.noted)[1]
    return _pick(eqn, outs, predicate, context)


def _scan(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    length, body = eqn.params["length"], open_jaxpr(eqn.params["jaxpr"])
    consts, carry = loop_sizes(eqn)
    inner, end = context.enter(eqn, trips=length), consts + carry
    each = [m._replace(rows=lints.unstacked(m.rows, eqn)) for m in ins[end:]]

    def trip(marks: _Marks) -> _Marks:
        marks = _carried(marks, eqn)
        return _propagate(body, ins[:consts] + marks + each, inner)[0]

    outs, _ = _fixed_point(trip, ins[consts:end], context.noted)
    for i, m in enumerate(outs[carry:], carry):
        line = functools.partial(origin_line, None if context.is_derived(eqn) else m)
        rows = lints.stacked(m.rows, eqn, line)
        outs[i] = m._replace(rows=rows)
    # The last trip decides: a carry that the body reduces is reduced.
    return outs if length else ins[consts:end] + outs[carry:]


def _carried(marks: _Marks, loop: JaxprEqn) -> _Marks:
    return [m._replace(rows=lints.carried(m.rows, loop)) for m in marks]


def _fixed_point(trip: Callable, marks: _Marks, noted: list) -> tuple[_Marks, _Marks]:
    """Repeat a trip until marks stay the same: its outputs, and the marks before it."""
    start = len(noted)
    while True:
        del noted[start:]  # keep the findings of the last round alone
        outs = trip(marks)
        more = [join(pair) for pair in zip(outs, marks, strict=False)]
        if _without_sites(more) == _without_sites(marks):
            return outs, more
        marks = more


def _without_sites(marks: _Marks) -> list[Any]:
    """The parts of marks that decide whether the fixed point is reached."""
    return [
        (m.along, m.scale._replace(site=None), m.weight, m.rows.dims, m.rows.loops)
        for m in marks
    ]


def _opaque(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Kernels, Refs, unknown control flow: every result depends on every operand."""

    def trip(marks: _Marks) -> _Marks:
        choice = {"cond": ins, "while": marks}.get(eqn.primitive.name, [FIXED])
        inner = context.enter(eqn, trips=None, predicate=choice[0])
        for jaxpr in sub_jaxprs(eqn):
            env = _propagate(jaxpr, marks * len(jaxpr.invars), inner)[1]
            marks = [join([*marks, *env.values()])]
        return marks

    given = join(ins)
    given = given._replace(rows=lints.of_part(given.rows))
    outs, _ = _fixed_point(trip, [given], context.noted)
    whole = mark_of_equation(eqn, outs, context)
    if sub_jaxprs(eqn):
        # The scale of what a kernel or a reducer computes is unknown.
        whole = whole._replace(scale=whole.scale.once())
    return _for_each_result(whole, eqn)


_RULES: dict[str, Callable] = dict.fromkeys(IDENTITIES, lambda eqn, ins, context: ins)
_RULES |= {"axis_index": _originate, "cond": _cond}
_RULES |= dict.fromkeys(
    "random_bits random_fold_in random_gamma random_split rng_bit_generator".split(),
    _draw,
)
_RULES |= {
    "while": _while,
    "scan": _scan,
    "shard_map": _on_a_mesh,
    "sharding_constraint": _on_a_mesh,
    "custom_linear_solve": _solve,
}
