"""Programs of one tower, what the proof answers about them, and what they give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl

import towerjax as tj
from towerjax.check.equality.of_step import equalities_of
from towerjax.check.equality.traced_passes import StepToProve
from towerjax.jaxprs.tags import TOWER_AXIS
from towerjax.mesh.placement import TowerAxes
from towerjax.metrics.weighted import Means
from towerjax.prover.equality.one_tower import (
    Given,
    Merge,
    MergedLeaf,
    TowerProgram,
    equal_to_one_tower,
)
from towerjax.prover.equality.walk.own_derivatives import has_own_derivatives
from towerjax.towers.row_free_keys import ALL_TOWERS
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
        state = tj.TrainState(step, params, (), {}, key)
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
        elif tj.metrics.is_metric(x):
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


def equalities(fn, params, batch, **options):
    """The proof's answers for ``fn(params, rows, tower) -> (arrays, leaves)``."""
    return proved(fn, params, batch, **options)[0]


def proved(fn, params, batch, *, padded=False):
    """The same, with the programs that were compared."""
    programs = []
    for towers in NUMBERS:
        rows = rows_of(towers, padded)
        programs.append(program_of(fn, params, batch, towers, rows, rows))
    found = [program for program, _, _ in programs]
    _, inputs, leaves = programs[0]
    how = {"axes": [TOWER_AXIS], "padded": padded}
    return equal_to_one_tower(found, inputs, leaves, **how), found


def answer_for(loss_fn, params, batch, **options):
    """The worst answer for a loss, with its gradient where a rule says what that is."""
    found, programs = proved(of_loss(loss_fn), params, batch, **options)
    if has_own_rules(programs[0]):
        found += equalities(of_gradient(loss_fn), params, batch, **options)
    return worst(found)


def answers_of_step(step, state, batch, rows=None):
    """The proof's answers for the leaves that a step merges; nothing is compiled.

    ``rows`` are those of a tower in one call, if the batch's leaves do not say so.
    """
    plan, state = step.to_audit(state)
    rows = rows or len(jax.tree.leaves(batch)[0]) // step.num_calls
    given = plan, step.strategy, state, batch, rows
    return equalities_of(StepToProve(*given, padded=step.placer.may_pad))


def has_own_rules(program):
    """Whether a rule of the user says what a derivative of the program is."""
    return has_own_derivatives(program.jaxpr)


def worst(found):
    """The worst of some answers."""
    order = ["refuted", "unknown", "proved"]
    return min(found, key=lambda x: order.index(x.says))


def leaves_of(d, made, batch, tower):
    """The last values as leaves, each merged in ways that its shape allows."""
    d.rng = np.random.default_rng([999, d.below(10**6)])
    rows = d.value("rows")
    weight = tower.weight.astype(rows.dtype)
    weights = [weight.sum(), jnp.float64(1.0), jnp.float64(tower.rows)]
    weights += [(jnp.abs(rows) * weight).sum(), d.value("number")]
    arrays = [*weights]
    leaves = [MergedLeaf("weight", Merge.PER_TOWER)] * len(weights)
    for number, x in enumerate(made):
        if x.shape[:1] == (tower.rows,):
            arrays.append(x)
            leaves.append(MergedLeaf(f"rows {number}", Merge.ROWS))
            shape = (-1,) + (1,) * (x.ndim - 1)
            x = d.of(x, x * weight.reshape(shape)).sum(0)
        arrays += [x] * (2 + len(weights))
        leaves.append(MergedLeaf(f"sum {number}", Merge.SUM))
        leaves.append(MergedLeaf(f"same {number}", Merge.REPLICATED))
        for i in range(len(weights)):
            leaves.append(MergedLeaf(f"mean {number} by {i}", Merge.MEAN, i))
    return arrays, leaves


def key_of_rows(rows):
    """A key of which ``tower.rng`` draws the same for each row, and each tower its own.

    What all towers share is an ordinary key.
    """
    key = np.array([7, 0, 0], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(key), impl=_impl_of_rows(rows))


