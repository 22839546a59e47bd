"""Add sums over all towers, in flat buffers or scattered into shards."""

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
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.lowering.sharded_values import Targets, is_shard, scatter_shard
from towerjax.lowering.shards import on_shards
from towerjax.mesh.placement import TowerAxes
from towerjax.types import PyTree


def dim_of_shards(
    ops: CrossTowerOps, params: PyTree, axes: TowerAxes
) -> Callable[[Any], int | None]:
    """Build the function that tells along which dim a sum is scattered, or None.

    A sum that has the shape of a sharded parameter is scattered along the dim of that
    parameter's shards. This needs an op that sends the sum alone, outside the flat
    buffers.
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
    """Let ``run`` accept shards, and scatter its sums.

    ``run(*args)`` returns ``(sums, rest)``. ``dim_of(x)`` gives the dim along which a
    sum is scattered, or None.
    """

    def dims(out: PyTree) -> list[int | None]:
        return [dim_of(x) for x in jax.tree.leaves(out[0])]

    return functools.partial(on_shards, run, sums=dims)


def targets_of(
    ops: CrossTowerOps, trained: PyTree, axes: TowerAxes, tables: Iterable[int | None]
) -> Targets:
    """Choose the arrays by which a loss is differentiated.

    ``tables`` are the indices of those trained leaves that are tables. A table's
    gradient has only the rows that were looked up, so it is never scattered.
    """
    whole = {*tables}

    def is_sent_alone(number: int, x: Any) -> bool:
        return number not in whole and sends_alone(ops, x, axes)

    return Targets.of(trained, is_sent_alone)


@dataclasses.dataclass(frozen=True, eq=False)
class Added:
    """Sums over all towers, as `Added.of` makes them.

    Attributes:
      sums: The sums that are sent in flat buffers, replicated over devices.
      shards: A tree with a `Shard` for each other sum, and None for those in ``sums``.
      number: The number of guarded leaves of ``sums``, which are its first ones.
    """

    sums: Sums
    shards: PyTree
    number: int

    @classmethod
    def of(
        cls, ops: CrossTowerOps, addends: PyTree, params: PyTree, axes: TowerAxes
    ) -> "Added":
        """Add ``addends``, the sums of a device's towers, over all devices.

        ``addends`` is two trees; only the sums of the first are guarded. A gradient by
        a `Shard` has already been added over devices. Another sum that has the shape of
        a sharded parameter is added and scattered here.
        """
        leaves = jax.tree.leaves((addends, params), is_leaf=is_shard)
        if not any(map(is_shard, leaves)):
            number = len(jax.tree.leaves(addends[0]))
            return cls(sum_over_towers(ops, addends, axes), (None, None), number)
        dim_of = dim_of_shards(ops, params, axes)

        def shard(x: Any) -> Any:
            if is_shard(x):
                return x
            return None if (dim := dim_of(x)) is None else scatter_shard(x, dim)

        shards = jax.tree.map(shard, addends, is_leaf=is_shard)

        def unless_scattered(x: Any, shard: Any) -> Any:
            return x if shard is None else None

        rest = jax.tree.map(unless_scattered, addends, shards, is_leaf=is_shard)
        number = len(jax.tree.leaves(rest[0]))
        return cls(sum_over_towers(ops, rest, axes), shards, number)

    def tree(self) -> PyTree:
        """Put the sums back in the structure of the trees that were added."""
        if not jax.tree.leaves(self.shards):
            return self.sums.tree()

        def is_leaf(x: Any) -> bool:
            return x is None or is_shard(x)

        def either(shard: Any, x: Any) -> Any:
            return x if shard is None else shard

        return jax.tree.map(either, self.shards, self.sums.tree(), is_leaf=is_leaf)

    def are_finite(self, rows: list[IndexedRows]) -> jax.Array:
        """Return whether the guarded sums, and ``rows`` of tables, are all finite."""
        finite = [jnp.isfinite(x.values).all() for x in rows]
        if shards := jax.tree.leaves(self.shards[0]):
            of_shards = all_finite(shards).astype(jnp.int32)
            finite.append(lax.pmin(of_shards, DEVICE_AXIS) > 0)
        whole = self.sums.are_finite(self.number)
        return functools.reduce(jnp.logical_and, finite, whole)
