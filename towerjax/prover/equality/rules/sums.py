"""Rules for equations that add up, multiply or compare along dims."""

import dataclasses
from typing import Any

import numpy as np
from jax import lax

from towerjax.jaxprs.params import sub_jaxprs
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    ELEMENTS,
    HIGHEST,
    LINEAR,
    LOWEST,
    NO_ZEROS,
    SAME_FOR_ALL,
    Copy,
    Count,
    Flag,
    Groups,
    InfinitePadding,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    Part,
    RowNumbers,
    RowOrder,
    TowerRows,
    Unknown,
    Zero,
    as_copy,
    blocks_of,
    copy,
    function_of,
    joined,
    part,
    permuted,
    product_of,
)
from towerjax.prover.equality.kinds.reasons import Reason
from towerjax.prover.equality.kinds.stacked import RowsInTurn, Stacked
from towerjax.prover.equality.kinds.widths import holds_sums
from towerjax.prover.equality.kinds.zeros import is_over_none, zeros_of
from towerjax.prover.equality.rules import guards
from towerjax.prover.equality.rules.rules import refused, rule, rule_for

_REDUCTIONS = """reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod
reduce_xor argmax argmin"""
_EXTREMES: dict[str, Any] = {
    "reduce_max": Maximum,
    "reduce_or": Maximum,
    "reduce_min": Minimum,
    "reduce_and": Minimum,
}
_SCALING = ("reduce_sum", "reduce_max", "reduce_min")
# The result of these over no elements is a number other than 0, such as -inf or 1.
_OF_NONE = ("reduce_max", "reduce_min", "reduce_and", "reduce_prod")
# Minus infinity changes no maximum, and plus infinity changes no minimum.
_CHANGES_NONE = {"reduce_max": LOWEST, "reduce_min": HIGHEST}


def _dims_of(pair: EquationPair) -> set[int]:
    """Find the dims that a reduction removes, such as its ``axes``."""
    return {i % len(pair.shape(0)) for i in pair.params["axes"]}


@rule(_REDUCTIONS, ELEMENTS, knows_identity=True)
def _reduction(pair: EquationPair, x: Kind) -> Kind:
    """Reduce rows or a replicated value.

    Along dims without rows it is a function of each row, so rows stay rows. Over the
    dim of rows, a sum is a part, and an extreme is a maximum or minimum over towers.
    """
    name = pair.name
    axes = _dims_of(pair)
    is_over = pair.rows_in[0] in axes
    if is_over and _is_of_bits(pair):
        raise NotOfOneKindError(f"no rule for {name} of the bits of {x}")
    if is_over_none(pair) and name in _OF_NONE:
        return copy()
    # An argmax of zeros is an index, which need not be 0.
    x = as_copy(x)
    if is_over and isinstance(x, Copy):
        return _of_equal_rows(pair, x)
    if is_over:
        return _over_rows(pair, x, axes)
    if name in _SCALING:
        fact = x.fact if _is_infinite(x, name) else None
        return x.times_tower(x.power).replace(fact=fact)
    if name.startswith("arg"):
        return x.times_tower(0).replace(zeros=NO_ZEROS)
    return function_of([x], name)


@rule("reduce_sum", Part)
def _sum_of_part(pair: EquationPair, x: Part) -> Kind:
    """``sum_j sum_t x_tj = sum_t sum_j x_tj``: a part stays a part."""
    return part(x.power)


@rule("reduce_max reduce_or", Maximum)
@rule("reduce_min reduce_and", Minimum)
def _extreme_of_extreme(pair: EquationPair, x: Maximum | Minimum) -> Kind:
    """``max_j max_t x_tj = max_t max_j x_tj``, and so for minima."""
    if is_over_none(pair) and pair.name in _OF_NONE:
        return copy()
    if _is_of_bits(pair):
        raise refused(pair)
    return x.times_tower(x.power)


# Equinox's reductions over all dims, those that `vmap` maps, too.
_UNMAPPED = {
    "unvmap_any": lax.reduce_or_p,
    "unvmap_all": lax.reduce_and_p,
    "unvmap_max": lax.reduce_max_p,
}


