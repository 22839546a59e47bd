"""Rules for equations that add up, multiply or compare along dims."""

from typing import Any

import numpy as np

from towerjax.jaxprs.params import sub_jaxprs
from towerjax.proof.equal import guards
from towerjax.proof.equal.equation_pair import EquationPair, rule
from towerjax.proof.equal.kinds import (
    EACH,
    HIGHEST,
    LINEAR,
    LOWEST,
    NO_ZEROS,
    Count,
    Flag,
    InfinitePadding,
    Kind,
    Known,
    NotOfOneKindError,
    as_copy,
    copy,
    function_of,
    joined,
    part,
    permuted,
    product_of,
)
from towerjax.proof.equal.nouns import nouns
from towerjax.proof.equal.widths import holds_sums
from towerjax.proof.equal.zeros import is_over_none, zeros_of

_EXTREMES = {
    "reduce_max": Kind.MAXIMUM,
    "reduce_or": Kind.MAXIMUM,
    "reduce_min": Kind.MINIMUM,
    "reduce_and": Kind.MINIMUM,
}
_SCALING = ("reduce_sum", "reduce_max", "reduce_min")
# Those that are a number other than 0 if there are no elements.
_OF_NONE = ("reduce_max", "reduce_min", "reduce_and", "reduce_prod")
# The value that changes no maximum, and the one that changes no minimum.
_CHANGES_NONE = {"reduce_max": LOWEST, "reduce_min": HIGHEST}


@rule(
    """reduce_sum reduce_max reduce_min reduce_or reduce_and reduce_prod reduce_xor
    argmax argmin""",
    knows_identity=True,
    kinds=[Kind.SPREAD, Kind.STACKED],
)
def _reduction(pair: EquationPair) -> Known:
    """A reduction: a function of each row if no row meets another, or one over rows."""
    [x] = pair.ins
    name = pair.name
    axes = {i % len(pair.shape(0)) for i in pair.params["axes"]}
    if name in ("reduce_or", "reduce_and") and pair.dtype(0).kind != "b":
        # For the bits of a number this is neither its maximum nor its minimum.
        if pair.rows_in[0] in axes or x.kind not in EACH:
            raise NotOfOneKindError(f"no rule for {name} of the bits of {x}")
    if x.kind is Kind.STACKED:
        return _over_stacked(pair, x, axes)
    if x.kind is Kind.SPREAD:
        return _over_groups(pair, x, axes)
    is_over = pair.rows_in[0] in axes
    if is_over_none(pair) and name in _OF_NONE:
        return copy()
    x = as_copy(x)  # the place of the largest of zeros
    if x.kind is Kind.PART and name == "reduce_sum":
        return part(x.power)
    if _EXTREMES.get(name) is x.kind:
        return x.times_tower(x.power)
    if x.kind not in EACH:
        raise NotOfOneKindError(f"no rule for {name} of {x}")
    if is_over and x.kind is Kind.COPY:
        return _of_equal_rows(pair, x)
    if is_over:
        return _over_rows(pair, x, axes)
    if name in _SCALING:
        kept = x.fact if _is_infinite(x, name) else None
        return x.times_tower(x.power)._replace(fact=kept)
    if name.startswith("arg"):
        return x.times_tower(0)._replace(zeros=NO_ZEROS)
    return function_of([x], name)


def _of_equal_rows(pair: EquationPair, x: Known) -> Known:
    """A reduction over rows of a value that is constant along them."""
    if pair.name in ("reduce_max", "reduce_min"):
        return copy(x.power)
    if pair.name in ("reduce_or", "reduce_and"):
        return function_of([x], pair.name)
    if pair.name != "reduce_sum" or pair.sizes.padded:
        raise NotOfOneKindError(f"{pair.name} of equal rows depends on their number")
    return copy(x.power - 1)


