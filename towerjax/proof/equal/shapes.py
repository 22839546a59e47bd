"""Rules for equations that reshape elements or take some of them."""

import dataclasses
from fractions import Fraction
from typing import Any

from towerjax.proof.equal.constants import size_of_rows
from towerjax.proof.equal.equation_pair import (
    EquationPair,
    is_size,
    rule,
    size_before,
)
from towerjax.proof.equal.kinds import (
    LINEAR,
    SIZE,
    ZERO,
    Groups,
    Kind,
    Known,
    NotOfOneKindError,
    RowsInTurn,
    copy,
    joined,
    permuted,
    rows,
)
from towerjax.proof.equal.nouns import nouns

_MOVED = LINEAR | {Kind.KEY, Kind.NUMBERS}
_TOWER_NUMBERS = {Kind.COUNTER, Kind.TOWER, Kind.FIRST_ROW, Kind.VALID, Kind.IS_FULL}
_TOWER_NUMBERS |= {Kind.NEXT, Kind.SIZE}
# Numbers of a tower that are the same for each row.
_OF_EACH_ROW = {Kind.VALID, Kind.IS_FULL, Kind.SIZE}


_LAID_AS_ONE = (Kind.NUMBERS, Kind.ROWS, Kind.KEY, Kind.COPY, Kind.ORDER)


@rule("iota")
def _counted_up(pair: EquationPair) -> Known:
    """The row numbers along a dim of rows; otherwise a constant."""
    is_along = pair.params["dimension"] == pair.rows_out[0]
    if pair.towers_out[0] == 0 and len(pair.out_shape()) == 1:
        return Known(Kind.STACKED, note=Kind.TOWER)
    return Known(Kind.NUMBERS) if is_along else copy()


@rule("dim_as_value", knows_identity=True)
def _size_as_number(pair: EquationPair) -> Known:
    """The number of a tower's rows, which is that of the batch divided by T."""
    sizes = [x.params["dim"] for x in (pair.first, pair.second)]
    times = pair.sizes.times(*sizes)
    if times == 1:
        return size_of_rows(pair.sizes)
    if pair.sizes.are_of_tower(*sizes):
        return SIZE
    if times is None or pair.sizes.padded:
        raise NotOfOneKindError("a size depends on the number of rows")
    return copy(-1)


@rule("empty empty2")
def _not_written(pair: EquationPair) -> Known:
    """A copy, because no program reads elements that it has not written."""
    return copy()


@rule("platform_index")
def _platform_of_all(pair: EquationPair) -> Known:
    """A copy, because all towers are on devices of one platform."""
    return copy()


@rule("random_wrap random_unwrap")
def _key_as_bits(pair: EquationPair) -> Known:
    """The same key, as bits or as a key."""
    return pair.ins[0]


@rule("broadcast_in_dim", knows_identity=True, kinds=[Kind.ORDER])
def _broadcast(pair: EquationPair) -> Known:
    """The operand, repeated along new dims; rows stay along their dim."""
    x = pair.ins[0]
    [r_in, *_] = pair.rows_in
    [r_out] = pair.rows_out
    dims = pair.params["broadcast_dimensions"]
    moved = None if r_in is None else dims[r_in]
    is_one = _size(pair.shape(0)) == _size(pair.out_shape())
    kept = x if is_one else x._replace(fact=None)
    if x.kind is Kind.COPY and pair.towers_out[0] == 0 and r_in is r_out is None:
        if 0 not in dims and pair.out_shape()[0] == pair.sizes.towers[0]:
            return Known(Kind.STACKED, x.power, note=Kind.COPY)
    if x.kind in (Kind.COPY, Kind.ZERO):
        if r_in is None or moved == r_out:
            return kept
    if x.kind in _OF_EACH_ROW and moved in (None, r_out):
        return kept
    movable = {*_MOVED, Kind.COUNTER, Kind.TOWER, Kind.FIRST_ROW}
    movable |= {Kind.MAXIMUM, Kind.MINIMUM, Kind.ORDER}
    if x.kind not in movable or moved != r_out:
        if not (x.kind is Kind.MEAN and is_one):
            raise NotOfOneKindError(f"{x} is repeated along the rows or another dim")
    return kept


