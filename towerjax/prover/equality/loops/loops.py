"""Rules for equations that run a program: calls, branches, loops, loops over rows."""

from collections.abc import Callable, Sequence
from typing import Any

from towerjax.jaxprs.flow import always_raises, inner_programs
from towerjax.jaxprs.params import (
    given_name,
    is_hidden,
    loop_sizes,
    named_axes,
    open_jaxpr,
    program_of_class,
    trace_hidden,
)
from towerjax.jaxprs.sites import all_eqns
from towerjax.prover.equality.kinds.equation_pair import (
    EquationPair,
    ProgramsDifferError,
)
from towerjax.prover.equality.kinds.kinds import (
    Copy,
    Groups,
    Kind,
    Maximum,
    Mean,
    Minimum,
    NotOfOneKindError,
    RowOrder,
    TowerRows,
    Unknown,
    Zero,
    joined,
    rows,
)
from towerjax.prover.equality.kinds.stacked import Stacked
from towerjax.prover.equality.loops.chunks import chunks_of
from towerjax.prover.equality.loops.counts import as_scan
from towerjax.prover.equality.loops.micro_batches import micro_batches_of
from towerjax.prover.equality.loops.row_loops import row_trips_of
from towerjax.prover.equality.loops.trips import over_trips
from towerjax.prover.equality.rules import guards
from towerjax.prover.equality.rules.rules import OF_ONE_TOWER, SPECIAL, rule

_ROUNDS = 12  # the most walks of a loop's body; then its kinds count as unknown


