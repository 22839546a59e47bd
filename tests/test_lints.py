"""Where rows of one tower meet what is computed of them, a step warns, and names it."""

import collections
import itertools
import re
import warnings

import audited_losses
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Literal
from layouts import cases

import towerjax as tj
from towerjax.contrib import LocalSGD
from towerjax.layers.batch_norm.linen import TowerBatchNorm
from towerjax.proof import lints

R = tj.Reduction
B, T, F = 12, 3, 5  # rows, steps of time, features


class Meets:
    def advantages(x, y, w, tower):
        return x[:, 0] @ w * ((y - y.mean()) / (y.std() + 1e-6))

    def baseline(x, y, w, tower):
        return (x[:, 0] @ w) * (y - lax.stop_gradient(y.sum() / len(y)))

    def deviations(x, y, w, tower):
        flat = x.reshape(-1, F)
        centred = flat - flat.mean(0)[None]
        return (centred.reshape(-1, T, F) @ w).mean(1)

    def batch_norm(x, y, w, tower):
        norm = nn.BatchNorm(use_running_average=False)
        return norm.init_with_output(jax.random.key(0), x[:, 0])[0] @ w

    def negatives(x, y, w, tower):
        scores = jnp.einsum("if,jf->ij", x[:, 0] * w[None], x[:, 1])
        return jax.nn.logsumexp(scores, axis=1) - jnp.diagonal(scores)

    def ascent(x, y, w, tower):
        up = jax.grad(lambda w: (x[:, 0] @ w).sum() ** 2)(w)
        return x[:, 1] @ (w + 0.1 * up)

    def whitened(x, y, w, tower):
        x = x[:, 0]
        return x @ jnp.linalg.inv(x.T @ x + jnp.eye(F)) @ w

    def over_time(x, y, w, tower):
        def over_time(hidden, x):
            hidden = jnp.tanh(hidden + x @ w)
            return hidden - hidden.mean(), hidden

        return lax.scan(over_time, jnp.zeros_like(y), x.swapaxes(0, 1))[0]

    def in_other_functions(x, y, w, tower):
        @jax.checkpoint
        def in_other_functions(x):
            return x - jax.jit(jnp.mean)(x)

        return lax.cond(w[0] > 5, jnp.zeros_like, in_other_functions, x[:, 0] @ w)

    def weighed_by_a_softmax(x, y, w, tower):
        return (x[:, 0] @ w) * lax.stop_gradient(jax.nn.softmax(y))

    def deviation_by_steps(x, y, w, tower):
        def deviation_by_steps(x):
            x = x - x.mean(0, keepdims=True)
            return jnp.sqrt((x**2).mean(0) + 1e-8)

        return deviation(x * w[None, None], deviation_by_steps)

    def deviation_at_once(x, y, w, tower):
        def deviation_at_once(x):
            return x.std(0)

        return deviation(x * w[None, None], deviation_at_once)

    def balanced_by_counts(x, y, w, tower):
        label = jnp.clip(y.astype(int), 0, 2)
        counts = jax.nn.one_hot(label, 3).sum(0)
        return x[:, 0] @ w / jnp.maximum(counts, 1.0)[label]

    def total_for_another_language(x, y, w, tower):
        shape = jax.ShapeDtypeStruct((), y.dtype)
        return x[:, 0] @ w * jax.ffi.ffi_call("towerjax_test", shape)(y.sum())

    def smoothed(x, y, w, tower):
        def smoothed(carry, x):
            carry = 0.9 * carry + x
            return carry, carry

        return lax.scan(smoothed, 0.0, x[:, 0] @ w)[1]

    def less_the_row_before(x, y, w, tower):
        def less_the_row_before(before, x):
            return x, jnp.tanh(x * w).sum() - before.sum()

        return lax.scan(less_the_row_before, jnp.zeros(F), x[:, 0])[1]

    def smoothed_by_index(x, y, w, tower):
        def smoothed_by_index(i, carry):
            last, every = carry
            last = 0.9 * last + x[i, 0] @ w
            return last, every.at[i].set(last)

        return lax.fori_loop(0, len(y), smoothed_by_index, (0.0, jnp.zeros_like(y)))[1]

    def smoothed_while(x, y, w, tower):
        def smoothed_while(carry):
            i, last, every = carry
            last = 0.9 * last + y[i]
            return i + 1, last, every.at[i].set(last)

        start = 0, 0.0, jnp.zeros_like(y)
        *_, every = lax.while_loop(lambda c: c[0] < len(y), smoothed_while, start)
        return every * (x[:, 0] @ w)

    def stacked(x, y, w, tower):
        both = jnp.stack([y, x[:, 0] @ w], axis=1)
        return (both - both.mean(0)[None]).sum(1)


def deviation(x, of):
    """A feature for each row: how far rows of its group differ, as in StyleGAN2."""
    groups = x[:, 0].reshape(2, -1, F)
    return x[:, 0].sum(1) + jnp.tile(of(groups).mean(1), 2)


