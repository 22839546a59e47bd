"""How does a model's data become batches? Pairs made one tree, epochs joined."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.data.feed import anew, close
from towerjax.data.ledger import Unused
from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import batch_signature
from towerjax.types import PyTree
from towerjax.types.options import check_whole

_END: Any = object()

Data: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches ``(features, labels)`` or features alone, or a function that gives them."""


def as_batch(element: Any, *, with_labels: bool = True) -> PyTree:
    """``(features, labels)`` as one tree, as the steps of a model take it."""
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
class Passes:
    """Passes over a data set, as batches of one tree; each ``iter`` starts anew."""

    name: str  # what the caller calls the data
    data: Data
    epochs: int | None = 1  # None never ends
    most: int | None = None  # no more batches than this, in all
    with_labels: bool = True

    comes_again = True  # a pass of another process begins with the same batches

    def __post_init__(self) -> None:
        """Check the data as far as that takes none of it."""
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
            data = anew(self.name, self.data, f"epochs{epochs} goes through it again")
            object.__setattr__(self, "data", data)

    @property
    def used_before(self) -> int:
        """How many batches a run used of those that it left."""
        return getattr(self.data, "used_before", 0)

    @property
    def prefetches(self) -> bool:
        """Has the data a thread of its own that places batches in advance?"""
        return bool(getattr(self.data, "prefetches", False))

    def __iter__(self) -> Iterator[PyTree]:
        """The batches; what a pass opened is closed with it."""
        return _Through(self)

    def made(self) -> Iterable[Any]:
        """The data of one epoch."""
        if isinstance(self.data, Iterable):
            return self.data
        made = self.data()
        if _is_one_batch(made) or not isinstance(made, Iterable):
            raise ValueError(
                f"The function {self.name} returned a {type(made).__name__}, which is"
                " no iterable of batches. Return a list, or tj.batches(...)."
            )
        return made


class _Through(Iterator[PyTree]):
    """Once through all passes; where data raises and can go on, this can too."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._epoch, self._left = passes, 0, passes.most
        self._elements: Iterator[Any] | None = None  # of this epoch
        self._is_empty = self._failed = False
        # A run made batches of it before.
        self._is_ready = isinstance(passes.data, Unused)

    def __next__(self) -> PyTree:
        """The next batch, of the next epoch where one ends."""
        while self._left != 0:
            if self._elements is None:
                self._elements, self._is_empty = iter(self._passes.made()), True
            try:
                element = next(self._elements, _END)
            except BaseException:
                self._failed = True
                raise
            if element is _END:
                self._end_epoch()
                continue
            self._is_empty = self._failed = False
            left, self._left = self._left, 0  # nothing follows what is malformed
            if not self._is_ready:
                element = as_batch(element, with_labels=self._passes.with_labels)
            self._left = None if left is None else left - 1
            return element
        self.close()
        raise StopIteration

    def _end_epoch(self) -> None:
        passes = self._passes
        self._close_elements()
        self._epoch += 1
        # What an exception ended, as it does a generator, has not come to its end.
        if self._failed or (self._is_empty and self._epoch == 1):
            self._left = 0
        elif self._is_empty:
            raise ValueError(
                f"{passes.name} gave no batches in epoch {self._epoch}: it was gone"
                " through before. A function must make them anew each time."
            )
        elif self._epoch == passes.epochs:
            self._left = 0

    def close(self) -> None:
        """Close what was opened here: an iterator that was passed in stays open."""
        self._left = 0
        self._close_elements()

    def _close_elements(self) -> None:
        elements, self._elements = self._elements, None
        if elements is not None and elements is not self._passes.data:
            close(elements)


def _is_one_batch(data: Any) -> bool:
    arrays = Mapping | np.ndarray | jax.Array | PlacedBatch | str | bytes
    if isinstance(data, tuple) and len(data) == 2:  # (features, labels) by itself?
        return isinstance(data[0], arrays)
    return isinstance(data, arrays)
