"""Cut data into global batches: `batches`, an iterator with a position."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from towerjax.data.batch_rows import count_examples, with_replicated, without_replicated
from towerjax.data.sparse_rows import SparseRows
from towerjax.types import PyTree, Whole
from towerjax.types.boundary import api_boundary
from towerjax.types.options import cast_ints, check_flag, check_whole
from towerjax.types.refusals import printable, shown


def rows_of(data: PyTree) -> Callable[[Any], PyTree]:
    """Build a function that takes rows out of the data.

    Its argument is a slice, or an array of row numbers.
    """
    rows, replicated = without_replicated(data)
    sparse, dense = SparseRows.put_aside(rows)

    def take(at: Any) -> PyTree:
        batch = jax.tree.map(lambda x: x[at], dense)
        if sparse.leaves:
            examples = len(jax.tree.leaves(dense)[0])
            batch = sparse.take(np.arange(examples)[at], batch)
        if replicated:
            batch = with_replicated(batch, [Whole(x) for x in replicated])
        return batch

    return take


@dataclasses.dataclass(eq=False)
class Batches(Iterator[PyTree]):
    """An iterator over the batches of a data set, with a position; see `batches`.

    Attributes:
      position: The number of batches before the next one, counted from the first epoch.
    """

    data: PyTree = dataclasses.field(repr=False)
    examples: int  # N
    batch_size: int  # B
    epochs: int | None  # None: without end
    seed: int | None  # None: in the order of the data
    drop_remainder: bool  # leave out the smaller last batch of each epoch
    position: int = 0

    def __post_init__(self) -> None:
        """Flatten the data, and check its leaves."""
        # `get_state` returns the fields for JSON, which cannot hold NumPy's integers.
        cast_ints(self)
        self._take = rows_of(self.data)
        self._shuffled: tuple[int, np.ndarray] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        whole, over = divmod(self.examples, self.batch_size)
        return whole if self.drop_remainder or not over else whole + 1

    def __next__(self) -> PyTree:
        """Cut the next batch, a pytree ``[B, ...]``."""
        epoch, number = divmod(self.position, self.batches_per_epoch)
        if self.epochs is not None and epoch >= self.epochs:
            raise StopIteration
        start = number * self.batch_size
        rows: Any = slice(start, start + self.batch_size)
        if self.seed is not None:
            rows = self._order(self.seed, epoch)[rows]
        batch = self._take(rows)
        self.position += 1
        return batch

    def __len__(self) -> int:
        """Count the batches that are left."""
        if self.epochs is None:  # list() and tqdm call len(), and accept a TypeError
            raise TypeError(
                "tj.batches(..., epochs=None) never end, so they have no length. Write"
                " a number of epochs."
            )
        return self.epochs * self.batches_per_epoch - self.position

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self._shuffled is None or self._shuffled[0] != epoch:
            rng = np.random.default_rng((seed, epoch))
            self._shuffled = epoch, rng.permutation(self.examples)
        return self._shuffled[1]

    @property
    def most_rows(self) -> int:
        """The number of examples of the largest batch."""
        return min(self.batch_size, self.examples)

    def at(self, position: int) -> "Batches":
        """Start the same batches at another position; this iterator stays.

        ``position`` counts batches from the start of the first epoch.
        """
        length = math.inf if self.epochs is None else self.epochs
        check_whole("position", position, 0, length * self.batches_per_epoch)
        return dataclasses.replace(self, position=position)

    def get_state(self) -> dict[str, Any]:
        """Give the position and the options that cut the data, as JSON values."""
        fields = dataclasses.fields(self)[1:]  # without the data
        return {field.name: getattr(self, field.name) for field in fields}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at a position that `get_state` returned."""
        if not isinstance(state, Mapping):
            raise ValueError(f"{shown(state)} is not a position of tj.batches.")
        others = [
            printable(f"{name} was {state.get(name)} and is {now}")
            for name, now in self.get_state().items()
            if name not in ("position", "epochs") and state.get(name) != now
        ]
        if others:
            raise ValueError(
                "The saved position belongs to other batches:"
                f" {', '.join(others)}. Cut the"
                " data as before, or say tj.Checkpointer(batches='anew')."
            )
        position: Any = state.get("position")
        self.position = self.at(position).position


@api_boundary
def batches(
    data: PyTree,
    batch_size: int,
    *,
    epochs: int | None = 1,
    seed: int | None = None,
    drop_remainder: bool = False,
) -> Batches:
    """Cut the data into global batches, epoch after epoch.

    If ``batch_size`` does not divide the number of examples, the last batch of an epoch
    is smaller. The step's option ``remainder`` says what happens to it.

    Args:
      data: A pytree of NumPy arrays ``[N, ...]``, ``IndexedRows`` or ``BCOO``.
      batch_size: The number of examples ``B`` of a batch, over all towers.
      epochs: How often to go through the data; with None the batches never end.
      seed: A number shuffles each epoch. The order depends on ``(seed, epoch)`` alone.
        None keeps the order of the data; batches are then views of the data.
      drop_remainder: Leave out the smaller last batch of each epoch.

    Returns:
      An iterator of pytrees ``[B, ...]`` with a position. ``.at(step)`` gives the
      batches from that step on, with the same shuffling. `run` leaves the position
      after the last batch that was used. The iterator's ``len`` is the number of
      batches that are left.

    Raises:
      ValueError: The data is malformed, or a number is out of range.

    Example:
      >>> [b.tolist() for b in batches(np.arange(5), 2)]
      [[0, 1], [2, 3], [4]]
    """
    rows, _replicated = without_replicated(data)
    _sparse, dense = SparseRows.put_aside(rows)
    num_examples = count_examples(dense)
    check_whole("batch_size", batch_size, 1)
    check_whole("epochs", epochs, or_none=True)
    check_whole("seed", seed, 0, math.inf, or_none=True)
    check_flag("drop_remainder", drop_remainder)
    if drop_remainder and num_examples < batch_size:
        raise ValueError(
            f"drop_remainder=True leaves no batch of {num_examples} examples in batches"
            f" of {batch_size}. Use a smaller batch_size, or drop_remainder=False."
        )
    return Batches(data, num_examples, batch_size, epochs, seed, drop_remainder)
