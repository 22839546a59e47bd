"""Keep the batches that a run took and did not use, so that none is lost at its end."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from towerjax.data.feed import close, own_copy
from towerjax.types import PyTree


class _Taken:
    """A batch that was taken from its source, and the source's cursor after it."""

    def __init__(self, batch: PyTree) -> None:
        self.batch, self.cursor = batch, None


class Unused(Iterator[PyTree]):
    """Batches that a run took and did not use, then the rest of their source.

    Attributes:
      used_before: How many batches came before the next one, earlier runs included.
      is_reproducible: Whether a restarted job gets the same batches, from the first on.
    """

    def __init__(
        self,
        batches: Iterable[PyTree],
        rest: Iterator[PyTree],
        used_before: int,
        is_reproducible: bool,
    ) -> None:
        self._batches, self._rest = collections.deque(batches), rest
        self.used_before, self.is_reproducible = used_before, is_reproducible

    def __next__(self) -> PyTree:
        """The next batch, which a run may have placed on the devices."""
        batch = self._batches.popleft() if self._batches else next(self._rest)
        self.used_before += 1
        return batch

    def close(self) -> None:
        """Drop the kept batches and close the source."""
        self._batches.clear()
        close(self._rest)


class Ledger(Iterator[PyTree]):
    """An iterator over a source that remembers each batch until a step has used it.

    A source with ``get_state`` and ``set_state``, such as `Batches` or a Grain
    iterator, is set back to the last used batch; for others the batches are kept.
    """

    def __init__(self, source: Iterable[PyTree], *, copies: bool) -> None:
        self._source, self._copies = source, copies
        self._iterator: Any = iter(source)
        self.has_cursor = all(
            hasattr(self._iterator, name) for name in ("get_state", "set_state")
        )
        self._taken: collections.deque[_Taken] = collections.deque()
        self._newest: _Taken | None = None
        self.cursor = self._iterator.get_state() if self.has_cursor else None
        self.used: int = getattr(source, "used_before", 0)

    def __next__(self) -> PyTree:
        """The next batch."""
        # One C call: Ctrl-C between two operations would lose the batch.
        self._taken.extend(map(_Taken, itertools.islice(self._iterator, 1)))
        # len(_taken) would not do: `use` shortens it in another thread.
        if not self._taken or self._taken[-1] is self._newest:
            raise StopIteration
        self._newest = taken = self._taken[-1]
        if self._copies:
            taken.batch = jax.tree.map(own_copy, taken.batch)
        batch = taken.batch
        if self.has_cursor:
            taken.cursor, taken.batch = self._iterator.get_state(), None
        return batch

    @property
    def is_reproducible(self) -> bool:
        """Whether the source is known to give a restarted job the same batches."""
        return isinstance(self._source, Sequence) or bool(
            getattr(self._source, "is_reproducible", False)
        )

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

    @property
    def prefetches(self) -> bool:
        """Whether the source has its own thread that places batches in advance."""
        return bool(getattr(self._source, "prefetches", False))

    def placing(self, place: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
        """``place``, whose result the ledger keeps in place of the host's batch."""

        def place_and_keep(batch: PyTree) -> Any:
            out = place(batch)
            if not self.has_cursor:
                self._taken[-1].batch = out
            return out

        return place_and_keep

    def use(self, number: int) -> None:
        """Forget the oldest ``number`` batches, which steps have used."""
        used = [self._taken.popleft() for _ in range(number)]
        self.cursor = used[-1].cursor
        self.used += number

    def rest(self) -> Iterator[PyTree]:
        """All unused batches; call it when no thread takes from the source any more."""
        if self.has_cursor:
            self._iterator.set_state(self.cursor)
            self._taken.clear()
            return self._iterator
        kept = (taken.batch for taken in self._taken)
        return Unused(kept, self._iterator, self.used, self.is_reproducible)

    def close(self) -> None:
        """Close the iterator if this ledger made it; one passed in stays open."""
        if self._iterator is not self._source:
            close(self._iterator)

    def settle(self) -> None:
        """Set the source back to its last used batch, and close what was opened."""
        if self.has_cursor and self._taken:
            self.rest()
        self.close()
