"""Cut data into batches, and prefetch: place batches in a thread ahead of the steps."""

import collections
import dataclasses
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from towerjax.data.shard import count_examples, with_shared, without_shared
from towerjax.data.sparse_rows import SparseRows
from towerjax.types import PyTree, Whole
from towerjax.types.options import cast_ints, check_flag, check_whole
from towerjax.types.warning import warn


@dataclasses.dataclass(eq=False)
class Batches(Iterator[PyTree]):
    """An iterator over the batches of a data set, with a position; `batches` makes it.

    Attributes:
      position: The number of batches before the next one, from the first epoch on.
    """

    data: PyTree = dataclasses.field(repr=False)
    examples: int  # N
    batch_size: int  # B
    epochs: int | None  # None never ends
    seed: int | None  # None keeps the order
    drop_remainder: bool  # leave out the smaller last batch of each epoch
    position: int = 0

    def __post_init__(self) -> None:
        """Take the data apart."""
        cast_ints(self)  # JSON cannot hold NumPy's integers
        rows, self._shared = without_shared(self.data)
        self._sparse, self._dense = SparseRows.put_aside(rows)
        self._shuffled: tuple[int, np.ndarray] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """How many batches an epoch has."""
        whole, over = divmod(self.examples, self.batch_size)
        return whole if self.drop_remainder or not over else whole + 1

    def __next__(self) -> PyTree:
        """The next batch, a pytree ``[B, ...]``."""
        epoch, number = divmod(self.position, self.batches_per_epoch)
        if self.epochs is not None and epoch >= self.epochs:
            raise StopIteration
        start = number * self.batch_size
        rows: Any = slice(start, start + self.batch_size)
        if self.seed is not None:
            rows = self._order(self.seed, epoch)[rows]
        batch = jax.tree.map(lambda x: x[rows], self._dense)
        if self._sparse.leaves:
            batch = self._sparse.take(np.arange(self.examples)[rows], batch)
        if self._shared:
            batch = with_shared(batch, [Whole(x) for x in self._shared])
        self.position += 1
        return batch

    def __len__(self) -> int:
        """How many batches are left."""
        if self.epochs is None:  # list and tqdm catch a TypeError, go without a length
            raise TypeError(
                "tj.batches(..., epochs=None) never end, so they have no len."
            )
        return self.epochs * self.batches_per_epoch - self.position

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self._shuffled is None or self._shuffled[0] != epoch:
            rng = np.random.default_rng((seed, epoch))
            self._shuffled = epoch, rng.permutation(self.examples)
        return self._shuffled[1]

    @property
    def most_rows(self) -> int:
        """How many examples the largest batch has."""
        return min(self.batch_size, self.examples)

    def at(self, position: int) -> "Batches":
        """The same batches from another position on; this iterator does not move."""
        length = math.inf if self.epochs is None else self.epochs
        check_whole("position", position, 0, length * self.batches_per_epoch)
        return dataclasses.replace(self, position=position)

    def get_state(self) -> dict[str, Any]:
        """The position and the cut, as JSON can hold them."""
        fields = dataclasses.fields(self)[1:]  # without the data
        return {field.name: getattr(self, field.name) for field in fields}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position that `get_state` gave."""
        others = [
            f"{name} was {state.get(name)} and is {now}"
            for name, now in self.get_state().items()
            if name not in ("position", "epochs") and state.get(name) != now
        ]
        if others:
            raise ValueError(
                f"The position is one among other batches: {', '.join(others)}. Cut the"
                " data as before, or say tj.Checkpointer(batches='anew')."
            )
        self.position = self.at(state["position"]).position


Placed = TypeVar("Placed")

_END: Any = object()
_STOP_PATIENCE_S = 5


def batches(
    data: PyTree,
    batch_size: int,
    *,
    epochs: int | None = 1,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Batches:
    """The data cut into global batches, epoch after epoch.

    The last batch of an epoch is smaller where ``batch_size`` does not divide the
    examples; what happens to it is the step's ``remainder``.

    Args:
      data: A pytree of NumPy arrays ``[N, ...]``; ``IndexedRows`` and ``BCOO`` too.
      batch_size: ``B``, examples of a batch over all towers.
      epochs: How often to go through the data; None never ends.
      seed: None keeps the order, and batches are views of the data. A number
        shuffles each epoch, the same way for the same ``(seed, epoch)``.
      drop_remainder: Leave out the smaller last batch of each epoch.

    Returns:
      An iterator of pytrees ``[B, ...]`` with a position: ``.at(step)`` gives the
      batches from that one on, shuffled ones too, and `run` sets the position to the
      last batch that was used. Its ``len`` is the number of batches that are left.

    Raises:
      ValueError: The data is malformed, or a number is out of range.

    Example:
      >>> [b.tolist() for b in batches(np.arange(5), 2)]
      [[0, 1], [2, 3], [4]]
    """
    num_examples = count_examples(SparseRows.put_aside(without_shared(data)[0])[1])
    check_whole("batch_size", batch_size, 1)
    check_whole("epochs", epochs, or_none=True)
    check_whole("seed", seed, 0, math.inf, or_none=True)
    check_flag("drop_remainder", drop_remainder)
    if drop_remainder and num_examples < batch_size:
        raise ValueError(
            f"drop_remainder leaves nothing of {num_examples} examples in batches of"
            f" {batch_size}."
        )
    return Batches(data, num_examples, batch_size, epochs, seed, drop_remainder)


def in_groups(
    iterable: Iterable[PyTree], size: int, *, before: int = 0
) -> Iterator[list[PyTree]]:
    """Lists of batches up to a multiple of ``size``, where the first is ``before``."""
    iterator = iter(iterable)
    most = size - before % size
    while True:
        group: list[PyTree] = []
        try:
            for batch in itertools.islice(iterator, most):
                group.append(batch)
        finally:  # also before an exception of the source
            if group:
                yield group
        if len(group) < most:
            return
        most = size


def own_copy(leaf: Any) -> Any:
    """A copy of a NumPy array, whose memory a loader may overwrite."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def as_reusable(name: str, data: Any, why: str) -> Any:
    """Data that can be iterated several times; raise for a one-pass iterator."""
    if isinstance(data, Batches):
        return functools.partial(data.at, data.position)
    if hasattr(data, "__next__"):
        raise ValueError(
            f"{name} is a {type(data).__name__}, which can be gone through only once,"
            f" but {why}. Pass a list, or {name}=lambda: tj.batches(data, batch_size)."
        )
    return data


