"""Rows in another order, under work within a row: the results are in that order.

A rule that puts no row before another one says the same of rows in any order. So it is
asked as if they were in order, and its rows are in theirs.
"""

from towerjax.proof.equal.equation_pair import EquationPair
from towerjax.proof.equal.kinds import (
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
from towerjax.proof.equal.rules import BY_ELEMENT

# None of these looks at which row comes before another, nor does a function of each
# element.
_WITHIN_ROWS = frozenset(
    """dot_general broadcast_in_dim squeeze expand_dims concatenate pad reduce_max
    reduce_min reduce_or reduce_and reduce_prod argmax argmin cumsum cummax cummin
    cumprod cumlogsumexp stop_gradient reduce_precision""".split()
)


def order_of(pair: EquationPair) -> GroupDims | None:
    """The one order of all operands that are rows in another order; else None.

    Other operands are copies. A copy is constant along rows, so that it is in each
    order.
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
    """The same equation of rows in order."""
    ins = [rows_as(x) if isinstance(x, Groups) else x for x in pair.ins]
    return pair.with_kinds(ins)


def in_order(pair: EquationPair, found: list[Kind], order: GroupDims) -> list[Kind]:
    """The results, whose rows are in the operands' order."""
    pairs = zip(found, pair.rows_out, strict=True)
    return [_in_order(*x, order) for x in pairs]


def _in_order(x: Kind, axis: int | None, order: GroupDims) -> Kind:
    """A result whose rows, if it has any, are in an order."""
    if isinstance(x, TowerRows) and x.blocks == 1 and axis is not None:
        return permuted(x, axis, order.order).replace(zeros=x.zeros)
    if isinstance(x, Copy | Zero | Part | Maximum | Minimum):
        return x.replace(fact=None)
    raise NotOfOneKindError(f"no rule for {x} of rows in another order")
