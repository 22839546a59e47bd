"""Check what a tower returns, name its parts, and cut padding off what is merged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.data.placer import PlacedBatch
from towerjax.metrics.state import check_metric, is_metric
from towerjax.metrics.weighted import Weighted
from towerjax.step.state.accumulators import CARRIED, Returned, as_returned, is_typed
from towerjax.step.state.faults import NamedPart
from towerjax.towers.outputs import check_rows
from towerjax.towers.variables import TowerLocal
from towerjax.types import PerTower, PyTree, Rows, Sum, name_by_key
from towerjax.types.leaves import key_data, like_key, map_parts, shown

METRICS = ("metrics", "eval_metrics")
"""Keys of what towers return that no guard looks at."""

_GRADIENT = ("gradient", "params")
_BY_KEY = {"loss": ("loss", "loss"), "grads": _GRADIENT, "minimized": ("loss", "loss")}
_BY_KEY |= {name: ("metric", name) for name in METRICS}
_ORDER = ("loss", "gradient", "metric", "value")


def split(out: PyTree, rows: int, merged: PyTree = ()) -> PyTree:
    """What a tower returned, checked, each leaf as `Returned`.

    Leaves of ``merged`` that a tower returns again are mirrored, in whatever container.
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
    """Raise unless tower-local variables come back by their names, of their types.

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

    (came, new), (held, old) = variables(Returned, tree), variables(TowerLocal, local)
    ends = [name[-len(end) :] for name, end in zip(came, held, strict=False)]
    if came and (new != old or (len(held) > 1 and ends != held)):
        names = [", ".join(map("/".join, part)) for part in (came, held)]
        raise ValueError(
            f"A tower of several micro-batches returned the variables {names[0]}, of"
            f" {new}, but the next micro-batch needs {names[1]}, of {old}. Return all"
            " of state.local, changed, by these names."
        )


def parts_of_tower(tree: PyTree) -> list[NamedPart]:
    """A tower's sums by what they are: loss first, then gradients, then metrics."""
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
    """A tower's own sums and metric states, None for bare values."""
    return jax.tree.map(
        lambda x: x if is_metric(x) else None, own.values, is_leaf=is_typed
    )


def without_padding(tree: PyTree, batch: PlacedBatch) -> PyTree:
    """The tree with `Rows` as bare arrays, without the padded rows."""
    kept = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)

    def cut(x: Any) -> Any:
        if not batch.padded:
            return x
        if isinstance(x, Tracer):
            return x[np.flatnonzero(kept)]
        # By way of the host: a slice on the devices compiles for every new size.
        return like_key(jax.device_put(jax.device_get(key_data(x))[kept]), x)

    return map_parts(Rows, lambda x: jax.tree.map(cut, x.value), tree)


def key_name(entry: Any) -> str:
    """An entry of a key path as one word."""
    return jax.tree_util.keystr((entry,), simple=True)


def _to_array(name: str, x: Any) -> jax.Array:
    if isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
        return jnp.asarray(x)
    raise ValueError(
        f"{name} is {shown(x)}. A tower returns arrays,"
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
