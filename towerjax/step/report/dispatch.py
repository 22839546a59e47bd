"""How long does a call keep the host, and how long until it is done?"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians over some calls, each awaited before the next.

    Attributes:
      calls: How many.
      dispatch_s: Until the call returned: the host's own time, in which it could not
        prepare the next batch.
      step_s: Until the results were there.
    """

    calls: int
    dispatch_s: float
    step_s: float


def timed(call: Callable[[Any], Any], start: Any, calls: int) -> Timing:
    """How long calls take, after one that does not count."""
    dispatched, done = [], []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        start, results = call(start)
        dispatched.append(time.perf_counter() - begin)
        jax.block_until_ready((start, results))
        done.append(time.perf_counter() - begin)
    return Timing(calls, statistics.median(dispatched[1:]), statistics.median(done[1:]))
