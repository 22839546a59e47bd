"""Check, pad and place global batches on the devices of their towers."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.sparse_rows import is_sparse, num_rows, splits_entries
from towerjax.data import batch_rows
from towerjax.data.sparse_rows import Capacity, SparseRows, capacity_for
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import (
    argument_converter,
    copy_to_host,
    has_sharding,
    place_own,
    place_rows,
    refuse_traced,
)
from towerjax.types import Layout, PerTower, PyTree, Whole
from towerjax.types.refusals import refuse_unheld
from towerjax.types.tables import in_bytes
from towerjax.types.trees import held_dtype, native

# The most bytes of padding that a checkpoint may ask for.
_MOST_PADDING = 2**30
BATCH_LAYOUT = {
    "batch": Layout.PER_TOWER,
    "num_valid": Layout.PER_TOWER,
    "replicated": Layout.MIRRORED,
}
"""The layouts of ``PlacedBatch.args``, the arguments of a program."""


@dataclasses.dataclass(frozen=True)
class PlacedBatch:
    """A global batch on the devices of its towers."""

    # The program's arguments: arrays ``[B, ...]``, ``num_valid`` ``[T]`` int32, and the
    # values of `Whole` leaves.
    args: tuple[PyTree, PyTree, PyTree]
    counts: np.ndarray  # [T]: how many of each tower's rows are examples
    rows: int  # b, the rows of each tower
    signature: batch_rows.Signature  # of the arrays and the `Whole` leaves
    placement: Placement  # the towers and devices that it was placed for
    # A hash of the batch. If several processes each have the whole batch, it must be
    # the same on all. Only the first batch of a signature has a hash, so only that is
    # compared.
    fingerprint: str | None = None
    may_pad: bool = True  # whether batches of this step may be padded
    bare: bool = False  # each tower has one example, without a batch dim
    micro_batches: int = 1  # sparse leaves are split for this number

    def __post_init__(self) -> None:
        """Count the examples once, because loops read the number at each step."""
        object.__setattr__(self, "num_examples", int(self.counts.sum()))
        object.__setattr__(self, "padded", bool((self.counts < self.rows).any()))

    num_examples: int = dataclasses.field(init=False)
    padded: bool = dataclasses.field(init=False)  # whether there are padding rows

    def with_arrays(self, arrays: PyTree) -> "PlacedBatch":
        """Hold other arrays; this is faster than ``dataclasses.replace``."""
        batch = object.__new__(PlacedBatch)
        fields = vars(batch)
        fields.update(vars(self))
        fields["args"] = (arrays, *self.args[1:])
        return batch

    @property
    def arrays(self) -> PyTree:
        """The arrays of the batch, on the devices."""
        return self.args[0]

    def check_placement(self, placement: Placement, micro_batches: int = 1) -> None:
        """Raise unless the batch was placed for these towers and micro-batches.

        Its devices must be the same, too.
        """
        mine = self.placement
        yours = placement
        same = mine is yours or mine.devices == yours.devices
        if not same or mine.num_towers != yours.num_towers:
            raise ValueError(
                f"The batch was placed for {mine.num_towers} towers on"
                f" {', '.join(mine.devices)}, but the step has {yours.num_towers}"
                f" towers on {', '.join(yours.devices)}. Place it with"
                " step.place_batch, or with the step's own strategy."
            )
        if self.rows % micro_batches:
            raise ValueError(
                f"The placed batch gives each tower {self.rows} rows, which"
                f" {micro_batches} micro-batches cannot share evenly. Write"
                f" micro_batches={micro_batches} where the batch is placed."
            )
        if self.micro_batches != micro_batches and splits_entries(self.arrays):
            raise ValueError(
                "The placed batch has sparse leaves that were split for"
                f" micro_batches={self.micro_batches}. Write"
                f" micro_batches={micro_batches} where the batch is placed."
            )

    def with_tree(self, arrays: PyTree) -> "PlacedBatch":
        """Put the same arrays in another tree."""
        args = (arrays, *self.args[1:])
        signature = batch_rows.batch_signature(arrays, args[2])
        return dataclasses.replace(self, args=args, signature=signature)

    def check_like(self, other: "PlacedBatch") -> None:
        """Raise unless the batch can be stacked with another batch."""
        batch_rows.refuse_unlike([other.signature, self.signature])

    def per_tower(self) -> PerTower:
        """Turn the batch into a ``PerTower``, for ``tj.tf1.MirroredStrategy``."""
        self.check_placement(self.placement)
        return _per_tower(self.args, self.placement.num_towers, self.bare)

    def unpadded(self) -> PerTower:
        """Turn the batch into a ``PerTower``; raise if it has padding rows."""
        if self.padded:
            raise ValueError(
                f"The batch is padded: towers have {self.counts.tolist()} examples in"
                f" {self.rows} rows, which the result could not show. Use"
                " remainder='drop', or pass both placed.per_tower() and"
                " tj.PerTower(placed.counts)."
            )
        return self.per_tower()


def split_over_towers(
    args: tuple[PyTree, PyTree, PyTree], num_towers: int, *, bare: bool
) -> tuple[PyTree, PerTower]:
    """Split a batch: each tower's part as ``PerTower``, and weights ``[T, b]``.

    ``args`` and ``bare`` are those of a `PlacedBatch`.
    """
    arrays, num_valid, _ = args
    rows_each = jax.tree.leaves(arrays)[0].shape[0] // num_towers
    weights = batch_rows.row_weights(num_valid[:, None], 0, rows_each)
    return _per_tower(args, num_towers, bare), PerTower(weights)


def _per_tower(
    args: tuple[PyTree, PyTree, PyTree], num_towers: int, bare: bool
) -> PyTree:
    """Split a batch into each tower's part, as ``PerTower``."""
    arrays, _, replicated = args
    rows = arrays if bare else batch_rows.split_rows(arrays, num_towers)
    return batch_rows.with_replicated(jax.tree.map(PerTower, rows), replicated)


