"""What is proved equal to one tower is: nothing wrong, and almost all that is right."""

import inspect
from fractions import Fraction

import audited_losses
import jax
import jax.numpy as jnp
import known_wrong
import numpy as np
import pytest
import split_functions
import split_orders
import split_rows
from equal_programs import params_and_batch, run_on_towers
from jax import lax
from layouts import cases
from one_tower_programs import answer_for, equalities, of_loss, program_of, rows_of
from programs_with_advice import (
    OfMicroBatches,
    OnDevices,
    RightOnDevices,
    words_of,
)

import towerjax as tj
from towerjax.prover.equality.kinds import kinds
from towerjax.prover.equality.kinds.equation_pair import ProgramsDifferError, Sizes
from towerjax.prover.equality.kinds.kinds import Part, TowerRows, copy, part, rows
from towerjax.prover.equality.one_tower import Merge
from towerjax.prover.equality.rules.rules import RULES
from towerjax.prover.equality.walk.own_derivatives import has_own_derivatives
from towerjax.prover.programs.words import BY_OPTION

PARAMS, BATCH = params_and_batch(rows_of(1, False))
SPLIT = split_functions.SPLIT | split_rows.SPLIT | split_orders.SPLIT
TOGETHER = split_functions.TOGETHER | split_rows.TOGETHER
TOGETHER |= split_orders.TOGETHER
TOGETHER_UNPADDED = split_functions.TOGETHER_UNPADDED | split_rows.TOGETHER_UNPADDED
ONLY_PADDED = {name for name in SPLIT if "padding" in name}
"""Wrong only where towers have some."""


def answer_for_loss(fn, **options):
    return answer_for(fn, PARAMS, BATCH, **options)


@pytest.mark.few_fast(30)
@pytest.mark.parametrize("name", SPLIT)
def test_a_function_that_depends_on_the_split_is_not_proved(name):
    assert answer_for_loss(SPLIT[name], padded=name in ONLY_PADDED).says != "proved"


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_function_that_does_not_is_proved(name, padded):
    found = answer_for_loss(TOGETHER[name], padded=padded)
    assert found.says == "proved", found


@pytest.mark.parametrize("name", TOGETHER_UNPADDED)
def test_a_function_of_towers_without_padding_is_proved(name):
    found = answer_for_loss(TOGETHER_UNPADDED[name])
    assert found.says == "proved", found


def test_programs_that_compute_of_other_values_are_not_proved():
    def fn(params, batch, tower):
        x = batch["x"][:, 0]
        y = batch["y"]
        first, second = (x, y) if tower.num_towers == 1 else (y, x)
        return tj.Sum((jnp.tanh(first) + 2 * jnp.tanh(second)).sum())

    assert answer_for_loss(fn).says == "unknown"


