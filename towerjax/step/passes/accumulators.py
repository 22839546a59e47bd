"""Which rule merges a leaf that towers return: an `Accumulator` for each type.

A rule is four functions of one loop. It merges the values of a tower's micro-batches,
and then those of all towers::

    total = rule.start(values[0])
    for i, value in enumerate(values):  # one for each micro-batch
        total, stored[i] = rule.add(total, value)
    of_tower = rule.finish(total, stored)
    of_all_towers = rule.merge(of_tower, axes)

The loop is a ``scan``. A tower without micro-batches has one value, which goes straight
to ``merge``. The comment on each rule below says what the loop becomes.
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
from towerjax.step.state.nonfinite import NamedPart, StepPart
from towerjax.towers.outputs import OF_TOWERS, PerTowerValue, check_rows
from towerjax.towers.variables import TowerLocal
from towerjax.types import PerTower, PyTree, Reduction, Rows, Sum
from towerjax.types.refusals import shown
from towerjax.types.trees import key_name, map_parts, name_by_key, parts_of, put_parts


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulator:
    """Four functions that merge one leaf over micro-batches, and then over towers."""

    # ``start(value)`` makes the total before the first micro-batch. ``value`` is the
    # leaf of the first micro-batch, or only its shapes.
    start: Callable[[PyTree], PyTree]
    # ``add(total, value)`` returns the new total, and the part of ``value`` that is
    # stored for ``finish``.
    add: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    # ``finish(total, stored)`` makes the tower's value from the last total and from all
    # that ``add`` has stored, ``[n, ...]`` for ``n`` micro-batches.
    finish: Callable[[PyTree, PyTree], PyTree]
    # ``merge(values, axes)`` merges over towers. ``values`` are those of a device's
    # ``k`` towers, ``[k, ...]``; for an added leaf they are the sum of these.
    merge: Callable[[PyTree, TowerAxes], PyTree]


def _joined(
    join: Callable[[PyTree], PyTree], merge: Callable[[PyTree, TowerAxes], PyTree]
) -> Accumulator:
    """Store the value of each micro-batch, and join all of them at the end."""

    def start(value: PyTree) -> None:
        return None

    def add(total: None, value: PyTree) -> tuple[None, PyTree]:
        return None, value

    def finish(total: None, values: PyTree) -> PyTree:
        return join(values)

    return Accumulator(start, add, finish, merge)


def _added() -> Accumulator:
    """Add the values of micro-batches.

    Its ``merge`` adds nothing: the sums over towers are taken for all leaves together,
    in few all-reduces.
    """

    def start(value: PyTree) -> PyTree:
        return jax.tree.map(jnp.zeros_like, value)

    def add(total: PyTree, value: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, value), None

    def merge(total: PyTree, axes: TowerAxes) -> PyTree:
        return total

    return Accumulator(start, add, _total, merge)


def _carried() -> Accumulator:
    """Hand the value of each micro-batch to the next one.

    The tower's value is that of the last micro-batch.
    """

    def start(value: PyTree) -> PyTree:
        return value

    def add(total: PyTree, value: PyTree) -> tuple[PyTree, None]:
        return value, None

    return Accumulator(start, add, _total, _stay_per_tower)


def _total(total: PyTree, nothing: None) -> PyTree:
    """Take the last total as the tower's value; no value was stored."""
    return total


def _of_all(
    join: Callable[[PyTree], PyTree], values: PyTree, axes: TowerAxes
) -> PyTree:
    """Gather the values of all towers, and join them by ``join``."""
    return join(all_gather_rows(values, axes))


def _merge_states(values: PyTree, axes: TowerAxes) -> PyTree:
    return _of_all(merge_stacked, values, axes)


def _merge_table_rows(values: PyTree, axes: TowerAxes) -> PyTree:
    return _of_all(_add_table_rows, values, axes)


def _stay_per_tower(values: PyTree, axes: TowerAxes) -> PerTowerValue:
    """Mark values that are not merged over towers, so that they stay per tower."""
    return PerTowerValue(values)


def _rows_of_batch(values: PyTree, axes: TowerAxes) -> PerTowerValue:
    """Join the rows of a device's towers, in the order of the batch."""
    return PerTowerValue(concat_rows(values))


def _last(values: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[-1], values)


def _first(values: PyTree, axes: TowerAxes) -> PyTree:
    return jax.tree.map(lambda x: x[0], values)


def _add_table_rows(rows: IndexedRows) -> IndexedRows:
    """Join rows of a table to one ``IndexedRows``; rows with one index add up."""
    return one_of(Reduction.SUM, rows)


def _refuse_several(value: PyTree) -> PyTree:
    raise ValueError(
        "A tower of several micro-batches returned tj.PerTower of an array, but each"
        " micro-batch has its own. Say how they are merged, as in"
        " tj.PerTower(tj.Sum(x)), or return tj.Sum, tj.Weighted, tj.Rows or a"
        " metric state of your own."
    )


