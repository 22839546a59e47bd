"""Keep the batches that a run took and did not use, so that none is lost at its end."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from towerjax.data.feed import close, has_cursor, own_copy
from towerjax.types import PyTree


@dataclasses.dataclass(eq=False)
class Unused(Iterator[PyTree]):
    """Batches that a run took and did not use, then the rest of their source."""

    kept: collections.deque[PyTree]
    rest: Iterator[PyTree]
    used_before: int  # how many came before the next one, earlier runs included
    is_reproducible: bool  # whether a restarted job gets the same, from the first on

    def __next__(self) -> PyTree:
        """The next batch, which a run may have placed on the devices."""
        batch = self.kept.popleft() if self.kept else next(self.rest)
        self.used_before += 1
        return batch

    def close(self) -> None:
        """Drop the kept batches and close the source."""
        self.kept.clear()
        close(self.rest)


class Ledger(Iterator[PyTree]):
    """An iterator over a source that remembers each batch until a step has used it.

    A source with a cursor is set back to the last used batch; of others batches are
    kept.
    """

    def __init__(self, source: Iterable[PyTree], *, copies: bool) -> None:
        self._source, self._copies = source, copies
        self._iterator: Any = iter(source)
        self.has_cursor = has_cursor(self._iterator)
        # Of each batch not used yet the cursor after it, or else [the batch].
        self._taken: collections.deque[Any] = collections.deque()
        self._newest: list[PyTree] | None = None
        # After how many used batches, earlier runs included.
        self.cursor = self._iterator.get_state() if self.has_cursor else None
        self.used: int = getattr(source, "used_before", 0)
        self.prefetches = bool(getattr(source, "prefetches", False))
        # Whether a restarted job is known to get the same batches.
        known = isinstance(source, Sequence)
        self.is_reproducible = known or bool(getattr(source, "is_reproducible", False))

    def __next__(self) -> PyTree:
        """The next batch."""
        if self.has_cursor:
            batch = next(self._iterator)
            self._taken.append(self._iterator.get_state())
            return self._own(batch)
        # One C call: Ctrl-C between two operations would lose the batch.
        self._taken.extend(map(list, zip(itertools.islice(self._iterator, 1))))
        try:
            taken = self._taken[-1]
        except IndexError:
            raise StopIteration from None
        # len(_taken) would not do: `use` shortens it in another thread.
        if taken is self._newest:
            raise StopIteration
        self._newest = taken
        taken[0] = self._own(taken[0])
        return taken[0]

    def _own(self, batch: PyTree) -> PyTree:
        return jax.tree.map(own_copy, batch) if self._copies else batch

    def go_to(self, used: int, cursor: Any = None) -> None:
        """Skip the batches that an earlier process used."""
        if cursor is not None:
            self._iterator.set_state(cursor)
            self.cursor = self._iterator.get_state()
        else:
            left = max(used - self.used, 0)
            there = self.used + sum(1 for _ in itertools.islice(self._iterator, left))
            if there != used:
                raise ValueError(
                    f"{used} batches were used before, but these begin after"
                    f" {self.used} and end after {there}. Pass the same batches, from"
                    " the first one on."
                )
        self.used = used

    def placing(self, place: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
        """``place``, whose result the ledger keeps in place of the host's batch."""

        def place_and_keep(batch: PyTree) -> Any:
            out = place(batch)
            if self._newest is not None:
                self._newest[0] = out
            return out

        return place_and_keep

    def use(self, number: int) -> None:
        """Forget the oldest ``number`` batches, which steps have used."""
        used = [self._taken.popleft() for _ in range(number)]
        self.cursor = used[-1] if self.has_cursor else None
        self.used += number

    def rest(self) -> Iterator[PyTree]:
        """All unused batches; call it when no thread takes from the source any more."""
        if self.has_cursor:
            self._iterator.set_state(self.cursor)
            self._taken.clear()
            return self._iterator
        kept = collections.deque(batch for [batch] in self._taken)
        return Unused(kept, self._iterator, self.used, self.is_reproducible)

    def settle(self) -> None:
        """Set the source back to its last used batch, and close what was opened."""
        if self.has_cursor and self._taken:
            self.rest()
        if self._iterator is not self._source:  # one that was passed in stays open
            close(self._iterator)