def _size(shape: tuple[Any, ...]) -> Any:
    """The sizes that are not 1, as texts, which stand for the number of elements."""
    return sorted(map(str, (x for x in shape if str(x) != "1")))


@rule("tile", knows_identity=True)
def _repeated(pair: EquationPair) -> Known:
    """The operand, repeated; along rows its blocks are repeated."""
    [x] = pair.ins
    [r_in] = pair.rows_in
    [r_out] = pair.rows_out
    each = [*zip(pair.params["reps"], pair.second.params["reps"], strict=True)]
    is_one = all(both == (1, 1) for both in each)
    kept = x if is_one else x._replace(fact=None)
    changed = [i for i, (m, n) in enumerate(each) if m != n]
    if changed:
        from_one = changed == [r_out] and pair.sizes_along(0, changed[0]) == (1, 1)
        if from_one and x.kind in (Kind.COPY, Kind.ZERO):
            return kept
        raise NotOfOneKindError(f"{x} is repeated along rows")
    if x.kind not in LINEAR or r_in != r_out:
        raise NotOfOneKindError(f"{x} is repeated")
    if r_in is None or x.kind is not Kind.ROWS:
        return kept
    return kept._replace(blocks=x.blocks * each[r_in][0])


@rule(
    "reshape",
    knows_identity=True,
    kinds=[Kind.STACKED, Kind.SPREAD, Kind.ORDER],
)
def _reshaped(pair: EquationPair) -> Known:
    """The operand in another shape; blocks of rows stay blocks, if no row is cut."""
    if pair.params["dimensions"] is not None:  # as for order="F"
        pair = _transposed_before(pair)
    x = pair.ins[0]
    [r_in] = pair.rows_in
    [r_out] = pair.rows_out
    if x.kind is Kind.STACKED:
        return _joined_over_towers(pair, x)
    if x.kind is Kind.SPREAD:
        return _from_groups(pair, x, r_out)
    is_one = _size(pair.shape(0)) == _size(pair.out_shape())
    if r_in is None and r_out is None:
        if x.kind in {*_MOVED, *_TOWER_NUMBERS, Kind.MAXIMUM, Kind.MINIMUM} or is_one:
            return x
        raise NotOfOneKindError(f"no rule for {x} in another shape")
    if x.kind is Kind.ZERO or x.kind in _OF_EACH_ROW:
        return x
    if x.kind is Kind.COPY and pair.towers_out[0] is not None and r_in is None:
        return _split_over_towers(pair, x)
    if r_in is None or r_out is None:
        raise NotOfOneKindError(f"no rule for {x} in another shape")
    if is_one and x.kind in _LAID_AS_ONE:
        if _ones_apart(pair.shape(0), r_in) == _ones_apart(pair.out_shape(), r_out):
            return x
    x = rows(x.power) if x.kind is Kind.COPY else x
    if x.kind is not Kind.ROWS:
        raise NotOfOneKindError(f"no rule for {x} in another shape")
    blocks = _blocks_after(pair, x.blocks, r_in, r_out)
    if blocks is not None:
        return x._replace(blocks=blocks)
    return _as_groups(pair, x, r_in)


@dataclasses.dataclass(frozen=True)
class _OfTransposed(EquationPair):
    """A reshape whose operand is transposed before."""

    def shape(self, operand: int) -> tuple[Any, ...]:
        """The shape of the transposed operand in the first program."""
        shape = super().shape(operand)
        return tuple(shape[i] for i in self.params["dimensions"])

    def sizes_along(self, operand: int, axis: int) -> tuple[Any, Any]:
        """The sizes of a dim of the transposed operand, in both programs."""
        return super().sizes_along(operand, self.params["dimensions"][axis])


