"""The parts that all benchmarks share: options, turns of contenders, and a table.

A round times every contender once, and every second round goes in reverse order, so
that all contenders meet what the machine does meanwhile. Figures are medians of rounds.
A ratio is the median of the rounds' ratios.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike

from towerjax.sweeps.turns import (
    Interval,
    Runs,
    in_turns,
    interval_of_median,
    take_turns,
)

_Contender = TypeVar("_Contender")


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose description is the first line of a module's docstring."""
    return argparse.ArgumentParser(description=str(about).splitlines()[0])


def options_of(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **small: Any
) -> argparse.Namespace:
    """Parse the command line; ``--small`` has other defaults, for CI."""
    parser.add_argument("--small", action="store_true", help="a small run, for CI")
    parser.add_argument("--json", action="store_true", help="a line of JSON a row")
    if parser.parse_known_args(argv)[0].small:
        parser.set_defaults(**small)
    return parser.parse_args(argv)


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The times of contenders in each round.

    Attributes:
      seconds: ``[rounds, contenders]``, of one call or one turn.
    """

    seconds: np.ndarray

    def medians(self) -> list[float]:
        """Return the seconds of each contender, as the median of the rounds."""
        return np.median(self.seconds, axis=0).tolist()

    def least(self) -> list[float]:
        """Return the seconds of each contender in its fastest round."""
        return self.seconds.min(axis=0).tolist()

    def ratios(self, one: int, other: int) -> np.ndarray:
        """Return each round's time of one contender over another's, ``[rounds]``."""
        return self.seconds[:, one] / self.seconds[:, other]

    def ratio(self, one: int, other: int) -> float:
        """Return the median of the rounds' ratios."""
        return float(np.median(self.ratios(one, other)))

    def interval(self, one: int, other: int) -> Interval:
        """Return the median of the rounds' ratios, with its 95 % interval."""
        return interval_of_median(self.ratios(one, other))

    def quartiles(self, one: int, other: int) -> tuple[float, float, float]:
        """Return the quartiles of the rounds' ratios."""
        low, middle, high = np.quantile(self.ratios(one, other), (0.25, 0.5, 0.75))
        return float(low), float(middle), float(high)


def turns(
    contenders: Sequence[_Contender],
    turn: Callable[[_Contender], ArrayLike],
    *,
    rounds: int,
    warm: int = 1,
) -> np.ndarray:
    """Let contenders take turns, and return what ``turn`` returned in each round.

    Args:
      contenders: What takes turns.
      turn: ``contender -> numbers``, such as seconds: ``[...]``.
      rounds: How many count.
      warm: Rounds before these, which do not.

    Returns:
      ``[rounds, contenders, ...]``.
    """
    take_turns(contenders, warm, turn)
    return take_turns(contenders, rounds, turn)


def awaited_calls(
    contenders: Sequence[Runs], *, rounds: int, calls: int, warm: int = 1
) -> tuple[Rounds, Rounds]:
    """Time calls that are each waited for, and until they return.

    A turn is ``calls`` calls, of which the mean without the fastest and the slowest
    tenth counts.

    Args:
      contenders: Each dispatches a call, and returns what is waited for.
      rounds: How many count.
      calls: Of a turn.
      warm: Rounds before these, which do not count.

    Returns:
      The times until the results are there, and until the calls return.
    """
    in_turns(contenders, rounds=warm, calls=calls)
    table = in_turns(contenders, rounds=rounds, calls=calls, trim=0.1)
    return Rounds(table[..., 0]), Rounds(table[..., 1])


Form: TypeAlias = str | Callable[[Any], str]
"""How a column's values are shown: as `format` takes it, or a function."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table whose rows are printed as they are measured.

    Attributes:
      columns: The name of each, with the form of its values.
      as_json: Is a row a line of JSON, with raw values, instead of one of Markdown?
    """

    columns: Mapping[str, Form]
    as_json: bool

    def row(self, *values: Any) -> None:
        """Print a row, with a value for each column."""
        row = dict(zip(self.columns, values, strict=True))
        if self.as_json:
            where = {"jax": jax.__version__, "platform": jax.default_backend()}
            print(json.dumps(where | row, default=dataclasses.asdict), flush=True)
        else:
            print(_line(map(_shown, row.values(), self.columns.values())), flush=True)

    def note(self, text: str) -> None:
        """Print a line beneath the table."""
        print(json.dumps({"note": text}) if self.as_json else text, flush=True)


def begin(
    about: str, columns: Mapping[str, Form], options: argparse.Namespace
) -> Table:
    """Print what a table is about, and its head; return the table for its rows."""
    if not options.json:
        print(f"\nJAX {jax.__version__}, {jax.default_backend()}, {about}\n")
        print(_line(columns))
        print("|---" * len(columns) + "|", flush=True)
    return Table(columns, options.json)


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: Any, form: Form) -> str:
    if value is None:
        return "-"
    if callable(form):
        return form(value)
    if isinstance(value, tuple):
        return ", ".join(format(each, form) for each in value)
    return format(value, form)


def devices_of(number: int) -> tuple[str, ...]:
    """Return the names of the first devices of this process's platform."""
    return tuple(f"{jax.default_backend()}:{i}" for i in range(number))
