"""Rules for equations whose elements are computed from single elements."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from towerjax.proof.equal import guards
from towerjax.proof.equal.equation_pair import SPECIAL, EquationPair, rule
from towerjax.proof.equal.kinds import (
    EACH,
    LINEAR,
    ROWS_OF_TOWER,
    ZERO,
    Flag,
    InfinitePadding,
    Kind,
    Known,
    NotOfOneKindError,
    NumberInBatch,
    added,
    as_part,
    copy,
    function_of,
    joined,
    product_of,
    rows,
)
from towerjax.proof.equal.nouns import nouns

_SCALED = LINEAR | {Kind.SPREAD, Kind.STACKED, Kind.MEAN}
_ORDERED = {Kind.MAXIMUM: "max", Kind.MINIMUM: "min"}


@rule(
    """copy copy_p name sharding_constraint optimization_barrier pvary pcast reshard
    device_put layout_constraint random_clone preduced""",
    knows_identity=True,
    kinds=SPECIAL,
)
def _as_it_is(pair: EquationPair) -> list[Known]:
    """Result i is operand i."""
    return [*pair.ins]


@rule("stop_gradient", knows_identity=True, kinds=[Kind.STACKED])
def _without_derivative(pair: EquationPair) -> Known:
    """The operand's kind, for another value; where that is 0, so is its derivative."""
    return pair.ins[0]._replace(fact=None)


@rule("reduce_precision", knows_identity=True)
def _rounded(pair: EquationPair) -> Known:
    """The operand: rounding is ignored, and keeps the order."""
    return pair.ins[0]


@rule("neg", knows_identity=True, kinds=[Kind.SPREAD, Kind.STACKED])
def _negative(pair: EquationPair) -> Known:
    """The negative is linear; a maximum would become a minimum, so it is refused."""
    [x] = pair.ins
    is_extreme = x.kind is Kind.STACKED and x.note in _ORDERED
    if x.kind not in _SCALED or is_extreme:
        raise NotOfOneKindError(f"no rule for the negative of {x}")
    return x if x.kind is Kind.MEAN else x.times_tower(x.power)


@rule("real imag conj")
def _linear_of_complex(pair: EquationPair) -> Known:
    """A linear function over the real numbers."""
    [x] = pair.ins
    if x.kind not in LINEAR:
        raise NotOfOneKindError(f"no rule for {pair.name} of {x}")
    return x


@rule("squeeze expand_dims", knows_identity=True)
def _laid_otherwise(pair: EquationPair) -> Known:
    """The operand; its dims get other numbers, which the shapes show."""
    return pair.ins[0]


@rule("transpose", knows_identity=True, kinds=[Kind.SPREAD, Kind.STACKED])
def _transposed(pair: EquationPair) -> Known:
    """The operand; groups of rows lie along the new numbers of their dims."""
    [x] = pair.ins
    if x.kind is not Kind.SPREAD:
        return x
    dims = tuple(pair.params["permutation"].index(i) for i in x.note.dims)
    return x._replace(note=x.note._replace(dims=dims))


@rule(
    "convert_element_type",
    knows_identity=True,
    kinds=[
        Kind.SPREAD,
        Kind.STACKED,
        Kind.SO_FAR,
        Kind.BUFFER,
        Kind.COLUMNS,
        Kind.ORDER,
    ],
    by_element=True,
)
def _converted(pair: EquationPair) -> Known:
    """A conversion keeps floats, except for rounding, and integers that become wider.

    Any other conversion is a function of each element.
    """
    [x] = pair.ins
    old = np.dtype(pair.dtype(0))
    new = np.dtype(pair.params["new_dtype"])
    widens = old.kind == "b" or (
        old.kind == new.kind and new.itemsize >= old.itemsize and new.kind in "iu"
    )
    is_inexact = jnp.issubdtype(new, jnp.inexact)
    loses_imaginary = jnp.issubdtype(old, jnp.complexfloating)
    loses_imaginary &= not jnp.issubdtype(new, jnp.complexfloating)
    has_no_infinity = new.itemsize < 2
    if isinstance(x.fact, InfinitePadding) and has_no_infinity:
        x = x._replace(fact=None)
    keeps = (is_inexact and not loses_imaginary) or (widens and new.kind in "iub")
    if keeps or x.kind is Kind.ZERO:
        return x
    is_number = x.kind not in EACH
    keeps_number = {
        Kind.NUMBERS,
        Kind.ORDER,
        Kind.COUNTER,
        Kind.VALID,
        Kind.SIZE,
        Kind.TOWER,
    }
    keeps_number |= {Kind.FIRST_ROW, Kind.NEXT, Kind.COLUMNS, Kind.ROW}
    if is_number and x.kind in keeps_number and new.kind in "iu" and old.kind in "iu":
        return x
    if x.note == ROWS_OF_TOWER and new.kind in "iu":
        return x
    found = function_of([x], f"a conversion to {new.name}")
    # A flag that is a number keeps its identity.
    if isinstance(x.fact, Flag) and (new.kind in "biu" or old.kind in "biu"):
        return found._replace(zeros=x.zeros, fact=x.fact)
    return found


