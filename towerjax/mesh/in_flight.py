"""How many calls may run at once on the devices?"""

import collections
import functools

import jax

from towerjax.types import PyTree


class InFlight:
    """The results of the last few calls, so that not too many run at once.

    Before JAX 0.12 more than 32 programs with collectives in flight on several CPU
    devices deadlock and abort the process. A depth of 16 costs nothing measurable
    and leaves room for programs of other makers.
    """

    def __init__(self, *, bounded: bool) -> None:
        self._results: collections.deque[jax.Array] | None = (
            collections.deque() if bounded else None
        )

    def add(self, *results: PyTree) -> None:
        """Note the first array of a call's results; wait for the one 16 calls ago."""
        if self._results is None:
            return
        for result in results:
            if leaves := jax.tree.leaves(result):
                self._results.append(leaves[0])
                break
        if len(self._results) > 16:
            self._results.popleft().block_until_ready()


@functools.cache
def in_flight_on(devices: tuple[str, ...]) -> InFlight:
    """One count for all steps on the same devices: the limit is the devices' own."""
    return InFlight(bounded=devices[0].startswith("cpu:") and len(devices) > 1)
