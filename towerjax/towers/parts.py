"""Values that devices hold in parts, and equations that need no more than a part."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from towerjax.mesh.placement import DEVICE_AXIS, split_spec
from towerjax.proof.equation import IDENTITIES
from towerjax.proof.interpreter import evaluate_eqn
from towerjax.types import PyTree

SplitDims: TypeAlias = Sequence[int | None]
"""For each value the dim that is split over the devices; None for a whole value."""

# Primitives that compute each element by itself.
_ELEMENTWISE = frozenset((*IDENTITIES, "is_finite"))


@dataclasses.dataclass(frozen=True)
class Shards:
    """Which leaves of a device's arguments and results are parts, along which dims."""

    args: Any  # the treedef of the arguments
    given: SplitDims
    out: Any  # the treedef of the results
    wanted: SplitDims

    def specs(self, specs: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """The specs of arguments and results, from prefix trees for whole leaves."""
        treedefs = (self.args, self.given), (self.out, self.wanted)

        def each(prefix: PyTree, treedef: Any, dims: SplitDims) -> PyTree:
            leaves = jax.tree.unflatten(treedef, range(treedef.num_leaves))
            is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
            all_specs = jax.tree.broadcast(prefix, leaves, is_leaf=is_spec)
            found = jax.tree.leaves(all_specs, is_leaf=is_spec)
            pairs = zip(found, dims, strict=True)
            return treedef.unflatten(
                [x if at is None else split_spec(at) for x, at in pairs]
            )

        first, last = map(each, specs, *zip(*treedefs, strict=True))
        return first, last

    def whole(self, args: PyTree, size: int) -> PyTree:
        """The shapes of whole arguments, from those of one of ``size`` devices."""
        leaves = jax.tree.leaves(args)

        def of(x: jax.ShapeDtypeStruct, dim: int | None) -> jax.ShapeDtypeStruct:
            shape = [n * size if i == dim else n for i, n in enumerate(x.shape)]
            return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

        return jax.tree.unflatten(self.args, map(of, leaves, self.given))


class Shard:
    """This device's part of a value that is the same on all, split along ``dim``."""

    def __init__(self, part: jax.Array, dim: int) -> None:
        self.part, self.dim = part, dim

    @functools.cached_property
    def whole(self) -> jax.Array:
        """All parts, gathered at its first use."""
        return lax.all_gather(self.part, DEVICE_AXIS, axis=self.dim, tiled=True)


def whole(x: Any) -> Any:
    """The value of a `Shard`, or of anything else."""
    return x.whole if isinstance(x, Shard) else x


def own_part(x: jax.Array, dim: int) -> jax.Array:
    """This device's part of a value that is the same on all."""
    size = x.shape[dim] // lax.axis_size(DEVICE_AXIS)
    start = lax.axis_index(DEVICE_AXIS) * size
    return lax.dynamic_slice_in_dim(x, start, size, dim)


def as_shards(values: Sequence[Any], dims: SplitDims) -> list[Any]:
    """The values, as a `Shard` where they are parts."""
    pairs = zip(values, dims, strict=True)
    return [x if dim is None else Shard(x, dim) for x, dim in pairs]


def scatter(x: Any, dim: int) -> Shard:
    """The sum over devices of a value, each device with its own part."""
    parts = lax.psum_scatter(whole(x), DEVICE_AXIS, scatter_dimension=dim, tiled=True)
    return Shard(parts, dim)


def part_on_device(x: Any, dim: int) -> jax.Array:
    """This device's part of a `Shard`, or of a value that is the same on all."""
    if isinstance(x, Shard) and x.dim == dim:
        return x.part
    return own_part(jnp.asarray(whole(x)), dim)


def with_barrier(operands: list[Any]) -> list[Any]:
    """The operands, parts as parts, behind an optimization barrier."""
    parts = [x.part if isinstance(x, Shard) else x for x in operands]
    parts = lax.optimization_barrier(parts)
    pairs = zip(operands, parts, strict=True)
    return [Shard(p, x.dim) if isinstance(x, Shard) else p for x, p in pairs]


def on_parts(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """The results of an equation that needs no more than each part; else None."""
    name, params, x = eqn.primitive.name, eqn.params, operands[0]
    if name == "convert_element_type":
        narrows = params["new_dtype"].itemsize <= x.part.dtype.itemsize
        return [Shard(evaluate_eqn(eqn, [x.part])[0], x.dim)] if narrows else None
    if name in _ELEMENTWISE and len(operands) == len(eqn.outvars):
        parts = [x.part if isinstance(x, Shard) else x for x in operands]
        pairs = zip(operands, evaluate_eqn(eqn, parts), strict=True)
        return [Shard(p, x.dim) if isinstance(x, Shard) else p for x, p in pairs]
    if name == "reduce_and" and len(params["axes"]) == x.part.ndim:
        [found] = evaluate_eqn(eqn, [x.part])
        return [lax.pmin(found.astype(jnp.int32), DEVICE_AXIS) > 0]
    if not isinstance(x, Shard) or any(isinstance(y, Shard) for y in operands[1:]):
        return None
    dim, size = x.dim, lax.axis_size(DEVICE_AXIS)
    full = x.part.shape[dim] * size
    if name == "dynamic_slice" and params["slice_sizes"][dim] == full:
        sizes = list(params["slice_sizes"])
        sizes[dim] //= size
        return [Shard(lax.dynamic_slice(x.part, operands[1:], sizes), dim)]
    if name == "slice" and _is_full(eqn, dim):
        starts, limits, strides = (
            params["start_indices"], list(params["limit_indices"]), params["strides"]
        )  # fmt: skip
        limits[dim] //= size
        return [Shard(lax.slice(x.part, starts, limits, strides), dim)]
    if name == "squeeze":
        moved = dim - sum(at < dim for at in params["dimensions"])
        return [Shard(lax.squeeze(x.part, params["dimensions"]), moved)]
    if name == "transpose":
        order = params["permutation"]
        return [Shard(lax.transpose(x.part, order), order.index(dim))]
    return None


def _is_full(eqn: JaxprEqn, dim: int) -> bool:
    params = eqn.params
    aval: Any = eqn.invars[0].aval
    is_whole = params["limit_indices"][dim] - params["start_indices"][dim]
    return is_whole == aval.shape[dim]
