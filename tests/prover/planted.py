"""Programs that show a fault of a rule: it calls them proved, and they differ.

The programs are traced once. With and without the fault the walk is asked, and only a
program whose answer changes to proved is run. It shows the fault if its results differ.
"""

import dataclasses
import functools

import pytest
import split_functions
import split_orders
import split_rows
from equal_programs import are_same, function_of, params_and_batch, split_batch
from one_tower_programs import (
    NUMBERS,
    TOWER_AXIS,
    equal_to_one_tower,
    has_own_rules,
    merged_leaves,
    of_gradient,
    program_of,
    rows_of,
    run_on_towers,
)

SEEDS = range(12)
# Of few examples a tower has none with some flag, and of none a mean is NaN. One tower
# has no padding.
BATCHES = {
    False: [(8, (8, 4, 2)), (48, (48, 24, 12))],
    True: [(5, (5, 6, 4)), (5, (8, 6, 4)), (17, (18, 12, 12))],
}
SPLIT = split_functions.SPLIT | split_rows.SPLIT | split_orders.SPLIT


def of_loss(loss_fn):
    """What a tower returns of a loss, with numbers for flags."""

    def fn(params, batch, tower):
        arrays, leaves = merged_leaves(loss_fn(params, batch, tower))
        return [x * 1.0 if x.dtype == bool else x for x in arrays], leaves

    return fn


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of a tower, traced for several numbers of towers."""

    name: str
    fn: object
    padded: bool
    traced: tuple

    def proved(self):
        """The names of the leaves that are proved."""
        programs = [program for program, _, _ in self.traced]
        _, inputs, leaves = self.traced[0]
        how = {"axes": [TOWER_AXIS], "padded": self.padded}
        found = equal_to_one_tower(programs, inputs, leaves, **how)
        return {x.leaf for x in found if x.says == "proved"}

    def differs(self, leaves):
        """Whether one of the leaves, or its derivative, differs when it runs."""
        return any(self._differs_on(leaves, *x) for x in BATCHES[self.padded])

    def _differs_on(self, leaves, examples, rows):
        """The same for a batch of so many examples, with these rows of a tower.

        Some functions do not fit so few rows.
        """
        try:
            results = self._results(leaves, examples, rows)
        except (TypeError, ValueError):
            return False
        return any(are_same(x) is False for x in results)

    def _results(self, leaves, examples, rows):
        """The values of leaves, and their derivatives, for each number of towers."""
        named = [x.name for x in self.traced[0][2]]
        wanted = [i for i, name in enumerate(named) if name in leaves]
        params, batch = params_and_batch(examples)
        found = []
        for towers, each in zip(NUMBERS, rows, strict=True):
            own, counts = split_batch(batch, towers, each, self.padded)
            of_all = self.fn, params, own, towers, each, counts, wanted
            found.append(run_on_towers(*of_all))
        of_values, of_slopes = zip(*found, strict=True)
        several = [*zip(*of_values, strict=True)]
        if not has_own_rules(self.traced[0][0]):
            several += zip(*of_slopes, strict=True)
        return several


@functools.cache
def programs():
    """All programs, and what is proved of each without a fault."""
    found = []
    functions = {f"seed {seed}": function_of(seed) for seed in SEEDS}
    functions |= {name: of_loss(fn) for name, fn in SPLIT.items()}
    for name, fn in functions.items():
        for padded in (False, True):
            program = _traced(name, fn, padded)
            found.append((program, program.proved()))
            if name in SPLIT and has_own_rules(program.traced[0][0]):
                program = _traced(name, of_gradient(SPLIT[name]), padded)
                found.append((program, program.proved()))
    return found


def _traced(name, fn, padded):
    params, batch = params_and_batch(rows_of(1, padded))
    each = [(towers, rows_of(towers, padded)) for towers in NUMBERS]
    traced = [program_of(fn, params, batch, t, n, n) for t, n in each]
    return Program(name, fn, padded, tuple(traced))


def finds(plant):
    """The name of a program that shows a fault, or None.

    ``plant`` gets a ``MonkeyPatch`` and plants the fault with it.
    """
    without = programs()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for program, proved in without:
            new = program.proved() - proved
            if new and program.differs(new):
                return program.name
    return None
