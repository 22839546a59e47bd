"""Bring batches from a source to the steps: placed in advance, with a position."""

import collections
import dataclasses
import functools
import inspect
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.data.feed import Batches
from towerjax.data.placer import PlacedBatch
from towerjax.types import PyTree
from towerjax.types.boundary import warn
from towerjax.types.options import check_takes
from towerjax.types.refusals import a_type
from towerjax.types.trees import sorted_keys

Placed = TypeVar("Placed")

_END: Any = object()
_STOP_PATIENCE_S = 5


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The argument of a function that makes one process's input.

    Attributes:
      process_index: The number of the process, from 0.
      num_processes: The number of processes ``P``.
      num_towers: The number of towers ``T`` of all processes together.

    Example:
      >>> InputContext(process_index=1, num_processes=2, num_towers=8).part_of(64)
      32
    """

    process_index: int
    num_processes: int
    num_towers: int

    def part_of(self, batch_size: int) -> int:
        """Compute this process's even share ``B / P`` of a global batch."""
        if batch_size % self.num_processes:
            raise ValueError(
                f"A global batch of {batch_size} examples cannot be shared evenly by"
                f" {self.num_processes} processes. Use a multiple of"
                f" {self.num_processes}."
            )
        return batch_size // self.num_processes


def check_batches(name: str, batches: Any, *, or_function: bool = False) -> None:
    """Raise unless ``batches`` can be iterated, or called if that is allowed."""
    is_one = isinstance(batches, Mapping | PlacedBatch | np.ndarray | jax.Array | str)
    can_iterate = not is_function(batches) or hasattr(batches, "__getitem__")
    if is_one or not (can_iterate or (or_function and callable(batches))):
        kind = a_type(batches)
        more = ", or a function that gives one" * or_function
        instead = "Call it, or pass" if callable(batches) else "Pass"
        raise ValueError(
            f"{name} is {f'one batch ({kind})' if is_one else kind}, but must be an"
            f" iterable of batches{more}. {instead} [batch], or tj.batches(data,"
            " batch_size)."
        )


def as_reusable(name: str, data: Any, why: str) -> Any:
    """Make sure that the data can be iterated again.

    Raises for an iterator that can be used once only.
    """
    if isinstance(data, Batches):
        return functools.partial(data.at, data.position)
    if hasattr(data, "__next__"):
        raise ValueError(
            f"{name} is {a_type(data)}, which can be iterated only once, but {why}."
            f" Pass a list, or {name}=lambda: tj.batches(data, batch_size)."
        )
    return data


def check_source(source: Any) -> bool:
    """Refuse what is no source; tell if it makes one process's own part.

    Raises if it is not a source of batches.
    """
    check_batches("The data set", source, or_function=True)
    if not is_function(source):
        return False
    try:
        inspect.signature(source).bind()
    except TypeError:
        check_takes("source(context)", source, None)
        return True
    return False


def open_source(source: Any, *context: InputContext) -> Any:
    """Iterate over the source; a function is first called with the context."""
    if is_function(source):
        source = source(*context)
        check_batches("The result of the data set's function", source)
    # A tf.data set gives NumPy arrays by this method, and tensors without it.
    return iter(getattr(source, "as_numpy_iterator", lambda: source)())


def is_function(source: Any) -> bool:
    """Return whether the source is a function to call, because it is not iterable."""
    return not isinstance(source, Iterable) and not hasattr(source, "as_numpy_iterator")


def from_tensors(batch: PyTree) -> PyTree:
    """Replace tensors of other libraries in a batch by arrays."""
    with sorted_keys("batch", batch):
        return jax.tree.map(_from_tensor, batch)