def _over_rows(pair: EquationPair, x: Known, axes: set[int]) -> Known:
    """A reduction over rows, which makes a part or a maximum; padding must not count.

    The maximum of a tower without rows is minus infinity, which no other tower has.
    """
    if pair.name == "reduce_sum":
        if pair.has_padding(x.zeros):
            raise NotOfOneKindError("padding counts in a sum over rows")
        found = part(x.power)
        is_all = len(axes) == len(pair.shape(0))
        if isinstance(x.fact, Flag) and is_all and holds_sums(pair.dtype(0)):
            return found._replace(fact=Count(x.fact.flag))
        return found
    kind = _EXTREMES.get(pair.name)
    if kind is None:
        raise NotOfOneKindError(f"no rule for {pair.name} over {nouns().its} rows")
    is_whole = len(axes) == len(pair.shape(0)) and not pair.has_padding(x.zeros)
    if isinstance(x.fact, Flag) and pair.name == "reduce_or" and is_whole:
        return guards.has_any(x.fact.flag, True)
    is_false = pair.name == "reduce_or" and not pair.has_padding(x.zeros)
    if pair.sizes.padded and not (is_false or _is_infinite(x, pair.name)):
        raise NotOfOneKindError(f"padding counts in {pair.name} over rows")
    return Known(kind, x.power)


def _is_infinite(x: Known, name: str) -> bool:
    """Whether padding is the infinity that changes no such extreme."""
    return isinstance(x.fact, InfinitePadding) and x.fact == _CHANGES_NONE.get(name)


def _over_groups(pair: EquationPair, x: Known, axes: set[int]) -> Known:
    """A sum over some dims of groups of rows."""
    if pair.name != "reduce_sum":
        raise NotOfOneKindError(f"no rule for {pair.name} of {x}")
    dims = x.note.dims
    left = [i for i in dims if i not in axes]
    is_over = len(left) < len(dims)
    if is_over and pair.has_padding(x.zeros):
        raise NotOfOneKindError("padding counts in a sum over rows")
    if not left:
        return part(x.power)
    moved = tuple(i - sum(j < i for j in axes) for i in left)
    note = x.note._replace(dims=moved, each=x.note.each and not is_over)
    return x._replace(note=note, fact=None)


def _over_stacked(pair: EquationPair, x: Known, axes: set[int]) -> Known:
    """A reduction over all towers, like a collective."""
    [over] = pair.towers_in
    name = pair.name
    if over not in axes:
        raise NotOfOneKindError(f"no rule for {name} of {x}")
    is_known = (x.note, name) in (
        (Kind.PART, "reduce_sum"),
        (Kind.MAXIMUM, "reduce_max"),
        (Kind.MINIMUM, "reduce_min"),
        (Kind.COPY, "reduce_max"),
        (Kind.COPY, "reduce_min"),
    )
    if is_known:
        return copy(x.power)
    if x.note is Kind.COPY and name == "reduce_sum":
        return copy(x.power + 1)
    is_whole = x.note is Kind.ROWS and pair.rows_in[0] in axes and name in _SCALING
    if is_whole and not pair.sizes.padded:
        return copy(x.power)
    raise NotOfOneKindError(f"no rule for {name} of {x}")


@rule("reduce", copies_as_rows=True)
def _reduction_by_a_function(pair: EquationPair) -> Known:
    """A reduction by a user's function, over dims without rows."""
    over = set(pair.params["dimensions"])
    if any(i in over for i in pair.rows_in if i is not None):
        raise NotOfOneKindError(
            f"no rule for a reduction of {nouns().its} rows by a function of the user's"
        )
    _refuse_other_function(pair)
    return function_of(pair.ins, "a reduction by a function")


def _refuse_other_function(pair: EquationPair) -> None:
    """Raise unless the reducing function is the same in both programs."""
    first, second = [sub_jaxprs(eqn)[0] for eqn in (pair.first, pair.second)]
    given = [copy()] * (len(first.constvars) + len(first.invars))
    for found in pair.inside((first, second), given):
        if found.kind not in (Kind.COPY, Kind.ZERO) or found.power:
            raise NotOfOneKindError(
                f"no rule for a reduction by a function that gives {found}"
            )


