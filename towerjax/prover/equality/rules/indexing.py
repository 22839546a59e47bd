"""Rules for reads and writes of elements by indices that a program computes."""

import math
from typing import Any

import jax.numpy as jnp

from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    ELEMENTS,
    EXTREME,
    LINEAR,
    SAME_FOR_ALL,
    ZERO,
    Buffer,
    Columns,
    Copy,
    Counter,
    FirstRow,
    Groups,
    Key,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    NumberInBatch,
    Part,
    Row,
    RowNumbers,
    RowOrder,
    TowerId,
    TowerRows,
    Zero,
    added,
    blocks_of,
    copy,
    joined,
    part,
    permuted,
    product_of,
    rows,
)
from towerjax.prover.equality.kinds.stacked import Slots, Stacked, of_one_tower
from towerjax.prover.equality.kinds.zeros import fills_with_zero
from towerjax.prover.equality.rules.rules import OF_ONE_TOWER, SPECIAL, rule

_AMONG_ROWS = "rows are read or written by the numbers of other rows"
_OTHER_TOWER = "a {one} reads the value of another {one}"
_OTHER_ELEMENTS = "which elements are taken depends on the number of rows"


def _is_loop_over(pair: EquationPair, operand: int, axis: int | None) -> bool:
    """Return whether the equation is in a loop over rows, along a dim of an operand."""
    if pair.scope.loop is None or axis is None:
        return False
    return pair.sizes_along(operand, axis) == pair.scope.loop


def _of_this_row(x: Kind) -> Kind:
    """Take the current row of an array, in a loop over rows."""
    if isinstance(x, Zero) or x.power is None:
        return ZERO
    return Row(x.power, zeros=x.zeros, in_padding=x.in_padding)


def _with_this_row(x: Buffer, new: Kind) -> Kind:
    """Write the current row of a loop's buffer; refuse another power of T."""
    if not isinstance(new, Row | Copy | Zero):
        raise NotOfOneKindError(f"no rule for a write of {new} to a row")
    if isinstance(new, Zero):
        return x
    if x.power not in (None, new.power):
        raise NotOfOneKindError(f"no rule for a write of {new} to a row of {x}")
    return x.replace(power=new.power, zeros=x.zeros & new.zeros)


def _own_value(pair: EquationPair, x: Stacked) -> Kind:
    """Take the tower's own value out of an array of all towers' values."""
    walk = pair.walk
    return of_one_tower(x, pair.rows_out[0], dealt=walk.dealt, each=pair.sizes.rows)


def _are_same(indices: Any) -> bool:
    """Return whether all towers have the same indices."""
    return all(isinstance(v, SAME_FOR_ALL) and not v.power for v in indices)


@rule("dynamic_slice", Stacked, every=OF_ONE_TOWER)
def _slice_of_stacked(pair: EquationPair, x: Stacked, *at: Kind) -> Kind:
    """``(x_1, ..., x_T)[t] = x_t``: slice out the tower's own value.

    A slice of another tower's value is refused.
    """
    axis = pair.towers_in[0]
    assert axis is not None
    sizes = pair.params["slice_sizes"]
    shape = pair.shape(0)
    is_own = isinstance(at[axis], TowerId) and sizes[axis] == 1
    others = [i for i in range(len(shape)) if i != axis]
    is_whole = all(sizes[i] == shape[i] for i in others)
    if not (is_own and is_whole and _are_same([at[i] for i in others])):
        raise NotOfOneKindError(_OTHER_TOWER)
    return _own_value(pair, x)


@rule("dynamic_slice", Buffer, every=OF_ONE_TOWER)
def _slice_of_buffer(pair: EquationPair, x: Buffer, *at: Kind) -> Kind:
    """Read the current row of the array that a loop over rows fills."""
    if not _takes_this_row(pair, at):
        raise NotOfOneKindError(_AMONG_ROWS)
    return _of_this_row(x)


