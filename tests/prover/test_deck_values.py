"""Every value of the decks' programs is what the walk says of it."""

import collections
import itertools

import pytest
from proved_programs import programs_of
from walked_values import held_values


def held(kind, deck, padded, most=None):
    """The values of a deck's programs, by kind, and those that are otherwise."""
    counts = collections.Counter()
    odd = []
    for name, *program in itertools.islice(programs_of(kind, deck, padded), most):
        found = held_values(*program)
        if found is not None:
            counts.update(found[0])
            odd += [(name, x) for x in found[1]]
    return counts, odd


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_a_value_is_what_is_said_of_it(padded):
    counts, odd = held("right", "audited_losses", padded, most=8)
    assert not odd and sum(counts.values()) > 40
    assert {name for name, _ in counts} >= {"TowerRows", "Part", "Zero"}


ALL_DECKS = [
    *[("right", x) for x in ("known_wrong", "audited_losses", "grid", "models")],
    *[("wrong", x) for x in ("known_wrong", "audited_losses", "models")],
]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("deck", ALL_DECKS, ids="-".join)
def test_a_value_of_any_deck_is_what_is_said_of_it(deck, padded):
    counts, odd = held(*deck, padded)
    assert not odd, odd[:5]
    assert sum(counts.values()) > 50
