"""Rules for equations that run a program: calls, branches, loops, loops over rows."""

from collections.abc import Callable, Sequence
from typing import Any

from towerjax.jaxprs.params import (
    given_name,
    is_hidden,
    loop_sizes,
    named_axes,
    open_jaxpr,
    program_of_class,
    sub_jaxprs,
    trace_hidden,
)
from towerjax.jaxprs.sites import all_eqns
from towerjax.proof.equal import guards
from towerjax.proof.equal.choices import extreme_of_trips
from towerjax.proof.equal.chunk_loops import over_chunks, runs_over_chunks
from towerjax.proof.equal.constants import size_of_rows
from towerjax.proof.equal.equation_pair import (
    SPECIAL,
    EquationPair,
    ProgramsDifferError,
    rule,
)
from towerjax.proof.equal.kinds import (
    ZERO,
    Kind,
    Known,
    NotOfOneKindError,
    added,
    copy,
    joined,
    part,
    rows,
)
from towerjax.proof.equal.micro_batches import (
    over_micro_batches,
    runs_over_micro_batches,
)
from towerjax.proof.equal.nouns import nouns

_ROUNDS = 12  # the most walks through a loop until its kinds no longer change


@rule(
    """jit pjit closed_call core_call remat remat2 remat3 checkpoint custom_lin
    eval_jaxpr composite""",
    knows_unknown=True,
    knows_identity=True,
    kinds=SPECIAL,
)
def _called(pair: EquationPair) -> list[Known]:
    """The kinds of the results of the called program."""
    programs = [_program_of(eqn) for eqn in (pair.first, pair.second)]
    return pair.inside(programs, pair.ins)


@rule(
    "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call",
    kinds=[Kind.SPREAD],
    knows_unknown=True,
    knows_identity=True,
)
def _called_with_rule(pair: EquationPair) -> list[Known]:
    """The kinds of the called program, as other values if it has its own derivative."""
    ins = [_without_number(pair, x) for x in pair.ins]
    programs = [_program_of(eqn) for eqn in (pair.first, pair.second)]
    return [_without_number(pair, x) for x in pair.inside(programs, ins)]


@rule(
    "call_hi_primitive",
    knows_unknown=True,
    knows_identity=True,
    kinds=SPECIAL,
)
def _called_by_class(pair: EquationPair) -> list[Known]:
    """The kinds of the results of `jax.checkpoint` and others, with ``jax_remat3``."""
    eqns = (pair.first, pair.second)
    if all(given_name(eqn) is not None for eqn in eqns):
        return [*pair.ins]
    programs = [_program_of(eqn) for eqn in eqns]
    kinds = {type(eqn.params["_prim"]).__name__ for eqn in eqns}
    counts = {len(open_jaxpr(x).invars) for x in programs}
    if len(kinds) > 1 or counts != {len(pair.ins)}:
        raise ProgramsDifferError(
            f"the program has another {min(kinds)} for another number of {nouns().many}"
        )
    if kinds == {"RematTraced"}:
        return pair.inside(programs, pair.ins)
    if SPECIAL & pair.kinds:
        raise NotOfOneKindError(
            "a function with its own derivative has an operand that no rule covers"
        )
    found = _called_with_rule(pair)
    assert isinstance(found, list)
    return found


def _without_number(pair: EquationPair, value: Known) -> Known:
    if value.kind is Kind.MEAN:
        return pair.unknown(f"a function with its own derivative has {value}")
    return value._replace(fact=None)


