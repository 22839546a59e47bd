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
    is_dict = isinstance(element, Mapping) and set(element) == {"features", "labels"}
    if is_dict or (isinstance(element, list) and len(element) == 2):
        raise ValueError(
            f"A batch is a {type(element).__name__} of two, which could be features and"
            " labels or features alone. Pass the tuple (features, labels), or (batch,"
            " None)."
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
        _check_batches(self.name, self.data, or_function=True)
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


class _EpochsIterator(Iterator[PyTree]):
    """One iteration over all epochs; it can continue after data that raised."""

    def __init__(self, source: Epochs) -> None:
        self._source, self._epoch, self._left = source, 0, source.most
        self._elements: Iterator[Any] | None = None  # of this epoch
        self._is_empty = self._failed = False

    def __next__(self) -> PyTree:
        """The next batch; begins the next epoch where one has ended."""
        source = self._source
        while self._left != 0:
            if self._elements is None:
                self._elements, self._is_empty = self._open(), True
            failed, self._failed = self._failed, True
            element = next(self._elements, _EXHAUSTED)
            self._failed = False
            if element is _EXHAUSTED:
                self._end_epoch(failed)
                continue
            self._is_empty = False
            left, self._left = self._left, 0  # a malformed batch ends the iteration
            if not isinstance(source.data, Unused):  # whose batches are dicts already
                element = as_batch(element, with_labels=source.with_labels)
            self._left = None if left is None else left - 1
            return element
        self.close()
        raise StopIteration

    def _open(self) -> Iterator[Any]:
        """The data of one epoch."""
        data: Any = self._source.data
        if not isinstance(data, Iterable):
            data = data()
            _check_batches(f"{self._source.name}()", data)
        return iter(data)

    def _end_epoch(self, failed: bool) -> None:
        self._close_elements()
        self._epoch += 1
        # A generator that raised looks exhausted, but its epoch was not complete.
        if self._is_empty and not failed and self._epoch > 1:
            raise ValueError(
                f"{self._source.name} gave no batches in epoch {self._epoch}: it was"
                " gone through before. A function must make them anew each time."
            )
        if failed or self._is_empty or self._epoch == self._source.epochs:
            self._left = 0

    def close(self) -> None:
        """Close the iterator of this epoch, unless the caller passed it in."""
        self._left = 0
        self._close_elements()

    def _close_elements(self) -> None:
        elements, self._elements = self._elements, None
        if elements is not None and elements is not self._source.data:
            close(elements)


def _check_batches(name: str, data: Any, *, or_function: bool = False) -> None:
    """Raise unless the data is an iterable of batches, as far as its type tells."""
    arrays = Mapping | np.ndarray | jax.Array | PlacedBatch | str | bytes
    is_pair = isinstance(data, tuple) and len(data) == 2  # perhaps (features, labels)
    is_one = isinstance(data[0] if is_pair else data, arrays)
    if is_one or not (isinstance(data, Iterable) or (or_function and callable(data))):
        what = f"one batch or whole arrays ({type(data).__name__})"
        raise ValueError(
            f"{name} is {what if is_one else repr(data)}, but it is gone through batch"
            " by batch. Pass [batch], tj.batches((features, labels), batch_size), or a"
            " function that returns such."
        )