@rule(" ".join(_UNMAPPED), ELEMENTS | Maximum | Minimum)
def _over_all_dims(pair: EquationPair, x: Kind) -> Any:
    """``any(x)`` over all dims is that over rows: a maximum over towers."""
    params = {"axes": tuple(range(len(pair.shape(0))))}
    changes = {"primitive": _UNMAPPED[pair.name], "params": params}
    first, second = [eqn.replace(**changes) for eqn in (pair.first, pair.second)]
    asked = rule_for(dataclasses.replace(pair, first=first, second=second))
    if asked is None:
        raise refused(pair)
    registered, reduced = asked
    return registered.ask(reduced)


def _is_of_bits(pair: EquationPair) -> bool:
    """Return whether a reduction is `or` or `and` of integers' bits.

    Of bools these are a maximum and a minimum; of the bits of integers they are
    neither.
    """
    return pair.name in ("reduce_or", "reduce_and") and pair.dtype(0).kind != "b"


def _of_equal_rows(pair: EquationPair, x: Copy) -> Kind:
    """``T^p c * B / T = T^(p-1) B c``: add the same value for each of B / T rows.

    An extreme of equal rows is the value itself. The product of equal rows is refused,
    and so is their sum if rows may be padding.
    """
    if pair.name in ("reduce_max", "reduce_min"):
        return copy(x.power)
    if pair.name in ("reduce_or", "reduce_and"):
        return function_of([x], pair.name)
    if pair.name != "reduce_sum" or pair.sizes.padded:
        raise NotOfOneKindError(f"{pair.name} of equal rows depends on their number")
    return copy(x.power - 1)


def _over_rows(pair: EquationPair, x: Kind, axes: set[int]) -> Kind:
    """Reduce over rows: a sum is a part, an extreme one over towers.

    Padding must not change the result. The maximum of a tower without rows is minus
    infinity, which changes no maximum over towers.
    """
    name = pair.name
    is_all = len(axes) == len(pair.shape(0))
    has_padding = pair.has_padding(x.zeros)
    if name == "reduce_sum":
        if has_padding:
            raise NotOfOneKindError("padding counts in a sum over rows")
        if isinstance(x.fact, Flag) and is_all and holds_sums(pair.dtype(0)):
            return part(x.power).replace(fact=Count(x.fact.flag))
        return part(x.power)
    kind = _EXTREMES.get(name)
    if kind is None:
        raise NotOfOneKindError(f"no rule for {name} over {{its}} rows")
    if name == "reduce_or" and not has_padding:
        if isinstance(x.fact, Flag) and is_all:
            return guards.has_any(x.fact.flag, True)
        return kind(x.power)
    if pair.sizes.padded and not _is_infinite(x, name):
        raise NotOfOneKindError(f"padding counts in {name} over rows")
    return kind(x.power)


def _is_infinite(x: Kind, name: str) -> bool:
    """Return whether padding rows hold the infinity that changes no such extreme."""
    return isinstance(x.fact, InfinitePadding) and x.fact == _CHANGES_NONE.get(name)


@rule("reduce_sum", Groups, knows_identity=True)
def _over_groups(pair: EquationPair, x: Groups) -> Kind:
    """Add over some dims of rows that lie along several dims.

    A sum over all of these dims is a part. Otherwise the sum has groups along the dims
    that are left.
    """
    axes = _dims_of(pair)
    dims = x.layout.dims
    left = [i for i in dims if i not in axes]
    is_over = len(left) < len(dims)
    if is_over and pair.has_padding(x.zeros):
        raise NotOfOneKindError("padding counts in a sum over rows")
    if not left:
        return part(x.power)
    moved = tuple(i - sum(j < i for j in axes) for i in left)
    by_row = x.layout.by_row and not is_over
    return x.replace(layout=x.layout._replace(dims=moved, by_row=by_row), fact=None)