def _program_of(eqn: Any) -> Any:
    """The program that a call runs, with its constants."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if key in eqn.params:
            return eqn.params[key]
    by_class = program_of_class(eqn.params.get("_prim"))
    if by_class is not None:
        return by_class
    if is_hidden(eqn):
        hidden = trace_hidden(eqn, {})
        if hidden is not None:
            return hidden
    raise ProgramsDifferError(f"{eqn.primitive.name} hides the program that it runs")


@rule("cond", knows_unknown=True, knows_identity=True)
def _branched(pair: EquationPair) -> list[Known]:
    """The kinds of the results of a branch, which all towers take together."""
    predicate, *ins = pair.ins
    if predicate.kind is Kind.UNKNOWN:
        return [predicate] * len(pair.rows_out)
    is_any = predicate.kind in (Kind.MAXIMUM, Kind.MINIMUM)
    is_alike = predicate.kind in (Kind.COPY, Kind.ZERO) and not predicate.power
    if not (is_alike or is_any):
        raise NotOfOneKindError(f"no rule for a branch by {predicate}")
    branches = [eqn.params["branches"] for eqn in (pair.first, pair.second)]
    each = [pair.inside(both, ins) for both in zip(*branches, strict=True)]
    if is_any:
        return [_by_any(pair, predicate, both) for both in zip(*each, strict=True)]
    return [_either_of(pair, values) for values in zip(*each, strict=True)]


def _by_any(pair: EquationPair, predicate: Known, cases: Sequence[Known]) -> Known:
    """The kind of a result, if a branch is taken by whether a row has a flag."""
    unknown = [x for x in cases if x.kind is Kind.UNKNOWN]
    if unknown or len(cases) != 2:
        return [*unknown, pair.unknown(f"no rule for a branch by {predicate}")][0]
    try:
        found = guards.chosen_by_any(predicate, cases)
    except NotOfOneKindError as error:
        return pair.unknown(str(error))
    return found or pair.unknown(f"no rule for a branch by {predicate}")


def _either_of(
    pair: EquationPair, values: Sequence[Known], verb: str = "as an alternative to"
) -> Known:
    """The kind of a value that may be any of these."""
    if all(x == values[0] for x in values):
        return values[0]
    unknown = [x for x in values if x.kind is Kind.UNKNOWN]
    if unknown:
        return unknown[0]
    known = [x for x in values if x.power is not None]
    is_one_carry = len({x._replace(power=None) for x in values}) == 1
    if is_one_carry and len(set(known)) == 1:
        return known[0]
    if any(x.kind in SPECIAL for x in values):
        return pair.unknown(f"no rule for {values[0]} {verb} {values[-1]}")
    try:
        found = joined(values, verb)
    except NotOfOneKindError as error:
        return pair.unknown(str(error))
    live = [x.zeros for x in values if x.kind is not Kind.ZERO]
    return found._replace(zeros=frozenset.intersection(*live)) if live else found


def _settled(
    pair: EquationPair,
    trip: Callable[[list[Known]], list[Known]],
    carry: Sequence[Known],
) -> list[Known]:
    """The kinds of a carry that a trip no longer changes."""
    found = [x.bare() for x in carry]
    for _ in range(_ROUNDS):
        ends = [x.bare() for x in trip(found)]
        pairs = zip(found, ends, strict=True)
        new = [_either_of(pair, both, "that a loop turns into") for both in pairs]
        if new == found:
            return found
        found = new
    return [pair.unknown("the kind of a loop's carry changes from trip to trip")] * len(
        carry
    )


def _refuse_special(ins: Sequence[Known], allowed: Sequence[Kind] = ()) -> None:
    for x in ins:
        refused = {Kind.STACKED, Kind.SPREAD, Kind.MEAN, Kind.ORDER}
        if x.kind in refused - {*allowed}:
            raise NotOfOneKindError(f"no rule for a loop with {x}")


@rule(
    "while",
    knows_unknown=True,
    knows_identity=True,
    kinds=SPECIAL,
)
def _while_it_holds(pair: EquationPair) -> list[Known]:
    """The kinds of a loop that all towers run equally often, or per row under vmap."""
    first = pair.first.params
    second = pair.second.params
    tests = first["cond_nconsts"]
    bodies = first["body_nconsts"]
    start = tests + bodies
    _refuse_special(pair.ins)
    ins = [x.bare() for x in pair.ins]
    of_body = first["body_jaxpr"], second["body_jaxpr"]
    of_test = first["cond_jaxpr"], second["cond_jaxpr"]

    is_by_row = pair.sizes.axes(*_avals_of_test(pair))[0] is not None

    def trip(carry: list[Known]) -> list[Known]:
        ends = pair.inside(of_body, [*ins[tests:start], *carry])
        return _each_for_itself(ends) if is_by_row else ends

    carry = ins[start:]
    carry = _settled(pair, trip, _each_for_itself(carry) if is_by_row else carry)
    [test] = pair.inside(of_test, [*ins[:tests], *carry])
    if test.kind is Kind.UNKNOWN:
        return [test] * len(carry)
    if test.kind in (Kind.COPY, Kind.ZERO) and not test.power:
        if not is_by_row:
            return carry
    _refuse_unless_by_row(pair, test, carry)
    return carry


def _each_for_itself(carry: Sequence[Known]) -> list[Known]:
    """Carries whose rows have their own trips, so that none is constant along rows."""
    return [rows(x.power) if x.kind is Kind.COPY else x for x in carry]


def _avals_of_test(pair: EquationPair) -> list[Any]:
    eqns = pair.first, pair.second
    return [open_jaxpr(x.params["cond_jaxpr"]).outvars[0].aval for x in eqns]


def _refuse_unless_by_row(
    pair: EquationPair, test: Known, carry: Sequence[Known]
) -> None:
    """Raise unless ``vmap`` made the loop, in which finished rows stay unchanged."""
    is_of_rows = test.kind is Kind.ROWS and not test.power and test.blocks == 1
    is_of_rows &= all(
        x.kind is Kind.ZERO or (x.kind is Kind.ROWS and x.blocks == 1) for x in carry
    )
    is_of_rows &= all(axis == 0 for axis in pair.rows_out)
    is_of_rows &= pair.sizes.axes(*_avals_of_test(pair))[0] == 0
    programs = [pair.params[key] for key in ("cond_jaxpr", "body_jaxpr")]
    meets = [named_axes(eqn) for x in programs for eqn in all_eqns(x)]
    if not is_of_rows or any(meets):
        raise NotOfOneKindError(f"no rule for a loop that ends by {test}")


@rule(
    "scan",
    knows_unknown=True,
    knows_identity=True,
    kinds=SPECIAL,
)
def _scanned(pair: EquationPair) -> list[Known]:
    """The kinds of a loop over a dim without rows; see `_over_own_rows` for rows."""
    consts, carry_size = loop_sizes(pair.first)
    start = consts + carry_size
    lengths = tuple(eqn.params["length"] for eqn in (pair.first, pair.second))
    programs = [eqn.params["jaxpr"] for eqn in (pair.first, pair.second)]
    if runs_over_micro_batches(pair, lengths):
        return over_micro_batches(pair, programs)
    if lengths[0] == lengths[1] and runs_over_chunks(pair):
        return over_chunks(pair, programs)
    _refuse_special(pair.ins)
    ins = [x.bare() for x in pair.ins]
    if pair.sizes.times(*lengths) is not None:
        return _over_own_rows(pair, lengths, programs)
    if lengths[0] != lengths[1]:
        raise NotOfOneKindError(
            f"the number of trips of a loop depends on the number of {nouns().many}"
        )
    if any(axis == 0 for axis in pair.rows_in[start:]):
        raise NotOfOneKindError(f"no rule for a loop over {nouns().its} rows")
    xs = ins[start:]

    def trip(carry: list[Known]) -> list[Known]:
        return pair.inside(programs, [*ins[:consts], *carry, *xs])[:carry_size]

    carry = _settled(pair, trip, ins[consts:start])
    outs = pair.inside(programs, [*ins[:consts], *carry, *xs])
    kept = [x.bare() for x in outs[carry_size:]]
    for i, x in enumerate(kept):
        if x.kind in SPECIAL or x.kind is Kind.MEAN:
            kept[i] = pair.unknown(f"no rule for {x} that a loop returns for each trip")
    return [*carry, *kept]


def _over_own_rows(
    pair: EquationPair, lengths: tuple[Any, Any], programs: Sequence[Any]
) -> list[Known]:
    """The kinds of a loop over rows, in which no row depends on another row."""
    if pair.scope.loop is not None or Kind.SO_FAR in pair.kinds:
        raise NotOfOneKindError(f"a loop over {nouns().its} rows is inside another one")
    consts, carry_size = loop_sizes(pair.first)
    start = consts + carry_size
    given = [x.bare() for x in pair.ins]
    each = [_of_one_row(pair, i, x) for i, x in enumerate(given) if i >= start]
    body: Any = open_jaxpr(programs[0])
    pairs = zip(body.invars[consts:start], body.outvars, strict=False)
    is_kept = [x is y for x, y in pairs]
    carry = [
        given[i] if is_kept[i - consts] else _start_of(pair, i, given[i])
        for i in range(consts, start)
    ]

    def trip(carry: list[Known]) -> list[Known]:
        return pair.inside(programs, [*given[:consts], *carry, *each], loop=lengths)

    outs = trip(carry)
    counts = [x.kind is Kind.COUNTER for x in carry]
    is_next = [x.kind is Kind.NEXT for x in outs[:carry_size]]
    if counts != [a and b for a, b in zip(counts, is_next, strict=True)]:
        # A carry that starts at 0 and is not a counter is a sum.
        carry = [
            _sum_of_carry(i) if x.kind is Kind.COUNTER and not is_next[i] else x
            for i, x in enumerate(carry)
        ]
        outs = trip(carry)
    starts = given[consts:start]
    ends = [
        first if kept else _end_of(pair, first, *both)
        for first, kept, *both in zip(starts, is_kept, carry, outs, strict=False)
    ]
    return [*ends, *[_rows_of(pair, x) for x in outs[carry_size:]]]


def _of_one_row(pair: EquationPair, operand: int, x: Known) -> Known:
    """The kind of one row of an array, in a loop over rows."""
    if pair.rows_in[operand] != 0:
        return pair.unknown(
            f"no rule for a loop over {nouns().its} rows and another dim"
        )
    if x.kind in (Kind.ZERO, Kind.UNKNOWN, Kind.COPY):
        return x
    if x.kind is Kind.NUMBERS and len(pair.shape(operand)) == 1:
        return Known(Kind.COUNTER)
    if x.kind is Kind.ROWS and x.blocks == 1:
        return Known(Kind.ROW, x.power, zeros=x.zeros, in_padding=x.in_padding)
    return pair.unknown(f"no rule for a loop over {x}")


def _sum_of_carry(number: int) -> Known:
    return Known(Kind.SO_FAR, None, note=number)


def _start_of(pair: EquationPair, operand: int, x: Known) -> Known:
    """The kind of a carry in any trip, which says what a row may do with it."""
    number = operand - loop_sizes(pair.first)[0]
    if x.kind is Kind.UNKNOWN:
        return x
    if pair.rows_in[operand] is not None:
        x = rows(x.power) if x.kind is Kind.COPY else x
        if x.kind not in (Kind.ROWS, Kind.ZERO) or x.blocks > 1:
            return pair.unknown(f"a loop over {nouns().its} rows changes {x}")
        power = None if x.kind is Kind.ZERO else x.power
        return Known(Kind.BUFFER, power, zeros=x.zeros, note=number)
    is_whole = pair.dtype(operand).kind in "iu" and pair.shape(operand) == ()
    if x.kind is Kind.ZERO and is_whole and not pair.params["reverse"]:
        return Known(Kind.COUNTER)
    return _sum_of_carry(number)


def _end_of(pair: EquationPair, first: Known, start: Known, end: Known) -> Known:
    """The kind of a carry after all rows."""
    if end.kind is Kind.UNKNOWN:
        return end
    try:
        if extreme := extreme_of_trips(first, start, end):
            return extreme
    except NotOfOneKindError as error:
        return pair.unknown(str(error))
    is_own = start.kind is end.kind and start.note == end.note
    if is_own and start.kind is Kind.SO_FAR:
        if end.power is None:
            return first
        return _sum_with(pair, first, end.power)
    if is_own and start.kind is Kind.BUFFER:
        return ZERO if end.power is None else rows(end.power)
    if start.kind is Kind.COUNTER and end.kind is Kind.NEXT:
        return _count_of_trips(pair)
    return pair.unknown("a row depends on the row before it")


def _count_of_trips(pair: EquationPair) -> Known:
    """The number of trips of a loop over rows, which is a multiple of a tower's rows.

    A counter starts at 0, and grows by 1 in each trip.
    """
    lengths = [eqn.params["length"] for eqn in (pair.first, pair.second)]
    if pair.sizes.times(*lengths) == 1:
        return size_of_rows(pair.sizes)
    return pair.unknown(f"a loop counts several trips for each of {nouns().its} rows")


def _sum_with(pair: EquationPair, first: Known, power: Any) -> Known:
    try:
        return added([first, part(power)])
    except NotOfOneKindError as error:
        return pair.unknown(str(error))


def _rows_of(pair: EquationPair, x: Known) -> Known:
    """The kind of an output that a loop over rows stacks."""
    if x.kind is Kind.ROW:
        found = rows(x.power)._replace(zeros=x.bare().zeros)
        return found._replace(in_padding=x.in_padding)
    if x.kind is Kind.COPY:
        return copy(x.power)
    if x.kind is Kind.COUNTER:
        return Known(Kind.NUMBERS)
    if x.kind in (Kind.ZERO, Kind.UNKNOWN):
        return x
    return pair.unknown(f"a loop over {nouns().its} rows returns {x} for each row")


@rule("custom_linear_solve", knows_unknown=True)
def _solved(pair: EquationPair) -> list[Known]:
    """The kinds of the results of the equation's program `solve`."""
    lengths = pair.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    ins = [*pair.ins[start : start + lengths.solve], *pair.ins[sum(lengths) :]]
    programs = [sub_jaxprs(eqn)[0] for eqn in (pair.first, pair.second)]
    solve = [eqn.params["jaxprs"].solve for eqn in (pair.first, pair.second)]
    assert [open_jaxpr(x) for x in solve] == programs
    return pair.inside(solve, ins)
