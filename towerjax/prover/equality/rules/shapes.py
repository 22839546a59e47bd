"""Rules for equations that reshape elements or take some of them."""

import dataclasses
import math
from fractions import Fraction
from typing import Any, TypeAlias

from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    EXTREME,
    LINEAR,
    SAME_FOR_ALL,
    ZERO,
    AtLeast,
    Columns,
    Copy,
    Counter,
    FirstRow,
    FromFirstRow,
    GroupDims,
    Groups,
    IsFull,
    Key,
    Kind,
    Mean,
    NotOfOneKindError,
    Part,
    Row,
    RowNumbers,
    RowOrder,
    Size,
    TowerId,
    TowerRows,
    Valid,
    Zero,
    blocks_of,
    copy,
    joined,
    permuted,
    rows,
)
from towerjax.prover.equality.kinds.stacked import RowsInTurn, Stacked
from towerjax.prover.equality.rules.rules import OF_ONE_TOWER, refused, rule

_OF_EACH_ROW: TypeAlias = Valid | IsFull | Size
"""Kinds of a tower's numbers that are the same for each of its rows."""


@rule("iota", every=Kind)
def _counted_up(pair: EquationPair) -> Kind:
    """Count ``0, 1, 2, ...``: along a dim of rows, the rows' indices.

    Along a dim of towers it is an array of all towers' indices. Otherwise it is
    replicated.
    """
    if pair.towers_out[0] == 0 and len(pair.out_shape()) == 1:
        return Stacked(of=TowerId)
    is_along = pair.params["dimension"] == pair.rows_out[0]
    return RowNumbers() if is_along else copy()


@rule("empty empty2", every=Kind)
def _not_written(pair: EquationPair) -> Kind:
    """Take an array that is not yet written as replicated.

    No program reads elements that it has not written.
    """
    return copy()


@rule("platform_index", every=Kind)
def _platform_of_all(pair: EquationPair) -> Kind:
    """All towers have one platform, whose index is replicated."""
    return copy()


@rule("random_wrap random_unwrap", OF_ONE_TOWER)
def _key_as_bits(pair: EquationPair, x: Kind) -> Kind:
    """Read a random key as bits, or bits as a key; the kind stays."""
    return x


def _axis_after(pair: EquationPair) -> int | None:
    """Find the dim along which a broadcast puts the rows of its operand."""
    [axis] = pair.rows_in
    return None if axis is None else pair.params["broadcast_dimensions"][axis]


def _size(shape: tuple[Any, ...]) -> Any:
    """List the sizes of a shape other than 1, a key for its number of elements."""
    return sorted(n for n in shape if n != 1)


def _is_of_one_size(pair: EquationPair) -> bool:
    """Return whether a result has as many elements as its operand."""
    return _size(pair.shape(0)) == _size(pair.out_shape())


def _as_repeated(pair: EquationPair, x: Kind) -> Kind:
    """Repeat a value: it is another value if it has more elements."""
    return x if _is_of_one_size(pair) else x.replace(fact=None)


@rule(
    "broadcast_in_dim", Copy | Zero | _OF_EACH_ROW | FromFirstRow, knows_identity=True
)
def _broadcast_same(pair: EquationPair, x: Kind) -> Kind:
    """Broadcast a value that is constant along rows; the kind stays.

    A replicated value may also be repeated for each tower, which makes an array of all
    towers' values.
    """
    [r_out] = pair.rows_out
    dims = pair.params["broadcast_dimensions"]
    has_rows = r_out is not None or pair.rows_in[0] is not None
    if isinstance(x, Copy) and pair.towers_out[0] == 0 and not has_rows:
        if 0 not in dims and pair.out_shape()[0] == pair.sizes.towers[0]:
            return Stacked(x.power, of=Copy)
    if _axis_after(pair) not in (None, r_out):
        raise refused(pair)
    return _as_repeated(pair, x)


