"""How do batches reach the devices in time? Cut, grouped, and placed in advance."""

import atexit
import contextlib
import itertools
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from towerjax.input.cut import Batches, Cut
from towerjax.shard import count_examples
from towerjax.types import PyTree

Pulled = TypeVar("Pulled")
Placed = TypeVar("Placed")

_END: Any = object()


def check_whole(name: str, number: Any, lowest: int) -> None:
    """Raise unless a number is whole and large enough.

    Args:
      name: What the caller calls it.
      number: The number.
      lowest: The least that is allowed.

    Raises:
      ValueError: It is not.
    """
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not whole or number < lowest:
        raise ValueError(f"{name}={number!r} must be a whole number >= {lowest}.")


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
      data: A pytree of NumPy arrays ``[N, ...]``.
      batch_size: ``B``, examples of a batch over all towers.
      epochs: How often to go through the data; None never ends.
      seed: None keeps the order, and batches are views of the data. A number
        shuffles anew each epoch, the same way for the same ``(seed, epoch)``.
      drop_remainder: Leave the smaller last batch of each epoch out?

    Returns:
      An iterator of pytrees ``[B, ...]``, which knows where it is: ``.at(step)`` goes
      on from there at once, also where it shuffles, and `run` sets it back to the last
      batch that was used.

    Raises:
      ValueError: At once: the data is malformed, or a number is out of range.

    Example:
      >>> [b.tolist() for b in batches(np.arange(5), 2)]
      [[0, 1], [2, 3], [4]]
    """
    num_examples = count_examples(data)
    check_whole("batch_size", batch_size, 1)
    if epochs is not None:
        check_whole("epochs", epochs, 1)
    if seed is not None:
        check_whole("seed", seed, 0)
    if drop_remainder and num_examples < batch_size:
        raise ValueError(
            f"drop_remainder leaves nothing of {num_examples} examples in batches of"
            f" {batch_size}."
        )
    return Batches(data, Cut(num_examples, batch_size, epochs, seed, drop_remainder))


def in_groups(
    iterable: Iterable[PyTree], size: int, *, copies: bool = True
) -> Iterator[list[PyTree]]:
    """Lists of ``size`` batches; the last may be shorter.

    Args:
      iterable: Batches.
      size: ``K``.
      copies: Copy NumPy arrays, because a loader may reuse its buffers?

    Yields:
      Lists of one to ``K`` batches. When the iterable raises, the batches before
      come first, then its exception.
    """
    iterator = iter(iterable)
    failure: BaseException | None = None
    while failure is None:
        group: list[PyTree] = []
        try:
            for batch in itertools.islice(iterator, size):
                group.append(jax.tree.map(own_copy, batch) if copies else batch)
        except BaseException as error:
            failure = error
        if group:
            yield group
        if failure is None and len(group) < size:
            return
    raise failure


def own_copy(leaf: Any) -> Any:
    """A copy of an array that a loader may write again.

    Args:
      leaf: A leaf of a batch.

    Returns:
      A copy of a NumPy array; anything else as it is.
    """
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@contextlib.contextmanager
def closing_iterator(
    iterable: Iterable[Pulled], *, is_ours: bool = False
) -> Iterator[Iterator[Pulled]]:
    """What an iterable gives, for a ``with`` that closes what it opened.

    An iterator that the caller passed in stays open: it may be gone on with.

    Args:
      iterable: Anything.
      is_ours: Close it even if it is an iterator itself: nobody else has it.

    Yields:
      ``iter(iterable)``.
    """
    iterator = iter(iterable)
    try:
        yield iterator
    finally:
        close = getattr(iterator, "close", None)
        is_ours = is_ours or iterator is not iterable
        # A loader that hangs in a thread cannot be closed; the thread's end says so.
        if is_ours and close is not None and not getattr(iterator, "gi_running", False):
            close()


def prefetch(
    iterable: Iterable[Pulled],
    place: Callable[[Pulled], Placed],
    *,
    depth: int,
    on_stop: Callable[[], None] = lambda: None,
) -> Generator[Placed, None, None]:
    """What an iterable gives, pulled and placed by a thread while devices work.

    Order is kept. An exception of the iterable, or of ``place``, arrives where it
    occurred, after all that came before it. Closing the generator stops the
    thread, which at most finishes the element it is at; one that was pulled in
    advance is gone then.

    Args:
      iterable: Anything; only this thread touches it.
      place: Called with each element, e.g. ``step.place_batch``.
      depth: How many placed elements may wait; 0 works in line, with no thread.
      on_stop: Called before the thread is waited for: lets the iterable go of what
        it may wait for itself.

    Yields:
      ``place(element)`` of each element.
    """
    if depth == 0:
        yield from map(place, iterable)
        return
    feeder = _Feeder(iterable, place, depth, on_stop)
    try:
        # A thread that still runs while Python ends can abort the process.
        atexit.register(feeder.stop)
        feeder.thread.start()
        while True:
            placed, failure, ended = feeder.next()
            if failure is not None:
                raise failure
            if ended:
                return
            yield placed
            del placed
    finally:
        feeder.stop()


class _Feeder:
    """The thread that fills a queue, and how to stop it."""

    def __init__(
        self,
        iterable: Iterable[Any],
        place: Callable[[Any], Any],
        depth: int,
        on_stop: Callable[[], None],
    ) -> None:
        self._iterable, self._place, self._on_stop = iterable, place, on_stop
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None, bool]]
        self._ready = queue.SimpleQueue()
        # Counts what may still be made, so that depth bounds the memory exactly.
        self._room = threading.Semaphore(depth)
        self._stopped = threading.Event()
        self.thread = threading.Thread(
            target=self._fill, name="towerjax-prefetch", daemon=True
        )

    def _fill(self) -> None:
        try:
            iterator = iter(self._iterable)
            while True:
                self._room.acquire()
                if self._stopped.is_set():
                    return
                element = next(iterator, _END)
                if element is _END:
                    self._ready.put((None, None, True))
                    return
                self._ready.put((self._place(element), None, False))
        except BaseException as failure:
            self._ready.put((None, failure, False))

    def next(self) -> tuple[Any, BaseException | None, bool]:
        """``(placed, failure, ended)``, waiting for it."""
        item = self._ready.get()
        self._room.release()
        return item

    def stop(self, *, patience_s: float = 5.0) -> None:
        """End the thread; a loader that hangs cannot be interrupted, so say it."""
        if self._stopped.is_set():
            return
        try:
            atexit.unregister(self.stop)
            self._on_stop()
        finally:  # Ctrl-C could strike before
            self._stopped.set()
            self._room.release()
        if self.thread.ident is not None:
            self.thread.join(patience_s)
        if self.thread.is_alive():
            warnings.warn(
                f"The input is still busy with one batch {patience_s:g} s after the"
                " run stopped; its thread ends when that batch is there. Give the"
                " loader a timeout.",
                RuntimeWarning,
                stacklevel=2,
            )
