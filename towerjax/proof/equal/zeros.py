"""Where a value is 0: in padding, or in a tower none of whose rows has some flag.

A product is 0 where a factor is, a sum where all addends are. So a mask, or a weight
that is 0 in padding, makes what it is multiplied with 0 there, and padding does not
count in the sum of it. All that is said holds of derivatives, too: a flag has none, and
a function that has none at 0, such as a root, is not 0 there in this sense.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from towerjax.proof.equal.equation_pair import EquationPair
from towerjax.proof.equal.kinds import NO_ZEROS, Kind

KNOWN_ZEROS = frozenset([Kind.ROWS, Kind.ROW, Kind.PART, Kind.BUFFER, Kind.SPREAD])
"""Kinds of which it is known where they are 0."""

_Where: TypeAlias = frozenset[Any] | None
"""None: everywhere."""


def zeros_of(pair: EquationPair, result: int) -> frozenset[Any]:
    """Where a result of an equation is 0, by where its operands are."""
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
    """It may be any number where its operands are 0."""
    return NO_ZEROS


def _where_all_operands(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """It is 0 where all operands are: f(0, 0) = 0."""
    return _where_all(*at)


def _of_any(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """A product is 0 where one operand is."""
    return _where_any(*at)


def _of_first(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """It is elements, or sums, or a multiple of elements of its first operand."""
    return at[0]


def _of_quotient(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """It is 0 where what is divided is, and what it is divided by is not."""
    return None if at[0] is None else at[0] - (at[1] or NO_ZEROS)


def _of_gather(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Elements of its first operand, and beyond it what it is told to fill in."""
    return at[0] if fills_with_zero(pair) else NO_ZEROS


def fills_with_zero(pair: EquationPair) -> bool:
    """Whether a gather gives no other number where an index is beyond the array."""
    fills = "FILL" in str(pair.params["mode"])
    return not fills or pair.params["fill_value"] == 0


def _of_own(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Each result is made of the operand of its number."""
    return at[result]


def _of_second(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """The solution of A x = 0 is 0."""
    return at[1]


def _of_first_two(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Of an array, elements of which are replaced by those of the second operand."""
    return _where_all(*at[:2])


def _of_scatter(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Of an array, to elements of which those of the third operand come."""
    return _where_all(at[0], at[2])


def _of_choice(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """All cases are 0, or the predicate is, and the case that it then chooses."""
    predicate, first, *others = at
    chosen = _where_all(predicate, first)
    # Where both hold: what is 0 where the predicate is, and is the first case there.
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
    """0 > 0 and 0 != 0 and 0 < 0 are false."""
    return _where_all(*at) if None in at else NO_ZEROS


def _where_base(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """A power of 0 is 0 if it is a positive one."""
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
