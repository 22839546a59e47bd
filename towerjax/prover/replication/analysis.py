"""Find the outputs of a tower function that may differ from tower to tower.

The function is traced, not run. The analysis propagates a mark with every value through
its jaxpr. The mark says between which towers the value may differ; a value that differs
between none is MIRRORED. A dependence starts at a per-tower input or at `axis_index`.
It ends at a reduction over all towers, or at two reductions that together cover all
towers: see `towerjax.prover.replication.marks`. The analysis also finds collectives
that only some towers reach.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from towerjax.jaxprs import tags
from towerjax.jaxprs.flow import inner_programs, refs
from towerjax.jaxprs.params import (
    given_name,
    is_foreign,
    is_hidden,
    loop_sizes,
    manual_axes,
    meshes_of,
    named_axes,
    names_in,
    open_jaxpr,
    sub_jaxprs,
    trace_hidden,
)
from towerjax.jaxprs.primitives import EXTREMES, IDENTITIES, PLAIN, SUMS
from towerjax.jaxprs.sites import Site, scopes_of, user_line
from towerjax.jaxprs.tags import DEVICE_AXIS, TOWER_AXIS
from towerjax.prover.replication import findings
from towerjax.prover.replication.marks import (
    ALL,
    NOTHING,
    REPLICATED,
    Context,
    Mark,
    apply_collective,
    is_flag,
    join,
    made_at,
    origin_line,
)

_Marks: TypeAlias = list[Mark]
_Specs: TypeAlias = Sequence[PartitionSpec]
_Rule: TypeAlias = Callable[[JaxprEqn, _Marks, Context], _Marks]
_NO_AXIS = ""  # no collective names this axis, so none makes a value replicated
COPIES = "copies"  # the source of an input of which each device has an equal copy


def analyse(
    jaxpr: Jaxpr | ClosedJaxpr,
    inputs: Sequence[str | None],
    axis: str | None,
    num_towers: int,
    outer: Site | None = None,
) -> findings.Analysis:
    """Find which outputs of a traced tower function may differ from tower to tower.

    The analysis also finds the collectives in the program, and those that only some
    towers reach. It reads the program and runs nothing.

    ``inputs`` has a name for each input of which each tower has its own value, and None
    for an input that is the same on all towers. ``axis`` is the mesh axis of the
    towers; if it is None, no value differs. ``outer`` is the site of the equation that
    contains ``jaxpr``.
    """
    along = NOTHING if axis is None else ALL
    noted = list[Any]()
    ins = [Mark() if name is None else Mark(along, name) for name in inputs]
    context = Context(axis, num_towers, noted, outer)
    outs, _ = _propagate(open_jaxpr(jaxpr), ins, context)
    outputs = [
        findings.Dependence(m.source, origin_line(m)) if m.along else None for m in outs
    ]
    return findings.Analysis.of(outputs, noted)


def depends(
    jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[str | None]
) -> findings.Analysis:
    """Find on which named inputs each output depends.

    In `analyse`, a value that is reduced over the towers no longer depends on the
    inputs that it is reduced from. Here it still does.
    """
    return analyse(jaxpr, inputs, _NO_AXIS, 0)


def becomes_of(jaxpr: ClosedJaxpr, copied: Sequence[bool]) -> list[str]:
    """Find, for each output of a program, what a `shard_map` makes of equal copies.

    ``copied`` tells for each input whether every device has an equal copy of it. The
    result for an output is COPIES if all devices still have equal copies. Otherwise it
    is the source of the difference. It is "" if the output does not come from a
    `shard_map`.
    """
    ins = [Mark(source=COPIES * is_copied) for is_copied in copied]
    return [m.source for m in _propagate(jaxpr.jaxpr, ins, Context(None, 0, []))[0]]


def _propagate(jaxpr: Jaxpr, ins: _Marks, context: Context) -> tuple[_Marks, dict]:
    """Propagate marks through a jaxpr, to its outputs and all variables."""
    env = dict(zip(jaxpr.invars, ins, strict=True))
    known = env.get
    for eqn in jaxpr.eqns:
        ins = []
        for v in eqn.invars:  # a loop, because a function call per equation is slower
            ins.append(REPLICATED if isinstance(v, Literal) else known(v, REPLICATED))
        if eqn.primitive in PLAIN:
            env |= dict.fromkeys(eqn.outvars, made_at(join(ins), (eqn, context.outer)))
            continue
        rule = _RULES.get(eqn.primitive.name, _of_unknown)
        written = refs(eqn)
        rule = _opaque if written and rule is not _of_unknown else rule
        results = eqn.outvars + written
        try:
            env |= zip(results, rule(eqn, ins, context), strict=True)
        except Exception as error:  # A fault of a rule must not end a user's training.
            env |= dict.fromkeys(results, _of_fault(error, eqn, ins, context))
    outs = [
        REPLICATED if isinstance(v, Literal) else known(v, REPLICATED)
        for v in jaxpr.outvars
    ]
    return outs, env


def _of_fault(error: Exception, eqn: JaxprEqn, ins: _Marks, context: Context) -> Mark:
    """Note that a rule failed, and return the mark for the results of its equation.

    Nobody is refused for that: the results count as equal on all towers, and the step
    tells the fault. In `depends` they depend on all operands.
    """
    site = (eqn, context.outer)
    lines = str(error).splitlines() or [""]
    fault = f"{type(error).__name__}: {lines[0]}"
    context.noted.append(findings.Failure(fault, user_line(site)))
    return made_at(join(ins), site) if context.axis == _NO_AXIS else REPLICATED


# Each rule is called with an equation, the marks of its operands, and the context.
_RULES: dict[str, _Rule] = dict.fromkeys(IDENTITIES, lambda eqn, ins, context: ins)


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    """Register a rule for primitives of these names."""

    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _of_unknown(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark the results of an equation without a rule.

    Its inner jaxprs are looked into if they are called with the equation's operands.
    Otherwise each result may depend on each operand.
    """
    inner = sub_jaxprs(eqn)
    names = named_axes(eqn)
    if not inner and not names and is_foreign(eqn, context.axis):
        return _originate(eqn, ins, context)
    if is_hidden(eqn):
        return _hidden(eqn, ins, context)
    if names and not inner and not refs(eqn):
        return _communicate(eqn, ins, context)
    # An inner jaxpr is read as a call only if its inputs and outputs have the shapes of
    # the equation's. Those of kernels and reducers get slices of the operands.
    sides = [(len(c.invars), c.invars + c.outvars) for c in (eqn, *inner)]
    shapes = [(n, [getattr(v.aval, "shape", 0) for v in vs]) for n, vs in sides]
    is_call = shapes[1:] == shapes[:1] and not refs(eqn)
    return (_call if is_call else _opaque)(eqn, ins, context)