@rule("dynamic_slice", LINEAR | Key, every=OF_ONE_TOWER, copies_as_rows=True)
def _slice_at(pair: EquationPair, x: Kind, *at: Kind) -> Kind:
    """Slice an array at a start that a program computes.

    If the start is the same on all towers, the kind stays. In a loop over rows, the
    slice may be the current row, or start where the current row says. It may also be
    the tower's rows of a batch that all towers have: rows.
    """
    axis = pair.rows_in[0]
    sizes = pair.params["slice_sizes"]
    if (
        isinstance(x, TowerRows | Zero)
        and blocks_of(x) == 1
        and _takes_this_row(pair, at)
    ):
        return _of_this_row(x)
    if isinstance(x, Copy) and axis is None and _takes_rows_of_batch(pair, at):
        return rows(x.power)
    if axis != pair.rows_out[0]:
        raise NotOfOneKindError(_AMONG_ROWS)
    if axis is not None and sizes[axis] != pair.shape(0)[axis]:
        raise NotOfOneKindError(_AMONG_ROWS)
    if axis is None and sizes != pair.second.params["slice_sizes"]:
        raise NotOfOneKindError(_OTHER_ELEMENTS)
    if _are_same(at):
        return x
    is_by_row = all(isinstance(v, ELEMENTS) and not v.power for v in at)
    if axis is None and is_by_row and isinstance(x, Copy | Row):
        return joined([x, *[v.times_tower(x.power) for v in at if isinstance(v, Row)]])
    raise NotOfOneKindError(_AMONG_ROWS)


def _takes_this_row(pair: EquationPair, at: Any) -> bool:
    """Return whether a slice is the current row, in a loop over rows."""
    axis = pair.rows_in[0]
    if axis is None or not _is_loop_over(pair, 0, axis):
        return False
    others = [v for i, v in enumerate(at) if i != axis]
    sizes = [eqn.params["slice_sizes"][axis] for eqn in (pair.first, pair.second)]
    is_here = isinstance(at[axis], Counter) and sizes == [1, 1]
    return is_here and _are_same(others) and pair.rows_out[0] is None


def _takes_rows_of_batch(pair: EquationPair, at: Any) -> bool:
    """Return whether a slice of a replicated batch is the tower's own rows."""
    place = pair.rows_out[0]
    if place is None or not _are_rows_of_batch(pair, 0, place, at):
        return False
    taken = [eqn.params["slice_sizes"][place] for eqn in (pair.first, pair.second)]
    return pair.sizes.times(*taken) == 1


def _are_rows_of_batch(pair: EquationPair, operand: int, axis: int, at: Any) -> bool:
    """Return whether a slice of the batch's rows starts at the tower's first row.

    ``axis`` is the dim of the array ``operand`` along which the batch's rows must be.
    """
    pairs = zip(pair.sizes.towers, pair.sizes.rows, strict=True)
    is_whole = pair.sizes_along(operand, axis) == tuple(t * n for t, n in pairs)
    is_whole &= pair.has_rows_in_order
    others = [v for i, v in enumerate(at) if i != axis]
    return is_whole and isinstance(at[axis], FirstRow) and _are_same(others)


def _is_flag(pair: EquationPair) -> bool:
    """Return whether an array has bools, of which there are no sums."""
    return pair.dtype(0) == jnp.bool_


@rule("dynamic_update_slice", Buffer, every=OF_ONE_TOWER, copies_as_rows=True)
def _update_of_buffer(pair: EquationPair, x: Buffer, new: Kind, *at: Kind) -> Kind:
    """Write the current row to the buffer of a loop over rows."""
    axis = pair.rows_in[0]
    others = [v for i, v in enumerate(at) if i != axis]
    is_here = axis is not None and isinstance(at[axis], Counter)
    is_one = axis is not None and pair.sizes_along(1, axis) == (1, 1)
    if not (is_here and is_one and _are_same(others) and _is_loop_over(pair, 0, axis)):
        raise NotOfOneKindError(_AMONG_ROWS)
    return _with_this_row(x, new)


@rule("dynamic_update_slice", LINEAR, LINEAR, every=OF_ONE_TOWER, copies_as_rows=True)
def _update_at(pair: EquationPair, x: Kind, new: Kind, *at: Kind) -> Kind:
    """Write a slice to an array.

    If all towers write at the same place, the kind stays. If each tower writes its rows
    into zeros of the batch's size, at the place of these rows, the result is a part.
    """
    axis, place, *_ = pair.rows_in
    if isinstance(x, Zero) and axis is None and place is not None:
        is_each = pair.times_rows(1, place) == 1 and blocks_of(new) == 1
        is_each &= isinstance(new, TowerRows | Zero) and not _is_flag(pair)
        if is_each and _are_rows_of_batch(pair, 0, place, at):
            # For each row of the batch, all towers except one have 0, so the sum over
            # towers has all rows.
            return part(new.power)
    if axis != place or not _are_same(at):
        raise NotOfOneKindError(_AMONG_ROWS)
    if axis is not None and pair.shape(0)[axis] != pair.shape(1)[axis]:
        raise NotOfOneKindError(_AMONG_ROWS)
    return joined([x, new], "together with")


