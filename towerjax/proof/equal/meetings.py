"""Rules for collectives, for a tower's own numbers and keys, and for random numbers."""

from typing import Any, TypeAlias

from towerjax.jaxprs.params import named_axes
from towerjax.proof.equal.equation_pair import EquationPair
from towerjax.proof.equal.kinds import (
    ELEMENTS,
    PADDING,
    SAME_FOR_ALL,
    ZERO,
    Copy,
    Key,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    Part,
    RowNumbers,
    Stacked,
    TowerId,
    TowerRows,
    Zero,
    added_over_towers,
    blocks_of,
    copy,
    function_of,
    permuted,
    rows,
)
from towerjax.proof.equal.rules import refused, rule

_MERGED: TypeAlias = Copy | Part | Maximum | Minimum


# These collectives may add up or compare over the devices of each tower first, and then
# over the towers.
_IN_ANY_ORDER = frozenset("psum psum_invariant pmax pmin".split())
# These collectives may join or split over the towers first, and then over the devices
# of each tower.
_INNERMOST = frozenset(
    "all_gather all_gather_invariant reduce_scatter psum_scatter".split()
)


def _refuse_other_axes(pair: EquationPair) -> None:
    """Raise unless the collective is over all towers.

    It may name axes of a tower's own devices, too. A sum or an extreme over these has
    the kind that it has on each device. A gather or scatter must have the towers as its
    innermost axes, so that each device's values stay together.
    """
    if pair.scope.in_chunks:
        raise NotOfOneKindError(
            f"no rule for {pair.name} of a chunk of each {{one}}'s rows"
        )
    axes = tuple(x for x in named_axes(pair.first) if x not in pair.walk.alone)
    towers = tuple(x for x in axes if x not in pair.scope.within)
    is_last = axes[-len(towers) :] == towers and pair.params.get("tiled", False)
    may_be_within = pair.name in _IN_ANY_ORDER or (pair.name in _INNERMOST and is_last)
    is_of_all = towers in pair.walk.axes and (axes == towers or may_be_within)
    if not is_of_all or pair.params.get("axis_index_groups") is not None:
        raise NotOfOneKindError(
            f"{pair.name} is over another axis, or over groups of {{many}}"
        )


@rule("axis_index", every=Kind)
def _tower_id(pair: EquationPair) -> Kind:
    """Answer the tower's number along the towers' axis.

    In micro-batches, which are chunks of rows, towers must not communicate.
    """
    _refuse_other_axes(pair)
    return TowerId()


@rule("psum psum_invariant", every=Copy | Part | Zero)
def _added_over_towers(pair: EquationPair, *ins: Copy | Part | Zero) -> list[Kind]:
    """Answer a `psum`: parts add up to a replicated value.

    The sum over T towers of a replicated value is T times the value.
    """
    _refuse_other_axes(pair)
    return [added_over_towers(x) for x in ins]


