"""Where a value is 0: in padding, or on a tower where no row has some flag.

A product is 0 where a factor is 0, a sum where all addends are 0. So a product with a
mask, or with a weight that is 0 in padding, is 0 there, and padding does not count in
its sum. This holds for derivatives, too: a flag has no derivative, and a function
without a derivative at 0, such as a root, does not count as 0 there.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from towerjax.proof.equal.equation_pair import EquationPair
from towerjax.proof.equal.kinds import NO_ZEROS, Kind

KNOWN_ZEROS = frozenset([Kind.ROWS, Kind.ROW, Kind.PART, Kind.BUFFER, Kind.SPREAD])
"""Kinds for which it is known where they are 0."""

_Where: TypeAlias = frozenset[Any] | None
"""The places where a value is 0; None is everywhere."""


def zeros_of(pair: EquationPair, result: int) -> frozenset[Any]:
    """Where a result of an equation is 0, from where its operands are 0."""
    at = [None if x.kind is Kind.ZERO else x.zeros for x in pair.ins]
    found = _TABLE.get(pair.name, _nowhere)(at, pair, result)
    return NO_ZEROS if found is None else found


_ZeroRule: TypeAlias = Callable[[list[_Where], EquationPair, int], _Where]


def _where_all(*at: _Where) -> _Where:
    """Where all of these are 0."""
    known = [x for x in at if x is not None]
    return frozenset.intersection(*known) if known else None


def _where_any(*at: _Where) -> _Where:
    """Where one of these is 0."""
    known = [x for x in at if x is not None]
    return frozenset().union(*known) if len(known) == len(at) else None


def _nowhere(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Nowhere, because it may be any number where its operands are 0."""
    return NO_ZEROS


def _where_all_operands(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where all operands are 0, because f(0, 0) = 0."""
    return _where_all(*at)


def _of_any(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where any operand is 0, as a product is."""
    return _where_any(*at)


def _of_first(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the first operand is 0, of which it has elements, sums or multiples."""
    return at[0]


def _of_quotient(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the dividend is 0 and the divisor is not."""
    return None if at[0] is None else at[0] - (at[1] or NO_ZEROS)


def _of_gather(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the first operand is 0, if it also fills in 0 beyond it."""
    return at[0] if fills_with_zero(pair) else NO_ZEROS


def fills_with_zero(pair: EquationPair) -> bool:
    """Whether a gather fills in no other number than 0 beyond its array."""
    fills = "FILL" in str(pair.params["mode"])
    return not fills or pair.params["fill_value"] == 0


def _of_own(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the operand of the same number is 0."""
    return at[result]


def _of_second(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the second operand is 0, because the solution of A x = 0 is 0."""
    return at[1]


def _of_first_two(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the first two operands are 0; elements of one replace the other's."""
    return _where_all(*at[:2])


def _of_scatter(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the first and third operands are 0; elements of one change the other."""
    return _where_all(at[0], at[2])


def _of_choice(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where all cases are 0, or where both the predicate and its case are 0."""
    predicate, first, *others = at
    chosen = _where_all(predicate, first)
    # Where both the predicate and the first case are 0.
    if predicate is not None and first is not None:
        chosen = predicate & first
    elif first is None:
        chosen = predicate
    elif predicate is None:
        chosen = first
    return _where_any_of(_where_all(first, *others), chosen)


def _where_any_of(x: _Where, y: _Where) -> _Where:
    return None if x is None or y is None else x | y


def _of_comparison(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where all operands are 0, because 0 > 0, 0 != 0 and 0 < 0 are false."""
    return _where_all(*at) if None in at else NO_ZEROS


def _where_base(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Where the base is 0, if the power is positive."""
    return at[0] if pair.params["y"] > 0 else NO_ZEROS


_TABLE: dict[str, _ZeroRule] = {}


def _register(where: _ZeroRule, names: str) -> None:
    _TABLE.update(dict.fromkeys(names.split(), where))


_register(
    _where_all_operands,
    """add sub add_any max min or xor complex concatenate stack pad""",
)
_register(_of_any, "mul and dot_general conv_general_dilated")
_register(
    _of_first,
    """neg copy copy_p real imag conj reduce_precision name sharding_constraint
    stop_gradient squeeze expand_dims transpose convert_element_type abs sign
    square tanh sin tan asin atan sinh asinh atanh erf expm1 log1p floor ceil round
    reshape broadcast_in_dim reduce_sum reduce_max reduce_min reduce_or reduce_and
    reduce_prod cumsum cummax cummin cumprod rev tile slice split unstack dynamic_slice
    fft reduce_window_sum select_and_scatter_add shift_left
    shift_right_logical
    shift_right_arithmetic pvary pcast""",
)
_register(_of_quotient, "div")
_register(_of_gather, "gather")
_register(_of_own, "optimization_barrier sort")
_register(_of_second, "triangular_solve")
_register(_of_first_two, "dynamic_update_slice")
_register(
    _of_scatter, "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max"
)
_register(_of_choice, "select_n")
_register(_of_comparison, "gt ne lt")
_register(_where_base, "integer_pow")
