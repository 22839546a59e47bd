"""Rules for reads and writes of elements by indices that a program computes."""

import math
from typing import Any

import jax.numpy as jnp

from towerjax.proof.equal.equation_pair import EquationPair, rule
from towerjax.proof.equal.kinds import (
    EACH,
    LINEAR,
    ZERO,
    Kind,
    Known,
    NotOfOneKindError,
    NumberInBatch,
    added,
    copy,
    joined,
    of_one_tower,
    part,
    permuted,
    product_of,
    rows,
)
from towerjax.proof.equal.nouns import nouns
from towerjax.proof.equal.zeros import fills_with_zero

_AMONG_ROWS = "rows are read or written by the numbers of other rows"
_SAME = (Kind.COPY, Kind.ZERO)
_INTO_TABLE = {"scatter-max": Kind.MAXIMUM, "scatter-min": Kind.MINIMUM}


def _is_loop_over(pair: EquationPair, operand: int, axis: int | None) -> bool:
    """Whether the enclosing loop runs over a dim of an operand."""
    if pair.scope.loop is None or axis is None:
        return False
    return pair.sizes_along(operand, axis) == pair.scope.loop


def _of_this_row(x: Known) -> Known:
    """The kind of the current row of an array of rows, in a loop over rows."""
    if x.kind is Kind.ZERO or x.power is None:
        return ZERO
    return Known(Kind.ROW, x.power, zeros=x.zeros, in_padding=x.in_padding)


def _with_this_row(pair: EquationPair, x: Known, new: Known) -> Known:
    """The kind of a buffer after the current row is written, in a loop over rows."""
    if new.kind not in (Kind.ROW, Kind.COPY, Kind.ZERO):
        raise NotOfOneKindError(f"{new} is written to a row")
    if new.kind is Kind.ZERO:
        return x
    if x.power not in (None, new.power):
        raise NotOfOneKindError(f"{new} is written to a row of {x}")
    return x._replace(power=new.power, zeros=x.zeros & new.zeros)


def _keeps_by_fill(pair: EquationPair, x: Known) -> bool:
    """Whether the fill value of a gather has the kind and power of its array."""
    is_nan = pair.params["fill_value"] is None
    is_nan &= jnp.issubdtype(pair.dtype(0), jnp.inexact)
    is_number = x.kind in EACH and not x.power
    return is_number or is_nan or fills_with_zero(pair)


def _are_same(indices: Any) -> bool:
    return all(v.kind in _SAME and not v.power for v in indices)


@rule("dynamic_slice", kinds=[Kind.BUFFER, Kind.STACKED], copies_as_rows=True)
def _slice_at(pair: EquationPair) -> Known:
    """A slice at one place along dims without rows; in a loop, the current row."""
    x, *at = pair.ins
    axis = pair.rows_in[0]
    sizes = pair.params["slice_sizes"]
    others = [v for i, v in enumerate(at) if i != axis]
    if x.kind is Kind.STACKED:
        return _own_of_stacked(pair, x, at)
    is_here = axis is not None and at[axis].kind is Kind.COUNTER and sizes[axis] == 1
    if is_here and x.kind in (Kind.ROWS, Kind.ZERO, Kind.BUFFER) and x.blocks == 1:
        whole = _are_same(others) and pair.rows_out[0] is None
        if whole and _is_loop_over(pair, 0, axis):
            return _of_this_row(x)
    if x.kind is Kind.COPY and axis is None and pair.rows_out[0] is not None:
        place = pair.rows_out[0]
        taken = [eqn.params["slice_sizes"][place] for eqn in (pair.first, pair.second)]
        if _are_rows_of_batch(pair, 0, place, at) and pair.sizes.times(*taken) == 1:
            return rows(x.power)
    if axis != pair.rows_out[0] or x.kind not in LINEAR | {Kind.KEY}:
        raise NotOfOneKindError(_AMONG_ROWS)
    if axis is not None and sizes[axis] != pair.shape(0)[axis]:
        raise NotOfOneKindError(_AMONG_ROWS)
    if axis is None and sizes != pair.second.params["slice_sizes"]:
        raise NotOfOneKindError(
            "which elements are taken depends on the number of rows"
        )
    if _are_same(at):
        return x
    is_by_row = all(v.kind in EACH and not v.power for v in at)
    if axis is None and is_by_row and x.kind in (Kind.COPY, Kind.ROW):
        return joined([x, *[v.times_tower(x.power) for v in at if v.kind is Kind.ROW]])
    raise NotOfOneKindError(_AMONG_ROWS)


