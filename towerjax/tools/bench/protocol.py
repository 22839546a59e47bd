"""What is measured, a grid of trials, and how: in turns, as medians of intervals."""

import dataclasses
import itertools
import math
import os
import pathlib
import time
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from towerjax.collectives.choose import parse_ops
from towerjax.types.options import check_choice, check_number, check_text, check_whole

STRATEGIES = ("mirrored", "mirrored_scan", "mirrored_pmap", "one_device")
PEERS = ("jit", "pmap")

_DTYPE_NAMES = ("float32", "bfloat16", "float16")
_ALWAYS_SHOWN = ("model", "batch", "towers", "devices")


@dataclasses.dataclass(frozen=True)
class TimingProtocol:
    """How long, how often and in which order contenders are timed.

    Each contender has its turn in every round, in reversed order in every second one.
    A turn is as many awaited calls as fit into ``seconds_per_round``, and its value
    their mean without the fastest and the slowest tenth. The median of the
    rounds is reported, with its confidence interval. Ratios are taken round by round.

    Attributes:
      rounds: The number of rounds, at least 6: fewer give no 95% interval.
      seconds_per_round: About how long a turn lasts; 1 to 1,000 calls.

    Raises:
      ValueError: A value is out of its range.
    """

    rounds: int = 11
    seconds_per_round: float = 0.25

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 6)
        check_number("seconds_per_round", self.seconds_per_round, "seconds >= 0")


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