@rule("dynamic_update_slice", Slots, OF_ONE_TOWER | Groups, every=OF_ONE_TOWER)
def _update_of_slots(pair: EquationPair, x: Slots, new: Kind, *at: Kind) -> Kind:
    """Write the whole entry of this trip's micro-batch."""
    is_own = pair.towers_in[0] == 0 and isinstance(at[0], TowerId)
    is_one = pair.sizes_along(1, 0) == (1, 1)
    is_whole = pair.shape(1)[1:] == pair.shape(0)[1:]
    axis = pair.rows_in[1]
    if not (is_own and is_one and is_whole) or isinstance(new, Groups):
        raise NotOfOneKindError(f"no rule for a write of {new} to {x}")
    return x.replace(entry=new, axis=None if axis is None else axis - 1)


def _columns_of(pair: EquationPair) -> list[Any]:
    """List the type of each column's kind in an array of indices.

    For a column that is a permutation of the rows' indices it is the `RowOrder` itself.
    """
    at = pair.ins[1]
    if isinstance(at, Columns):
        return [*at.columns]
    return [type(at)] * pair.shape(1)[-1]


def _as_array(pair: EquationPair, x: Kind) -> Kind:
    """Read a gather's array; 0 becomes rows or a replicated value."""
    if not isinstance(x, Zero):
        return x
    return copy() if pair.rows_in[0] is None else rows()


def _keeps_by_fill(pair: EquationPair, x: Kind) -> bool:
    """Return whether a gather's fill value fits the kind and power of its array.

    It is used for indices out of bounds.
    """
    is_nan = pair.params["fill_value"] is None
    is_nan &= jnp.issubdtype(pair.dtype(0), jnp.inexact)
    is_number = isinstance(x, ELEMENTS) and not x.power
    return is_number or is_nan or fills_with_zero(pair)


def _refuse_fill(pair: EquationPair, x: Kind) -> None:
    """Raise if a gather's fill value does not fit the kind and power of its array."""
    if not _keeps_by_fill(pair, x):
        raise NotOfOneKindError(f"no rule for a fill value of elements beyond {x}")


@rule("gather", Stacked, every=OF_ONE_TOWER | SPECIAL)
def _own_by_index(pair: EquationPair, x: Stacked, at: Kind) -> Kind:
    """``(x_1, ..., x_T)[t] = x_t``: gather the tower's own value.

    A gather of another tower's value is refused.
    """
    dims = pair.params["dimension_numbers"]
    axis = pair.towers_in[0]
    sizes = pair.params["slice_sizes"]
    is_own = isinstance(at, TowerId) and dims.start_index_map == (axis,)
    is_own &= axis in dims.collapsed_slice_dims and math.prod(pair.shape(1)) == 1
    others = [i for i in range(len(sizes)) if i != axis]
    if not is_own or any(sizes[i] != pair.shape(0)[i] for i in others):
        raise NotOfOneKindError(_OTHER_TOWER)
    return _own_value(pair, x)


@rule("gather", ELEMENTS | Buffer, Counter, copies_as_rows=True)
def _gathered_row(pair: EquationPair, x: Kind, at: Counter) -> Kind:
    """Gather at the current row's index, in a loop: that row."""
    dims = pair.params["dimension_numbers"]
    axis = pair.rows_in[0]
    x = _as_array(pair, x)
    is_row = dims.start_index_map == (axis,) and axis in dims.collapsed_slice_dims
    is_row &= isinstance(x, TowerRows | Buffer) and blocks_of(x) == 1
    if not (is_row and _is_loop_over(pair, 0, axis)):
        raise NotOfOneKindError(f"no rule for elements at indices that are {at}")
    return _of_this_row(x)


