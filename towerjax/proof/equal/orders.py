"""Rows in another order, under work within a row: the results are in that order.

A rule that puts no row before another one says the same of rows in any order. So it is
asked as if they were in order, and its rows are in theirs.
"""

from towerjax.proof.equal.equation_pair import EquationPair
from towerjax.proof.equal.kinds import (
    Groups,
    Kind,
    Known,
    NotOfOneKindError,
    permuted,
    rows,
)

# None of these looks at which row comes before another, nor does a function of each
# element.
_WITHIN_ROWS = frozenset(
    """dot_general broadcast_in_dim squeeze expand_dims concatenate pad reduce_max
    reduce_min reduce_or reduce_and reduce_prod argmax argmin cumsum cummax cummin
    cumprod cumlogsumexp stop_gradient reduce_precision""".split()
)


def order_of(pair: EquationPair, *, is_by_element: bool) -> Groups | None:
    """The one order of all operands that are rows in another order; else None.

    Other operands are copies. A copy is constant along rows, so that it is in each
    order.
    """
    if not is_by_element and pair.name not in _WITHIN_ROWS:
        return None
    notes = {x.note for x in pair.ins if x.kind is Kind.SPREAD}
    others = {x.kind for x in pair.ins if x.kind is not Kind.SPREAD}
    if len({x.order for x in notes}) != 1:
        return None
    if not others <= {Kind.COPY, Kind.ZERO} or not all(x.each for x in notes):
        return None
    order = next(iter(notes))
    pairs = zip(pair.ins, pair.rows_in, strict=True)
    is_own = all(x.note.dims == (axis,) for x, axis in pairs if x.kind is Kind.SPREAD)
    return order if order.order is not None and is_own else None


def as_in_order(pair: EquationPair) -> EquationPair:
    """The same equation of rows in order."""
    return pair.with_kinds(
        [
            rows(x.power)._replace(zeros=x.zeros, in_padding=x.in_padding)
            if x.kind is Kind.SPREAD
            else x
            for x in pair.ins
        ]
    )


def in_order(pair: EquationPair, found: list[Known], order: Groups) -> list[Known]:
    """The results, whose rows are in the operands' order."""
    pairs = zip(found, pair.rows_out, strict=True)
    return [_in_order(*x, order) for x in pairs]


def _in_order(x: Known, axis: int | None, order: Groups) -> Known:
    """A result whose rows, if it has any, are in an order."""
    if x.kind is Kind.ROWS and x.blocks == 1 and axis is not None:
        return permuted(x, axis, order.order)._replace(zeros=x.zeros)
    if x.kind in (Kind.COPY, Kind.ZERO, Kind.PART, Kind.MAXIMUM, Kind.MINIMUM):
        return x._replace(fact=None)
    raise NotOfOneKindError(f"no rule for {x} of rows in another order")