def _are_rows_of_batch(
    pair: EquationPair, operand: int, axis: int, at: list[Known]
) -> bool:
    """Whether a dim has the rows of the batch, and a slice starts at the tower's."""
    pairs = zip(pair.sizes.towers, pair.sizes.rows, strict=True)
    is_whole = pair.sizes_along(operand, axis) == tuple(t * n for t, n in pairs)
    is_whole &= not pair.sizes.padded and pair.sizes.parts == (1, 1)
    others = [v for i, v in enumerate(at) if i != axis]
    return is_whole and at[axis].kind is Kind.FIRST_ROW and _are_same(others)


def _is_flag(pair: EquationPair) -> bool:
    """Whether the array has flags, which no towers add up."""
    return pair.dtype(0) == jnp.bool_


def _own_of_stacked(pair: EquationPair, x: Known, at: list[Known]) -> Known:
    """The tower's own value, from the values of all towers."""
    axis = pair.towers_in[0]
    assert axis is not None
    sizes = pair.params["slice_sizes"]
    shape = pair.shape(0)
    is_own = at[axis].kind is Kind.TOWER and sizes[axis] == 1
    others = [i for i in range(len(shape)) if i != axis]
    is_whole = all(sizes[i] == shape[i] for i in others)
    if not (is_own and is_whole and _are_same([at[i] for i in others])):
        raise NotOfOneKindError(
            f"a {nouns().one} reads the value of another {nouns().one}"
        )
    return of_one_tower(x, pair.rows_out[0])


@rule("dynamic_update_slice", kinds=[Kind.BUFFER], copies_as_rows=True)
def _update_at(pair: EquationPair) -> Known:
    """A slice that is written, by the rules of a slice."""
    (x, new, *at) = pair.ins
    axis = pair.rows_in[0]
    if x.kind is Kind.BUFFER:
        others = [v for i, v in enumerate(at) if i != axis]
        is_here = axis is not None and at[axis].kind is Kind.COUNTER
        is_one = axis is not None and pair.shape(1)[axis] == 1 and _are_same(others)
        if not (is_here and is_one and _is_loop_over(pair, 0, axis)):
            raise NotOfOneKindError(_AMONG_ROWS)
        return _with_this_row(pair, x, new)
    place = pair.rows_in[1]
    if (
        x.kind is Kind.ZERO
        and axis is None
        and place is not None
        and not _is_flag(pair)
    ):
        is_each = pair.times_rows(1, place) == 1 and new.blocks == 1
        is_each &= new.kind in (Kind.ROWS, Kind.ZERO)
        if is_each and _are_rows_of_batch(pair, 0, place, at):
            return part(new.power)  # of each row all towers but one have 0
    if new.kind is Kind.BUFFER or axis != pair.rows_in[1] or not _are_same(at):
        raise NotOfOneKindError(_AMONG_ROWS)
    if axis is not None and pair.shape(0)[axis] != pair.shape(1)[axis]:
        raise NotOfOneKindError(_AMONG_ROWS)
    if not {x.kind, new.kind} <= LINEAR:
        raise NotOfOneKindError(f"{new} is written into {x}")
    return joined([x, new], "together with")


def _columns_of(pair: EquationPair, operand: int) -> list[Kind | Known]:
    """The kind of each column of indices; of an order, all that is known."""
    at = pair.ins[operand]
    if at.kind is Kind.COLUMNS:
        return [*at.note]
    return [at.kind] * pair.shape(operand)[-1]


