"""Time contenders in turns; return medians of rounds, and their intervals."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike

from towerjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Interval:
    """A median over rounds, and the ends of its 95% confidence interval."""

    median: float
    low: float
    high: float

    def times(self, factor: float) -> "Interval":
        """Multiply the interval by a positive factor."""
        return Interval(self.median * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interval_of_median(values: ArrayLike) -> Interval:
    """Take the median, with a 95% interval that holds for any distribution.

    ``low`` and ``high`` are the ``r``-th smallest and the ``r``-th largest of ``n``
    values. ``r`` is the largest number for which ``1 - 2 P(Binomial(n, 1/2) < r) >=
    0.95``. See David and Nagaraja, Order Statistics, 3rd edition (2003), section 7.1.
    """
    ordered = np.sort(np.asarray(values, float))
    n = len(ordered)
    below = np.cumsum([math.comb(n, k) / 2**n for k in range(n // 2 + 1)])
    rank = int(np.sum(1 - 2 * below >= 0.95))
    low = ordered[rank - 1]
    high = ordered[-rank]
    return Interval(float(np.median(ordered)), float(low), float(high))


Runs: TypeAlias = Callable[[], PyTree]
"""A contender: dispatches a call, whose result is awaited."""

_Timed = TypeVar("_Timed")


def in_turns(
    contenders: Sequence[Runs], *, rounds: int, calls: int, trim: float = 0.0
) -> np.ndarray:
    """Time calls of each contender in turns.

    The result is ``[rounds, contenders, 2]``: the seconds of a call until its results
    are there, and until it returns. ``trim`` is the share of a turn's fastest calls,
    and also of its slowest, that is left out.
    """

    def turn(contender: Runs) -> np.ndarray:
        times = np.sort([_time_call(contender) for _ in range(calls)], axis=0)
        dropped = int(calls * trim)
        return times[dropped : calls - dropped].mean(axis=0)

    return take_turns(contenders, rounds, turn)


def take_turns(
    contenders: Sequence[_Timed], rounds: int, turn: Callable[[_Timed], ArrayLike]
) -> np.ndarray:
    """Give each contender a turn in each round; every second round is reversed.

    Returns the results of ``turn``, ``[rounds, contenders, ...]``.
    """
    table = []
    for number in range(rounds):
        order = -1 if number % 2 else 1
        table.append([turn(contender) for contender in contenders[::order]][::order])
    return np.array(table)


def _time_call(contender: Runs) -> tuple[float, float]:
    start = time.perf_counter()
    out = contender()
    returned = time.perf_counter()
    jax.block_until_ready(out)
    return time.perf_counter() - start, returned - start


def calls_in(seconds: float, contenders: Sequence[Runs]) -> int:
    """Measure how many calls of the slowest contender fit into ``seconds``.

    Each contender is called three times to find out.
    """
    slowest = max(min(_time_call(x)[0] for _ in range(3)) for x in contenders)
    return int(np.clip(seconds / slowest, 1, 1000))
