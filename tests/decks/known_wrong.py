"""Losses that are known to be wrong on several towers, and right ones like them.

Each is (params, batch, tower) -> loss, by its name.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from layouts import cases

import towerjax as tj
from towerjax.layers.batch_norm.linen import TowerBatchNorm

R = tj.Reduction
# rows, steps of time, features
B = 12
T = 3
F = 5
PARAMS = {"w": np.linspace(0.4, 1.2, F).astype(np.float32), "b": np.float32(0.3)}


def batch():
    draw = np.random.default_rng(7).normal
    shapes = {"x": (B, T, F), "y": (B,)}
    return {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}


# Losses of each row, in which rows of a tower meet each other, or what is computed of
# all of them; and those in which they do not: (x, y, w, tower) -> [rows].


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
            return (x - jax.jit(jnp.mean)(x)) ** 2

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

    def total_in_another_language(x, y, w, tower):
        shape = jax.ShapeDtypeStruct((), y.dtype)
        return (
            x[:, 0] @ w * jax.pure_callback(np.sum, shape, y, vmap_method="sequential")
        )

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
        return ((both - both.mean(0)[None]) ** 2).sum(1)

    def of_a_group(x, y, w, tower):
        group = y.reshape(-1, len(y) // (1 + (len(y) > 5)))
        return (x[:, 0] @ w) * (group - group.mean(1)[:, None]).ravel()

    def shifted_by_the_largest(x, y, w, tower):
        losses = x[:, 0] @ w
        return jnp.exp(losses - lax.stop_gradient(losses.max()))

    def laid_either_way(x, y, w, tower):
        square = (x[:, 0] @ w)[:, None].repeat(len(y), 1)
        is_turned = w[0] > 5
        laid = lax.cond(is_turned, jnp.transpose, jnp.negative, square)
        first = lambda x: (x - x.mean(0, keepdims=True)).sum(0)  # noqa: E731
        return lax.cond(is_turned, first, lambda x: x.sum(1), laid)


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
            total, losses = carry
            loss = jnp.tanh(x[i, 0] @ w)
            return total + loss, losses.at[i].set(loss)

        return lax.fori_loop(0, len(y), body, (0.0, jnp.zeros_like(y)))[1]

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

    def dropped(x, y, w, tower):
        layer = nn.Dropout(0.5, deterministic=False)
        rngs = {"dropout": tower.rng}
        return layer.apply({}, x[:, 0], rngs=rngs) @ w


# Functions of a tower's sums, and sums: (losses, mask, tower) -> loss.


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
        return tj.Weighted(jnp.minimum(losses.sum(), 3.0), tower.weight.sum())

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
        count = mask.sum()
        total = (losses * mask).sum()

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


# What is wrong, and right, only where towers have padding.


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

    def by_a_constant_that_counts_rows(losses, mask, tower):
        return tj.Weighted((losses * tower.weight).sum(), jnp.ones(len(mask)).sum())

    def masked_and_averaged(losses, mask, tower):
        return tj.Weighted.mean(losses * tower.weight)


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


# A term beside the rows, which each tower adds.


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


# Sums over towers of what is the same on all.


def errors(params, batch):
    return batch["x"][:, 0] @ params["w"] + params["b"] - batch["y"]


def output(params, batch, tower, metrics=None):
    mean = tj.Weighted.mean(errors(params, batch) ** 2, tower.weight)
    return tj.TowerOutput(mean, metrics or {})


def size(params):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(params)))


class Repeated:
    def sum_of_norm(params, batch, tower):
        m = tower.reduce(R.SUM, size(params))
        return output(params, batch, tower, {"m": m})

    def sum_of_a_variance(params, batch, tower):  # divides by a constant of its own
        m = tower.reduce(R.SUM, jnp.var(params["w"]))
        return output(params, batch, tower, {"m": m})

    def sum_of_a_mean(params, batch, tower):
        loss = tower.reduce(R.MEAN, jnp.mean(errors(params, batch) ** 2))
        return output(params, batch, tower, {"m": tower.reduce(R.SUM, loss)})

    def sum_returned(params, batch, tower):
        m = 2.0 * size(params)
        return output(params, batch, tower, {"m": tj.Sum(m)})

    def sum_of_a_gathered(params, batch, tower):
        rows = tower.all_gather(errors(params, batch).sum())
        m = tower.reduce(R.SUM, rows.max())
        return output(params, batch, tower, {"m": m})

    def sum_in_jit(params, batch, tower):
        total = jax.jit(lambda b: lax.psum(b, tower.axis_names))
        return output(params, batch, tower, {"m": total(params["b"])})

    def decay_counted_by_each(params, batch, tower):
        decay = tower.reduce(R.SUM, 0.1 * size(params))
        losses = errors(params, batch) ** 2 + decay
        return tj.Weighted.mean(losses, tower.weight)

    def forces_of_the_energy_of_all(params, batch, tower):
        def energy(x):  # over a fixed number of rows, which is not that of towers
            own = jnp.tanh(x @ params["w"]).sum()
            return tower.reduce(R.SUM, own) / 16

        rows = tj.Weighted.mean(jax.grad(energy)(batch["x"][:, 0]) ** 2, tower.weight)
        return output(params, batch, tower, {"m": rows})

    def forces_of_the_mean_of_all(params, batch, tower):
        def energy(x):
            own = jnp.tanh(x @ params["w"])
            return tower.mean(own, tower.weight)

        rows = tj.Weighted.mean(jax.grad(energy)(batch["x"][:, 0]) ** 2, tower.weight)
        return output(params, batch, tower, {"m": rows})


def adding(tower, also=1.0, mean=False, forward=lambda x: x):
    @jax.custom_vjp
    def add(x):
        return forward(x)

    def backward(_, g):
        total = lax.psum(also * g, tower.axis_names)
        return ((total / tower.num_towers if mean else total),)

    add.defvjp(lambda x: (forward(x), None), backward)
    return add


class Again:
    def gradient_added_up_twice(params, batch, tower):
        w = adding(tower)(params["w"])
        return output({**params, "w": w}, batch, tower)

    def gradient_of_a_product_added_up_twice(params, batch, tower):
        w = jax.jit(adding(tower, also=3.0))(2.0 * params["w"])
        return output({**params, "w": jnp.tanh(w)}, batch, tower)

    def gradient_of_a_parameters_multiple_added_up_twice(params, batch, tower):
        w = adding(tower)(params["b"] * params["w"])
        return output({**params, "w": w}, batch, tower)

    def gradient_in_a_scan_added_up_twice(params, batch, tower):
        def body(w, _):
            return adding(tower)(0.9 * w), None

        w = lax.scan(body, params["w"], None, length=2)[0]
        return output({**params, "w": w}, batch, tower)


def of_rows(losses):
    def loss_fn(params, batch, tower):
        each = losses(batch["x"], batch["y"], params["w"], tower)
        # Squared, too: the sum of what is centred is 0, however it is centred.
        return tj.Weighted.mean(each + 0.1 * each**2, tower.weight)

    return loss_fn


def of_sums(loss):
    def loss_fn(params, batch, tower):
        losses = (batch["x"][:, 0] @ params["w"]) ** 2
        return loss(losses, (batch["y"] > 0).astype(np.float32), tower)

    return loss_fn


def with_a_term(name):
    def loss_fn(params, batch, tower):
        losses = (batch["x"][:, 0] @ params["w"] - batch["y"]) ** 2
        total = (losses * tower.weight).sum()
        weight = tower.weight.sum()
        return TERMS[name](total, weight, params["w"], tower)

    return loss_fn


COUNTED_AGAIN = "beside the sum, before it, taken off, of a half, among others"
COUNTED_AGAIN = [*COUNTED_AGAIN.split(", "), "merged before"]
WRONG = {name: of_rows(fn) for name, fn in cases(Meets).items()}
WRONG |= {name: of_sums(fn) for name, fn in cases(NoSum).items()}
WRONG |= {f"a term {name}": with_a_term(name) for name in COUNTED_AGAIN}
WRONG |= cases(Repeated) | cases(Again)
WRONG_WHERE_PADDED = {name: of_sums(fn) for name, fn in cases(MeanOfTower).items()}
RIGHT = {name: of_rows(fn) for name, fn in cases(Apart).items()}
RIGHT |= {name: of_sums(fn) for name, fn in (cases(ASum) | cases(MeanOfAll)).items()}
RIGHT |= {
    f"a term {name}": with_a_term(name) for name in TERMS if name not in COUNTED_AGAIN
}