@rule(
    "broadcast_in_dim",
    TowerRows
    | Row
    | Part
    | EXTREME
    | Key
    | RowNumbers
    | RowOrder
    | Counter
    | TowerId
    | FirstRow,
    knows_identity=True,
)
def _broadcast(pair: EquationPair, x: Kind) -> Kind:
    """Repeat a value along new dims; the kind stays."""
    if _axis_after(pair) != pair.rows_out[0]:
        raise refused(pair)
    return _as_repeated(pair, x)


@rule("broadcast_in_dim", Mean, knows_identity=True)
def _broadcast_mean(pair: EquationPair, x: Mean) -> Kind:
    """Give a mean new dims of size 1; refuse to repeat it."""
    if not _is_of_one_size(pair):
        raise refused(pair)
    return x


@rule("tile", LINEAR, knows_identity=True)
def _repeated(pair: EquationPair, x: Kind) -> Kind:
    """Tile a value; along the dim of rows, repeat its blocks."""
    [r_in] = pair.rows_in
    [r_out] = pair.rows_out
    times = [*zip(pair.params["reps"], pair.second.params["reps"], strict=True)]
    is_one = all(both == (1, 1) for both in times)
    repeated = x if is_one else x.replace(fact=None)
    changed = [i for i, (m, n) in enumerate(times) if m != n]
    if changed:
        from_one = changed == [r_out] and pair.sizes_along(0, changed[0]) == (1, 1)
        if from_one:
            return repeated
        raise NotOfOneKindError(f"no rule for {x} repeated along rows")
    if r_in != r_out:
        raise NotOfOneKindError(f"no rule for a tile of {x}")
    if r_in is None or not isinstance(x, TowerRows):
        return repeated
    return repeated.replace(blocks=x.blocks * times[r_in][0])


@rule("reshape", Zero | _OF_EACH_ROW, knows_identity=True)
def _reshaped_same(pair: EquationPair, x: Kind) -> Kind:
    """Reshape what is constant along rows; the kind stays."""
    return x


@rule(
    "reshape",
    Part | Row | EXTREME | Counter | TowerId | FirstRow | FromFirstRow,
    knows_identity=True,
)
def _reshaped_without_rows(pair: EquationPair, x: Kind) -> Kind:
    """Reshape a value that has no dim of rows; the kind stays."""
    if pair.rows_out[0] is not None:
        raise refused(pair)
    return x


@rule("reshape", Mean | AtLeast, knows_identity=True)
def _reshaped_number(pair: EquationPair, x: Kind) -> Kind:
    """Add or remove dims of size 1; refuse any other reshape.

    The kind stays.
    """
    if pair.rows_out[0] is not None or not _is_of_one_size(pair):
        raise refused(pair)
    return x


@rule("reshape", Copy, knows_identity=True)
def _reshaped_copy(pair: EquationPair, x: Copy) -> Kind:
    """Reshape a replicated value.

    It stays replicated. If the reshape splits a dim of the batch's rows by towers, it
    is an array of all towers' values.
    """
    pair = _in_order_of_read(pair)
    [r_in] = pair.rows_in
    [r_out] = pair.rows_out
    if r_in is None and r_out is None:
        return x
    if pair.towers_out[0] is not None and r_in is None:
        return _split_over_towers(pair, x)
    if r_in is None or r_out is None:
        raise refused(pair)
    return x if _stays_as_one(pair) else _reshaped_rows(pair, rows(x.power))


@rule("reshape", RowNumbers | Key | RowOrder, knows_identity=True)
def _reshaped_numbers(pair: EquationPair, x: Kind) -> Kind:
    """Reshape the rows' indices or keys; the kind stays.

    The reshape may only add or remove dims of size 1.
    """
    pair = _in_order_of_read(pair)
    has_rows = [axis is not None for axis in (*pair.rows_in, *pair.rows_out)]
    if not any(has_rows) or (all(has_rows) and _stays_as_one(pair)):
        return x
    raise refused(pair)