@rule("reduce_sum reduce_max reduce_min", Stacked, knows_identity=True)
def _over_stacked(pair: EquationPair, x: Stacked) -> Kind:
    """Reduce all towers' values over the dim of towers, as a collective does."""
    axes = _dims_of(pair)
    if pair.towers_in[0] not in axes:
        raise refused(pair)
    is_sum = pair.name == "reduce_sum"
    if x.of is Copy:
        return copy(x.power + is_sum)
    if x.of is (Part if is_sum else _EXTREMES[pair.name]):
        return copy(x.power)
    is_whole = isinstance(x.of, RowsInTurn) or x.of is TowerRows
    is_whole &= pair.rows_in[0] in axes
    if is_whole and not pair.sizes.padded:
        return copy(x.power)
    raise refused(pair)


@rule("reduce", every=ELEMENTS, copies_as_rows=True)
def _reduction_by_a_function(pair: EquationPair, *ins: Kind) -> Kind:
    """Reduce by a user's function, along dims without rows.

    It is a function of each row, so rows stay rows.
    """
    over = set(pair.params["dimensions"])
    if any(i in over for i in pair.rows_in if i is not None):
        raise NotOfOneKindError(
            "no rule for a reduction of {its} rows by a function of the user's"
        )
    _refuse_other_function(pair)
    return function_of(ins, "a reduction by a function")


def _refuse_other_function(pair: EquationPair) -> None:
    """Raise unless the function of a `lax.reduce` is the same in both programs."""
    first, second = [sub_jaxprs(eqn)[0] for eqn in (pair.first, pair.second)]
    copies = [copy()] * (len(first.constvars) + len(first.invars))
    for result in pair.inside((first, second), copies):
        if not isinstance(result, SAME_FOR_ALL) or result.power:
            raise NotOfOneKindError(
                f"no rule for a reduction by a function that gives {result}"
            )


@rule("cumsum cumprod cummax cummin cumlogsumexp", ELEMENTS, copies_as_rows=True)
def _cumulative(pair: EquationPair, x: Kind) -> Kind:
    """Accumulate a sum, product or extreme along a dim without rows.

    It is a function of each row, so rows stay rows.
    """
    if pair.params["axis"] == pair.rows_in[0]:
        why = f"no rule for {pair.name} along {{its}} rows"
        raise NotOfOneKindError(why, Reason.ROWS_MEET_ROWS)
    if pair.name in ("cumsum", "cummax", "cummin"):
        return x
    return function_of([x], pair.name)


@rule("cumsum", Part)
def _cumulative_part(pair: EquationPair, x: Part) -> Kind:
    """Accumulate a sum of a part: a part, because that is linear."""
    return x


