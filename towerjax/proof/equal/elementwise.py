"""Rules for equations whose elements are computed from single elements."""

from fractions import Fraction
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from towerjax.proof.equal import guards
from towerjax.proof.equal.equation_pair import EquationPair, constant_of
from towerjax.proof.equal.kinds import (
    ELEMENTS,
    EXTREME,
    LINEAR,
    SAME_FOR_ALL,
    ZERO,
    Columns,
    Copy,
    Counter,
    FirstRow,
    Flag,
    Groups,
    InfinitePadding,
    Kind,
    Maximum,
    Mean,
    Minimum,
    NextRow,
    NotOfOneKindError,
    NumberInBatch,
    Part,
    Row,
    RowNumbers,
    RowOrder,
    Size,
    SoFar,
    Stacked,
    TowerId,
    Valid,
    Zero,
    as_part,
    copy,
    function_of,
    is_rows_of_tower,
    joined,
    product_of,
    rows,
)
from towerjax.proof.equal.rules import (
    NUMBER,
    OF_ONE_TOWER,
    OF_TOWER,
    SPECIAL,
    refused,
    rule,
)

_WHOLE_NUMBERS: TypeAlias = NUMBER | Valid | Size | Columns | RowOrder
_NO_ELEMENTS: TypeAlias = Part | EXTREME | Mean | OF_TOWER