@rule("reshape", TowerRows, knows_identity=True)
def _reshaped_to_rows(pair: EquationPair, x: TowerRows) -> Kind:
    """Reshape rows to rows, or to rows along several dims."""
    pair = _in_order_of_read(pair)
    if pair.rows_out[0] is None:
        raise refused(pair)
    return x if _stays_as_one(pair) else _reshaped_rows(pair, x)


@rule("reshape", Groups, knows_identity=True)
def _from_groups(pair: EquationPair, x: Groups) -> Kind:
    """Reshape rows along several dims to rows along one."""
    pair = _in_order_of_read(pair)
    [groups] = pair.ins
    assert isinstance(groups, Groups)
    layout = groups.layout  # that of ``x``, or with ``order="F"`` transposed
    old = pair.shape(0)
    new = pair.out_shape()
    dims = layout.dims
    start = dims[0]
    end = dims[-1] + 1
    is_whole = layout.by_row and layout.order is None
    is_whole &= dims == tuple(range(start, end)) and pair.rows_out[0] == start
    is_whole &= old[:start] == new[:start] and old[end:] == new[start + 1 :]
    if not is_whole:
        raise refused(pair)
    return rows(x.power)


@rule("reshape", Stacked, knows_identity=True)
def _joined_over_towers(pair: EquationPair, x: Stacked) -> Kind:
    """Reshape all towers' rows ``[T, b, ...]`` to the batch ``[B, ...]``.

    It is replicated: all towers have the rows of the batch. Rows that the towers have
    in turn are joined from ``[b, T, ...]``.
    """
    pair = _in_order_of_read(pair)
    [towers] = pair.towers_in
    [row_dim] = pair.rows_in
    if towers is None or row_dim is None or pair.sizes.padded:
        raise refused(pair)
    old = pair.shape(0)
    start = min(towers, row_dim)
    of = TowerRows
    if start == row_dim:
        first, second = pair.sizes_along(0, row_dim)
        of = RowsInTurn((first, second))
    new = (*old[:start], old[towers] * old[row_dim], *old[start + 2 :])
    is_joined = abs(towers - row_dim) == 1 and pair.out_shape() == new
    is_joined &= old[towers] == pair.sizes.towers[0]
    is_whole = pair.rows_out[0] is None and pair.towers_out[0] is None
    if x.of != of or not (is_joined and is_whole):
        raise refused(pair)
    return copy(x.power)


def _reshaped_rows(pair: EquationPair, x: TowerRows) -> Kind:
    """Reshape rows, block by block.

    It is rows if each row, and each block of all rows, stays together along one dim.
    Otherwise it is rows along several dims.
    """
    [r_in] = pair.rows_in
    blocks = _blocks_after(pair, x.blocks, r_in, pair.rows_out[0])
    if blocks is not None:
        return x.replace(blocks=blocks)
    assert r_in is not None
    return _as_groups(pair, x, r_in, pair.rows_out[0])


def _stays_as_one(pair: EquationPair) -> bool:
    """Return whether a reshape only adds or removes dims of size 1."""
    [r_in] = pair.rows_in
    [r_out] = pair.rows_out
    apart = _ones_apart(pair.shape(0), r_in), _ones_apart(pair.out_shape(), r_out)
    return _is_of_one_size(pair) and apart[0] == apart[1]


def _in_order_of_read(pair: EquationPair) -> EquationPair:
    """Turn a reshape with ``order="F"`` into one of its transposed operand."""
    return pair if pair.params["dimensions"] is None else _transposed_before(pair)


@dataclasses.dataclass(frozen=True)
class _OfTransposed(EquationPair):
    """A reshape whose operand appears with its dims in the order of reading."""

    def shape(self, operand: int) -> tuple[Any, ...]:
        """Look up the shape of the transposed operand in the first program."""
        shape = super().shape(operand)
        return tuple(shape[i] for i in self.params["dimensions"])

    def sizes_along(self, operand: int, axis: int) -> tuple[Any, Any]:
        """Look up the sizes of a dim of the transposed operand, in both programs."""
        return super().sizes_along(operand, self.params["dimensions"][axis])


