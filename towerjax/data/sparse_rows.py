"""Split the sparse leaves of a batch over towers; each row keeps its entries."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from towerjax.collectives.sparse_rows import dense_shape, is_rows, is_sparse, rebuild
from towerjax.types import PyTree
from towerjax.types.refusals import a_type, listed, refuse_unheld
from towerjax.types.trees import named_leaves

Capacity = dict[int, int]
"""For the index of each leaf, the number of entries to which each part is padded."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """The entries of a sparse leaf, on the host."""

    leaf: Any  # the original leaf, whose class the result gets
    values: np.ndarray  # [e, ...]
    indices: np.ndarray  # [e, n]; column 0 holds row numbers
    shape: tuple[int, ...]  # [B, ...]

    @classmethod
    def from_leaf(cls, name: str, leaf: Any) -> "Entries":
        """Read the entries of a sparse leaf, without padding entries."""
        if is_rows(leaf):
            leaf.check_range(name)
            values = leaf.values
            indices = np.asarray(leaf.indices)[:, None]
        else:
            values = leaf.data
            indices = np.asarray(leaf.indices)
        shape = dense_shape(leaf)
        if indices.size and indices.min() < 0:
            raise ValueError(
                f"{name} has the index {indices.min()}, but indices are counted from 0."
                " Remove negative indices."
            )
        # JAX marks a padding entry by an index beyond the dim.
        inside = (indices < np.array(shape[: indices.shape[1]])).all(axis=1)
        indices = indices.astype(np.promote_types(indices.dtype, np.int32))
        return cls(leaf, np.asarray(values)[inside], indices[inside], shape)

    @functools.cached_property
    def by_row(self) -> tuple[np.ndarray, np.ndarray]:
        """The order that sorts entries by row, and where each row begins in it."""
        order = np.argsort(self.indices[:, 0], kind="stable")
        rows = np.arange(self.shape[0] + 1)
        return order, np.searchsorted(self.indices[order, 0], rows)

    def take(self, rows: np.ndarray) -> Any:
        """Keep these rows only, in the order of ``rows``."""
        order, starts = self.by_row
        counts = starts[rows + 1] - starts[rows]
        before = np.cumsum(counts) - counts
        entries = order[
            np.arange(counts.sum()) + np.repeat(starts[rows] - before, counts)
        ]
        indices = self.indices[entries].copy()
        indices[:, 0] = np.repeat(np.arange(len(rows)), counts)
        return self._rebuild(self.values[entries], indices, len(rows))

    def max_per_block(self, size: int) -> int:
        """Count the entries in the fullest block of ``size`` rows.

        It is at least 1.
        """
        return int(np.bincount(self.indices[:, 0] // size).max(initial=1))

    def split(self, size: int, parts: int, capacity: int, rows: int) -> Any:
        """Split the leaf into ``parts`` of ``size`` rows, with equally many entries.

        Each part is padded to ``capacity`` entries. The result has ``rows`` rows.
        """
        order, starts = self.by_row
        bounds = starts[np.minimum(np.arange(parts + 1) * size, self.shape[0])]
        values = np.zeros((parts, capacity, *self.values.shape[1:]), self.values.dtype)
        width = self.indices.shape[1]
        # A padding entry is a zero at index 0. In JAX's formats it has an index beyond
        # the dims.
        outside = 0 if is_rows(self.leaf) else np.array((size, *self.shape[1:width]))
        indices = np.empty((parts, capacity, width), self.indices.dtype)
        indices[:] = outside
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            entries = order[first:last]
            values[part, : len(entries)] = self.values[entries]
            indices[part, : len(entries)] = self.indices[entries]
            indices[part, : len(entries), 0] -= part * size
        return self._rebuild(
            values.reshape(-1, *values.shape[2:]), indices.reshape(-1, width), rows
        )

    def _rebuild(self, values: Any, indices: np.ndarray, rows: int) -> Any:
        if is_rows(self.leaf):
            indices = indices[:, 0]
        return rebuild(self.leaf, values, indices, (rows, *self.shape[1:]))


@dataclasses.dataclass(frozen=True, eq=False)
class SparseRows:
    """The sparse leaves of a batch, set aside while its dense leaves are fitted."""

    treedef: Any  # the batch's structure; a sparse leaf is one leaf
    leaves: Mapping[int, Any]  # leaf's index -> `Entries`, or a BCOO with batch dims

    @classmethod
    def put_aside(cls, batch: PyTree) -> tuple["SparseRows", PyTree]:
        """Take the sparse leaves out of a batch, and put stand-ins in their place.

        A stand-in is a dense array with as many rows.
        """
        leaves, treedef = jax.tree.flatten(batch, is_leaf=is_sparse)
        sparse = {i: leaf for i, leaf in enumerate(leaves) if is_sparse(leaf)}
        if not sparse:
            return cls(treedef, {}), batch
        named = named_leaves("batch", batch, is_sparse)
        _refuse_formats([named[i] for i in sparse])
        refuse_unheld("batch", batch)
        for i, leaf in sparse.items():
            # With batch dims, data and indices have a row for each example, so they are
            # split like dense arrays.
            if getattr(leaf, "n_batch", 0):
                rows = map(np.asarray, (leaf.data, leaf.indices))
                size = leaf.shape[0]
                leaves[i] = tuple(
                    np.broadcast_to(x, (size, *x.shape[1:])) for x in rows
                )
            else:
                sparse[i] = Entries.from_leaf(named[i][0], leaf)
                leaves[i] = np.zeros(sparse[i].shape[0], np.bool_)
        return cls(treedef, sparse), jax.tree.unflatten(treedef, leaves)

    def needed(self, size: int) -> Capacity:
        """Count the entries in the fullest part of the batch, for each leaf.

        A part has ``size`` rows.
        """
        entries = {i: x for i, x in self.leaves.items() if isinstance(x, Entries)}
        return {i: x.max_per_block(size) for i, x in entries.items()}

    def take(self, rows: np.ndarray, batch: PyTree) -> PyTree:
        """Take these rows of the batch; ``batch`` holds its dense leaves."""
        return self._replace(batch, len(rows), lambda x, i: x.take(rows))

    def put_back(
        self, batch: PyTree, num_towers: int, parts: int, capacity: Capacity
    ) -> PyTree:
        """Put the sparse leaves, split over towers, in place of their stand-ins."""
        if not self.leaves:
            return batch
        rows = jax.tree.leaves(batch)[0].shape[0] // num_towers
        size = rows // parts
        parts = num_towers * parts
        return self._replace(
            batch, rows, lambda x, i: x.split(size, parts, capacity[i], rows)
        )

    def _replace(self, batch: PyTree, rows: int, leaf_of: Any) -> PyTree:
        items = self.treedef.flatten_up_to(batch)
        for i, leaf in self.leaves.items():
            if isinstance(leaf, Entries):
                items[i] = leaf_of(leaf, i)
            else:
                data, indices = items[i]
                items[i] = rebuild(leaf, data, indices, (rows, *leaf.shape[1:]))
        return jax.tree.unflatten(self.treedef, items)


def join_entries(batch: PyTree, size: int, parts: int) -> PyTree:
    """Join the parts of sparse leaves that `SparseRows.put_back` made, on the host.

    Args:
      batch: The fitted batch, NumPy arrays; each sparse leaf has the entries of
        ``parts`` parts one after another, with rows counted from each part's first.
      size: The number of rows of a part.
      parts: The number of parts.

    Returns:
      The batch; a sparse leaf has the entries of all ``size * parts`` rows.
    """

    def join(leaf: Any) -> Any:
        if not is_sparse(leaf):
            return leaf
        shape = size * parts, *dense_shape(leaf)[1:]
        if getattr(leaf, "n_batch", 0):
            return rebuild(leaf, leaf.data, leaf.indices, shape)
        is_table = is_rows(leaf)
        values = np.asarray(leaf.values if is_table else leaf.data)
        indices = np.array(leaf.indices)
        row = indices if is_table else indices[:, 0]
        is_entry = row < size
        row += np.repeat(np.arange(parts) * size, len(values) // parts)
        return rebuild(leaf, values[is_entry], indices[is_entry], shape)

    return jax.tree.map(join, batch, is_leaf=is_sparse)


def capacity_for(needed: Capacity, capacities: list[Capacity]) -> Capacity:
    """Reuse the first earlier capacity that is large enough, or make a new one.

    A new capacity is the next power of 2 for each leaf that needs more.
    """
    for capacity in capacities:
        if all(capacity.get(i, 0) >= count for i, count in needed.items()):
            return capacity
    capacity = dict(capacities[-1]) if capacities else {}
    for i, count in needed.items():
        capacity[i] = max(capacity.get(i, 1), 1 << (count - 1).bit_length())
    capacities.append(capacity)
    return capacity


def _refuse_formats(named: list[tuple[str, Any]]) -> None:
    bad = [
        f"{name} is {a_type(leaf)}"
        for name, leaf in named
        if not is_rows(leaf) and type(leaf).__name__ != "BCOO"
    ]
    if bad:
        raise ValueError(
            f"{listed(bad)}, a format that cannot be split over towers. Pass a BCOO:"
            " BCOO.from_scipy_sparse(x), or x.to_bcoo() of a BCSR, or"
            " BCOO.fromdense(x.todense())."
        )
