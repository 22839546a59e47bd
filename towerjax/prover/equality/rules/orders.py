"""Rows in another order: work within rows gives results in that same order.

A rule that compares no row with another also holds for rows in another order. So it is
called as if the rows were in their own order, and the results then get the order back.
"""

from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    SAME_FOR_ALL,
    Copy,
    GroupDims,
    Groups,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    Part,
    TowerRows,
    Zero,
    permuted,
    rows_as,
)
from towerjax.prover.equality.rules.rules import BY_ELEMENT

# The result of these primitives for a row does not depend on where the row is among the
# rows. This also holds for the functions of each element, in `BY_ELEMENT`.
_WITHIN_ROWS = frozenset(
    """dot_general broadcast_in_dim squeeze expand_dims concatenate pad reduce_max
    reduce_min reduce_or reduce_and reduce_prod argmax argmin cumsum cummax cummin
    cumprod cumlogsumexp stop_gradient reduce_precision""".split()
)


def order_of(pair: EquationPair) -> GroupDims | None:
    """Find the one order that the rows of all operands are in.

    A replicated operand fits any order, because it is constant along rows. The result
    is None if there is no such order, or if the equation compares rows.
    """
    if pair.name not in BY_ELEMENT and pair.name not in _WITHIN_ROWS:
        return None
    layouts = {x.layout for x in pair.ins if isinstance(x, Groups)}
    if len({x.order for x in layouts}) != 1:
        return None
    if not pair.are(Groups | SAME_FOR_ALL) or not all(x.by_row for x in layouts):
        return None
    layout = next(iter(layouts))
    pairs = zip(pair.ins, pair.rows_in, strict=True)
    is_own = all(x.layout.dims == (axis,) for x, axis in pairs if isinstance(x, Groups))
    return layout if layout.order is not None and is_own else None


def as_in_order(pair: EquationPair) -> EquationPair:
    """Take the rows of the operands as if they were in their own order."""
    ins = [rows_as(x) if isinstance(x, Groups) else x for x in pair.ins]
    return pair.with_kinds(ins)


def in_order(pair: EquationPair, kinds: list[Kind], order: GroupDims) -> list[Kind]:
    """Give the rows of the results the order of the operands."""
    pairs = zip(kinds, pair.rows_out, strict=True)
    return [_in_order(*x, order) for x in pairs]


def _in_order(x: Kind, axis: int | None, order: GroupDims) -> Kind:
    """Put a result in ``order`` if it is rows; refuse rows that are in none."""
    if isinstance(x, TowerRows) and x.blocks == 1 and axis is not None:
        return permuted(x, axis, order.order).replace(zeros=x.zeros)
    if isinstance(x, Copy | Zero | Part | Maximum | Minimum):
        return x.replace(fact=None)
    raise NotOfOneKindError(f"no rule for {x} of rows in another order")