def _transposed_before(pair: EquationPair) -> EquationPair:
    """Transpose a reshape's operand: its dims come in the order of reading."""
    place = {old: new for new, old in enumerate(pair.params["dimensions"])}
    [x] = pair.ins
    if isinstance(x, Groups):
        dims = tuple(place[i] for i in x.layout.dims)
        x = x.replace(layout=x.layout._replace(dims=dims))
    moved: dict[str, Any] = {
        name: [None if axis is None else place[axis] for axis in getattr(pair, name)]
        for name in ("rows_in", "towers_in")
    }
    fields: dict[str, Any] = {
        x.name: getattr(pair, x.name) for x in dataclasses.fields(pair)
    }
    moved["ins"] = [x]
    return _OfTransposed(**(fields | moved))


def _split_over_towers(pair: EquationPair, x: Kind) -> Kind:
    """Reshape a batch ``[B, ...]`` to all towers' rows ``[T, b, ...]``.

    If it is reshaped to ``[b, T, ...]``, the towers get the rows in turn.
    """
    shape = pair.out_shape()
    old = pair.shape(0)
    [towers] = pair.towers_out
    [row_dim] = pair.rows_out
    start = min(towers or 0, row_dim or 0)
    is_split = row_dim is not None and abs((towers or 0) - row_dim) == 1
    is_split &= (shape[:start], shape[start + 2 :]) == (old[:start], old[start + 1 :])
    is_all = shape[towers or 0] == pair.sizes.towers[0]
    if not (is_split and is_all) or pair.sizes.padded:
        raise refused(pair)
    if start == towers:
        return Stacked(x.power, of=TowerRows)
    avals: list[Any] = [eqn.outvars[0].aval for eqn in (pair.first, pair.second)]
    first, second = [aval.shape[row_dim] for aval in avals]
    return Stacked(x.power, of=RowsInTurn((first, second)))


def _ones_apart(shape: tuple[Any, ...], axis: Any) -> tuple[Any, Any]:
    """List the sizes before a dim and those after it, without any 1."""
    sides = shape[:axis], shape[axis + 1 :]
    before, after = [[n for n in side if n != 1] for side in sides]
    return before, after


def _blocks_after(pair: EquationPair, old: int, r_in: Any, r_out: Any) -> int | None:
    """Count how often the new dim of rows repeats all rows, after a reshape.

    The result is None if the reshape cuts a row, or a block of all rows.
    """
    before = math.prod(pair.shape(0)[:r_in]) * old
    blocks, left = divmod(before, math.prod(pair.out_shape()[:r_out]))
    if left or not blocks:
        return None
    avals: list[Any] = [x.outvars[0].aval for x in (pair.first, pair.second)]
    pairs = [x.shape[r_out] for x in avals]
    times = pair.sizes.times(*pairs)
    of_block = Fraction(times or 0) / blocks
    if pair.sizes.padded or pair.walk.dealt is not TowerRows:
        # Rows that lie side by side are padding, or others for another number of
        # towers. So each must stay alone.
        of_old = pair.times_rows(0, r_in) or Fraction(0)
        return blocks if (of_block.denominator, of_old.denominator) == (1, 1) else None
    return blocks if not any(n % blocks for n in pairs) else None


def _as_groups(pair: EquationPair, x: TowerRows, r_in: int, r_out: Any) -> Kind:
    """Split the dim of rows into several dims; refuse another order.

    Other dims may have the sizes of the split ones in the first program alone, so the
    dim that differs between the programs must be one of these.
    """
    old = pair.shape(0)
    new = pair.out_shape()
    start = r_in
    end = len(new) - (len(old) - 1 - r_in)
    is_kept = old[:r_in] == new[:start] and old[r_in + 1 :] == new[end:]
    is_kept &= start <= r_out < end
    if not is_kept or x.blocks > 1:
        raise NotOfOneKindError("{its} rows are put in another order")
    return Groups(x.power, layout=GroupDims((*range(start, end),), True))


