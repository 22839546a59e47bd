"""What may a tower return? Leaves whose types say what becomes of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.collectives.sparse_rows import is_rows
from towerjax.data.placer import PlacedBatch
from towerjax.metrics.state import check, is_additive, is_metric
from towerjax.metrics.weighted import Weighted
from towerjax.step.amiss import Part
from towerjax.towers.outputs import check_rows
from towerjax.towers.variables import TowerLocal
from towerjax.types import PerTower, PyTree, Rows, Sum, name_by_key
from towerjax.types.leaves import key_data, like_key, map_parts, shown

METRICS = ("metrics", "eval_metrics")
"""Of what towers return, the parts that no guard looks at."""

_GRADIENT = ("gradient", "params")
_PARTS = {"loss": ("loss", "loss"), "grads": _GRADIENT, "minimized": ("loss", "loss")}
_PARTS |= {name: ("metric", name) for name in METRICS}
_ORDER = ("loss", "gradient", "metric", "value")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """Where a typed leaf was taken out of a tree: a node without leaves."""

    # "added"; "shown", which is added too, but no guard looks at it; "folded", merged
    # one after another; "joined", rows of a table; or "own", each tower's.
    kind: str


def is_typed(x: Any) -> bool:
    """Does its type say what becomes of it, when a tower returns it?"""
    typed = Rows | PerTower | TowerLocal
    return isinstance(x, typed) or is_rows(x) or is_metric(x)


def split(
    out: PyTree, rows: int, merged: PyTree = ()
) -> tuple[PyTree, dict[str, list[Any]]]:
    """What a tower returned, as a tree with holes and what was in them, by kind.

    What it hands on of the leaves of ``merged`` has been merged: it stays, mirrored.
    """
    before = filter(is_typed, jax.tree.leaves(merged, is_leaf=is_typed))
    before = {id(v) for v in jax.tree.leaves(list(before))}
    kinds = ("added", "shown", "folded", "joined", "own")
    pools: dict[str, list[Any]] = {kind: [] for kind in kinds}

    def one(path: tuple[Any, ...], x: Any) -> Any:
        name = name_by_key(path)
        if not is_typed(x):
            return _array(name, x)
        if before.issuperset(map(id, jax.tree.leaves(x))):  # of other containers too
            return x
        x = _checked(name, x, rows)
        kind = "joined" if is_rows(x) else "own"
        if is_metric(x):
            kind = "folded"
            if is_additive(x):
                is_shown = bool(path) and key_of(path[0]) in METRICS
                kind = "shown" if is_shown else "added"
        pools[kind].append(x)
        return Hole(kind)

    tree = jax.tree_util.tree_map_with_path(one, out, is_leaf=is_typed)
    return tree, pools


def filled(tree: PyTree, pools: dict[str, list[Any]]) -> PyTree:
    """The inverse of `split`, as far as the pools go."""
    left = {kind: iter(pool) for kind, pool in pools.items()}

    def one(x: Any) -> Any:
        return next(left[x.kind]) if isinstance(x, Hole) and x.kind in left else x

    return jax.tree.map(one, tree, is_leaf=is_hole)


def refuse_mixed_up(returned: PyTree, local: PyTree) -> None:
    """Raise unless tower-local variables come back by the names that they have.

    The next micro-batch goes on from them, in the order of the tree. Of one alone the
    name does not matter.
    """

    def names(tree: PyTree) -> list[list[str]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_typed)
        own = [path for path, x in leaves if isinstance(x, TowerLocal)]
        return [[key_of(entry) for entry in path] for path in own]

    came, held = names(returned), names(local)
    if len(held) < 2 or not came:
        return
    ends = [name[-len(end) :] for name, end in zip(came, held, strict=False)]
    if len(came) != len(held) or ends != held:
        shown = [", ".join(map("/".join, x)) for x in (came, held)]
        raise ValueError(
            "A tower of several micro-batches returned the tower-local variables"
            f" {shown[0]}, but the next part goes on from those of state.local,"
            f" {shown[1]}. Return them by these names, such as {{'local': {{...}}}}."
        )


def parts_of_tower(tree: PyTree, pools: dict[str, list[Any]]) -> list[Part]:
    """What one tower adds up, by what it is: loss first, then gradients, metrics."""
    tree = filled(tree, {"added": pools["added"], "shown": pools["shown"]})
    parts = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_typed):
        if not is_typed(x):
            continue
        first = key_of(path[0]) if path else "result"
        part, root = _PARTS.get(first, ("value", first))
        is_one = part != "gradient" and jax.tree_util.all_leaves([getattr(x, "sum", x)])
        of_tree = isinstance(x, Weighted) and not is_one
        x = x.value if isinstance(x, Sum) else x.sum if of_tree else x
        rest = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        parts.append((part, "/".join(filter(None, [root, rest])), x))
    return sorted(parts, key=lambda found: _ORDER.index(found[0]))


def are_gradients(tree: PyTree, added: list[Any]) -> list[PyTree]:
    """Of each leaf that is added: is it of what a tower returned as ``"grads"``?"""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_hole)
    paths = [path for path, x in leaves if is_hole(x) and x.kind == "added"]

    def flags(path: tuple[Any, ...], x: Any) -> PyTree:
        is_gradient = bool(path) and _PARTS.get(key_of(path[0])) == _GRADIENT
        out = jax.tree.map(lambda _: is_gradient, x)
        # A denominator is exact.
        return Weighted(out.sum, False) if isinstance(x, Weighted) else out

    return [flags(path, x) for path, x in zip(paths, added, strict=True)]


def is_hole(x: Any) -> bool:
    """Was a typed leaf taken out here?"""
    return isinstance(x, Hole)


def without_padding(tree: PyTree, batch: PlacedBatch) -> PyTree:
    """The tree with bare rows in place of `Rows`, those of examples alone."""
    kept = (np.arange(batch.rows) < batch.counts[:, None]).reshape(-1)

    def cut(x: Any) -> Any:
        if not batch.padded:
            return x
        if isinstance(x, Tracer):
            return x[np.flatnonzero(kept)]
        # By way of the host: a slice on the devices compiles for every new size.
        return like_key(jax.device_put(jax.device_get(key_data(x))[kept]), x)

    return map_parts(Rows, lambda x: jax.tree.map(cut, x.value), tree)


def key_of(entry: Any) -> str:
    """An entry of a key path as one word."""
    return jax.tree_util.keystr((entry,), simple=True)


def _array(name: str, x: Any) -> jax.Array:
    if isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
        return jnp.asarray(x)
    raise ValueError(
        f"{name} is {shown(x)}. A tower returns arrays,"
        " tj.Weighted and other metric states, tj.Sum, tj.Rows, tj.PerTower,"
        " tj.TowerLocal and tj.sparse.IndexedRows."
    )


def _checked(name: str, x: Any, rows: int) -> Any:
    """A typed leaf whose arrays are wide enough to be added, and of the right rows."""
    if isinstance(x, Rows):
        return Rows(check_rows(x.value, rows, name=name))
    if is_metric(x):
        return check(name, x)
    # Of a PerTower of sums or states, micro-batches are merged, and towers are not.
    return jax.tree.map(
        lambda v: jnp.asarray(v) if not is_typed(v) else _checked(name, v, rows),
        x,
        is_leaf=lambda v: v is not x and is_typed(v),
    )
