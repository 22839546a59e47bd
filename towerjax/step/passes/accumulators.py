"""How results are merged, by the type of each leaf.

An `Accumulator` merges over a tower's micro-batches, and then over all towers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.collectives.reduce import all_gather_rows, one_of
from towerjax.collectives.sparse_rows import IndexedRows, is_rows
from towerjax.data.batch_rows import concat_rows
from towerjax.lowering.sharded_values import is_shard
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.state import check_metric, is_additive, is_metric, merge_stacked
from towerjax.metrics.weighted import Weighted
from towerjax.step.state.nonfinite import NamedPart
from towerjax.towers.outputs import OF_TOWERS, PerTowerValue, check_rows
from towerjax.towers.variables import TowerLocal
from towerjax.types import PerTower, PyTree, Reduction, Rows, Sum
from towerjax.types.refusals import shown
from towerjax.types.trees import (
    map_parts,
    name_by_key,
    parts_of,
    put_parts,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulator:
    """How values are merged: those of micro-batches in turn, then those of towers."""

    # (a micro-batch's value, or its shapes) -> the total before the first one
    start: Callable[[PyTree], PyTree]
    # (total, value) -> (new total, what is kept of this micro-batch)
    add: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    # (last total, what was kept, ``[n, ...]``) -> the tower's value
    finish: Callable[[PyTree, PyTree], PyTree]
    # (values of a device's towers, ``[k, ...]``, or their sum; axes) -> the merged one
    merge: Callable[[PyTree, TowerAxes], PyTree]


def _stacked(
    join: Callable[[PyTree], PyTree], merge: Callable[[PyTree, TowerAxes], PyTree]
) -> Accumulator:
    """An accumulator that keeps the values of micro-batches, and joins them last."""
    keep = lambda _, x: (None, x)  # noqa: E731
    return Accumulator(lambda _: None, keep, lambda _, xs: join(xs), merge)


def _summed(merge: Callable[[PyTree, TowerAxes], PyTree]) -> Accumulator:
    zeros = lambda x: jax.tree.map(jnp.zeros_like, x)  # noqa: E731
    add = lambda so_far, x: (jax.tree.map(jnp.add, so_far, x), None)  # noqa: E731
    return Accumulator(zeros, add, _so_far, merge)


def _so_far(so_far: PyTree, _: PyTree) -> PyTree:
    return so_far


def _of_all(join: Callable[[PyTree], PyTree], x: PyTree, axes: TowerAxes) -> PyTree:
    """The values of all towers, gathered and then joined by ``join``."""
    return join(all_gather_rows(x, axes))


def _own(x: PyTree, _: TowerAxes) -> PerTowerValue:
    return PerTowerValue(x)


def _row(index: int) -> Callable[..., PyTree]:
    return lambda x, *_: jax.tree.map(lambda x: x[index], x)


def _add_table_rows(rows: IndexedRows) -> IndexedRows:
    """All rows of a table, one after another; rows of one index stand for their sum."""
    return one_of(Reduction.SUM, rows)


def _refuse_several(_: PyTree) -> PyTree:
    raise ValueError(
        "A tower of several micro-batches returned tj.PerTower of an array, but each"
        " micro-batch has its own. Say how they are merged, as in"
        " tj.PerTower(tj.Sum(x)), or return tj.Sum, tj.Weighted, tj.Rows or a"
        " metric state of your own."
    )


# Their sums over towers are not taken here, but together, in few all-reduces.
ADDED = _summed(lambda x, _: x)
SHOWN = _summed(lambda x, _: x)  # the same for metrics, which no guard looks at
MERGED = _stacked(merge_stacked, lambda *x: _of_all(merge_stacked, *x))
JOINED = _stacked(_add_table_rows, lambda *x: _of_all(_add_table_rows, *x))
SAME = _stacked(_row(-1), _row(0))  # bare values, proved to be the same in each
ROWS = _stacked(concat_rows, lambda x, _: PerTowerValue(concat_rows(x)))
CARRIED = Accumulator(lambda x: x, lambda _, x: (x, None), _so_far, _own)
PER_TOWER = dataclasses.replace(_stacked(_row(-1), _own), start=_refuse_several)

_ADDITIVE = ADDED, SHOWN
_KEPT = {x: dataclasses.replace(x, merge=_own) for x in (ADDED, MERGED, JOINED)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Returned:
    """A leaf that a tower returned, and how it is merged."""

    value: PyTree
    how: Accumulator = dataclasses.field(metadata={"static": True})


def is_typed(x: Any) -> bool:
    """Whether the leaf's type says how it is merged."""
    return isinstance(x, OF_TOWERS) or is_rows(x) or is_metric(x)


def as_returned(x: Any, *, is_shown: bool = False) -> PyTree:
    """A checked leaf as `Returned`, or as a tree of these if it has several parts."""
    if isinstance(x, PerTower):

        def kept(part: Returned) -> Returned:
            return Returned(part.value, _KEPT.get(part.how, PER_TOWER))

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
    return jax.tree.map(each, x, is_leaf=lambda x: is_rows(x) or is_shard(x))


def take_sums(tree: PyTree) -> tuple[tuple[list[Any], ...], PyTree]:
    """``((guarded, others), rest)``: the values to add over towers, and all others."""
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