@rule(
    "gather",
    kinds=[Kind.BUFFER, Kind.COLUMNS, Kind.ORDER, Kind.STACKED],
    copies_as_rows=True,
)
def _gathered(pair: EquationPair) -> Known:
    """Elements of one table by indices, or each row by its own number."""
    (x, at) = pair.ins
    dims = pair.params["dimension_numbers"]
    (axis, at_axis) = pair.rows_in
    [out_axis] = pair.rows_out
    sizes = pair.params["slice_sizes"]
    if x.kind is Kind.STACKED:
        return _own_by_index(pair, x, at, dims)
    if x.kind is Kind.ZERO:
        x = copy() if axis is None else rows()
    if at.kind is Kind.COUNTER and axis is not None:
        is_row = dims.start_index_map == (axis,) and axis in dims.collapsed_slice_dims
        known = x.kind in (Kind.ROWS, Kind.BUFFER) and x.blocks == 1
        if is_row and known and _is_loop_over(pair, 0, axis):
            return _of_this_row(x)
    if order := _order_in(at):
        return _by_order(pair, dims, order)
    usable = at.kind in EACH or at.kind in (Kind.NUMBERS, Kind.COLUMNS)
    if not usable or at.power or x.kind is Kind.BUFFER:
        raise NotOfOneKindError(f"no rule for elements at indices that are {at}")
    if not _keeps_by_fill(pair, x):
        raise NotOfOneKindError(f"a number fills in for elements beyond {x}")
    if axis is None:
        return _from_table(pair, x, at, sizes)
    is_plain = x.kind is Kind.ROWS and x.blocks == at.blocks == 1
    if is_plain and out_axis is not None:
        by_number = _by_own_number(pair, dims, axis, at_axis, sizes)
        whole = axis not in dims.start_index_map and at_axis is None
        whole &= sizes[axis] == pair.shape(0)[axis] and at.kind in _SAME
        if by_number or whole or _is_batched(dims, axis, at_axis, at):
            return x
    raise NotOfOneKindError(_AMONG_ROWS)


def _own_by_index(pair: EquationPair, x: Known, at: Known, dims: Any) -> Known:
    """The tower's own value of all towers' values, read by the tower's number."""
    axis = pair.towers_in[0]
    sizes = pair.params["slice_sizes"]
    is_own = at.kind is Kind.TOWER and dims.start_index_map == (axis,)
    is_own &= axis in dims.collapsed_slice_dims and _size_of(pair.shape(1)) == 1
    others = [i for i in range(len(sizes)) if i != axis]
    if not is_own or any(sizes[i] != pair.shape(0)[i] for i in others):
        raise NotOfOneKindError(
            f"a {nouns().one} reads the value of another {nouns().one}"
        )
    return of_one_tower(x, pair.rows_out[0])


def _size_of(shape: tuple[Any, ...]) -> int:
    return math.prod(int(n) for n in shape)


def _order_in(at: Known) -> Known | None:
    """The order of rows that indices have, alone or in one of their columns."""
    if at.kind is Kind.ORDER:
        return at
    columns = at.note if at.kind is Kind.COLUMNS else ()
    return next((x for x in columns if isinstance(x, Known)), None)


def _by_order(pair: EquationPair, dims: Any, order: Known) -> Known:
    """All rows in another order, each exactly once."""
    (x, at) = pair.ins
    (axis, at_axis) = pair.rows_in
    [out_axis] = pair.rows_out
    sizes = pair.params["slice_sizes"]
    columns = dict(zip(dims.start_index_map, _columns_of(pair, 1), strict=True))
    is_by_row = axis in dims.collapsed_slice_dims
    is_by_row &= columns.pop(axis, None) in (order, Kind.ORDER)
    # Other columns are the same for all rows, and other dims are taken whole.
    is_by_row &= all(kind in _SAME for kind in columns.values())
    others = [i for i in range(len(sizes)) if i != axis and i not in columns]
    is_by_row &= all(sizes[i] == pair.shape(0)[i] for i in others)
    is_each = pair.times_rows(0, axis) == 1 and (at_axis, len(pair.shape(1))) == (0, 2)
    is_plain = x.kind is Kind.ROWS and x.blocks == 1 and out_axis is not None
    if not (is_by_row and is_each and is_plain and _keeps_by_fill(pair, x)):
        raise NotOfOneKindError(f"no rule for elements of {x} at {at}")
    assert out_axis is not None
    return permuted(x, out_axis, order.note)


