"""Values that devices hold in parts, and equations that need no more than a part."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from towerjax.collectives.reduce import hide_complex
from towerjax.mesh.placement import DEVICE_AXIS, Placement, split_spec
from towerjax.proof.equation import IDENTITIES
from towerjax.proof.interpreter import evaluate_eqn
from towerjax.types import Layout as Where
from towerjax.types import PyTree

SplitDims: TypeAlias = Sequence[int | None]
"""For each value the dim that is split over the devices; None for a whole value."""

# Primitives that compute each element by itself; of several operands.
_OF_SEVERAL = frozenset(
    "abs add add_any and cbrt ceil clamp cos div eq erf exp exp2 expm1 floor ge gt"
    " integer_pow le log log1p logistic lt max min mul ne neg nextafter not or pow rem"
    " round rsqrt select_n sign sin sqrt square sub tanh xor".split()
)
_ELEMENTWISE = frozenset((*IDENTITIES, "is_finite"))


@dataclasses.dataclass(frozen=True)
class Shards:
    """Which leaves of a device's arguments and results are parts, along which dims."""

    args: Any  # the treedef of the arguments
    given: SplitDims
    taken: SplitDims  # the dims of whole arguments of which only parts are used
    out: Any  # the treedef of the results
    wanted: SplitDims
    exact: bool = False  # whether the bits are to be those of one device
    # Whether all values are the same on all devices, as in an update, and not those of
    # a device's own towers. Then what is computed of parts is a part, too.
    alike: bool = False

    def specs(self, specs: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """The specs of arguments and results, from prefix trees for whole leaves."""
        treedefs = (self.args, self.given), (self.out, self.wanted)

        def each(prefix: PyTree, treedef: Any, dims: SplitDims) -> PyTree:
            leaves = jax.tree.unflatten(treedef, range(treedef.num_leaves))
            is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
            all_specs = jax.tree.broadcast(prefix, leaves, is_leaf=is_spec)
            flat_specs = jax.tree.leaves(all_specs, is_leaf=is_spec)
            pairs = zip(flat_specs, dims, strict=True)
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


def shards_of(
    placement: Placement,
    args: tuple[PyTree, PyTree],
    out: tuple[PyTree, PyTree],
    *,
    params: PyTree,
    taken: PyTree = None,
    exact: bool,
) -> Shards:
    """The `Shards` of arguments and of results, each with a prefix tree of layouts.

    ``taken``, for values that are alike on all devices: prefix tree, SHARDED where of
    whole arguments only parts are used. ``params``: as for `Placement.shardings`.
    """

    def dim(layout: Where, x: Any, within: PartitionSpec) -> int | None:
        if layout is Where.SHARDED:
            return placement.split_dim(x, within)
        return 0 if layout is Where.PER_TOWER else None

    def each(values: PyTree, layouts: PyTree) -> tuple[Any, list[int | None]]:
        leaves, treedef = jax.tree.flatten(values)
        layouts = jax.tree.leaves(jax.tree.broadcast(layouts, values))
        within = placement.specs_within(values, params)
        return treedef, [dim(*x) for x in zip(layouts, leaves, within, strict=True)]

    treedef, given = each(*args)
    parts = [None] * len(given) if taken is None else each(args[0], taken)[1]
    return Shards(treedef, given, parts, *each(*out), exact, taken is not None)


class Shard:
    """This device's part of a value that is the same on all, split along ``dim``.

    With ``exact``, what is whole is what one device has, in the layout that it has
    there, so that products of it have the same bits.
    """

    def __init__(
        self,
        part: jax.Array,
        dim: int,
        *,
        exact: bool = False,
        make: Callable[[], jax.Array] | None = None,
    ) -> None:
        self.part, self.dim, self.exact, self._make = part, dim, exact, make

    def of(
        self,
        part: jax.Array,
        dim: int | None = None,
        make: Callable[[], jax.Array] | None = None,
    ) -> "Shard":
        """The part of a value that is computed of this one."""
        dim = self.dim if dim is None else dim
        return Shard(part, dim, exact=self.exact, make=make)

    def fresh(self) -> "Shard":
        """The same, to be gathered anew in the program that uses it."""
        return self.of(self.part, make=self._make)

    @functools.cached_property
    def whole(self) -> jax.Array:
        """All parts, gathered at its first use; or computed of whole values."""
        if self._make is not None:
            return self._make()
        x = lax.all_gather(self.part, DEVICE_AXIS, axis=self.dim, tiled=True)
        # XLA would lay it out as it was gathered, and multiply in another order.
        order = Layout(tuple(range(x.ndim)))
        return with_layout_constraint(x, order) if self.exact else x


class Uniform:
    """One number in all elements of a shape, whole or in part."""

    def __init__(self, number: jax.Array, shape: tuple[int, ...]) -> None:
        self.number, self.shape = number, shape

    @property
    def dtype(self) -> Any:
        """That of the number."""
        return jnp.result_type(self.number)

    @property
    def whole(self) -> jax.Array:
        """The array."""
        return jnp.broadcast_to(self.number, self.shape)


def whole(x: Any) -> Any:
    """The value of a `Shard`, of a `Uniform`, or of anything else."""
    return x.whole if isinstance(x, Shard | Uniform) else x


def own_part(x: jax.Array, dim: int) -> jax.Array:
    """This device's part of a value that is the same on all."""
    size = x.shape[dim] // lax.axis_size(DEVICE_AXIS)
    start = lax.axis_index(DEVICE_AXIS) * size
    return lax.dynamic_slice_in_dim(x, start, size, dim)


def take_part(x: jax.Array, dim: int) -> Shard:
    """A `Shard` of a whole value, with the bits of one device."""
    return Shard(own_part(x, dim), dim, exact=True, make=lambda: x)


def as_shards(
    values: Sequence[Any], dims: SplitDims, *, exact: bool = False
) -> list[Any]:
    """The values, as a `Shard` where they are parts."""
    pairs = zip(values, dims, strict=True)
    return [x if dim is None else Shard(x, dim, exact=exact) for x, dim in pairs]


def scatter(x: Any, dim: int) -> Shard:
    """The sum over devices of a value, each device with its own part."""
    x = hide_complex(whole(x))
    parts = lax.psum_scatter(x, DEVICE_AXIS, scatter_dimension=dim, tiled=True)
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
    return [x.of(p) if isinstance(x, Shard) else p for x, p in pairs]


def is_uniform(eqn: JaxprEqn) -> bool:
    """Whether an equation makes an array of one number."""
    aval: Any = eqn.invars[0].aval if eqn.invars else None
    return eqn.primitive.name == "broadcast_in_dim" and not aval.ndim


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether an equation computes each element by itself, of one or more operands."""
    return eqn.primitive.name in (*_OF_SEVERAL, "convert_element_type")


def elementwise(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """Elements of parts that are alike on all devices; None where they do not match.

    Where they are needed whole, they are computed of whole operands: so a norm is added
    up as on one device, of squares that no program has split.
    """
    first = next(x for x in operands if isinstance(x, Shard))

    def part(x: Any) -> Any:
        if isinstance(x, Uniform):
            return jnp.broadcast_to(x.number, first.part.shape)
        return x.part if isinstance(x, Shard) else x

    # A part cut out of an array here would keep compilers from fusing what is one step.
    numbers = [x for x in operands if not isinstance(x, Shard | Uniform)]
    dims = {x.dim for x in operands if isinstance(x, Shard)}
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    shapes = {x.shape for x in avals if x.ndim}
    if any(map(jnp.ndim, numbers)) or len(dims) > 1 or len(shapes) > 1:
        return None
    make = lambda: evaluate_eqn(eqn, [whole(x) for x in operands])[0]  # noqa: E731
    [out] = evaluate_eqn(eqn, [part(x) for x in operands])
    return [first.of(out, make=make)]


def on_parts(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """The results of an equation that needs no more than each part; else None.

    Of parts alone: a result of parts and of a tower's own values is no part, since it
    differs between devices.
    """
    name, params, x = eqn.primitive.name, eqn.params, operands[0]
    if name in _ELEMENTWISE and len(operands) == len(eqn.outvars):
        parts = [x.part if isinstance(x, Shard) else x for x in operands]
        pairs = zip(operands, evaluate_eqn(eqn, parts), strict=True)
        return [x.of(p) if isinstance(x, Shard) else p for x, p in pairs]
    if len(operands) > 1:
        return None
    dim, size = x.dim, lax.axis_size(DEVICE_AXIS)
    if name == "convert_element_type" and not x.exact:
        narrows = params["new_dtype"].itemsize <= x.part.dtype.itemsize
        return [x.of(evaluate_eqn(eqn, [x.part])[0])] if narrows else None
    is_flag = name == "reduce_and" and x.part.dtype == bool
    if is_flag and len(params["axes"]) == x.part.ndim:
        [flag] = evaluate_eqn(eqn, [x.part])
        return [lax.pmin(flag.astype(jnp.int32), DEVICE_AXIS) > 0]
    avals: list[Any] = [eqn.invars[0].aval, eqn.outvars[0].aval]
    if name == "slice" and avals[0].shape[dim] == avals[1].shape[dim]:  # all of it
        starts, limits, strides = (
            params["start_indices"], list(params["limit_indices"]), params["strides"]
        )  # fmt: skip
        limits[dim] //= size
        return [x.of(lax.slice(x.part, starts, limits, strides))]
    if name == "squeeze":
        moved = dim - sum(at < dim for at in params["dimensions"])
        return [x.of(lax.squeeze(x.part, params["dimensions"]), moved)]
    if name == "transpose" and not x.exact:
        order = params["permutation"]
        return [x.of(lax.transpose(x.part, order), order.index(dim))]
    return None
