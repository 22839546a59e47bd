"""The gradient of one tower: of its loss's sum, with the loss's weight beside it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from towerjax.collectives.lookups import vjp
from towerjax.collectives.sparse_rows import map_values
from towerjax.mesh.private_jax import carries_gradient, is_literal_zero
from towerjax.metrics.weighted import Means, Weighted, one_mean
from towerjax.proof import tags
from towerjax.proof.equation import forwarded_inputs
from towerjax.towers.outputs import as_tower_output
from towerjax.towers.tower import Tower, context_of
from towerjax.types import (
    LossFn,
    PyTree,
    Reduction,
    Sum,
    TowerOutput,
    leaf_name,
    name_by_key,
    named_leaves,
)
from towerjax.types.leaves import is_key, listed, widen_dtype
from towerjax.types.options import check_choice, check_function


def value_and_grad(
    loss_fn: Callable[..., PyTree], *, loss_reduction: Reduction | None = None
) -> Callable[..., tuple[PyTree, Weighted | Sum]]:
    """A tower's loss with its gradient, which merge over towers exactly.

    The sum is differentiated, and nothing is divided: the gradient of the global loss
    is the sum of the towers' gradients over the sum of their weights.

    For a sum of means (``ce + 0.1 * aux``) the step first runs the loss for the weights
    alone, most of which the compiler prunes, and sums a few numbers more.

    Args:
      loss_fn: ``(params, *args) -> Weighted | Means | TowerOutput``, such as a
        `LossFn`; of several means one of ``args`` is the `Tower`.
      loss_reduction: What a bare scalar loss means: SUM is the total over towers and
        micro-batches, MEAN the mean of their values; None refuses it.

    Returns:
      ``(params, *args, **named) -> (loss, grads)``: the loss, a bare scalar made a
      ``Weighted`` or ``Sum``, or the ``TowerOutput`` with it; ``grads`` is a
      ``Weighted`` whose ``sum`` is like ``params``, at least float32, and whose
      ``weight`` is the loss's; of several means, or with ``loss_reduction=SUM``, a
      ``Sum`` of such. Merged, its ``value`` is the gradient of the merged loss.

    Raises:
      ValueError: The loss is no floating scalar, does not say how it is reduced, or
        has weights that depend on the parameters; or a leaf of ``params`` is neither
        floating nor complex.

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
        given_to = (*args, *named.values())
        tower = next((x for x in given_to if isinstance(x, Tower)), None)
        forward = tower is not None and not context_of(tower).differentiates

        def of_sums(params: PyTree) -> tuple[jax.Array, Any]:
            # Flax lets variables be written only in the trace that made them.
            fresh, fresh_named = jax.tree.map(lambda x: x, (args, named))
            returned = loss_fn(params, *fresh, **fresh_named)
            out = as_tower_output(returned, loss_reduction, tower)
            if not forward:
                refuse_moving_weights(out.loss, params)
                _refuse_no_gradient(out.loss, params)
            total, weight = _total_and_weight(out.loss, tower)
            if loss_reduction is Reduction.SUM:  # added up, and divided by nothing
                out, weight = dataclasses.replace(out, loss=Sum(total)), None
            given = out if isinstance(returned, TowerOutput) else out.loss
            return total, (given, weight)

        if forward:
            given = of_sums(params)[1][0]
            return given, Sum(jax.tree.map(jnp.zeros_like, params))
        total, pull_back, (given, weight) = vjp(of_sums, params)
        grads = pull_back(jnp.ones_like(total))
        if isinstance(weight, list) and (note := _note_of(tower)) is not None:
            note(weight)
            return given, Sum(map_values(_nan_gradient, grads))
        grads = map_values(lambda g: g.astype(widen_dtype(g.dtype)), grads)
        if weight is None:
            return given, Sum(grads)
        return given, Weighted(grads, jnp.asarray(weight))

    return run


def _refuse_without_gradient(params: PyTree) -> None:
    """Raise by name for leaves that have no gradient, such as counters and keys."""
    dtypes = [
        (name, jnp.result_type(leaf)) for name, leaf in named_leaves("params", params)
    ]
    bad = [f"{n} is {x}" for n, x in dtypes if not jnp.issubdtype(x, jnp.inexact)]
    if bad:
        raise ValueError(
            "tj.value_and_grad differentiates floating and complex leaves, but"
            f" {listed(bad)}. Pass those alone, and put the others together with them"
            " in the loss function: nnx.split(model, nnx.Param, ...) and"
            " nnx.merge(graph, params, rest, copy=True), or eqx.partition and combine."
        )


def refusing_tangents(tower_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The function; raises where it returns a mean's tangent, whose weight is 0."""

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
                    " that its value is always 0. The tangent of a mean, as of jax.jvp,"
                    " has no weight: return tj.Weighted(tangent.sum, mean.weight)."
                )
        return out

    return run


