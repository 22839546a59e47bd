"""Where a value is 0: everywhere, in padding, or on a tower without some flag.

A product is 0 where a factor is 0, and a sum where all addends are 0. So a product with
a mask, or with a weight that is 0 in padding, is 0 in padding, and padding does not
change its sum. This holds for derivatives, too: a flag has no derivative, and of a
function without a derivative at 0, such as a root, no zeros are known.

0 times infinity is not 0. What one tower computes of examples and parameters is assumed
to be finite. What a tower computes of its padding, or of its own sums, may still be
infinite, such as a mean of no rows; `in_padding` says of what this is known.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from towerjax.jaxprs.params import sub_jaxprs
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    NO_ZEROS,
    AtLeast,
    Buffer,
    Copy,
    Groups,
    InPadding,
    IsFull,
    Kind,
    Maximum,
    Mean,
    Minimum,
    Part,
    Row,
    Size,
    TowerRows,
    Valid,
    Zero,
)

KNOWN_ZEROS: TypeAlias = TowerRows | Row | Part | Buffer | Groups
"""Kinds for which the places are noted where a value is 0."""

_Where: TypeAlias = frozenset[Any] | None
"""The places where a value is 0; None is everywhere."""


def zeros_of(pair: EquationPair, result: int) -> frozenset[Any]:
    """Find where a result is 0, by where its operands are 0."""
    return _where(pair, result) or NO_ZEROS


def is_zero(pair: EquationPair) -> bool:
    """Return whether each result of an equation is 0 in all elements."""
    if not any(isinstance(x, Zero) for x in pair.ins):
        return False
    return all(_where(pair, i) is None for i in range(len(pair.rows_out)))


def _where(pair: EquationPair, result: int) -> "_Where":
    """Find where a result is 0; None stands for all places."""
    at = [None if isinstance(x, Zero) else x.zeros for x in pair.ins]
    return _TABLE.get(pair.name, _nowhere)(at, pair, result)


_ZeroRule: TypeAlias = Callable[[list[_Where], EquationPair, int], _Where]


def _where_all(*at: _Where) -> _Where:
    """Intersect the places: where all of these values are 0."""
    known = [x for x in at if x is not None]
    return frozenset.intersection(*known) if known else None


def _where_any(*at: _Where) -> _Where:
    """Unite the places: where at least one of these values is 0."""
    known = [x for x in at if x is not None]
    return frozenset().union(*known) if len(known) == len(at) else None


def _nowhere(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """``f(0)`` need not be 0, so the result is known to be 0 nowhere."""
    return NO_ZEROS


def _where_all_operands(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """``f(0, ..., 0) = 0``: the result is 0 where all operands are 0."""
    return _where_all(*at)


def _of_any(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """``0 * y = 0``: a product is 0 where some factor is 0.

    The other factors must be finite there.
    """
    ends = [_is_finite(x) for x in pair.ins]
    known = [x for i, x in enumerate(at) if all(ends[:i]) and all(ends[i + 1 :])]
    return _where_any(*known) if known else NO_ZEROS


def _of_first(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """``f(0) = 0``: the result is 0 where the first operand is 0.

    The result consists of that operand's elements, or of their sums, or is a function f
    of them with f(0) = 0.
    """
    return at[0]


def _of_nonempty(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """An extreme or a product of zeros is 0, unless it is of no elements."""
    return NO_ZEROS if is_over_none(pair) else at[0]


def is_over_none(pair: EquationPair) -> bool:
    """Return whether a reduction is over a dim of size 0."""
    return any(pair.shape(0)[i] == 0 for i in pair.params["axes"])


def _of_quotient(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """``0 / y = 0``: a quotient is 0 where its dividend is 0.

    Nothing is known if the divisor may be 0.
    """
    return at[0] if _divides(pair.ins[1]) else NO_ZEROS


def _divides(x: Kind) -> bool:
    """Return whether a divisor is known not to be 0.

    A quotient that one tower computes is assumed to be finite, so its divisor is not 0.
    """
    if isinstance(x, Copy | AtLeast):
        return True
    return isinstance(x, TowerRows | Row) and x.in_padding is InPadding.AS_EXAMPLE


def _of_gather(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """A gather is 0 where its array is 0.

    Nothing is known if indices may be out of bounds, and the fill value is not 0.
    """
    return at[0] if fills_with_zero(pair) else NO_ZEROS


def fills_with_zero(pair: EquationPair) -> bool:
    """Return whether a gather gives 0, or nothing, for indices out of bounds."""
    fills = "FILL" in str(pair.params["mode"])
    return not fills or pair.params["fill_value"] == 0


def fills_with_number(pair: EquationPair) -> bool:
    """Return whether a gather gives no NaN or infinity for indices out of bounds."""
    return "FILL" not in str(pair.params["mode"]) or bool(
        pair.params["fill_value"] is not None and np.isfinite(pair.params["fill_value"])
    )


def _of_own(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """Result i is 0 where operand i is 0."""
    return at[result]


def _of_second(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """``A x = 0`` gives ``x = 0``: the solution of A x = b is 0 where b is 0."""
    return at[1] if _divides(pair.ins[0]) else NO_ZEROS


def _of_first_two(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """The result is 0 where both of the first two operands are 0.

    The result has elements of both: some of one replace some of the other.
    """
    return _where_all(*at[:2])


def _of_scatter(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """A scatter is 0 where its array and its updates are both 0.

    These are the first and the third operand.
    """
    return _where_all(at[0], at[2])


def _of_choice(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """A `select_n` is 0 where the case that it chooses is 0.

    Either all cases are 0 there, or the predicate and case 0 are.
    """
    predicate, first, *others = at
    chosen = _where_all(predicate, first)
    # Where the predicate is 0, the result is case 0.
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
    """``0 > 0``, ``0 != 0`` and ``0 < 0`` are False, which is 0.

    One of the operands must be 0 everywhere, the other is 0 at these places.
    """
    return _where_all(*at) if None in at else NO_ZEROS


def _where_base(at: list[_Where], pair: EquationPair, result: int) -> _Where:
    """``0^y = 0`` for y > 0: a power is 0 where its base is 0.

    Nothing is known unless the exponent is a positive number.
    """
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
    reshape broadcast_in_dim reduce_sum reduce_or reduce_xor
    cumsum cummax cummin cumprod rev tile slice split unstack dynamic_slice
    fft reduce_window_sum select_and_scatter_add shift_left
    shift_right_logical
    shift_right_arithmetic pvary pcast""",
)
_register(_of_nonempty, "reduce_max reduce_min reduce_and reduce_prod")
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