class Apart:
    def sums_and_each_row_in_a_loop(x, y, w, tower):
        def body(carry, x):
            loss = jnp.tanh(x @ w)
            return carry + loss, loss

        total, losses = lax.scan(body, 0.0, x[:, 0])
        chunks, more = lax.scan(
            lambda carry, x: (carry + (x @ w).sum(), x @ w), 0.0, x.reshape(3, -1, T, F)
        )
        return losses + more.reshape(-1, T).sum(1)

    def each_row_by_index(x, y, w, tower):
        def body(i, carry):
            key, total, losses = carry
            key, own = jax.random.split(key)
            loss = jnp.tanh(x[i, 0] @ w) * jax.random.normal(own)
            return key, total + loss, losses.at[i].set(loss)

        return lax.fori_loop(0, len(y), body, (tower.rng, 0.0, jnp.zeros_like(y)))[2]

    def over_time_by_index(x, y, w, tower):
        def body(i, carry):
            hidden, every = carry
            hidden = jnp.tanh(hidden + x[:, i] @ w)
            return hidden, every.at[:, i].set(hidden)

        start = jnp.zeros_like(y), jnp.zeros((len(y), T))
        return lax.fori_loop(0, T, body, start)[1].sum(1)

    def over_time_of_each_row(x, y, w, tower):
        def of_row(x):
            def body(hidden, x):
                hidden = jnp.tanh(hidden + x @ w)
                return hidden, hidden

            return lax.scan(body, 0.0, x)[1].sum()

        return jax.vmap(of_row)(x) + lax.map(of_row, x)

    def over_layers(x, y, w, tower):
        def body(hidden, w):
            hidden = jnp.tanh(hidden * w[None])
            return hidden, hidden.mean(1)

        hidden, each = lax.scan(body, x[:, 0], jnp.stack([w, w]))
        return hidden.sum(1) + each.sum(0)

    def of_neighbours(x, y, w, tower):
        group = y.reshape(-1, 3)
        other = group.T - group.T.mean(0, keepdims=True)
        own = group - group.mean(1, keepdims=True)
        return x[:, 0] @ w * (own + other.T).reshape(-1)

    def views_of_a_row(x, y, w, tower):
        views = jnp.concatenate([x[:, 0], x[:, 1]]).reshape(2, -1, F)
        return ((views * w[None, None] - views.mean(0, keepdims=True)) ** 2).sum((0, 2))

    def of_a_group(x, y, w, tower):
        group = y.reshape(-1, len(y) // (1 + (len(y) > 5)))
        return (x[:, 0] @ w) * (group - group.mean(1)[:, None]).ravel()

    def printed(x, y, w, tower):
        jax.debug.print("{}", y)
        return x[:, 0] @ w

    def stacked_rows(x, y, w, tower):
        both = jnp.stack([x[:, 0], x[:, 1]], axis=2)
        first, second = jnp.unstack(both - both.mean((1, 2), keepdims=True), axis=2)
        return (first * second) @ w

    def centred_and_printed(x, y, w, tower):
        jax.debug.callback(lambda y: None, y - y.mean())
        jax.debug.print("{}", lax.fori_loop(0, 2, lambda i, y: y - y.mean(), y))
        return x[:, 0] @ w

    def centred_in_vain(x, y, w, tower):
        unused = jax.jit(lambda y: (y - y.mean(), y))(y)
        return x[:, 0] @ w * unused[1]

    def attention(x, y, w, tower):
        scores = jax.nn.softmax(jnp.einsum("btf,bsf->bts", x * w[None, None], x))
        return jnp.einsum("bts,bsf->btf", scores, x).mean((1, 2))

    def layer_norm(x, y, w, tower):
        x = (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + 1e-6)
        return (x @ w).mean(1)

    def flat_and_back(x, y, w, tower):
        flat = jax.nn.relu(x.reshape(-1, F) * w[None])
        x = flat.reshape(-1, T, F)
        return (x - x.mean(1)[:, None]).sum((1, 2))

    def convolved(x, y, w, tower):
        kernel = jnp.ones((2, F, F)) * w[None, None]
        dims = ("NWC", "WIO", "NWC")
        out = lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=dims)
        out = nn.avg_pool(out, (2,), padding="SAME")
        return out.sum((1, 2)) - out.max((1, 2))

    def each_rows_gradient(x, y, w, tower):
        loss = lambda w, x, y: (jnp.tanh(x @ w).sum() - y) ** 2  # noqa: E731
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(w, x, y)
        norms = jnp.sqrt((grads**2).sum(1))
        return (grads / (norms + 1)[:, None]) @ w

    def embedded(x, y, w, tower):
        ids = jnp.clip(x[..., 0].astype(jnp.int32), 0, F - 1)
        table = w[:, None] * jnp.ones((F, F))
        chosen = jnp.take_along_axis(x, ids[..., None], axis=2)[..., 0]
        return (table[ids].sum(2) * chosen).mean(1)

    def one_hot(x, y, w, tower):
        label = jnp.clip(y.astype(jnp.int32), 0, F - 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x[:, 0] * w[None], label
        )
        return losses + (jax.nn.one_hot(label, F) * x[:, 1]).sum(1)

    def along_features(x, y, w, tower):
        x = jnp.sort(jnp.cumsum(x, 1), axis=2)[:, ::-1]
        return lax.top_k(x * w[None, None], 2)[0].sum((1, 2)) + x.argmax(2).sum(1)

    def recurrent(x, y, w, tower):
        def cell(hidden, x):
            hidden = jnp.tanh(hidden[:, None] * w[None] + x)
            return hidden.mean(1), hidden

        last, each = lax.scan(cell, jnp.zeros_like(y), x.swapaxes(0, 1))
        return last + each.swapaxes(0, 1).mean((1, 2))

    def row_by_row(x, y, w, tower):
        return lax.map(lambda row: (row - row.mean()).sum(0) @ w, x)

    def shifted_by_the_largest(x, y, w, tower):
        losses = x[:, 0] @ w
        return jnp.exp(losses - lax.stop_gradient(losses.max()))

    def where_any(x, y, w, tower):
        return jnp.where(jnp.isfinite(x).all() & (y > 0).any(), x[:, 0] @ w, 0.0)

    def of_all_towers(x, y, w, tower):
        mean = tower.mean(y, tower.weight)
        others = tower.all_gather(x[:, 1], axis=0)
        return (x[:, 0] * w[None] @ others.T).sum(1) * (y - mean)

    def normed_over_towers(x, y, w, tower):
        norm = TowerBatchNorm(use_running_average=False)
        variables = {"params": {"scale": w, "bias": w}}
        variables["batch_stats"] = {"mean": w * 0, "var": w * 0 + 1}
        x, _ = norm.apply(variables, x[:, 0], tower, mutable=["batch_stats"])
        return x.sum(1)

    def solved(x, y, w, tower):
        return jnp.linalg.solve(jnp.eye(F) + w[:, None] * w[None], x[:, 0].T).T.sum(1)

    def laid_either_way(x, y, w, tower):
        square, is_turned = (x[:, 0] @ w)[:, None].repeat(len(y), 1), w[0] > 5
        laid = lax.cond(is_turned, jnp.transpose, jnp.negative, square)
        first = lambda x: (x - x.mean(0, keepdims=True)).sum(0)  # noqa: E731
        return lax.cond(is_turned, first, lambda x: x.sum(1), laid)

    def dropped(x, y, w, tower):
        layer, rngs = nn.Dropout(0.5, deterministic=False), {"dropout": tower.rng}
        return layer.apply({}, x[:, 0], rngs=rngs) @ w