@rule(
    """copy copy_p name sharding_constraint optimization_barrier pvary pcast reshard
    device_put layout_constraint random_clone preduced""",
    every=OF_ONE_TOWER | SPECIAL,
    knows_identity=True,
)
def _as_it_is(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Answer an identity: result i has the kind of operand i."""
    return [*ins]


@rule("stop_gradient", OF_ONE_TOWER | Stacked, knows_identity=True)
def _without_derivative(pair: EquationPair, x: Kind) -> Kind:
    """Answer a value whose derivative is stopped: the kind stays.

    It is another value of the program, because its derivative is another.
    """
    return x.replace(fact=None)


@rule("reduce_precision", OF_ONE_TOWER, knows_identity=True)
def _rounded(pair: EquationPair, x: Kind) -> Kind:
    """Answer a rounded value: the kind stays.

    Rounding is ignored, and it does not change which value is larger.
    """
    return x


@rule("neg", LINEAR | Groups, knows_identity=True)
def _negative(pair: EquationPair, x: Kind) -> Kind:
    """Answer the negative of a value: the kind stays, because -x is linear."""
    return x.times_tower(x.power)


@rule("neg", Stacked, knows_identity=True)
def _negative_of_all(pair: EquationPair, x: Stacked) -> Kind:
    """Answer the negatives of all towers' values, except of maxima and minima.

    The negative of a maximum would be a minimum.
    """
    if x.of in (Maximum, Minimum):
        raise refused(pair)
    return x.times_tower(x.power)


@rule("real imag conj", LINEAR)
def _linear_of_complex(pair: EquationPair, x: Kind) -> Kind:
    """Answer a real part, imaginary part or conjugate: the kind stays.

    Each is a linear function over the real numbers.
    """
    return x


@rule("complex", LINEAR, LINEAR)
def _of_two_parts(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Answer a complex number, which is linear in its real and its imaginary part."""
    return joined([x, y], "together with")


@rule("squeeze expand_dims", OF_ONE_TOWER, knows_identity=True)
def _laid_otherwise(pair: EquationPair, x: Kind) -> Kind:
    """Answer a value that gets or loses dims of one element: the kind stays."""
    return x


@rule("transpose", OF_ONE_TOWER | Stacked, knows_identity=True)
def _transposed(pair: EquationPair, x: Kind) -> Kind:
    """Answer a transposed value: the kind stays, as the shapes show the dim of rows."""
    return x


@rule("transpose", Groups, knows_identity=True)
def _transposed_groups(pair: EquationPair, x: Groups) -> Kind:
    """Answer transposed groups of rows, whose dims get other numbers."""
    new = pair.params["permutation"].index
    dims = tuple(new(i) for i in x.layout.dims)
    return x.replace(layout=x.layout._replace(dims=dims))


@rule("convert_element_type", OF_ONE_TOWER | SPECIAL, knows_identity=True)
def _converted(pair: EquationPair, x: Kind) -> Kind:
    """Answer a conversion to a dtype that holds the operand's numbers: the kind stays.

    Rounding is ignored. Any other conversion is a function of each element.
    """
    old = np.dtype(pair.dtype(0))
    new = np.dtype(pair.params["new_dtype"])
    # Floats of 8 bits may have no infinity.
    if isinstance(x.fact, InfinitePadding) and new.itemsize < 2:
        x = x.replace(fact=None)
    if isinstance(x, Zero) or _holds_numbers(old, new):
        return x
    if new.kind in "iu":
        if old.kind in "iu" and isinstance(x, _WHOLE_NUMBERS):
            return x
        if is_rows_of_tower(x):
            return x
    converted = function_of([x], f"a conversion to {new.name}")
    # A flag is 0 or 1 in each of these dtypes, so it stays the same flag.
    if isinstance(x.fact, Flag) and (new.kind in "biu" or old.kind in "biu"):
        return converted.replace(zeros=x.zeros, fact=x.fact)
    return converted


def _holds_numbers(old: Any, new: Any) -> bool:
    """Return whether a dtype holds another dtype's numbers, except for rounding."""
    if jnp.issubdtype(new, jnp.complexfloating):
        return True
    if jnp.issubdtype(new, jnp.inexact):
        return not jnp.issubdtype(old, jnp.complexfloating)
    if new.kind not in "iub":
        return False
    widens = old.kind == new.kind and new.itemsize >= old.itemsize
    return old.kind == "b" or (widens and new.kind in "iu")


@rule("add sub add_any", LINEAR, LINEAR, knows_identity=True)
def _sum_of_two(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Answer a sum or difference of two values of one kind and power: both stay.

    A replicated value of power p is also a part of power p + 1, because its sum over T
    towers is T times the value.
    """
    return joined([x, y])


@rule("add sub add_any", Groups, Groups, knows_identity=True)
def _sum_of_groups(pair: EquationPair, x: Groups, y: Groups) -> Kind:
    """Answer a sum or difference of two values that have the same groups of rows."""
    if (x.power, x.layout) != (y.power, y.layout):
        raise refused(pair)
    return x.times_tower(x.power)


@rule("add add_any", RowNumbers, FirstRow, knows_identity=True, commutes=True)
def _numbers_in_batch(pair: EquationPair, x: RowNumbers, y: FirstRow) -> Kind:
    """Answer the number of a row in its tower plus that of the tower's first row.

    The sum is the row's number in the batch. This needs equally many rows on all
    towers, and all of them at once.
    """
    is_even = not pair.sizes.padded and pair.sizes.parts == (1, 1)
    if pair.times_rows(0, pair.rows_in[0]) != 1 or not is_even:
        raise NotOfOneKindError("no rule for a sum with a {one}'s first row number")
    is_vector = len(pair.shape(0)) == 1
    return rows().replace(fact=NumberInBatch() if is_vector else None)


@rule("sub", NUMBER, Zero, knows_identity=True)
@rule("add add_any", NUMBER, Zero, knows_identity=True, commutes=True)
def _number_and_zero(pair: EquationPair, x: Kind, y: Zero) -> Kind:
    """Answer a tower's or row's number plus 0, which is that number."""
    if isinstance(x, NextRow):
        raise refused(pair)
    return x


@rule("add add_any", Counter, Copy, commutes=True)
def _next_number(pair: EquationPair, x: Counter, y: Copy) -> Kind:
    """Answer a row's number plus 1, in a loop over rows: the next row's number."""
    if y.number != 1:
        raise refused(pair)
    return NextRow()


@rule("sub", SoFar, LINEAR, knows_identity=True)
@rule("add add_any", SoFar, LINEAR, knows_identity=True, commutes=True)
def _sum_so_far(pair: EquationPair, x: SoFar, y: Kind) -> Kind:
    """Answer what a trip adds to a loop's carry: the carry stays a sum over rows.

    In a loop over rows a trip adds one row's value, in a loop over chunks a part.
    """
    adds_sums = pair.scope.loop is None and pair.scope.in_chunks
    addend = as_part(y) if adds_sums else y
    if x.extreme is None and isinstance(addend, Zero):
        return x
    fits = isinstance(addend, Part if adds_sums else Row | Copy)
    if x.extreme or not fits or x.power not in (None, addend.power):
        raise refused(pair)
    if not adds_sums and pair.has_padding(addend.zeros):
        raise NotOfOneKindError("padding counts in a sum over rows")
    return x.replace(power=addend.power)


@rule("mul", ELEMENTS, ELEMENTS, knows_identity=True)
def _product(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Answer a product of rows or replicated values: the powers of T add.

    The product of two flags is a flag.
    """
    if constant_of(x) == 1:
        return y
    if constant_of(y) == 1:
        return x
    return guards.flag_of(pair, product_of(x, y))


@rule("mul", Part, SAME_FOR_ALL, knows_identity=True, commutes=True)
def _multiple_of_part(pair: EquationPair, x: Part, y: Kind) -> Kind:
    """Answer a part times a replicated value, which is a part."""
    return product_of(x, y)


@rule("mul", RowNumbers | TowerId, Copy, knows_identity=True, commutes=True)
def _number_of_tower(pair: EquationPair, x: Kind, y: Copy) -> Kind:
    """Answer a tower's number times its number of rows.

    The product is the number of the tower's first row in the batch.
    """
    if y.number == 1:
        return x
    if isinstance(x, TowerId) and is_rows_of_tower(y):
        return FirstRow()
    raise refused(pair)


@rule("mul", Groups | Stacked, Copy, knows_identity=True, commutes=True)
def _multiple_of_all(pair: EquationPair, x: Groups | Stacked, y: Copy) -> Kind:
    """Answer groups of rows, or all towers' values, times one number.

    Maxima and minima are refused, because a negative number would exchange them.
    """
    is_extreme = isinstance(x, Stacked) and x.of in (Maximum, Minimum)
    if pair.shape(1) != () or is_extreme:
        raise refused(pair)
    return x.times_tower(x.power + y.power)


@rule("div", ELEMENTS, ELEMENTS, knows_identity=True)
def _quotient(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Answer a quotient of rows or replicated values: the powers of T are subtracted.

    An integer division is a function of each element, because it is not linear.
    """
    if _is_whole(pair):
        return function_of([x, y], "an integer division")
    if isinstance(y, Zero):
        raise NotOfOneKindError("a value is divided by 0")
    return product_of(x, y.times_tower(-y.power), "divided by")


@rule("div", Part, Copy, knows_identity=True)
def _part_of_part(pair: EquationPair, x: Part, y: Copy) -> Kind:
    """Answer a part divided by a replicated value: it stays a part."""
    if _is_whole(pair):
        raise refused(pair)
    return x.times_tower(x.power - y.power).replace(zeros=x.zeros)


@rule("div", Groups | Stacked, Copy, knows_identity=True)
def _part_of_all(pair: EquationPair, x: Groups | Stacked, y: Copy) -> Kind:
    """Answer groups of rows, or all towers' values, divided by one number."""
    is_extreme = isinstance(x, Stacked) and x.of in (Maximum, Minimum)
    if _is_whole(pair) or pair.shape(1) != () or is_extreme:
        raise refused(pair)
    return x.times_tower(x.power - y.power).replace(zeros=x.zeros)


def _is_whole(pair: EquationPair) -> bool:
    """Return whether a division is one of integers, which is not linear."""
    return bool(jnp.issubdtype(pair.dtype(0), jnp.integer))


_EXPONENTS = {
    "square": Fraction(2),
    "sqrt": Fraction(1, 2),
    "rsqrt": -Fraction(1, 2),
    "cbrt": Fraction(1, 3),
    "abs": Fraction(1),
}


@rule("integer_pow square sqrt rsqrt cbrt abs", ELEMENTS)
def _power(pair: EquationPair, x: Kind) -> Kind:
    """Answer a power or root of a value: (T^p x)^y is T^(p y) x^y.

    This holds for roots and `abs`, too, because powers of T are positive.
    """
    exponent = _EXPONENTS.get(pair.name)
    exponent = Fraction(pair.params["y"]) if exponent is None else exponent
    if exponent == 1 and pair.name == "integer_pow":
        return x
    if isinstance(x, Zero):
        return ZERO if exponent > 0 else copy()
    return x.times_tower(x.power * exponent)


@rule("integer_pow", _NO_ELEMENTS)
def _first_power(pair: EquationPair, x: Kind) -> Kind:
    """Answer the first power of a value, which is that value."""
    if pair.params["y"] != 1:
        raise refused(pair)
    return x


@rule(
    """exp log tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh logistic erf
    erfc erf_inv log1p expm1 floor ceil round sign is_finite exp2 atan2 rem nextafter
    xor shift_left shift_right_logical shift_right_arithmetic pow population_count clz
    lgamma digamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad
    one_minus_square log2 mulhi eq_to lt_to le_to
    regularized_incomplete_beta bessel_i0e bessel_i1e""",
    every=ELEMENTS,
)
def _function(pair: EquationPair, *ins: Kind) -> Kind:
    """Answer any function of the elements: it keeps rows and replicated values.

    The operands must have power 0 of T.
    """
    return function_of(ins, pair.name)


@rule("bitcast_convert_type", ELEMENTS)
def _bits_of(pair: EquationPair, x: Kind) -> Kind:
    """Answer the bits of each element, which are a function of that element."""
    sizes = {np.dtype(pair.dtype(0)).itemsize}
    sizes.add(np.dtype(pair.params["new_dtype"]).itemsize)
    if len(sizes) > 1 and pair.rows_in[0] is not None:
        raise NotOfOneKindError("no rule for a bitcast that joins or splits {its} rows")
    return function_of([x], pair.name)