@rule(
    "add sub add_any",
    knows_identity=True,
    kinds=[Kind.SPREAD, Kind.SO_FAR],
    by_element=True,
)
def _sum_of_two(pair: EquationPair) -> Known:
    """Kinds are closed under sums; a copy is also a part of T times itself."""
    x, y = pair.ins
    is_sum = pair.name != "sub"
    kinds = pair.kinds
    if Kind.SPREAD in kinds:
        if (x.kind, x.power, x.note) != (y.kind, y.power, y.note):
            raise NotOfOneKindError(f"no rule for a sum of {x} and {y}")
        return x.times_tower(x.power)
    if kinds == {Kind.NUMBERS, Kind.FIRST_ROW} and is_sum:
        # The row numbers of the whole batch, if all towers have equally many rows, all
        # at once.
        at = 0 if x.kind is Kind.NUMBERS else 1
        is_even = not pair.sizes.padded and pair.sizes.parts == (1, 1)
        if pair.times_rows(at, pair.rows_in[at]) == 1 and is_even:
            is_vector = len(pair.shape(at)) == 1
            return rows()._replace(fact=NumberInBatch() if is_vector else None)
        raise NotOfOneKindError(
            f"no rule for a sum with a {nouns().one}'s first row number"
        )
    own = {Kind.NUMBERS, Kind.FIRST_ROW, Kind.TOWER, Kind.COUNTER}
    if kinds & own:
        return _sum_with_number(pair)
    if Kind.SO_FAR in kinds:
        return _sum_so_far(pair)
    if found := guards.sum_with_mean(pair):
        return found
    return added(pair.ins)


def _sum_with_number(pair: EquationPair) -> Known:
    """A row number plus 0 is itself; in a loop, plus 1 is the next row's number."""
    x, y = pair.ins
    is_sum = pair.name != "sub"
    if y.kind is Kind.ZERO:
        return x
    if x.kind is Kind.ZERO and is_sum:
        return y
    for one, other, operand in ((x, y, 1), (y, x, 0)):
        is_next = one.kind is Kind.COUNTER and pair.constant(operand) == 1
        if is_next and is_sum and other.kind is Kind.COPY:
            return Known(Kind.NEXT)
    raise NotOfOneKindError(f"no rule for a sum of {x} and {y}")


def _sum_so_far(pair: EquationPair) -> Known:
    """The sum of a carry and what a trip adds to it, in a loop over rows or chunks."""
    x, y = pair.ins
    one, other = (x, y) if x.kind is Kind.SO_FAR else (y, x)
    adds_sums = pair.scope.loop is None and pair.scope.in_chunks
    other = as_part(other) if adds_sums else other
    is_taken_off = pair.name == "sub" and one is y
    if other.kind is Kind.ZERO and not is_taken_off and isinstance(one.note, int):
        return one
    is_even = one.power in (None, other.power)
    addends = (Kind.PART,) if adds_sums else (Kind.ROW, Kind.COPY)
    adds = other.kind in addends and is_even and not is_taken_off
    adds &= isinstance(one.note, int)  # it is no extreme
    if not adds:
        raise NotOfOneKindError(f"no rule for a sum of {one} and {other}")
    if not adds_sums and pair.has_padding(other.zeros):
        raise NotOfOneKindError("padding counts in a sum over rows")
    return one._replace(power=other.power)


@rule(
    "mul",
    knows_identity=True,
    kinds=[Kind.SPREAD, Kind.STACKED],
    by_element=True,
)
def _product(pair: EquationPair) -> Known:
    """A multiple of a part is a part; rows times rows are rows."""
    x, y = pair.ins
    if pair.kinds & {Kind.SPREAD, Kind.STACKED}:
        return _multiple(pair)
    for one, other, operand in ((x, y, 1), (y, x, 0)):
        if one.kind in (Kind.NUMBERS, Kind.TOWER) and other.kind is Kind.COPY:
            if pair.constant(operand) == 1:
                return one
            if one.kind is Kind.TOWER and other.note == ROWS_OF_TOWER:
                return Known(Kind.FIRST_ROW)
    for one, operand in ((x, 1), (y, 0)):
        if pair.constant(operand) == 1 and one.kind in EACH:
            return one
    if found := guards.product_with_mean(pair):
        return found
    found = product_of(x, y)
    if all(isinstance(v.fact, Flag) for v in pair.ins):
        return guards.as_flag(pair, found)
    return found