@rule("gather", LINEAR, ELEMENTS, copies_as_rows=True)
def _gathered(pair: EquationPair, x: Kind, at: Kind) -> Kind:
    """Gather elements at computed indices.

    The array may be a replicated table, in which each row looks up its own elements. It
    may also be rows, if a row's elements are taken from that row.
    """
    x = _as_array(pair, x)
    if at.power:
        raise NotOfOneKindError(f"no rule for elements at indices that are {at}")
    _refuse_fill(pair, x)
    if pair.rows_in[0] is None:
        return _from_table(pair, x, at)
    if _has_plain_rows(pair, x, at):
        dims = pair.params["dimension_numbers"]
        if _takes_rows_whole(pair, dims, at) or _is_batched(pair, dims):
            return x
    raise NotOfOneKindError(_AMONG_ROWS)


@rule("gather", LINEAR, RowNumbers | Columns, copies_as_rows=True)
def _gathered_by_number(pair: EquationPair, x: Kind, at: Kind) -> Kind:
    """Gather so that row i reads elements of row i.

    One column of the indices is the rows' indices.
    """
    columns = at.columns if isinstance(at, Columns) else ()
    if orders := [order for order in columns if isinstance(order, RowOrder)]:
        return _by_order(pair, x, orders[0])
    x = _as_array(pair, x)
    _refuse_fill(pair, x)
    if pair.rows_in[0] is None:
        raise NotOfOneKindError(
            "a replicated array is indexed by the positions of {its} rows in the batch"
        )
    if _has_plain_rows(pair, x, at) and _is_by_own_number(pair):
        return x
    raise NotOfOneKindError(_AMONG_ROWS)


@rule("gather", LINEAR, RowOrder, copies_as_rows=True)
def _gathered_by_order(pair: EquationPair, x: Kind, at: RowOrder) -> Kind:
    """Gather all rows by a permutation: rows in another order."""
    return _by_order(pair, x, at)


def _by_order(pair: EquationPair, x: Kind, order: RowOrder) -> Kind:
    """Put all rows in another order, each exactly once."""
    x = _as_array(pair, x)
    dims = pair.params["dimension_numbers"]
    axis, at_axis = pair.rows_in
    [out_axis] = pair.rows_out
    sizes = pair.params["slice_sizes"]
    columns = dict(zip(dims.start_index_map, _columns_of(pair), strict=True))
    is_by_row = axis in dims.collapsed_slice_dims
    is_by_row &= columns.pop(axis, None) in (order, RowOrder)
    # The other columns of indices must be replicated: each row has the same indices.
    # Along the other dims the gather must take all elements.
    is_by_row &= all(kind in (Copy, Zero) for kind in columns.values())
    others = [i for i in range(len(sizes)) if i != axis and i not in columns]
    is_by_row &= all(sizes[i] == pair.shape(0)[i] for i in others)
    is_each = pair.times_rows(0, axis) == 1 and (at_axis, len(pair.shape(1))) == (0, 2)
    is_plain = isinstance(x, TowerRows) and x.blocks == 1 and out_axis is not None
    if not (is_by_row and is_each and is_plain and _keeps_by_fill(pair, x)):
        raise NotOfOneKindError(f"no rule for elements of {x} at {pair.ins[1]}")
    assert out_axis is not None
    return permuted(x, out_axis, order.order)


@rule("towerjax_take", Copy, ELEMENTS)
def _rows_of_table(pair: EquationPair, x: Copy, at: Kind) -> Kind:
    """Look up rows of a table, as `tj.sparse.take` does: rows.

    The table is replicated, and each row of the batch has its own indices.
    """
    is_table = pair.params["stacked"] == 0 and pair.rows_in[0] is None
    if not is_table or at.power:
        raise NotOfOneKindError(f"no rule for a lookup in {x} by {at}")
    if isinstance(at, Copy) and pair.rows_in[1] is not None:
        at = rows(at.power)
    return x if isinstance(at, Zero) else product_of(x, at)


def _from_table(pair: EquationPair, x: Kind, at: Kind) -> Kind:
    """Take elements at the indices ``at`` of an array without rows."""
    if pair.params["slice_sizes"] != pair.second.params["slice_sizes"]:
        raise NotOfOneKindError(_OTHER_ELEMENTS)
    if isinstance(at, Zero):
        return x
    if isinstance(x, Part):
        if not isinstance(at, Copy):
            raise NotOfOneKindError(f"no rule for some elements of {x}")
        return x
    return product_of(x, at)