def _transposed_before(pair: EquationPair) -> EquationPair:
    """The reshape, as one of the operand with its dims in the order that it reads."""
    place = {old: new for new, old in enumerate(pair.params["dimensions"])}
    [x] = pair.ins
    if x.kind is Kind.SPREAD:
        dims = tuple(place[i] for i in x.note.dims)
        x = x._replace(note=x.note._replace(dims=dims))
    moved: dict[str, Any] = {
        name: [None if axis is None else place[axis] for axis in getattr(pair, name)]
        for name in ("rows_in", "towers_in")
    }
    fields: dict[str, Any] = {
        x.name: getattr(pair, x.name) for x in dataclasses.fields(pair)
    }
    moved["ins"] = [x]
    return _OfTransposed(**(fields | moved))


def _split_over_towers(pair: EquationPair, x: Known) -> Known:
    """The rows of the batch, ``[B, ...]``, as rows of all towers, ``[T, b, ...]``.

    As ``[b, T, ...]`` towers get them in turn.
    """
    shape = pair.out_shape()
    old = pair.shape(0)
    [towers] = pair.towers_out
    [own] = pair.rows_out
    start = min(towers or 0, own or 0)
    is_split = own is not None and abs((towers or 0) - own) == 1
    is_split &= (shape[:start], shape[start + 2 :]) == (old[:start], old[start + 1 :])
    is_all = shape[towers or 0] == pair.sizes.towers[0]
    if not (is_split and is_all) or pair.sizes.padded:
        raise NotOfOneKindError(f"no rule for {x} in another shape")
    note = Kind.ROWS if start == towers else RowsInTurn()
    return Known(Kind.STACKED, x.power, note=note)


def _joined_over_towers(pair: EquationPair, x: Known) -> Known:
    """The rows of all towers, ``[T, b, ...]``, as rows of the batch, ``[B, ...]``."""
    is_first = pair.towers_in[0] == 0 and pair.rows_in[0] == 1
    is_first &= pair.shape(0)[0] == pair.sizes.towers[0]
    is_joined = pair.shape(0)[2:] == pair.out_shape()[1:] and is_first
    is_whole = pair.rows_out[0] is None and pair.towers_out[0] is None
    if x.note is not Kind.ROWS or not (is_joined and is_whole) or pair.sizes.padded:
        raise NotOfOneKindError(f"no rule for {x} in another shape")
    return copy(x.power)


def _ones_apart(shape: tuple[Any, ...], axis: int) -> tuple[Any, Any]:
    """The sizes that are not 1, before and after a dim."""
    sides = shape[:axis], shape[axis + 1 :]
    before, after = [[str(n) for n in side if str(n) != "1"] for side in sides]
    return before, after


def _blocks_after(pair: EquationPair, old: int, r_in: Any, r_out: Any) -> int | None:
    """The number of blocks of the new dim of rows; None if a block or row is cut."""
    before = size_before(pair.shape(0), r_in) * old
    blocks, left = divmod(before, size_before(pair.out_shape(), r_out))
    if left or not blocks:
        return None
    avals: list[Any] = [x.outvars[0].aval for x in (pair.first, pair.second)]
    pairs = [x.shape[r_out] for x in avals]
    times = pair.sizes.times(*pairs)
    each = Fraction(times or 0) / blocks
    if pair.sizes.padded or not is_size(pairs[0]):
        of_old = pair.times_rows(0, r_in) or Fraction(0)
        return blocks if (each.denominator, of_old.denominator) == (1, 1) else None
    return blocks if not any(n % blocks for n in pairs) else None


def _as_groups(pair: EquationPair, x: Known, r_in: int) -> Known:
    """Groups of rows along the dims into which the dim of rows was split."""
    old = pair.shape(0)
    new = pair.out_shape()
    start = r_in
    end = len(new) - (len(old) - 1 - r_in)
    is_kept = old[:r_in] == new[:start] and old[r_in + 1 :] == new[end:]
    if not is_kept or start >= end or x.blocks > 1:
        raise NotOfOneKindError(f"{nouns().its} rows are put in another order")
    return Known(Kind.SPREAD, x.power, note=Groups((*range(start, end),), True))