def _flatten(batch: PlacedBatch) -> tuple[tuple[PyTree, ...], Any]:
    counts = batch.counts.astype(np.int32)
    rest = batch.rows, batch.signature, batch.placement, None, batch.may_pad
    rest += batch.bare, batch.micro_batches
    return (batch.args,), (counts.tobytes(), counts.shape, rest)


def _unflatten(known: Any, parts: tuple[PyTree, ...]) -> PlacedBatch:
    (args,) = parts
    (counts, shape, rest) = known
    return PlacedBatch(args, np.frombuffer(counts, np.int32).reshape(shape), *rest)


# The batch is a pytree, so that it may be an argument of ``jax.jit(step.fn)``.
jax.tree_util.register_pytree_node(PlacedBatch, _flatten, _unflatten)


class Placer:
    """A function object that checks, pads and places the batches of one step."""

    def __init__(
        self,
        placement: Placement,
        *,
        remainder: batch_rows.Remainder,
        micro_batches: int = 1,
        calls: int | None = None,
    ) -> None:
        self.placement = placement
        self._micro_batches = micro_batches
        # The number of calls of the tower function over which a batch is split. It is
        # towers times micro-batches unless ``calls`` is given.
        self.calls: int = calls or placement.num_towers * micro_batches
        towers = placement.num_towers
        parts = placement.row_shards
        self.shared_by = batch_rows.Shares(towers, self.calls // towers, parts)
        # The number of rows is a multiple of this.
        self.shares = math.prod(self.shared_by)
        self._remainder: batch_rows.Remainder = remainder
        self.may_pad = remainder == "pad"
        # For each padded size so far: the most examples that a batch of this size held.
        # Batches that a step then refused count, too.
        self.full_sizes: dict[int, int] = {}
        # Padded sizes that only a checkpoint tells.
        self._told: set[int] = set()
        self._capacities: list[Capacity] = []
        self._counts: dict[tuple[Layout, bytes], jax.Array] = {}
        self._signatures: dict[batch_rows.Signature, batch_rows.Signature] = {}
        # By the key of `flatten_with_key`: a `PlacedBatch` without arrays, which would
        # otherwise stay alive; whether an integer may overflow; and for each leaf the
        # function that makes it an argument of the program.
        self._templates: dict[Any, tuple[PlacedBatch, bool, list[Any]]] = {}

    @property
    def batch_rows(self) -> frozenset[int]:
        """The sizes of earlier batches, to which smaller batches are padded."""
        return frozenset(self.full_sizes.values())

    def expect(self, sizes: Iterable[int], *, told: bool = False) -> None:
        """Treat these numbers of rows as those of earlier batches.

        So later batches of fewer rows are padded to them. With ``told`` a checkpoint
        has them, which may be forged.
        """
        new = [n for n in sorted(sizes) if n > max(self.full_sizes, default=0)]
        padded = {n + -n % self.shares: n for n in new}
        self.full_sizes |= padded
        self._told |= padded.keys() if told else set()

    def place(self, batch: PyTree, *, by_call: bool = False) -> PlacedBatch:
        """Check, pad and place a batch.

        With ``by_call`` leaves may stay on the host, because the program that is called
        next places its arguments itself.
        """
        if isinstance(batch, PlacedBatch):
            batch.check_placement(self.placement, self._micro_batches)
            return batch
        leaves, treedef, key = batch_rows.flatten_with_key(batch)
        if (known := self._templates.get(key)) is not None:
            template, may_wrap, converts = known
            if may_wrap:
                batch_rows.refuse_wrapping(batch)
            if by_call and self.placement.num_processes == 1:
                self.placement.require_present()
                arrays = batch
                if any(converts):
                    pairs = zip(converts, leaves, strict=True)
                    leaves = [convert(x) if convert else x for convert, x in pairs]
                    arrays = treedef.unflatten(leaves)
            else:
                arrays = place_rows(batch, self.placement, Layout.PER_TOWER)
            return template.with_arrays(arrays)
        refuse_traced("batch", batch)
        try:
            rows, counts, replicated = self._fit(batch)
        except ValueError as error:
            if batch_rows.is_list_of_examples(batch):
                error.add_note(
                    "If the batch is a list of examples, stack them:"
                    " jax.tree.map(lambda *rows: np.stack(rows), *batch)."
                )
            raise
        arrays = place_rows(rows, self.placement, Layout.PER_TOWER)
        placed = self.wrap_arrays(arrays, counts, replicated, rows)
        is_same = key is not None and batch_rows.flatten_with_key(rows)[2] == key
        # A batch with sparse entries is prepared anew each time, because the entries
        # differ even if shapes are equal.
        # The leaves were neither cut nor padded, so a next batch like this one can be
        # placed directly.
        if is_same and not splits_entries(batch):
            sharding = self.placement.sharding(Layout.PER_TOWER)
            converts = [argument_converter(x, sharding) for x in leaves]
            template = dataclasses.replace(placed, fingerprint=None).with_arrays(None)
            self._templates[key] = template, batch_rows.may_wrap(batch), converts
        return placed

    def shapes(self, batch: PyTree) -> tuple[PyTree, ...]:
        """Find the shapes of a program's arguments for a batch; place nothing."""
        rows, replicated = batch_rows.without_replicated(batch)
        batch_rows.refuse_other_than_rows(rows)
        batch_rows.count_examples(rows, shapes=True)
        batch_rows.refuse_wrapping(rows)

        def fit(rows: PyTree, replicated: PyTree) -> tuple[PyTree, ...]:
            batch = batch_rows.with_replicated(rows, [Whole(x) for x in replicated])
            return self.fit_traced(batch).args

        held = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, held_dtype(x.dtype)), rows
        )
        return jax.eval_shape(fit, held, replicated)

    def fit_traced(self, batch: PyTree) -> PlacedBatch:
        """Cut or pad the batch of one step, of arrays or tracers; place nothing."""
        if isinstance(batch, PlacedBatch):
            batch.check_placement(self.placement, self._micro_batches)
            return batch
        rows, replicated = batch_rows.without_replicated(batch)
        batch_rows.refuse_other_than_rows(rows)
        rows, num_valid = batch_rows.fit_batch(rows, self.shared_by, self._remainder)
        rows, replicated = jax.tree.map(
            lambda x: jnp.asarray(native(x)), (rows, replicated)
        )
        towers = self.placement.num_towers
        rows_each = jax.tree.leaves(rows)[0].shape[0] // towers
        counts = batch_rows.counts_of_towers(num_valid, rows_each, towers)
        return self._wrap((rows, jnp.asarray(counts), replicated), counts, None)

    def wrap_arrays(
        self,
        arrays: PyTree,
        counts: np.ndarray,
        replicated: Sequence[PyTree] = (),
        batch: PyTree = None,
    ) -> PlacedBatch:
        """Wrap arrays that already lie on the devices in a `PlacedBatch`."""
        placed = self._place_counts(counts, Layout.PER_TOWER)
        return self._wrap((arrays, placed, [*replicated]), counts, batch)

    def _wrap(
        self, args: tuple[PyTree, PyTree, PyTree], counts: np.ndarray, batch: PyTree
    ) -> PlacedBatch:
        """Wrap a program's arguments in a `PlacedBatch`.

        With several processes, the first batch of a signature gets a hash of ``batch``,
        by which the processes compare whether all have the same batch.
        """
        new = batch_rows.batch_signature(args[0], args[2])
        signature = self._signatures.setdefault(new, new)
        fingerprint = None
        if batch is not None and signature is new and self.placement.num_processes > 1:
            fingerprint = batch_rows.fingerprint_of((batch, args[2]))
        first = jax.tree.leaves(args[0], is_leaf=is_sparse)[0]
        if is_sparse(first):
            rows = num_rows(first)
        else:
            rows = first.shape[0] // self.placement.num_towers
        return PlacedBatch(
            args,
            counts,
            rows,
            signature,
            self.placement,
            fingerprint,
            self.may_pad,
            micro_batches=self._micro_batches,
        )

    def _fit(self, batch: PyTree) -> tuple[PyTree, np.ndarray, list[PyTree]]:
        """Cut or pad a batch to the size to place.

        The size is the smallest of earlier batches that is large enough; otherwise the
        next one that towers can share evenly. Returns ``(rows, counts, replicated)``.
        """
        rows, held = batch_rows.without_replicated(batch)
        replicated = self.place_replicated(held, rows)
        sparse, dense = SparseRows.put_aside(rows)
        leaves = jax.tree.leaves(dense)
        arrays = [x for x in leaves if isinstance(x, np.ndarray | jax.Array)]
        most = max((x.shape[0] for x in arrays if x.ndim), default=0)
        sizes = [n for n in self.full_sizes if n >= most]
        size = min(sizes, default=most + -most % self.shares)
        if size in self._told:
            num_bytes = sum(x.nbytes for x in arrays) / max(most, 1)
            _refuse_giant(most, size, num_bytes)
            self._told.discard(size)
        dense, num_valid = batch_rows.fit_batch(
            dense, self.shared_by, self._remainder, full_size=size
        )
        padded = jax.tree.leaves(dense)[0].shape[0]
        self.full_sizes[padded] = max(num_valid, self.full_sizes.get(padded, 0))
        towers = self.placement.num_towers
        micro_batches = self._micro_batches
        needed = sparse.needed(padded // (towers * micro_batches))
        capacity = capacity_for(needed, self._capacities)
        counts = batch_rows.counts_of_towers(num_valid, padded // towers, towers)
        return (
            sparse.put_back(dense, towers, micro_batches, capacity),
            counts,
            replicated,
        )

    def place_replicated(self, held: list[PyTree], rows: PyTree) -> list[PyTree]:
        """Place the values of `Whole` leaves on all devices; copy only if needed."""
        refuse_unheld(
            "batch",
            batch_rows.with_replicated(jax.tree.map(lambda _: None, rows), held),
        )

        def place_leaf(x: Any) -> Any:
            if has_sharding(x, self.placement.sharding(Layout.MIRRORED)):
                return x
            # Placing a replicated value on several processes communicates, which the
            # prefetch thread must not do. So it stays on the host here.
            if self.placement.num_processes > 1:
                return copy_to_host(x)
            return place_own(x, self.placement, Layout.MIRRORED)

        return jax.tree.map(place_leaf, held)

    def _place_counts(self, counts: np.ndarray, layout: Layout) -> jax.Array:
        """Place row counts on the devices; reuse the array of earlier equal counts."""
        key = layout, counts.tobytes()
        if key not in self._counts:
            if len(self._counts) > 64:
                self._counts.clear()
            self._counts[key] = place_rows(counts, self.placement, layout)
        return self._counts[key]


def _refuse_giant(rows: int, size: int, bytes_of_row: float) -> None:
    """Raise if the size that a checkpoint tells needs much memory for padding."""
    if (size - rows) * bytes_of_row > _MOST_PADDING:
        raise ValueError(
            f"The batch has {rows} examples, but its checkpoint says that it is padded"
            f" to {size:,}, which takes {in_bytes(size * bytes_of_row)}. If earlier"
            " batches had as many, place one of them first, step.place_batch(batch)."
            " Otherwise the checkpoint was forged: name another folder."
        )
