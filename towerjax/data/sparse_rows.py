"""How do the sparse leaves of a batch reach the towers? Each row with its entries."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from towerjax.collectives.sparse_rows import dense_shape, is_rows, is_sparse, rebuilt
from towerjax.data.shard import refuse_wrapping
from towerjax.types import PyTree, named_leaves
from towerjax.types.leaves import listed, refuse_unheld

Room = dict[int, int]
"""Number of a leaf -> how many entries each part of the batch has room for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """A sparse leaf on the host, entry by entry."""

    leaf: Any  # the leaf; read for its kind
    values: np.ndarray  # [e, ...]
    indices: np.ndarray  # [e, n], of which the first says the row
    shape: tuple[int, ...]  # [B, ...]

    @classmethod
    def of(cls, name: str, leaf: Any) -> "Entries":
        """Those of a leaf that are in its shape."""
        if is_rows(leaf):
            leaf.check_range(name)
            values, indices = leaf.values, np.asarray(leaf.indices)[:, None]
        else:
            values, indices = leaf.data, np.asarray(leaf.indices)
        shape = dense_shape(leaf)
        if indices.size and indices.min() < 0:
            raise ValueError(
                f"{name} has the index {indices.min()}, but entries are counted from 0."
                " Add the size of the dim to indices that count from its end."
            )
        # By an index from the dim's size on, JAX marks what only fills up.
        inside = (indices < np.array(shape[: indices.shape[1]])).all(axis=1)
        indices = indices.astype(np.promote_types(indices.dtype, np.int32))
        return cls(leaf, np.asarray(values)[inside], indices[inside], shape)

    @functools.cached_property
    def by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """The entries' order by row, and where in it each of ``B + 1`` rows begins."""
        order = np.argsort(self.indices[:, 0], kind="stable")
        rows = np.arange(self.shape[0] + 1)
        return order, np.searchsorted(self.indices[order, 0], rows)

    def taken(self, rows: np.ndarray) -> Any:
        """The leaf of some of the rows, in this order."""
        order, starts = self.by_row
        counts = starts[rows + 1] - starts[rows]
        before = np.cumsum(counts) - counts
        own = order[np.arange(counts.sum()) + np.repeat(starts[rows] - before, counts)]
        indices = self.indices[own].copy()
        indices[:, 0] = np.repeat(np.arange(len(rows)), counts)
        return self._leaf(self.values[own], indices, len(rows))

    def most(self, size: int) -> int:
        """The most entries that ``size`` rows in a row have; 1 where none has any."""
        return int(np.bincount(self.indices[:, 0] // size).max(initial=1))

    def dealt(self, size: int, parts: int, room: int, rows: int) -> Any:
        """The entries of each part of the batch, side by side; others are left out."""
        order, starts = self.by_row
        ends = starts[np.minimum(np.arange(parts + 1) * size, self.shape[0])]
        values = np.zeros((parts, room, *self.values.shape[1:]), self.values.dtype)
        width = self.indices.shape[1]
        outside = 0 if is_rows(self.leaf) else np.array((size, *self.shape[1:width]))
        indices = np.empty((parts, room, width), self.indices.dtype)
        indices[:] = outside
        for part in range(parts):
            own = order[ends[part] : ends[part + 1]]
            values[part, : len(own)] = self.values[own]
            indices[part, : len(own)] = self.indices[own]
            indices[part, : len(own), 0] -= part * size
        return self._leaf(
            values.reshape(-1, *values.shape[2:]), indices.reshape(-1, width), rows
        )

    def _leaf(self, values: Any, indices: np.ndarray, rows: int) -> Any:
        if is_rows(self.leaf):
            indices = indices[:, 0]
        return rebuilt(self.leaf, values, indices, (rows, *self.shape[1:]))


@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows:
    """The sparse leaves of a batch, put aside while its dense leaves are fitted."""

    treedef: Any  # of the batch, a sparse leaf counting as one
    leaves: Mapping[int, Any]  # number of the leaf -> its Entries

    @classmethod
    def put_aside(cls, batch: PyTree) -> tuple["SparseRows", PyTree]:
        """The sparse leaves of a batch, and the batch with stand-ins for them."""
        leaves, treedef = jax.tree.flatten(batch, is_leaf=is_sparse)
        sparse = {i: leaf for i, leaf in enumerate(leaves) if is_sparse(leaf)}
        if not sparse:
            return cls(treedef, {}), batch
        refuse_unheld("batch", batch)
        named = named_leaves("batch", batch, is_sparse)
        _refuse_formats([named[i] for i in sparse])
        values = list(leaves)
        for i, leaf in sparse.items():
            if getattr(leaf, "n_batch", 0):
                values[i] = leaves[i] = _row_by_row(leaf)
            else:
                sparse[i] = Entries.of(named[i][0], leaf)
                values[i] = sparse[i].values
                leaves[i] = np.zeros(sparse[i].shape[0], np.bool_)
        refuse_wrapping(jax.tree.unflatten(treedef, values))
        return cls(treedef, sparse), jax.tree.unflatten(treedef, leaves)

    def needed(self, size: int) -> Room:
        """How many entries the fullest part of the batch has, of each leaf."""
        entries = {i: x for i, x in self.leaves.items() if isinstance(x, Entries)}
        return {i: x.most(size) for i, x in entries.items()}

    def taken(self, rows: np.ndarray, batch: PyTree) -> PyTree:
        """Some rows of the batch."""
        return self._joined(batch, len(rows), lambda x, i: x.taken(rows))

    def put_back(
        self, batch: PyTree, num_towers: int, parts: int, room: Room
    ) -> PyTree:
        """The fitted batch with each tower's entries in the places of the stand-ins."""
        if not self.leaves:
            return batch
        rows = jax.tree.leaves(batch)[0].shape[0] // num_towers
        size, parts = rows // parts, num_towers * parts
        return self._joined(
            batch, rows, lambda x, i: x.dealt(size, parts, room[i], rows)
        )

    def _joined(self, batch: PyTree, rows: int, leaf_of: Any) -> PyTree:
        items = self.treedef.flatten_up_to(batch)
        for i, leaf in self.leaves.items():
            if isinstance(leaf, Entries):
                items[i] = leaf_of(leaf, i)
            else:
                data, indices = items[i]
                items[i] = rebuilt(leaf, data, indices, (rows, *leaf.shape[1:]))
        return jax.tree.unflatten(self.treedef, items)


def room_for(needed: Room, rooms: list[Room]) -> Room:
    """The first of the rooms so far that is large enough, or a new one."""
    for room in rooms:
        if all(room.get(i, 0) >= count for i, count in needed.items()):
            return room
    room = dict(rooms[-1]) if rooms else {}
    for i, count in needed.items():
        room[i] = max(room.get(i, 1), 1 << (count - 1).bit_length())
    rooms.append(room)
    return room


def _row_by_row(leaf: Any) -> tuple[np.ndarray, ...]:
    """The arrays of a ``BCOO`` with batch dims, where one row stood for all."""
    arrays = map(np.asarray, (leaf.data, leaf.indices))
    return tuple(np.broadcast_to(x, (leaf.shape[0], *x.shape[1:])) for x in arrays)


def _refuse_formats(named: list[tuple[str, Any]]) -> None:
    bad = [
        f"{name} is a {type(leaf).__name__}"
        for name, leaf in named
        if not is_rows(leaf) and type(leaf).__name__ != "BCOO"
    ]
    if bad:
        raise ValueError(
            f"{listed(bad)}, which does not split over towers row by row. Give a"
            " jax.experimental.sparse.BCOO: BCOO.from_scipy_sparse(x) of a scipy.sparse"
            " matrix, x.to_bcoo() of a BCSR, BCOO.fromdense(x.todense()) of others."
        )
