"""How does data become batches, in order, placed ahead of the step that takes them?"""

import atexit
import dataclasses
import functools
import itertools
import math
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from towerjax.data.shard import count_examples, with_shared, without_shared
from towerjax.data.sparse_rows import SparseRows
from towerjax.types import PyTree, Shared
from towerjax.types.options import check_flag, check_whole, is_whole, plain_wholes


@dataclasses.dataclass(frozen=True)
class Cut:
    """How data is cut; the same cut of the same data gives the same batches."""

    examples: int  # N
    batch_size: int  # B
    epochs: int | None  # how often to go through the data; None never ends
    seed: int | None  # None keeps the order
    drop_remainder: bool  # is the smaller last batch of each epoch left out?

    @property
    def batches_per_epoch(self) -> int:
        """How many batches an epoch has."""
        whole, over = divmod(self.examples, self.batch_size)
        return whole if self.drop_remainder or not over else whole + 1


class Batches(Iterator[PyTree]):
    """The batches of a data set, and where one is among them; `batches` makes it.

    An iterator which can go on anywhere at once, whether it shuffles or not: the order
    of an epoch is made of the seed and the epoch's number alone.
    """

    def __init__(self, data: PyTree, cut: Cut, position: int = 0) -> None:
        self._data, self._cut, self._position = data, cut, position
        rows, self._shared = without_shared(data)
        self._sparse, self._dense = SparseRows.put_aside(rows)
        self._shuffled: tuple[int, np.ndarray] | None = None

    def __next__(self) -> PyTree:
        """The next batch, a pytree ``[B, ...]``."""
        cut = self._cut
        epoch, number = divmod(self._position, cut.batches_per_epoch)
        if cut.epochs is not None and epoch >= cut.epochs:
            raise StopIteration
        start = number * cut.batch_size
        rows: Any = slice(start, start + cut.batch_size)
        if cut.seed is not None:
            rows = self._order(cut.seed, epoch)[rows]
        batch = jax.tree.map(lambda x: x[rows], self._dense)
        if self._sparse.leaves:
            batch = self._sparse.taken(np.arange(cut.examples)[rows], batch)
        if self._shared:
            batch = with_shared(batch, [Shared(x) for x in self._shared])
        self._position += 1
        return batch

    def __len__(self) -> int:
        """How many batches are left."""
        epochs = self._cut.epochs
        if epochs is None:  # a TypeError, as Python asks: list and tqdm go without
            raise TypeError(
                "tj.batches(..., epochs=None) never end, so they have no len. Say"
                " epochs=1 for the batches of an epoch."
            )
        return epochs * self._cut.batches_per_epoch - self._position

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self._shuffled is None or self._shuffled[0] != epoch:
            rng = np.random.default_rng((seed, epoch))
            self._shuffled = epoch, rng.permutation(self._cut.examples)
        return self._shuffled[1]

    @property
    def position(self) -> int:
        """How many batches were taken, counted from the first of the first epoch."""
        return self._position

    def at(self, position: int) -> "Batches":
        """The same batches from another place on; this one stays where it is."""
        epochs = self._cut.epochs
        last = None if epochs is None else epochs * self._cut.batches_per_epoch
        whole = is_whole(position)
        if not whole or position < 0 or (last is not None and position > last):
            raise ValueError(
                f"at({position!r}): a position is a whole number of batches from 0"
                + (" on." if last is None else f" to {last}, of which there are.")
            )
        return Batches(self._data, self._cut, int(position))

    def get_state(self) -> dict[str, Any]:
        """Where it is, and in what, as JSON can hold it."""
        return {"position": self._position, **dataclasses.asdict(self._cut)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        cut = dataclasses.asdict(self._cut)
        others = {
            name: (state.get(name), now)
            for name, now in cut.items()
            if name != "epochs" and state.get(name) != now
        }
        if others:
            raise ValueError(
                "The position is one among other batches: "
                + ", ".join(f"{n} was {a} and is {b}" for n, (a, b) in others.items())
                + ". Cut the data as before, or choose a place with at(...)."
            )
        self._position = self.at(state["position"]).position


Pulled = TypeVar("Pulled")
Placed = TypeVar("Placed")

_END: Any = object()


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
        shuffles anew each epoch, the same way for the same ``(seed, epoch)``.
      drop_remainder: Leave the smaller last batch of each epoch out?

    Returns:
      An iterator of pytrees ``[B, ...]``, which knows where it is: ``.at(step)`` goes
      on from there at once, also where it shuffles, and `run` sets it back to the last
      batch that was used. Its ``len`` is the number of batches that are left.

    Raises:
      ValueError: At once: the data is malformed, or a number is out of range.

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
    cut = Cut(num_examples, batch_size, epochs, seed, drop_remainder)
    plain_wholes(cut)  # JSON has none of NumPy's
    return Batches(data, cut)


def in_groups(iterable: Iterable[PyTree], size: int) -> Iterator[list[PyTree]]:
    """Lists of ``size`` batches; the last may be shorter."""
    iterator = iter(iterable)
    failure: BaseException | None = None
    while failure is None:
        group: list[PyTree] = []
        try:
            for batch in itertools.islice(iterator, size):
                group.append(batch)
        except BaseException as error:
            failure = error
        if group:
            yield group
        if failure is None and len(group) < size:
            return
    raise failure


def own_copy(leaf: Any) -> Any:
    """A copy of an array that a loader may write again."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def anew(name: str, data: Any, why: str) -> Any:
    """Data that can be gone through several times; another iterator is refused."""
    if isinstance(data, Batches):
        return functools.partial(data.at, data.position)
    if hasattr(data, "__next__"):
        raise ValueError(
            f"{name} is a {type(data).__name__}, which can be gone through only once,"
            f" but {why}. Pass a list of batches, or a function that gives them anew:"
            f" {name}=lambda: tj.batches(data, batch_size)."
        )
    return data


def close(iterator: Any) -> None:
    """Close an iterator that can be closed."""
    # A loader that hangs in a thread cannot be; the thread's end says so.
    if not getattr(iterator, "gi_running", False):
        getattr(iterator, "close", lambda: None)()


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
            placed, failure = feeder.next()
            if failure is not None:
                raise failure
            if placed is _END:
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
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
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
                    self._ready.put((_END, None))
                    return
                self._ready.put((self._place(element), None))
        except BaseException as failure:
            self._ready.put((_END, failure))

    def next(self) -> tuple[Any, BaseException | None]:
        """``(placed, failure)``, waiting for it."""
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
        if self.thread.ident in (None, threading.get_ident()):
            return  # it never began; or this is it, collecting garbage, and it ends now
        self.thread.join(patience_s)
        if self.thread.is_alive():
            warnings.warn(
                f"The input is still busy with one batch {patience_s:g} s after the"
                " run stopped; its thread ends when that batch is there. Give the"
                " loader a timeout.",
                RuntimeWarning,
                stacklevel=2,
            )
