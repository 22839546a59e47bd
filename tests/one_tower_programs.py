"""Programs of one tower of a loss, and what the proof answers about them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import towerjax as tj
from towerjax.mesh.placement import TOWER_AXIS, TowerAxes
from towerjax.metrics.state import is_metric
from towerjax.metrics.weighted import Means
from towerjax.proof.equal.one_tower import (
    Given,
    Merge,
    MergedLeaf,
    TowerProgram,
    equal_to_one_tower,
    has_own_derivatives,
)
from towerjax.step.state.train_state import TrainState
from towerjax.towers.tower import tower_of

NUMBERS = 1, 2, 4
PADDED_ROWS = {1: 5, 2: 6, 4: 4}  # in all, in no proportion to the numbers of towers


def rows_of(towers, padded, each=12):
    """The rows of one of so many towers."""
    return each * (PADDED_ROWS[towers] if padded else NUMBERS[-1]) // towers


def program_of(fn, params, batch, towers, rows, of_rows=None):
    """One tower's program of ``fn(params, rows, tower) -> leaves``, and its leaves."""
    axes = TowerAxes(towers, 1, True, False, "cpu", as_one=True)
    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    seen = []

    def run(params, key, step, batch, valid):
        state = TrainState(step, params, (), {}, key)
        tower_id = lax.convert_element_type(lax.axis_index(TOWER_AXIS), jnp.int32)
        told = {"rows": rows, "num_valid": valid, "of_rows": of_rows}
        tower = tower_of(strategy, axes, tower_id, state, **told)
        out, leaves = fn(params, batch, tower)
        seen[:] = leaves
        return out

    def of_tower(x):
        return jax.ShapeDtypeStruct((rows, *np.shape(x)[1:]), jnp.result_type(x))

    key = jax.eval_shape(lambda: jax.random.key(0))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    own = jax.tree.map(of_tower, batch)
    args = params, key, number, own, number
    closed = jax.make_jaxpr(run, axis_env=[(TOWER_AXIS, towers)])(*args)
    kinds = [Given.REPLICATED] * (len(jax.tree.leaves(params)) + 2)
    kinds += [Given.ROWS] * len(jax.tree.leaves(batch)) + [Given.VALID]
    return TowerProgram(closed, towers, rows), kinds, list(seen)


def merged_leaves(out):
    """Arrays that a tower returns, and how each is merged."""
    arrays = []
    leaves = []

    def add(x, name, merge, weight=None):
        arrays.append(jnp.asarray(x))
        leaves.append(MergedLeaf(name, merge, weight))
        return len(leaves) - 1

    def add_mean(name, mean):
        weight = add(mean.weight, f"weight of {name}", Merge.PER_TOWER)
        for path, x in jax.tree_util.tree_leaves_with_path(mean.sum):
            add(x, name + jax.tree_util.keystr(path), Merge.MEAN, weight)

    def add_any(name, x):
        if isinstance(x, Means):
            for i, term in enumerate(x.terms):
                add_mean(f"{name} {i}", term)
            add(x.penalty, f"{name}'s penalty", Merge.REPLICATED)
        elif isinstance(x, tj.Weighted):
            add_mean(name, x)
        elif isinstance(x, tj.TowerOutput):
            add_any("loss", x.loss)
            for key, metric in x.metrics.items():
                add_any(key, metric)
        elif isinstance(x, tj.Sum | tj.Rows):
            merge = Merge.SUM if isinstance(x, tj.Sum) else Merge.ROWS
            add(x.value, name, merge)
        elif isinstance(x, dict):
            for key, value in x.items():
                add_any(key, value)
        elif is_metric(x):
            for leaf in jax.tree.leaves(x):
                add(leaf, name, Merge.SUM)
        else:
            add(x, name, Merge.REPLICATED)

    add_any("loss", out)
    return arrays, leaves


def of_loss(loss_fn):
    """What a tower returns of a loss."""
    return lambda params, batch, tower: merged_leaves(loss_fn(params, batch, tower))


def of_gradient(loss_fn):
    """The same with the gradients of all that is added up and divided."""

    def fn(params, batch, tower):
        seen = []

        def sums(params):
            arrays, seen[:] = merged_leaves(loss_fn(params, batch, tower))
            return [
                x for x, leaf in zip(arrays, seen, strict=True) if is_sum(leaf)
            ], arrays

        def is_sum(leaf):
            return leaf.merge is Merge.MEAN and leaf.name.startswith("loss")

        totals, pull, arrays = jax.vjp(sums, params, has_aux=True)
        leaves = list(seen)
        at = [i for i, leaf in enumerate(leaves) if is_sum(leaf)]
        for number, i in enumerate(at):
            ones = [jnp.ones_like(x) * (k == number) for k, x in enumerate(totals)]
            for path, x in jax.tree_util.tree_leaves_with_path(pull(ones)[0]):
                name = f"grads {number}{jax.tree_util.keystr(path)}"
                arrays = [*arrays, x]
                leaves.append(MergedLeaf(name, Merge.MEAN, leaves[i].weight))
        return arrays, leaves

    return fn


def equalities(fn, params, batch, *, padded=False, symbolic=False):
    """The proof's answers for ``fn(params, rows, tower) -> (arrays, leaves)``."""
    programs = []
    for towers in NUMBERS:
        rows = rows_of(towers, padded)
        if symbolic:
            (rows,) = SYMBOL
        traced = program_of(fn, params, batch, towers, rows, None if symbolic else rows)
        programs.append(traced)
    found = [program for program, _, _ in programs]
    _, inputs, leaves = programs[0]
    return equal_to_one_tower(found, inputs, leaves, axes=[TOWER_AXIS], padded=padded)


def answer_for(loss_fn, params, batch, **options):
    """The worst answer for a loss, with its gradient where a rule says what that is."""
    found = equalities(of_loss(loss_fn), params, batch, **options)
    rows = rows_of(1, False)
    program, _, _ = program_of(of_loss(loss_fn), params, batch, 1, rows)
    if has_own_derivatives(program.jaxpr):
        found += equalities(of_gradient(loss_fn), params, batch, **options)
    return worst(found)


SYMBOL = jax.export.symbolic_shape("n")


def worst(found):
    """The worst of some answers."""
    order = ["refuted", "unknown", "proved"]
    return min(found, key=lambda x: order.index(x.says))