def _multiple(pair: EquationPair) -> Known:
    """A multiple by one number for all elements."""
    x, y = pair.ins
    one, other, operand = (x, y, 1) if x.kind is not Kind.COPY else (y, x, 0)
    is_extreme = one.kind is Kind.STACKED and one.note in _ORDERED
    if other.kind is not Kind.COPY or pair.shape(operand) != () or is_extreme:
        raise NotOfOneKindError(f"no rule for {x} times {y}")
    return one.times_tower(one.power + other.power)


@rule(
    "div",
    knows_identity=True,
    kinds=[Kind.SPREAD, Kind.STACKED],
    by_element=True,
)
def _quotient(pair: EquationPair) -> Known:
    """A quotient, like a product; integer division is not linear."""
    x, y = pair.ins
    if jnp.issubdtype(pair.dtype(0), jnp.integer):
        return function_of(pair.ins, "an integer division")
    if y.kind is Kind.ZERO:
        raise NotOfOneKindError("a value is divided by 0")
    if found := guards.quotient_of_parts(pair):
        return found
    is_part = x.kind in (Kind.PART, Kind.SPREAD, Kind.STACKED, Kind.MEAN)
    if is_part:
        is_extreme = x.kind is Kind.STACKED and x.note in _ORDERED
        is_one = x.kind in (Kind.PART, Kind.MEAN) or pair.shape(1) == ()
        if y.kind is not Kind.COPY or is_extreme or not is_one:
            raise NotOfOneKindError(f"no rule for {x} divided by {y}")
        if x.kind is Kind.MEAN:
            return guards.multiple_of_mean(x, -y.power)
        return x.times_tower(x.power - y.power)._replace(zeros=x.zeros)
    if not pair.kinds <= EACH:
        raise NotOfOneKindError(f"no rule for {x} divided by {y}")
    return product_of(x, y.times_tower(-y.power), "divided by")


_EXPONENTS = {
    "square": Fraction(2),
    "sqrt": Fraction(1, 2),
    "rsqrt": -Fraction(1, 2),
    "cbrt": Fraction(1, 3),
    "abs": Fraction(1),
}


@rule("integer_pow square sqrt rsqrt cbrt abs", by_element=True)
def _power(pair: EquationPair) -> Known:
    """(T^p x)^y is T^(p y) x^y, because powers of T are positive."""
    [x] = pair.ins
    exponent = _EXPONENTS.get(pair.name)
    exponent = Fraction(pair.params["y"]) if exponent is None else exponent
    if exponent == 1 and pair.name == "integer_pow":
        return x
    if x.kind is Kind.ZERO:
        return ZERO if exponent > 0 else copy()
    if x.kind not in EACH:
        raise NotOfOneKindError(f"no rule for {pair.name} of {x}")
    return x.times_tower(x.power * exponent)


@rule("complex")
def _of_two_parts(pair: EquationPair) -> Known:
    """A complex number, which is linear in both parts."""
    if not pair.kinds <= LINEAR:
        raise NotOfOneKindError(f"no rule for a complex number of {pair.ins[0]}")
    return joined(pair.ins, "together with")


@rule(
    """exp log tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh logistic erf
    erfc erf_inv log1p expm1 floor ceil round sign is_finite exp2 atan2 rem nextafter
    xor shift_left shift_right_logical shift_right_arithmetic pow population_count clz
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad
    one_minus_square log2 mulhi eq_to lt_to le_to
    regularized_incomplete_beta bessel_i0e bessel_i1e bitcast_convert_type""",
    by_element=True,
)
def _function(pair: EquationPair) -> Known:
    """Each element is a function of one element of each operand."""
    if pair.name == "bitcast_convert_type":
        sizes = {np.dtype(pair.dtype(0)).itemsize}
        sizes.add(np.dtype(pair.params["new_dtype"]).itemsize)
        if len(sizes) > 1 and pair.rows_in[0] is not None:
            raise NotOfOneKindError("bits of rows are joined or split")
    return function_of(pair.ins, pair.name)
