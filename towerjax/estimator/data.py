"""Iterate over a model's data: pairs as one tree, epoch after epoch."""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.data.feed import as_reusable, close
from towerjax.data.ledger import Unused
from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import batch_signature
from towerjax.types import PyTree
from towerjax.types.options import check_whole

_EXHAUSTED: Any = object()

Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches ``(features, labels)`` or features, or a function that returns them."""


def as_batch(element: Any, *, with_labels: bool = True) -> PyTree:
    """``(features, labels)`` as the dict that the steps of a model take."""
    if isinstance(element, PlacedBatch):
        arrays = as_batch(element.arrays, with_labels=with_labels)
        args = (arrays, *element.args[1:])
        signature = batch_signature(arrays, args[2])
        return dataclasses.replace(element, args=args, signature=signature)
    if isinstance(element, list) and len(element) == 2:
        raise ValueError(
            "A batch is a list of two, which could be (features, labels) or two"
            " features. Make it a tuple for the first, or a dict for the second."
        )
    if isinstance(element, Mapping) and set(element) == {"features", "labels"}:
        raise ValueError(
            "A batch is a dict of 'features' and 'labels', but a dict is features. Pass"
            " the tuple (features, labels): tj.batches((features, labels), batch_size);"
            " or (batch, None) where these are names of features."
        )
    is_pair = isinstance(element, tuple) and len(element) == 2
    if not is_pair or hasattr(element, "_fields"):  # a named tuple is features
        return {"features": element}
    features, labels = element
    if labels is None or not with_labels:
        return {"features": features}
    return {"features": features, "labels": labels}


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Epochs of a data set, as an iterable of dicts; each ``iter`` starts again."""

    name: str  # the name of the caller's argument
    data: Data
    epochs: int | None = 1  # None never ends
    most: int | None = None  # at most so many batches, over all epochs
    with_labels: bool = True

    is_reproducible = True  # assumed: a restarted job gets the same batches

    def __post_init__(self) -> None:
        """Check the data without taking a batch from it."""
        check_whole("epochs", self.epochs, or_none=True)
        check_whole("steps", self.most, or_none=True)
        if _is_one_batch(self.data):
            raise ValueError(
                f"{self.name} is one batch or whole arrays"
                f" ({type(self.data).__name__}), but it is gone through batch by batch."
                " Pass [batch], or lambda: tj.batches((features, labels), batch_size)."
            )
        if not isinstance(self.data, Iterable) and not callable(self.data):
            raise ValueError(
                f"{self.name}={self.data!r} must be an iterable of (features, labels),"
                " or a function that returns one."
            )
        if self.epochs != 1:
            epochs = "" if self.epochs is None else f"={self.epochs}"
            why = f"epochs{epochs} goes through it again"
            object.__setattr__(self, "data", as_reusable(self.name, self.data, why))

    @property
    def used_before(self) -> int:
        """How many batches an interrupted run had used, where ``data`` is its rest."""
        return getattr(self.data, "used_before", 0)

    @property
    def prefetches(self) -> bool:
        """Whether the data has its own thread that places batches in advance."""
        return bool(getattr(self.data, "prefetches", False))

    def __length_hint__(self) -> int:
        """How many batches one epoch has, if the data knows."""
        known = operator.length_hint(self.data, -1)
        return known if known >= 0 and self.epochs == 1 else NotImplemented

    def __iter__(self) -> Iterator[PyTree]:
        """The batches; closing the iterator closes what it opened."""
        return _EpochsIterator(self)

    def open_epoch(self) -> Iterable[Any]:
        """The data of one epoch."""
        if isinstance(self.data, Iterable):
            return self.data
        opened = self.data()
        if _is_one_batch(opened) or not isinstance(opened, Iterable):
            raise ValueError(
                f"The function {self.name} returned a {type(opened).__name__}, which is"
                " no iterable of batches. Return a list, or tj.batches(...)."
            )
        return opened


class _EpochsIterator(Iterator[PyTree]):
    """One iteration over all epochs; it can continue after data that raised."""

    def __init__(self, source: Epochs) -> None:
        self._source, self._epoch, self._left = source, 0, source.most
        self._elements: Iterator[Any] | None = None  # of this epoch
        self._is_empty = self._failed = False
        # Its batches are dicts, or placed, already.
        self._is_ready = isinstance(source.data, Unused)

    def __next__(self) -> PyTree:
        """The next batch; begins the next epoch where one has ended."""
        while self._left != 0:
            if self._elements is None:
                self._elements, self._is_empty = iter(self._source.open_epoch()), True
            try:
                element = next(self._elements, _EXHAUSTED)
            except BaseException:
                self._failed = True
                raise
            if element is _EXHAUSTED:
                self._end_epoch()
                continue
            self._is_empty = self._failed = False
            left, self._left = self._left, 0  # a malformed batch ends the iteration
            if not self._is_ready:
                element = as_batch(element, with_labels=self._source.with_labels)
            self._left = None if left is None else left - 1
            return element
        self.close()
        raise StopIteration

    def _end_epoch(self) -> None:
        source = self._source
        self._close_elements()
        self._epoch += 1
        # A generator that raised looks exhausted, but its epoch was not complete.
        if self._failed or (self._is_empty and self._epoch == 1):
            self._left = 0
        elif self._is_empty:
            raise ValueError(
                f"{source.name} gave no batches in epoch {self._epoch}: it was gone"
                " through before. A function must make them anew each time."
            )
        elif self._epoch == source.epochs:
            self._left = 0

    def close(self) -> None:
        """Close the iterator of this epoch, unless the caller passed it in."""
        self._left = 0
        self._close_elements()

    def _close_elements(self) -> None:
        elements, self._elements = self._elements, None
        if elements is not None and elements is not self._source.data:
            close(elements)


def _is_one_batch(data: Any) -> bool:
    arrays = Mapping | np.ndarray | jax.Array | PlacedBatch | str | bytes
    if isinstance(data, tuple) and len(data) == 2:  # perhaps (features, labels)
        return isinstance(data[0], arrays)
    return isinstance(data, arrays)
