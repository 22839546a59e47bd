"""Which batches were taken and not used? Kept, so that none is lost when a run ends."""

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
      used_before: How many came before the next one, in another process too.
      comes_again: Does another process surely go through the same, from the first on?
    """

    def __init__(
        self,
        batches: Iterable[PyTree],
        rest: Iterator[PyTree],
        used_before: int,
        comes_again: bool,
    ) -> None:
        self._batches, self._rest = collections.deque(batches), rest
        self.used_before, self.comes_again = used_before, comes_again

    def __next__(self) -> PyTree:
        """The next batch, perhaps on the devices already."""
        batch = self._batches.popleft() if self._batches else next(self._rest)
        self.used_before += 1
        return batch

    def close(self) -> None:
        """Close the source, where it can be closed."""
        self._batches.clear()
        close(self._rest)


class Ledger(Iterator[PyTree]):
    """An iterator that remembers what it gave until that was used.

    A source with ``get_state`` and ``set_state``, such as `Batches` or an iterator of
    Grain, is set back to the last batch that was used; of others the batches are kept.
    """

    def __init__(self, source: Iterable[PyTree], *, copies: bool) -> None:
        self._source, self._copies = source, copies
        self._iterator: Any = iter(source)
        # Does the source say where it is, and can it be told?
        self.has_cursor = all(
            hasattr(self._iterator, name) for name in ("get_state", "set_state")
        )
        self._taken: collections.deque[_Taken] = collections.deque()
        self._newest: _Taken | None = None
        self.cursor = self._iterator.get_state() if self.has_cursor else None
        self.used: int = getattr(source, "used_before", 0)

    def __next__(self) -> PyTree:
        """The next batch."""
        # In one go: between two operations Ctrl-C could strike and lose the batch.
        self._taken.extend(map(_Taken, itertools.islice(self._iterator, 1)))
        # Not by its length, which another thread shortens meanwhile.
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
    def can_be_counted(self) -> bool:
        """Does the source surely begin with the same batches in another process?"""
        return isinstance(self._source, Sequence) or bool(
            getattr(self._source, "comes_again", False)
        )

    def go_to(self, used: int, cursor: Any = None) -> None:
        """Go on after batches that another process used."""
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
        """Has the source a thread of its own that places batches in advance?"""
        return bool(getattr(self._source, "prefetches", False))

    def placing(self, place: Callable[[PyTree], Any]) -> Callable[[PyTree], Any]:
        """``place``, of which the ledger keeps the result instead of the batch."""

        def placed(batch: PyTree) -> Any:
            out = place(batch)
            if not self.has_cursor:
                self._taken[-1].batch = out
            return out

        return placed

    def use(self, number: int) -> None:
        """Note that the oldest batches were used."""
        used = [self._taken.popleft() for _ in range(number)]
        self.cursor = used[-1].cursor
        self.used += number

    def rest(self) -> Iterator[PyTree]:
        """All batches that were not used, once nothing takes any more."""
        if self.has_cursor:
            self._iterator.set_state(self.cursor)
            self._taken.clear()
            return self._iterator
        kept = (taken.batch for taken in self._taken)
        return Unused(kept, self._iterator, self.used, self.can_be_counted)

    def close(self) -> None:
        """Close what was opened here: an iterator that was passed in stays open."""
        if self._iterator is not self._source:
            close(self._iterator)

    def settle(self) -> None:
        """Set a source back to what was used, and close what was opened."""
        if self.has_cursor and self._taken:
            self.rest()
        self.close()