# Sums and means: total = 0; total += value; of_tower = total. The sums over towers are
# taken for all leaves together, before ``merge``, which changes nothing.
ADDED = _added()
# Metrics, in the same way. They may be NaN: no guard checks them.
SHOWN = _added()
# Metric states that cannot be added: of_tower merges all stored values, and
# of_all_towers merges those of all towers.
MERGED = _joined(merge_stacked, _merge_states)
# Rows of tables: of_tower joins the stored rows, and of_all_towers those of all towers.
# Rows with one index add up.
JOINED = _joined(_add_table_rows, _merge_table_rows)
# Bare arrays, which are proved to be the same in all micro-batches and on all towers:
# of_tower = values[-1], and of_all_towers is that of the device's first tower.
SAME = _joined(_last, _first)
# `Rows`: of_tower is the stored rows, joined. The device's towers are joined, too, and
# the result stays per tower.
ROWS = _joined(concat_rows, _rows_of_batch)
# Tower-local variables: total = the variable; total = value; of_tower = total. The
# next micro-batch reads the total, and the result stays per tower.
CARRIED = _carried()
# Bare arrays in a `PerTower`: the value of the one micro-batch, which stays per tower.
# ``start`` refuses several micro-batches.
PER_TOWER = dataclasses.replace(_joined(_last, _stay_per_tower), start=_refuse_several)

