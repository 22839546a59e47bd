"""Rules for collectives, for a tower's own numbers and keys, and for random numbers."""

from typing import Any, TypeAlias

from towerjax.jaxprs.params import named_axes
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
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
from towerjax.prover.equality.kinds.reasons import Reason
from towerjax.prover.equality.kinds.stacked import Stacked
from towerjax.prover.equality.rules.rules import refused, rule

_MERGED: TypeAlias = Copy | Part | Maximum | Minimum


# The result of these does not depend on whether they add up or compare over the devices
# of a tower first, or over the towers first.
_IN_ANY_ORDER = frozenset("psum psum_invariant pmax pmin".split())
# These may be over towers and over the devices of a tower if the towers' axes are the
# innermost: they then join or split over the towers first.
_INNERMOST = frozenset(
    "all_gather all_gather_invariant reduce_scatter psum_scatter".split()
)


def _refuse_other_axes(pair: EquationPair) -> None:
    """Raise unless a collective is over all towers.

    A sum or an extreme may be over the devices of each tower as well, which does not
    change the kind. So may a gather or scatter, if it names the towers' axes last, as
    the innermost: each device's values then stay together.
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
            f"{pair.name} is over an axis that is not that of {{many}}, or over groups"
        )


@rule("axis_index", every=Kind)
def _tower_id(pair: EquationPair) -> Kind:
    """Number the towers: an `axis_index` of their axis is a tower's index.

    It is refused in a loop over chunks of rows, where towers must not communicate.
    """
    _refuse_other_axes(pair)
    return TowerId()


@rule("psum psum_invariant", every=Copy | Part | Zero)
def _added_over_towers(pair: EquationPair, *ins: Copy | Part | Zero) -> list[Kind]:
    """``sum_t T^p x_t = T^p x`` for parts, and ``sum_t T^p c = T^(p+1) c``.

    Both sums are replicated.
    """
    _refuse_other_axes(pair)
    return [added_over_towers(x) for x in ins]


@rule("pmax", every=Maximum | Copy | Zero)
@rule("pmin", every=Minimum | Copy | Zero)
def _extreme_over_towers(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """``max_t`` of each tower's maximum is replicated, and so for minima."""
    _refuse_other_axes(pair)
    return [x if isinstance(x, Zero) else copy(x.power) for x in ins]


@rule(
    "all_gather all_gather_invariant", _MERGED | TowerRows | Zero, copies_as_rows=True
)
def _gathered_over_towers(pair: EquationPair, x: Kind) -> Kind:
    """Gather the towers' rows to the batch, or stack the towers' values.

    Rows that are joined along their dim (``tiled``) are the rows of the batch, which
    all towers get: a replicated value. Without ``tiled`` the result is a `Stacked`
    array of all towers' values.
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
    """Add a part over towers, and give each tower its rows of the sum."""
    _refuse_other_axes(pair)
    along = pair.params["scatter_dimension"]
    is_split = pair.params["tiled"] and pair.rows_out[0] == along
    if not is_split or pair.rows_in[0] is not None:
        raise refused(pair)
    return rows(x.power)


def _of_other_towers(x: TowerRows, axis: int | None, order: Any) -> Kind:
    """Take rows that come from other towers: rows in another order.

    The order depends on the number of towers. What is known of the flags of the tower's
    own rows does not hold for these rows.
    """
    assert axis is not None
    return permuted(x, axis, (order, None)).replace(zeros=x.zeros & {PADDING})


@rule("ppermute", every=_MERGED | TowerRows | Zero, knows_identity=True)
def _passed_on(pair: EquationPair, *ins: Kind) -> list[Kind]:
    """Give each tower another tower's value; refuse to leave a tower out.

    Rows get another order. Other kinds stay, because they do not say which tower has
    which value.
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
    """``x[:, s_t]``, for the tower's share ``s_t`` of another dim: its rows.

    The towers' rows are joined to those of the batch, and each tower gets its share of
    the dim ``split_axis``. So that is the dim of its rows afterwards. If it is the dim
    of rows before, too, the rows get another order.
    """
    _refuse_other_axes(pair)
    axis = pair.rows_in[0]
    split = pair.params["split_axis"]
    # No other dim has a size that depends on the number of towers, so that the rows are
    # joined: ``concat_axis`` is their dim.
    is_joined = pair.params["tiled"] and pair.rows_out[0] == split
    if not is_joined or x.blocks > 1:
        why = f"no rule for all_to_all of {x} along these dims"
        raise NotOfOneKindError(why, Reason.DEALT_BY_NUMBER)
    if split == axis:
        return _of_other_towers(x, axis, pair.walk.new_identity())
    return rows(x.power)


