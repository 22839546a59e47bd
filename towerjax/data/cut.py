"""How is data cut into batches, and where does one go on? By a number of batches."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from towerjax.data.shard import with_shared, without_shared
from towerjax.data.sparse_rows import SparseRows
from towerjax.types import PyTree, Shared
from towerjax.types.options import is_whole


@dataclasses.dataclass(frozen=True)
class Cut:
    """How data is cut; the same cut of the same data gives the same batches.

    Attributes:
      examples: ``N``.
      batch_size: ``B``.
      epochs: How often to go through the data; None never ends.
      seed: None keeps the order.
      drop_remainder: Is the smaller last batch of each epoch left out?
    """

    examples: int
    batch_size: int
    epochs: int | None
    seed: int | None
    drop_remainder: bool

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
