"""Rules for equations whose elements are computed from single elements."""

from fractions import Fraction
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from towerjax.prover.equality.kinds.equation_pair import EquationPair, constant_of
from towerjax.prover.equality.kinds.kinds import (
    ELEMENTS,
    EXTREME,
    LINEAR,
    SAME_FOR_ALL,
    ZERO,
    Columns,
    Copy,
    FirstRow,
    Flag,
    FromFirstRow,
    Groups,
    InfinitePadding,
    Kind,
    Mean,
    NotOfOneKindError,
    NumberInBatch,
    Part,
    Row,
    RowNumbers,
    RowOrder,
    Size,
    SoFar,
    TowerId,
    Valid,
    Zero,
    as_part,
    copy,
    function_of,
    joined,
    product_of,
    rows,
)
from towerjax.prover.equality.kinds.stacked import Stacked, Starts
from towerjax.prover.equality.rules import guards
from towerjax.prover.equality.rules.rules import (
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
    """Pass values on unchanged: result i has the kind of operand i."""
    return [*ins]


@rule("stop_gradient", OF_ONE_TOWER | Stacked, knows_identity=True)
def _without_derivative(pair: EquationPair, x: Kind) -> Kind:
    """Pass a value on, and stop its derivative; the kind stays.

    The result has an identity of its own, because its derivative is another.
    """
    return x.replace(fact=None)


@rule("reduce_precision", OF_ONE_TOWER, knows_identity=True)
def _rounded(pair: EquationPair, x: Kind) -> Kind:
    """Round a value; the kind stays.

    The proof ignores rounding, which also keeps the order of values.
    """
    return x


@rule("neg", LINEAR | Groups, knows_identity=True)
def _negative(pair: EquationPair, x: Kind) -> Kind:
    """``-(T^p x) = T^p (-x)``: the kind stays."""
    return x.times_tower(x.power)


@rule("neg", Stacked, knows_identity=True)
def _negative_of_all(pair: EquationPair, x: Stacked) -> Kind:
    """``-(x_1, ..., x_T) = (-x_1, ..., -x_T)``: negate all towers' values.

    Others are refused: the negative of a maximum is a minimum, and that of an index is
    no index.
    """
    if not x.is_linear:
        raise refused(pair)
    return x.times_tower(x.power)


@rule("real imag conj", LINEAR)
def _linear_of_complex(pair: EquationPair, x: Kind) -> Kind:
    """``re(T^p z) = T^p re(z)``, and so for ``imag`` and ``conj``.

    Each is a linear function over the real numbers.
    """
    return x


@rule("complex", LINEAR, LINEAR)
def _of_two_parts(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """``T^p x + i T^p y = T^p (x + i y)``; refuse other powers.

    A complex number is linear in both of its parts, so they must fit like two addends.
    """
    return joined([x, y], "together with")


@rule("squeeze expand_dims", OF_ONE_TOWER, knows_identity=True)
def _laid_otherwise(pair: EquationPair, x: Kind) -> Kind:
    """Add or drop dims of size 1; the kind stays."""
    return x


@rule("transpose", OF_ONE_TOWER | Stacked, knows_identity=True)
def _transposed(pair: EquationPair, x: Kind) -> Kind:
    """Transpose a value; the kind stays.

    Which dim has the rows is read from the shapes.
    """
    return x


@rule("transpose", Groups, knows_identity=True)
def _transposed_groups(pair: EquationPair, x: Groups) -> Kind:
    """Transpose groups of rows, and renumber the dims of the rows."""
    new = pair.params["permutation"].index
    dims = tuple(new(i) for i in x.layout.dims)
    return x.replace(layout=x.layout._replace(dims=dims))


@rule("convert_element_type", OF_ONE_TOWER | SPECIAL, knows_identity=True)
def _converted(pair: EquationPair, x: Kind) -> Kind:
    """Cast to another dtype; the kind stays if that holds the old numbers.

    Rounding is ignored. Any other conversion is a function of each element.
    """
    old = np.dtype(pair.dtype(0))
    new = np.dtype(pair.params["new_dtype"])
    # Some floats of 8 bits have no infinity, so the padding may become any number.
    if isinstance(x.fact, InfinitePadding) and new.itemsize < 2:
        x = x.replace(fact=None)
    if isinstance(x, Zero) or _holds_numbers(old, new):
        return x
    if new.kind in "iu":
        if old.kind in "iu" and isinstance(x, _WHOLE_NUMBERS):
            return x
        if pair.sizes.is_rows_of_tower(x):
            return x
    converted = function_of([x], f"a conversion to {new.name}")
    # Integers and bools hold 0 and 1 exactly, so the result is the same flag.
    if isinstance(x.fact, Flag) and (new.kind in "biu" or old.kind in "biu"):
        return converted.replace(zeros=x.zeros, fact=x.fact)
    return converted


def _holds_numbers(old: Any, new: Any) -> bool:
    """Return whether the dtype ``new`` holds all numbers of ``old``, up to rounding."""
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
    """``T^p x + T^p y = T^p (x + y)``; refuse other powers.

    A replicated ``T^p y`` may be added to a part ``T^(p+1) x``, because it adds up to
    ``T^(p+1) y`` over T towers.
    """
    return joined([x, y])


@rule("add sub add_any", Groups, Groups, knows_identity=True)
def _sum_of_groups(pair: EquationPair, x: Groups, y: Groups) -> Kind:
    """``T^p x + T^p y = T^p (x + y)``, for rows along the same several dims."""
    if (x.power, x.layout) != (y.power, y.layout):
        raise refused(pair)
    return x.times_tower(x.power)


@rule("add add_any", RowNumbers, FirstRow, knows_identity=True, commutes=True)
def _numbers_in_batch(pair: EquationPair, x: RowNumbers, y: FirstRow) -> Kind:
    """A row's index in its tower + the tower's first row = its index in the batch."""
    is_each = pair.times_rows(0, pair.rows_in[0]) == 1
    if not (is_each and pair.has_rows_in_order):
        raise NotOfOneKindError("no rule for a sum with a {one}'s first row number")
    is_vector = len(pair.shape(0)) == 1
    return rows().replace(fact=NumberInBatch() if is_vector else None)


@rule("sub", SAME_FOR_ALL, FirstRow, knows_identity=True)
def _from_first_row(pair: EquationPair, x: Kind, y: FirstRow) -> Kind:
    """``c - f_t``, for the index f_t of the tower's first row in the batch.

    It may be below 0, so an unsigned integer cannot hold it.
    """
    if x.power or jnp.issubdtype(pair.dtype(0), jnp.unsignedinteger):
        raise refused(pair)
    return FromFirstRow()


@rule("sub", NUMBER | Stacked, Zero, knows_identity=True)
@rule("add add_any", NUMBER | Stacked, Zero, knows_identity=True, commutes=True)
def _number_and_zero(pair: EquationPair, x: Kind, y: Zero) -> Kind:
    """``i + 0 = i``, for the index i of a tower or row, or for all towers' values."""
    return x


@rule("sub", SoFar, LINEAR, knows_identity=True)
@rule("add add_any", SoFar, LINEAR, knows_identity=True, commutes=True)
def _sum_so_far(pair: EquationPair, x: SoFar, y: Kind) -> Kind:
    """Add a value to a loop's carry, which stays a sum over rows.

    In a loop over rows the value must be one row's, in a loop over chunks a part.
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
    """``T^p x * T^q y = T^(p+q) x y``, for rows and replicated values.

    The product is rows if one factor is. The product of two flags is a flag.
    """
    if constant_of(x) == 1:
        return y
    if constant_of(y) == 1:
        return x
    return guards.flag_of(pair, product_of(x, y))


@rule("mul", Part, SAME_FOR_ALL, knows_identity=True, commutes=True)
def _multiple_of_part(pair: EquationPair, x: Part, y: Kind) -> Kind:
    """``sum_t (T^p x_t * T^q c) = T^(p+q) c sum_t x_t``: a part stays a part.

    The product is linear in the part.
    """
    return product_of(x, y)


@rule("mul", RowNumbers | TowerId, Copy, knows_identity=True, commutes=True)
def _number_of_tower(pair: EquationPair, x: Kind, y: Copy) -> Kind:
    """A tower's index * its number of rows = its first row's index in the batch.

    An index times 1 is the index itself.
    """
    if y.number == 1:
        return x
    if isinstance(x, TowerId) and pair.sizes.is_rows_of_tower(y):
        return FirstRow()
    raise refused(pair)


@rule("mul", Groups | Stacked, Copy, knows_identity=True, commutes=True)
def _multiple_of_all(pair: EquationPair, x: Groups | Stacked, y: Copy) -> Kind:
    """``T^q c (T^p x_1, ..., T^p x_T)``: scale groups, or all towers' values.

    The kind stays. All other values are refused: a negative number would exchange
    maxima and minima, and a multiple of an index is another number.
    """
    numbers = pair.sizes.numbers_of(y)
    if isinstance(x, Stacked) and x.of is TowerId and numbers is not None:
        if not x.power and _is_whole(pair):
            return Stacked(of=Starts(numbers))
    if pair.shape(1) != () or not _is_linear(x):
        raise refused(pair)
    return x.times_tower(x.power + y.power)


@rule("div", ELEMENTS, ELEMENTS, knows_identity=True)
def _quotient(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """``T^p x / (T^q y) = T^(p-q) x / y``, for rows and replicated values.

    A division of integers is not linear, so it is treated as any function of each
    element.
    """
    if _is_whole(pair):
        return function_of([x, y], "an integer division")
    if isinstance(y, Zero):
        raise NotOfOneKindError("a value is divided by 0")
    return product_of(x, y.times_tower(-y.power), "divided by")


@rule("div", Part, Copy, knows_identity=True)
def _part_of_part(pair: EquationPair, x: Part, y: Copy) -> Kind:
    """``sum_t (T^p x_t / (T^q c)) = T^(p-q) (sum_t x_t) / c``: a part.

    The quotient is linear in the part.
    """
    if _is_whole(pair):
        raise refused(pair)
    return x.times_tower(x.power - y.power).replace(zeros=x.zeros)


@rule("div", Groups | Stacked, Copy, knows_identity=True)
def _part_of_all(pair: EquationPair, x: Groups | Stacked, y: Copy) -> Kind:
    """``(T^p x_1, ..., T^p x_T) / (T^q c)``: divide groups, or all towers' values.

    The kind stays.
    """
    if _is_whole(pair) or pair.shape(1) != () or not _is_linear(x):
        raise refused(pair)
    return x.times_tower(x.power - y.power).replace(zeros=x.zeros)


def _is_linear(x: Groups | Stacked) -> bool:
    """Return whether a kind stays if its values are multiplied by one number."""
    return isinstance(x, Groups) or x.is_linear


def _is_whole(pair: EquationPair) -> bool:
    """Return whether a division is of integers, which rounds and so is not linear."""
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
    """``(T^p x)^y = T^(p y) x^y``, for powers and roots.

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
    """``x^1 = x``; refuse other exponents."""
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
    """``f(x, y, ...)``, element by element: rows, or a replicated value.

    The operands must be rows or replicated, with power 0 of T.
    """
    return function_of(ins, pair.name)


@rule("bitcast_convert_type", ELEMENTS)
def _bits_of(pair: EquationPair, x: Kind) -> Kind:
    """Read the bits of each element, a function of that element."""
    sizes = {np.dtype(pair.dtype(0)).itemsize}
    sizes.add(np.dtype(pair.params["new_dtype"]).itemsize)
    if len(sizes) > 1 and pair.rows_in[0] is not None:
        raise NotOfOneKindError("no rule for a bitcast that joins or splits {its} rows")
    return function_of([x], pair.name)
