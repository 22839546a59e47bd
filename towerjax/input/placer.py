"""How does a batch get onto the devices of its towers? Fitted, placed, counted."""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from towerjax.executors import stack_on_devices
from towerjax.input.sparse_rows import SparseRows, refuse_sparse_rows
from towerjax.placement import Placement, place_own, place_rows
from towerjax.shard import (
    Remainder,
    Signature,
    batch_signature,
    counts_of_towers,
    explain_change,
    fit_batch,
)
from towerjax.sparse import is_rows, num_rows
from towerjax.types import Layout, PerTower, PyTree


@dataclasses.dataclass(frozen=True)
class PlacedBatch:
    """A global batch, or several stacked ones, on the devices of its towers.

    Attributes:
      args: What a program takes of it: ``(arrays, num_valid)`` with leaves
        ``[B, ...]`` and ``[T]`` int32, each tower's number of examples; for ``K``
        steps ``(arrays, num_valid, count)`` with ``[K, B, ...]``, ``[K, T]``, ``()``.
      counts: ``[T]``, or ``[count, T]`` for several steps: how many of each tower's
        rows are examples.
      rows: ``b``, how many rows each tower has.
      signature: As `batch_signature` gives it, of ``arrays``.
      placement: The towers and devices that it was placed for.
      fingerprint: Of the first batch of a kind, when every one of several processes
        has it whole: what must be the same on all of them.
      bare: Is each tower's part one element without a dim over examples?
    """

    args: tuple[PyTree, ...]
    counts: np.ndarray
    rows: int
    signature: Signature
    placement: Placement
    fingerprint: str | None = None
    bare: bool = False

    def __post_init__(self) -> None:
        """Counted once: the loops look at each step."""
        steps = self.counts.reshape(-1, self.counts.shape[-1])
        examples = tuple(int(n) for n in steps.sum(axis=1))
        object.__setattr__(self, "num_examples", examples)
        object.__setattr__(self, "padded", bool((steps < self.rows).any()))

    num_examples: tuple[int, ...] = dataclasses.field(init=False)
    padded: bool = dataclasses.field(init=False)

    @property
    def arrays(self) -> PyTree:
        """The batch itself, on the devices."""
        return self.args[0]

    @property
    def num_steps(self) -> int | None:
        """``K``, how many steps fit in; None for a batch of a single step."""
        return None if len(self.args) == 2 else self.args[1].shape[0]

    def check(self, placement: Placement) -> None:
        """Raise unless it was placed for these towers and devices.

        Args:
          placement: Those of the step that is given the batch.

        Raises:
          ValueError: It was placed for others.
        """
        mine, yours = self.placement, placement
        if mine is yours or (mine.devices, mine.num_towers) == (
            yours.devices,
            yours.num_towers,
        ):
            return
        raise ValueError(
            f"The batch was placed for {mine.num_towers} towers on"
            f" {', '.join(mine.devices)}, but the step has {yours.num_towers} towers on"
            f" {', '.join(yours.devices)}. Place it with the step's own strategy."
        )

    def per_tower(self) -> PerTower:
        """The batch as each tower sees it, for ``strategy.call_for_each_tower``.

        Returns:
          ``PerTower`` leaves ``[T, b, ...]``; ``[T, ...]`` where elements are bare.
        """
        num_towers = self.counts.shape[-1]

        def split(x: jax.Array) -> jax.Array:
            return x if self.bare else x.reshape((num_towers, -1) + x.shape[1:])

        return jax.tree.map(lambda x: PerTower(split(x)), self.arrays)


