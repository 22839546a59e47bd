"""Faults that are planted into the rules of a primitive, wherever they are written.

A rule that refuses an equation gives a wrong kind instead, or a right kind is changed.
Some program is then called proved, and shows the fault when it runs.
"""

import dataclasses
from collections.abc import Callable

import jax
import planted
import pytest

from towerjax.prover.equality.kinds.kinds import (
    Copy,
    Maximum,
    Minimum,
    NotOfOneKindError,
    Part,
    SoFar,
    TowerRows,
    Unknown,
    rows,
)
from towerjax.prover.equality.rules.rules import RULES, Registered, rule_for


@dataclasses.dataclass(frozen=True)
class Fault:
    """What the rules of some primitives answer instead.

    Attributes:
      primitives: The names of the primitives.
      before: A function of the operands' kinds, which gives those that the rules get.
      after: A function of a result's kind, which gives the kind to tell.
      refused: A function of the operands' kinds, which gives the kind of the result if
        the rules refuse them; None if the fault does not change this.
    """

    primitives: str
    before: Callable | None = None
    after: Callable | None = None
    refused: Callable | None = None

    def plant(self, patch):
        for name in self.primitives.split():
            patch.setitem(RULES, name, (self._instead(name, RULES[name]),))

    def _instead(self, name, rules):
        def answer(pair, *ins):
            if self.before:
                pair = pair.with_kinds(self.before(ins))
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(RULES, name, rules)
                found = rule_for(pair)
            unknown = [x for x in ins if isinstance(x, Unknown)]
            if found is None and unknown:
                return unknown[0]
            try:
                if found is None:
                    raise NotOfOneKindError("refused")
                registered, asked = found
                kinds = registered.ask(asked)
            except NotOfOneKindError:
                wrong = self.refused and self.refused(ins)
                if not wrong:
                    raise
                return wrong
            return [self.after(x) for x in kinds] if self.after else kinds

        return Registered(answer, (), every=object, knows_identity=True)


def first_of(kinds):
    """Keep the kind of the first operand of these kinds."""

    def wrong(ins):
        found = [x for x in ins if isinstance(x, kinds)]
        return found[0].without_identity() if found else None

    return wrong


def as_parts(ins):
    """Take a copy beside a part for a part, without its factor T."""
    if not any(isinstance(x, Part) for x in ins):
        return ins
    return [Part(x.power) if isinstance(x, Copy) else x for x in ins]


def of_no_power(ins):
    return [x if isinstance(x, Unknown) else x.replace(power=0) for x in ins]


def as_maximum(x):
    return Maximum(x.power) if isinstance(x, Minimum) else x


FAULTS = {
    "a sum over towers of a copy is that copy": Fault(
        "psum psum_invariant",
        before=lambda ins: [Part(x.power) if isinstance(x, Copy) else x for x in ins],
    ),
    "a copy is added to a part": Fault("add", before=as_parts),
    "a minimum is a maximum": Fault("reduce_min", after=as_maximum),
    "rows are sorted": Fault("sort", refused=first_of(TowerRows)),
    "a function of a part is a part": Fault("tanh square", refused=first_of(Part)),
    "powers are not compared": Fault("add", before=of_no_power),
    "a part is cast to integers": Fault("convert_element_type", refused=first_of(Part)),
    "rows are in any shape": Fault("reshape", refused=first_of(TowerRows)),
    "sums along rows are rows": Fault("cumsum", refused=first_of(TowerRows)),
    "a function of a sum so far is that sum": Fault(
        "tanh mul", refused=first_of(SoFar)
    ),
    "rows are reversed": Fault("rev", refused=first_of(TowerRows)),
    "rows are convolved": Fault(
        "conv_general_dilated", refused=lambda ins: rows(ins[0].power)
    ),
    "windows are over rows": Fault(
        "reduce_window_sum reduce_window_max", refused=first_of(TowerRows)
    ),
    "a maximum of another power": Fault("max", before=of_no_power),
}


@pytest.fixture(autouse=True)
def precise():
    """Rounding is far below what a fault changes."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_rules_of_a_primitive_is_found(name):
    assert planted.finds(FAULTS[name].plant) is not None


@pytest.mark.slow
def test_rules_that_are_asked_in_another_way_show_no_fault():
    """A fault that changes nothing changes no answer."""
    every = Fault(" ".join(RULES))
    assert planted.finds(every.plant) is None
