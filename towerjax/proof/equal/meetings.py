"""Rules for collectives, for a tower's own numbers and keys, and for random numbers."""

from typing import Any

from towerjax.jaxprs.equation import named_axes
from towerjax.proof.equal.equation_pair import EquationPair, rule
from towerjax.proof.equal.kinds import (
    EACH,
    PADDING,
    ZERO,
    Kind,
    Known,
    NotOfOneKindError,
    copy,
    function_of,
    permuted,
    rows,
)

_KEPT_BY_GATHER = {Kind.COPY, Kind.ROWS, Kind.PART, Kind.MAXIMUM, Kind.MINIMUM}
_KEPT_BY_PERMUTATION = {Kind.COPY, Kind.PART, Kind.MAXIMUM, Kind.MINIMUM, Kind.ZERO}


# Collectives that may be over the devices of each tower first, and then over towers.
_IN_ANY_ORDER = frozenset("psum psum_invariant pmax pmin".split())
# Those that may be over towers first, and then over the devices of each.
_INNERMOST = frozenset(
    "all_gather all_gather_invariant reduce_scatter psum_scatter".split()
)


def _refuse_other_axes(pair: EquationPair) -> None:
    """Raise unless the collective is over all towers.

    It may name axes of a tower's own devices, too. A sum or an extreme of these has
    the kind of each. What is joined is a tower's own in whole blocks, if the towers are
    the innermost.
    """
    if pair.scope.in_chunks:
        raise NotOfOneKindError(
            f"no rule for {pair.name} of a chunk of each tower's rows"
        )
    axes = tuple(x for x in named_axes(pair.first) if x not in pair.walk.alone)
    towers = tuple(x for x in axes if x not in pair.scope.within)
    is_last = axes[-len(towers) :] == towers and pair.params.get("tiled", False)
    may_be_within = pair.name in _IN_ANY_ORDER or (pair.name in _INNERMOST and is_last)
    is_of_all = towers in pair.walk.axes and (axes == towers or may_be_within)
    if not is_of_all or pair.params.get("axis_index_groups") is not None:
        raise NotOfOneKindError(f"{pair.name} is along another axis, or in groups")


@rule("axis_index")
def _tower_id(pair: EquationPair) -> Known:
    """The tower's own number."""
    _refuse_other_axes(pair)
    return Known(Kind.TOWER)


@rule("psum psum_invariant")
def _added_over_towers(pair: EquationPair) -> list[Known]:
    """Parts add up to a copy; the sum of copies is T times a copy."""
    _refuse_other_axes(pair)
    found = []
    for x in pair.ins:
        if x.kind not in (Kind.PART, Kind.COPY, Kind.ZERO):
            raise NotOfOneKindError(f"no rule for a sum over towers of {x}")
        more = 1 if x.kind is Kind.COPY else 0
        found.append(ZERO if x.kind is Kind.ZERO else copy(x.power + more))
    return found


@rule("pmax pmin")
def _extreme_over_towers(pair: EquationPair) -> list[Known]:
    """The largest of the towers' maxima, or the smallest of their minima."""
    _refuse_other_axes(pair)
    wanted = Kind.MAXIMUM if pair.name == "pmax" else Kind.MINIMUM
    found = []
    for x in pair.ins:
        if x.kind not in (wanted, Kind.COPY, Kind.ZERO):
            raise NotOfOneKindError(f"no rule for {pair.name} of {x}")
        found.append(ZERO if x.kind is Kind.ZERO else copy(x.power))
    return found


@rule("all_gather all_gather_invariant", copies_as_rows=True)
def _gathered_over_towers(pair: EquationPair) -> Known:
    """The towers' rows, joined along their dim, are the batch's rows."""
    _refuse_other_axes(pair)
    [x] = pair.ins
    along = pair.params["all_gather_dimension"]
    if x.kind is Kind.ZERO:
        return ZERO
    if x.blocks > 1 or x.kind not in _KEPT_BY_GATHER:
        raise NotOfOneKindError(f"no rule for a gather of {x}")
    if not pair.params["tiled"]:
        if along != 0 or pair.rows_in[0] not in (None, 0):
            raise NotOfOneKindError(
                f"no rule for a gather of {x} along a dim between others"
            )
        return Known(Kind.STACKED, x.power, note=x.kind, zeros=x.zeros)
    is_joined = x.kind is Kind.ROWS and pair.rows_in[0] == along
    if not is_joined or pair.rows_out[0] is not None or pair.sizes.padded:
        raise NotOfOneKindError(f"no rule for a gather of {x}")
    return copy(x.power)


