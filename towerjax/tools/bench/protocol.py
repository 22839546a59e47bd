"""How is a step timed? Contenders in turns, a median, and the interval it lies in."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from towerjax.types.options import check_whole


class Timed(Protocol):
    """What can be timed: it keeps its own state."""

    def run(self) -> Any:
        """Start one call; what it returns is awaited."""
        ...


@dataclasses.dataclass(frozen=True)
class TimingProtocol:
    """How long, how often and in which order is timed.

    All contenders of a trial are called ``warmup_calls`` times. Then each has its turn
    in every round, in reversed order in every second one. A turn is as many calls as
    fit into ``seconds_per_round``, the same for all; each call is awaited. Of the calls
    of a turn the fastest and the slowest ``trim`` share are dropped, the mean of the
    others is the turn's value. Of the rounds none is dropped: reported is their
    median, with the `interval_of_median`. Ratios are taken round by round.

    Attributes:
      rounds: How many.
      seconds_per_round: How long a turn lasts, about; at least one call.
      warmup_calls: Calls that are not timed.
      trim: Which share of a turn's calls is dropped at each end, below 0.5.
      confidence: Of the intervals.
      seed: Of parameters; that of the batch is one more.

    Raises:
      ValueError: A value is out of its range, or so few rounds give no such interval.
    """

    rounds: int = 11
    seconds_per_round: float = 0.25
    warmup_calls: int = 3
    trim: float = 0.1
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("warmup_calls", 1), ("seed", 0)):
            check_whole(name, getattr(self, name), least)
        for name, low, high in (
            ("seconds_per_round", 0, math.inf),
            ("trim", 0, 0.5),
            ("confidence", 0, 1),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value < high:
                raise ValueError(f"{name}={value!r} must be in [{low}, {high}).")
        _ranks(self.rounds, self.confidence)

    def describe(self) -> str:
        """The protocol in words, for a report."""
        return (
            f"{self.warmup_calls} warm-up calls of each contender, then {self.rounds}"
            " rounds in which each has its turn, in reversed order every second round;"
            f" a turn is about {self.seconds_per_round} s of awaited calls, of which"
            f" the fastest and the slowest {self.trim:.0%} are dropped and the others'"
            " mean taken. Figures are medians over all rounds; in brackets, the"
            f" {self.confidence:.0%} interval of the median by order statistics."
            " Ratios are of the same round. Workers keep the memory that they freed."
            f" Seeds: parameters {self.seed}, batch {self.seed + 1}."
        )


@dataclasses.dataclass(frozen=True)
class Interval:
    """A median, and where the true one lies."""

    median: float  # of the rounds
    low: float
    high: float

    def over(self, other: "Interval") -> "Interval":
        """The ratio of two that were not measured in the same rounds."""
        return Interval(
            self.median / other.median, self.low / other.high, self.high / other.low
        )

    def scaled(self, factor: float) -> "Interval":
        """Each number times a positive factor."""
        return Interval(self.median * factor, self.low * factor, self.high * factor)

    def inverse(self, numerator: float) -> "Interval":
        """A positive numerator over it: a rate of a time."""
        return Interval(
            numerator / self.median, numerator / self.high, numerator / self.low
        )


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median, with an interval that holds for any distribution.

    ``low`` and ``high`` are the ``r``-th smallest and the ``r``-th largest of ``n``
    values, ``r`` the largest for which ``1 - 2 P(Binomial(n, 1/2) < r) >=
    confidence``.

    Source:
      David and Nagaraja, Order Statistics, 3rd edition (2003), section 7.1.
    """
    ordered = np.sort(np.asarray(values, float))
    rank = _ranks(len(ordered), confidence)
    return Interval(
        float(np.median(ordered)), float(ordered[rank - 1]), float(ordered[-rank])
    )


def _ranks(count: int, confidence: float) -> int:
    """The ``r`` of `interval_of_median`."""
    rank, below = 0, 0.0
    while rank <= count // 2:
        below += math.comb(count, rank) / 2**count
        if 1 - 2 * below < confidence:
            break
        rank += 1
    if rank == 0:
        needed = math.ceil(1 - math.log2(1 - confidence))
        raise ValueError(
            f"{count} rounds give no {confidence:.0%} interval of a median; at least"
            f" {needed} do. Use rounds={needed}, or a lower confidence."
        )
    return rank


def in_turns(
    contenders: Sequence[Timed], *, rounds: int, calls: int, trim: float = 0.0
) -> np.ndarray:
    """Seconds of a call, awaited and until it returns, ``[rounds, contenders, 2]``."""

    def turn(contender: Timed) -> np.ndarray:
        times = [_timed(contender) for _ in range(calls)]
        return trimmed_mean(np.array(times), trim)

    return of_turns(contenders, rounds, turn)


def of_turns(
    contenders: Sequence[Any], rounds: int, turn: Callable[[Any], Any]
) -> np.ndarray:
    """What each contender's turns come to, in reversed order every second round."""
    table = []
    for number in range(rounds):
        order = contenders[::-1] if number % 2 else contenders
        found = [turn(contender) for contender in order]
        table.append(found[::-1] if number % 2 else found)
    return np.array(table)


def _timed(contender: Timed) -> tuple[float, float]:
    start = time.perf_counter()
    out = contender.run()
    returned = time.perf_counter()
    jax.block_until_ready(out)
    return time.perf_counter() - start, returned - start


def trimmed_mean(times: np.ndarray, trim: float) -> np.ndarray:
    """The mean over dim 0 without the extremes."""
    dropped = int(len(times) * trim)
    return np.sort(times, axis=0)[dropped : len(times) - dropped].mean(axis=0)


def calls_in(seconds: float, contenders: Sequence[Timed], warmup_calls: int) -> int:
    """Warm the contenders up; how many calls of the slowest fit."""
    slowest = 0.0
    for contender in contenders:
        times = [_timed(contender)[0] for _ in range(warmup_calls)]
        slowest = max(slowest, min(times))
    return int(np.clip(seconds / slowest, 1, 1000))