KEEPS_FINITE = frozenset(
    """add sub add_any mul neg max min clamp select_n abs sign square exp expm1 tanh sin
    cos sinh cosh asinh atan logistic erf erfc floor ceil round copy copy_p name
    optimization_barrier stop_gradient convert_element_type reduce_precision real imag
    conj complex one_minus_square squeeze expand_dims transpose reshape
    broadcast_in_dim concatenate pad slice dynamic_slice rev tile split stack unstack
    reduce_sum cumsum cumprod cummax cummin sort dot_general conv_general_dilated
    reduce_window_sum pvary pcast dynamic_update_slice scatter scatter-add scatter-sub
    scatter-mul scatter-min scatter-max""".split()
)
"""Functions whose results are finite if their operands are."""

_WITHOUT_ROWS: TypeAlias = Copy | Part
# A value of these kinds is infinite or NaN on a tower that has no rows for it.
_OF_ANY_ROWS: TypeAlias = Maximum | Minimum | Mean


def _is_finite(x: Kind) -> bool:
    """Return whether a value is known to be finite.

    Counts of rows are. Other values are if `in_padding` found it.
    """
    is_count = isinstance(x, Zero | Size | Valid)
    return is_count or x.in_padding > InPadding.ANY


def in_padding(pair: EquationPair, result: int, value: Kind) -> InPadding:
    """Decide whether a result is finite in padding rows, as far as that is known.

    The result is finite if all operands are, unless the equation can give infinity for
    finite operands, as a division can.
    """
    dtype = pair.out_dtype(result)
    is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    least = InPadding.ANY if is_inexact else InPadding.FINITE
    if isinstance(value, _OF_ANY_ROWS):
        is_guarded = isinstance(value, Mean) and value.fact is not None
        return InPadding.FINITE if is_guarded else least
    if isinstance(value, _WITHOUT_ROWS):
        # A replicated value, and the sum of all parts, is also a value of the program
        # for one tower. So it is finite, unless an infinite constant is an operand.
        ends = [_is_finite(x) for x in pair.ins if isinstance(x, _WITHOUT_ROWS)]
        return InPadding.AS_EXAMPLE if all(ends) else least
    if pair.name == "select_n" and any(value is x for x in pair.ins):
        return value.in_padding  # The predicate is one bool: all rows get one case.
    levels = [_level(x) for x in pair.ins]
    others = [x for x in pair.ins if not isinstance(x, _WITHOUT_ROWS)]
    if all(_level(x) is InPadding.AS_EXAMPLE for x in others):
        return InPadding.AS_EXAMPLE
    if pair.name not in KEEPS_FINITE and sub_jaxprs(pair.first):
        return max(value.in_padding, least)
    keeps = pair.name in KEEPS_FINITE
    keeps |= pair.name == "integer_pow" and pair.params["y"] >= 0
    keeps |= pair.name == "gather" and fills_with_number(pair)
    keeps |= pair.name == "div" and isinstance(pair.ins[1], Copy | AtLeast)
    keeps &= all(x > InPadding.ANY for x in levels)
    return InPadding.FINITE if keeps else least


def _level(x: Kind) -> InPadding:
    """Look up what is known of an operand in padding rows; `AS_EXAMPLE` for 0."""
    if isinstance(x, Zero):
        return InPadding.AS_EXAMPLE
    if isinstance(x, Valid | IsFull | AtLeast):
        return InPadding.FINITE
    return x.in_padding