def test_what_is_equal_for_two_numbers_of_towers_alone_is_not_proved():
    def fn(params, batch, tower):
        y = batch["y"][:24]
        return tj.Sum(y.reshape(-1, len(y) // (1 + (len(y) > 12))).max(1).sum())

    assert answer_for_loss(fn).says == "unknown"


LOSSES = {
    "T times": lambda p, b, t: tj.Sum(p["b"]),
    "1/T times": lambda p, b, t: tj.Weighted(b["y"].sum(), 1.0),
    "T^2 times": lambda p, b, t: tj.Sum(b["y"].sum() * t.num_towers**2),
    "1/T^3 times": lambda p, b, t: tj.Sum(b["y"].sum() / t.num_towers**3),
    "an average of the towers' averages": lambda p, b, t: tj.Weighted(
        b["y"].sum() / jnp.abs(b["y"]).sum(), 1.0
    ),
}


@pytest.mark.parametrize("text", LOSSES)
def test_what_is_refuted_says_the_factor(text):
    found = answer_for_loss(LOSSES[text])
    assert found.says == "refuted" and text in found.why, found


def test_what_is_unknown_says_since_which_line():
    found = answer_for_loss(SPLIT["sorted_rows"])
    lines = inspect.getsource(split_functions).splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "jnp.sort(b" in text)
    told = "the tower's rows in another order times the tower's rows"
    assert f"{told}, at tests/decks/split_functions.py:{line}" in found.why


# The decks of the audit.

# No rule knows that all rows are finite; 1e-9 of each tower is wrong, though little.
UNKNOWN = {"where_any", "mean_of_rows", "a term a constant"}
# Wrong where towers have padding: it counts, or makes groups of other rows, or a tower
# has nothing else, and NaN.
UNMASKED = """
    of_neighbours where_any of_all_towers at_least_one mean_of_rows surrogate dual
    stacked_totals in_two_sums two_means pairs_of_neighbours
""".split()
UNMASKED += ["a term of a number of rows", "a term of rows, divided"]
UNMASKED += ["a term of a tower's mean", "a term a constant", "a term to the mean"]
UNMASKED += ["times_its_weight"]


def said_of(deck, params, batch, **options):
    """The names of the losses by what is said of them."""
    found = {"proved": set(), "unknown": set(), "refuted": set()}
    for name, fn in deck.items():
        found[answer_for(fn, params, batch, **options).says].add(name)
    return found


OF_KNOWN = known_wrong.PARAMS, known_wrong.batch()
OF_AUDITED = audited_losses.PARAMS, audited_losses.BATCH


@pytest.mark.slow
def test_what_is_known_to_be_right_is_proved():
    known = said_of(known_wrong.RIGHT, *OF_KNOWN)
    assert known["unknown"] == UNKNOWN and not known["refuted"]
    assert len(known["proved"]) == 44
    audited = said_of(audited_losses.RIGHT, *OF_AUDITED)
    assert len(audited["proved"]) == len(audited_losses.RIGHT) == 25


@pytest.mark.slow
def test_what_is_right_with_padding_is_proved():
    known = said_of(known_wrong.RIGHT, *OF_KNOWN, padded=True)
    audited = said_of(audited_losses.RIGHT, *OF_AUDITED, padded=True)
    unknown = known["unknown"] | audited["unknown"]
    assert unknown == {*UNMASKED}
    assert len(known["proved"]) == 31 and len(audited["proved"]) == 24


def padded_losses(loss_fn, params, batch, examples):
    """A loss of so many examples, on 1, 2 and 4 towers that repeat their last ones."""
    fn = of_loss(loss_fn)
    leaves = program_of(fn, params, batch, 1, 12)[2]
    wanted = [i for i, x in enumerate(leaves) if x.merge is not Merge.PER_TOWER]
    losses = []
    for towers, size in {1: 12, 2: 6, 4: 6}.items():
        counts = np.full(towers, examples // towers, np.int32)
        counts[: examples % towers] += 1
        ends = np.cumsum(counts)
        pairs = zip(ends, np.maximum(counts, 1), strict=True)
        at = np.stack([np.resize(np.arange(end - n, end), size) for end, n in pairs])
        own = jax.tree.map(lambda x, at=at: x[at], batch)
        losses.append(run_on_towers(fn, params, own, towers, size, counts, wanted)[0])
    return np.array(losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*UNMASKED} - {"a term a constant"}))
def test_what_is_right_without_padding_alone_is_wrong_with_it(name):
    """That term is of 1e-9."""
    is_known = name in known_wrong.RIGHT
    deck = known_wrong.RIGHT if is_known else audited_losses.RIGHT
    given = OF_KNOWN if is_known else OF_AUDITED
    each = [padded_losses(deck[name], *given, examples) for examples in (11, 3)]
    assert not all(np.allclose(x[1:], x[0], rtol=1e-3) for x in each), each


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_nothing_that_is_known_to_be_wrong_is_proved(padded):
    known = said_of(known_wrong.WRONG, *OF_KNOWN, padded=padded)
    audited = said_of(audited_losses.WRONG, *OF_AUDITED, padded=padded)
    assert not known["proved"] and not audited["proved"]


@pytest.mark.slow
def test_nothing_that_is_wrong_where_padded_is_proved():
    known = said_of(known_wrong.WRONG_WHERE_PADDED, *OF_KNOWN, padded=True)
    wrong = audited_losses.WRONG_WHERE_PADDED
    audited = said_of(wrong, *OF_AUDITED, padded=True)
    assert not known["proved"] and not audited["proved"]


# Kinds.


