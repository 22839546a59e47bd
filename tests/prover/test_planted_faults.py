"""Each fault that is planted into a rule is found by a program that it calls proved."""

import dataclasses

import jax
import planted
import pytest
from mutants.catalogue import EQUAL, LAID
from mutants.mutant import apply

RULES = """
    meetings kinds elementwise walk sums shapes indexing zeros guards loops choices
    widths trips chunks row_loops orders
""".split()
# They need a step's micro-batches, or a permutation that only devices can run.
OF_STEPS = {"E40", "E47", "E87", "E194"}
# XLA makes a product with a flag a choice, so that 0 times infinity is 0 when compiled.
OF_XLA = {"E207", "E211"}
FAULTS = {
    x.id: x
    for x in (*EQUAL, *LAID)
    if x.where.partition(":")[0].rpartition(".")[2] in RULES
    and x.id not in OF_STEPS | OF_XLA
}


def finds(fault):
    """The name of a program that shows a mutant, or None."""
    return planted.finds(lambda patch: apply(fault, patch, lambda: None))


@pytest.fixture(autouse=True)
def precise():
    """Rounding is far below what a fault changes."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_is_found(name):
    assert finds(FAULTS[name]) is not None


@pytest.mark.slow
def test_without_a_fault_none_is_found():
    """A mutant that changes nothing changes no answer."""
    none = FAULTS["E01"]
    assert finds(dataclasses.replace(none, new=none.old)) is None
