"""A tower's own gradient: of the sum of its loss, with the weight of the loss."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.jaxprs.flow import forwarded_inputs
from towerjax.mesh.private_jax import is_literal_zero
from towerjax.metrics.weighted import Weighted
from towerjax.step.passes.derivative import LossSums
from towerjax.step.passes.looked_up import TracedLoss
from towerjax.towers.outputs import as_ours, as_tower_output
from towerjax.towers.tower import Tower
from towerjax.types import LossFn, PyTree, Reduction, Sum, TowerOutput
from towerjax.types.options import check_choice, check_function
from towerjax.types.refusals import listed
from towerjax.types.trees import is_key, leaf_name, name_by_key, named_leaves


def value_and_grad(
    loss_fn: Callable[..., PyTree], *, loss_reduction: Reduction | None = None
) -> Callable[..., tuple[PyTree, Weighted | Sum]]:
    """Make a function of a tower's loss and gradient, to be merged over towers.

    The sum of the loss is differentiated, and nothing is divided. So the gradient of
    the global loss is the sum of the towers' gradients over the sum of their weights.

    Use it if each tower's own gradient is needed, for example to clip it. Towers that
    share a device under ``tower_loop="vmap"`` then each hold a gradient until these are
    added. For the gradient of the whole loss use `of_loss`: a device then holds one
    gradient, and the loss may be a sum of several means.

    Args:
      loss_fn: ``(params, *args) -> Weighted | TowerOutput``, such as a `LossFn`. It is
        traced with ``params``, as under ``jax.jit``.
      loss_reduction: The meaning of a bare scalar loss: SUM adds it over towers and
        micro-batches, MEAN takes the mean of their values, None refuses it.

    Returns:
      ``(params, *args, **named) -> (loss, grads)``: the loss is what ``loss_fn``
      returned, with a bare scalar as ``Weighted`` or ``Sum``. ``grads`` is a
      ``Weighted`` whose ``sum`` is a tree like ``params``, at least float32, and whose
      ``weight`` is that of the loss; with ``loss_reduction=SUM`` it is a ``Sum`` of
      such a tree. Merged, its ``value`` is the gradient of the merged loss.

    Raises:
      ValueError: The loss is not a floating scalar, has no reduction, is a sum of
        several means, or has weights that depend on the parameters; or a leaf of
        ``params`` is neither floating nor complex.

    Example:
      >>> import numpy as np
      >>> loss_fn = lambda w, x: Weighted.mean(w * x, np.array([1.0, 3.0]))
      >>> loss, grads = value_and_grad(loss_fn)(2.0, np.array([1.0, 2.0]))
      >>> float(loss.value), float(grads.value)
      (3.5, 1.75)
    """
    form = "loss_fn(params, batch, tower)"
    check_function("loss_fn", loss_fn, form, takes=False)
    ways = None, Reduction.SUM, Reduction.MEAN
    check_choice("loss_reduction", loss_reduction, ways)

    def run(params: PyTree, *args: Any, **named: Any) -> tuple[Any, Weighted | Sum]:
        _refuse_without_gradient(params)
        of_params = functools.partial(
            _call_of_one_mean,
            loss_fn,
            args=args,
            named=named,
            loss_reduction=loss_reduction,
        )
        out, gradient = TracedLoss.of(of_params, params).gradient(params)
        return out, gradient.returned()

    return run


def _call_of_one_mean(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    *,
    args: tuple[Any, ...],
    named: dict[str, Any],
    loss_reduction: Reduction | None,
) -> tuple[PyTree, PyTree]:
    """Call the loss function for `value_and_grad`; refuse a sum of several means.

    Returns the loss, and the function's whole result.
    """
    towers = [x for x in (*args, *named.values()) if isinstance(x, Tower)]
    # Flax lets a variable be written only in the trace that made it. So the variables
    # are rebuilt here, in this trace.
    fresh_args, fresh_named = jax.tree.map(lambda x: x, (args, named))
    returned = loss_fn(params, *fresh_args, **fresh_named)
    out = as_loss(returned, loss_reduction, towers[0] if towers else None)
    if LossSums.of(out.loss).is_of_several:
        raise ValueError(_OF_SEVERAL_MEANS)
    has_more = isinstance(as_ours(returned), TowerOutput)
    return out.loss, out if has_more else out.loss


_OF_SEVERAL_MEANS = (
    "A loss that is a sum of several means has no gradient of one tower, because each"
    " mean has its own denominator, which is added over towers. Make the loss a pass,"
    " tj.build_step(tj.of_loss(loss_fn), update_fn, strategy), use tj.build_train_step,"
    " or differentiate each mean separately."
)


def as_loss(
    returned: Any, loss_reduction: Reduction | None, tower: Tower | None
) -> TowerOutput:
    """Wrap a loss function's result in a `TowerOutput` whose loss can be merged."""
    out = as_tower_output(returned, loss_reduction, tower)
    if loss_reduction is not Reduction.SUM:
        return out
    # With SUM, the towers' losses are added and not divided, so the weight is dropped.
    return dataclasses.replace(out, loss=Sum(LossSums.of(out.loss).sums[0]))