def build(fn, *, towers=2, **options):
    def loss_fn(params, batch, tower):
        losses = fn(batch["x"], batch["y"], params["w"], tower)
        return tj.Weighted.mean(losses, tower.weight)

    strategy = tj.Mirrored([f"cpu:{i}" for i in range(towers)])
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)


def batch():
    draw = np.random.default_rng(0).normal
    shapes = {"x": (B, T, F), "y": (B,)}
    return {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}


def check(step, params=None, rows=None):
    """All that is said of a check."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step.check(params or {"w": np.ones(F, np.float32)}, rows or batch())
    return [str(x.message) for x in told]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("options", [{}, {"towers": 1, "micro_batches": 3}])
@pytest.mark.parametrize("name", cases(Meets))
def test_rows_that_meet_are_warned_of(name, options):
    told = check(build(cases(Meets)[name], **options))
    assert told and all(re.match(f"Rows of a tower .* at .*{name}", x) for x in told)
    assert check(build(cases(Meets)[name], towers=1)) == []  # one tower has all rows


@pytest.mark.few_fast(4)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
@pytest.mark.parametrize("name", cases(Apart))
def test_rows_that_stay_apart_are_not(name, options):
    told = check(build(cases(Apart)[name], **options))
    # What is called in each micro-batch has a warning of its own.
    assert [x for x in told if not x.startswith("Each of 2 micro-batches calls")] == []


class NoSum:
    def root_of_a_mean(losses, mask, tower):
        return tj.Weighted(jnp.sqrt(losses.mean()) * len(mask), tower.weight.sum())

    def dice(losses, mask, tower):
        share = jax.nn.sigmoid(losses)
        return tj.Weighted(-(share * mask).sum() / (share.sum() + mask.sum()), 1)

    def mean_of_means(losses, mask, tower):
        return tj.Weighted((losses * mask).sum() / jnp.maximum(mask.sum(), 1), 1)

    def product_of_means(losses, mask, tower):
        return tj.Weighted(losses.mean() * mask.mean(), 1)

    def at_most(losses, mask, tower):
        return tj.Weighted(jnp.minimum(losses.sum(), 100.0), tower.weight.sum())

    def in_a_sum_of_means(losses, mask, tower):
        return tj.Weighted.mean(losses, tower.weight) + NoSum.root_of_a_mean(
            losses, mask, tower
        )

    def dice_by_its_rows(losses, mask, tower):
        return tj.Weighted(NoSum.dice(losses, mask, tower).sum * mask.sum(), mask.sum())

    def root_by_its_rows(losses, mask, tower):
        return tj.Weighted(jnp.sqrt(losses.sum()) * mask.sum(), mask.sum())

    def of_positives(losses, mask, tower):
        count = mask.sum()
        each = jnp.where(mask > 0, (1 - jnp.exp(-losses)) ** 2 * losses, 0.0)
        return tj.Weighted(each.sum() / jnp.maximum(count, 1), 1)

    def by_boolean_weights(losses, mask, tower):
        mean = jnp.average(losses**2, weights=(mask > 0).astype(np.float32))
        return tj.Weighted(mean * tower.weight.sum(), tower.weight.sum())

    def of_positives_if_any(losses, mask, tower):
        count, total = mask.sum(), (losses * mask).sum()

        def ratio():
            return total / count

        return tj.Weighted(lax.cond(count == 0, losses.sum, ratio), 1)


class ASum:
    def times_its_weight(losses, mask, tower):
        mean = (losses * mask).sum() / mask.sum()
        return tj.Weighted(mean * mask.sum(), mask.sum())

    def at_least_one(losses, mask, tower):
        count = jnp.where(mask > 0, 1.0, 0.0).sum()
        mean = jnp.where(count > 0, (losses * mask).sum() / jnp.maximum(count, 1), 0.0)
        return tj.Weighted(mean * mask.sum(), mask.sum())

    def masked(losses, mask, tower):
        return tj.Weighted((losses * mask).sum(), mask.sum())

    def mean_of_rows(losses, mask, tower):
        mean = (losses * tower.weight).sum() / jnp.maximum(tower.weight.sum(), 1)
        return tj.Weighted(jnp.nan_to_num(mean), 1)

    def surrogate(losses, mask, tower):
        total = losses.sum()
        return tj.Weighted(2 * total - lax.stop_gradient(total), tower.weight.sum())

    def dual(losses, mask, tower):
        total = lax.stop_gradient((losses * mask).sum())
        return tj.Weighted(losses.sum() + 3.0 * total, tower.weight.sum())

    def stacked_totals(losses, mask, tower):
        total = losses.sum()
        first, second = jnp.unstack(jnp.stack([total, 2 * total]))
        total = jnp.stack([first, second, total]).sum()
        return tj.Weighted(total, tower.weight.sum())

    def of_positives_of_each_row(losses, mask, tower):
        each = (losses * mask)[:, None] / jnp.maximum(mask[:, None].sum(1), 1)[:, None]
        return tj.Weighted.mean(each.sum(1), tower.weight)

    def in_two_sums(losses, mask, tower):
        return tj.Weighted(losses.reshape(2, -1).sum(0).sum(), tower.weight.sum())

    def two_means(losses, mask, tower):
        first = 2 * tj.Weighted.mean(losses, tower.weight)
        return first + 0.1 * tj.Weighted(losses.mean() * len(mask) / 2, len(mask))


@pytest.mark.few_fast(2)
@pytest.mark.parametrize(
    ("name", "is_no_sum"),
    [(x, True) for x in cases(NoSum)] + [(x, False) for x in cases(ASum)],
)
def test_a_function_of_sums_is_no_sum(name, is_no_sum):
    fn = (cases(NoSum) | cases(ASum))[name]

    def loss_fn(params, batch, tower):
        losses = (batch["x"][:, 0] @ params["w"]) ** 2
        return fn(losses, (batch["y"] > 0).astype(np.float32), tower)

    text = r"Rows of a tower make a loss .* at \S*test_lints.py:\d+ \([\w.]+\)\. Other"
    for towers, parts in (2, 1), (1, 3), (1, 1):
        strategy = tj.Mirrored([f"cpu:{i}" for i in range(towers)])
        options = {"micro_batches": parts}
        step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)
        told = {*check(step)}
        assert len(told) == (is_no_sum and towers * parts > 1)
        assert all(re.match(text, x) for x in told)


class MeanOfTower:
    def by_its_weights(losses, mask, tower):
        return tj.Weighted(tower.weight @ losses / tower.weight.sum(), 1)

    def at_least_one(losses, mask, tower):
        return tj.Weighted(ASum.mean_of_rows(losses, mask, tower).sum, 1)

    def by_its_average(losses, mask, tower):
        return tj.Weighted(jnp.average(losses, weights=tower.weight), 1)

    def by_the_number_of_rows(losses, mask, tower):
        return tj.Weighted((losses * tower.weight).mean(), 1)

    def by_a_number(losses, mask, tower):
        return tj.Weighted((losses * mask) @ tower.weight / tower.rows, 3)


class MeanOfAll:
    def times_its_weight(losses, mask, tower):
        count = tower.weight.sum()
        return tj.Weighted(tower.weight @ losses / count * count, count)

    def by_the_weights_of_all(losses, mask, tower):
        count = tower.reduce(R.SUM, tower.weight.sum())
        return tj.Weighted(tower.weight @ losses / count, 1 / tower.num_towers)

    def each_by_the_weights_of_all(losses, mask, tower):
        count = tower.reduce(R.SUM, tower.weight.sum())
        return tj.Weighted((losses * tower.weight / count).sum(), 1 / tower.num_towers)

    def centred_by_all(losses, mask, tower):
        centred = losses - tower.mean(losses, tower.weight)
        return tj.Weighted.mean(losses + centred**2, tower.weight)

    def masked(losses, mask, tower):
        weights = mask * tower.weight
        total = jnp.where(weights.sum() > 0, weights @ losses, 0.0)
        return tj.Weighted(total, weights.sum())


@pytest.mark.parametrize("name", cases(MeanOfTower) | cases(MeanOfAll))
def test_a_mean_by_a_towers_own_weights_is_warned_of_once_rows_are_padded(name):
    fn = (cases(MeanOfTower) | cases(MeanOfAll))[name]

    def loss_fn(params, batch, tower):
        losses = (batch["x"][:, 0] @ params["w"]) ** 2
        return fn(losses, (batch["y"] > 0).astype(np.float32), tower)

    for towers, parts in (2, 1), (1, 2), (1, 1):
        strategy = tj.Mirrored([f"cpu:{i}" for i in range(towers)])
        options = {"micro_batches": parts, "remainder": "pad"}
        step = tj.build_train_step(loss_fn, optax.sgd(0.0), strategy, **options)
        state = step.init({"w": np.ones(F, np.float32)})
        said = []
        for rows in (B, B - 1, B - 1):  # towers of as many, and padded ones, twice
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                state, _ = step(state, jax.tree.map(lambda x: x[:rows], batch()))  # noqa: B023
            texts = [str(x.message) for x in told]
            said.append([x for x in texts if not x.startswith("Each of 2 micro-")])
        is_wrong = name in cases(MeanOfTower) and towers * parts > 1
        assert [len(x) for x in said] == [0, is_wrong, 0], said
        text = r"Rows of a tower .*make a loss .* at \S*test_lints"
        assert all(re.match(text, x) for x in said[1])


def norm(w):
    return 0.1 * (w**2).sum()


# The sum over a tower's rows, its weight, the parameters and the tower: a loss.
TERMS = {
    "beside the sum": lambda s, n, w, t: tj.Weighted(s + norm(w), n),
    "before it": lambda s, n, w, t: tj.Weighted(norm(w) + s, n),
    "taken off": lambda s, n, w, t: tj.Weighted(s - jnp.log(1 + norm(w)), n),
    "of a half": lambda s, n, w, t: tj.Weighted(0.5 * (s + norm(w)) / 3, n),
    "among others": lambda s, n, w, t: tj.Weighted(s + 1e-6 + norm(w) + n, n),
    "merged before": lambda s, n, w, t: tj.Weighted(s + t.mean(s / n, n), n),
    "for each row": lambda s, n, w, t: tj.Weighted(s + norm(w) * n, n),
    "to the mean": lambda s, n, w, t: tj.Weighted((s / n + norm(w)) * n, n),
    "of a number of rows": lambda s, n, w, t: tj.Weighted(s + t.rows * norm(w), n),
    "of rows, divided": lambda s, n, w, t: tj.Weighted(s + norm(w) / (1 / t.rows), n),
    "of a tower's mean": lambda s, n, w, t: tj.Weighted(s / t.rows + norm(w), 1.0),
    "a share": lambda s, n, w, t: tj.Weighted(s + norm(w) / t.num_towers, n),
    "a constant": lambda s, n, w, t: tj.Weighted(s + 1e-9, n),
    "of the penalty": lambda s, n, w, t: tj.Weighted(s, n) + tj.penalty(norm(w)),
}


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("name", TERMS)
def test_a_shared_term_is_warned_of_where_it_counts_more_than_once(name):
    def loss_fn(params, batch, tower):
        losses = (batch["x"][:, 0] @ params["w"] - batch["y"]) ** 2
        total, weight = (losses * tower.weight).sum(), tower.weight.sum()
        return TERMS[name](total, weight, params["w"], tower)

    losses = []
    for towers in 1, 4:
        strategy = tj.Mirrored(["cpu:0"], towers=towers)
        step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
        told = check(step)
        state = step.init({"w": np.ones(F, np.float32)})
        with warnings.catch_warnings(action="ignore"):
            losses.append(float(step(state, batch())[1]["loss"]))
    is_other = abs(losses[1] - losses[0]) > 1e-5 * losses[0]
    assert len(told) == is_other, told
    text = (
        r"A term that is the same on all towers .* at \S*test_lints.py:\d+ .*tj.penalty"
    )
    assert all(re.match(text, x) for x in told)


# Of the audit's wrong losses, those that are warned of; the audit sees all.
SEEN = """
advantage_less_its_mean class_balance_by_counts contrast_with_own_rows dice
masked_mean_with_the_number_of_rows mean_of_masked_means normalised_by_the_rows
penalty_in_the_sum root_of_a_mean scan_along_rows softmax_over_rows
weights_divided_by_their_own_mean weights_divided_by_their_own_sum
""".split()


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", [*audited_losses.WRONG, *audited_losses.RIGHT])
def test_what_is_warned_of_among_the_losses_of_the_audit(name):
    loss_fn = (audited_losses.WRONG | audited_losses.RIGHT)[name]
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(["cpu:0", "cpu:1"]))
    with jax.numpy_rank_promotion("allow"):
        told = check(step, audited_losses.PARAMS, audited_losses.BATCH)
    kinds = "Rows of a tower", "A term that is the same on all"
    assert any(x.startswith(kinds) for x in told) == (name in SEEN), told


def centred(params, rows, tower):
    return (rows["y"] - rows["y"].mean()) * params["w"][0]


def test_evaluations_and_predictions_are_warned_of():
    strategy = tj.Mirrored(["cpu:0", "cpu:1"])
    evaluate = tj.build_eval_step(
        lambda *given: {"m": tj.Weighted.mean(centred(*given), given[-1].weight)},
        strategy,
    )
    for step in (evaluate, tj.build_predict_step(centred, strategy)):
        with pytest.warns(
            UserWarning, match=r"Rows of a tower are combined .* \(centred\)"
        ):
            step({"w": np.ones(F, np.float32)}, batch())


@pytest.mark.parametrize(
    ("options", "local"),
    [({"extend": LocalSGD(every=2)}, None), ({}, tj.TowerLocal(0.0, R.MEAN))],
)
def test_towers_that_have_rows_of_their_own_are_not(options, local):
    step = build(Meets.advantages, **options)
    state = step.init({"w": np.ones(F, np.float32)}, local=local)
    step.check(state, batch())


def test_micro_batches_of_towers_in_turn_are_not():
    """Our own loops: over the towers, and in it one over a row at a time."""

    def loss_fn(params, batch, tower):
        errors = (batch["x"] @ params["w"]).mean(axis=1) - batch["y"]
        return tj.Weighted.mean(errors**2, tower.weight)

    how = {"local": "scan", "cross_tower_ops": tj.PinnedTree()}
    strategy = tj.Mirrored(["cpu:0"], towers=2, **how)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, micro_batches=2)
    rows = {"x": np.ones((4, 2, 1), np.float32), "y": np.ones(4, np.float32)}
    assert check(step, {"w": np.ones(1, np.float32)}, rows) == []


def test_a_mean_of_towers_losses_is_not():
    def loss_fn(params, batch, tower):
        return jnp.sqrt(((batch["x"][:, 0] @ params["w"]) ** 2).mean())

    strategy = tj.Mirrored(["cpu:0", "cpu:1"])
    options = {"loss_reduction": R.MEAN}
    assert (
        check(tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)) == []
    )


@pytest.mark.slow
def test_a_model_function_is_warned_of():
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def model_fn(variables, features, labels, mode, params, tower):
        def root(w):
            losses = (features[:, 0] @ w["w"] - labels) ** 2
            return tj.Weighted(jnp.sqrt(losses.mean()), 1)

        loss, train_op = optimizer.minimize(root, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    strategy = tj.Mirrored(["cpu:0", "cpu:1"])
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    state = tj.TrainState.create({"w": np.ones(F, np.float32)}, optimizer)
    with pytest.warns(UserWarning, match=r"Rows of a tower make a loss .* \(root\)"):
        rows = {"features": batch()["x"], "labels": batch()["y"]}
        model.train_step()(model.init(state), rows)


def drawn_program(seed, steps=14):
    """A function of rows ``[4, 3, 4]`` and of others, of operations drawn at random."""
    draw = np.random.default_rng(seed)

    def one(values):
        x = values[draw.integers(len(values))]
        dims = [*range(x.ndim)]
        axis = int(draw.integers(max(x.ndim, 1)))
        alike = [v for v in values if v.shape == x.shape]
        other = alike[draw.integers(len(alike))]
        kind = draw.integers(15)
        if kind == 0:
            return jnp.tanh(x)
        if kind == 1:
            return x * other
        if kind == 2:
            return lax.sub(x, other)
        if x.ndim == 0 or kind == 3:
            shape = (*x.shape[:axis], 4, *x.shape[axis:])
            kept = [d + (d >= axis) for d in dims]
            return lax.broadcast_in_dim(x, shape, kept)
        if kind in (4, 5):
            return lax.reduce_sum(x, (axis,))
        if kind == 6:
            return lax.argmax(x, axis, np.int32).astype(x.dtype)
        if kind == 7:
            return lax.transpose(x, tuple(map(int, draw.permutation(x.ndim))))
        if kind == 8:
            cut = int(draw.integers(x.ndim))
            runs = (x.shape[:cut], x.shape[cut:])
            return lax.reshape(x, tuple(int(np.prod(r)) for r in runs if r))
        if kind == 9:
            first = [n for n in (2, 4, 3) if x.shape[axis] % n == 0][:1] or [1]
            rest = x.shape[axis] // first[0]
            return lax.reshape(x, (*x.shape[:axis], *first, rest, *x.shape[axis + 1 :]))
        if kind == 10:
            pairs = [
                (i, j)
                for i, n in enumerate(x.shape)
                for j, m in enumerate(other.shape)
                if n == m
            ]
            chosen = [pairs[k] for k in draw.permutation(len(pairs))[:2]]
            (i, j), *more = chosen
            batch = [p for p in more if p[0] != i and p[1] != j]
            numbers = (((i,), (j,)), ([p[0] for p in batch], [p[1] for p in batch]))
            return lax.dot_general(x, other, numbers)
        if kind == 11:
            return lax.concatenate([x, other], axis)
        if kind == 12:
            return lax.slice_in_dim(x, 0, max(x.shape[axis] - 1, 1), axis=axis)
        if kind == 13:
            return [lax.cumsum, lax.sort][draw.integers(2)](x, axis)
        return lax.select(lax.gt(x, other), other, lax.rev(x, (axis,)))

    def program(x, y, w):
        values = [x, y, w, lax.dot_general(y, y, (((1,), (1,)), ((), ())))]
        for _ in range(steps):
            new = one(values)
            if new.size <= 4096 and new.ndim <= 5:
                values.append(new / (1 + abs(new)))
        return values

    return program


def every_value(closed, args):
    """All values that a jaxpr without inner ones computes, in order."""
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    for eqn in closed.jaxpr.eqns:
        given = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        out = eqn.primitive.bind(*given, **eqn.params)
        env |= zip(
            eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True
        )
    return [*env.values()]


def known_rows(jaxpr, ins):
    """The rows of all values, by variable."""
    env = dict(zip(jaxpr.invars, ins, strict=True))
    env |= dict.fromkeys(jaxpr.constvars, lints.NO_ROWS)
    for eqn in jaxpr.eqns:
        given = [
            lints.NO_ROWS if isinstance(v, Literal) else env[v] for v in eqn.invars
        ]
        env |= dict.fromkeys(eqn.outvars, lints.dims_of_equation(eqn, given))
    return env


def are_of_row(shape, dims, row):
    """Which elements of a value are of a row, of its group, or of a pair with it."""
    indices = np.indices(shape)

    def is_at(x):
        place = indices[x.at] // (shape[x.at] // x.rows)
        return place - row // x.apart % x.rows if x.is_group else place * x.apart

    def are_of(side):
        if any(x.is_group for x in side):
            return np.all([is_at(x) == 0 for x in side], axis=0)
        return np.sum([is_at(x) for x in side], axis=0) == row

    sides = [[x for x in dims if x.is_other == other] for other in (False, True)]
    return np.any([are_of(side) for side in sides if side], axis=0)


# Programs with rows in all ways; in the first five there are sums of groups of them.
DRAWN = (78, 104, 163, 176, 280, 30, 34, 37, 38, 39, 40, 41, 45)


def check_what_is_known(seeds):
    """How many values it knew rows of: how many dims, and whether of pairs."""
    counts = collections.Counter()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        shapes = (4, 3, 4), (4, 3), (3, 4)
        args = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        closed = jax.make_jaxpr(drawn_program(seed))(*args)
        rows = lints.of_batch("x", (4,)).dims
        found = known_rows(closed.jaxpr, [rows, rows, lints.NO_ROWS])
        run = jax.jit(lambda *args: every_value(closed, args))  # noqa: B023
        values, changed = changed_by_rows(run, args, (0, 0, None), rng)
        for known, value, by_row in zip(found.values(), values, changed, strict=True):
            check_dims(known, value, by_row)
            if known is None or known[:1] and known[0].at < 0:
                counts["unknown" if known is None else known[0].at] += 1
            elif known or value.dtype != bool:
                counts[len(known), lints.are_pairs(known)] += 1
                counts["groups"] += any(x.is_group for x in known)
    return counts


def changed_by_rows(run, args, given, draw):
    """The values, and for each where each of four rows alone changes it."""

    def with_other(row):
        new = [x.copy() for x in args]
        for x, at in zip(new, given, strict=True):
            if at is not None:
                own = np.moveaxis(x, at, 0)[row]
                own[...] = draw.normal(size=own.shape)
        return run(*new)

    before = [np.asarray(x) for x in run(*args)]
    each = [with_other(row) for row in range(4)]
    pairs = zip(before, zip(*each, strict=True), strict=True)
    return before, [[np.asarray(x) != old for x in new] for old, new in pairs]


def check_dims(known, value, by_row):
    """A row changes what is its own, which is known along one dim, or as pairs."""
    if known is None or known[:1] and known[0].at < 0:
        ats = [at for at, n in enumerate(value.shape) if n == 4]
        for where in [(at,) for at in ats] + [*itertools.combinations(ats, 2)]:
            dims = [lints.RowDim(at, 4, is_other=at != where[0]) for at in where]
            own = [are_of_row(value.shape, dims, row) for row in range(4)]
            alike = map(np.array_equal, by_row, own)
            assert not all(alike) or value.dtype == bool, (dims, known)
    elif known or value.dtype != bool:  # a flag may decide, also one of totals
        for row, changed in enumerate(by_row):
            own = are_of_row(value.shape, known, row) if known else False
            assert not np.any(changed & ~np.bool_(own)), (row, known)


def window(x, sizes):
    return lax.reduce_window(x, 0.0, lax.add, sizes, (1, 1, 1), "SAME")


def gather(x, index, offsets, gone, sizes, batch=()):
    numbers = lax.GatherDimensionNumbers(
        offsets, gone, (gone or (1,))[-1:], batch, batch
    )
    return lax.gather(x, index, numbers, sizes, mode="clip")


def convolve(x, groups):
    kernel = np.ones((2, x.shape[1], 1), np.float32)
    how = {"batch_group_count": groups, "dimension_numbers": ("NCH", "OIH", "NCH")}
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", **how)


def index_of(*shape):
    return np.ones((*shape, 1), np.int32)


def halves(x):
    return x.reshape(2, len(x) // 2, *x.shape[1:])


# Of an array with rows along one of three dims, which of them are known afterwards.
OPERATIONS = {
    "convolution": (lambda x: convolve(x, 1), (0,)),
    "convolution of groups": (lambda x: convolve(x, 2), ()),
    "windows": (lambda x: window(x, (1, 2, 1)), (0, 2)),
    "sorted": (lambda x: lax.sort(x, 1), (0, 2)),
    "sum so far": (lambda x: lax.cumsum(x, 2), (0, 1)),
    "largest": (lambda x: lax.reduce_max(x, (1,)), (0, 2)),
    "sum": (lambda x: lax.reduce_sum(x, (0,)), (1, 2)),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), (0, 2)),
    "a new dim": (lambda x: lax.expand_dims(x, (1,)), (0, 1, 2)),
    "copies": (lambda x: lax.broadcast(x, (2,)), (0, 1, 2)),
    "reversed": (lambda x: lax.rev(x, (1,)), (0, 2)),
    "part": (lambda x: lax.slice_in_dim(x, 0, 1, axis=1), (0, 2)),
    "part by index": (lambda x: lax.dynamic_slice_in_dim(x, 2, 1, 1), (0, 2)),
    "padded": (lambda x: lax.pad(x, 0.0, [(0, 0, 0), (1, 0, 0), (0, 0, 0)]), (0, 2)),
    "turned": (lambda x: lax.transpose(x, (1, 2, 0)), (0, 1, 2)),
    "outer dims joined": (lambda x: x.reshape(-1, x.shape[2]), (0, 2)),
    "halves": (halves, (0, 1, 2)),
    "halves joined": (lambda x: halves(x).reshape(x.shape), (0, 1, 2)),
    "halves joined in turns": (
        lambda x: lax.transpose(halves(x), (1, 0, 2, 3)).reshape(x.shape), (1, 2)),
    "halves, inner dims joined": (
        lambda x: halves(x).reshape(2, len(x) // 2, -1), (0, 1)),
    "halves joined with others": (lambda x: x.reshape(2, -1, x.shape[2]), (0, 2)),
    "an outer dim of one": (lambda x: x.reshape(1, *x.shape), (0, 1, 2)),
    "an inner dim of one": (lambda x: x.reshape(len(x), 1, *x.shape[1:]), (0, 1, 2)),
    "product of matrices": (
        lambda x: lax.dot_general(
            x, np.ones((x.shape[1], 2), x.dtype), (((1,), (0,)), ((), ()))), (0, 2)),
    "inner dims joined": (lambda x: x.reshape(len(x), -1), (0, 1)),
    "gathered": (
        lambda x: gather(x, index_of(2), (1, 2), (0,), (1, *x.shape[1:])), (1, 2)),
    "gathered in parts": (
        lambda x: gather(x, index_of(), (0, 1, 2), (), (len(x), 1, x.shape[2])),
        (0, 2)),
    "gathered for each": (
        lambda x: gather(
            x, index_of(len(x), 2), (2,), (1,), (1, 1, x.shape[2]), (0,)), (0, 2)),
    "multiplied": (
        lambda x: x * np.arange(x.shape[1], dtype=x.dtype)[None, :, None], (0, 1, 2)),
    "written into": (lambda x: lax.dynamic_update_slice(x, x[:1], (0, 0, 0)), ()),
    "decomposed": (lambda x: lax.linalg.qr(x), ()),
}  # fmt: skip


ROW = lints.RowDim
PAIRS = (ROW(0, 4), ROW(1, 4, is_other=True))
# Shapes before and after, and where rows lie in them; an outer dim of 1 may be groups.
RESHAPED = [
    ((6,), (1, 6), (), ()),
    ((6, 2), (6, 1, 2), [ROW(0, 6)], (ROW(0, 6),)),
    ((6, 4), (6, 2, 2), [ROW(0, 6)], (ROW(0, 6),)),
    ((2, 3), (2, 1, 3), [ROW(0, 2)], (ROW(0, 2),)),
    ((4,), (2, 2), [ROW(0, 2)], (ROW(0, 2),)),
    ((6, 2), (1, 6, 2), [ROW(0, 6)], (ROW(0, 1), ROW(1, 6))),
    ((2, 6), (1, 2, 6), [ROW(1, 6)], (ROW(0, 1), ROW(2, 6))),
    ((1, 6), (1, 1, 6), [ROW(1, 6)], (ROW(2, 6),)),
    ((6,), (2, 1, 3), [ROW(0, 6)], (ROW(0, 2, 3), ROW(2, 3))),
    ((6, 2), (3, 4), [ROW(0, 6)], (ROW(0, 3, 2), ROW(1, 2))),
    ((2, 3, 2), (6, 2), [ROW(0, 2, 3), ROW(1, 3)], (ROW(0, 6),)),
    ((3, 2, 2), (6, 2), [ROW(0, 3), ROW(1, 2, 3)], None),
    ((4, 3), (6, 2), [ROW(0, 4)], None),
    ((2, 6), (3, 4), [ROW(1, 6)], None),
    ((4, 4), (16,), PAIRS, None),
    ((4, 4), (2, 2, 4), PAIRS, lints.MIXED),
    ((4, 4), (4, 1, 4), PAIRS, (ROW(0, 4), ROW(2, 4, is_other=True))),
]


@pytest.mark.parametrize("given, out, dims, expected", RESHAPED)
def test_where_rows_lie_in_another_shape(given, out, dims, expected):
    assert lints._reshape(given, out, dims) == expected


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_rows_along_by_their_dim(name):
    fn, followed = OPERATIONS[name]
    for at in range(3):
        shape = [6, 3, 2]
        shape[at] = 4
        draw = np.random.default_rng(at)
        x = draw.normal(size=shape).astype(np.float32)
        closed = jax.make_jaxpr(fn)(x)
        found = known_rows(closed.jaxpr, [(lints.RowDim(at, 4),)])
        run = jax.jit(lambda x: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x))  # noqa: B023
        (value, *_), (by_row, *_) = changed_by_rows(run, [x], [at], draw)
        known = found[closed.jaxpr.outvars[0]]
        is_known = bool(known) and known[0].at >= 0
        assert is_known == (at in followed), (at, known)
        if is_known:
            check_dims(known, value, by_row)


# Of a sum over rows, [3], and of three other numbers.
OF_SUMS = [
    lambda s, w: s * w,
    lambda s, w: w * s,
    lambda s, w: s / w,
    lambda s, w: w / s,
    lambda s, w: s * s,
    lambda s, w: s + 2.0 * s,
    lambda s, w: s + lax.exp(s),
    lambda s, w: lax.exp(s) + s,
    lambda s, w: lax.select(w > 0, s, 2 * s),
    lambda s, w: lax.concatenate([s, w], 0),
    lambda s, w: lax.cumsum(s),
    lambda s, w: lax.cumprod(s),
    lambda s, w: lax.reduce_sum(s, (0,)),
    lambda s, w: lax.dot(s, w),
    lambda s, w: lax.dot(w, s),
    lambda s, w: lax.dot(s, s),
    lambda s, w: lax.integer_pow(s, 2) / w,
    lambda s, w: lax.rev(lax.slice(s, (1,), (3,)), (0,)),
]


@pytest.mark.parametrize("number", range(len(OF_SUMS)))
def test_a_sum_of_rows_is_told_from_a_function_of_sums(number):
    """What two rows change of a sum is what each of them changes."""

    def fn(x, w):
        return OF_SUMS[number](lax.reduce_sum(x, (0,)), w)

    x = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    w = np.array([2, 3, 5], np.float32)
    closed = jax.make_jaxpr(fn)(x, w)
    found = known_rows(closed.jaxpr, [(lints.RowDim(0, 4),), lints.NO_ROWS])
    known = found[closed.jaxpr.outvars[0]]
    first, second = x.copy(), x.copy()
    first[0], second[1] = -7, 9
    both = np.concatenate([first[:1], second[1:]])
    before, one, other, two = (np.asarray(fn(a, w)) for a in (x, first, second, both))
    is_sum = np.allclose(two - before, (one - before) + (other - before), rtol=1e-4)
    assert known == (lints.TOTAL if is_sum else lints.FUNCTION)


@pytest.mark.slow
def test_what_is_known_of_rows_is_so():
    """Another row changes no value of a row, unless rows are said to have met."""
    counts = check_what_is_known(DRAWN)
    assert counts[1, False] > 200 and counts[2, True] > 20, counts
    assert counts["groups"] > 10, counts
