"""Distribute a data set over the towers of all processes, in rounds of one step each.

A round is one global batch split over the towers, or one element for each tower.
Several processes either read the same data, of which each places its own towers' part,
or each reads a part of its own. Then they exchange the sizes of each round through the
job's coordinator, so that none waits for a peer whose data has ended.
"""

import dataclasses
import functools
import itertools
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from towerjax.data import feed
from towerjax.data.placer import PlacedBatch, Placer
from towerjax.data.shard import (
    Remainder,
    check_remainder,
    count_examples,
    counts_of_towers,
    fit_batch,
    pad_rows,
    refuse_other_than_rows,
    refuse_wrapping,
)
from towerjax.data.sources import (
    DataPass,
    InputContext,
    ResumableDataPass,
    as_arrays,
    check_source,
    is_function,
    open_source,
)
from towerjax.data.sparse_rows import Capacity, SparseRows, capacity_for
from towerjax.mesh.placement import Placement, place_own_rows, place_rows
from towerjax.mesh.processes import Exchange, call_on_first_process
from towerjax.types import Layout, PyTree
from towerjax.types.leaves import changes, listed
from towerjax.types.options import cast_ints, check_choice, check_whole

Split: TypeAlias = Literal["batch", "elements"]


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a data set is distributed; see ``strategy.distribute_dataset``."""

    split: Split
    remainder: Remainder
    micro_batches: int
    prefetch: int

    def __post_init__(self) -> None:
        check_choice("split", self.split, get_args(Split))
        check_remainder(self.remainder)
        check_whole("micro_batches", self.micro_batches, 1)
        check_whole("prefetch", self.prefetch, 0)
        cast_ints(self)


@dataclasses.dataclass(frozen=True)
class _WholeBatches:
    """A round is one batch, split over the towers.

    The methods are those of `_Elements` too: ``pull`` returns the next round and its
    sizes, or None at the end of the data; ``rows`` the rows that each tower needs;
    ``build`` the round padded to them, leaves ``[towers * rows, ...]``; ``counts`` how
    many of each tower's rows are examples.
    """

    towers: int
    options: InputOptions
    may_be_empty: bool
    capacities: list[Capacity] = dataclasses.field(default_factory=list)

    def pull(self, elements: Iterator[PyTree]) -> tuple[PyTree, list[int]] | None:
        shares = self.towers * self.options.micro_batches
        for whole in elements:
            leaves = jax.tree.leaves(whole)
            if leaves and not any(map(np.ndim, leaves)):
                raise ValueError(
                    f"An element is a global batch of arrays, but is {whole!r}. Say"
                    " split='elements' where each tower takes an element, or wrap lists"
                    " in np.asarray."
                )
            if self.may_be_empty:  # sparse leaves: no process knows others' capacities
                refuse_other_than_rows(whole)
            sparse, batch = SparseRows.put_aside(whole)
            if self.may_be_empty and _is_empty(batch):
                return (sparse, batch), [0]
            if self.options.remainder == "drop" and count_examples(batch) < shares:
                continue
            batch, num_valid = fit_batch(batch, shares, self.options.remainder)
            return (sparse, batch), [num_valid]
        return None

    def rows(self, sizes: list[int]) -> int:
        each = -(-sizes[0] // (self.towers * self.options.micro_batches))
        return each * self.options.micro_batches

    def build(self, taken: PyTree, rows: int) -> PyTree:
        size, (sparse, batch) = self.towers * rows, taken
        if _is_empty(batch):
            return jax.tree.map(
                lambda x: np.zeros((size, *x.shape[1:]), x.dtype), batch
            )
        batch = pad_rows(jax.tree.map(lambda x: x[:size], batch), size)
        parts = self.options.micro_batches
        capacity = capacity_for(sparse.needed(rows // parts), self.capacities)
        return sparse.put_back(batch, self.towers, parts, capacity)

    def counts(self, sizes: list[int], rows: int) -> np.ndarray:
        return counts_of_towers(sizes[0], rows, self.towers)


@dataclasses.dataclass(frozen=True)
class _Elements:
    """A round is one element for each tower."""

    towers: int
    options: InputOptions

    def pull(self, elements: Iterator[PyTree]) -> tuple[PyTree, list[int]] | None:
        # Each copied at once: a loader may reuse its buffer for the next element.
        taken = [
            _with_example_dim(jax.tree.map(feed.own_copy, x))
            for x in itertools.islice(elements, self.towers)
        ]
        sizes = [count_examples(rows) for rows, _ in taken]
        for rows, _ in taken:
            refuse_wrapping(rows)
        _refuse_unlike_elements([rows for rows, _ in taken])
        missing = self.towers - len(taken)
        if not taken or (missing and self.options.remainder == "drop"):
            return None
        uneven = missing or len(set(sizes)) > 1
        if (
            uneven
            and self.options.remainder == "drop"
            and not any(True for _ in elements)
        ):
            return None  # at the end of the data
        if uneven and self.options.remainder != "pad":
            raise ValueError(
                f"{self.towers} towers take an element each, but got {len(taken)} of"
                f" sizes {sizes}. Give elements of one size, or use remainder='pad'"
                " (rows of weight 0; use tower.weight in the loss), or 'drop' for the"
                " end."
            )
        return taken + [taken[-1]] * missing, sizes + [0] * missing

    def rows(self, sizes: list[int]) -> int:
        parts = self.options.micro_batches
        return -(-max(sizes) // parts) * parts

    def build(self, taken: PyTree, rows: int) -> PyTree:
        padded = [pad_rows(element, rows) for element, _ in taken]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *padded)

    def counts(self, sizes: list[int], rows: int) -> np.ndarray:
        return np.array(sizes, np.int32)


def _is_empty(batch: PyTree) -> bool:
    """Whether this process's part of a round has no rows; those of others may."""
    leaves = jax.tree.leaves(batch)
    return bool(leaves) and all(np.shape(x)[:1] == (0,) for x in leaves)


