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
from towerjax.lowering.parts import Targets, is_shard, scatter_part
from towerjax.lowering.shards import on_shards
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree


def dim_in_parts(
    ops: CrossTowerOps, params: PyTree, axes: TowerAxes
) -> Callable[[Any], int | None]:
    """A function of a sum's shape: along which dim it leaves in parts, if it does.

    What has the shape of parameters that devices hold in parts leaves as these lie.
    """
    held = [x for x in jax.tree.leaves(params, is_leaf=is_shard) if is_shard(x)]
    dims = {x.shape: x.dim for x in held}

    def dim_of(x: Any) -> int | None:
        is_held = x.shape in dims and sends_alone(ops, x, axes)
        return dims[x.shape] if is_held else None

    return dim_of


def sums_in_parts(
    run: Callable[..., PyTree], dim_of: Callable[[Any], int | None]
) -> Callable[..., PyTree]:
    """``run(*args) -> (sums, rest)`` of parts, whose sums are, too: `dim_in_parts`."""

    def dims(out: PyTree) -> list[int | None]:
        return [dim_of(x) for x in jax.tree.leaves(out[0])]

    return functools.partial(on_shards, run, sums=dims)


def targets_of(
    ops: CrossTowerOps, trained: PyTree, axes: TowerAxes, tables: Iterable[int | None]
) -> Targets:
    """By what a loss is differentiated; ``tables`` number those leaves that are tables.

    Of these rows have a gradient, and none is of parts.
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
      parts: A tree of a `Shard` for each of the others, None for these.
      number: How many leaves of ``sums`` are guarded, which come first.
    """

    sums: Sums
    parts: PyTree
    number: int

    @classmethod
    def of(
        cls, ops: CrossTowerOps, own: PyTree, params: PyTree, axes: TowerAxes
    ) -> "Added":
        """Those of ``own``, two trees of a device's sums, of which one is guarded.

        A gradient of parts is such a sum already; what leaves like parameters that are
        parts becomes one here.
        """
        dim_of = dim_in_parts(ops, params, axes)

        def part(x: Any) -> Any:
            if is_shard(x):
                return x
            return None if (dim := dim_of(x)) is None else scatter_part(x, dim)

        parts = jax.tree.map(part, own, is_leaf=is_shard)
        rest = lambda x, part: x if part is None else None  # noqa: E731
        rest = jax.tree.map(rest, own, parts, is_leaf=is_shard)
        number = len(jax.tree.leaves(rest[0]))
        return cls(sum_over_towers(ops, rest, axes), parts, number)

    def tree(self) -> PyTree:
        """All of them, as the trees that were added."""
        if not jax.tree.leaves(self.parts):
            return self.sums.tree()
        is_leaf = lambda x: x is None or is_shard(x)  # noqa: E731
        either = lambda part, x: x if part is None else part  # noqa: E731
        return jax.tree.map(either, self.parts, self.sums.tree(), is_leaf=is_leaf)

    def are_finite(self, rows: list[IndexedRows]) -> jax.Array:
        """Whether all that is guarded is finite, with rows of tables."""
        finite = [jnp.isfinite(x.values).all() for x in rows]
        if parts := jax.tree.leaves(self.parts[0]):
            own = all_finite(parts).astype(jnp.int32)
            finite.append(lax.pmin(own, DEVICE_AXIS) > 0)
        whole = self.sums.are_finite(self.number)
        return functools.reduce(jnp.logical_and, finite, whole)
