"""Losses that are wrong on several towers by habit, and right ones that look alike."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from layouts import cases

import towerjax as tj

DRAW = np.random.default_rng(11)
ROWS = 24


def _normal(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


BATCH = {
    "x": _normal(ROWS, 4) + 0.3,
    "y": _normal(ROWS),
    "label": DRAW.integers(0, 3, ROWS).astype(np.int32),
    "mask": (DRAW.uniform(size=(ROWS, 5)) < 0.6).astype(np.float32),
    "tokens": _normal(ROWS, 5, 4),
    "weight": DRAW.uniform(0.2, 3, ROWS).astype(np.float32),
}
PARAMS = {"w": _normal(4), "k": _normal(4, 3), "b": np.float32(0.25)}


def scores(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def errors(params, batch):
    return (scores(params, batch) - batch["y"]) ** 2


def cross_entropy(params, batch):
    logits = batch["x"] @ params["k"]
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["label"][:, None], axis=1
    )[:, 0]


def mean(values, tower):
    return tj.Weighted.mean(values, tower.weight)


# Each is (params, batch, tower) -> loss, by its name.


class Wrong:
    def sum_with_weight_1(p, b, t):
        return tj.Weighted((errors(p, b) * t.weight).sum(), 1.0)

    def penalty_in_the_sum(p, b, t):
        total = (errors(p, b) * t.weight).sum() + 0.1 * (p["w"] ** 2).sum()
        return tj.Weighted(total, t.weight.sum())

    def mean_of_masked_means(p, b, t):
        m = b["mask"][:, 0] * t.weight
        return tj.Weighted((errors(p, b) * m).sum() / m.sum(), 1.0)

    def masked_mean_with_the_number_of_rows(p, b, t):
        m = b["mask"][:, 0] * t.weight
        return tj.Weighted(
            (errors(p, b) * m).sum() / m.sum() * t.weight.sum(), t.weight.sum()
        )

    def weights_divided_by_their_own_sum(p, b, t):
        w = b["weight"] * t.weight
        return tj.Weighted((errors(p, b) * w / w.sum()).sum(), 1.0)

    def weights_divided_by_their_own_mean(p, b, t):
        w = b["weight"] * t.weight
        return mean(errors(p, b) * w / w.mean(), t)

    def cumsum_along_rows(p, b, t):
        return mean(jnp.cumsum(scores(p, b) * t.weight) * b["y"], t)

    def scan_along_rows(p, b, t):
        def body(carry, x):
            carry = 0.9 * carry + x
            return carry, carry

        _, smooth = lax.scan(body, jnp.float32(0), scores(p, b) * t.weight)
        return mean((smooth - b["y"]) ** 2, t)

    def difference_to_the_row_before(p, b, t):
        s = scores(p, b)
        return mean((s - jnp.roll(s, 1) - b["y"]) ** 2, t)

    def top_k_of_the_losses(p, b, t):
        kept, _ = lax.top_k(errors(p, b) * t.weight, 3)
        return tj.Weighted(kept.sum(), 3.0)

    def hardest_half(p, b, t):
        own = errors(p, b)
        return mean(own * (own >= jnp.median(own)), t)

    def quantile_clipped(p, b, t):
        own = errors(p, b)
        return mean(jnp.minimum(own, jnp.quantile(lax.stop_gradient(own), 0.7)), t)

    def gradient_of_the_harder_rows(p, b, t):
        own = errors(p, b)
        is_hard = own > jnp.median(own)
        return mean(jnp.where(is_hard, own, lax.stop_gradient(own)), t)

    def largest_loss(p, b, t):
        return tj.Weighted(
            (errors(p, b) * t.weight).max() * t.weight.sum(), t.weight.sum()
        )

    def ranked(p, b, t):
        rank = jnp.argsort(jnp.argsort(lax.stop_gradient(scores(p, b))))
        return mean(errors(p, b) * rank, t)

    def class_balance_by_counts(p, b, t):
        one_hot = jax.nn.one_hot(b["label"], 3) * t.weight[:, None]
        weight = (1.0 / jnp.maximum(one_hot.sum(0), 1.0))[b["label"]]
        return mean(cross_entropy(p, b) * weight, t)

    def mixup_with_the_flipped_batch(p, b, t):
        mixed = {**b, "x": 0.7 * b["x"] + 0.3 * b["x"][::-1]}
        return mean(errors(p, mixed), t)

    def noise_from_the_shared_key(p, b, t):
        noise = jax.random.normal(t.shared_rng, b["y"].shape)
        return mean((scores(p, b) + noise - b["y"]) ** 2, t)

    def noise_from_its_own_key(p, b, t):
        noise = jax.random.normal(jax.random.key(0), b["y"].shape)
        return mean((scores(p, b) + noise - b["y"]) ** 2, t)

    def dropout_from_the_shared_key(p, b, t):
        keep = jax.random.bernoulli(t.shared_rng, 0.5, b["x"].shape)
        return mean(errors(p, {**b, "x": b["x"] * keep}), t)

    def advantage_less_its_mean(p, b, t):
        gain = lax.stop_gradient(errors(p, b))
        return mean((gain - gain.mean()) * scores(p, b), t)

    def normalised_by_the_rows(p, b, t):
        own = {"axis": 0, "keepdims": True}
        x = (b["x"] - b["x"].mean(**own)) / (b["x"].std(**own) + 1e-3)
        return mean(errors(p, {**b, "x": x}), t)

    def contrast_with_own_rows(p, b, t):
        z = b["x"] @ p["k"]
        logits = z @ z.T
        own = -jnp.diagonal(jax.nn.log_softmax(logits, axis=1))
        return mean(own, t)

    def root_of_a_mean(p, b, t):
        total = (errors(p, b) * t.weight).sum()
        weight = t.weight.sum()
        return tj.Weighted(jnp.sqrt(total / weight) * weight, weight)

    def dice(p, b, t):
        s = jax.nn.sigmoid(scores(p, b))
        w = b["mask"][:, 0] * t.weight
        n = w.sum()
        value = 1 - 2 * (s * w).sum() / ((s * t.weight).sum() + n)
        return tj.Weighted(value * n, n)

    def a_column_less_a_row(p, b, t):
        with jax.numpy_rank_promotion("allow"):
            return mean((b["x"] @ p["w"][:, None] - b["y"]) ** 2, t)

    def place_in_the_batch(p, b, t):
        return mean(errors(p, b) * jnp.arange(1.0, len(b["y"]) + 1), t)

    def gradient_by_the_mean_of_rows(p, b, t):
        return mean((_divided_by_the_norm_of_rows(scores(p, b)) - b["y"]) ** 2, t)

    def gradient_by_the_number_of_rows(p, b, t):
        return mean((_divided_by_the_number_of_rows(scores(p, b)) - b["y"]) ** 2, t)


WRONG = cases(Wrong) | dict(
    softmax_over_rows=lambda p, b, t: mean(jax.nn.softmax(scores(p, b)) * b["y"], t),
    own_number_of_the_tower=lambda p, b, t: mean(errors(p, b) * (1 + 0.1 * t.id), t),
)


@jax.custom_vjp
def _divided_by_the_number_of_rows(x):
    return x


_divided_by_the_number_of_rows.defvjp(lambda x: (x, None), lambda _, g: (g / len(g),))


@jax.custom_vjp
def _divided_by_the_norm_of_rows(x):
    return x


def _normalise(_, g):
    return (g / (jnp.abs(g).mean() + 1e-6),)


_divided_by_the_norm_of_rows.defvjp(lambda x: (x, None), _normalise)


class WrongWherePadded:
    """Without padding each is right on towers of as many rows."""

    def penalised_by_a_mean_of_rows(p, b, t):
        own = (errors(p, b) * t.weight).mean()
        return mean(errors(p, b), t) + tj.penalty(t.reduce(tj.Reduction.MEAN, own))

    def less_the_mean_of_all_rows(p, b, t):
        own = (scores(p, b) * t.weight).mean()
        center = t.reduce(tj.Reduction.MEAN, own)
        return mean((scores(p, b) - center) ** 2 + errors(p, b), t)

    def sum_over_the_number_of_rows(p, b, t):
        total = t.reduce(tj.Reduction.SUM, errors(p, b) @ t.weight)
        own = total / (t.num_towers * t.weight.size)
        return mean(errors(p, b), t) + tj.penalty(own)

    def share_of_rows(p, b, t):
        share = t.reduce(tj.Reduction.MEAN, t.weight.mean())
        return mean(errors(p, b) * share, t)


WRONG_WHERE_PADDED = cases(WrongWherePadded)


class Right:
    def plain_mean(p, b, t):
        return mean(errors(p, b), t)

    def weighted_rows(p, b, t):
        return tj.Weighted.mean(errors(p, b), b["weight"] * t.weight)

    def masked_tokens(p, b, t):
        own = jnp.tanh(b["tokens"] @ p["w"]) ** 2
        return tj.Weighted.mean(own, b["mask"] * t.weight[:, None])

    def flattened_tokens(p, b, t):
        own = jnp.tanh(b["tokens"].reshape(-1, 4) @ p["w"]) ** 2
        weight = (b["mask"] * t.weight[:, None]).reshape(-1)
        return tj.Weighted.mean(own, weight)

    def mean_of_each_rows_own_mean(p, b, t):
        own = (b["tokens"] @ p["w"]) ** 2
        rows = (own * b["mask"]).sum(1) / jnp.maximum(b["mask"].sum(1), 1)
        return mean(rows, t)

    def attention_within_a_row(p, b, t):
        logits = jnp.einsum("bid,d,bjd->bij", b["tokens"], p["w"], b["tokens"])
        mixed = jax.nn.softmax(logits, -1) @ b["tokens"]
        return mean((mixed.sum((1, 2)) - b["y"]) ** 2, t)

    def layer_norm(p, b, t):
        x = b["x"] - b["x"].mean(1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
        return mean(errors(p, {**b, "x": x}), t)

    def two_views_joined(p, b, t):
        both = jnp.concatenate([b["x"], -b["x"]]) @ p["k"]
        one, two = jnp.split(both, 2)
        return mean(((one - two) ** 2).sum(1), t)

    def cumsum_within_a_row(p, b, t):
        return mean((jnp.cumsum(b["tokens"], axis=1) @ p["w"]).sum(1) ** 2, t)

    def scan_over_tokens(p, b, t):
        def body(carry, x):
            return jnp.tanh(carry + x @ p["w"]), None

        last, _ = lax.scan(body, jnp.zeros(len(b["y"])), b["tokens"].swapaxes(0, 1))
        return mean((last - b["y"]) ** 2, t)

    def top_k_within_a_row(p, b, t):
        kept, _ = lax.top_k(b["tokens"] @ p["w"], 2)
        return mean(kept.sum(1) ** 2, t)

    def flipped_within_a_row(p, b, t):
        return mean((b["tokens"][:, ::-1, :] @ p["w"]).max(1) ** 2, t)

    def focal(p, b, t):
        own = cross_entropy(p, b)
        return mean((1 - jnp.exp(-own)) ** 2 * own, t)

    def class_balance_over_all_towers(p, b, t):
        one_hot = jax.nn.one_hot(b["label"], 3) * t.weight[:, None]
        counts = t.reduce(tj.Reduction.SUM, one_hot.sum(0))
        return mean(cross_entropy(p, b) / jnp.maximum(counts, 1.0)[b["label"]], t)

    def advantage_less_the_mean_of_all(p, b, t):
        gain = lax.stop_gradient(errors(p, b))
        total = t.reduce(tj.Reduction.SUM, mean(gain, t)).value
        return mean((gain - total) * scores(p, b), t)

    def penalised(p, b, t):
        return mean(errors(p, b), t) + 0.1 * tj.penalty((p["w"] ** 2).sum())

    def penalised_rows(p, b, t):
        return mean(errors(p, b) + 0.1 * (p["w"] ** 2).sum(), t)

    def two_means(p, b, t):
        token = tj.Weighted.mean(
            (b["tokens"] @ p["w"]) ** 2, b["mask"] * t.weight[:, None]
        )
        return mean(errors(p, b), t) + 0.3 * token

    def dropout(p, b, t):
        keep = jax.random.bernoulli(t.rng, 0.6, b["x"].shape)
        return mean(errors(p, {**b, "x": b["x"] * keep / 0.6}), t)

    def noise(p, b, t):
        first, second = jax.random.split(t.rng)
        x = b["x"] + 0.3 * jax.random.normal(first, b["x"].shape)
        x = x * jax.random.uniform(second, (len(x), 1))
        return mean(errors(p, {**b, "x": x}), t)

    def one_number_for_all_from_the_shared_key(p, b, t):
        return mean(errors(p, b) * jax.random.uniform(t.shared_rng), t)

    def rejected_draws(p, b, t):
        scale = jax.random.gamma(t.rng, 0.7, b["y"].shape)
        return mean(errors(p, b) * scale, t)

    def pairs_of_neighbours(p, b, t):
        first, second = scores(p, b).reshape(-1, 2).T
        weight = t.weight.reshape(-1, 2).min(1)
        return tj.Weighted.mean(jax.nn.softplus(second - first), weight)

    def metrics_beside_the_loss(p, b, t):
        s = scores(p, b)
        metrics = {
            "hits": tj.metrics.accuracy(b["y"] > 0, s > 0, t.weight),
            "norm": jnp.linalg.norm(p["w"]),
            "step": t.step,
        }
        return tj.TowerOutput(mean(errors(p, b), t), metrics)


RIGHT = cases(Right) | dict(
    softmax_over_classes=lambda p, b, t: mean(cross_entropy(p, b), t)
)


# Own steps: what a tower returns, of its loss and gradients.

WRONG_STEPS = {
    "sum of a gradient of a mean": lambda loss, grads: {"mean": tj.Sum(grads.value)},
    "squares of own gradients": lambda loss, grads: {
        "square": tj.Sum(jax.tree.map(lambda g: g**2, grads.sum))
    },
    "square of the own norm": lambda loss, grads: {
        "norm": tj.Sum(sum((g**2).sum() for g in jax.tree.leaves(grads.sum)))
    },
    "norm of the own mean gradient": lambda loss, grads: {
        "norm": tj.Weighted(jnp.linalg.norm(grads.value["w"]), 1.0)
    },
    "clipped own gradient": lambda loss, grads: {
        "clipped": tj.Weighted(
            jax.tree.map(lambda g: jnp.clip(g, -1.0, 1.0), grads.sum), grads.weight
        )
    },
    "sign of the own gradient": lambda loss, grads: {
        "sign": tj.Sum(jax.tree.map(jnp.sign, grads.sum))
    },
}