@functools.cache
def _impl_of_rows(rows):
    """Data are a word, who draws, and whose key it is.

    0 is a tower's, 1 that of all towers, and 2 one of the keys of a tower's rows.
    """

    def ordinary(key):
        word = jax.random.wrap_key_data(key[:2], impl="threefry2x32")
        return jax.random.fold_in(word, key[2])

    def fold_in(key, number):
        number = jnp.asarray(number).astype(jnp.uint32)
        is_shared = key[2] | (number == jnp.uint32(ALL_TOWERS)).astype(jnp.uint32)
        return jnp.stack([key[0], key[1] * 31 + number + 1, is_shared])

    def split(key, shape):
        alike = key.at[1].set(0)
        words = jax.random.bits(ordinary(alike), shape, jnp.uint32)
        is_of_rows = (key[2] == 0) & (rows in shape)
        same = jnp.broadcast_to(jax.random.bits(ordinary(alike), (), jnp.uint32), shape)
        words = jnp.where(is_of_rows, same, words)
        rest = jnp.stack([key[1], jnp.where(is_of_rows, jnp.uint32(2), key[2])])
        rest = jnp.broadcast_to(rest, (*shape, 2))
        return jnp.concatenate([words[..., None], rest], axis=-1)

    def random_bits(key, width, shape):
        dtype = jnp.dtype(f"uint{width}")
        drawn = jax.random.bits(ordinary(key), shape, dtype)
        alike = ordinary(key.at[1].set(0))
        each = jnp.broadcast_to(jax.random.bits(alike, (), dtype), shape)
        is_of_rows = (key[2] == 2) | ((key[2] == 0) & (rows in shape))
        return jnp.where(is_of_rows, each, drawn)

    how = {"seed": lambda seed: jnp.zeros(3, jnp.uint32), "split": split}
    how |= {"random_bits": random_bits, "fold_in": fold_in}
    name = f"rows{rows}"
    return define_prng_impl(key_shape=(3,), name=name, tag=name, **how)


def run_on_towers(fn, params, batch, towers, rows, valid, wanted, seen=None):
    """The merged leaves of these numbers, and a derivative of each, under vmap.

    ``seen`` is filled with all leaves of the function.
    """
    seen = [] if seen is None else seen
    axes = TowerAxes(towers, 1, True, False, "cpu", as_one=True)
    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    key = key_of_rows(rows)
    batch = jax.tree.map(jnp.asarray, batch)

    def of_tower(params, own, valid):
        state = tj.TrainState(jnp.int32(0), params, (), {}, key)
        number = lax.axis_index(TOWER_AXIS).astype(jnp.int32)
        tower = tower_of(
            strategy, axes, number, state, rows=rows, num_valid=valid, of_rows=rows
        )
        arrays, seen[:] = fn(params, own, tower)
        return arrays

    def merged(params):
        own = jax.vmap(of_tower, (None, 0, 0), axis_name=TOWER_AXIS, axis_size=towers)
        arrays = own(params, batch, valid)
        return [merge_of(seen[i], arrays, i, valid) for i in wanted]

    def looked_at(params):
        values, pull = jax.vjp(merged, params)
        ones = [jnp.cos(jnp.arange(x.size) * 1.0).reshape(x.shape) for x in values]
        grads = []
        for i in range(len(values)):
            cotangents = [x * (i == k) for k, x in enumerate(ones)]
            grads.append(pull(cotangents)[0])
        return values, grads

    return jax.device_get(jax.jit(looked_at)(params))


def merge_of(leaf, arrays, number, valid):
    """The towers' values ``[T, ...]`` of a leaf as one; NaN where they should agree."""
    x = arrays[number]
    if leaf.merge is Merge.ROWS:
        kept = np.arange(x.shape[1]) < np.asarray(valid)[:, None]
        return x[np.nonzero(kept)]
    if leaf.merge is Merge.SUM:
        return x.sum(0)
    if leaf.merge is Merge.MEAN:
        return x.sum(0) / arrays[leaf.weight].sum(0)
    off = jnp.abs(lax.stop_gradient(x - x[:1])).max() > 1e-6 * (1e-9 + jnp.abs(x).max())
    return x[0] + jnp.where(off, 1e3 * len(x), 0.0)
