"""Carries that count a loop's trips, and `while` loops that end by such a carry."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from towerjax.jaxprs.flow import needed_eqns
from towerjax.jaxprs.params import open_jaxpr
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import Kind, Zero

Steps: TypeAlias = tuple[int, int]
"""What a trip adds to a carry, in the first and in the second program."""

KEPT: Steps = (0, 0)


def steps_of(bodies: Sequence[Any], operand: int, result: int) -> Steps | None:
    """Find the number that a trip adds to a carry, in both programs.

    It is 0 if a trip keeps the carry, whose type may then be any. The result is None if
    a trip changes the carry in another way.
    """
    first, second = [_step_of(open_jaxpr(x), operand, result) for x in bodies]
    return None if first is None or second is None else (first, second)


def _step_of(body: Any, operand: int, result: int) -> int | None:
    before = body.invars[operand]
    after = body.outvars[result]
    if after is before:
        return 0
    is_whole = jnp.issubdtype(before.aval.dtype, jnp.integer)  # a key has no kind
    is_number = is_whole and before.aval.shape == ()
    for eqn in body.eqns:
        if is_number and after in eqn.outvars and eqn.primitive.name == "add":
            steps = [int(x.val) for x in eqn.invars if isinstance(x, Literal)]
            if steps and any(x is before for x in eqn.invars):
                return steps[0]
    return None


def as_scan(pair: EquationPair) -> EquationPair | None:
    """Give a `while` that counts from 0 up to a number the params of a `scan`.

    ``while i < n: i += s`` makes ``ceil(n / s)`` trips. The number n must be known in
    both programs, in which it may differ; nothing else may be read by the condition.
    The result is None for any other `while`.
    """
    both = pair.first, pair.second
    ends = [_end_of(eqn) for eqn in both]
    if ends[0] is None or ends[1] is None or ends[0].places != ends[1].places:
        return None
    tests = pair.params["cond_nconsts"]
    consts = pair.params["body_nconsts"]
    bodies = [eqn.params["body_jaxpr"] for eqn in both]
    index = ends[0].index
    bound = _bound(pair, ends[0], ends[1])
    numbers = None if bound is None else pair.sizes.numbers_of(bound)
    steps = steps_of(bodies, consts + index, index)
    starts_at_0 = isinstance(pair.ins[tests + consts + index], Zero)
    if numbers is None or steps is None or not starts_at_0:
        return None
    if min(*numbers, *steps) <= 0:
        return None
    trips = [-(-n // step) for n, step in zip(numbers, steps, strict=True)]
    most = jnp.iinfo(pair.dtype(tests + consts + index)).max
    if any(n * step > most for n, step in zip(trips, steps, strict=True)):
        return None  # it would wrap around
    first, second = [_scan_of(*x) for x in zip(both, trips, strict=True)]
    return dataclasses.replace(
        pair,
        first=first,
        second=second,
        ins=pair.ins[tests:],
        rows_in=pair.rows_in[tests:],
        towers_in=pair.towers_in[tests:],
    )


class _End(NamedTuple):
    """A condition ``carry < bound`` of a `while`.

    ``index`` is the carry's index among the carries. The bound is an operand of the
    equation, or a literal if that is None.
    """

    index: int
    operand: int | None
    literal: Any

    @property
    def places(self) -> tuple[int, int | None]:
        """The places of the carry and of the bound, which both programs share."""
        return self.index, self.operand


def _end_of(eqn: JaxprEqn) -> _End | None:
    """Read the condition of a `while`; None if it is no comparison with a carry."""
    test = open_jaxpr(eqn.params["cond_jaxpr"])
    needed = needed_eqns(test.eqns, test.outvars)
    if [x.primitive.name for x in needed] not in (["lt"], ["gt"]):
        return None
    [one] = needed
    low, high = one.invars if one.primitive.name == "lt" else one.invars[::-1]
    places = {x: i for i, x in enumerate(test.invars)}
    tests = eqn.params["cond_nconsts"]
    index = -1 if isinstance(low, Literal) else places.get(low, -1) - tests
    if index < 0:
        return None
    if isinstance(high, Literal):
        return _End(index, None, high.val)
    if high not in places:
        return None
    place = places[high]
    skipped = 0 if place < tests else eqn.params["body_nconsts"]
    return _End(index, place + skipped, None)


def _bound(pair: EquationPair, first: _End, second: _End) -> Kind | None:
    """Find the kind of a bound; None if a trip may change it."""
    if first.operand is None:
        return pair.walk.constant(first.literal, second.literal)
    tests = pair.params["cond_nconsts"]
    place = first.operand - tests
    if place >= 0:
        consts = pair.params["body_nconsts"]
        bodies = [x.params["body_jaxpr"] for x in (pair.first, pair.second)]
        if steps_of(bodies, place, place - consts) != KEPT:
            return None
    return pair.ins[first.operand]


def _scan_of(eqn: JaxprEqn, length: int) -> JaxprEqn:
    """Give a `while` the params of a `scan` with ``length`` trips."""
    tests = eqn.params["cond_nconsts"]
    consts = eqn.params["body_nconsts"]
    params = {
        "jaxpr": eqn.params["body_jaxpr"],
        "length": length,
        "num_consts": consts,
        "num_carry": len(eqn.invars) - tests - consts,
        "reverse": False,
    }
    return eqn.replace(params=params, invars=eqn.invars[tests:])