def _with_example_dim(element: PyTree) -> tuple[PyTree, bool]:
    """The element with a dim over examples, and whether that had to be added."""
    if bare := any(np.ndim(x) == 0 for x in jax.tree.leaves(element)):
        element = jax.tree.map(
            lambda x: (x if isinstance(x, jax.Array) else np.asarray(x))[None], element
        )
    return element, bare


def _refuse_unlike_elements(elements: list[PyTree]) -> None:
    """Raise unless elements differ only in dim 0."""

    def of_one_row(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)

    kinds = [jax.tree.map(of_one_row, element) for element in elements]
    for tower, kind in enumerate(kinds):
        if kind != kinds[0] and (found := changes("element", kinds[0], kind)):
            raise ValueError(
                "The elements of one step may differ in dim 0 only, but from tower 0"
                f" to tower {tower} {listed(found)}."
            )


class DistributedDataset:
    """Placed batches, one a step: what ``strategy.distribute_dataset`` returns.

    Each iteration starts from the beginning, as often as the source allows. Steps and
    `run` take its elements as they take batches.

    Attributes:
      prefetches: Its own thread places batches in advance.
      is_reproducible: Whether a restarted job gets the same batches: known of a
        sequence only.
    """

    prefetches = True

    def __init__(
        self, placement: Placement, source: Any, options: InputOptions
    ) -> None:
        processes, own_part = placement.num_processes, check_source(source)
        self._placement, self._source, self._options = placement, source, options
        self.is_reproducible = isinstance(source, Sequence)
        here = jax.process_index() if processes > 1 else 0
        self._context = InputContext(here, processes, placement.num_towers)
        towers = placement.num_towers // (processes if own_part else 1)
        self._asks_peers = own_part and processes > 1
        self._rounds = (
            _WholeBatches(towers, options, may_be_empty=self._asks_peers)
            if options.split == "batch"
            else _Elements(towers, options)
        )
        remainder, parts = options.remainder, options.micro_batches
        self._placer = Placer(placement, remainder=remainder, micro_batches=parts)
        self._name = ""  # of what the processes tell each other
        if self._asks_peers:
            self._name = call_on_first_process(lambda: uuid.uuid4().hex)
        self._passes = 0

    def __iter__(self) -> DataPass:
        """A pass through the batches, some of them placed in advance.

        It has ``get_state`` and ``set_state`` where the source is an iterable whose
        iterator has them, as that of `batches` has.
        """
        self._passes += 1
        number, elements = self._passes, None
        if not is_function(self._source):
            elements = open_source(self._source, self._context)
        begin = functools.partial(self._stream, number, elements)
        if feed.has_cursor(elements):
            return ResumableDataPass(begin, elements)
        return DataPass(begin)

    def _stream(self, number: int, elements: Any, rows: int) -> Any:
        stopped = threading.Event()
        if isinstance(self._source, feed.Batches):  # it may be at a smaller last one
            rows = max(rows, self._rounds.rows([self._source.most_rows]))
        return feed.prefetch(
            self._placed_rounds(number, stopped, elements, rows),
            lambda placed: placed,
            depth=self._options.prefetch,
            on_stop=stopped.set,  # ends the thread's wait for a peer
        )

    def per_tower(self) -> Iterator[PyTree]:
        """Each round as ``PerTower`` leaves, for ``strategy.call_for_each_tower``.

        Yields:
          Leaves ``[T, b, ...]``; ``[T, ...]`` where elements have no dim over
          examples.

        Raises:
          ValueError: There is padding, which the leaves could not mark.
        """
        for placed in self:
            yield placed.unpadded()

    def _placed_rounds(
        self, number: int, stopped: threading.Event, source: Any, most_rows: int
    ) -> Iterator[tuple[PlacedBatch, dict[str, Any]]]:
        """Each round's batch, and the cursor after it."""
        if source is None:
            source = open_source(self._source, self._context)
        elements = map(as_arrays, source)
        peers = last = None
        if self._asks_peers:
            peers = Exchange(f"{self._name}/{number}", "the input", stopped)
        while True:
            pulled, sizes_of_all = self._pull(elements, peers)
            if self._is_end(sizes_of_all, is_first=last is None):
                return
            taken = last = last if pulled is None else pulled[0]
            rows = self._rows(sizes_of_all, most_rows)
            if rows == 0:  # the round is empty, or "drop" leaves nothing of it
                continue
            most_rows = max(rows, most_rows)
            none = [0] * self._rounds.towers
            counts = [
                self._rounds.counts(sizes or none, rows) for sizes in sizes_of_all
            ]
            bare = rows == 1 and isinstance(taken, list) and all(x for _, x in taken)
            cursor = getattr(source, "get_state", lambda: None)()
            placed = self._place(
                self._rounds.build(taken, rows), np.concatenate(counts), bare
            )
            yield placed, {"elements": cursor, "rows": most_rows}

    def _place(self, tree: PyTree, counts: np.ndarray, bare: bool) -> PlacedBatch:
        if self._asks_peers:
            arrays, whole = place_own_rows(tree, self._placement), None
        else:
            arrays = place_rows(tree, self._placement, Layout.PER_TOWER)
            whole = tree
        placed = self._placer.wrap_arrays(arrays, counts, batch=whole)
        return dataclasses.replace(placed, bare=True) if bare else placed

    def _pull(
        self, elements: Iterator[PyTree], peers: Exchange | None
    ) -> tuple[tuple[PyTree, list[int]] | None, list[Any]]:
        """This process's part of the next round, and the sizes of all parts."""
        if peers is None:
            pulled = self._rounds.pull(elements)
            return pulled, [None if pulled is None else pulled[1]]
        try:
            pulled = self._rounds.pull(elements)
        except Exception as error:  # the other processes wait for this part
            peers.all_gather({"failed": f"{type(error).__name__}: {error}"})
            raise
        answers = peers.all_gather({"sizes": None if pulled is None else pulled[1]})
        for process, part in enumerate(answers):
            if "failed" in part:
                raise ValueError(
                    f"The input of process {process} failed: {part['failed']}"
                )
        return pulled, [part["sizes"] for part in answers]

    def _is_end(self, sizes_of_all: list[Any], *, is_first: bool) -> bool:
        ended = [p for p, sizes in enumerate(sizes_of_all) if sizes is None]
        if len(ended) == len(sizes_of_all):
            return True
        if ended and self._options.remainder == "error":
            raise ValueError(
                f"The input of the processes {ended} ended before that of the others."
                " Give each process as many batches, or say remainder='pad' (rows of"
                " weight 0) or 'drop' (stop where the first one ends)."
            )
        if ended and is_first and self._options.remainder == "pad":
            raise ValueError(
                f"The input of the processes {ended} is empty. Give each a part."
            )
        return bool(ended) and self._options.remainder == "drop"

    def _rows(self, sizes_of_all: list[Any], most_rows: int) -> int:
        needed = [self._rounds.rows(sizes) for sizes in sizes_of_all if sizes]
        if self._options.remainder == "pad":
            return max(*needed, most_rows)
        if self._options.remainder == "error" and len(set(needed)) > 1:
            raise ValueError(
                f"The processes gave {needed} rows for each of their towers; one step"
                " takes as many of each. Use equal batches, or remainder='pad'."
            )
        return min(needed)