def _communicate(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark a collective's results, and record the collective."""
    name = eqn.primitive.name
    scopes = scopes_of((eqn, None))
    is_sum = name in SUMS or name == "reduce_scatter"
    is_over = {DEVICE_AXIS, TOWER_AXIS}.intersection(named_axes(eqn))
    over_towers = is_over and name not in EXTREMES
    if context.axis == _NO_AXIS and over_towers and not context.is_derived(eqn):
        line = user_line((eqn, context.outer))
        known = (tags.BATCH_NORM, *tags.TOWER_CALLS)
        call = next((x for x in known if x in scopes), name)
        for m in ins:
            passes = not m.along or (call not in tags.TOWER_CALLS and is_flag(m))
            source = "" if passes else m.source
            context.noted.append(findings.TowerCall(call, line, is_sum, source))
    return apply_collective(eqn, ins, context)


def _for_each_result(mark: Mark, eqn: JaxprEqn) -> _Marks:
    """Repeat ``mark`` for each result and for each Ref that ``eqn`` may write."""
    return [mark] * (len(eqn.outvars) + len(refs(eqn)))


@_rule("axis_index")
def _originate(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark results that may differ although all operands are equal.

    Such a result comes from `axis_index`, or from code that no jaxpr shows, such as a
    callback.
    """
    source = eqn.primitive.name
    site = (eqn, context.outer)
    differs = context.axis is not None
    if source == "axis_index":
        source = "tower.id"
        differs = context.axis in named_axes(eqn)
    else:
        context.noted.append(findings.Unread(source, user_line(site)))
    mark = Mark(ALL, source, site) if differs else REPLICATED
    return _for_each_result(mark, eqn)


@_rule(
    "random_bits", "random_fold_in", "random_gamma", "random_split", "rng_bit_generator"
)
def _draw(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark random numbers, and record draws that depend on ``vmap``.

    Under ``vmap``, an rbg generator draws for all keys at once, so its numbers depend
    on how many towers share a device.
    """
    key: Any = eqn.invars[0].aval
    kind = str(key.dtype)
    derives = eqn.primitive.name in ("random_fold_in", "random_split")
    is_rbg = "urbg" in kind if derives else "rbg" in kind or kind == "uint32"
    # If the predicate of a `while` differs between towers, vmap batches its whole
    # carry, including keys that are equal on all towers.
    if is_rbg and (context.control or any(m.along for m in ins[: 1 + derives])):
        context.noted.append(findings.Draw(user_line((eqn, context.outer))))
    return _for_each_result(made_at(join(ins), (eqn, context.outer)), eqn)


@_rule("name")
def _of_name(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Judge a value that towerjax named; see `towerjax.jaxprs.tags`."""
    name = given_name(eqn)
    [mark] = ins
    if name == tags.HAS_EXAMPLES and context.axis == _NO_AXIS:
        return [REPLICATED]
    if name == tags.MUST_BE_REPLICATED and mark.along:
        context.noted.append(findings.Dependence(mark.source, origin_line(mark)))
    return ins


def _hidden(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark the results of code that a primitive hides in its params.

    The code is traced if that is possible. Otherwise the results may differ between
    towers.
    """
    # Under the flag jax_remat3, `checkpoint_name` is such a primitive.
    if given_name(eqn) is not None:
        return _of_name(eqn, ins, context)
    env = {} if context.axis is None else {context.axis: context.num_towers}
    hidden = None if context.is_inside(eqn) else trace_hidden(eqn, env)
    if hidden is not None:
        return _propagate(hidden.jaxpr, ins, context.enter(eqn))[0]
    context.note_hang(eqn)
    return _originate(eqn, ins, context)


def _call(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark a call's results by the inner jaxpr that it runs."""
    return _propagate(sub_jaxprs(eqn)[0], ins, context.enter(eqn))[0]


@_rule("shard_map", "sharding_constraint")
def _on_a_mesh(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark the results of a user's `shard_map`, or of a sharding."""
    name = eqn.primitive.name
    line = user_line((eqn, context.outer))
    is_map = name == "shard_map"
    along = {}
    replicated = 0
    if is_map and context.axis is None and any(m.source == COPIES for m in ins):
        return _map_copies((eqn, context.outer), ins)
    if is_map and context.axis != _NO_AXIS:
        along = along_each_axis((eqn, context.outer))
        outs = [names_in(spec) for spec in eqn.params["out_specs"]]
        replicated = sum(axis not in names for axis in along for names in outs)
    split = len(along) * len(eqn.outvars) - replicated
    for mesh in meshes_of(eqn):
        typed = eqn.params.get("check_vma", False)
        own_mesh = findings.OwnMesh(
            name, mesh.axis_names, mesh.size, line, along, replicated, split, typed
        )
        context.noted.append(own_mesh)
    return _call(eqn, ins, context) if is_map else ins


def along_each_axis(
    site: Site, ins: _Specs | None = None, outs: _Specs | None = None
) -> dict[str, findings.Analysis]:
    """Analyse a `shard_map` along each of its axes, as if its devices were towers.

    The result has an `Analysis` for each axis. An output that ``out_specs`` split along
    the axis may differ. ``ins`` and ``outs`` are used in place of the equation's specs.
    """
    params = site[0].params
    analyses = {}
    sizes = params["mesh"].shape
    for axis in [x for x in sizes if x in manual_axes(site[0]) and sizes[x] > 1]:
        is_split, may_differ = (
            [axis in names_in(spec) for spec in specs or params[name]]
            for specs, name in ((ins, "in_specs"), (outs, "out_specs"))
        )
        inputs = ["what in_specs split" if x else None for x in is_split]
        analysis = analyse(params["jaxpr"], inputs, axis, sizes[axis], site)
        pairs = zip(analysis.outputs, may_differ, strict=True)
        outputs = tuple([None if may else x for x, may in pairs])
        analyses[axis] = dataclasses.replace(analysis, outputs=outputs)
    return analyses


def _map_copies(site: Site, ins: _Marks) -> _Marks:
    """Mark the results of a `shard_map` whose operands have a copy per device."""
    params = site[0].params
    body = params["jaxpr"]
    outs = [PartitionSpec()] * len(params["out_specs"])
    rows = {id(x.invars[0]) for x in body.eqns if x.primitive.name == "squeeze"}
    specs = [
        PartitionSpec(*spec[1:]) if mark.source == COPIES and id(var) in rows else spec
        for mark, spec, var in zip(ins, params["in_specs"], body.invars, strict=True)
    ]
    if specs == [*params["in_specs"]]:
        return [REPLICATED] * len(outs)
    along = along_each_axis(site, specs, outs).values()
    by_output = list(zip(*[x.outputs for x in along], strict=True)) or [()] * len(outs)
    differs = [next(filter(None, x), None) for x in by_output]
    return [Mark(source=x.told() if x else COPIES) for x in differs]


@_rule("custom_linear_solve")
def _solve(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Mark the results of a `custom_linear_solve` by its jaxpr ``solve``.

    The equation has four jaxprs, of which only ``solve`` computes the results. The
    constants of all four are among the operands.
    """
    [solve] = inner_programs(eqn)
    marks = dict(zip(map(id, eqn.invars), ins, strict=True))
    of_solve = [marks[id(x)] for x in solve.operands]
    return _propagate(solve.jaxpr, of_solve, context.enter(eqn))[0]


@_rule("cond")
def _cond(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Join the marks of a `cond`'s branches with that of its predicate."""
    inner = context.enter(eqn, predicate=ins[0])
    outs = [_propagate(branch, ins[1:], inner)[0] for branch in sub_jaxprs(eqn)]
    return _pick(eqn, [join(m) for m in zip(*outs, strict=True)], ins[0], context)


def _pick(eqn: JaxprEqn, outs: _Marks, predicate: Mark, context: Context) -> _Marks:
    """Join the marks of results with the mark of what chose them.

    ``predicate`` is that mark: of the predicate of a `cond` or a `while`.
    """
    predicate = made_at(predicate, (eqn, context.outer))
    return [join([mark, predicate]) for mark in outs]


@_rule("while")
def _while(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Propagate marks through the trips of a `while` until they stay the same."""
    tests = eqn.params["cond_nconsts"]
    bodies = eqn.params["body_nconsts"]
    test = open_jaxpr(eqn.params["cond_jaxpr"])
    body = open_jaxpr(eqn.params["body_jaxpr"])

    def trip(marks: _Marks) -> _Marks:
        *carry, predicate = marks
        inner = context.enter(eqn, trips=None, predicate=predicate)
        outs = _propagate(body, ins[tests : tests + bodies] + carry, inner)[0]
        # The predicate is computed from the carry before the body, too, because the
        # body may never run.
        return outs + _propagate(test, ins[:tests] + carry, inner)[0]

    carry = ins[tests + bodies :]
    # The marks of the initial carry are joined with those after a trip: if the body
    # never runs, the results are the initial carry.
    *outs, predicate = _fixed_point(trip, [*carry, REPLICATED], context.noted)[1]
    return _pick(eqn, outs, predicate, context)


@_rule("scan")
def _scan(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Propagate marks through the trips of a `scan` until they stay the same."""
    length = eqn.params["length"]
    body = open_jaxpr(eqn.params["jaxpr"])
    consts, carry = loop_sizes(eqn)
    inner = context.enter(eqn, trips=length)
    end = consts + carry

    def trip(marks: _Marks) -> _Marks:
        return _propagate(body, ins[:consts] + marks + ins[end:], inner)[0]

    outs, _ = _fixed_point(trip, ins[consts:end], context.noted)
    # The marks are those after a trip. So a carry that the body reduces over towers
    # does not differ after the loop, even if it differed before.
    return outs if length else ins[consts:end] + outs[carry:]


def _fixed_point(trip: Callable, marks: _Marks, noted: list) -> tuple[_Marks, _Marks]:
    """Repeat a loop's trip until the marks of its carry no longer change.

    Return the marks after the last trip, and those of the carry before it. ``noted``
    are the findings so far.
    """
    start = len(noted)
    while True:
        del noted[start:]  # leave out findings of earlier rounds, which repeat these
        outs = trip(marks)
        more = [join(pair) for pair in zip(outs, marks, strict=False)]
        if [m.along for m in more] == [m.along for m in marks]:
            return outs, more
        marks = more


def _opaque(eqn: JaxprEqn, ins: _Marks, context: Context) -> _Marks:
    """Let each result depend on each operand, as in a kernel.

    An equation that writes Refs is read so, too.
    """

    def trip(marks: _Marks) -> _Marks:
        choice = {"cond": ins, "while": marks}.get(eqn.primitive.name, [REPLICATED])
        inner = context.enter(eqn, trips=None, predicate=choice[0])
        for jaxpr in sub_jaxprs(eqn):
            env = _propagate(jaxpr, marks * len(jaxpr.invars), inner)[1]
            marks = [join([*marks, *env.values()])]
        return marks

    outs, _ = _fixed_point(trip, [join(ins)], context.noted)
    return _for_each_result(made_at(outs[0], (eqn, context.outer)), eqn)