@rule("concatenate", every=OF_ONE_TOWER | Columns | RowOrder)
def _put_together(pair: EquationPair, *ins: Kind) -> Kind:
    """Concatenate values of one kind.

    Along the dim of rows, blocks of all rows are joined to more blocks. Arrays without
    elements are ignored.
    """
    axis = pair.params["dimension"]
    some = [i for i in range(len(ins)) if pair.sizes_along(i, axis) != (0, 0)]
    if len(some) == 1:
        return ins[some[0]]
    if axis in pair.rows_in:
        return _rows_joined(pair, axis)
    if any(isinstance(x, RowNumbers | Columns | RowOrder) for x in ins):
        return _columns(pair, axis)
    if axis == pair.rows_out[0]:
        raise NotOfOneKindError("arrays without rows are joined to a dim of rows")
    return joined(ins, "together with")


def _rows_joined(pair: EquationPair, axis: int) -> Kind:
    """Join arrays of rows along their dim of rows."""
    if any(r != axis for r in pair.rows_in):
        raise NotOfOneKindError("{its} rows are joined with other values")
    ins = [rows(x.power) if isinstance(x, Copy) else x for x in pair.ins]
    if other := [x for x in ins if not isinstance(x, TowerRows | Zero)]:
        raise NotOfOneKindError(f"{{its}} rows are joined with {other[0]}")
    of_rows = [x for x in ins if isinstance(x, TowerRows)]
    if not of_rows:
        return ZERO
    times = [pair.times_rows(i, axis) or Fraction(0) for i in range(len(ins))]
    pairs = zip(times, ins, strict=True)
    sizes = {n / x.blocks for n, x in pairs if isinstance(x, TowerRows)}
    blocks = [n / max(sizes) for n in times]
    if len(sizes) > 1 or any(n.denominator > 1 for n in blocks):
        raise NotOfOneKindError("rows are joined with rows in another order")
    both = joined([x.replace(blocks=1) for x in of_rows], "together with")
    return both.replace(blocks=int(sum(blocks)))


def _columns(pair: EquationPair, axis: int) -> Kind:
    """Join columns to an array of indices, some of which index rows."""
    if axis != len(pair.out_shape()) - 1:
        raise NotOfOneKindError("no rule for these indices of {its} rows")
    columns: list[type[Kind] | RowOrder] = []
    for i, x in enumerate(pair.ins):
        size = pair.shape(i)[axis]
        if isinstance(x, Columns):
            columns += x.columns
        elif isinstance(x, RowOrder) and size == 1:
            columns.append(x)
        elif isinstance(x, RowNumbers | TowerRows | SAME_FOR_ALL) and not x.power:
            if blocks_of(x) > 1:
                raise NotOfOneKindError("no rule for these indices of {its} rows")
            columns += [type(x)] * size
        else:
            raise NotOfOneKindError("no rule for these indices of {its} rows")
    return Columns(columns=tuple(columns))


@rule("stack", every=LINEAR | EXTREME, copies_as_rows=True)
def _stacked_up(pair: EquationPair, *ins: Kind) -> Kind:
    """Stack arrays along a new dim; their kinds must fit."""
    return joined(ins, "together with")


@rule("unstack", LINEAR | Key, copies_as_rows=True)
def _unstacked(pair: EquationPair, x: Kind) -> Kind:
    """Take apart the entries along a dim without rows; the kind stays."""
    _refuse_some_rows(pair, pair.params["axis"], x)
    return x


@rule("rev", LINEAR | Key, copies_as_rows=True)
def _reversed(pair: EquationPair, x: Kind) -> Kind:
    """Reverse a value; reversed rows are rows in another order."""
    along = pair.rows_in[0]
    for axis in pair.params["dimensions"]:
        if axis != along or not isinstance(x, TowerRows) or x.blocks > 1:
            _refuse_some_rows(pair, axis, x)
    if along is None or not isinstance(x, TowerRows):
        return x
    if along not in pair.params["dimensions"]:
        return x
    order = pair.walk.new_identity()
    return permuted(x, along, (order, None))