def _has_plain_rows(pair: EquationPair, x: Kind, at: Kind) -> bool:
    """Return whether an array has its rows once, and a gather keeps their dim."""
    is_plain = isinstance(x, TowerRows) and x.blocks == blocks_of(at) == 1
    return is_plain and pair.rows_out[0] is not None


def _takes_rows_whole(pair: EquationPair, dims: Any, at: Kind) -> bool:
    """Return whether a gather takes the same elements of all rows."""
    axis, at_axis = pair.rows_in
    assert axis is not None
    is_whole = pair.params["slice_sizes"][axis] == pair.shape(0)[axis]
    is_whole &= axis not in dims.start_index_map and at_axis is None
    return is_whole and isinstance(at, SAME_FOR_ALL)


def _is_batched(pair: EquationPair, dims: Any) -> bool:
    """Return whether the rows of the array and of the indices are one batch dim."""
    axis, at_axis = pair.rows_in
    if axis not in dims.operand_batching_dims:
        return False
    place = dims.operand_batching_dims.index(axis)
    return at_axis == dims.start_indices_batching_dims[place]


def _is_by_own_number(pair: EquationPair) -> bool:
    """Return whether a gather reads row i for row i: one column of indices says so."""
    dims = pair.params["dimension_numbers"]
    axis, at_axis = pair.rows_in
    if axis not in dims.start_index_map or at_axis is None or axis is None:
        return False
    columns = _columns_of(pair)
    number = columns.pop(dims.start_index_map.index(axis))
    is_one = pair.params["slice_sizes"][axis] == 1 and axis in dims.collapsed_slice_dims
    is_even = pair.shape(1)[at_axis] == pair.shape(0)[axis]
    is_known = {*columns} <= {TowerRows, Copy, Zero}
    return is_one and is_even and number is RowNumbers and is_known


_SCATTERS = "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max"
_ADDS = ("scatter-add", "scatter-sub")


@rule(_SCATTERS, Buffer, OF_ONE_TOWER | Columns, OF_ONE_TOWER, copies_as_rows=True)
def _written_to_row(pair: EquationPair, x: Buffer, at: Kind, new: Kind) -> Kind:
    """Scatter to the current row of a loop's buffer."""
    _refuse_function(pair)
    dims = pair.params["dimension_numbers"]
    axis = pair.rows_in[0]
    is_row = dims.scatter_dims_to_operand_dims == (axis,)
    is_row &= axis in dims.inserted_window_dims and isinstance(at, Counter)
    is_row &= pair.name == "scatter" and _is_loop_over(pair, 0, axis)
    if not is_row:
        raise NotOfOneKindError(_AMONG_ROWS)
    return _with_this_row(x, new)


@rule(_SCATTERS, Slots, TowerId, OF_ONE_TOWER | Groups)
def _written_to_slot(pair: EquationPair, x: Slots, at: TowerId, new: Kind) -> Kind:
    """Scatter to the whole entry of this trip's micro-batch."""
    _refuse_function(pair)
    dims = pair.params["dimension_numbers"]
    is_own = dims.scatter_dims_to_operand_dims == dims.inserted_window_dims == (0,)
    is_own &= pair.towers_in[0] == 0 and pair.name == "scatter"
    if not is_own or pair.shape(2) != pair.shape(0)[1:]:
        raise NotOfOneKindError(f"no rule for a write of {new} to {x}")
    return x.replace(entry=new, axis=pair.rows_in[2])


