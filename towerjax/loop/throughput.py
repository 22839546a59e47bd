"""The rates of a run: steps, examples, FLOPs and counted metrics per second."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from towerjax.jaxprs.flops import Flops
from towerjax.types.options import is_one_real
from towerjax.types.tables import in_flops

# The rate that is shown beside a step is taken over this many steps, or fewer at the
# start.
_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Done:
    """The work that was done, and the seconds that it took."""

    seconds: float = 0.0
    steps: int = 0
    examples: int = 0
    products: int = 0  # products of two numbers, see `Flops`
    counts: tuple[float, ...] = ()  # the total of each metric of ``counting``

    def since(self, other: "Done") -> "Done":
        """Subtract the work done before: what was done after ``other``."""
        before = other.counts or (0.0,) * len(self.counts)
        return Done(
            self.seconds - other.seconds,
            self.steps - other.steps,
            self.examples - other.examples,
            self.products - other.products,
            tuple(a - b for a, b in zip(self.counts, before, strict=True)),
        )


class Throughput:
    """A counter of the work that a run's steps have done.

    Attributes:
      done: The work done so far, without the time of steps in flight.
      uncounted: The step's arithmetic that is not counted.
    """

    def __init__(self, counting: Sequence[str] = (), peak: float | None = None) -> None:
        """Start counting.

        ``counting`` names metrics that count things. ``peak`` is the FLOP/s of all
        devices.
        """
        self._counting = tuple(counting)
        self._peak = peak
        self.done = Done(counts=(0.0,) * len(self._counting))
        self.uncounted: tuple[str, ...] = ()
        self._last = collections.deque([self.done], maxlen=_STEPS + 1)

    def add(
        self, seconds: float, metrics: Mapping[str, Any], examples: int, flops: Flops
    ) -> None:
        """Add a step; ``seconds`` is the time of all steps so far."""
        done = self.done
        counts = [_count_in(metrics, name) for name in self._counting]
        self.uncounted = flops.uncounted or self.uncounted
        self.done = Done(
            seconds,
            done.steps + 1,
            done.examples + examples,
            done.products + flops.products,
            tuple(a + b for a, b in zip(done.counts, counts, strict=True)),
        )
        self._last.append(self.done)

    def go_back(self, done: Done) -> None:
        """Count on from an earlier point of the run, in the time that has passed."""
        counts = done.counts or (0.0,) * len(self._counting)
        self.done = dataclasses.replace(done, seconds=self.done.seconds, counts=counts)
        self._last.clear()
        self._last.append(self.done)

    def now(self) -> dict[str, float]:
        """Compute the rates over the last steps, by name."""
        return self.rates(self.done.since(self._last[0]))

    def rates(self, done: Done) -> dict[str, float]:
        """Divide work by seconds, by name; ``mfu`` is the share of the peak."""
        per_second = 1 / max(done.seconds, 1e-9)
        rates = {
            "steps_per_second": done.steps * per_second,
            "examples_per_second": done.examples * per_second,
        }
        for name, count in zip(self._counting, done.counts, strict=True):
            rates[f"{name}_per_second"] = count * per_second
        if done.products:
            rates["flops_per_second"] = done.products * per_second
            if self._peak is not None:
                rates["mfu"] = done.products * per_second / self._peak
        return rates


def flops_in_words(rates: Mapping[str, float], is_least: bool) -> str:
    """Word FLOP/s and their share of the peak; "" if none were counted."""
    if "flops_per_second" not in rates:
        return ""
    text = "at least " * is_least + f"{in_flops(rates['flops_per_second'])}/s"
    return text + (f" ({rates['mfu']:.1%} of the peak)" if "mfu" in rates else "")


def _count_in(metrics: Mapping[str, Any], name: str) -> float:
    if name not in metrics:
        raise ValueError(
            f"per_second names {name!r}, but the metrics of a step are"
            f" {', '.join(map(repr, metrics))}. Return TowerOutput(loss,"
            f" metrics={{{name!r}: tj.Sum(tower.weight.sum())}}), or name one of these."
        )
    value = metrics[name]
    if not is_one_real(value):
        raise ValueError(
            f"per_second={name!r} must name a metric that is a single number. Return a"
            " tj.Sum of a scalar."
        )
    return float(value)