def _from_groups(pair: EquationPair, x: Known, r_out: int | None) -> Known:
    """Groups of rows as one dim again, in their original order."""
    old = pair.shape(0)
    new = pair.out_shape()
    (dims, each, order) = x.note
    start = dims[0]
    end = dims[-1] + 1
    is_whole = each and dims == tuple(range(start, end)) and r_out == start
    is_whole &= order is None
    is_whole &= old[:start] == new[:start] and old[end:] == new[start + 1 :]
    if not is_whole:
        raise NotOfOneKindError(f"no rule for {x} in another shape")
    return rows(x.power)


@rule("concatenate", kinds=[Kind.COLUMNS, Kind.ORDER])
def _put_together(pair: EquationPair) -> Known:
    """The joined operands; along rows, blocks of rows stay blocks.

    An array without elements adds nothing.
    """
    axis = pair.params["dimension"]
    ins = pair.ins
    some = [i for i in range(len(ins)) if pair.sizes_along(i, axis) != (0, 0)]
    if len(some) == 1:
        return ins[some[0]]
    if axis not in pair.rows_in:
        if pair.kinds & {Kind.NUMBERS, Kind.COLUMNS, Kind.ORDER}:
            return _columns(pair, axis)
        if axis == pair.rows_out[0]:
            raise NotOfOneKindError("arrays without rows are joined to a dim of rows")
        return joined(ins, "together with")
    if any(r != axis for r in pair.rows_in):
        raise NotOfOneKindError(f"{nouns().its} rows are joined with other values")
    ins = [rows(x.power) if x.kind is Kind.COPY else x for x in ins]
    if not {x.kind for x in ins} <= {Kind.ROWS, Kind.ZERO}:
        raise NotOfOneKindError(f"{nouns().its} rows are joined with {ins[0]}")
    times = [pair.times_rows(i, axis) or Fraction(0) for i in range(len(ins))]
    found = joined([x._replace(blocks=1) for x in ins], "together with")
    if found.kind is Kind.ZERO:
        return ZERO
    pairs = [*zip(times, ins, strict=True)]
    sizes = {n / x.blocks for n, x in pairs if x.kind is Kind.ROWS}
    blocks = [n / max(sizes) for n in times]
    if len(sizes) > 1 or any(n.denominator > 1 for n in blocks):
        raise NotOfOneKindError("rows are joined with rows in another order")
    return found._replace(blocks=int(sum(blocks)))


_AS_COLUMNS = {Kind.NUMBERS, Kind.ROWS, Kind.COPY, Kind.ZERO, Kind.COLUMNS}


def _columns(pair: EquationPair, axis: int) -> Known:
    """Indices that have the row numbers in some of their columns."""
    columns: list[Kind | Known] = []
    is_last = axis == len(pair.out_shape()) - 1
    for i, x in enumerate(pair.ins):
        if x.kind is Kind.ORDER and is_last and pair.shape(i)[axis] == 1:
            columns.append(x)
            continue
        known = x.kind in _AS_COLUMNS
        if not (known and is_last) or x.power or x.blocks > 1:
            raise NotOfOneKindError(f"no rule for these indices of {nouns().its} rows")
        size = pair.shape(i)[axis]
        columns += x.note if x.kind is Kind.COLUMNS else [x.kind] * size
    return Known(Kind.COLUMNS, note=tuple(columns))


@rule("stack", copies_as_rows=True)
def _stacked_up(pair: EquationPair) -> Known:
    """The operands, stacked along a new dim."""
    return joined(pair.ins, "together with")


@rule("unstack", copies_as_rows=True)
def _unstacked(pair: EquationPair) -> Known:
    """Elements along a dim without rows."""
    return _some_of(pair, pair.params["axis"])


@rule("rev", copies_as_rows=True)
def _reversed(pair: EquationPair) -> Known:
    """The operand, reversed; along rows it is another order of the rows."""
    [x] = pair.ins
    along = pair.rows_in[0]
    for axis in pair.params["dimensions"]:
        if axis != along or x.kind is not Kind.ROWS or x.blocks > 1:
            _some_of(pair, axis)
    if along is None or x.kind is Kind.ZERO:
        return x
    if along not in pair.params["dimensions"]:
        return x
    order = pair.walk.new_identity()
    return permuted(x, along, (order, None))


