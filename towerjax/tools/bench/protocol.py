"""Time contenders in turns; report the median and its confidence interval."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from towerjax.types.options import check_number, check_whole


class Timed(Protocol):
    """A contender, which keeps its own state."""

    def run(self) -> Any:
        """Dispatch one call; the timer waits for its result."""
        ...


@dataclasses.dataclass(frozen=True)
class TimingProtocol:
    """How long, how often and in which order contenders are timed.

    All contenders of a trial are called ``warmup_calls`` times. Then each has its turn
    in every round, in reversed order in every second one. A turn is as many calls as
    fit into ``seconds_per_round``, the same for all; each call is awaited. The fastest
    and the slowest ``trim`` share of a turn's calls are dropped, and the mean of the
    others is the turn's value. No round is dropped: the median of the rounds is
    reported, with the `interval_of_median`. Ratios are taken round by round.

    Attributes:
      rounds: The number of rounds.
      seconds_per_round: About how long a turn lasts; 1 to 1,000 calls.
      warmup_calls: The number of calls that are not timed.
      trim: The share of a turn's calls that is dropped at each end, below 0.5.
      confidence: The confidence of the intervals.
      seed: The seed of the parameters; the seed of the batch is one more.

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
        for name, end in (
            ("seconds_per_round", math.inf),
            ("trim", 0.5),
            ("confidence", 1.0),
        ):
            what, highest = f"in [0, {end})", math.nextafter(end, 0)
            check_number(name, getattr(self, name), what, highest)
        _rank(self.rounds, self.confidence)

    def describe(self) -> str:
        """The protocol in words, for a report."""
        return (
            f"{self.warmup_calls} warm-up calls of each contender, then {self.rounds}"
            " rounds in which each has a turn, in reversed order every second round."
            f" A turn is about {self.seconds_per_round} s of awaited calls: the mean"
            f" without the fastest and the slowest {self.trim:.0%}. Figures are medians"
            f" over all rounds, with the {self.confidence:.0%} interval of the median"
            " by order statistics in brackets. Ratios are taken within a round. Workers"
            " keep the memory that they freed."
            f" Seeds: parameters {self.seed}, batch {self.seed + 1}."
        )


@dataclasses.dataclass(frozen=True)
class Interval:
    """A median, and the ends of its confidence interval."""

    median: float  # of the rounds
    low: float
    high: float

    def over(self, other: "Interval") -> "Interval":
        """The ratio of two intervals that were not measured in the same rounds."""
        return Interval(
            self.median / other.median, self.low / other.high, self.high / other.low
        )

    def times(self, factor: float) -> "Interval":
        """The interval times a positive factor."""
        return Interval(self.median * factor, self.low * factor, self.high * factor)


def interval_of_median(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median, with an interval that holds for any distribution.

    ``low`` and ``high`` are the ``r``-th smallest and the ``r``-th largest of ``n``
    values, ``r`` the largest for which ``1 - 2 P(Binomial(n, 1/2) < r) >=
    confidence``.

    Source:
      David and Nagaraja, Order Statistics, 3rd edition (2003), section 7.1.
    """
    ordered = np.sort(np.asarray(values, float))
    rank = _rank(len(ordered), confidence)
    return Interval(
        float(np.median(ordered)), float(ordered[rank - 1]), float(ordered[-rank])
    )


def _rank(count: int, confidence: float) -> int:
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
    """Seconds to the end and to the return of a call, ``[rounds, contenders, 2]``."""

    def turn(contender: Timed) -> np.ndarray:
        times = [_time_call(contender) for _ in range(calls)]
        return trimmed_mean(np.array(times), trim)

    return take_turns(contenders, rounds, turn)


def take_turns(
    contenders: Sequence[Any], rounds: int, turn: Callable[[Any], Any]
) -> np.ndarray:
    """Take turns, odd rounds reversed; the results ``[rounds, contenders, ...]``."""
    table = []
    for number in range(rounds):
        order = contenders[::-1] if number % 2 else contenders
        found = [turn(contender) for contender in order]
        table.append(found[::-1] if number % 2 else found)
    return np.array(table)


def _time_call(contender: Timed) -> tuple[float, float]:
    start = time.perf_counter()
    out = contender.run()
    returned = time.perf_counter()
    jax.block_until_ready(out)
    return time.perf_counter() - start, returned - start


def trimmed_mean(times: np.ndarray, trim: float) -> np.ndarray:
    """The mean over dim 0 without the ``trim`` share at each end."""
    dropped = int(len(times) * trim)
    return np.sort(times, axis=0)[dropped : len(times) - dropped].mean(axis=0)


def calls_in(seconds: float, contenders: Sequence[Timed], warmup_calls: int) -> int:
    """Warm the contenders up; return how many calls of the slowest one fit."""
    slowest = 0.0
    for contender in contenders:
        times = [_time_call(contender)[0] for _ in range(warmup_calls)]
        slowest = max(slowest, min(times))
    return int(np.clip(seconds / slowest, 1, 1000))
