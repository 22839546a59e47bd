"""Each rule of the proof of equality holds: what it says of values is seen of them."""

import lemmas
import pytest
from lemma_cases import CASES

from towerjax.proof.equal.equation_pair import RULES

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
def test_what_a_rule_says_holds_in_all_worlds(name):
    tally = held(name, [*lemmas.WORLDS], each_in=3)
    assert tally.held or name in OF_SOME_VERSIONS
    assert not tally.broken, "\n".join(map(str, tally.broken[:5]))