def _from_tensor(leaf: Any) -> Any:
    """Turn a tensor of another library into an array; keep any other leaf."""
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return leaf
    if hasattr(leaf, "detach"):  # PyTorch
        leaf = leaf.detach().cpu()
        if "bfloat16" in str(leaf.dtype):  # NumPy has no bfloat16
            return jnp.from_dlpack(leaf)
    if hasattr(leaf, "numpy"):
        leaf = leaf.numpy()
    return np.asarray(leaf) if hasattr(leaf, "__array__") else leaf


class Position(NamedTuple):
    """How far a run has come in its batches."""

    used: int  # the number of batches that steps used, in earlier runs too
    cursor: Any = None  # the batches' ``get_state()``, or None without one


class WithCursor(Protocol):
    """An iterator that tells its position, such as one of `batches` or of Grain."""

    def __next__(self) -> PyTree:
        """Take the next batch."""
        ...

    def get_state(self) -> Any:
        """Give the position after the last batch, in a form that JSON can hold."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Continue after the position that `get_state` returned."""
        ...


class _Told:
    """Reads batches that have ``get_state``, and goes back by ``set_state``."""

    def __init__(self, elements: WithCursor) -> None:
        self._elements = elements

    def take(self, number: int, place: Callable[[PyTree], Placed]) -> Placed:
        """Take the next batch, and place it by ``place``."""
        return place(next(self._elements))

    def position(self, number: int) -> Position:
        """Give the position after batch ``number``, the one taken last."""
        return Position(number, self._elements.get_state())

    def forget(self, number: int) -> None:
        """Do nothing: no batches are stored, because they can be read again."""

    def go_back(self, to: Position) -> WithCursor | None:
        """Go back to a position, so that the batch after it comes next."""
        self._elements.set_state(to.cursor)
        return self._elements


class _Kept:
    """Reads batches without ``get_state``; stores those that no step has used yet."""

    def __init__(self, elements: Iterator[PyTree]) -> None:
        self._elements = elements
        self._kept: dict[int, Any] = {}  # number -> batch

    def take(self, number: int, place: Callable[[PyTree], Placed]) -> Placed:
        if number not in self._kept:
            # This takes and stores a batch in one call of C code. Between two calls
            # Ctrl-C could lose the batch.
            self._kept.update(zip((number,), self._elements, strict=False))
        if number not in self._kept:
            raise StopIteration
        # The placed batch replaces the loader's arrays, which are freed.
        placed = self._kept[number] = place(self._kept[number])
        return placed

    def position(self, number: int) -> Position:
        return Position(number)

    def forget(self, number: int) -> None:
        for used in [x for x in list(self._kept) if x <= number]:
            del self._kept[used]

    def go_back(self, to: Position) -> None:
        pass


