"""Each rule of the proof of equality holds, and accepts what no other rule accepts.

That it holds is seen of values that have the kinds of its operands.
"""

import functools
import importlib
import itertools
from types import SimpleNamespace

import jax
import lemmas
import numpy as np
import pytest
from jax import lax
from lemma_cases import CASES

from towerjax.proof.equal import elementwise
from towerjax.proof.equal import one_tower as one_tower  # registers all rules
from towerjax.proof.equal.equation_pair import Sizes
from towerjax.proof.equal.kinds import (
    ALL_KINDS,
    Copy,
    Kind,
    Part,
    Unknown,
    copy,
    part,
    rows,
)
from towerjax.proof.equal.rules import OF_ONE_TOWER, RULES, SPECIAL, Registered
from towerjax.proof.equal.walk import Walk

# Rules whose operands cannot be drawn, and why.
OTHER_NAMES = """
    closed_call core_call custom_lin custom_vjp_call_jaxpr eval_jaxpr pjit remat remat2
    remat3 composite custom_vmap_call call_hi_primitive
""".split()  # they call a program as `jit`, `checkpoint` and `custom_vjp_call` do
AS_IT_IS = """
    copy_p device_put layout_constraint pcast preduced pvary random_clone reshard
    sharding_constraint
""".split()  # places and types: the same rule as `copy`, with the same values
OF_KEYS = """
    random_bits random_fold_in random_gamma random_seed random_split random_unwrap
    random_wrap
""".split()  # a key of a tower has no values to compare; see `test_meanings`
OF_DEVICES = ["shard_map"]  # needs devices; see `test_equal_on_devices`
OF_ONE_PROGRAM = ["dim_as_value", "platform_index"]  # of exported programs
OF_LIBRARY = ["towerjax_take"]  # see `test_sparse`
RENAMED = ["all_gather_invariant", "psum_invariant", "psum_scatter"]  # of `shard_map`
NOT_DRAWN = {*OTHER_NAMES, *AS_IT_IS, *OF_KEYS, *OF_DEVICES, *OF_ONE_PROGRAM}
# Its result is one of several that are right, and another for the same matrix.
SEVERAL_RIGHT = ["schur", "eig"]
NOT_DRAWN |= {*OF_LIBRARY, *RENAMED, *SEVERAL_RIGHT}
# Not in each JAX; they have no lemma there.
OF_SOME_VERSIONS = {"one_minus_square", "log2", "stack", "unstack", "tile", "add_any"}


def test_every_rule_has_a_lemma():
    assert RULES.keys() == CASES.keys() | NOT_DRAWN
    assert not CASES.keys() & NOT_DRAWN


def held(name, worlds, *, each_in=1, every=1):
    """The tally of a primitive's lemmas, each held in some of the worlds in turn."""
    tally = lemmas.Tally()
    for number, each in enumerate(CASES[name][::every]):
        for i in range(each_in):
            lemmas.hold(each, worlds[(number + i) % len(worlds)], number, tally)
    return tally


@pytest.mark.few_fast(16)
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_a_rule_says_holds(name):
    tally = held(name, ["1 and 3, padded"], every=7)
    assert not tally.broken, "\n".join(map(str, tally.broken[:5]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_a_rule_says_holds_in_all_worlds(name, monkeypatch):
    """And each of the primitive's rules has said something."""
    answered = set()
    ask = Registered.ask

    def noted(self, pair):
        found = ask(self, pair)
        if not all(isinstance(x, Unknown) for x in found):
            answered.add((pair.name, self))
        return found

    monkeypatch.setattr(Registered, "ask", noted)
    tally = held(name, [*lemmas.WORLDS], each_in=3)
    assert tally.held or name in OF_SOME_VERSIONS
    assert not tally.broken, "\n".join(map(str, tally.broken[:5]))
    silent = [x for x in RULES[name] if (name, x) not in answered]
    told = {(x.rule.__name__, x.is_swapped) for x in silent}
    assert not told or name in OF_SOME_VERSIONS


# Which rule an equation gets.


def kinds_at(registered, place):
    """The kinds that a rule accepts for an operand."""
    is_first = place < len(registered.operands)
    accepted = registered.operands[place] if is_first else registered.every
    return {x for x in ALL_KINDS if accepted is not None and issubclass(x, accepted)}


def accept_the_same(first, second):
    """Whether there are kinds of operands that two rules accept."""
    counts = [len(x.operands) for x in (first, second)]
    for count in range(max(counts) + 2):
        places = range(count)
        if any(count < n for n in counts):
            continue
        if all(kinds_at(first, i) & kinds_at(second, i) for i in places):
            return True
    return False


@pytest.mark.parametrize("name", sorted(RULES))
def test_no_two_rules_accept_the_same_kinds(name):
    for first, second in itertools.combinations(RULES[name], 2):
        both = first.rule.__name__, second.rule.__name__
        assert not accept_the_same(first, second), both


def test_two_rules_of_the_same_kinds_are_seen():
    sums = Registered(print, (Part, Part | Copy))
    assert accept_the_same(sums, Registered(print, (Part, Copy)))
    assert accept_the_same(sums, Registered(print, (), Kind))
    assert not accept_the_same(sums, Registered(print, (Copy, Part)))
    assert not accept_the_same(sums, Registered(print, (Part,)))


def test_the_kinds_are_all_there_are():
    assert {*ALL_KINDS} == {*Kind.__subclasses__()}
    of_array = {x for x in ALL_KINDS if issubclass(x, OF_ONE_TOWER | SPECIAL)}
    assert of_array == {*ALL_KINDS} - {Unknown}
    assert not any(
        issubclass(x, OF_ONE_TOWER) and issubclass(x, SPECIAL) for x in ALL_KINDS
    )


def programs_of(fn, *shapes):
    """One tower's program for one tower of 8 rows, and for two of 4."""
    return [
        jax.make_jaxpr(functools.partial(fn, rows))(
            *[jax.ShapeDtypeStruct(x(rows), np.float32) for x in shapes]
        )
        for rows in (8, 4)
    ]


def kind_of(programs, *ins):
    """The kind of the one result of two programs."""
    [found] = Walk(Sizes((1, 2), (8, 4)), ["towers"]).closed(*programs, ins)
    return found


def test_a_rule_that_commutes_gets_its_operands_in_order():
    """A sum of rows so far is the first or the second operand."""

    def total(rows, y):
        return lax.scan(lambda c, y: (y + c, None), 0.0, y)[0]

    found = kind_of(programs_of(total, lambda n: (n,)), rows())
    assert isinstance(found, Part) and not found.power


def test_a_rule_takes_no_other_number_of_operands():
    with_one = Registered(print, (Part,))
    assert with_one.fits(SimpleNamespace(ins=[part()]))
    assert not with_one.fits(SimpleNamespace(ins=[part(), part()]))
    assert not with_one.fits(SimpleNamespace(ins=[]))
    assert with_one._replace(every=Copy).fits(SimpleNamespace(ins=[part(), copy()]))


def test_a_module_that_is_loaded_again_has_the_same_rules():
    before = {name: len(rules) for name, rules in RULES.items()}
    kept = dict(RULES)
    try:
        importlib.reload(elementwise)
        assert {name: len(rules) for name, rules in RULES.items()} == before
        assert RULES["mul"] != kept["mul"]
    finally:
        RULES.update(kept)
