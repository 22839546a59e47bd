"""How does a model's data become batches? Pairs made one tree, epochs joined."""

import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.data.feed import anew, closing_iterator
from towerjax.data.ledger import Unused
from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import batch_signature
from towerjax.types import PyTree
from towerjax.types.options import check_whole

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

    def __post_init__(self) -> None:
        """Check the data as far as that takes none of it."""
        if self.epochs is not None:
            check_whole("epochs", self.epochs, 1)
        if self.most is not None:
            check_whole("steps", self.most, 1)
        if _is_one_batch(self.data):
            raise ValueError(
                f"{self.name} is one batch or whole arrays ({_kind(self.data)}), but it"
                " is gone through batch by batch. Pass [batch], or"
                " lambda: tj.batches((features, labels), batch_size)."
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
    def comes_again(self) -> bool:
        """A pass of another process begins with the same batches."""
        return True

    @property
    def prefetches(self) -> bool:
        """Has the data a thread of its own that places batches in advance?"""
        return bool(getattr(self.data, "prefetches", False))

    def __iter__(self) -> Generator[PyTree, None, None]:
        """The batches; what a pass opened is closed with it."""
        left = self.most
        for epoch in itertools.count() if self.epochs is None else range(self.epochs):
            is_empty = True
            is_ours = not isinstance(self.data, Iterable)
            is_ready = isinstance(self.data, Unused)  # a run made batches of it before
            with closing_iterator(self._made(), is_ours=is_ours) as elements:
                for element in itertools.islice(elements, left):
                    is_empty = False
                    left = None if left is None else left - 1
                    if not is_ready:
                        element = as_batch(element, with_labels=self.with_labels)
                    yield element
            if left == 0 or (is_empty and epoch == 0):
                return
            if is_empty:
                raise ValueError(
                    f"{self.name} gave no batches in epoch {epoch + 1}: it was gone"
                    " through before. A function must make them anew each time."
                )

    def _made(self) -> Iterable[Any]:
        if isinstance(self.data, Iterable):
            return self.data
        made = self.data()
        if _is_one_batch(made) or not isinstance(made, Iterable):
            raise ValueError(
                f"The function {self.name} returned a {_kind(made)}, which is no"
                " iterable of batches. Return a list, or tj.batches(...)."
            )
        return made


def _is_one_batch(data: Any) -> bool:
    arrays = Mapping | np.ndarray | jax.Array | PlacedBatch | str | bytes
    if isinstance(data, tuple) and len(data) == 2:  # (features, labels) by itself?
        return isinstance(data[0], arrays)
    return isinstance(data, arrays)


def _kind(value: Any) -> str:
    return type(value).__name__