def _refuse_without_gradient(params: PyTree) -> None:
    """Raise for leaves that can have no gradient, such as counters and keys."""
    dtypes = [
        (name, jnp.result_type(leaf)) for name, leaf in named_leaves("params", params)
    ]
    bad = [f"{n} is {x}" for n, x in dtypes if not jnp.issubdtype(x, jnp.inexact)]
    if bad:
        raise ValueError(
            "tj.value_and_grad differentiates floating and complex leaves, but"
            f" {listed(bad)}. Pass only leaves that train, and join them with the"
            " others in the loss function: nnx.split(model, nnx.Param, ...) and"
            " nnx.merge(graph, params, rest, copy=True), or eqx.partition and combine."
        )


def refusing_tangents(tower_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Make the tower function raise if it returns the tangent of a mean.

    `jax.jvp` gives the tangent of a ``Weighted`` the constant weight 0. Merged as a
    mean, its value would always be 0.
    """

    def is_mean(x: Any) -> bool:
        return isinstance(x, Weighted)

    @functools.wraps(tower_fn)
    def run(*args: PyTree) -> PyTree:
        out = tower_fn(*args)
        for path, x in jax.tree_util.tree_leaves_with_path(out, is_leaf=is_mean):
            zeros = [is_literal_zero(leaf) for leaf in jax.tree.leaves(x)]
            if is_mean(x) and zeros[-1] and not all(zeros):
                raise ValueError(
                    f"{name_by_key(path)} is a mean whose weight is the constant 0, so"
                    " its value is always 0. The tangent of a mean, such as jax.jvp"
                    " gives, has no weight. Return tj.Weighted(tangent.sum,"
                    " mean.weight)."
                )
        return out

    return run


def call_refusing_writes(
    loss_fn: LossFn, params: PyTree, rows: PyTree, tower: Tower, *merged: PyTree
) -> PyTree:
    """Call a loss function; raise if it writes into a module that it does not return.

    No later step would see such a write. ``nnx.jit`` and ``nnx.remat`` write a module
    back unchanged, which loses nothing. A second trace tells these writes from others.
    """
    leaves, treedef = jax.tree.flatten((params, tower))

    def run(leaves: list[Any]) -> tuple[Any, dict[str, Any]]:
        params, tower = jax.tree.unflatten(treedef, leaves)
        modules = {"params": params, "local": tower.local, "extra": tower.extra}
        before = _object_leaves(modules)
        returned = loss_fn(params, rows, tower, *merged)
        lost = {x: y for x, y in modules.items() if getattr(returned, x, None) is None}
        after = {x: y for x, y in _object_leaves(lost).items() if x in before}
        pairs = {x: (before[x], y) for x, y in after.items() if y is not before[x]}
        return returned, pairs

    returned, written = run(leaves)
    if written:
        trace = jax.make_jaxpr(lambda leaves: run(leaves)[1], return_shape=True)
        jaxpr, written = trace(leaves)
        forwarded = iter(forwarded_inputs(jaxpr.jaxpr, range(len(leaves))))
        same = {name: next(forwarded) == next(forwarded) for name in sorted(written)}
        _refuse_written({x: after for x, (_, after) in written.items() if not same[x]})
    return returned


def _object_leaves(trees: dict[str, PyTree]) -> dict[str, Any]:
    """Name the leaves that are attributes of objects such as modules.

    A function can change them, unlike the leaves of tuples and dicts of arrays.
    """
    return {
        leaf_name(root, path): leaf
        for root, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
    }


def _refuse_written(written: dict[str, Any]) -> None:
    """Raise if a loss function wrote into a module: no later step would see it."""
    # If keys were written, the module was reseeded, which may change counters, too.
    # Only floats are then refused.
    if any(map(is_key, written.values())):
        floats = [x for x in written if jnp.issubdtype(written[x].dtype, jnp.inexact)]
        written = {name: written[name] for name in floats}
    if written:
        raise ValueError(
            f"The loss function wrote into {listed(written)}, but a step keeps only"
            " what towers return. Split the module, such as with nnx.split(model,"
            " nnx.Param, nnx.BatchStat, nnx.RngState). Pass the parameters as params."
            " Pass statistics as local=tj.TowerLocal(...) of step.init, and return them"
            " as tj.TowerOutput(loss, local=...). Seed dropout in the loss function:"
            " nnx.reseed(model, dropout=tower.rng)."
        )
