"""Sums of a device's towers, and their sums over all towers."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from towerjax.collectives.ops import CrossTowerOps, sends_alone, sum_over_towers
from towerjax.collectives.packing import Sums, all_finite
from towerjax.collectives.sparse_rows import IndexedRows
from towerjax.lowering.sharded_values import Targets, is_shard, scatter_shard
from towerjax.lowering.shards import on_shards
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree


def dim_of_shards(
    ops: CrossTowerOps, params: PyTree, axes: TowerAxes
) -> Callable[[Any], int | None]:
    """A function of a sum's shape: the dim along which it is scattered, or None.

    What has the shape of parameters that devices hold in shards is scattered as they
    are.
    """
    held = [x for x in jax.tree.leaves(params, is_leaf=is_shard) if is_shard(x)]
    dims = {x.shape: x.dim for x in held}

    def dim_of(x: Any) -> int | None:
        is_held = x.shape in dims and sends_alone(ops, x, axes)
        return dims[x.shape] if is_held else None

    return dim_of


def sums_in_shards(
    run: Callable[..., PyTree], dim_of: Callable[[Any], int | None]
) -> Callable[..., PyTree]:
    """``run(*args) -> (sums, rest)`` of shards, which scatters sums by ``dim_of``."""

    def dims(out: PyTree) -> list[int | None]:
        return [dim_of(x) for x in jax.tree.leaves(out[0])]

    return functools.partial(on_shards, run, sums=dims)


def targets_of(
    ops: CrossTowerOps, trained: PyTree, axes: TowerAxes, tables: Iterable[int | None]
) -> Targets:
    """By what a loss is differentiated; ``tables`` number those leaves that are tables.

    Of these rows have a gradient, and none is of shards.
    """
    whole = {*tables}

    def is_sent_alone(number: int, x: Any) -> bool:
        return number not in whole and sends_alone(ops, x, axes)

    return Targets.of(trained, is_sent_alone)


@dataclasses.dataclass(frozen=True, eq=False)
class Added:
    """Sums over all towers.

    Attributes:
      sums: Those in flat buffers, whole on each device.
      shards: A tree of a `Shard` for each of the others, None for these.
      number: How many leaves of ``sums`` are guarded, which come first.
    """

    sums: Sums
    shards: PyTree
    number: int

    @classmethod
    def of(
        cls, ops: CrossTowerOps, own: PyTree, params: PyTree, axes: TowerAxes
    ) -> "Added":
        """Those of ``own``, two trees of a device's sums, of which one is guarded.

        A gradient of shards is such a sum already; what is scattered like parameters
        that are shards becomes one here.
        """
        dim_of = dim_of_shards(ops, params, axes)

        def shard(x: Any) -> Any:
            if is_shard(x):
                return x
            return None if (dim := dim_of(x)) is None else scatter_shard(x, dim)

        shards = jax.tree.map(shard, own, is_leaf=is_shard)
        rest = lambda x, shard: x if shard is None else None  # noqa: E731
        rest = jax.tree.map(rest, own, shards, is_leaf=is_shard)
        number = len(jax.tree.leaves(rest[0]))
        return cls(sum_over_towers(ops, rest, axes), shards, number)

    def tree(self) -> PyTree:
        """All of them, as the trees that were added."""
        if not jax.tree.leaves(self.shards):
            return self.sums.tree()
        is_leaf = lambda x: x is None or is_shard(x)  # noqa: E731
        either = lambda shard, x: x if shard is None else shard  # noqa: E731
        return jax.tree.map(either, self.shards, self.sums.tree(), is_leaf=is_leaf)

    def are_finite(self, rows: list[IndexedRows]) -> jax.Array:
        """Whether all that is guarded is finite, with rows of tables."""
        finite = [jnp.isfinite(x.values).all() for x in rows]
        if shards := jax.tree.leaves(self.shards[0]):
            own = all_finite(shards).astype(jnp.int32)
            finite.append(lax.pmin(own, DEVICE_AXIS) > 0)
        whole = self.sums.are_finite(self.number)
        return functools.reduce(jnp.logical_and, finite, whole)
