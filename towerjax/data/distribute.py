"""Distribute a data set over the towers of all processes, one round per step.

If each process reads its own part of the data, processes exchange the sizes of each
round through the job's coordinator. So no process waits for one whose data has ended.
"""

import dataclasses
import functools
import itertools
import threading
import uuid
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np

from towerjax.data import batch_rows
from towerjax.data.feed import Batches
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.data.sparse_rows import Capacity, SparseRows, capacity_for
from towerjax.data.stream import (
    InputContext,
    Stream,
    check_source,
    from_tensors,
    has_cursor,
    is_elastic,
    open_source,
)
from towerjax.mesh.placement import Placement
from towerjax.mesh.processes import Exchange
from towerjax.mesh.transfer import place_own_rows, place_rows
from towerjax.types import Layout, PyTree
from towerjax.types.options import cast_ints, check_choice, check_whole
from towerjax.types.refusals import check_like

Split: TypeAlias = Literal["batch", "elements"]
"""Whether each element is a global batch, or the rows of one tower."""


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a data set is distributed; see ``strategy.distribute_dataset``."""

    split: Split
    remainder: batch_rows.Remainder
    micro_batches: int
    prefetch: int

    def __post_init__(self) -> None:
        check_choice("split", self.split, get_args(Split))
        batch_rows.check_remainder(self.remainder)
        check_whole("micro_batches", self.micro_batches, 1)
        check_whole("prefetch", self.prefetch, 0)
        cast_ints(self)


class _Pulled(NamedTuple):
    """The elements of one round that this process took for its own towers."""

    trees: list[PyTree]  # one tree for all towers of the process, or one for each
    sizes: list[int]  # the number of examples in each tree
    bare: bool = False  # whether elements were single examples, without a batch dim
    sparse: SparseRows | None = None  # the sparse leaves, if one tree is for all towers
    replicated: Sequence[PyTree] = ()  # the values of `Whole` leaves, likewise


class DistributedDataset:
    """Placed batches, one per step: the result of ``strategy.distribute_dataset``.

    Each iteration starts from the beginning, if the source can be iterated again. Steps
    and `run` accept its elements as batches.

    Attributes:
      prefetches: Always True, because a thread of the data set places batches in
        advance.
      is_reproducible: Whether a restarted job is known to get the same batches. It is
        known only if the source is a sequence.
    """

    prefetches = True

    def __init__(
        self, placement: Placement, source: Any, options: InputOptions
    ) -> None:
        processes = placement.num_processes
        own_part = check_source(source)
        self._placement = placement
        self._source = source
        self._options = options
        self.is_reproducible = isinstance(source, Sequence)
        here = placement.process_index
        context = InputContext(here, processes, placement.num_towers)
        self._open_with = [context] if own_part else []  # the source's arguments
        # The number of towers that share an element: all towers, or those of this
        # process.
        self._towers = placement.num_towers // (processes if own_part else 1)
        self._asks_peers = own_part and processes > 1
        self._capacities: list[Capacity] = []
        remainder = options.remainder
        micro_batches = options.micro_batches
        self._placer = Placer(
            placement, remainder=remainder, micro_batches=micro_batches
        )
        # A tower's number of rows is a multiple of this.
        self._divisor = self._placer.shares // placement.num_towers
        self._passes = 0
        if self._asks_peers:  # the processes exchange sizes under this name
            self._name = placement.processes.call_on_first(lambda: uuid.uuid4().hex)

    def on(self, placement: Placement) -> "DistributedDataset":
        """Put the data set on other devices, for the same towers."""
        return DistributedDataset(placement, self._source, self._options)

    def __iter__(self) -> Stream[PlacedBatch]:
        """Start one pass over the data.

        Its position can be saved if the source has ``get_state``, and all processes
        read one source, or parts of global batches that do not depend on the number of
        processes.
        """
        self._passes += 1
        elements = open_source(self._source, *self._open_with)
        begin = functools.partial(self._begin, self._passes, elements)
        start = None
        if self._tells_position(elements):
            start = {"elements": elements.get_state(), "rows": 0}
        return Stream(begin, self._options.prefetch, start)

    def _tells_position(self, elements: Any) -> bool:
        """Return whether another number of processes can go on from its position."""
        is_global = not self._asks_peers or is_elastic(elements)
        return is_global and has_cursor(elements)

    def _begin(
        self, number: int, elements: Any, at: Any, stopped: threading.Event
    ) -> Generator[tuple[PlacedBatch, Any]]:
        if at is not None:
            elements.set_state(at["elements"])
        rows = 0 if at is None else at["rows"]
        # Batches know their largest size, and a resumed run may begin with a smaller
        # one.
        if isinstance(self._source, Batches):
            rows = max(rows, self._rows_for([self._source.most_rows]))
        return self._placed_rounds(number, stopped, elements, rows)

    def per_tower(self) -> Iterator[PyTree]:
        """Yield each round as a ``PerTower`` ``[T, b, ...]``, for ``tj.tf1``."""
        for placed in self:
            yield placed.unpadded()

    def _placed_rounds(
        self, number: int, stopped: threading.Event, source: Any, most_rows: int
    ) -> Generator[tuple[PlacedBatch, Any]]:
        """Yield each round's placed batch, and the cursor after it."""
        elements = (from_tensors(x) for x in source)
        peers: Exchange | None = None
        taken: Any = None  # this process's part of the last round that had one
        if self._asks_peers:
            name = f"{self._name}/{number}"
            processes = self._placement.processes.numbers
            peers = Exchange(name, "the input of process {}", processes, stopped)
        while True:
            pulled, sizes_of_all = self._pull(elements, peers)
            rows = self._rows(sizes_of_all, most_rows, is_first=taken is None)
            if rows is None:
                return
            taken = taken if pulled is None else pulled
            if rows == 0:  # the round is empty, or "drop" leaves nothing of it
                continue
            most_rows = max(rows, most_rows)
            counts = self._counts(sizes_of_all, rows)
            after = None
            if self._tells_position(source):
                after = {"elements": source.get_state(), "rows": most_rows}
            yield self._place(taken, rows, counts), after

    def _counts(self, sizes_of_all: list[Any], rows: int) -> np.ndarray:
        """Count the examples of each tower, over all processes, ``[T]``."""
        counts = []
        for sizes in sizes_of_all:
            # None: the data of that process has ended.
            sizes_here = [0] if sizes is None else sizes
            towers = self._towers // len(sizes_here)
            counts += [batch_rows.counts_of_towers(n, rows, towers) for n in sizes_here]
        return np.concatenate(counts)

    def _own_part(self, elements: Iterator[PyTree]) -> _Pulled | None:
        """Take this process's part of the next round; return None once data ends."""
        if self._options.split == "elements":
            return self._pull_for_each_tower(elements)
        remainder = self._options.remainder
        shared_by = self._placer.shared_by._replace(towers=self._towers)
        for element in elements:
            whole, replicated = batch_rows.without_replicated(element)
            leaves = jax.tree.leaves(whole)
            if leaves and not any(map(np.ndim, leaves)):
                raise ValueError(
                    f"An element of the data set is {whole!r}, but split='batch' needs"
                    " a global batch of arrays. Write split='elements' if each tower"
                    " takes an element."
                )
            # Sparse leaves are refused: no process knows how many entries others need.
            if self._asks_peers:
                batch_rows.refuse_other_than_rows(whole)
            sparse, batch = SparseRows.put_aside(whole)
            if self._asks_peers and {np.shape(x)[:1] for x in leaves} == {(0,)}:
                return _Pulled([batch], [0], replicated=replicated)
            batch, num_valid = batch_rows.fit_batch(
                batch, shared_by, remainder, may_drop_all=True
            )
            if num_valid == 0:
                continue
            return _Pulled([batch], [num_valid], sparse=sparse, replicated=replicated)
        return None

    def _pull_for_each_tower(self, elements: Iterator[PyTree]) -> _Pulled | None:
        """Take one element for each tower of this process; return None at the end."""
        # Each element is copied at once: a loader may reuse its buffer for the next
        # one.
        first = itertools.islice(elements, self._towers)
        copies = [jax.tree.map(_own_copy, x) for x in first]
        bare = all(map(_has_scalars, copies))
        taken = [_with_dim_of_rows(x) for x in copies]
        for element in taken:
            batch_rows.refuse_other_than_rows(element)
            batch_rows.refuse_wrapping(element)
        _refuse_unlike_elements(taken)
        sizes = [batch_rows.count_examples(x) for x in taken]
        missing = self._towers - len(taken)
        remainder = self._options.remainder
        if not taken or (missing and remainder == "drop"):
            return None
        if remainder == "pad":
            padding = [taken[-1]] * missing
            return _Pulled(taken + padding, sizes + [0] * missing, bare)
        if missing or len(set(sizes)) > 1:
            if remainder == "drop" and _is_at_end(elements):
                return None
            raise ValueError(
                f"{self._towers} towers take one element each, but the source gave"
                f" {len(taken)} elements of sizes {sizes}. Give elements of one size,"
                " or write remainder='pad', or 'drop' to leave out the end."
            )
        of_one = self._placer.shared_by._replace(towers=1)
        fitted = [batch_rows.fit_batch(x, of_one, remainder) for x in taken]
        trees = [tree for tree, _ in fitted]
        return _Pulled(trees, [size for _, size in fitted], bare)

    def _rows_for(self, sizes: list[int]) -> int:
        """Count the rows that each tower needs to hold parts of these sizes."""
        shares = self._towers * self._divisor // len(sizes)
        return max(-(-n // shares) for n in sizes) * self._divisor

    def _build(self, taken: _Pulled, rows: int) -> PyTree:
        """Build the round's batch, with leaves ``[towers * rows, ...]``."""
        size = rows * self._towers // len(taken.trees)
        trees = [batch_rows.resize(tree, size) for tree in taken.trees]
        if len(trees) > 1:
            return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)
        if taken.sparse is None:
            return trees[0]
        micro_batches = self._options.micro_batches
        capacity = capacity_for(
            taken.sparse.needed(rows // micro_batches), self._capacities
        )
        return taken.sparse.put_back(trees[0], self._towers, micro_batches, capacity)

    def _place(self, taken: _Pulled, rows: int, counts: np.ndarray) -> PlacedBatch:
        tree = self._build(taken, rows)
        bare = rows == 1 and taken.bare
        if self._asks_peers:
            arrays = place_own_rows(tree, self._placement)
            whole = None
        else:
            arrays = place_rows(tree, self._placement, Layout.PER_TOWER)
            whole = tree
        replicated = self._placer.place_replicated([*taken.replicated], tree)
        placed = self._placer.wrap_arrays(arrays, counts, replicated, whole)
        return dataclasses.replace(placed, bare=True) if bare else placed

    def _pull(
        self, elements: Iterator[PyTree], peers: Exchange | None
    ) -> tuple[_Pulled | None, list[Any]]:
        """Take this process's part of the next round, and learn the sizes of all parts.

        Returns the part, and the sizes by process; None stands for the end of a
        process's data.
        """
        try:
            pulled = self._own_part(elements)
        except Exception as error:
            if peers is not None:  # tells the other processes, which wait for this part
                peers.all_gather({"failed": f"{type(error).__name__}: {error}"})
            raise
        sizes = None if pulled is None else pulled.sizes
        if peers is None:
            return pulled, [sizes]
        answers = peers.all_gather({"sizes": sizes})
        for process, part in enumerate(answers):
            if "failed" in part:
                raise ValueError(
                    f"The input of process {process} failed: {part['failed']}. See the"
                    " traceback of that process."
                )
        return pulled, [part["sizes"] for part in answers]

    def _rows(
        self, sizes_of_all: list[Any], most_rows: int, *, is_first: bool
    ) -> int | None:
        """Decide how many rows each tower gets in a round; None if data ended."""
        ended = [p for p, sizes in enumerate(sizes_of_all) if sizes is None]
        needed = [self._rows_for(sizes) for sizes in sizes_of_all if sizes]
        remainder = self._options.remainder
        if len(ended) == len(sizes_of_all) or (ended and remainder == "drop"):
            return None
        if ended and (is_first or remainder == "error"):
            raise ValueError(
                f"The input of processes {ended} ended before that of the others. Give"
                " all processes equally many batches, or write remainder='pad' or"
                " 'drop'."
            )
        if remainder == "pad":
            return max(*needed, most_rows)
        if remainder == "error" and len(set(needed)) > 1:
            raise ValueError(
                f"The processes gave batches of {needed} rows per tower, which must be"
                " equal under remainder='error'. Give equal batches, or write"
                " remainder='pad'."
            )
        return min(needed)


def _own_copy(leaf: Any) -> Any:
    """Copy a NumPy array, because a loader may overwrite its memory."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _has_scalars(element: PyTree) -> bool:
    """Return whether an element is a single example, which a scalar leaf shows."""
    return any(np.ndim(x) == 0 for x in jax.tree.leaves(element))


def _with_dim_of_rows(element: PyTree) -> PyTree:
    """Make a batch of a single example, by a leading dim of size 1."""
    return jax.tree.map(_as_one_row, element) if _has_scalars(element) else element


def _as_one_row(leaf: Any) -> Any:
    """Give the leaf a leading dim of one row."""
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return array[None]


def _refuse_unlike_elements(taken: list[PyTree]) -> None:
    """Raise if the towers' elements differ in more than their number of rows."""

    def without_rows(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)

    kinds = [jax.tree.map(without_rows, x) for x in taken]
    for tower, kind in enumerate(kinds):
        fault = f"Tower {tower}'s element of a step is not like tower 0's"
        check_like("element", kind, kinds[0], fault, "They may differ in dim 0 only.")


def _is_at_end(elements: Iterator[PyTree]) -> bool:
    """Try to take one more element; True if there is none.

    An element that is taken here is lost.
    """
    return not any(True for _ in elements)
