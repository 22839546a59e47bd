"""Split what a tower returns by the types of its leaves, and put it together again."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from towerjax.collectives.sparse_rows import IndexedRows, is_rows
from towerjax.data.placer import PlacedBatch
from towerjax.metrics.state import check_metric, is_additive, is_metric
from towerjax.metrics.weighted import Weighted
from towerjax.proof import tags
from towerjax.step.faults import NamedPart
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """Stands in a tree, without leaves, for a typed leaf that was taken out."""

    # "added", summed; "shown", summed, but not guarded; "folded", merged pair by pair;
    # "joined", rows of a table; or "own", each tower's.
    kind: str


def is_typed(x: Any) -> bool:
    """Whether the leaf's type says how it is merged."""
    typed = Rows | PerTower | TowerLocal
    return isinstance(x, typed) or is_rows(x) or is_metric(x)


def split(
    out: PyTree, rows: int, merged: PyTree = ()
) -> tuple[PyTree, dict[str, list[Any]]]:
    """What a tower returned, as a tree with holes and the leaves in them, by kind.

    Leaves of ``merged`` that a tower returns again stay in the tree: they are mirrored.
    """
    before = filter(is_typed, jax.tree.leaves(merged, is_leaf=is_typed))
    before = {id(v) for v in jax.tree.leaves(list(before))}
    kinds = ("added", "shown", "folded", "joined", "own")
    pools: dict[str, list[Any]] = {kind: [] for kind in kinds}

    def put_aside(rows: IndexedRows) -> Hole:
        pools["joined"].append(rows)
        return Hole("joined")

    def one(path: tuple[Any, ...], x: Any) -> Any:
        name = name_by_key(path)
        if not is_typed(x):
            return _to_array(name, x)
        if before.issuperset(map(id, jax.tree.leaves(x))):  # in whatever container
            return x
        x = _check_leaf(name, x, rows)
        if isinstance(x, Sum):
            what = f"{tags.COUNTS_EACH_TOWER}{name}, a tj.Sum"
            x = jax.tree.map(functools.partial(checkpoint_name, name=what), x)
        kind = "joined" if is_rows(x) else "own"
        if is_metric(x):
            kind = "folded"
            if is_additive(x):
                is_shown = bool(path) and key_name(path[0]) in METRICS
                kind = "shown" if is_shown else "added"
                x = map_parts(IndexedRows, put_aside, x)
        pools[kind].append(x)
        return Hole(kind)

    tree = jax.tree_util.tree_map_with_path(one, out, is_leaf=is_typed)
    return tree, pools


def fill_holes(tree: PyTree, **pools: list[Any]) -> PyTree:
    """The inverse of `split`, for the holes of the kinds that ``pools`` has."""
    return _filled(tree, {kind: iter(pool) for kind, pool in pools.items()})


# A function that held itself would keep the arrays of a call until a collection.
def _filled(tree: PyTree, left: dict[str, Iterator[Any]]) -> PyTree:
    def one(x: Any) -> Any:
        if not isinstance(x, Hole) or x.kind not in left:
            return x
        x = next(left[x.kind])
        if is_metric(x) and "joined" in left:  # a gradient may be of rows of tables
            return map_parts(Hole, lambda hole: _filled(hole, left), x)
        return x

    return jax.tree.map(one, tree, is_leaf=is_hole)


def trees_of(results: Sequence[Any]) -> list[PyTree]:
    """What each pass has merged, of the results of passes, in the towers' trees."""
    return [fill_holes(x.merged, own=x.own) for x in results]


def refuse_mixed_up(tree: PyTree, pools: dict[str, list[Any]], local: PyTree) -> None:
    """Raise unless tower-local variables come back by their names, of their types.

    The next micro-batch gets them in the order of the tree. A single variable may have
    any name.
    """

    def variables(pairs: Any) -> tuple[list[tuple[str, ...]], list[str]]:
        own = [(path, x) for path, x in pairs if isinstance(x, TowerLocal)]
        values = jax.tree.leaves([x for _, x in own])
        types = [f"{x.dtype}{list(x.shape)}" for x in values]
        return [tuple(map(key_name, path)) for path, _ in own], types

    came, new = variables(zip(_paths_of(tree, "own"), pools["own"], strict=True))
    held, old = variables(jax.tree_util.tree_leaves_with_path(local, is_leaf=is_typed))
    ends = [name[-len(end) :] for name, end in zip(came, held, strict=False)]
    if came and (new != old or (len(held) > 1 and ends != held)):
        names = [", ".join(map("/".join, part)) for part in (came, held)]
        raise ValueError(
            f"A tower of several micro-batches returned the variables {names[0]}, of"
            f" {new}, but the next micro-batch needs {names[1]}, of {old}. Return all"
            " of state.local, changed, by these names."
        )


def _paths_of(tree: PyTree, kind: str) -> list[tuple[Any, ...]]:
    """The paths of the holes of a kind."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_hole)
    return [path for path, x in leaves if is_hole(x) and x.kind == kind]


def parts_of_tower(tree: PyTree, pools: dict[str, list[Any]]) -> list[NamedPart]:
    """A tower's sums by what they are: loss first, then gradients, then metrics."""
    own = [states_of(x) if isinstance(x, PerTower) else None for x in pools["own"]]
    tree = fill_holes(tree, added=pools["added"], shown=pools["shown"], own=own)
    parts = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_typed):
        if not is_typed(x):
            continue
        first = key_name(path[0]) if path else "result"
        part, root = _BY_KEY.get(first, ("value", first))
        is_one = part != "gradient" and jax.tree_util.all_leaves([getattr(x, "sum", x)])
        of_tree = isinstance(x, Weighted) and not is_one
        x = x.value if isinstance(x, Sum) else x.sum if of_tree else x
        rest = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        parts.append((part, "/".join(filter(None, [root, rest])), x))
    return sorted(parts, key=lambda found: _ORDER.index(found[0]))


def states_of(own: PerTower) -> PyTree:
    """A tower's own sums and metric states, None for bare values."""
    return jax.tree.map(
        lambda x: x if is_metric(x) else None, own.values, is_leaf=is_typed
    )


def is_hole(x: Any) -> bool:
    """Whether ``x`` stands for a typed leaf."""
    return isinstance(x, Hole)


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
        x = check_metric(name, x)
        if isinstance(x, Weighted):
            weight = checkpoint_name(x.weight, tags.WEIGHT_OF + name)
            x = dataclasses.replace(x, weight=weight)
        return x
    # A PerTower of sums or states is merged over micro-batches, and not over towers.
    return jax.tree.map(
        lambda v: jnp.asarray(v) if not is_typed(v) else _check_leaf(name, v, rows),
        x,
        is_leaf=lambda v: v is not x and is_typed(v),
    )
