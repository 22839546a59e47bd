"""Find the typed reason for what no rule accepts, from the kinds of values."""

from collections.abc import Sequence

from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    EXTREME,
    FirstRow,
    FromFirstRow,
    Kind,
    Mean,
    Part,
    RowNumbers,
    SoFar,
    TowerId,
)
from towerjax.prover.equality.kinds.reasons import Reason

_DRAWS = "random_"  # the names of primitives of keys and of draws start with it
_OF_KINDS = {
    SoFar: Reason.SUM_SO_FAR,
    Part: Reason.SUM_OF_OWN_ROWS,
    EXTREME: Reason.EXTREME_OF_OWN_ROWS,
    TowerId | FirstRow | FromFirstRow | RowNumbers: Reason.OWN_NUMBER,
}


def reason_of_kinds(values: Sequence[Kind]) -> Reason | None:
    """Find the reason why values of these kinds cannot be used; None if none fits."""
    for x in values:
        if isinstance(x, Mean) or (isinstance(x, Part) and x.power == 1):
            return Reason.MEAN_OF_OWN_ROWS
    found = [
        reason
        for kind, reason in _OF_KINDS.items()
        if any(isinstance(x, kind) for x in values)
    ]
    return found[0] if found else None


def reason_of_equation(pair: EquationPair) -> Reason | None:
    """Find the reason why an equation is not proved; None if none fits."""
    if pair.name.startswith(_DRAWS):
        return Reason.OWN_DRAWS
    return reason_of_kinds(pair.ins)