@rule("reduce_scatter psum_scatter", copies_as_rows=True)
def _scattered_over_towers(pair: EquationPair) -> Known:
    """Each tower gets its rows of the sum of parts."""
    _refuse_other_axes(pair)
    [x] = pair.ins
    along = pair.params["scatter_dimension"]
    is_split = x.kind is Kind.PART and pair.params["tiled"]
    if not is_split or pair.rows_out[0] != along or pair.rows_in[0] is not None:
        raise NotOfOneKindError(f"no rule for {pair.name} of {x}")
    return rows(x.power)


def _of_other_towers(x: Known, axis: int | None, order: Any) -> Known:
    """Rows of other towers, in an order that depends on the towers.

    Flags that are known of a tower's rows are then known of another tower's rows.
    """
    assert axis is not None
    found = permuted(x, axis, (order, None))
    return found._replace(zeros=x.zeros & {PADDING})


@rule("ppermute", knows_identity=True)
def _passed_on(pair: EquationPair) -> list[Known]:
    """Each tower gets another tower's value: the same values in another order."""
    _refuse_other_axes(pair)
    programs = zip((pair.first, pair.second), pair.sizes.towers, strict=True)
    for eqn, towers in programs:
        ends = [sorted(side) for side in zip(*eqn.params["perm"], strict=True)]
        if ends != [[*range(towers)]] * 2:
            raise NotOfOneKindError("a permutation leaves towers out")
    order = pair.walk.new_identity()
    found = []
    for x, axis in zip(pair.ins, pair.rows_in, strict=True):
        if x.kind is Kind.ROWS and x.blocks == 1:
            found.append(_of_other_towers(x, axis, order))
        elif x.kind in _KEPT_BY_PERMUTATION:
            found.append(Known(x.kind, x.power))
        else:
            raise NotOfOneKindError(f"no rule for ppermute of {x}")
    return found


@rule("all_to_all", knows_identity=True, copies_as_rows=True)
def _exchanged(pair: EquationPair) -> Known:
    """Rows exchanged for equally many rows of others: all rows in another order."""
    _refuse_other_axes(pair)
    [x] = pair.ins
    axis = pair.rows_in[0]
    along = pair.params["split_axis"], pair.params["concat_axis"]
    is_even = pair.params["tiled"] and along == (axis, axis) == (pair.rows_out[0],) * 2
    if not is_even or x.kind is not Kind.ROWS or x.blocks > 1:
        raise NotOfOneKindError(f"no rule for all_to_all of {x}")
    order = pair.walk.new_identity()
    return _of_other_towers(x, axis, order)


@rule("random_seed")
def _key_of_seed(pair: EquationPair) -> Known:
    """A key, which is a function of its seed."""
    [x] = pair.ins
    if x.kind not in (Kind.COPY, Kind.ZERO):
        raise NotOfOneKindError(f"no rule for a key of {x}")
    return function_of(pair.ins, "a key")


@rule("random_fold_in")
def _key_of_number(pair: EquationPair) -> Known:
    """The tower's own key, if the tower's number is folded in; otherwise a function."""
    key, number = pair.ins
    # One key for several rows would be the key of other rows on other towers.
    is_of_each = pair.rows_in[0] is not None or pair.rows_in[1] is None
    if key.kind is Kind.KEY and number.kind in EACH | {Kind.NUMBERS}:
        if number.kind is Kind.NUMBERS or is_of_each:
            return key
    if key.kind in (Kind.COPY, Kind.ZERO) and number.kind is Kind.TOWER:
        if pair.rows_out[0] is None and pair.walk.has_keys:
            return Known(Kind.KEY)
    return function_of(pair.ins, "a key")


@rule("random_split")
def _keys_of_key(pair: EquationPair) -> Known:
    """Keys split from a tower's own key are its own; others need one key per row."""
    [key] = pair.ins
    if key.kind is Kind.KEY:
        return key
    if pair.rows_out[0] is not None and pair.rows_in[0] is None:
        raise NotOfOneKindError("all towers use the same keys for their rows")
    return function_of([key], "a key")


@rule("random_bits random_gamma", copies_as_rows=True)
def _draw_of(pair: EquationPair) -> Known:
    """A draw of a tower's own key has one number per row; a shared key draws a copy."""
    key, *others = pair.ins
    has_rows = pair.rows_out[0] is not None
    if key.kind is Kind.KEY:
        if any(x.kind not in EACH or x.power or x.blocks > 1 for x in others):
            raise NotOfOneKindError("a random draw depends on a tower's values")
        if not has_rows:
            raise NotOfOneKindError("a tower draws numbers that belong to no row")
        return rows()
    if has_rows and pair.rows_in[0] is None:
        raise NotOfOneKindError("all towers draw the same numbers for their rows")
    return function_of(pair.ins, "a draw")
