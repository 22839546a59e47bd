"""The rows that an audit runs: of the batch, and as later batches may have them.

All of them run in the same two programs, one of one tower and one of two.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.check.audit.run_towers import DRAWS, RowsToRun
from towerjax.collectives.sparse_rows import is_sparse
from towerjax.data import feed
from towerjax.data.batch_rows import with_replicated, without_replicated
from towerjax.types import PyTree, Whole
from towerjax.types.trees import is_key

_LATE = 1_000_003
_LARGER = 100
AFTER_A_STEP = "after a step"
"""The name of a split for which towers have the variables that a step gave them."""


class Splits:
    """The rows that an audit runs: a batch's first rows, and changed versions of them.

    Each of two towers gets ``tower_rows`` rows. The rows are on the host. If the batch
    has too few, its rows are repeated.
    """

    def __init__(self, batch: PyTree, tower_rows: int) -> None:
        self.tower_rows = tower_rows
        self._take = feed.rows_of(batch)
        self._total = len(feed.batches(batch, 1))
        self.first = self.of_rows("evenly", np.arange(2 * tower_rows))

    def of_rows(self, name: str, at: np.ndarray, **options: Any) -> RowsToRun:
        """Make a split named ``name`` of the batch's rows with the indices ``at``."""
        at = at % self._total
        return RowsToRun(name, self._take(at), order=at, **options)

    def all(self, *, pads: bool, draws: bool, drifts: bool = False) -> list[RowsToRun]:
        """List all splits, first the one with the batch's rows in order.

        Args:
          pads: Whether batches may be padded.
          draws: Whether the tower function draws random numbers.
          drifts: Whether it changes tower-local variables, which it may read.
        """
        in_order = np.arange(2 * self.tower_rows)
        splits = [self.first]
        split_of = functools.partial(self.of_rows, is_made=True)
        if draws:
            splits.append(self.of_rows("evenly", in_order, word=DRAWS[1]))
        if pads:
            uneven = in_order[: self.tower_rows + self.tower_rows // 2]
            options = {"word": DRAWS[1], "is_short": True}
            splits.append(self.of_rows("unevenly", uneven, **options))
        at_random = np.random.default_rng(0).permutation(2 * self.tower_rows)
        by_size = np.argsort(
            _sizes_of_rows(self.first, 2 * self.tower_rows), kind="stable"
        )
        splits += [self.of_rows("permuted", at) for at in (at_random, by_size)]
        if drifts:
            splits.append(split_of(AFTER_A_STEP, in_order, drifts=True))
        splits.append(split_of(f"at step {_LATE:,}", in_order, step=_LATE))
        if pads:
            splits.append(split_of("one row in all", in_order[:1], is_short=True))
        splits += _made_of(self.first, self.tower_rows)
        return [*splits, split_of("of other parameters", in_order, moves=True)]


def _sizes_of_rows(split: RowsToRun, count: int) -> np.ndarray:
    """Add up, for each row, all its numbers.

    The rows are sorted by this sum, so that one tower gets those with smaller numbers.
    """
    rows, _ = without_replicated(split.rows)
    total = np.zeros(count)
    for x in jax.tree.leaves(rows, is_leaf=is_sparse):
        if not (is_sparse(x) or is_key(x)):
            real = np.real(np.asarray(x)).reshape(count, -1)
            total += real.astype(np.float64).sum(1)
    return np.nan_to_num(total)


def _made_of(split: RowsToRun, tower_rows: int) -> list[RowsToRun]:
    """Change values of a batch, where its arrays can be changed: splits to run."""
    changes = {
        "one row on both towers": functools.partial(
            _with_a_row_twice, tower_rows=tower_rows
        ),
        f"one row times {_LARGER}": _with_a_large_row,
        "masked on the second tower": functools.partial(_masked, tower_rows=tower_rows),
    }
    changed = {
        name: _with_arrays(split.rows, change) for name, change in changes.items()
    }
    return [
        RowsToRun(name, rows, order=split.order, is_made=True)
        for name, rows in changed.items()
        if rows is not None
    ]


def _with_arrays(
    batch: PyTree, change: Callable[[np.ndarray], np.ndarray | None]
) -> PyTree | None:
    """Change the arrays of a batch; None if no array can be changed.

    ``change`` returns the changed array, or None for an array that it cannot change.
    """
    rows, held = without_replicated(batch)
    leaves, tree = jax.tree.flatten(rows, is_leaf=is_sparse)
    fixed = [is_sparse(x) or is_key(x) for x in leaves]
    changed = [
        None if is_fixed else change(np.asarray(x))
        for x, is_fixed in zip(leaves, fixed, strict=True)
    ]
    if all(x is None for x in changed):
        return None
    pairs = zip(leaves, changed, strict=True)
    rows = tree.unflatten([old if new is None else new for old, new in pairs])
    return with_replicated(rows, [Whole(x) for x in held])


def _with_a_large_row(x: np.ndarray) -> np.ndarray | None:
    """Multiply the first row of floats by a large factor; None for others.

    The result is None for a mask, too: an array of only zeros and ones.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or _is_mask(x):
        return None
    x = np.array(x)
    with np.errstate(over="ignore"):
        x[0] *= _LARGER
    return x


def _with_a_row_twice(x: np.ndarray, tower_rows: int) -> np.ndarray | None:
    """Put the first row also in the place of the second tower's first row.

    The result is None for whole numbers that are all different, which may be ids.
    """
    is_whole = jnp.issubdtype(x.dtype, jnp.integer)
    if is_whole and x.ndim == 1 and len(np.unique(x)) == len(x):
        return None
    x = np.array(x)
    x[tower_rows] = x[0]
    return x


def _masked(x: np.ndarray, tower_rows: int) -> np.ndarray | None:
    """Mask half of the ones on the first tower, and all on the second.

    The result is None for an array that is not a mask.
    """
    if not _is_mask(x):
        return None
    x = np.array(x, order="C")
    first = x[:tower_rows].reshape(-1)
    first[np.flatnonzero(first)[1::2]] = 0
    x[tower_rows:] = 0
    return x


def _is_mask(x: np.ndarray) -> bool:
    """Return whether an array has only zeros and ones, like a mask or 0-1 weights."""
    return bool(((x == 0) | (x == 1)).all() and (x == 1).any())