class Source(Iterator[PyTree]):
    """The batches of a run, which can continue just after the last used batch.

    So no batch is lost that was only fetched in advance.

    Attributes:
      has_cursor: Whether the data set reports its position, so that another process can
        continue there.
      is_reproducible: Whether a restarted job is known to get the same batches.
      prefetches: Whether a thread of their own places them in advance.
      used_before: The number of batches that this run and earlier ones have used.
      last: The position after the last batch that steps have used.
    """

    def __init__(self, batches: Iterable[PyTree]) -> None:
        self._elements: Any = iter(batches)
        # Whether `settle` closes it; a user's own iterator stays open.
        self._opened = self._elements is not batches
        self.has_cursor = has_cursor(self._elements)
        self._cursor = (_Told if self.has_cursor else _Kept)(self._elements)
        known = isinstance(batches, Sequence)
        self.is_reproducible = known or bool(getattr(batches, "is_reproducible", False))
        self.prefetches = bool(getattr(batches, "prefetches", False))
        self.used_before: int = getattr(batches, "used_before", 0)
        self._taken = 0  # the number of the newest batch
        length = operator.length_hint(self._elements, operator.length_hint(batches, -1))
        self._all = None if length < 0 else self.used_before + length
        self.last = self._cursor.position(self.used_before)
        self._first = self.last

    def __next__(self) -> PyTree:
        """Take the next batch; an interrupted run may have placed it already."""
        batch = self._cursor.take(self.used_before + 1, lambda batch: batch)
        self.used_before += 1
        self._cursor.forget(self.used_before)
        return batch

    def __length_hint__(self) -> int:
        """Count the batches that are left, if their number is known."""
        return NotImplemented if self._all is None else self._all - self.used_before

    def go_to(self, position: Position) -> None:
        """Skip the batches that an earlier process used, up to ``position``."""
        before = self.used_before
        used = position.used
        if position.cursor is not None:
            self._cursor.go_back(position)
            self.used_before = used
        left = max(used - self.used_before, 0)
        collections.deque(itertools.islice(self, left), 0)
        if self.used_before != used:
            raise ValueError(
                f"An earlier run used {used} batches, but these begin after {before}"
                f" and end after {self.used_before}. Pass the same batches, starting"
                " with the first one."
            )
        self.last = self._cursor.position(used)

    def stream(
        self, place: Callable[[PyTree], Placed], depth: int, *, most: int | None = None
    ) -> "Stream[Placed]":
        """Stream placed batches, each with the `Position` after it."""
        first = self.used_before + 1

        def placed(number: int) -> tuple[Placed, Position]:
            batch_made = self._cursor.take(number, place)
            self._taken = number
            return batch_made, self._cursor.position(number)

        def begin(*_: Any) -> Generator[tuple[Placed, Position]]:
            numbers = itertools.islice(itertools.count(first), most)
            # Unlike a loop, map() keeps no reference to a batch.
            yield from map(placed, numbers)

        return Stream(begin, depth, self.last)

    def use(self, position: Position) -> None:
        """Note that steps have used the batches up to a position, and forget these."""
        self.last = position
        self.used_before = position.used
        self._cursor.forget(position.used)

    def rest(self) -> WithCursor | Iterator[PyTree]:
        """Iterate over the unused batches.

        The thread of a stream must have ended before, because it takes batches, too.
        """
        batches = self._cursor.go_back(self.last)
        return self if batches is None else batches

    def settle(self) -> None:
        """Go back to the first unused batch, and close what `Source` opened itself."""
        if self._taken > self.last.used:
            self._cursor.go_back(self.last)
        if self._opened:
            close(self._elements)

    def restart(self) -> None:
        """Go back to where this began, and close what `Source` opened itself.

        The thread of a stream must have ended before.
        """
        self._cursor.go_back(self._first)
        if self._opened:
            close(self._elements)

    def close(self) -> None:
        """Drop the stored batches and close their source."""
        self._cursor.forget(sys.maxsize)
        close(self._elements)


def has_cursor(iterator: Any) -> bool:
    """Return whether an iterator has ``get_state`` and ``set_state``."""
    if isinstance(iterator, Stream):
        return iterator.get_state() is not None
    return hasattr(iterator, "get_state") and hasattr(iterator, "set_state")


def is_elastic(iterator: Any) -> bool:
    """Return whether an iterator gives its shard of batches that do not depend on it.

    Grain's `ElasticIterator` does. Its position is that of the global batches.
    """
    return type(iterator).__module__ == "grain._src.python.dataset.elastic_iterator"


def close(iterator: Any) -> None:
    """Close an iterator that has ``close``, unless a thread is running it."""
    if not getattr(iterator, "gi_running", False):
        getattr(iterator, "close", lambda: None)()


def prefetch(
    iterable: Iterable[Any], place: Callable[[Any], Placed], *, depth: int
) -> "Stream[Placed]":
    """Stream the elements, placed by a thread ahead of their use."""
    return Stream(lambda *_: ((place(x), None) for x in iterable), depth)


