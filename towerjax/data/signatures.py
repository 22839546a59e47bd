"""Limit the batch signatures (tree, shapes and dtypes) that a step compiles for."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from towerjax.collectives.sparse_rows import dense_shape, is_sparse
from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import Signature, batch_signature, explain_change

_MOST_PROGRAMS = 8


def admit(
    batch: PlacedBatch, seen: Sequence[Signature], max_programs: int | None
) -> Signature:
    """The batch's signature; raise where ``seen`` are as many as may compile."""
    towers = batch.counts.shape[-1]
    dense = functools.partial(_shape_over_towers, towers=towers)
    arrays = jax.tree.map(dense, batch.arrays, is_leaf=is_sparse)
    signature = batch_signature(arrays, batch.args[2])
    if not seen or signature in seen:
        return signature
    difference = explain_change(seen[-1], signature)
    change = f"The batch has changed since the step was compiled:\n{difference}\n"
    most = max_programs or _MOST_PROGRAMS
    if len(seen) >= most:
        raise ValueError(
            change + "Make it like the first one (a smaller last batch is filled up"
            " under remainder='pad'; tj.batches(..., drop_remainder=True) leaves it"
            " out). If batches of several shapes are meant, build the step or the"
            f" model with max_programs=... (now {most}): each shape compiles once."
        )
    if max_programs is None and len(seen) == 1:
        warnings.warn(
            change + f"It compiles anew, as up to {most} kinds of batch do, without a"
            " further warning. Give all batches one shape, or build the step or the"
            " model with max_programs=2 (or more), where they are meant.",
            stacklevel=2,
        )
    return signature


def _shape_over_towers(x: Any, towers: int) -> Any:
    if not is_sparse(x):
        return x
    rows, *shape = dense_shape(x)  # rows of a tower, as it sees them
    return jax.ShapeDtypeStruct((towers * rows, *shape), jax.tree.leaves(x)[0].dtype)
