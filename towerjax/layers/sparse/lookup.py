"""Which rows does an equation look up? Read off its shapes, then its operands."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from towerjax.collectives.sparse_rows import wide_indices


class Lookup(NamedTuple):
    """How an equation reads whole rows of a table ``[N, ...]``."""

    shape: tuple[int, ...]  # of the table
    offsets: range  # which rows an index i names: i plus each of these
    # The dims of the output that come last, so that rows come row by row.
    dims: tuple[int, ...]
    column: int | None  # which number of an index says the row
    clips: bool  # an index without a row reads the nearest; else its gradient is lost

    def by_row(self, x: jax.Array) -> jax.Array:
        """An array of the shape of the equation's output, row by row."""
        x = jnp.moveaxis(x, self.dims, range(x.ndim - len(self.dims), x.ndim))
        row = self.shape[1:]
        return x.reshape((math.prod(x.shape[: x.ndim - len(row)]), *row))

    def rows(self, operands: list[Any]) -> tuple[jax.Array, jax.Array]:
        """Which rows are read, in the order of `by_row`, and which of them count."""
        if self.column is not None:
            first = operands[0][..., self.column]
        else:
            first = jnp.asarray(operands[0] if operands else 0)
        first = wide_indices(first).reshape(-1)
        offsets = jnp.asarray(self.offsets, first.dtype)[None]
        last = self.shape[0] - 1 - max(self.offsets, default=0)
        counted = jnp.full(first.shape, True)
        if not self.clips:
            counted = (first >= 0) & (first <= last)
        indices = jnp.clip(first, 0, last)[:, None] + offsets
        counted = jnp.broadcast_to(counted[:, None], indices.shape)
        return indices.reshape(-1), counted.reshape(-1)


def lookup_of(eqn: JaxprEqn) -> Lookup | None:
    """How the equation looks up whole rows of its first operand."""
    find = {
        "gather": _of_gather,
        "dynamic_slice": _of_dynamic_slice,
        "slice": _of_slice,
    }.get(eqn.primitive.name)
    table: Any = eqn.invars[0].aval if eqn.invars else None
    return find(eqn, tuple(table.shape)) if find else None


def _of_gather(eqn: JaxprEqn, shape: tuple[int, ...]) -> Lookup | None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    clips = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    columns = numbers.start_index_map
    # Clipped, the other numbers of an index are 0 where all of their dim is read.
    if 0 not in columns or not (clips or columns == (0,)):
        return None
    if numbers.collapsed_slice_dims not in ((0,), ()) or numbers.operand_batching_dims:
        return None
    if tuple(sizes[1:]) != shape[1:]:
        return None
    dims = tuple(numbers.offset_dims)
    return Lookup(shape, range(sizes[0]), dims, columns.index(0), clips)


def _of_dynamic_slice(eqn: JaxprEqn, shape: tuple[int, ...]) -> Lookup | None:
    sizes = tuple(eqn.params["slice_sizes"])
    if sizes[1:] != shape[1:]:
        return None
    return Lookup(shape, range(sizes[0]), (), None, clips=True)


def _of_slice(eqn: JaxprEqn, shape: tuple[int, ...]) -> Lookup | None:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(shape)
    if any(start[1:]) or limit[1:] != shape[1:] or any(n != 1 for n in strides[1:]):
        return None
    return Lookup(shape, range(start[0], limit[0], strides[0]), (), None, clips=True)