def _refuse_some_rows(pair: EquationPair, axis: int, x: Kind) -> None:
    """Raise if ``axis``, along which elements are picked, is the dim of rows."""
    if axis == pair.rows_in[0] and not isinstance(x, Zero):
        raise NotOfOneKindError("only some rows are taken, or in another order")


@rule("split", LINEAR | Key, copies_as_rows=True)
def _split_apart(pair: EquationPair, x: Kind) -> list[Kind] | Kind:
    """Split a value into pieces, which must be whole blocks along rows."""
    axis = pair.params["axis"]
    sizes = [eqn.params["sizes"] for eqn in (pair.first, pair.second)]
    if isinstance(x, Zero):
        return x
    if axis != pair.rows_in[0]:
        if sizes[0] != sizes[1]:
            raise NotOfOneKindError("the sizes of pieces depend on the number of rows")
        return x
    of_block = Fraction(pair.times_rows(0, axis) or 0) / blocks_of(x)
    pieces = []
    for size, other in zip(*sizes, strict=True):
        times = pair.sizes.times(size, other)
        blocks = (times or Fraction(0)) / of_block
        if not isinstance(x, TowerRows) or not blocks or blocks.denominator != 1:
            raise NotOfOneKindError("only some of {its} rows are taken")
        pieces.append(x.replace(blocks=int(blocks)))
    return pieces


@rule("slice", LINEAR | Key | RowNumbers | _OF_EACH_ROW, copies_as_rows=True)
def _sliced(pair: EquationPair, x: Kind) -> Kind:
    """Slice a value; the kind stays.

    Along the dim of rows, it must take whole blocks of all rows. Along other dims it
    may take any elements.
    """
    [axis] = pair.rows_in
    if isinstance(x, Zero):
        return x
    starts, ends, steps = [
        [eqn.params[key] for eqn in (pair.first, pair.second)]
        for key in ("start_indices", "limit_indices", "strides")
    ]
    for i in range(len(pair.shape(0))):
        bounds = [(low[i], high[i]) for low, high in zip(starts, ends, strict=True)]
        if i != axis and bounds[0] != bounds[1]:
            raise NotOfOneKindError(
                "which elements are taken depends on the number of rows"
            )
    if isinstance(x, RowNumbers) and len(pair.shape(0)) != 1:
        raise NotOfOneKindError(f"no rule for some elements of {x}")
    if axis is None:
        return x
    is_each = [step is None or step[axis] == 1 for step in steps] == [True, True]
    pairs = zip(pair.sizes_along(0, axis), starts, ends, strict=True)
    bounds = [(size, low[axis], high[axis]) for size, low, high in pairs]
    if is_each and all((low, high) == (0, size) for size, low, high in bounds):
        return x
    low, high = [_in_blocks(pair, x, [b[i] for b in bounds], axis) for i in (1, 2)]
    if not isinstance(x, TowerRows) or not is_each or low is None or high is None:
        raise NotOfOneKindError("only some of {its} rows are taken")
    return x.replace(blocks=high - low)


def _in_blocks(pair: EquationPair, x: Kind, at: list[Any], axis: int) -> int | None:
    """Count the blocks before an offset along the rows; None if inside one.

    A block is all rows of the tower.
    """
    of_block = Fraction(pair.times_rows(0, axis) or 0) / blocks_of(x)
    if all(n == 0 for n in at):
        return 0
    times = pair.sizes.times(*at)
    number = None if times is None or not of_block else times / of_block
    return int(number) if number is not None and number.denominator == 1 else None


@rule("pad", LINEAR, SAME_FOR_ALL, copies_as_rows=True)
def _padded(pair: EquationPair, x: Kind, filler: Kind) -> Kind:
    """Pad a value along dims without rows; the kind stays."""
    axis = pair.rows_in[0]
    if axis != pair.rows_out[0]:
        raise NotOfOneKindError("{its} rows are joined with other values")
    if axis is not None and tuple(pair.params["padding_config"][axis]) != (0, 0, 0):
        raise NotOfOneKindError("{its} rows are joined with other values")
    return joined([x, filler], "together with")