def interval_of_median(values: Any) -> Interval:
    """The median, with a 95% interval that holds for any distribution.

    ``low`` and ``high`` are the ``r``-th smallest and the ``r``-th largest of ``n``
    values, ``r`` the largest for which ``1 - 2 P(Binomial(n, 1/2) < r) >= 0.95``.

    Source:
      David and Nagaraja, Order Statistics, 3rd edition (2003), section 7.1.
    """
    ordered = np.sort(np.asarray(values, float))
    n = len(ordered)
    below = np.cumsum([math.comb(n, k) / 2**n for k in range(n // 2 + 1)])
    rank = int(np.sum(1 - 2 * below >= 0.95))
    low, high = ordered[rank - 1], ordered[-rank]
    return Interval(float(np.median(ordered)), float(low), float(high))


def in_turns(
    contenders: Sequence[Any], *, rounds: int, calls: int, trim: float = 0.0
) -> np.ndarray:
    """Seconds to the end and to the return of a call, ``[rounds, contenders, 2]``.

    A contender has a method ``run()``, which dispatches a call; its result is awaited.
    """

    def turn(contender: Any) -> np.ndarray:
        times = np.sort([_time_call(contender) for _ in range(calls)], axis=0)
        dropped = int(calls * trim)
        return times[dropped : calls - dropped].mean(axis=0)

    return take_turns(contenders, rounds, turn)


def take_turns(
    contenders: Sequence[Any], rounds: int, turn: Callable[[Any], Any]
) -> np.ndarray:
    """Take turns, odd rounds reversed; the results ``[rounds, contenders, ...]``."""
    table = []
    for number in range(rounds):
        order = -1 if number % 2 else 1
        table.append([turn(contender) for contender in contenders[::order]][::order])
    return np.array(table)


def _time_call(contender: Any) -> tuple[float, float]:
    start = time.perf_counter()
    out = contender.run()
    returned = time.perf_counter()
    jax.block_until_ready(out)
    return time.perf_counter() - start, returned - start


def calls_in(seconds: float, contenders: Sequence[Any]) -> int:
    """Call each three times; return how many calls of the slowest one fit."""
    slowest = max(min(_time_call(x)[0] for _ in range(3)) for x in contenders)
    return int(np.clip(seconds / slowest, 1, 1000))


@dataclasses.dataclass(frozen=True)
class Trial:
    """One thing to measure.

    Attributes:
      model: One of ``mlp, cnn, transformer, embedding``, or ``module:factory``.
      batch: Examples in the global batch.
      by: ``"towerjax"``, or the peer that runs it: ``"jit"``, ``"pmap"``, or
        ``module:function`` of your own, ``(trial, timing) -> record``.
      strategy: ``"mirrored"``; ``"mirrored_scan"`` and ``"mirrored_pmap"``, with that
        ``local`` or ``executor``; ``"one_device"``.
      towers: ``T``.
      devices: ``D``, which divides ``T``.
      cross_tower_ops: The op as Python text: ``"Packed(num_packs=2)"``.
      dtype: The dtype in which the model computes.
      micro_batches: ``A``.
      steps_per_call: ``K``.

    Raises:
      ValueError: An option is invalid.
    """

    model: str
    batch: int
    by: str = "towerjax"
    strategy: str = "mirrored"
    towers: int = 1
    devices: int = 1
    cross_tower_ops: str = "AllReduce()"
    dtype: str = "float32"
    micro_batches: int = 1
    steps_per_call: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "towers", "devices", "micro_batches", "steps_per_call"):
            check_whole(name, getattr(self, name), 1)
        if ":" not in str(self.by):
            check_choice("by", self.by, ("towerjax", *PEERS, "module:function"))
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("dtype", self.dtype, _DTYPE_NAMES)
        check_text("model", self.model, "a model's name")
        parse_ops(self.cross_tower_ops)

    def describe(self) -> str:
        """A short text: model, ``B``, ``T``, ``D``, and options that are not defaults.

        Example:
          >>> Trial("mlp", 256, towers=8, devices=2, dtype="bfloat16").describe()
          'mlp B=256 T=8 D=2 bfloat16'
        """
        words = [self.model, f"B={self.batch}", f"T={self.towers}", f"D={self.devices}"]
        letters = {"micro_batches": "A=", "steps_per_call": "K="}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in _ALWAYS_SHOWN and value != field.default:
                short = value.rpartition(":")[2] if field.name == "by" else value
                words.append(f"{letters.get(field.name, '')}{short}")
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every combination of the options is a trial, each once.

    Combinations in which ``D`` does not divide ``T``, or ``"one_device"`` has more than
    one tower, are left out. Combinations of one tower that differ in
    ``cross_tower_ops`` alone are one trial.

    Attributes:
      models: See `Trial`, as for all others.
      towers: ``T``.
      devices: ``D``; empty is one device a tower.
      batches: Examples in the global batch.
      batches_per_tower: Examples of each tower: the global batch has ``T`` times as
        many. Give these or ``batches``, or both.
      strategies: Of ``mirrored, mirrored_scan, mirrored_pmap, one_device``.
      cross_tower_ops: The ops as Python text.
      dtypes: Of ``float32, bfloat16, float16``.
      micro_batches: ``A``.
      steps_per_call: ``K``.
      peers: The peers that run each combination of model, ``D`` devices, batch and
        dtype, too: ``jit``, ``pmap``, ``module:function``.

    Raises:
      ValueError: An option is invalid, or no trial is left.

    Example:
      >>> grid = Grid(("mlp",), towers=(1, 4), devices=(1, 2), batches=(64,))
      >>> [trial.describe() for trial in grid.trials()]
      ['mlp B=64 T=1 D=1', 'mlp B=64 T=4 D=1', 'mlp B=64 T=4 D=2']
    """

    models: Sequence[str]
    towers: Sequence[int] = (1,)
    devices: Sequence[int] = ()
    batches: Sequence[int] = ()
    batches_per_tower: Sequence[int] = ()
    strategies: Sequence[str] = ("mirrored",)
    cross_tower_ops: Sequence[str] = ("AllReduce()",)
    dtypes: Sequence[str] = ("float32",)
    micro_batches: Sequence[int] = (1,)
    steps_per_call: Sequence[int] = (1,)
    peers: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the options by making the trials."""
        for name, value in vars(self).items():
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"{name}={value!r} must be a list, [{value!r}].")
            object.__setattr__(self, name, tuple(value))
        if not (self.batches or self.batches_per_tower):
            raise ValueError("A grid needs batches=[...] or batches_per_tower=[...].")
        if not self.trials():
            raise ValueError(f"No trial is left: in {self} no D divides a T.")

    def trials(self) -> tuple[Trial, ...]:
        """The trials, each once, by number of devices and then by model."""
        found: dict[Trial, None] = {}
        lists: dict[str, Sequence[Any]] = {
            "model": self.models,
            "dtype": self.dtypes,
            "towers": self.towers,
            "strategy": self.strategies,
            "cross_tower_ops": self.cross_tower_ops,
            "micro_batches": self.micro_batches,
            "steps_per_call": self.steps_per_call,
        }
        for values in itertools.product(*lists.values()):
            options = dict(zip(lists, values, strict=True))
            model, towers, dtype = (options[x] for x in ("model", "towers", "dtype"))
            batches = [*self.batches, *(towers * b for b in self.batches_per_tower)]
            if towers == 1:
                options["cross_tower_ops"] = "AllReduce()"
            elif options["strategy"] == "one_device":
                continue
            for devices, batch in itertools.product(self.devices or (towers,), batches):
                trial = Trial(batch=batch, devices=devices, **options)
                size = {"towers": devices, "devices": devices, "dtype": dtype}
                if towers % devices == 0:
                    peers = [Trial(model, batch, peer, **size) for peer in self.peers]
                    found |= dict.fromkeys([trial, *peers])
        models, by = tuple(self.models), ("towerjax", *self.peers)

        def place(trial: Trial) -> tuple[int, int, int]:
            return trial.devices, models.index(trial.model), by.index(trial.by)

        return tuple(sorted(found, key=place))


def read_toml(*sources: str | os.PathLike[str]) -> tuple[Grid, TimingProtocol]:
    r"""A grid and its timing protocol, from files and lines of TOML.

    Keys are `Grid`'s; a table ``[protocol]`` has `TimingProtocol`'s. Later sources
    override earlier ones.

    Args:
      sources: Files, and texts such as ``"towers=[1, 2]"`` or ``"protocol.rounds=7"``.

    Returns:
      ``(grid, protocol)``.

    Raises:
      ValueError: A source is no TOML, or has an unknown key or an invalid value; names
        the sources.
      OSError: A file cannot be read.

    Example:
      >>> lines = 'models = ["mlp"]', "batches = [64]\ntowers = [1, 2]"
      >>> grid, protocol = read_toml(*lines, "protocol.rounds=7")
      >>> len(grid.trials()), protocol.rounds
      (2, 7)
    """
    options: dict[str, Any] = {"protocol": {}}
    try:
        for source in map(str, sources):
            text = source if "=" in source else pathlib.Path(source).read_text()
            found = tomllib.loads(text)
            protocol = {**options["protocol"], **found.get("protocol", {})}
            options = {**options, **found, "protocol": protocol}
        timing = TimingProtocol(**options.pop("protocol"))
        return Grid(**options), timing
    except (ValueError, TypeError) as error:  # a TypeError of a key that is none
        raise ValueError(f"{', '.join(map(str, sources))}: {error}") from error