_ADDITIVE = ADDED, SHOWN
# Sums and states in a `PerTower`: merged over micro-batches, and not over towers.
_KEPT = {
    x: dataclasses.replace(x, merge=_stay_per_tower) for x in (ADDED, MERGED, JOINED)
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Returned:
    """A leaf that a tower returned, with the rule by which it is merged."""

    value: PyTree
    rule: Accumulator = dataclasses.field(metadata={"static": True})


def is_typed(x: Any) -> bool:
    """Return whether the leaf's type says how it is merged."""
    return isinstance(x, OF_TOWERS) or is_rows(x) or is_metric(x)


def as_returned(x: Any, *, is_shown: bool = False) -> PyTree:
    """Wrap a checked leaf in `Returned`, with the accumulator for its type.

    A leaf that holds several values, such as a loss with its weight, becomes a tree of
    `Returned`. ``is_shown`` marks a metric, which no guard checks.
    """
    if isinstance(x, PerTower):

        def kept(part: Returned) -> Returned:
            return Returned(part.value, _KEPT.get(part.rule, PER_TOWER))

        returned = jax.tree.map(as_returned, x.values, is_leaf=is_typed)
        return PerTower(map_parts(Returned, kept, returned))
    if is_rows(x):
        return Returned(x, JOINED)
    if isinstance(x, Rows | TowerLocal) or not is_metric(x):
        accumulator = ROWS if isinstance(x, Rows) else SAME
        return Returned(x, CARRIED if isinstance(x, TowerLocal) else accumulator)
    if not is_additive(x):
        return Returned(x, MERGED)
    accumulator = SHOWN if is_shown else ADDED
    if not parts_of(IndexedRows, x):
        return Returned(x, accumulator)

    def as_part(part: Any) -> Returned:
        return Returned(part, JOINED if is_rows(part) else accumulator)

    return jax.tree.map(as_part, x, is_leaf=lambda x: is_rows(x) or is_shard(x))


def take_sums(tree: PyTree) -> tuple[tuple[list[Any], ...], PyTree]:
    """Split a tree of `Returned` into the sums to add over towers, and the rest.

    Returns ``((guarded, others), rest)``. The guard against values that are not finite
    checks the ``guarded`` sums, not the ``others``. In ``rest`` each sum is replaced by
    None.
    """
    parts = parts_of(Returned, tree)
    sums = tuple(
        [x.value for x in parts if x.rule is accumulator] for accumulator in _ADDITIVE
    )
    rest = [Returned(None, x.rule) if x.rule in _ADDITIVE else x for x in parts]
    return sums, put_parts(Returned, tree, rest)


def put_sums(tree: PyTree, sums: Sequence[Sequence[Any]]) -> PyTree:
    """Put sums back in the tree that `take_sums` took them out of.

    ``sums`` may also be the merged values of these sums.
    """
    left = {
        accumulator: iter(values)
        for accumulator, values in zip(_ADDITIVE, sums, strict=True)
    }

    def put(x: Returned) -> Returned:
        return Returned(next(left[x.rule]), x.rule) if x.rule in left else x

    return map_parts(Returned, put, tree)


def as_one_tree(treedef: Any, leaves: Sequence[Any]) -> PyTree:
    """Join a tower's flat ``(sums, (rest, ids))`` to one tree of `Returned`.

    The ids of rows that the tower looked up are left out.
    """
    sums, (rest, _) = jax.tree.unflatten(treedef, leaves)
    return put_sums(rest, sums)


def values_of(tree: PyTree) -> PyTree:
    """Replace each `Returned` in a tree by its plain value."""
    return map_parts(Returned, lambda x: x.value, tree)


METRICS = ("metrics", "eval_metrics")
"""The keys of those results of towers that no guard looks at."""

_GRADIENT: tuple[StepPart, str] = ("gradient", "params")
_BY_KEY: dict[str, tuple[StepPart, str]] = {
    "loss": ("loss", "loss"),
    "grads": _GRADIENT,
    "minimized": ("loss", "loss"),
}
_BY_KEY |= {name: ("metric", name) for name in METRICS}
_ORDER = ("loss", "gradient", "metric", "value")


def split_returned(out: PyTree, rows: int, merged: PyTree = ()) -> PyTree:
    """Check a tower's result, and wrap each of its leaves in `Returned`.

    ``merged`` is the result of the pass before. If the tower returns a leaf of
    ``merged`` again, that leaf is known to be replicated, in whatever container it is
    returned.
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
    """Raise unless a tower returns its local variables with their names and types.

    The next micro-batch gets these variables in the order of the returned tree. A
    single variable may have any name.
    """
    returned = [
        (path, x)
        for path, x in _leaves_of_kind(Returned, tree)
        if not isinstance(x, Returned) or x.rule is CARRIED
    ]
    variables = _leaves_of_kind(TowerLocal, local)
    new_names = [tuple(map(key_name, path)) for path, _ in returned]
    old_names = [tuple(map(key_name, path)) for path, _ in variables]
    new_types = _types_of([x for _, x in returned])
    old_types = _types_of([x for _, x in variables])
    if not new_names:
        return
    # Towers may return the variables deeper in a tree than they got them, such as under
    # "local". So only the ends of the names are compared.
    pairs = zip(new_names, old_names, strict=False)
    ends = [new[-len(old) :] for new, old in pairs]
    has_other_names = len(old_names) > 1 and ends != old_names
    if new_types != old_types or has_other_names:
        new = ", ".join("/".join(name) for name in new_names)
        old = ", ".join("/".join(name) for name in old_names)
        raise ValueError(
            f"A tower of several micro-batches returned the variables {new}, of"
            f" {new_types}, but the next micro-batch needs {old}, of {old_types}."
            " Return all variables of state.local, with their new values, under these"
            " names."
        )


def _leaves_of_kind(kind: Any, tree: PyTree) -> list[tuple[tuple[Any, ...], Any]]:
    """List ``(path, value)`` pairs; a value of type ``kind`` counts as one leaf."""

    def is_kind(x: Any) -> bool:
        return isinstance(x, kind)

    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_kind)


def _types_of(values: list[Any]) -> list[str]:
    """Write the dtype and shape of each array in ``values`` as text."""
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(values)]


def parts_of_tower(tree: PyTree) -> list[NamedPart]:
    """Name a tower's sums, and label each loss, gradient, metric or value.

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


def arrays_of_tower(tree: PyTree) -> list[NamedPart]:
    """List all arrays that a tower returned, in tree order, each with its part."""
    named = []
    for path, x in jax.tree_util.tree_leaves_with_path(values_of(tree)):
        keys = [key_name(key) for key in path] or ["result"]
        part, root = _BY_KEY.get(keys[0], ("value", keys[0]))
        is_held = part == "gradient" and len(keys) > 2 and keys[1] in ("value", "sum")
        rest = keys[2:] if is_held else keys[1:]
        named.append((part, "/".join([root, *rest]), x))
    return named


def states_of(per_tower: PerTower) -> PyTree:
    """Take a `PerTower` apart, with None for each bare array in it."""
    return jax.tree.map(
        lambda x: x if is_metric(x) else None, per_tower.values, is_leaf=is_typed
    )


def _to_array(name: str, x: Any) -> jax.Array:
    if isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
        return jnp.asarray(x)
    raise ValueError(
        f"{name} is {shown(x)}. A tower may return arrays,"
        " tj.Weighted and other metric states, tj.Sum, tj.Rows, tj.PerTower,"
        " tj.TowerLocal and tj.sparse.IndexedRows."
    )


def _check_leaf(name: str, x: Any, rows: int) -> Any:
    """Check a leaf such as `Rows`, `Sum` or a metric state.

    Its rows must be ``rows``. A metric's dtypes are widened, because micro-batches and
    towers are added up.
    """
    if isinstance(x, Rows):
        return Rows(check_rows(x.value, rows, name=name))
    if is_metric(x):
        return check_metric(name, x)
    # Sums and metric states in a PerTower are merged over micro-batches, but not over
    # towers.
    return jax.tree.map(
        lambda v: jnp.asarray(v) if not is_typed(v) else _check_leaf(name, v, rows),
        x,
        is_leaf=lambda v: v is not x and is_typed(v),
    )
