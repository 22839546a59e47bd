"""Values in shards, and the equations that need only a device's shard."""

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

from towerjax.jaxprs.interpreter import evaluate_eqn
from towerjax.jaxprs.primitives import ELEMENTWISE, IDENTITIES
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.lowering.gathers import gather, gather_cast, scatter
from towerjax.mesh.placement import Placement, split_spec
from towerjax.types import Layout as Where
from towerjax.types import PyTree
from towerjax.types.trees import widen_dtype

SplitDims: TypeAlias = Sequence[int | None]
"""For each value the dim that is split over the devices; None for a whole value."""


@dataclasses.dataclass(frozen=True)
class Shards:
    """Which arguments and results of a device function are sharded, and how."""

    args: Any  # the treedef of the arguments
    dims_of_args: SplitDims  # the dims along which arguments are sharded
    taken: SplitDims  # whole arguments of which the function uses only a shard
    out: Any  # the treedef of the results
    wanted: SplitDims  # the dims along which results are sharded
    exact: bool = False  # whether the bits must be those of one device

    def specs(self, specs: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        """Put the specs of shards in the partition specs of arguments and results.

        ``specs`` are two prefix trees, with the specs of leaves that are not shards.
        """

        def with_dims(prefix: PyTree, treedef: Any, dims: SplitDims) -> PyTree:
            leaves = jax.tree.unflatten(treedef, range(treedef.num_leaves))

            def is_spec(x: Any) -> bool:
                return isinstance(x, PartitionSpec)

            all_specs = jax.tree.broadcast(prefix, leaves, is_leaf=is_spec)
            flat_specs = jax.tree.leaves(all_specs, is_leaf=is_spec)
            pairs = zip(flat_specs, dims, strict=True)
            return treedef.unflatten(
                [x if at is None else split_spec(at) for x, at in pairs]
            )

        of_args, of_results = specs
        return (
            with_dims(of_args, self.args, self.dims_of_args),
            with_dims(of_results, self.out, self.wanted),
        )

    def around(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Wrap ``fn`` as a function of arrays, to be called in a device function.

        A sharded array reaches ``fn`` as a `Shard`. A result of ``fn`` may be a
        `Shard`, too.
        """

        def run(*args: PyTree) -> PyTree:
            shards = as_shards(
                jax.tree.leaves(args), self.dims_of_args, exact=self.exact
            )
            pairs = zip(shards, self.taken, strict=True)
            shards = [x if at is None else take_shard(x, at) for x, at in pairs]
            out = fn(*jax.tree.unflatten(self.args, shards))
            leaves = jax.tree.leaves(out, is_leaf=is_shard)
            return jax.tree.unflatten(
                self.out,
                [
                    whole(x) if at is None else shard_on_device(x, at)
                    for x, at in zip(leaves, self.wanted, strict=True)
                ],
            )

        return run


def shards_of(
    placement: Placement,
    args: tuple[PyTree, PyTree],
    out: tuple[PyTree, PyTree],
    *,
    params: PyTree,
    taken: PyTree = None,
    exact: bool,
) -> Shards:
    """Describe which arguments and results of a function are `Shards`.

    ``args`` and ``out`` are pairs: the values, and a prefix tree of their layouts.
    ``taken`` is a prefix tree that is SHARDED for whole arguments of which a shard is
    used. ``params`` are the parameters that `Placement.shardings` needs.
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

    treedef, dims_of_args = each(*args)
    shards = [None] * len(dims_of_args) if taken is None else each(args[0], taken)[1]
    return Shards(treedef, dims_of_args, shards, *each(*out), exact)


@jax.tree_util.register_pytree_node_class
class Shard:
    """This device's shard of a replicated value, which is split along ``dim``.

    If ``exact``, the gathered value has the memory layout that it has on one device, so
    that products with it have the same bits. If ``is_trained``, a derivative is taken
    by this value. A cast to ``dtype`` is then put off until the value is gathered, by
    `gather_cast`, so that gradients are added in the dtype of ``source``.
    """

    def __init__(
        self,
        source: jax.Array,
        dim: int,
        *,
        dtype: Any = None,
        sink: jax.Array | None = None,
        is_trained: bool = False,
        exact: bool = False,
        make: Callable[[], jax.Array] | None = None,
    ) -> None:
        self.source = source
        self.dim = dim
        self.sink = sink
        self.dtype = getattr(source, "dtype", None) if dtype is None else dtype
        self.is_trained = is_trained
        self.exact = exact
        self._make = make

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split the shard into its arrays and its other attributes."""
        meta = self.dim, self.dtype, self.is_trained, self.exact
        return (self.source, self.sink), meta

    @classmethod
    def tree_unflatten(cls, meta: tuple[Any, ...], arrays: tuple[Any, ...]) -> "Shard":
        """Make a `Shard` of the two results of `tree_flatten`."""
        (source, sink) = arrays
        (dim, dtype, is_trained, exact) = meta
        options = {"sink": sink, "is_trained": is_trained, "exact": exact}
        return cls(source, dim, dtype=dtype, **options)

    @property
    def data(self) -> jax.Array:
        """The shard's array, cast to ``dtype``."""
        same = self.dtype == self.source.dtype
        return self.source if same else self.source.astype(self.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""
        size = lax.axis_size(DEVICE_AXIS)
        shape = list(self.source.shape)
        shape[self.dim] *= size
        return tuple(shape)

    def of(
        self, shard: jax.Array, make: Callable[[], jax.Array] | None = None
    ) -> "Shard":
        """Wrap a value that was computed element by element from this one.

        ``shard`` is the new value's shard. ``make()`` computes the whole new value from
        whole operands, for use in place of a gather; None if there is no such function.
        """
        return Shard(shard, self.dim, exact=self.exact, make=make)

    def moved(
        self,
        move: Callable[[jax.Array], jax.Array],
        move_whole: Callable[[jax.Array], jax.Array],
        dim: int | None = None,
    ) -> "Shard":
        """Move the elements of this value, as by a transpose.

        ``move`` rearranges the elements of the shard, and ``move_whole`` those of the
        whole value. ``dim`` is the split dim afterwards, if it changes.
        """
        dim = self.dim if dim is None else dim
        sink = None if self.sink is None else move_whole(self.sink)
        meta = dim, self.dtype, self.is_trained, self.exact
        return Shard.tree_unflatten(meta, (move(self.source), sink))

    def cast(self, dtype: Any) -> "Shard":
        """Cast the value to ``dtype``, and keep it a `Shard`."""
        is_float = jnp.issubdtype(dtype, jnp.inexact)
        if not (self.is_trained and is_float):
            return self.of(self.data.astype(dtype))
        meta = self.dim, dtype, self.is_trained, self.exact
        return Shard.tree_unflatten(meta, (self.source, self.sink))

    def row(self) -> "Shard":
        """Wrap one row, which a scan slices out of ``source``, as a `Shard`.

        The scan has already replaced ``source`` by the row's shard. A row lacks the
        first dim, which is never the split one here, so the number of the split dim
        falls by 1.
        """
        meta = self.dim - 1, self.dtype, self.is_trained, self.exact
        return Shard.tree_unflatten(meta, (self.source, self.sink))

    def fresh(self) -> "Shard":
        """Copy this `Shard` without the gathered value that it stores."""
        same = Shard.tree_unflatten(*self.tree_flatten()[::-1])
        same._make = self._make
        return same

    @functools.cached_property
    def whole(self) -> jax.Array:
        """The whole value, gathered at its first use, or computed from whole values."""
        if self._make is not None:
            return self._make()
        if self.is_trained:
            return gather_cast(self.source, self.sink, self.dim, self.dtype)
        x = gather(self.data, self.dim)
        # XLA would keep the memory layout that the gather gives, and then add up a
        # product in another order.
        order = Layout(tuple(range(x.ndim)))
        return with_layout_constraint(x, order) if self.exact else x


is_shard: Callable[[Any], bool] = Shard.__instancecheck__
"""Whether a value is a `Shard`: a function of C, because it is called for each leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class Targets:
    """The arrays by which a function of a tree is differentiated.

    The tree may hold a `Shard`. If the cross-tower op sends that leaf alone (outside
    the flat buffers), the leaf's gradient is a `Shard` of the sum over devices.
    Otherwise the gradient is a whole array, of this device's towers only.
    """

    treedef: Any
    leaves: list[Any]
    scattered: list[bool]

    @classmethod
    def of(cls, tree: PyTree, is_sent_alone: Callable[[int, Any], bool]) -> "Targets":
        """Find the targets of a tree.

        ``is_sent_alone(i, shape)`` tells whether the cross-tower op sends leaf ``i``,
        which has this shape, outside the flat buffers.
        """
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
        wide = [widen_dtype(x.dtype) for x in leaves]
        shapes = map(jax.ShapeDtypeStruct, [x.shape for x in leaves], wide)
        pairs = enumerate(zip(leaves, shapes, strict=True))
        return cls(
            treedef,
            leaves,
            [is_shard(x) and is_sent_alone(i, shape) for i, (x, shape) in pairs],
        )

    @property
    def values(self) -> PyTree:
        """The arrays by which the function is differentiated, as a tree."""

        def of(x: Any, is_scattered: bool) -> Any:
            if not is_shard(x):
                return x
            dtype = widen_dtype(x.dtype)
            return x.data.astype(dtype) if is_scattered else jnp.zeros(x.shape, dtype)

        return self.treedef.unflatten(map(of, self.leaves, self.scattered))

    def put(self, values: PyTree) -> PyTree:
        """Build the tree that the function takes, with ``values`` as its targets."""

        def of(x: Any, value: jax.Array, is_scattered: bool) -> Any:
            if not is_shard(x):
                return value
            options: Any = {"dtype": x.dtype, "is_trained": True}
            if is_scattered:
                return Shard(value, x.dim, **options)
            return Shard(x.data, x.dim, sink=value, **options)

        parts = self.treedef.flatten_up_to(values)
        return self.treedef.unflatten(map(of, self.leaves, parts, self.scattered))

    def gradients(self, grads: PyTree) -> PyTree:
        """Wrap each scattered gradient by `values` in a `Shard`."""
        triples = zip(
            self.leaves, self.treedef.flatten_up_to(grads), self.scattered, strict=True
        )
        grads_of_shards = [
            Shard(g, x.dim) if is_scattered else g for x, g, is_scattered in triples
        ]
        return self.treedef.unflatten(grads_of_shards)


class Uniform:
    """An array of which all elements are one number; it is used whole or in shards."""

    def __init__(self, number: jax.Array, shape: tuple[int, ...]) -> None:
        self.number = number
        self.shape = shape

    @property
    def dtype(self) -> Any:
        """The dtype of the number."""
        return jnp.result_type(self.number)

    @property
    def whole(self) -> jax.Array:
        """The array itself, not in shards, with all of its elements."""
        return jnp.broadcast_to(self.number, self.shape)


def whole(x: Any) -> Any:
    """Gather a `Shard` or `Uniform` to the whole value; leave others unchanged."""
    return x.whole if isinstance(x, Shard | Uniform) else x


def cut_shard(x: jax.Array, dim: int) -> jax.Array:
    """Cut this device's shard out of a replicated value, along ``dim``."""
    size = x.shape[dim] // lax.axis_size(DEVICE_AXIS)
    start = lax.axis_index(DEVICE_AXIS) * size
    return lax.dynamic_slice_in_dim(x, start, size, dim)


def take_shard(x: jax.Array, dim: int) -> Shard:
    """Cut a `Shard` out of a value that this device holds whole.

    No gather is needed later, because the `Shard` keeps the whole value.
    """
    return Shard(cut_shard(x, dim), dim, exact=True, make=lambda: x)


def as_shards(
    values: Sequence[Any], dims: SplitDims, *, exact: bool = False
) -> list[Any]:
    """Wrap each value that has a dim in a `Shard` along that dim."""
    pairs = zip(values, dims, strict=True)
    return [x if dim is None else Shard(x, dim, exact=exact) for x, dim in pairs]


def scatter_shard(x: Any, dim: int) -> Shard:
    """Add a value over devices, and return the `Shard` of the sum."""
    return Shard(scatter(whole(x), dim), dim)


def shard_on_device(x: Any, dim: int) -> jax.Array:
    """Cut out this device's shard of ``x``, which may be a `Shard` already."""
    if isinstance(x, Shard) and x.dim == dim:
        return x.data
    return cut_shard(jnp.asarray(whole(x)), dim)


def with_barrier(operands: list[Any]) -> list[Any]:
    """Put the operands behind an optimization barrier; a `Shard` stays one."""
    fresh = [x.fresh() if isinstance(x, Shard) else x for x in operands]
    return lax.optimization_barrier(fresh)


def is_uniform(eqn: JaxprEqn) -> bool:
    """Return whether an equation fills an array with one number."""
    aval: Any = eqn.invars[0].aval if eqn.invars else None
    return eqn.primitive.name == "broadcast_in_dim" and not aval.ndim


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Return whether an equation computes element by element, like an addition."""
    return eqn.primitive.name in ELEMENTWISE


def elementwise(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """Compute an elementwise equation on shards that are split along one dim.

    Returns None if the operands are split along different dims. If the whole result is
    needed later, it is computed from whole operands. So a norm is added up as on one
    device, from squares that were never split.
    """
    first = next(x for x in operands if isinstance(x, Shard))

    def shard(x: Any) -> Any:
        if isinstance(x, Uniform):
            return jnp.broadcast_to(x.number, first.data.shape)
        return x.data if isinstance(x, Shard) else x

    # Cutting a shard out of an array here would keep XLA from fusing a step.
    numbers = [x for x in operands if not isinstance(x, Shard | Uniform)]
    dims = {x.dim for x in operands if isinstance(x, Shard)}
    avals: list[Any] = [x.aval for x in (*eqn.invars, *eqn.outvars)]
    shapes = {x.shape for x in avals if x.ndim}
    if any(map(jnp.ndim, numbers)) or len(dims) > 1 or len(shapes) > 1:
        return None

    def make() -> Any:
        return evaluate_eqn(eqn, [whole(x) for x in operands])[0]

    [out] = evaluate_eqn(eqn, [shard(x) for x in operands])
    return [first.of(out, make=make)]


def on_each_shard(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    """Compute an equation on each shard alone; None if that is impossible.

    All operands must be shards. A result of shards and of per-tower values differs
    between devices, so it is no shard of a replicated value.
    """
    name = eqn.primitive.name
    if name in IDENTITIES and len(operands) == len(eqn.outvars):
        return _handed_on(eqn, operands)
    if len(operands) > 1:
        return None
    shard = operands[0]
    params = eqn.params
    if name == "is_finite":
        return [shard.of(evaluate_eqn(eqn, [shard.data])[0])]
    if name == "convert_element_type" and not shard.exact:
        new = params["new_dtype"]
        is_narrower = new.itemsize <= shard.dtype.itemsize
        return [shard.cast(new)] if is_narrower else None
    if name == "reduce_and" and shard.dtype == bool:
        is_over_all_dims = len(params["axes"]) == shard.source.ndim
        return [_all_devices_say(eqn, shard)] if is_over_all_dims else None
    return _moved(eqn, shard)


def _handed_on(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """Run an equation that returns its operands, like a barrier."""
    fresh = [x.fresh() if isinstance(x, Shard) else x for x in operands]
    if len(operands) == 1:
        return jax.tree.map(lambda x: evaluate_eqn(eqn, [x])[0], fresh)
    leaves, treedef = jax.tree.flatten(fresh)
    return treedef.unflatten(evaluate_eqn(eqn, leaves))


def _all_devices_say(eqn: JaxprEqn, shard: Shard) -> jax.Array:
    """Run a ``reduce_and`` over the shards of all devices."""
    [flag] = evaluate_eqn(eqn, [shard.data])
    return lax.pmin(flag.astype(jnp.int32), DEVICE_AXIS) > 0


def _moved(eqn: JaxprEqn, shard: Shard) -> list[Any] | None:
    """Run on a shard an equation that only rearranges elements.

    Returns None for other equations, and if elements move along the split dim.
    """
    name = eqn.primitive.name
    params = eqn.params
    dim = shard.dim

    def move(x: jax.Array) -> jax.Array:
        return evaluate_eqn(eqn, [x])[0]

    if name == "slice":
        size_before = eqn.invars[0].aval.shape[dim]  # type: ignore[attr-defined]
        size_after = eqn.outvars[0].aval.shape[dim]  # type: ignore[attr-defined]
        if size_before != size_after:
            return None
        starts = params["start_indices"]
        limits = list(params["limit_indices"])
        strides = params["strides"]
        limits[dim] //= lax.axis_size(DEVICE_AXIS)
        return [shard.moved(lambda x: lax.slice(x, starts, limits, strides), move)]
    if name == "squeeze":
        after = dim - sum(at < dim for at in params["dimensions"])
        return [shard.moved(move, move, after)]
    if name == "transpose" and not shard.exact:
        return [shard.moved(move, move, params["permutation"].index(dim))]
    return None