def test_copies_are_parts_of_another_power():
    both = kinds.joined([part(1), copy(0)])
    assert (type(both), both.power) == (Part, 1)
    with pytest.raises(kinds.NotOfOneKindError, match="added to"):
        kinds.joined([part(0), copy(0)])


def test_rows_are_of_one_order():
    assert isinstance(kinds.joined([rows(), copy(), kinds.ZERO]), TowerRows)
    with pytest.raises(kinds.NotOfOneKindError, match="another order"):
        kinds.joined([rows(0, 1), rows(0, 2)])


def test_powers_of_a_product_are_added():
    product = kinds.product_of(part(1), copy(Fraction(-1, 2)))
    assert (type(product), product.power) == (Part, Fraction(1, 2))
    with pytest.raises(kinds.NotOfOneKindError, match="times"):
        kinds.product_of(part(), rows())


def test_dims_that_differ_are_those_of_rows_or_towers():
    sizes = Sizes((1, 2), (8, 4))
    shape = jax.ShapeDtypeStruct
    first = shape((3, 8), "f")
    second = shape((3, 4), "f")
    assert sizes.axes(first, second) == (1, None)
    assert sizes.axes(shape((1, 24), "f"), shape((2, 12), "f")) == (1, 0)
    with pytest.raises(ProgramsDifferError, match="no number of rows"):
        sizes.axes(shape((7,), "f"), shape((3,), "f"))
    with pytest.raises(ProgramsDifferError, match="several dims of rows"):
        sizes.axes(shape((8, 8), "f"), shape((4, 4), "f"))


def test_each_rule_says_why_it_holds():
    for name, rules in RULES.items():
        assert all(x.rule.__doc__ for x in rules), name


def test_short_floats_are_numbers():
    """NumPy knows no values of bfloat16: 1 is not 0, and 1 is not 2."""

    def fn(params, batch, tower):
        factor = jnp.asarray(tower.num_towers, jnp.bfloat16)
        number = np.asarray(3.0 + factor.dtype.type(tower.num_towers) ** 2)
        return tj.Sum((batch["y"] * number.astype(jnp.bfloat16)).sum())

    assert answer_for_loss(fn).says != "proved"
    one = lambda p, b, t: tj.Sum((b["y"] * np.ones(1, jnp.bfloat16)[0]).sum())  # noqa: E731
    assert answer_for_loss(one).says == "proved"


def test_metrics_beside_a_loss_have_answers_of_their_own():
    def fn(params, batch, tower):
        mean = tj.Weighted.mean(batch["y"] * params["b"], tower.weight)
        best = lax.pmax(batch["y"].max(), tower.axis_names)
        return tj.TowerOutput(mean, {"best": best, "last": batch["y"][-1]})

    found = equalities(of_loss(fn), PARAMS, BATCH)
    says = {x.leaf: x.says for x in found}
    assert says == {"loss": "proved", "best": "proved", "last": "unknown"}


def test_a_factor_of_the_number_of_towers_is_said_with_its_line():
    def fn(params, batch, tower):
        return tj.Weighted.mean(batch["y"] / tower.num_towers, tower.weight)

    found = answer_for_loss(fn)
    assert "1/T times" in found.why and "since a factor at" in found.why
    assert "by the number of towers" in found.advice


@jax.custom_vjp
def with_a_rule(x):
    return jnp.sin(x)


with_a_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))


@pytest.mark.parametrize("within", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize(
    "function, is_own",
    [(with_a_rule, True), (jax.nn.silu, False), (jnp.sin, False)],
    ids=["custom_vjp", "custom_jvp of JAX", "plain"],
)
def test_derivatives_of_a_rule_of_the_user_are_found_inside(function, is_own, within):
    """Also where, with ``jax_remat3``, JAX hides the program in an object."""
    program = jax.make_jaxpr(within(within(function)))(1.0)
    assert has_own_derivatives(program) is is_own


def test_each_advice_has_a_program_that_shows_it():
    on_devices = cases(OnDevices) | cases(RightOnDevices)
    of_option = {"devices": on_devices, "micro_batches": cases(OfMicroBatches)}
    for option, words in BY_OPTION.items():
        shown = [words_of(x)[1] for x in of_option[option].values()]
        for advice in words.cures.values():
            assert any(x in advice for x in shown), advice