class Placer:
    """Checks, fits and places the batches of one step.

    Args:
      placement: The step's towers and devices.
      shares: What must divide the rows: ``T`` times the micro-batches.
      remainder: What to do where it does not.
    """

    def __init__(
        self, placement: Placement, *, shares: int, remainder: Remainder
    ) -> None:
        self.placement = placement
        self._shares: int = shares
        self._remainder: Remainder = remainder
        # Of all batches so far, also of one that the step refused afterwards.
        self.full_sizes: set[int] = set()
        self._capacities: list[dict[int, int]] = []
        self._counts: dict[bytes, jax.Array] = {}
        self._numbers: dict[int, jax.Array] = {}
        self._signatures: dict[Signature, Signature] = {}

    def expect(self, sizes: Iterable[int]) -> None:
        """Pad as if batches of these sizes had been placed before.

        Args:
          sizes: Rows, once padded; those that the shares do not divide are left out.
        """
        self.full_sizes.update(n for n in sizes if n % self._shares == 0)

    def place(self, batch: PyTree) -> PlacedBatch:
        """One batch for one step.

        A smaller batch than one before is padded up to the smallest such, under
        ``remainder="pad"``, so that it needs no program of its own.

        Args:
          batch: A pytree of NumPy or JAX arrays ``[B, ...]``; of several processes
            each passes the whole batch, and its own part of it is placed.

        Returns:
          The `PlacedBatch`.

        Raises:
          ValueError: As `fit_batch`.
        """
        if self._shares != self.placement.num_towers:
            refuse_sparse_rows(batch, "a step of several micro-batches")
        sparse, batch = SparseRows.put_aside(batch)
        batch, num_valid = self._fit(batch)
        counts = self._split_counts(batch, num_valid)
        batch = sparse.put_back(batch, self.placement.num_towers, self._capacities)
        arrays = place_rows(batch, self.placement, Layout.PER_TOWER)
        return self.placed(arrays, counts, batch)

    def placed(
        self, arrays: PyTree, counts: np.ndarray, batch: PyTree = None
    ) -> PlacedBatch:
        """A batch that lies on the devices already.

        Args:
          arrays: Leaves ``[B, ...]``, with the towers that they belong to.
          counts: ``[T]`` int32, how many of each tower's rows are examples.
          batch: The host's copy, when it is whole on each process.

        Returns:
          The `PlacedBatch`.
        """
        rows = _rows_of_tower(arrays, self.placement.num_towers)
        signature, is_new = self._signature(arrays)
        fingerprint = None
        if batch is not None and is_new and self.placement.num_processes > 1:
            fingerprint = _fingerprint(batch)
        args = (arrays, self._placed_counts(counts))
        return PlacedBatch(args, counts, rows, signature, self.placement, fingerprint)

    def place_several(self, batches: Sequence[PyTree], steps: int) -> PlacedBatch:
        """Up to ``steps`` batches stacked, for one call of that many steps.

        Args:
          batches: One to ``steps`` batches, on the host or placed.
          steps: ``K``; missing batches are filled in and never worked on.

        Returns:
          The `PlacedBatch`.

        Raises:
          ValueError: As `fit_batch`; or the batches are not alike.
        """
        if isinstance(batches[0], PlacedBatch):
            return self._stack_placed(batches, steps)
        for batch in batches:
            refuse_sparse_rows(batch, "steps_per_call > 1")
        fitted = [self._fit(batch) for batch in batches]
        rows = [batch for batch, _ in fitted]
        counts = np.stack([self._split_counts(*pair) for pair in fitted])
        _refuse_unlike([batch_signature(batch) for batch in rows])
        filled = rows + [rows[-1]] * (steps - len(rows))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *filled)
        arrays = place_rows(stacked, self.placement, Layout.PER_TOWER_STEPS)
        return self._several(arrays, counts, steps, stacked)

    def _stack_placed(self, batches: Sequence[PlacedBatch], steps: int) -> PlacedBatch:
        _refuse_unlike([batch.signature for batch in batches])
        for batch in batches:
            batch.check(self.placement)
        arrays = [batch.arrays for batch in batches]
        arrays += [arrays[-1]] * (steps - len(arrays))
        counts = np.stack([batch.counts for batch in batches])
        stacked = stack_on_devices(arrays, self.placement)
        return self._several(stacked, counts, steps, None)

    def _several(
        self, arrays: PyTree, counts: np.ndarray, steps: int, batch: PyTree
    ) -> PlacedBatch:
        missing = np.zeros((steps - len(counts), counts.shape[1]), np.int32)
        num_valid = np.concatenate([counts, missing])
        num_valid = place_rows(num_valid, self.placement, Layout.PER_TOWER_STEPS)
        rows = jax.tree.leaves(arrays)[0].shape[1] // self.placement.num_towers
        signature, is_new = self._signature(arrays)
        fingerprint = None
        if batch is not None and is_new and self.placement.num_processes > 1:
            fingerprint = _fingerprint(batch)
        args = (arrays, num_valid, self._number(len(counts)))
        return PlacedBatch(args, counts, rows, signature, self.placement, fingerprint)

    def _fit(self, batch: PyTree) -> tuple[PyTree, int]:
        rows = max((np.shape(x)[:1] for x in jax.tree.leaves(batch)), default=())
        larger = (size for size in self.full_sizes if (size,) >= rows)
        batch, num_valid = fit_batch(
            batch, self._shares, self._remainder, full_size=min(larger, default=None)
        )
        self.full_sizes.add(jax.tree.leaves(batch)[0].shape[0])
        return batch, num_valid

    def _split_counts(self, batch: PyTree, num_valid: int) -> np.ndarray:
        num_towers = self.placement.num_towers
        rows = jax.tree.leaves(batch)[0].shape[0] // num_towers
        return counts_of_towers(num_valid, rows, num_towers)

    def _signature(self, arrays: PyTree) -> tuple[Signature, bool]:
        """The one object for all batches of a kind, and whether it is the first."""
        signature = batch_signature(arrays)
        known = self._signatures.setdefault(signature, signature)
        return known, known is signature

    def _placed_counts(self, counts: np.ndarray) -> jax.Array:
        """The counts on the towers' devices; the few that occur are placed once."""
        key = counts.tobytes()
        if key not in self._counts:
            if len(self._counts) > 64:
                self._counts.clear()
            self._counts[key] = place_rows(counts, self.placement, Layout.PER_TOWER)
        return self._counts[key]

    def _number(self, number: int) -> jax.Array:
        if number not in self._numbers:
            self._numbers[number] = place_own(
                np.int32(number), self.placement, Layout.MIRRORED
            )
        return self._numbers[number]


def _rows_of_tower(arrays: PyTree, num_towers: int) -> int:
    rows = num_rows(arrays)
    first = jax.tree.leaves(arrays, is_leaf=is_rows)[0]
    return rows if is_rows(first) else rows // num_towers


def _refuse_unlike(signatures: Sequence[Signature]) -> None:
    for signature in signatures[1:]:
        if signature != signatures[0]:
            raise ValueError(
                "steps_per_call stacks batches of one kind, but one changed:\n"
                + explain_change(signatures[0], signature)
                + "\nMake all batches alike, or use steps_per_call=1."
            )


def _fingerprint(batch: PyTree) -> str:
    """What the batch holds, in short: to be compared between processes."""
    leaves, treedef = jax.tree.flatten(batch)
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    kinds = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    return f"{treedef} of {kinds}, contents {digest.hexdigest()[:12]}"