@rule("pmax", every=Maximum | Copy | Zero)
@rule("pmin", every=Minimum | Copy | Zero)
def _extreme_over_towers(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Answer a `pmax` or `pmin`: the extreme of the towers' extremes is replicated."""
    _refuse_other_axes(pair)
    return [x if isinstance(x, Zero) else copy(x.power) for x in ins]


@rule(
    "all_gather all_gather_invariant", _MERGED | TowerRows | Zero, copies_as_rows=True
)
def _gathered_over_towers(pair: EquationPair, x: Kind) -> Kind:
    """Answer an `all_gather`: the towers' rows, joined, are the rows of the batch.

    Otherwise the result is an array of all towers' values, one after another.
    """
    _refuse_other_axes(pair)
    along = pair.params["all_gather_dimension"]
    if isinstance(x, Zero):
        return ZERO
    if blocks_of(x) > 1:
        raise refused(pair)
    if not pair.params["tiled"]:
        if along != 0 or pair.rows_in[0] not in (None, 0):
            raise NotOfOneKindError(
                f"no rule for a gather of {x} along a dim between others"
            )
        return Stacked(x.power, of=type(x), zeros=x.zeros)
    is_joined = isinstance(x, TowerRows) and pair.rows_in[0] == along
    if not is_joined or pair.rows_out[0] is not None or pair.sizes.padded:
        raise refused(pair)
    return copy(x.power)


@rule("reduce_scatter psum_scatter", Part)
def _scattered_over_towers(pair: EquationPair, x: Part) -> Kind:
    """Answer a sum of parts that is scattered: each tower gets its rows of the sum."""
    _refuse_other_axes(pair)
    along = pair.params["scatter_dimension"]
    is_split = pair.params["tiled"] and pair.rows_out[0] == along
    if not is_split or pair.rows_in[0] is not None:
        raise refused(pair)
    return rows(x.power)


def _of_other_towers(x: TowerRows, axis: int | None, order: Any) -> Kind:
    """Return the kind of other towers' rows, in an order that depends on the towers.

    What is known of the flags of a tower's own rows does not hold for these rows.
    """
    assert axis is not None
    return permuted(x, axis, (order, None)).replace(zeros=x.zeros & {PADDING})


@rule("ppermute", every=_MERGED | TowerRows | Zero, knows_identity=True)
def _passed_on(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Answer a `ppermute`: each tower gets another tower's value.

    All towers together have the same values, and rows are in another order.
    """
    _refuse_other_axes(pair)
    programs = zip((pair.first, pair.second), pair.sizes.towers, strict=True)
    for eqn, towers in programs:
        ends = [sorted(side) for side in zip(*eqn.params["perm"], strict=True)]
        if ends != [[*range(towers)]] * 2:
            raise NotOfOneKindError("a permutation leaves some {many} out")
    if any(blocks_of(x) > 1 for x in ins):
        raise refused(pair)
    order = pair.walk.new_identity()
    return [
        _of_other_towers(x, axis, order)
        if isinstance(x, TowerRows)
        else type(x)(x.power)
        for x, axis in zip(ins, pair.rows_in, strict=True)
    ]


@rule("all_to_all", TowerRows, knows_identity=True, copies_as_rows=True)
def _exchanged(pair: EquationPair, x: TowerRows) -> Kind:
    """Answer an `all_to_all` of equally many rows: all rows in another order."""
    _refuse_other_axes(pair)
    axis = pair.rows_in[0]
    along = pair.params["split_axis"], pair.params["concat_axis"]
    is_even = pair.params["tiled"] and along == (axis, axis) == (pair.rows_out[0],) * 2
    if not is_even or x.blocks > 1:
        raise refused(pair)
    return _of_other_towers(x, axis, pair.walk.new_identity())


@rule("random_seed", SAME_FOR_ALL)
def _key_of_seed(pair: EquationPair, x: Kind) -> Kind:
    """Answer the key of a seed, which is a function of the seed."""
    return function_of([x], "a key")


@rule("random_fold_in", Key, ELEMENTS | RowNumbers)
def _own_key_of_number(pair: EquationPair, x: Key, y: Kind) -> Kind:
    """Answer a tower's own key with a number folded in: its own key.

    If the key is not one per row, numbers of rows must be the row numbers. Rows with
    equal numbers would otherwise share a key on one tower, but not across towers.
    """
    is_of_each = pair.rows_in[0] is not None or pair.rows_in[1] is None
    if not (isinstance(y, RowNumbers) or is_of_each):
        raise refused(pair)
    return x


@rule("random_fold_in", SAME_FOR_ALL, TowerId)
def _own_key(pair: EquationPair, x: Kind, y: TowerId) -> Kind:
    """Answer a replicated key with the tower's number folded in: a key of its own."""
    if pair.rows_out[0] is not None or not pair.walk.has_keys:
        raise refused(pair)
    return Key()


@rule("random_fold_in", ELEMENTS, ELEMENTS)
def _key_of_number(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Answer a key with a number folded in: a function of the key and the number."""
    return function_of([x, y], "a key")


@rule("random_split", Key)
def _keys_of_own_key(pair: EquationPair, x: Key) -> Kind:
    """Answer the keys that are split from a tower's own key: they are its own, too."""
    return x


@rule("random_split", ELEMENTS)
def _keys_of_key(pair: EquationPair, x: Kind) -> Kind:
    """Answer the keys that are split from a key, as a function of that key.

    Keys for rows must be split from a key per row. Otherwise all towers would use the
    same keys for their rows.
    """
    if pair.rows_out[0] is not None and pair.rows_in[0] is None:
        raise NotOfOneKindError("all {many} use the same keys for their rows")
    return function_of([x], "a key")


@rule("random_bits random_gamma", every=ELEMENTS | Key, copies_as_rows=True)
def _draw_of(pair: EquationPair, key: Kind, *others: Kind) -> Kind:
    """Answer a random draw: a tower's own key draws numbers for each row.

    A replicated key draws the same numbers on all towers, which are not used as rows.
    """
    has_rows = pair.rows_out[0] is not None
    if isinstance(key, Key):
        are_elements = all(isinstance(x, ELEMENTS) and not x.power for x in others)
        if not are_elements or any(blocks_of(x) > 1 for x in others):
            raise NotOfOneKindError("a random draw depends on a {one}'s values")
        if not has_rows:
            raise NotOfOneKindError("a {one} draws numbers that belong to no row")
        return rows()
    if has_rows and pair.rows_in[0] is None:
        raise NotOfOneKindError("all {many} draw the same numbers for their rows")
    return function_of(pair.ins, "a draw")
