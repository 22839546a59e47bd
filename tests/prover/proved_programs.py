"""The programs of one tower that the proof compares, for the steps of the decks."""

import proved_decks
import pytest

from towerjax.check.equality import of_step

DECKS = {"right": proved_decks.RIGHT, "wrong": proved_decks.WRONG}


def programs_of(kind, deck, padded):
    """Yield each pair of programs of a deck's losses that have numbers for rows.

    It is (the loss's name, two programs, the kinds of their inputs, their axes, whether
    they may be padded).
    """
    asked = []

    def ask(programs, inputs, outputs, *, axes, padded=False):
        asked.append((programs, inputs, axes, padded))
        return real(programs, inputs, outputs, axes=axes, padded=padded)

    real = of_step.equal_to_one_tower
    for name, make in DECKS[kind][deck].items():
        asked.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(of_step, "equal_to_one_tower", ask)
            proved_decks.answers_for(make(), padded)
        for programs, inputs, axes, is_padded in asked:
            if not all(isinstance(x.rows, int) for x in programs):
                continue
            for pair in zip(programs, programs[1:], strict=False):
                yield name, pair, inputs, axes, is_padded