def _some_of(pair: EquationPair, axis: int) -> Known:
    """Some elements along a dim, which must not be the dim of rows."""
    [x] = pair.ins
    if x.kind is Kind.ZERO:
        return x
    if axis == pair.rows_in[0]:
        raise NotOfOneKindError("only some rows are taken, or in another order")
    if x.kind not in LINEAR and x.kind is not Kind.KEY:
        raise NotOfOneKindError(f"no rule for some elements of {x}")
    return x


@rule("split", copies_as_rows=True)
def _split_apart(pair: EquationPair) -> list[Known] | Known:
    """The pieces of the operand; along rows they must be whole blocks."""
    [x] = pair.ins
    axis = pair.params["axis"]
    sizes = pair.params["sizes"]
    if axis != pair.rows_in[0] or x.kind is Kind.ZERO:
        if sizes != pair.second.params["sizes"] and x.kind is not Kind.ZERO:
            raise NotOfOneKindError("the sizes of pieces depend on the number of rows")
        return _some_of(pair, axis)
    each = Fraction(pair.times_rows(0, axis) or 0) / x.blocks
    found = []
    for size, other in zip(sizes, pair.second.params["sizes"], strict=True):
        times = pair.sizes.times(size, other)
        blocks = (times or Fraction(0)) / each
        if x.kind is not Kind.ROWS or not blocks or blocks.denominator != 1:
            raise NotOfOneKindError(f"only some of {nouns().its} rows are taken")
        found.append(x._replace(blocks=int(blocks)))
    return found


@rule("slice", copies_as_rows=True)
def _sliced(pair: EquationPair) -> Known:
    """A slice: all rows or whole blocks of rows, and any elements along other dims."""
    [x] = pair.ins
    [axis] = pair.rows_in
    if x.kind is Kind.ZERO:
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
    if axis is None:
        return _elements_of(pair, x)
    given = [1 if step is None else step[axis] for step in steps]
    pairs = zip(pair.sizes_along(0, axis), starts, ends, strict=True)
    bounds = [(size, low[axis], high[axis]) for size, low, high in pairs]
    is_all = all((low, high) == (0, size) for size, low, high in bounds)
    if given == [1, 1] and is_all:
        return _elements_of(pair, x)
    low, high = [_in_blocks(pair, x, [b[i] for b in bounds], axis) for i in (1, 2)]
    is_whole = x.kind is Kind.ROWS and given == [1, 1] and None not in (low, high)
    if not is_whole:
        raise NotOfOneKindError(f"only some of {nouns().its} rows are taken")
    return x._replace(blocks=high - low)  # type: ignore


def _elements_of(pair: EquationPair, x: Known) -> Known:
    if x.kind in LINEAR or x.kind is Kind.KEY or x.kind in _OF_EACH_ROW:
        return x
    if x.kind is Kind.NUMBERS and len(pair.shape(0)) == 1:
        return x
    raise NotOfOneKindError(f"no rule for some elements of {x}")


def _in_blocks(pair: EquationPair, x: Known, at: list[Any], axis: int) -> int | None:
    """A position along rows, counted in blocks; None if it is inside a block."""
    each = Fraction(pair.times_rows(0, axis) or 0) / x.blocks
    if all(is_size(n) and n == 0 for n in at):
        return 0
    times = pair.sizes.times(*at)
    number = None if times is None or not each else times / each
    return int(number) if number is not None and number.denominator == 1 else None


@rule("pad", copies_as_rows=True)
def _padded(pair: EquationPair) -> Known:
    """The operand, padded along dims without rows."""
    x, filler = pair.ins
    axis = pair.rows_in[0]
    if axis != pair.rows_out[0]:
        raise NotOfOneKindError(f"{nouns().its} rows are joined with other values")
    if axis is not None and tuple(pair.params["padding_config"][axis]) != (0, 0, 0):
        raise NotOfOneKindError(f"{nouns().its} rows are joined with other values")
    if x.kind not in LINEAR or filler.kind not in (Kind.COPY, Kind.ZERO):
        raise NotOfOneKindError(f"{x} is padded by {filler}")
    return joined([x, filler], "together with")