def as_one_tree(treedef: Any, leaves: Sequence[Any]) -> PyTree:
    """A tower's ``(sums, (rest, ids))`` as one tree of `Returned`, without ids."""
    sums, (rest, _) = jax.tree.unflatten(treedef, leaves)
    return put_sums(rest, sums)


def values_of(tree: PyTree) -> PyTree:
    """The tree as it was returned, with a value for each `Returned`."""
    return map_parts(Returned, lambda x: x.value, tree)


METRICS = ("metrics", "eval_metrics")
"""The keys of those results of towers that no guard looks at."""

_GRADIENT = ("gradient", "params")
_BY_KEY = {"loss": ("loss", "loss"), "grads": _GRADIENT, "minimized": ("loss", "loss")}
_BY_KEY |= {name: ("metric", name) for name in METRICS}
_ORDER = ("loss", "gradient", "metric", "value")


def split_returned(out: PyTree, rows: int, merged: PyTree = ()) -> PyTree:
    """The result of a tower, checked, with each leaf as `Returned`.

    A leaf of ``merged`` that the tower returns again is mirrored, in any container.
    """
    before = filter(is_typed, jax.tree.leaves(merged, is_leaf=is_typed))
    before = {id(v) for v in jax.tree.leaves(list(before))}

    def as_merged(path: tuple[Any, ...], x: Any) -> PyTree:
        name = name_by_key(path)
        if not is_typed(x):
            return as_returned(_to_array(name, x))
        if before.issuperset(map(id, jax.tree.leaves(x))):
            return jax.tree.map(as_returned, x)
        x = _check_leaf(name, x, rows)
        return as_returned(x, is_shown=bool(path) and key_name(path[0]) in METRICS)

    return jax.tree_util.tree_map_with_path(as_merged, out, is_leaf=is_typed)


def refuse_mixed_up(tree: PyTree, local: PyTree) -> None:
    """Raise unless tower-local variables are returned with their names and types.

    The next micro-batch gets them in the order of the tree. A single variable may have
    any name.
    """

    def variables(kind: Any, tree: PyTree) -> tuple[list[tuple[str, ...]], list[str]]:
        is_kind = lambda x: isinstance(x, kind)  # noqa: E731
        pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_kind)
        own = [(at, x) for at, x in pairs if getattr(x, "how", CARRIED) is CARRIED]
        values = jax.tree.leaves([x for _, x in own])
        types = [f"{x.dtype}{list(x.shape)}" for x in values]
        return [tuple(map(key_name, at)) for at, _ in own], types

    (came, new) = variables(Returned, tree)
    (held, old) = variables(TowerLocal, local)
    ends = [name[-len(end) :] for name, end in zip(came, held, strict=False)]
    if came and (new != old or (len(held) > 1 and ends != held)):
        names = [", ".join(map("/".join, part)) for part in (came, held)]
        raise ValueError(
            f"A tower of several micro-batches returned the variables {names[0]}, of"
            f" {new}, but the next micro-batch needs {names[1]}, of {old}. Return all"
            " variables of state.local, with their new values, under these names."
        )


def parts_of_tower(tree: PyTree) -> list[NamedPart]:
    """A tower's sums, each with what it is: loss, gradient, metric or other value.

    They are sorted in this order.
    """
    tree = map_parts(PerTower, states_of, tree)
    parts = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_typed):
        if not is_typed(x) or isinstance(x, Rows | TowerLocal):
            continue
        first = key_name(path[0]) if path else "result"
        part, root = _BY_KEY.get(first, ("value", first))
        is_one = part != "gradient" and jax.tree_util.all_leaves([getattr(x, "sum", x)])
        of_tree = isinstance(x, Weighted) and not is_one
        x = x.value if isinstance(x, Sum) else x.sum if of_tree else x
        rest = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        parts.append((part, "/".join(filter(None, [root, rest])), x))
    return sorted(parts, key=lambda named: _ORDER.index(named[0]))


def states_of(own: PerTower) -> PyTree:
    """A tower's own sums and metric states; None for each bare value."""
    return jax.tree.map(
        lambda x: x if is_metric(x) else None, own.values, is_leaf=is_typed
    )


def key_name(entry: Any) -> str:
    """An entry of a key path as one word."""
    return jax.tree_util.keystr((entry,), simple=True)


def _to_array(name: str, x: Any) -> jax.Array:
    if isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
        return jnp.asarray(x)
    raise ValueError(
        f"{name} is {shown(x)}. A tower may return arrays,"
        " tj.Weighted and other metric states, tj.Sum, tj.Rows, tj.PerTower,"
        " tj.TowerLocal and tj.sparse.IndexedRows."
    )


def _check_leaf(name: str, x: Any, rows: int) -> Any:
    """A typed leaf with checked row counts and dtypes wide enough to be added."""
    if isinstance(x, Rows):
        return Rows(check_rows(x.value, rows, name=name))
    if is_metric(x):
        return check_metric(name, x)
    # A PerTower of sums or states is merged over micro-batches, and not over towers.
    return jax.tree.map(
        lambda v: jnp.asarray(v) if not is_typed(v) else _check_leaf(name, v, rows),
        x,
        is_leaf=lambda v: v is not x and is_typed(v),
    )
