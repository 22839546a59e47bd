"""Losses that are wrong of later batches, steps and parameters, not of the first ones.

Each is (params, batch, tower) -> loss, by its name.
"""

import jax.numpy as jnp
import numpy as np
from audited_losses import BATCH as ROWS
from audited_losses import PARAMS as MODEL
from audited_losses import errors, mean, scores
from jax import lax
from layouts import cases

import towerjax as tj

BATCH = {**ROWS, "present": np.ones(len(ROWS["y"]), np.float32)}
PARAMS = {**MODEL, "gate": np.float32(0)}


def present(batch, tower):
    return batch["present"] * tower.weight


class OneRow:
    """Where a tower has no row at all."""

    def at_least_one_row(p, b, t):
        return tj.Weighted(errors(p, b) @ t.weight, jnp.maximum(t.weight.sum(), 1.0))


class Masked:
    """Where a tower's mask is empty."""

    def at_least_one_weight(p, b, t):
        w = present(b, t)
        return tj.Weighted(errors(p, b) @ w, jnp.maximum(w.sum(), 1.0))

    def at_least_one_token(p, b, t):
        w = jnp.maximum(b["mask"].sum(), 1.0)
        own = jnp.tanh(b["tokens"] @ p["w"]) ** 2
        return tj.Weighted((own * b["mask"]).sum(), w)

    def one_where_nothing_is_present(p, b, t):
        w = present(b, t)
        total = lax.cond(w.any(), lambda: errors(p, b) @ w, lambda: jnp.float32(1))
        return tj.Weighted(total, t.weight.sum())

    def no_number_where_nothing_is_present(p, b, t):
        w = present(b, t)
        return tj.Weighted(errors(p, b) @ w / w.sum() * w.sum(), w.sum())


class Large:
    """Where one row is far larger than the others."""

    def a_clipped_sum(p, b, t):
        return tj.Weighted(jnp.minimum(errors(p, b).sum(), 1e3), t.weight.sum())

    def without_outliers(p, b, t):
        own = errors(p, b)
        return mean(own * (own < 8 * own.mean() + 100), t)

    def scaled_by_the_largest(p, b, t):
        own = errors(p, b)
        return mean(own / jnp.maximum(own.max() / 1e3, 1.0), t)

    def left_out_where_it_overflows(p, b, t):
        own = jnp.exp(jnp.abs(scores(p, b)) + jnp.abs(b["y"]))
        total = jnp.where(jnp.isfinite(own).all(), own, 1.0).sum()
        return tj.Weighted(total, t.weight.sum())


class Late:
    """Where many steps have been made."""

    def less_its_mean_after_the_warm_up(p, b, t):
        own = scores(p, b)
        return mean((own - (t.step > 1000) * own.mean()) ** 2, t)

    def the_harder_half_in_later_epochs(p, b, t):
        own = errors(p, b)
        is_kept = (t.step // 100 == 0) | (own >= jnp.median(own))
        return mean(own * is_kept, t)

    def an_annealed_deviation(p, b, t):
        beta = jnp.minimum(t.step / 1e6, 1.0)
        return mean(errors(p, b) + beta * scores(p, b).std(), t)


class Repeated:
    """Where two towers have one example."""

    def divided_by_duplicates(p, b, t):
        count = (b["y"][:, None] == b["y"][None]).sum(1)
        return mean(errors(p, b) / count, t)

    def pairs_of_one_label(p, b, t):
        is_pair = b["y"][:, None] == b["y"][None]
        apart = (scores(p, b)[:, None] - b["x"].sum(1)[None]) ** 2
        return mean((apart * is_pair).sum(1), t)


class Moved:
    """Where a parameter that begins at 0 has moved."""

    def a_gated_deviation(p, b, t):
        return mean(errors(p, b) + p["gate"] ** 2 * scores(p, b).std(), t)


# By the split that shows them.
FAULTS = {
    "one row in all": cases(OneRow),
    "masked on the second tower": cases(Masked),
    "one row times 100": cases(Large),
    "at step 1,000,003": cases(Late),
    "one row on both towers": cases(Repeated),
    "of other parameters": cases(Moved),
}
