"""How what towers return becomes one value: decided once, from a leaf's type.

The same four functions are used over a tower's micro-batches and over all towers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.collectives.reduce import all_gather_rows, one_of
from towerjax.collectives.sparse_rows import IndexedRows, is_rows
from towerjax.data.shard import concat_rows
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.state import is_additive, is_metric, merge_stacked
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PerTower, PyTree, Reduction, Rows
from towerjax.types.leaves import map_parts, parts_of, put_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowersOwn:
    """A value of which each tower has its own, ``[T, ...]``; what else is MIRRORED."""

    value: PyTree


_OF_TOWERS = Rows, PerTower, TowerLocal  # of which each tower has its own once merged


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulator:
    """How several values become one: of micro-batches in turn, then of towers."""

    # The value, or its shapes, of a micro-batch -> what the first one adds to.
    start: Callable[[PyTree], PyTree]
    # (so far, value) -> (so far, what is kept of each micro-batch)
    add: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    # (so far, what was kept, ``[n, ...]``) -> the tower's value
    finish: Callable[[PyTree, PyTree], PyTree]
    # (values of a device's towers, ``[k, ...]``, or their sum; axes) -> that of all
    merge: Callable[[PyTree, TowerAxes], PyTree]


def _stacked(
    join: Callable[[PyTree], PyTree], merge: Callable[[PyTree, TowerAxes], PyTree]
) -> Accumulator:
    """The values of micro-batches are kept, and joined when all have run."""
    keep = lambda _, x: (None, x)  # noqa: E731
    return Accumulator(lambda _: None, keep, lambda _, xs: join(xs), merge)


def _summed(merge: Callable[[PyTree, TowerAxes], PyTree]) -> Accumulator:
    zeros = lambda x: jax.tree.map(jnp.zeros_like, x)  # noqa: E731
    add = lambda so_far, x: (jax.tree.map(jnp.add, so_far, x), None)  # noqa: E731
    return Accumulator(zeros, add, _so_far, merge)


def _so_far(so_far: PyTree, _: PyTree) -> PyTree:
    return so_far


def _of_all(join: Callable[[PyTree], PyTree], x: PyTree, axes: TowerAxes) -> PyTree:
    """All towers' values are gathered, and joined as those of micro-batches are."""
    return join(all_gather_rows(x, axes))


def _own(x: PyTree, _: TowerAxes) -> TowersOwn:
    return TowersOwn(x)


def _row(index: int) -> Callable[..., PyTree]:
    return lambda x, *_: jax.tree.map(lambda x: x[index], x)


def _add_table_rows(rows: IndexedRows) -> IndexedRows:
    """All rows of a table, end to end; those of one index are meant to be added."""
    return one_of(Reduction.SUM, rows)


def _refuse_several(_: PyTree) -> PyTree:
    raise ValueError(
        "A tower of several micro-batches returned tj.PerTower of an array: each"
        " micro-batch has one. Say how they become one, such as"
        " tj.PerTower(tj.Sum(x)), or return tj.Sum, tj.Weighted, tj.Rows or a"
        " metric state of your own."
    )


# Sums are added over a device's towers, and in few all-reduces over devices, elsewhere.
ADDED = _summed(lambda x, _: x)
SHOWN = _summed(lambda x, _: x)  # the same, of metrics, which no guard looks at
MERGED = _stacked(merge_stacked, lambda *x: _of_all(merge_stacked, *x))
JOINED = _stacked(_add_table_rows, lambda *x: _of_all(_add_table_rows, *x))
SAME = _stacked(_row(-1), _row(0))  # bare values, proved to be the same in each
ROWS = _stacked(concat_rows, lambda x, _: TowersOwn(concat_rows(x)))
CARRIED = Accumulator(lambda x: x, lambda _, x: (x, None), _so_far, _own)
OWN_ADDED = _summed(_own)
OWN_MERGED = _stacked(merge_stacked, _own)
OWN_JOINED = _stacked(_add_table_rows, _own)
OWN = dataclasses.replace(_stacked(_row(-1), _own), start=_refuse_several)

_ADDITIVE = ADDED, SHOWN
_KEPT = {ADDED: OWN_ADDED, MERGED: OWN_MERGED, JOINED: OWN_JOINED, SAME: OWN}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Returned:
    """A leaf that a tower returned, and how several of it become one."""

    value: PyTree
    how: Accumulator = dataclasses.field(metadata={"static": True})


def is_typed(x: Any) -> bool:
    """Whether the leaf's type says how it is merged."""
    return isinstance(x, _OF_TOWERS) or is_rows(x) or is_metric(x)


def as_returned(x: Any, *, is_shown: bool = False) -> PyTree:
    """A checked leaf as `Returned`; or as a tree of these, where it has several."""
    if isinstance(x, PerTower):

        def kept(part: Returned) -> Returned:
            return Returned(part.value, _KEPT.get(part.how, OWN))

        each = jax.tree.map(as_returned, x.values, is_leaf=is_typed)
        return PerTower(map_parts(Returned, kept, each))
    if is_rows(x):
        return Returned(x, JOINED)
    if isinstance(x, Rows | TowerLocal) or not is_metric(x):
        how = ROWS if isinstance(x, Rows) else SAME
        return Returned(x, CARRIED if isinstance(x, TowerLocal) else how)
    if not is_additive(x):
        return Returned(x, MERGED)
    how = SHOWN if is_shown else ADDED
    if not parts_of(IndexedRows, x):
        return Returned(x, how)
    each = lambda part: Returned(part, JOINED if is_rows(part) else how)  # noqa: E731
    return jax.tree.map(each, x, is_leaf=is_rows)


def take_sums(tree: PyTree) -> tuple[tuple[list[Any], ...], PyTree]:
    """The sums over towers, guarded and not, and the tree without them."""
    parts = parts_of(Returned, tree)
    sums = tuple([x.value for x in parts if x.how is how] for how in _ADDITIVE)
    rest = [Returned(None, x.how) if x.how in _ADDITIVE else x for x in parts]
    return sums, put_parts(Returned, tree, rest)


def put_sums(tree: PyTree, sums: Sequence[Sequence[Any]]) -> PyTree:
    """The inverse of `take_sums`."""
    left = {how: iter(values) for how, values in zip(_ADDITIVE, sums, strict=True)}

    def put(x: Returned) -> Returned:
        return Returned(next(left[x.how]), x.how) if x.how in left else x

    return map_parts(Returned, put, tree)


def values_of(tree: PyTree) -> PyTree:
    """What was returned, as it was returned."""
    return map_parts(Returned, lambda x: x.value, tree)


def layouts_of(tree: PyTree) -> PyTree:
    """A prefix tree of the layouts of merged values."""
    return jax.tree.map(
        lambda x: Layout.PER_TOWER if is_own(x) else Layout.MIRRORED,
        tree,
        is_leaf=is_own,
    )


def is_own(x: Any) -> bool:
    """Whether each tower has its own."""
    return isinstance(x, TowersOwn)


def as_own(tree: PyTree) -> PyTree:
    """The tree with `TowersOwn` round what by its type is each tower's own."""
    return map_parts(_OF_TOWERS, TowersOwn, tree)


def owned(
    tree: PyTree, change: Callable[[list[PyTree]], Sequence[PyTree]] = lambda x: x
) -> PyTree:
    """The tree with the values of `TowersOwn` in their place, changed all at once."""
    values = [x.value for x in parts_of(TowersOwn, tree)]
    return put_parts(TowersOwn, tree, change(values) if values else [])
