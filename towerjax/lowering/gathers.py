"""Gather a sharded parameter where it is used; its gradient is added in shards."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal

from towerjax.collectives.reduce import hide_complex
from towerjax.jaxprs.flow import needed_eqns
from towerjax.jaxprs.interpreter import Interpreter
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.types import PyTree


def gather(shard: jax.Array, dim: int) -> jax.Array:
    """Gather the devices' shards along ``dim``, and return the whole value."""
    return lax.all_gather(shard, DEVICE_AXIS, axis=dim, tiled=True)


def scatter(x: jax.Array, dim: int) -> jax.Array:
    """Add a value over devices, and return this device's shard of the sum."""
    x = hide_complex(x)
    return lax.psum_scatter(x, DEVICE_AXIS, scatter_dimension=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gather_cast(shard: jax.Array, sink: Any, dim: int, dtype: Any) -> jax.Array:
    """Cast the shard, gather it, and return the whole value.

    The derivative adds the gradient over devices in the dtype of ``shard``, and
    scatters it. If there is a ``sink``, an array of the whole shape, then ``sink`` gets
    this device's gradient and ``shard`` gets none.
    """
    return gather(shard.astype(dtype), dim)


def _gather_first(
    shard: jax.Array, sink: Any, dim: int, dtype: Any
) -> tuple[jax.Array, tuple[Any, Any]]:
    # These arrays have no elements. They only store the dtypes of the gradients.
    empty = jax.tree.map(lambda x: jnp.zeros(0, x.dtype), (shard, sink))
    return gather(shard.astype(dtype), dim), empty


def _gather_last(
    dim: int, dtype: Any, empty: tuple[Any, Any], grad: jax.Array
) -> tuple[Any, Any]:
    shard, sink = empty
    if sink is None:
        return scatter(grad.astype(shard.dtype), dim), None
    return None, grad.astype(sink.dtype)


gather_cast.defvjp(_gather_first, _gather_last)


def gathering_again(fn: Callable[..., PyTree], shards: PyTree, *args: PyTree) -> PyTree:
    """Call ``fn(shards, *args)``; its derivative gathers the shards once more.

    The backward pass recomputes the values that depend on nothing except ``shards``,
    and does not store them. Without this a loop would store what each of its steps has
    gathered. `jax.checkpoint` with a policy is not used, because it would store values
    that a `jax.checkpoint` in ``fn`` recomputes.
    """
    leaves, treedef = jax.tree.flatten((shards, *args))
    number = len(jax.tree.leaves(shards))

    @jax.custom_vjp
    def run(leaves: list[Any]) -> PyTree:
        return fn(*treedef.unflatten(leaves))

    def first(leaves: list[Any]) -> tuple[PyTree, Any]:
        of_leaves = [x.value for x in leaves]
        moved = [i for i, x in enumerate(leaves) if x.perturbed]

        def differentiate(*of_leaves: Any) -> tuple[PyTree, Any]:
            def of(values: list[Any]) -> PyTree:
                every = dict(enumerate(of_leaves)) | dict(
                    zip(moved, values, strict=True)
                )
                return fn(*treedef.unflatten(every.values()))

            return jax.vjp(of, [of_leaves[i] for i in moved])

        closed, shapes = jax.make_jaxpr(differentiate, return_shape=True)(*of_leaves)
        values = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *of_leaves)
        out, pull = jax.tree.unflatten(jax.tree.structure(shapes), values)
        residuals, of_pull = jax.tree.flatten(pull)
        results = closed.jaxpr.outvars[len(values) - len(residuals) :]
        recomputed = _Made(closed, number, results)
        residuals = [
            None if i in recomputed.numbers else x for i, x in enumerate(residuals)
        ]

        def back(shards: list[Any], residuals: list[Any], grads: PyTree) -> list[Any]:
            again = dict(
                zip(recomputed.numbers, recomputed.values(shards), strict=True)
            )
            every = [again.get(i, x) for i, x in enumerate(residuals)]
            (grads_of_shards,) = of_pull.unflatten(every)(grads)
            new = dict(zip(moved, grads_of_shards, strict=True))
            return [new.get(i) for i in range(len(leaves))]

        return out, jax.tree_util.Partial(back, of_leaves[:number], residuals)

    def last(back: Any, grads: PyTree) -> tuple[list[Any]]:
        return (back(jax.tree.map(_instantiated, grads, is_leaf=_is_zero)),)

    run.defvjp(first, last, symbolic_zeros=True)
    return run(leaves)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


def _instantiated(x: Any) -> Any:
    return x.instantiate() if _is_zero(x) else x


class _Made:
    """The results of a program that can be recomputed from its first inputs alone.

    The first inputs are the shards.

    Attributes:
      numbers: The numbers of these results.
    """

    def __init__(self, closed: Any, number: int, results: list[Any]) -> None:
        body = closed.jaxpr
        shards = {*body.invars[:number]}
        others = {*body.invars[number:]}
        # A constant that is a tracer of another trace may no longer exist when
        # results are recomputed, so results that depend on it are not.
        pairs = zip(body.constvars, closed.consts, strict=True)
        others |= {var for var, x in pairs if isinstance(x, Tracer)}
        eqns = list[Any]()
        of_shards = set[Any]()
        for eqn in body.eqns:
            operands = {x for x in eqn.invars if not isinstance(x, Literal)}
            # An effect with a name only says that the equation uses a named axis, so
            # the equation can be evaluated twice.
            effects = [x for x in eqn.effects if not hasattr(x, "name")]
            if effects or not others.isdisjoint(operands):
                others |= {*eqn.outvars}
            elif not (shards | of_shards).isdisjoint(operands):
                of_shards |= {*eqn.outvars}
                eqns.append(eqn)
        is_made = [not isinstance(x, Literal) and x in of_shards for x in results]
        self.numbers = [i for i, yes in enumerate(is_made) if yes]
        self._results = [results[i] for i in self.numbers]
        self._closed = closed
        self._eqns = needed_eqns(eqns, self._results)

    def values(self, shards: list[Any]) -> list[Any]:
        """Recompute these results from ``shards``, which gathers them once more."""
        body = self._closed.jaxpr
        others = [None] * (len(body.invars) - len(shards))
        walk = Interpreter(body, self._closed.consts, [*shards, *others])
        for eqn in self._eqns:
            walk.evaluate(eqn)
        return [walk.read(x) for x in self._results]