class _Feed:
    """What a stream and its thread share: the elements that are ready, and events."""

    def __init__(self, depth: int) -> None:
        # Each entry is ``(element, position after it, failure)``.
        self.ready: collections.deque[tuple[Any, Any, Any]] = collections.deque()
        self.added = threading.Event()
        self.stopped = threading.Event()
        # Counts how many more elements the thread may make, so that ``depth`` bounds
        # the memory.
        self.room = threading.Semaphore(depth)

    def add(self, element: Any, after: Any = None, failure: Any = None) -> None:
        self.ready.append((element, after, failure))
        self.added.set()


class Stream(Iterator[Placed]):
    """Elements that a thread makes in advance, with a position; Ctrl-C loses none.

    ``begin(position, stopped)`` yields ``(element, position after it)``, from the given
    position or, with None, from the start. ``stopped`` is an event that long waits must
    check. With ``depth`` 0 there is no thread. An exception is raised after all earlier
    elements.
    """

    def __init__(
        self,
        begin: Callable[[Any, threading.Event], Generator[tuple[Placed, Any]]],
        depth: int,
        start: Any = None,
    ) -> None:
        self._begin = begin
        self._depth = depth
        self._after = start
        self._open(None)

    def _open(self, position: dict[str, Any] | None) -> None:
        self._failure: str | None = None
        self._feed = feed = _Feed(self._depth)
        self._made = elements = self._begin(position, feed.stopped)
        self.close: Callable[[], Any] = elements.close
        if self._depth:
            args = elements, feed, jax.config.read("jax_enable_x64")
            named = {"name": "towerjax-prefetch", "daemon": True}
            self._thread = threading.Thread(target=_fill, args=args, **named)
            # The finalizer runs once: by a call of ``close``; by the garbage collector,
            # for which the thread must not refer to this stream; or at Python's exit,
            # which a running thread could abort.
            self.close = weakref.finalize(self, _stop, self._thread, feed)

    def __next__(self) -> Placed:
        """Take the next element; the stream keeps no reference to it."""
        if self._failure is not None:
            raise ValueError(
                f"This pass over the data failed with {self._failure}, and cannot"
                " continue. Begin another one, iter(dataset)."
            )
        try:
            if self._depth:
                return self._next_of_thread()
            # With ``next()`` in place of a loop, an element would be lost if Ctrl-C
            # came between the call of ``next()`` and the assignment of its result.
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
        # From here to the return nothing is called, because Python handles Ctrl-C after
        # a call, and the element would be lost.
        self._after = after
        del feed.ready[0]
        return element

    def get_state(self) -> Any:
        """Give the position after the last element, or None."""
        return self._after

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the element at which `get_state` returned ``state``."""
        if set(state) != set(self._after or ()):
            raise ValueError(
                "A position in a distributed data set must have 'elements' and 'rows',"
                f" but got {sorted(state)}. Pass the batches whose position was saved."
            )
        self.close()
        self._open(state)
        self._after = state


def _fill(batches: Iterable[tuple[Any, Any]], feed: _Feed, x64: bool) -> None:
    try:
        # A `with jax.enable_x64(...)` around the run does not reach its threads.
        with jax.enable_x64(x64):
            iterator = iter(batches)
            while True:
                feed.room.acquire()
                if feed.stopped.is_set():
                    return
                pair = next(iterator, None)
                if pair is None:
                    feed.add(_END)
                    return
                feed.add(*pair)
    except BaseException as failure:
        feed.add(_END, failure=failure)


def _stop(thread: threading.Thread, feed: _Feed) -> None:
    """End the thread; warn if it hangs in a data loader, which nothing can stop."""
    feed.stopped.set()
    feed.room.release()
    feed.ready.clear()
    feed.add(_END)
    if thread.ident in (None, threading.get_ident()):
        return  # not started, or the thread itself runs this
    thread.join(_STOP_PATIENCE_S)
    if thread.is_alive():
        warn(
            f"The input is still busy with one batch {_STOP_PATIENCE_S} s after the run"
            " stopped; its thread ends when that batch is there. Give the loader a"
            " timeout.",
            RuntimeWarning,
        )