@rule(
    """jit pjit closed_call core_call remat remat2 remat3 checkpoint custom_lin
    eval_jaxpr composite""",
    every=Kind,
    knows_identity=True,
)
def _called(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Run a call: its results are those of the program that it runs."""
    programs = [_program_of(eqn) for eqn in (pair.first, pair.second)]
    return pair.inside(programs, ins)


@rule(
    "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call",
    every=OF_ONE_TOWER | Groups | Unknown,
    knows_identity=True,
)
def _called_with_rule(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Run a call of a `custom_jvp` or `custom_vjp` function by its program.

    The results get no identity of another value, because the user may have written
    another derivative for them.
    """
    others = [_without_number(pair, x) for x in ins]
    programs = [_program_of(eqn) for eqn in (pair.first, pair.second)]
    return [_without_number(pair, x) for x in pair.inside(programs, others)]


@rule(
    "call_hi_primitive",
    every=Kind,
    knows_identity=True,
)
def _called_by_class(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Run a call whose program is in an object, as with ``jax_remat3``.

    Such calls are `jax.checkpoint`, `jax.custom_jvp` and `jax.custom_vjp`.
    """
    eqns = (pair.first, pair.second)
    if all(given_name(eqn) is not None for eqn in eqns):
        return [*ins]
    programs = [_program_of(eqn) for eqn in eqns]
    kinds = {type(eqn.params["_prim"]).__name__ for eqn in eqns}
    counts = {len(open_jaxpr(x).invars) for x in programs}
    if len(kinds) > 1 or counts != {len(ins)}:
        raise ProgramsDifferError(
            f"the program has another {min(kinds)} for another number of {{many}}"
        )
    if kinds == {"RematTraced"}:
        return pair.inside(programs, ins)
    if any(isinstance(x, SPECIAL) for x in ins):
        raise NotOfOneKindError(
            "a function with its own derivative has an operand that no rule covers"
        )
    return _called_with_rule(pair, *ins)


def _without_number(pair: EquationPair, value: Kind) -> Kind:
    if isinstance(value, Mean):
        return pair.unknown(
            f"no rule for a function with its own derivative of {value}"
        )
    return value.replace(fact=None)


def _program_of(eqn: Any) -> Any:
    """Find the program that a call runs, with its constants."""
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


@rule("cond", every=OF_ONE_TOWER | Unknown, knows_identity=True)
def _branched(pair: EquationPair, predicate: Kind, *ins: Kind) -> list[Kind]:
    """Run a `cond`, whose branch all towers must take together.

    So the predicate must be replicated. It may also tell whether a tower has a row with
    some flag, if a tower without such rows gets the same from both branches. A branch
    that only raises gives no result; it is then taken for any number of towers.
    """
    if isinstance(predicate, Unknown):
        return [predicate] * len(pair.rows_out)
    is_any = isinstance(predicate, Maximum | Minimum)
    is_alike = isinstance(predicate, Copy | Zero) and not predicate.power
    if not (is_alike or is_any):
        raise NotOfOneKindError(f"no rule for a branch by {predicate}")
    branches = [eqn.params["branches"] for eqn in (pair.first, pair.second)]
    both_branches = [*zip(*branches, strict=True)]
    ending = [both for both in both_branches if not all(map(always_raises, both))]
    of_branches = [pair.inside(both, ins) for both in ending or both_branches]
    if len(ending) == 1:
        return of_branches[0]
    if is_any:
        return [
            _by_any(pair, predicate, both) for both in zip(*of_branches, strict=True)
        ]
    return [_either_of(pair, values) for values in zip(*of_branches, strict=True)]


def _by_any(pair: EquationPair, predicate: Kind, cases: Sequence[Kind]) -> Kind:
    """Choose a branch by whether a tower has a row with some flag."""
    unknown = [x for x in cases if isinstance(x, Unknown)]
    if unknown or len(cases) != 2:
        return [*unknown, pair.unknown(f"no rule for a branch by {predicate}")][0]
    try:
        chosen = guards.chosen_by_any(predicate, cases)
    except NotOfOneKindError as error:
        return pair.unknown_by(error)
    return chosen or pair.unknown(f"no rule for a branch by {predicate}")


def _either_of(
    pair: EquationPair, values: Sequence[Kind], verb: str = "as an alternative to"
) -> Kind:
    """Find a kind that holds for a value of any of these kinds."""
    if all(x == values[0] for x in values):
        return values[0]
    unknown = [x for x in values if isinstance(x, Unknown)]
    if unknown:
        return unknown[0]
    known = [x for x in values if x.power is not None]
    is_one_carry = len({x.replace(power=None) for x in values}) == 1
    if is_one_carry and len(set(known)) == 1:
        return known[0]
    if any(isinstance(x, SPECIAL) for x in values):
        return pair.unknown(f"no rule for {values[0]} {verb} {values[-1]}")
    try:
        either = joined(values, verb)
    except NotOfOneKindError as error:
        return pair.unknown_by(error)
    live = [x.zeros for x in values if not isinstance(x, Zero)]
    return either.replace(zeros=frozenset.intersection(*live)) if live else either


def _settled(
    pair: EquationPair,
    trip: Callable[[list[Kind]], list[Kind]],
    carry: Sequence[Kind],
) -> list[Kind]:
    """Find kinds of a loop's carry that a trip does not change.

    ``trip`` gives the kinds after a trip, from those before. It is called until they
    stay the same. If they do not after some rounds, all are unknown.
    """
    kinds = [x.bare() for x in carry]
    for _ in range(_ROUNDS):
        ends = [x.bare() for x in trip(kinds)]
        pairs = zip(kinds, ends, strict=True)
        new = [_either_of(pair, both, "that a loop turns into") for both in pairs]
        if new == kinds:
            return kinds
        kinds = new
    return [
        pair.unknown(
            "no rule for a loop that changes a carry in another way in each trip"
        )
    ] * len(carry)


def _refuse_special(ins: Sequence[Kind]) -> None:
    """Raise for operands that a loop over dims without rows may not have."""
    for x in ins:
        if isinstance(x, Stacked | Groups | Mean | RowOrder):
            raise NotOfOneKindError(f"no rule for a loop with {x}")


@rule(
    "while",
    every=Kind,
    knows_identity=True,
)
def _while_it_holds(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Run a `while` loop, in which all towers must make the same trips.

    One that counts up to a number is a `scan`. In a loop that ``vmap`` made, each row
    makes its own trips.
    """
    if scan := as_scan(pair):
        return _scanned(scan, *scan.ins)
    first = pair.first.params
    second = pair.second.params
    tests = first["cond_nconsts"]
    bodies = first["body_nconsts"]
    start = tests + bodies
    _refuse_special(ins)
    bare = [x.bare() for x in ins]
    of_body = first["body_jaxpr"], second["body_jaxpr"]
    of_test = first["cond_jaxpr"], second["cond_jaxpr"]

    is_by_row = pair.sizes.axes(*_avals_of_test(pair))[0] is not None

    def trip(carry: list[Kind]) -> list[Kind]:
        ends = pair.inside(of_body, [*bare[tests:start], *carry])
        return _each_for_itself(ends) if is_by_row else ends

    carry = bare[start:]
    carry = _settled(pair, trip, _each_for_itself(carry) if is_by_row else carry)
    [test] = pair.inside(of_test, [*bare[:tests], *carry])
    if isinstance(test, Unknown):
        return [test] * len(carry)
    if isinstance(test, Copy | Zero) and not test.power:
        if not is_by_row:
            return carry
    _refuse_unless_by_row(pair, test, carry)
    return carry


def _each_for_itself(carry: Sequence[Kind]) -> list[Kind]:
    """Let each row make trips of its own.

    A replicated value then becomes rows, because it may differ from row to row.
    """
    return [rows(x.power) if isinstance(x, Copy) else x for x in carry]


def _avals_of_test(pair: EquationPair) -> list[Any]:
    eqns = pair.first, pair.second
    return [open_jaxpr(x.params["cond_jaxpr"]).outvars[0].aval for x in eqns]


def _refuse_unless_by_row(
    pair: EquationPair, test: Kind, carry: Sequence[Kind]
) -> None:
    """Raise unless ``vmap`` made a `while` loop, so that each row makes its own trips.

    In such a loop the carry of a row that has ended stays unchanged.
    """
    is_of_rows = isinstance(test, TowerRows) and not test.power and test.blocks == 1
    is_of_rows &= all(
        isinstance(x, Zero) or (isinstance(x, TowerRows) and x.blocks == 1)
        for x in carry
    )
    is_of_rows &= all(axis == 0 for axis in pair.rows_out)
    is_of_rows &= pair.sizes.axes(*_avals_of_test(pair))[0] == 0
    programs = [pair.params[key] for key in ("cond_jaxpr", "body_jaxpr")]
    meets = [named_axes(eqn) for x in programs for eqn in all_eqns(x)]
    if not is_of_rows or any(meets):
        raise NotOfOneKindError(f"no rule for a loop that ends by {test}")


@rule(
    "scan",
    every=Kind,
    knows_identity=True,
)
def _scanned(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Walk a trip, which may share the rows of a batch or of a tower; see `trips`.

    In any other loop, a trip must not change the kinds of the carry.
    """
    programs = [eqn.params["jaxpr"] for eqn in (pair.first, pair.second)]
    if trips := micro_batches_of(pair, programs) or chunks_of(pair):
        return over_trips(trips, programs)
    _refuse_special(ins)
    if trips := row_trips_of(pair):
        return over_trips(trips, programs)
    return _over_other_trips(pair, programs)


def _over_other_trips(pair: EquationPair, programs: Sequence[Any]) -> list[Kind]:
    """Walk a loop whose trips share no rows, until a trip keeps the carry's kinds."""
    consts, carry_size = loop_sizes(pair.first)
    start = consts + carry_size
    bare = [x.bare() for x in pair.ins]
    if pair.first.params["length"] != pair.second.params["length"]:
        raise NotOfOneKindError(
            "the number of trips of a loop depends on the number of {many}"
        )
    if any(axis == 0 for axis in pair.rows_in[start:]):
        raise NotOfOneKindError("no rule for a loop over {its} rows")
    xs = bare[start:]

    def trip(carry: list[Kind]) -> list[Kind]:
        return pair.inside(programs, [*bare[:consts], *carry, *xs])[:carry_size]

    carry = _settled(pair, trip, bare[consts:start])
    outs = pair.inside(programs, [*bare[:consts], *carry, *xs])
    stacked = [x.bare() for x in outs[carry_size:]]
    for i, x in enumerate(stacked):
        if isinstance(x, SPECIAL) or isinstance(x, Mean):
            stacked[i] = pair.unknown(
                f"no rule for {x} that a loop returns for each trip"
            )
    return [*carry, *stacked]


@rule("custom_linear_solve", every=OF_ONE_TOWER | Unknown)
def _solved(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Solve a `custom_linear_solve` by its program ``solve``."""
    [first] = inner_programs(pair.first)
    [second] = inner_programs(pair.second)
    kinds = dict(zip(map(id, pair.first.invars), ins, strict=True))
    used = [kinds[id(x)] for x in first.operands]
    return pair.inside((first.jaxpr, second.jaxpr), used)
