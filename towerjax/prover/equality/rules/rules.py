"""Rules: the kinds of an equation's results, by its primitive and operands' kinds.

A rule is registered for a primitive and for the kinds of operands that it accepts. No
two rules of a primitive accept the same kinds, so that each can be read, and judged by
its lemmas, alone. An equation that no rule accepts is not proved.

The rules use five words. A *replicated* value is the same on all towers. *Rows* are
values of which each belongs to one example of the tower's. A *part* is a tower's addend
of a sum over towers. A value has the *power* p of T if on T towers it is T^p times as
large as on one. An *extreme* is a maximum or minimum over towers.

A rule has its law as a formula: ``T^p x + T^p y = T^p (x + y)`` says that two values of
one power p have a sum of that power. In it ``x`` and ``y`` are values on one tower, and
``T^p x`` and ``T^q y`` the same on T towers. ``c`` is a replicated value, ``x_t`` the
value of tower t, ``sum_t x_t`` a part, and ``x / n`` a mean.

Rules ignore the widths of integers, and where a value is 0: `widths` and `zeros` treat
both, for all rules. What one tower computes of its inputs is assumed to be finite.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from towerjax.jaxprs.primitives import ELEMENTWISE
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.joined import Joined
from towerjax.prover.equality.kinds.kinds import (
    EXTREME,
    LINEAR,
    AtLeast,
    Buffer,
    Columns,
    Copy,
    Counter,
    FirstRow,
    FromFirstRow,
    Groups,
    IsFull,
    Key,
    Kind,
    Mean,
    NotOfOneKindError,
    RowNumbers,
    RowOrder,
    Size,
    SoFar,
    TowerId,
    Valid,
    rows,
)
from towerjax.prover.equality.kinds.stacked import Slots, Stacked

Rule: TypeAlias = Callable[..., Any]
"""A function of an `EquationPair` and of each operand's kind.

It returns one kind for each result, or one for all of them.
"""

NUMBER: TypeAlias = TowerId | FirstRow | FromFirstRow | RowNumbers | Counter
"""Kinds of the index of a tower or of a row, which differs from tower to tower."""

OF_TOWER: TypeAlias = NUMBER | Key | Valid | Size | IsFull | AtLeast
"""Kinds of numbers and keys that may differ from tower to tower."""

OF_ONE_TOWER: TypeAlias = LINEAR | EXTREME | Mean | OF_TOWER
"""Kinds of an array that one tower has, or of one row of such an array."""

SPECIAL: TypeAlias = (
    Groups | Stacked | Joined | Columns | SoFar | Buffer | Slots | RowOrder
)
"""All other kinds, which are not of one tower's array; few rules accept them."""


BY_ELEMENT = ELEMENTWISE | {"bitcast_convert_type"}
"""Primitives that compute each element alone; their rules hold for `Groups`, too."""


class Registered(NamedTuple):
    """A rule, with the kinds of operands that it accepts."""

    rule: Rule
    operands: tuple[Any, ...]  # the kinds of the first operands
    every: Any = None  # the kinds of each later operand; None if there may be none
    # If true, the rule gets rows for a replicated operand that has a dim of rows.
    copies_as_rows: bool = False
    # If true, the rule's kinds keep their identities and their zeros. If false, both
    # are removed from them.
    knows_identity: bool = False
    is_swapped: bool = False  # whether the rule gets the second operand first

    def is_again(self, other: "Registered") -> bool:
        """Return whether two rules are one function, registered again by a reload."""
        names = [(x.rule.__module__, x.rule.__qualname__) for x in (self, other)]
        operands = {(x.every, frozenset(x.operands)) for x in (self, other)}
        return names[0] == names[1] and len(operands) == 1

    def fits(self, pair: EquationPair) -> bool:
        """Return whether the rule accepts the kinds of an equation's operands."""
        count = len(self.operands)
        more = pair.ins[count:]
        if len(pair.ins) < count or (more and self.every is None):
            return False
        pairs = zip(pair.ins, self.operands, strict=False)
        fits = all(isinstance(x, kinds) for x, kinds in pairs)
        return fits and all(isinstance(x, self.every) for x in more)

    def ask(self, pair: EquationPair) -> list[Kind]:
        """Apply the rule to an equation: find the kinds of its results."""
        if self.is_swapped:
            pair = pair.swapped()
        said = self.rule(pair, *pair.ins)
        kinds = said if isinstance(said, list) else [said] * len(pair.rows_out)
        if self.knows_identity:
            return kinds
        return [x.without_identity() for x in kinds]


