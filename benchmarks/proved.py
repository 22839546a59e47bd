"""Count which right and wrong losses are proved equal to one tower, without a run.

Each loss is that of a train step of two towers: known losses and traps of the tests,
the operations of the grid, and models as people build them, of small widths. Beneath
the table stands each right loss that is not proved, with the reason and its line.

Run: ``python -m benchmarks.proved``
"""

import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax

from benchmarks.harness import begin, options_of, parser_of

_TESTS = pathlib.Path(__file__).parents[1] / "tests"
_KEPT = 4  # the losses of each deck in a small run
COLUMNS = {
    "losses": "",
    "batches": "",
    "number": "",
    "proved": "",
    "unknown": "",
    "refuted": "",
    "CPU s each": ".2f",
}


def said_of(make: Callable[[], Any], padded: bool, answers_for: Any) -> tuple[str, str]:
    """Return the worst answer for a loss's leaves, and the reason."""
    found = answers_for(make(), padded)
    for says in ("refuted", "unknown"):
        for each in found:
            if each.says == says:
                return says, f"{each.leaf}: {each.why}"
    return "proved", ""


Said: TypeAlias = dict[str, tuple[str, str]]
"""What is said of each loss of a deck, and why, by name."""


def asked(
    decks: Any, padded: bool, most: int
) -> Iterator[tuple[str, str, Said, float]]:
    """Yield for each deck its kind, its name, the answers, and CPU seconds."""
    of_right = ("right", decks.RIGHT, decks.right_of)
    of_wrong = ("wrong", decks.WRONG, decks.wrong_of)
    for kind, names, losses_of in (of_right, of_wrong):
        for deck in names:
            losses = [*losses_of(deck, padded).items()][:most]
            start = time.process_time()
            said = {
                name: said_of(make, padded, decks.answers_for) for name, make in losses
            }
            yield kind, deck, said, time.process_time() - start


def main() -> None:
    """Print the table, and beneath it the right losses that are not proved."""
    parser = parser_of(__doc__)
    parser.add_argument("--most", type=int, default=1000, help="losses of each deck")
    options = options_of(parser, most=_KEPT)
    sys.path[:0] = [str(_TESTS), str(_TESTS / "decks")]
    jax.config.update("jax_num_cpu_devices", 2)
    decks = importlib.import_module("proved_decks")
    table = begin("train steps of two towers", COLUMNS, options)
    unproved = []
    for padded in (False, True):
        layout = "padded" if padded else "full"
        for kind, deck, said, seconds in asked(decks, padded, options.most):
            answers = [says for says, _ in said.values()]
            counts = [answers.count(x) for x in ("proved", "unknown", "refuted")]
            each = seconds / max(len(said), 1)
            table.row(f"{kind}: {deck}", layout, len(said), *counts, each)
            unproved += [
                f"{layout} {deck}: {name}: {why}"
                for name, (says, why) in said.items()
                if kind == "right" and says != "proved"
            ]
    for text in unproved:
        table.note(text)


if __name__ == "__main__":
    main()