@rule(
    _SCATTERS,
    LINEAR | EXTREME,
    ELEMENTS | RowNumbers | Columns,
    LINEAR | EXTREME,
    copies_as_rows=True,
)
def _scattered(pair: EquationPair, x: Kind, at: Kind, new: Kind) -> Kind:
    """Scatter to rows, each by itself, or add rows to a table.

    A row may be written to by itself: rows stay rows. If each tower adds its rows to a
    table that starts at 0, the table is a part.
    """
    _refuse_function(pair)
    if at.power or max(map(blocks_of, pair.ins)) > 1:
        raise NotOfOneKindError(f"no rule for a write at indices that are {at}")
    if pair.name == "scatter-mul":
        if new.power or not (isinstance(x, ELEMENTS) and isinstance(new, ELEMENTS)):
            raise NotOfOneKindError(f"no rule for elements of {x} times {new}")
        new = new.times_tower(x.power)
    axis, at_axis, new_axis = pair.rows_in
    if axis is not None:
        fits = isinstance(x, Zero | TowerRows | Copy) and isinstance(
            new, Zero | TowerRows | Copy
        )
        if fits and _writes_own_rows(pair, axis, at, new_axis):
            return joined([x, new], "together with")
        raise NotOfOneKindError(_AMONG_ROWS)
    if at_axis is None and new_axis is None and isinstance(at, SAME_FOR_ALL):
        return _written_at_same(pair, x, new)
    dims = pair.params["dimension_numbers"]
    is_of_rows = new_axis is not None and at_axis is not None
    is_of_rows = is_of_rows and new_axis not in dims.update_window_dims
    if (
        is_of_rows
        and isinstance(at, TowerRows | Zero)
        and isinstance(new, TowerRows | Zero)
    ):
        return _into_table(pair, x, at, new)
    raise NotOfOneKindError(f"no rule for a write of {new} to a table")


def _refuse_function(pair: EquationPair) -> None:
    """Raise if a scatter applies a user's function to what it writes."""
    if pair.name == "scatter" and pair.params["update_jaxpr"] is not None:
        raise NotOfOneKindError("no rule for a scatter with a function of the user's")


def _written_at_same(pair: EquationPair, x: Kind, new: Kind) -> Kind:
    """Write at the same places on all towers.

    The array and what is written must be of kinds that fit, and of one power.
    """
    if pair.name in _ADDS:
        return added([x, new])
    are_elements = isinstance(x, ELEMENTS) and isinstance(new, ELEMENTS)
    if pair.name != "scatter" and not are_elements:
        raise NotOfOneKindError(f"no rule for a write of {new} to a table")
    return joined([x, new], "together with")


def _into_table(pair: EquationPair, x: Kind, at: Kind, new: Kind) -> Kind:
    """``sum_t sum_i x_ti``: each tower adds its rows to a table, which is a part.

    Instead of a sum, the table may also get the largest or smallest of the rows.
    """
    if pair.name in _ADDS and isinstance(x, Zero | Part | Copy):
        if isinstance(new, Zero):
            return x
        if pair.has_padding(new.zeros):
            raise NotOfOneKindError("padding counts in a sum over rows")
        return added([x, part(new.power)])
    is_each = isinstance(at.fact, NumberInBatch) and not _is_flag(pair)
    is_each &= pair.name == "scatter" and "CLIP" not in str(pair.params["mode"])
    if is_each and isinstance(x, Zero):
        # Each row of the batch is written by one tower; the others have 0 there.
        return part(new.power)
    is_even = (
        isinstance(new, TowerRows) and x.power == new.power and not pair.sizes.padded
    )
    if isinstance(x, Copy) and is_even:
        if pair.name == "scatter-max":
            return Maximum(x.power)
        if pair.name == "scatter-min":
            return Minimum(x.power)
    raise NotOfOneKindError(f"no rule for a write of {new} to a table")


def _writes_own_rows(
    pair: EquationPair, axis: int, at: Kind, new_axis: int | None
) -> bool:
    """Return whether a scatter writes each row to its own place."""
    dims = pair.params["dimension_numbers"]
    at_axis = pair.rows_in[1]
    if axis in dims.operand_batching_dims:
        place = dims.operand_batching_dims.index(axis)
        is_one = at_axis == dims.scatter_indices_batching_dims[place]
        return isinstance(at, ELEMENTS) and is_one and new_axis is not None
    if axis in dims.scatter_dims_to_operand_dims:
        if at_axis is None:
            return False
        columns = _columns_of(pair)
        number = columns.pop(dims.scatter_dims_to_operand_dims.index(axis))
        is_own = number is RowNumbers and axis in dims.inserted_window_dims
        is_own &= {*columns} <= {TowerRows, Copy, Zero}
        return is_own and pair.shape(1)[at_axis] == pair.shape(0)[axis]
    gone = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    window = [i for i in range(len(pair.shape(0))) if i not in gone]
    if at_axis is not None or new_axis is None or axis not in window:
        return False
    is_here = new_axis == dims.update_window_dims[window.index(axis)]
    is_whole = pair.shape(2)[new_axis] == pair.shape(0)[axis]
    return isinstance(at, SAME_FOR_ALL) and is_here and is_whole