@rule("random_seed", SAME_FOR_ALL)
def _key_of_seed(pair: EquationPair, x: Kind) -> Kind:
    """Make a key of a seed, a function of that seed."""
    return function_of([x], "a key")


@rule("random_fold_in", Key, ELEMENTS | RowNumbers)
def _own_key_of_number(pair: EquationPair, x: Key, y: Kind) -> Kind:
    """Fold a number into a tower's own key: again its own key.

    A key that does not stand for one key per row becomes one if the rows' indices are
    folded in. No other numbers of rows may be: rows with equal numbers would share a
    key on one tower, but not across towers.
    """
    is_of_each = pair.rows_in[0] is not None or pair.rows_in[1] is None
    if not (isinstance(y, RowNumbers) or is_of_each):
        raise refused(pair)
    return x


@rule("random_fold_in", SAME_FOR_ALL, TowerId)
def _own_key(pair: EquationPair, x: Kind, y: TowerId) -> Kind:
    """Fold a tower's index into a replicated key: the tower's own key."""
    if pair.rows_out[0] is not None or not pair.walk.has_keys:
        raise refused(pair)
    return Key()


@rule("random_fold_in", ELEMENTS, ELEMENTS)
def _key_of_number(pair: EquationPair, x: Kind, y: Kind) -> Kind:
    """Fold a number into a key, a function of both."""
    return function_of([x, y], "a key")


@rule("random_split", Key)
def _keys_of_own_key(pair: EquationPair, x: Key) -> Kind:
    """Split a tower's own key: its own keys."""
    return x


@rule("random_split", ELEMENTS)
def _keys_of_key(pair: EquationPair, x: Kind) -> Kind:
    """Split a key, a function of that key.

    Keys for rows must be split from a key per row. Otherwise all towers would use the
    same keys for their rows.
    """
    if pair.rows_out[0] is not None and pair.rows_in[0] is None:
        why = "all {many} use the same keys for their rows"
        raise NotOfOneKindError(why, Reason.SAME_DRAWS)
    return function_of([x], "a key")


@rule("random_bits random_gamma", every=ELEMENTS | Key, copies_as_rows=True)
def _draw_of(pair: EquationPair, key: Kind, *others: Kind) -> Kind:
    """Draw random numbers: rows if the key is a tower's own.

    A replicated key draws the same numbers on all towers. Such a draw is replicated,
    and must not have a dim of rows.
    """
    has_rows = pair.rows_out[0] is not None
    if isinstance(key, Key):
        are_elements = all(isinstance(x, ELEMENTS) and not x.power for x in others)
        if not are_elements or any(blocks_of(x) > 1 for x in others):
            raise NotOfOneKindError("a random draw depends on a {one}'s values")
        if not has_rows:
            why = "a {one} draws numbers that belong to no row"
            raise NotOfOneKindError(why, Reason.DRAWS_OF_NO_ROW)
        return rows()
    if has_rows and pair.rows_in[0] is None:
        why = "all {many} draw the same numbers for their rows"
        raise NotOfOneKindError(why, Reason.SAME_DRAWS)
    return function_of(pair.ins, "a draw")