@rule("towerjax_take", copies_as_rows=True)
def _rows_of_table(pair: EquationPair) -> Known:
    """The rows of a table that `tj.sparse.take` looks up, by the ids of each row."""
    x, at = pair.ins
    is_one = pair.params["stacked"] == 0
    is_table = is_one and x.kind is Kind.COPY and pair.rows_in[0] is None
    if not is_table or at.kind not in EACH or at.power:
        raise NotOfOneKindError(f"no rule for a lookup in {x} by {at}")
    return x if at.kind is Kind.ZERO else product_of(x, at)


def _from_table(pair: EquationPair, x: Known, at: Known, sizes: Any) -> Known:
    """Elements of an array that has no rows."""
    if at.kind in (Kind.NUMBERS, Kind.COLUMNS):
        raise NotOfOneKindError(
            f"elements are indexed by the numbers of {nouns().its} rows"
        )
    if sizes != pair.second.params["slice_sizes"]:
        raise NotOfOneKindError(
            "which elements are taken depends on the number of rows"
        )
    if x.kind is Kind.PART and at.kind in _SAME:
        return x
    if x.kind not in (Kind.COPY, Kind.ROW):
        raise NotOfOneKindError(f"no rule for some elements of {x}")
    places = [] if at.kind is Kind.ZERO else [at]
    return product_of(x, places[0]) if places else x


def _by_own_number(
    pair: EquationPair, dims: Any, axis: int, at_axis: int | None, sizes: Any
) -> bool:
    """Whether row i is read by an index with i in one column."""
    if axis not in dims.start_index_map or at_axis is None:
        return False
    columns = _columns_of(pair, 1)
    place = dims.start_index_map.index(axis)
    others = [x for i, x in enumerate(columns) if i != place]
    is_one = sizes[axis] == 1 and axis in dims.collapsed_slice_dims
    is_even = pair.shape(1)[at_axis] == pair.shape(0)[axis]
    known = {Kind.ROWS, Kind.COPY, Kind.ZERO}
    return is_one and is_even and columns[place] is Kind.NUMBERS and known >= {*others}


def _is_batched(dims: Any, axis: int, at_axis: int | None, at: Known) -> bool:
    """Whether rows and indices share one batch dim."""
    if axis not in dims.operand_batching_dims or at.kind not in EACH:
        return False
    place = dims.operand_batching_dims.index(axis)
    return at_axis == dims.start_indices_batching_dims[place]


