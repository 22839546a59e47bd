"""What is the gradient of one tower? Of its loss sum, with the weight of its loss."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.mesh.private_jax import carries_gradient
from towerjax.metrics.weighted import Means, Weighted, one_mean
from towerjax.proof.equation import handed_on
from towerjax.towers.outputs import as_tower_output
from towerjax.towers.tower import Tower
from towerjax.types import PyTree, Reduction, Sum, TowerOutput, leaf_name
from towerjax.types.leaves import is_key, listed, widened


def value_and_grad(
    loss_fn: Callable[..., Any], *, loss_reduction: Reduction | None = None
) -> Callable[..., tuple[Any, Weighted | Sum]]:
    """A tower's loss with its gradient, which merge over towers as they stand.

    The sum is differentiated, and nothing is divided: the gradient of the one loss of
    all towers is the towers' gradients added, over their weights added.

    A sum of means (``ce + 0.1 * aux``) has several denominators, and towers learn of
    each other's before they differentiate: the step then runs the loss once more for
    the weights alone, of which the compiler keeps little, and sums a few numbers more.

    Weights that depend on the parameters are refused: what is differentiated is the
    sum. ``jax.lax.stop_gradient`` says that they are numbers.

    Args:
      loss_fn: ``(params, *args) -> Weighted | Means | TowerOutput``, such as a
        `LossFn`; of several means one of ``args`` is the `Tower`.
      loss_reduction: What a bare scalar loss means: SUM is the total over towers and
        micro-batches, MEAN the mean of their values; None refuses it.

    Returns:
      ``(params, *args, **named) -> (loss, grads)``: the loss as it is, a scalar as what
      it means, or where the function returned one a ``TowerOutput``; ``grads`` a
      ``Weighted`` whose ``sum`` is like ``params``, at least float32, and whose
      ``weight`` is the loss's; of several means, or with ``loss_reduction=SUM``, a
      ``Sum`` of such. Both have the gradient of the merged loss as their ``value``.

    Raises:
      ValueError: The loss is no floating scalar, does not say how it is reduced, or
        has weights that depend on the parameters.

    Example:
      >>> import numpy as np
      >>> loss_fn = lambda w, x: Weighted.mean(w * x, np.array([1.0, 3.0]))
      >>> loss, grads = value_and_grad(loss_fn)(2.0, np.array([1.0, 2.0]))
      >>> float(loss.value), float(grads.value)
      (3.5, 1.75)
    """

    def run(params: PyTree, *args: Any, **named: Any) -> tuple[Any, Weighted | Sum]:
        given_to = (*args, *named.values())
        tower = next((x for x in given_to if isinstance(x, Tower)), None)

        def of_sums(params: PyTree) -> tuple[jax.Array, Any]:
            # Made anew: Flax lets its variables be written in the trace that made them.
            here, also = jax.tree.map(lambda x: x, (args, named))
            returned = loss_fn(params, *here, **also)
            out = as_tower_output(returned, loss_reduction, tower)
            refuse_moving_weights(out.loss, params)
            total, weight = _total(out.loss, tower)
            if loss_reduction is Reduction.SUM:  # added up, and divided by nothing
                out, weight = dataclasses.replace(out, loss=Sum(total)), None
            given = out if isinstance(returned, TowerOutput) else out.loss
            return total, (given, weight)

        grads, (given, weight) = jax.grad(of_sums, has_aux=True)(params)
        if tower is not None and tower.note_weights and isinstance(weight, list):
            tower.note_weights(weight)
            return given, Sum(jax.tree.map(_unknown, params))
        grads = jax.tree.map(lambda g: g.astype(widened(g.dtype)), grads)
        return given, Sum(grads) if weight is None else Weighted(grads, weight)

    return run


def _unknown(x: Any) -> jax.Array:
    """A gradient that nobody knows yet; weights that are made of it are not finite."""
    return jnp.full(jnp.shape(x), jnp.nan, widened(jnp.result_type(x)))


def refuse_moving_weights(loss: Any, params: PyTree) -> None:
    """Raise where a weight moves with the parameters: sums alone are differentiated."""
    terms = loss.terms if isinstance(loss, Means) else (loss,)
    weights = [term.weight for term in terms if isinstance(term, Weighted)]
    pairs = itertools.product(weights, jax.tree.leaves(params))
    if any(carries_gradient(weight, leaf) for weight, leaf in pairs):
        raise ValueError(
            "The weights of the loss depend on the parameters, and a mean's gradient"
            " is taken with weights that stay. Say so, weight ="
            " jax.lax.stop_gradient(weight); or, where weights learn too, give the"
            " mean in a second pass of tj.build_step: with mean, that of the first,"
            " tj.Weighted(loss.sum - mean * loss.weight,"
            " jax.lax.stop_gradient(loss.weight))."
        )


def unwritten(
    loss_fn: Callable[..., Any], params: PyTree, rows: PyTree, tower: Tower
) -> Any:
    """What a loss function returns that writes into no module which it does not return.

    No next step would see it. ``nnx.jit`` and ``nnx.remat`` put back what they were
    given, which is nothing: where something is written, one more trace tells.
    """
    leaves, treedef = jax.tree.flatten((params, tower))

    def run(leaves: list[Any]) -> tuple[Any, dict[str, Any]]:
        params, tower = jax.tree.unflatten(treedef, leaves)
        given = {"params": params, "local": tower.local, "extra": tower.extra}
        before, returned = _attributes(given), loss_fn(params, rows, tower)
        lost = {x: y for x, y in given.items() if getattr(returned, x, None) is None}
        after = {x: y for x, y in _attributes(lost).items() if x in before}
        pairs = {x: (before[x], y) for x, y in after.items() if y is not before[x]}
        return returned, pairs

    returned, written = run(leaves)
    if written:
        trace = jax.make_jaxpr(lambda leaves: run(leaves)[1], return_shape=True)
        jaxpr, written = trace(leaves)
        found = iter(handed_on(jaxpr.jaxpr, range(len(leaves))))
        same = {name: next(found) == next(found) for name in sorted(written)}
        _refuse_written({x: after for x, (_, after) in written.items() if not same[x]})
    return returned


def _attributes(trees: dict[str, PyTree]) -> dict[str, Any]:
    """The leaves that objects hold, by name: a function can write into those."""
    return {
        leaf_name(root, path): leaf
        for root, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
    }


def _refuse_written(written: dict[str, Any]) -> None:
    """Raise where a loss function wrote into a module what no next step would see."""
    if any(map(is_key, written.values())):  # seeded anew: its counter goes with it
        floats = [x for x in written if jnp.issubdtype(written[x].dtype, jnp.inexact)]
        written = {name: written[name] for name in floats}
    if written:
        raise ValueError(
            f"The loss function wrote into {listed(list(written))}, and what it writes"
            " is lost: a step changes what towers return. Split the module, for"
            " flax.nnx nnx.split(model, nnx.Param, nnx.BatchStat, nnx.RngState): the"
            " parameters alone are params; statistics are local=tj.TowerLocal(...) of"
            " step.init and are returned, tj.TowerOutput(loss, local=...); dropout is"
            " seeded in the loss, nnx.reseed(model, dropout=tower.rng). What only the"
            " loss reads is written into a copy, jax.tree.map(lambda x: x, params)."
        )


def _total(loss: Any, tower: Tower | None) -> tuple[Any, Any]:
    """What of one tower is differentiated, and what the sum of it is divided by."""
    if (one := one_mean(loss)) is not None:
        return one.sum, one.weight
    if tower is None:
        raise ValueError(
            "tj.value_and_grad of a sum of several means learns of all towers' weights"
            " by the tower. Pass it with the other arguments, and do not close over it:"
            " tj.value_and_grad(loss_fn)(params, batch, tower)."
        )
    if tower.note_weights:
        return jnp.zeros(()), [term.weight for term in loss.terms]  # to be added up
    return part_of(loss, *tower.weights_of_all()), None


def part_of(loss: Means, weights: list[Any], parts: int) -> jax.Array:
    """What one of so many parts adds to a loss, of terms with these denominators."""
    means = [Weighted(t.sum, w).value for t, w in zip(loss.terms, weights, strict=True)]
    return sum(means, jnp.asarray(loss.shared / parts))