@rule("sort", every=ELEMENTS | Groups | RowNumbers | Unknown, copies_as_rows=True)
def _sorted(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Sort within each row, or sort the rows.

    Along a dim without rows, a sort moves elements within a row, and the kinds stay.
    Along the dim of rows, it puts the rows in another order.
    """
    if pair.params["dimension"] in pair.rows_in:
        return _in_another_order(pair)
    if unknown := [x for x in ins if isinstance(x, Unknown)]:
        return [unknown[0]] * len(ins)
    if not pair.are(ELEMENTS):
        raise refused(pair)
    order = joined([_places_in(as_copy(x)) for x in ins])
    return [order.times_tower(x.power) for x in ins]


def _in_another_order(pair: EquationPair) -> list[Kind]:
    """Sort one-dimensional arrays of rows together.

    All get the same order, which has each row exactly once.
    """
    # A sort of a matrix puts the rows of each column in another order, so that a row's
    # elements do not stay together.
    if len(pair.shape(0)) != 1:
        raise NotOfOneKindError("{its} rows are sorted")
    order = pair.walk.new_identity()
    return [_ordered(pair, i, x, order) for i, x in enumerate(pair.ins)]


def _ordered(pair: EquationPair, operand: int, x: Kind, order: Any) -> Kind:
    """Put one of several arrays of rows, sorted together, in their order.

    ``operand`` is its index, and ``order`` identifies the order of all of them.
    """
    if isinstance(x, Zero | Unknown):
        return x
    if isinstance(x, TowerRows) and x.blocks == 1:
        return permuted(x, 0, (order, None))
    if isinstance(x, Groups) and x.layout.by_row and x.layout.dims == (0,):
        return permuted(x, 0, (order, x.layout.order))
    if isinstance(x, RowNumbers) and pair.times_rows(operand, 0) == 1:
        return RowOrder(order=(order, None))
    return pair.unknown(f"no rule for a sort of {x}")


def _places_in(value: Kind) -> Kind:
    """``argmax(T^p x) = argmax(x)``: the indices have power 0.

    A factor T^p is positive, and moves no maximum. This holds for `top_k`, too.
    """
    return value.times_tower(0)


@rule("top_k", ELEMENTS, copies_as_rows=True)
def _best(pair: EquationPair, x: Kind) -> list[Kind]:
    """Take the largest elements along a dim without rows, and their indices.

    Both are functions of each row, so rows stay rows.
    """
    along = pair.params.get("axis", len(pair.shape(0)) - 1) % len(pair.shape(0))
    if along == pair.rows_in[0]:
        raise NotOfOneKindError("no rule for the largest of {its} rows")
    x = as_copy(x)
    return [x.times_tower(x.power), _places_in(x)]


@rule("dot_general", ELEMENTS, ELEMENTS)
def _matrix_product(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """``(T^p x) @ (T^q y) = T^(p+q) x @ y``, for rows and replicated values.

    A product that sums over the rows of both is a part.
    """
    (x_sums, _), _ = pair.params["dimension_numbers"]
    # If the sum is not over rows, no row is multiplied by another: the result of that
    # would have two dims of rows, which is refused before.
    if pair.rows_in[0] is None or pair.rows_in[0] not in x_sums:
        return product_of(x, y)
    if not pair.are(Copy | TowerRows):
        raise refused(pair)
    if pair.out_dtype(0).kind == "b":
        raise NotOfOneKindError("no rule for a product of bools over {its} rows")
    both = product_of(x, y)
    if isinstance(both, TowerRows):
        if pair.has_padding(zeros_of(pair, 0)):
            raise NotOfOneKindError("padding counts in a sum over rows")
        return part(both.power)
    if pair.sizes.padded:
        raise NotOfOneKindError("a sum of equal rows depends on their number")
    return copy(both.power - 1)


@rule("dot_general", Part, SAME_FOR_ALL, commutes=True)
def _product_with_part(pair: EquationPair, x: Part, y: Kind) -> Kind:
    """``(sum_t x_t) @ c = sum_t (x_t @ c)``: a part stays a part.

    The product is linear in the part.
    """
    return product_of(x, y)


@rule("conv_general_dilated", ELEMENTS, ELEMENTS, copies_as_rows=True)
def _convolution(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Convolve images: rows if each row is an image, else a part.

    It is a part if the convolution sums over rows, as in the gradient of a kernel.
    """
    params = pair.params
    dims = params["dimension_numbers"]
    x_rows, y_rows = pair.rows_in
    if x_rows is None and y_rows is None:
        return product_of(x, y)
    is_of_images = y_rows is None and x_rows == dims.lhs_spec[0]
    is_of_images &= params["batch_group_count"] == 1
    if is_of_images and pair.rows_out[0] == dims.out_spec[0]:
        return product_of(x, y)
    # In the gradient of a kernel, the dims of rows stand where channels stand, and the
    # convolution sums over them.
    are_summed = x_rows == dims.lhs_spec[1] and y_rows == dims.rhs_spec[1]
    if are_summed and params["feature_group_count"] == 1:
        if pair.are(TowerRows) and not pair.has_padding(zeros_of(pair, 0)):
            return part(product_of(x, y).power)
    raise NotOfOneKindError("no rule for a convolution along {its} rows")


@rule("conv_general_dilated", Part, SAME_FOR_ALL, commutes=True)
def _convolution_with_part(pair: EquationPair, x: Part, y: Kind) -> Kind:
    """``conv(sum_t x_t, c) = sum_t conv(x_t, c)``: a part stays a part.

    A convolution is linear in each operand.
    """
    if pair.rows_in[1] is not None:
        raise NotOfOneKindError("no rule for a convolution along {its} rows")
    return product_of(x, y)


_WINDOW = {
    "window_dimensions": 1,
    "window_strides": 1,
    "window_dilation": 1,
    "base_dilation": 1,
    "padding": (0, 0),
}


@rule(
    """reduce_window reduce_window_sum reduce_window_max reduce_window_min
    select_and_scatter_add select_and_gather_add""",
    every=LINEAR,
    copies_as_rows=True,
)
def _window(pair: EquationPair, *ins: Kind) -> Kind:
    """Reduce windows along dims without rows, as pooling does.

    It is a function of each row, so rows stay rows.
    """
    _refuse_windows_of_rows(pair)
    x = ins[0]
    if pair.name == "reduce_window_sum":
        return x
    if pair.name in ("reduce_window_max", "reduce_window_min"):
        if isinstance(x, ELEMENTS):
            return x
    if pair.name == "select_and_scatter_add" and pair.are(ELEMENTS):
        return product_of(x, _places_in(as_copy(ins[1])))
    if pair.name == "reduce_window":
        _refuse_other_function(pair)
    return function_of(ins, pair.name)


def _refuse_windows_of_rows(pair: EquationPair) -> None:
    """Raise if a window covers several rows, or moves along them."""
    for axis in {*pair.rows_in, *pair.rows_out} - {None}:
        for key, alone in _WINDOW.items():
            sizes = pair.params.get(key)
            if sizes is not None and sizes[axis] not in (alone, [*np.ravel(alone)]):
                raise NotOfOneKindError("no rule for a window along {its} rows")
    rank = len(pair.out_shape())
    arrays = [i for i in range(len(pair.ins)) if len(pair.shape(i)) == rank > 0]
    if any(pair.rows_in[i] != pair.rows_out[0] for i in arrays):
        raise NotOfOneKindError("no rule for a window over {its} rows")


@rule("fft", LINEAR, copies_as_rows=True)
def _transformed(pair: EquationPair, x: Kind) -> Kind:
    """``fft(T^p x) = T^p fft(x)``, along dims without rows.

    The transform is a linear function of each row.
    """
    rank = len(pair.shape(0))
    last = range(rank - len(pair.params["fft_lengths"]), rank)
    if pair.rows_in[0] in last or pair.rows_in[0] != pair.rows_out[0]:
        raise NotOfOneKindError("no rule for an fft along {its} rows")
    return x


@rule(
    "cholesky eigh lu qr geqrf householder_product svd schur eig tridiagonal_solve",
    every=ELEMENTS,
    copies_as_rows=True,
)
def _of_matrices(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Apply a function such as `qr` to each matrix in the last two dims.

    Rows stay rows unless one of these two dims has the rows.
    """
    for i, axis in enumerate(pair.rows_in):
        if axis is not None and (axis != 0 or len(pair.shape(i)) < 3):
            raise NotOfOneKindError(f"no rule for {pair.name} of {{its}} rows")
    result = function_of(ins, pair.name)
    is_first = all(axis in (None, 0) for axis in pair.rows_out)
    if blocks_of(result) > 1 or not is_first:
        raise NotOfOneKindError(f"no rule for {pair.name} of {{its}} rows")
    return [result] * len(pair.rows_out)


@rule("triangular_solve", ELEMENTS, LINEAR, copies_as_rows=True)
def _solution(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Solve a triangular system A x = b for x.

    If A is replicated, x is linear in b and has the kind of b. Otherwise x is a
    function of each row.
    """
    rank = len(pair.shape(0))
    solved = rank - 2 if pair.params["left_side"] else rank - 1
    is_linear = isinstance(x, Copy) and not x.power and pair.rows_in[0] is None
    if is_linear and pair.rows_in[1] != solved:
        return y
    if any(axis is not None and axis >= rank - 2 for axis in pair.rows_in):
        raise NotOfOneKindError("no rule for a linear solve along {its} rows")
    return function_of([x, y], "a solution")