def has_cursor(iterator: Any) -> bool:
    """Whether an iterator tells its position, and can be set to one."""
    if isinstance(iterator, Stream):
        return iterator.get_state() is not None
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def close(iterator: Any) -> None:
    """Close an iterator that has ``close`` and is not running in a thread."""
    if not getattr(iterator, "gi_running", False):
        getattr(iterator, "close", lambda: None)()


def prefetch(
    iterable: Iterable[Any], place: Callable[[Any], Placed], *, depth: int
) -> "Stream[Placed]":
    """The elements of an iterable, placed in order by a thread while devices work."""
    return Stream(lambda *_: ((place(x), None) for x in iterable), depth)


class _Feed:
    """What a thread and the stream of its elements share."""

    def __init__(self, depth: int) -> None:
        # (element, position after it, failure)
        self.ready: collections.deque[tuple[Any, Any, Any]] = collections.deque()
        self.added, self.stopped = threading.Event(), threading.Event()
        # Counts the elements that may still be pulled, so that depth bounds the memory.
        self.room = threading.Semaphore(depth)

    def add(self, element: Any, after: Any = None, failure: Any = None) -> None:
        self.ready.append((element, after, failure))
        self.added.set()


class Stream(Iterator[Placed]):
    """Elements that a thread makes in advance, with a position; Ctrl-C loses none.

    ``begin(position, stopped)`` gives ``(element, position after it)``, from a position
    that was set, or from the start; ``stopped`` is an event to heed in long waits. With
    ``depth`` 0 there is no thread. An exception comes after all earlier elements.
    """

    def __init__(
        self,
        begin: Callable[[Any, threading.Event], Generator[tuple[Placed, Any]]],
        depth: int,
        start: dict[str, Any] | None = None,
    ) -> None:
        self._begin, self._depth, self._after = begin, depth, start
        self._open(None)

    def _open(self, position: dict[str, Any] | None) -> None:
        self._failure: str | None = None
        self._feed = feed = _Feed(self._depth)
        self._made = made = self._begin(position, feed.stopped)
        self.close: Callable[[], Any] = made.close
        if self._depth:
            args = made, feed, jax.config.read("jax_enable_x64")
            named = {"name": "towerjax-prefetch", "daemon": True}
            self._thread = threading.Thread(target=_fill, args=args, **named)
            # Called once: by hand, by the garbage collector, for which the thread must
            # not refer to this, or at Python's exit, which a thread could abort.
            self.close = weakref.finalize(self, _stop, self._thread, feed)

    def __next__(self) -> Placed:
        """The next element, which is not kept: it would stay on the devices."""
        if self._failure is not None:
            raise ValueError(
                f"This pass through the data ended with {self._failure}, and cannot"
                " continue. Begin another, iter(dataset)."
            )
        try:
            if self._depth:
                return self._next_of_thread()
            # Without a call of next(), after which Ctrl-C would lose the element.
            for element, after in self._made:
                self._after = after
                return element
        except Exception as failure:
            if not isinstance(failure, StopIteration):
                self._failure = repr(failure)
            raise
        raise StopIteration

    def _next_of_thread(self) -> Placed:
        feed = self._feed
        if self._thread.ident is None and not feed.stopped.is_set():
            try:
                self._thread.start()
            except BaseException:
                self.close()
                raise
        while not feed.ready:
            feed.added.wait()
            feed.added.clear()
        feed.room.release()
        element, after, failure = feed.ready[0]
        if element is _END:
            self.close()
            raise failure or StopIteration
        # No call up to the return: after one, Ctrl-C would lose the element.
        self._after = after
        del feed.ready[0]
        return element

    def get_state(self) -> dict[str, Any] | None:
        """The position after the last element; None where there is none."""
        return self._after

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the element that `get_state` was called after."""
        if set(state) != set(self._after or ()):
            raise ValueError(
                f"A place in a distributed data set has 'elements' and 'rows', but got"
                f" {sorted(state)}. Pass the batches that it was taken from."
            )
        self.close()
        self._open(state)
        self._after = state


def _fill(made: Iterable[tuple[Any, Any]], feed: _Feed, x64: bool) -> None:
    try:
        # A `with jax.enable_x64(...)` around the run does not reach its threads.
        with jax.enable_x64(x64):
            iterator = iter(made)
            while True:
                feed.room.acquire()
                if feed.stopped.is_set():
                    return
                found = next(iterator, None)
                if found is None:
                    feed.add(_END)
                    return
                feed.add(*found)
    except BaseException as failure:
        feed.add(_END, failure=failure)


def _stop(thread: threading.Thread, feed: _Feed) -> None:
    """End the thread; warn where a loader hangs, which cannot be interrupted."""
    feed.stopped.set()
    feed.room.release()
    feed.ready.clear()
    feed.add(_END)
    if thread.ident in (None, threading.get_ident()):
        return  # never started; or the garbage collector called this in the thread
    thread.join(_STOP_PATIENCE_S)
    if thread.is_alive():
        warn(
            f"The input is still busy with one batch {_STOP_PATIENCE_S} s after the run"
            " stopped; its thread ends when that batch is there. Give the loader a"
            " timeout.",
            RuntimeWarning,
        )