@rule("cumsum cumprod cummax cummin cumlogsumexp", copies_as_rows=True)
def _cumulative(pair: EquationPair) -> Known:
    """A cumulative sum, product or extreme along a dim without rows."""
    [x] = pair.ins
    if pair.params["axis"] == pair.rows_in[0]:
        raise NotOfOneKindError(f"no rule for {pair.name} along {nouns().its} rows")
    if pair.name == "cumsum" and x.kind in LINEAR:
        return x
    if pair.name in ("cummax", "cummin") and x.kind in EACH:
        return x
    return function_of([x], pair.name)


@rule("sort", knows_unknown=True, kinds=[Kind.SPREAD], copies_as_rows=True)
def _sorted(pair: EquationPair) -> list[Known]:
    """A sort along a dim without rows, which only moves elements of a row."""
    if pair.params["dimension"] in pair.rows_in:
        return _in_another_order(pair)
    if unknown := [x for x in pair.ins if x.kind is Kind.UNKNOWN]:
        return [unknown[0]] * len(pair.ins)
    if not pair.kinds <= EACH:
        odd = next(x for x in pair.ins if x.kind not in EACH)
        raise NotOfOneKindError(f"no rule for a sort of {odd}")
    order = joined([_places_in(as_copy(x)) for x in pair.ins])
    return [order.times_tower(x.power) for x in pair.ins]


def _in_another_order(pair: EquationPair) -> list[Known]:
    """A sort of rows: one order for all operands, with each row exactly once."""
    if len(pair.shape(0)) != 1:  # each column has its own order
        raise NotOfOneKindError(f"{nouns().its} rows are sorted")
    order = pair.walk.new_identity()
    return [_ordered(pair, i, x, order) for i, x in enumerate(pair.ins)]


def _ordered(pair: EquationPair, operand: int, x: Known, order: Any) -> Known:
    """The kind of one of the arrays that are sorted together."""
    if x.kind in (Kind.ZERO, Kind.UNKNOWN):
        return x
    if x.kind is Kind.ROWS and x.blocks == 1:
        return permuted(x, 0, (order, None))
    if x.kind is Kind.SPREAD and x.note.each and x.note.dims == (0,):
        return permuted(x, 0, (order, x.note.order))
    if x.kind is Kind.NUMBERS and pair.times_rows(operand, 0) == 1:
        return Known(Kind.ORDER, note=(order, None))
    return pair.unknown(f"no rule for a sort of {x}")


def _places_in(value: Known) -> Known:
    """The kind of the positions of elements, which no power changes."""
    return value.times_tower(0)


@rule("top_k", copies_as_rows=True)
def _best(pair: EquationPair) -> list[Known]:
    """The largest elements along a dim without rows, by the rule of a sort."""
    [x] = pair.ins
    along = pair.params.get("axis", len(pair.shape(0)) - 1) % len(pair.shape(0))
    if along == pair.rows_in[0] or x.kind not in EACH:
        raise NotOfOneKindError(f"no rule for the largest of {x}")
    x = as_copy(x)
    return [x.times_tower(x.power), _places_in(x)]


@rule("dot_general")
def _matrix_product(pair: EquationPair) -> Known:
    """A product; rows times rows, summed over the rows, are a part."""
    x, y = pair.ins
    (x_sums, _), _ = pair.params["dimension_numbers"]
    # If a tower's rows met other rows, the result would have two dims of rows.
    if pair.rows_in[0] is None or pair.rows_in[0] not in x_sums:
        return product_of(x, y)
    if not pair.kinds <= {Kind.COPY, Kind.ROWS}:
        raise NotOfOneKindError(f"no rule for {x} times {y}")
    if pair.out_dtype(0).kind == "b":
        raise NotOfOneKindError("a product of bools tests whether any row has a flag")
    both = product_of(x, y)
    if both.kind is Kind.ROWS:
        if pair.has_padding(zeros_of(pair, 0)):
            raise NotOfOneKindError("padding counts in a sum over rows")
        return part(both.power)
    if pair.sizes.padded:
        raise NotOfOneKindError("a sum of equal rows depends on their number")
    return copy(both.power - 1)