@rule(
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max",
    kinds=[Kind.BUFFER, Kind.COLUMNS],
    copies_as_rows=True,
)
def _scattered(pair: EquationPair) -> Known:
    """A gather that is written; rows that are added to a table make parts of it."""
    (x, at, new) = pair.ins
    dims = pair.params["dimension_numbers"]
    axis, at_axis, new_axis = pair.rows_in
    adds = pair.name in ("scatter-add", "scatter-sub")
    if pair.name == "scatter" and pair.params["update_jaxpr"] is not None:
        raise NotOfOneKindError("a function is applied to only some elements")
    if x.kind is Kind.BUFFER:
        is_row = dims.scatter_dims_to_operand_dims == (axis,)
        is_row &= axis in dims.inserted_window_dims and at.kind is Kind.COUNTER
        is_row &= pair.name == "scatter" and _is_loop_over(pair, 0, axis)
        if not is_row:
            raise NotOfOneKindError(_AMONG_ROWS)
        return _with_this_row(pair, x, new)
    usable = at.kind in EACH or at.kind in (Kind.NUMBERS, Kind.COLUMNS)
    if not usable or at.power or max(at.blocks, new.blocks, x.blocks) > 1:
        raise NotOfOneKindError(f"elements are written at indices that are {at}")
    if pair.name == "scatter-mul":
        if new.power or not {x.kind, new.kind} <= EACH:
            raise NotOfOneKindError(f"no rule for elements of {x} times {new}")
        new = new.times_tower(x.power)
    if axis is not None:
        fits = {x.kind, new.kind} <= {Kind.ZERO, Kind.ROWS, Kind.COPY}
        if fits and _writes_own_rows(pair, dims, axis, at_axis, new_axis):
            return joined([x, new], "together with")
        raise NotOfOneKindError(_AMONG_ROWS)
    if at_axis is None and new_axis is None and at.kind in _SAME:
        if adds:
            return added([x, new])
        if pair.name == "scatter" or {x.kind, new.kind} <= EACH:
            return joined([x, new], "together with")
    of_rows = (Kind.ROWS, Kind.ZERO)
    fits = new_axis is not None and at_axis is not None
    fits = fits and new_axis not in dims.update_window_dims
    if fits and at.kind in of_rows and new.kind in of_rows:
        return _into_table(pair, x, new)
    raise NotOfOneKindError(f"{new} is written to a table")


def _into_table(pair: EquationPair, x: Known, new: Known) -> Known:
    """A table to which rows are added, or whose maximum they may be."""
    adds = pair.name in ("scatter-add", "scatter-sub")
    if adds and x.kind in (Kind.ZERO, Kind.PART, Kind.COPY):
        if new.kind is Kind.ZERO:
            return x
        if pair.has_padding(new.zeros):
            raise NotOfOneKindError("padding counts in a sum over rows")
        return added([x, part(new.power)])
    is_each = isinstance(pair.ins[1].fact, NumberInBatch) and not _is_flag(pair)
    is_each &= pair.name == "scatter" and "CLIP" not in str(pair.params["mode"])
    if is_each and x.kind is Kind.ZERO:
        return part(new.power)  # no two rows have one number
    kind = _INTO_TABLE.get(pair.name)
    is_even = new.kind is Kind.ROWS and x.power == new.power and not pair.sizes.padded
    if kind is not None and x.kind is Kind.COPY and is_even:
        return Known(kind, x.power)
    raise NotOfOneKindError(f"{new} is written to a table")


def _writes_own_rows(
    pair: EquationPair,
    dims: Any,
    axis: int,
    at_axis: int | None,
    new_axis: int | None,
) -> bool:
    """Whether each row is written to its own place."""
    at = pair.ins[1]
    if axis in dims.operand_batching_dims:
        place = dims.operand_batching_dims.index(axis)
        is_one = at_axis == dims.scatter_indices_batching_dims[place]
        return at.kind in EACH and is_one and new_axis is not None
    if axis in dims.scatter_dims_to_operand_dims:
        place = dims.scatter_dims_to_operand_dims.index(axis)
        columns = _columns_of(pair, 1)
        others = {x for i, x in enumerate(columns) if i != place}
        if at_axis is None:
            return False
        is_own = columns[place] is Kind.NUMBERS and axis in dims.inserted_window_dims
        is_own &= others <= {Kind.ROWS, Kind.COPY, Kind.ZERO}
        return is_own and pair.shape(1)[at_axis] == pair.shape(0)[axis]
    gone = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    kept = [i for i in range(len(pair.shape(0))) if i not in gone]
    if at_axis is not None or new_axis is None or axis not in kept:
        return False
    is_here = new_axis == dims.update_window_dims[kept.index(axis)]
    is_whole = pair.shape(2)[new_axis] == pair.shape(0)[axis]
    return at.kind in _SAME and is_here and is_whole
