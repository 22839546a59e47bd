"""What is proved equal to one tower, without a run, of right and of wrong losses.

Each loss is a train step's, of two towers: known ones and traps of the tests, the
operations of the grid, and models as people build them, of small widths. Beneath the
table stands each right loss that is not proved, with the reason and its line.

Run: ``python -m benchmarks.proved``
"""

import argparse
import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import options_of

_TESTS = pathlib.Path(__file__).parents[1] / "tests"
_KEPT = 4  # of each deck, in a small run


def said_of(make: Callable[[], Any], padded: bool, answers_for: Any) -> tuple[str, str]:
    """The worst that is said of a loss' leaves, and why."""
    found = answers_for(make(), padded)
    for says in ("refuted", "unknown"):
        for each in found:
            if each.says == says:
                return says, f"{each.leaf}: {each.why}"
    return "proved", ""


def rows_of(decks: Any, padded: bool, most: int) -> Iterator[tuple[str, ...]]:
    """The rows of the table, and beneath each the right losses that are not proved."""
    of_right = ("right", decks.RIGHT, decks.right_of)
    of_wrong = ("wrong", decks.WRONG, decks.wrong_of)
    for kind, names, losses_of in (of_right, of_wrong):
        for deck in names:
            losses = [*losses_of(deck, padded).items()][:most]
            start = time.process_time()
            said = {
                name: said_of(make, padded, decks.answers_for) for name, make in losses
            }
            seconds = time.process_time() - start
            counts = [
                sum(says == wanted for says, _ in said.values())
                for wanted in ("proved", "unknown", "refuted")
            ]
            layout = "padded" if padded else "full"
            cells = [f"{kind}: {deck}", layout, len(losses), *counts]
            yield (*map(str, cells), f"{seconds / max(len(losses), 1):.2f}")
            if kind == "right":
                for name, (says, why) in said.items():
                    if says != "proved":
                        yield (f"  {name}: {why}",)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1000, help="losses of each deck")
    args = options_of(parser, most=_KEPT)
    sys.path.insert(0, str(_TESTS))
    jax.config.update("jax_num_cpu_devices", 2)
    decks = importlib.import_module("proved_decks")
    heads = ("losses", "batches", "number", "proved", "unknown", "refuted", "CPU s")
    print(("{:24}" + "{:>9}" * 6).format(*heads))
    for padded in (False, True):
        for cells in rows_of(decks, padded, args.most):
            is_row = len(cells) == len(heads)
            line = ("{:24}" + "{:>9}" * 6).format(*cells) if is_row else cells[0]
            print(line, flush=True)


if __name__ == "__main__":
    main()