@rule("conv_general_dilated", copies_as_rows=True)
def _convolution(pair: EquationPair) -> Known:
    """A convolution whose rows are images, or are summed into a kernel's gradient."""
    (x, y) = pair.ins
    params = pair.params
    dims = params["dimension_numbers"]
    (x_rows, y_rows) = pair.rows_in
    is_alone = params["batch_group_count"] == 1
    if x_rows is None and y_rows is None:
        return product_of(x, y)
    if y_rows is None and x_rows == dims.lhs_spec[0] and is_alone:
        if pair.rows_out[0] == dims.out_spec[0]:
            return product_of(x, y)
    # Here groups of the batch are channels, and each has all rows.
    are_summed = x_rows == dims.lhs_spec[1] and y_rows == dims.rhs_spec[1]
    if are_summed and params["feature_group_count"] == 1:
        if pair.kinds == {Kind.ROWS} and not pair.has_padding(zeros_of(pair, 0)):
            return part(product_of(x, y).power)
    raise NotOfOneKindError(f"no rule for a convolution along {nouns().its} rows")


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
    copies_as_rows=True,
)
def _window(pair: EquationPair) -> Known:
    """A reduction of windows along dims without rows, a function of a row."""
    for axis in {*pair.rows_in, *pair.rows_out} - {None}:
        for key, alone in _WINDOW.items():
            given = pair.params.get(key)
            if given is not None and given[axis] not in (alone, [*np.ravel(alone)]):
                raise NotOfOneKindError(
                    f"no rule for a window along {nouns().its} rows"
                )
    rank = len(pair.out_shape())
    arrays = [i for i in range(len(pair.ins)) if len(pair.shape(i)) == rank > 0]
    if any(pair.rows_in[i] != pair.rows_out[0] for i in arrays):
        raise NotOfOneKindError(f"no rule for a window over {nouns().its} rows")
    x = pair.ins[0]
    if pair.name == "reduce_window_sum" and x.kind in LINEAR:
        return x
    if pair.name in ("reduce_window_max", "reduce_window_min") and x.kind in EACH:
        return x
    if pair.name == "select_and_scatter_add" and pair.kinds <= EACH:
        return product_of(x, _places_in(as_copy(pair.ins[1])))
    if pair.name == "reduce_window":
        _refuse_other_function(pair)
    return function_of(pair.ins, pair.name)


@rule("fft", copies_as_rows=True)
def _transformed(pair: EquationPair) -> Known:
    """A Fourier transform, which is linear along the last dims."""
    [x] = pair.ins
    rank = len(pair.shape(0))
    last = range(rank - len(pair.params["fft_lengths"]), rank)
    if x.kind not in LINEAR or pair.rows_in[0] in last:
        raise NotOfOneKindError(f"no rule for an fft of {x}")
    if pair.rows_in[0] != pair.rows_out[0]:
        raise NotOfOneKindError(f"no rule for an fft along {nouns().its} rows")
    return x


@rule(
    "cholesky eigh lu qr geqrf householder_product svd schur eig tridiagonal_solve",
    copies_as_rows=True,
)
def _of_matrices(pair: EquationPair) -> list[Known]:
    """A function of each matrix in the last two dims."""
    for i, axis in enumerate(pair.rows_in):
        if axis is not None and (axis != 0 or len(pair.shape(i)) < 3):
            raise NotOfOneKindError(f"no rule for {pair.name} of {nouns().its} rows")
    found = function_of(pair.ins, pair.name)
    if found.blocks > 1 or any(axis not in (None, 0) for axis in pair.rows_out):
        raise NotOfOneKindError(f"no rule for {pair.name} of {nouns().its} rows")
    return [found] * len(pair.rows_out)


@rule("triangular_solve", copies_as_rows=True)
def _solution(pair: EquationPair) -> Known:
    """The solution of a triangular system, which is linear in its right-hand side."""
    (x, y) = pair.ins
    rank = len(pair.shape(0))
    solved = rank - 2 if pair.params["left_side"] else rank - 1
    is_linear = x.kind is Kind.COPY and not x.power and pair.rows_in[0] is None
    if is_linear and y.kind in LINEAR and pair.rows_in[1] != solved:
        return y
    if any(axis is not None and axis >= rank - 2 for axis in pair.rows_in):
        raise NotOfOneKindError(f"no rule for a linear solve along {nouns().its} rows")
    return function_of(pair.ins, "a solution")