def _nan_gradient(x: Any) -> jax.Array:
    """The gradient in a pass for weights: NaN, and named, so that a use is seen."""
    nan = jnp.full(jnp.shape(x), jnp.nan, widen_dtype(jnp.result_type(x)))
    return checkpoint_name(nan, tags.UNKNOWN_GRADIENT)


def refuse_moving_weights(loss: Any, params: PyTree) -> None:
    """Raise if a weight depends on the parameters: sums alone are differentiated."""
    terms = loss.terms if isinstance(loss, Means) else (loss,)
    weights = [term.weight for term in terms if isinstance(term, Weighted)]
    pairs = itertools.product(weights, jax.tree.leaves(params))
    if any(carries_gradient(weight, leaf) for weight, leaf in pairs):
        raise ValueError(
            "The weights of the loss depend on the parameters, and a mean's gradient"
            " is taken with weights that stay. Write tj.Weighted.mean(losses,"
            " jax.lax.stop_gradient(weight)); where weights learn too, differentiate"
            " in a second pass of tj.build_step tj.Weighted(loss.sum - mean *"
            " loss.weight, jax.lax.stop_gradient(loss.weight)), of the first's mean."
        )


def _refuse_no_gradient(loss: Any, params: PyTree) -> None:
    """Raise if the loss depends on no parameter, so that every gradient would be 0."""
    sums = (
        [t.sum for t in loss.terms] + [loss.penalty]
        if isinstance(loss, Means)
        else [loss.sum]
    )
    pairs = [*itertools.product(sums, jax.tree.leaves(params))]
    if pairs and not any(carries_gradient(x, leaf) for x, leaf in pairs):
        raise ValueError(
            "The loss depends on no parameter, so that every gradient is 0. Call the"
            " model with the params that the loss function is given, and not with those"
            " that it closes over; a count of hits (argmax, >, rounding) and"
            " jax.lax.stop_gradient have no gradient. Where none is meant, add 0 *"
            " a parameter."
        )


def call_refusing_writes(
    loss_fn: LossFn, params: PyTree, rows: PyTree, tower: Tower
) -> PyTree:
    """What a loss function returns; refuses writes into modules it does not return.

    No later step would see such a write. ``nnx.jit`` and ``nnx.remat`` write a module
    back unchanged, which loses nothing: a second trace tells these writes from others.
    """
    leaves, treedef = jax.tree.flatten((params, tower))

    def run(leaves: list[Any]) -> tuple[Any, dict[str, Any]]:
        params, tower = jax.tree.unflatten(treedef, leaves)
        given = {"params": params, "local": tower.local, "extra": tower.extra}
        before, returned = _object_leaves(given), loss_fn(params, rows, tower)
        lost = {x: y for x, y in given.items() if getattr(returned, x, None) is None}
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
    """By name the leaves that are attributes of objects, which a function can write."""
    return {
        leaf_name(root, path): leaf
        for root, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
    }


def _refuse_written(written: dict[str, Any]) -> None:
    """Raise if a loss function wrote into a module what no later step would see."""
    if any(map(is_key, written.values())):  # a reseeded module: counters may change
        floats = [x for x in written if jnp.issubdtype(written[x].dtype, jnp.inexact)]
        written = {name: written[name] for name in floats}
    if written:
        raise ValueError(
            f"The loss function wrote into {listed(written)}, and what it writes is"
            " lost: a step changes what towers return. Split the module, such as"
            " nnx.split(model, nnx.Param, nnx.BatchStat, nnx.RngState): params are"
            " the parameters alone; statistics are local=tj.TowerLocal(...) of"
            " step.init, and returned, tj.TowerOutput(loss, local=...); dropout is"
            " seeded in the loss, nnx.reseed(model, dropout=tower.rng)."
        )


def _total_and_weight(loss: Any, tower: Tower | None) -> tuple[Any, Any]:
    """``(total, weight)``: what one tower differentiates, and its denominator."""
    if (mean := one_mean(loss)) is not None:
        return mean.sum, mean.weight
    if tower is None:
        raise ValueError(
            "tj.value_and_grad of a sum of several means needs the tower, for all"
            " towers' weights. Pass it as an argument, and do not close over it:"
            " tj.value_and_grad(loss_fn)(params, batch, tower)."
        )
    if _note_of(tower) is not None:
        return jnp.zeros(()), [term.weight for term in loss.terms]
    weights = context_of(tower).denominators.of_all()
    return part_of(loss, weights, tower.micro_batches * tower.num_towers), None


def _note_of(tower: Tower | None) -> Callable[[list[Any]], None] | None:
    """What takes a tower's denominators, in the pass that adds them up."""
    return None if tower is None else context_of(tower).denominators.note


def part_of(loss: Means, weights: list[Any], parts: int) -> jax.Array:
    """One part's share of a sum of means whose global denominators are ``weights``."""
    means = [Weighted(t.sum, w).value for t, w in zip(loss.terms, weights, strict=True)]
    return sum(means, jnp.asarray(loss.penalty / parts))
