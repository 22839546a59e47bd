"""Limit the batch signatures (tree, shapes and dtypes) that a step compiles for."""

import functools
import warnings
from typing import Any

import jax

from towerjax.collectives.sparse_rows import dense_shape, is_sparse
from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import Signature, batch_signature, explain_change

_MOST_PROGRAMS = 8


class SeenSignatures:
    """The batch signatures that a step has compiled for, at most ``max_programs``."""

    def __init__(self, max_programs: int | None) -> None:
        self.seen: dict[Signature, None] = {}  # in order
        self._most, self._warns = max_programs or _MOST_PROGRAMS, max_programs is None

    def admit(self, batch: PlacedBatch) -> Signature:
        """The batch's signature, which the caller adds to ``seen`` once it compiled."""
        towers = batch.counts.shape[-1]
        dense = functools.partial(_shape_over_towers, towers=towers)
        arrays = jax.tree.map(dense, batch.arrays, is_leaf=is_sparse)
        signature = batch_signature(arrays, batch.args[2])
        if not self.seen or signature in self.seen:
            return signature
        difference = explain_change(list(self.seen)[-1], signature)
        change = f"The batch has changed since the step was compiled:\n{difference}\n"
        if len(self.seen) >= self._most:
            raise ValueError(
                change + "Make it like the first one (a smaller last batch is filled up"
                " under remainder='pad'; tj.batches(..., drop_remainder=True) leaves it"
                " out). If batches of several shapes are meant, build the step or the"
                f" model with max_programs=... (now {self._most}): each shape compiles"
                " once."
            )
        if self._warns and len(self.seen) == 1:
            warnings.warn(
                change + f"It compiles anew, as up to {self._most} kinds of batch do,"
                " without a further warning. Give all batches one shape, or build the"
                " step or the model with max_programs=2 (or more), where they are"
                " meant.",
                stacklevel=2,
            )
        return signature


def _shape_over_towers(x: Any, towers: int) -> Any:
    if not is_sparse(x):
        return x
    rows, *shape = dense_shape(x)  # rows of a tower, as it sees them
    return jax.ShapeDtypeStruct((towers * rows, *shape), jax.tree.leaves(x)[0].dtype)