RULES: dict[str, tuple[Registered, ...]] = {}
"""The rules by the names of their primitives; results of others are unknown."""


def rule(
    names: str,
    *operands: Any,
    every: Any = None,
    copies_as_rows: bool = False,
    knows_identity: bool = False,
    commutes: bool = False,
) -> Callable[[Rule], Rule]:
    """Register a function as a rule.

    Args:
      names: The names of its primitives.
      *operands: The kinds of the first operands.
      every: The kinds of each later operand, of which there may be any number.
      copies_as_rows: Whether a replicated operand that has a dim of rows is passed to
        the rule as rows.
      knows_identity: Whether the rule's kinds keep their identities and zeros.
      commutes: Whether the rule accepts its two operands in either order.
    """

    def register(function: Rule) -> Rule:
        new = Registered(function, operands, every, copies_as_rows, knows_identity)
        both = [new]
        if commutes:
            both.append(new._replace(operands=operands[::-1], is_swapped=True))
        for name in names.split():
            # A module that is loaded again registers its rules a second time, so the
            # first registration is dropped.
            others = [x for x in RULES.get(name, ()) if not x.is_again(new)]
            RULES[name] = (*others, *both)
        return function

    return register


def rule_for(pair: EquationPair) -> tuple[Registered, EquationPair] | None:
    """Find the rule that accepts an equation, and the equation as the rule gets it.

    The rule may get it with its operands swapped, or with rows for replicated operands.
    The result is None if no rule accepts the equation.
    """
    for registered in RULES.get(pair.name, ()):
        asked = _with_copies_as_rows(pair) if registered.copies_as_rows else pair
        if registered.fits(asked):
            return registered, asked
    return None


def _with_copies_as_rows(pair: EquationPair) -> EquationPair:
    """Take those replicated operands that have a dim of rows as rows."""
    ins = [
        rows(x.power) if isinstance(x, Copy) and axis is not None else x
        for x, axis in zip(pair.ins, pair.rows_in, strict=True)
    ]
    return pair.with_kinds(ins)


# How a reason names an equation of two operands that no rule accepts.
_OF_TWO = {
    "add": "{} added to {}",
    "add_any": "{} added to {}",
    "sub": "{} minus {}",
    "mul": "{} times {}",
    "dot_general": "{} times {}",
    "div": "{} divided by {}",
    "max": "the max of {} and {}",
    "min": "the min of {} and {}",
    "gather": "elements of {} at {}",
    "random_fold_in": "a key of {} and {}",
    "towerjax_take": "a lookup in {} by {}",
    **dict.fromkeys(["eq", "ne", "lt", "le", "gt", "ge"], "{} compared with {}"),
}


_OF_ONE = {
    "neg": "the negative of {}",
    "reshape": "{} in another shape",
    "broadcast_in_dim": "{} that is repeated along the rows or another dim",
    "slice": "some elements of {}",
    "tile": "{} that is repeated",
    "top_k": "the largest of {}",
}


def refused(pair: EquationPair) -> NotOfOneKindError:
    """Make the error for an equation that no rule accepts; it names the operands."""
    ins = pair.ins[::-1] if pair.is_swapped else pair.ins
    forms = {1: _OF_ONE, 2: _OF_TWO}.get(len(ins), {})
    if pair.name in forms:
        equation = forms[pair.name].format(*ins)
    else:
        operands = dict.fromkeys(map(str, ins))
        equation = f"{pair.name} of {', '.join(operands)}"
    return NotOfOneKindError(f"no rule for {equation}")
