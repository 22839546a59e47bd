"""How do the sparse rows of a batch reach the towers? Dealt out by their index."""

import dataclasses

import jax
import numpy as np

from towerjax.sparse import IndexedRows, is_rows
from towerjax.types import PyTree, named_leaves


@dataclasses.dataclass(frozen=True)
class SparseRows:
    """The ``IndexedRows`` of a batch, put aside while its dense leaves are fitted.

    Attributes:
      rows: Number of the leaf -> the ``IndexedRows`` ``[B, ...]``.
    """

    rows: dict[int, IndexedRows]

    @classmethod
    def put_aside(cls, batch: PyTree) -> tuple["SparseRows", PyTree]:
        """The sparse rows of a batch, and the batch with stand-ins for them.

        Args:
          batch: A pytree of arrays and ``IndexedRows``.

        Returns:
          ``(sparse rows, batch)``; a stand-in is an array ``[B]``.
        """
        leaves, treedef = jax.tree.flatten(batch, is_leaf=is_rows)
        rows = {i: leaf for i, leaf in enumerate(leaves) if is_rows(leaf)}
        for i, leaf in rows.items():
            leaves[i] = np.zeros(leaf.dense_shape[0], np.bool_)
        return cls(rows), jax.tree.unflatten(treedef, leaves) if rows else batch

    def put_back(
        self, batch: PyTree, num_towers: int, capacities: list[dict[int, int]]
    ) -> PyTree:
        """The fitted batch with each tower's rows in the places of the stand-ins.

        Args:
          batch: Leaves ``[B', ...]``.
          num_towers: ``T``.
          capacities: For each program so far, number of the leaf -> how many rows each
            tower has room for; the first that is enough is taken, so that a batch with
            fewer needs no program of its own. Grows from one to the next; updated.

        Returns:
          The batch. Each ``IndexedRows`` has values ``[T r, ...]``, tower after tower,
          filled up with rows of zeros, and the ``dense_shape`` ``[B' / T, ...]`` of one
          tower's part.
        """
        if not self.rows:
            return batch
        leaves, treedef = jax.tree.flatten(batch)
        size = leaves[0].shape[0] // num_towers
        needed = {i: _most(rows, size, num_towers) for i, rows in self.rows.items()}
        room = _room(needed, capacities)
        for i, rows in self.rows.items():
            leaves[i] = _dealt(rows, size, num_towers, room[i])
        return jax.tree.unflatten(treedef, leaves)


def _most(rows: IndexedRows, size: int, num_towers: int) -> int:
    """The most rows that a tower has, and 1 where none has any."""
    tower = np.asarray(rows.indices) // size
    return int(np.bincount(tower[tower < num_towers]).max(initial=1))


def _room(needed: dict[int, int], capacities: list[dict[int, int]]) -> dict[int, int]:
    for room in capacities:
        if all(room.get(i, 0) >= count for i, count in needed.items()):
            return room
    room = dict(capacities[-1]) if capacities else {}
    for i, count in needed.items():
        room[i] = max(room.get(i, 1), 1 << (count - 1).bit_length())
    capacities.append(room)
    return room


def _dealt(rows: IndexedRows, size: int, num_towers: int, capacity: int) -> IndexedRows:
    values, indices = np.asarray(rows.values), np.asarray(rows.indices)
    tower = indices // size
    dealt = np.zeros((num_towers, capacity, *values.shape[1:]), values.dtype)
    places = np.zeros((num_towers, capacity), np.int32)
    for t in range(num_towers):
        own = tower == t
        count = np.count_nonzero(own)
        dealt[t, :count] = values[own]
        places[t, :count] = indices[own] - t * size
    shape = (size, *rows.dense_shape[1:])
    flat = dealt.reshape(-1, *values.shape[1:])
    return IndexedRows(flat, places.reshape(-1), shape)


def refuse_sparse_rows(batch: PyTree, what: str) -> None:
    """Raise where a batch with ``IndexedRows`` comes to what cannot split them.

    Args:
      batch: The batch.
      what: What cannot.

    Raises:
      ValueError: It holds some; names the leaf.
    """
    found = [
        name for name, leaf in named_leaves("batch", batch, is_rows) if is_rows(leaf)
    ]
    if found:
        raise ValueError(
            f"{', '.join(found)} is IndexedRows, which {what} cannot split over towers."
            " Make it dense with .to_dense(), or hand the batch to the step itself."
        )
