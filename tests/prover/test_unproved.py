"""Right programs that stay unproved: each has its row in the table of `proof.md`."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import towerjax as tj

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "proof.md"
PARAMS = {"w": np.float32([0.5, -1.0, 2.0])}
DRAW = np.random.default_rng(5)
X = DRAW.normal(size=(16, 3)).astype(np.float32)
OFFSETS = np.linspace(1, 2, 4, dtype=np.float32)
TOWERS = 4


def errors_of(params, batch):
    return (batch @ params["w"] - 1) ** 2


def mean(values, tower):
    return tj.Weighted.mean(values, tower.weight)


def weights_of(batch, tower):
    """The weights of the examples, which add up to more than 1 on each tower."""
    return tower.weight * (1 + jnp.abs(batch[:, 0]))


class Right:
    """Losses, the same on any number of towers on this batch."""

    def the_max_of_a_sum(params, batch, tower):
        mask = weights_of(batch, tower)
        return tj.Weighted(errors_of(params, batch) @ mask, jnp.maximum(mask.sum(), 1))

    def the_max_of_a_number_of_rows(params, batch, tower):
        count = jnp.maximum(tower.weight.sum(), 1)
        return tj.Weighted(errors_of(params, batch) @ tower.weight, count)

    def added_to_a_sum(params, batch, tower):
        mask = weights_of(batch, tower)
        return tj.Weighted(errors_of(params, batch) @ mask, mask.sum() + 1e-8)

    def a_sum_of_a_maximum(params, batch, tower):
        errors = errors_of(params, batch)
        most = lax.stop_gradient(errors.max())
        total = jnp.exp(errors - most).sum() * jnp.exp(most)
        return tj.Weighted(total, tower.weight.sum())

    def a_branch_by_a_maximum(params, batch, tower):
        errors = errors_of(params, batch)
        double = lambda e: jnp.where(e > 3, 2 * e, e)  # noqa: E731
        errors = lax.cond((errors > 3).any(), double, lambda e: e, errors)
        return mean(errors, tower)

    def a_finite_mean(params, batch, tower):
        mask = weights_of(batch, tower)
        own = jnp.nan_to_num(errors_of(params, batch) @ mask / mask.sum())
        return tj.Weighted(own * mask.sum(), mask.sum())

    def a_loop_over_the_rows(params, batch, tower):
        total = sum(errors_of(params, batch[i][None])[0] for i in range(len(batch)))
        return tj.Weighted(total, tower.weight.sum())

    def the_place_of_the_largest(params, batch, tower):
        errors = errors_of(params, batch)
        return mean(errors + 0 * jnp.argmax(errors).astype(jnp.float32), tower)

    def numbers_of_rows_in_an_index(params, batch, tower):
        at = 3 * jnp.arange(len(batch))[:, None] + jnp.arange(3)[None]
        return mean(errors_of(params, batch.reshape(-1)[at]), tower)

    def groups_of_rows(params, batch, tower):
        groups = batch.reshape(-1, 2, 3)
        errors = lax.map(lambda rows: errors_of(params, rows), groups)
        return mean(errors.reshape(-1), tower)

    def a_mask_for_all_rows(params, batch, tower):
        kept = jax.random.bernoulli(tower.rng, 1.0, (3,))
        return mean(errors_of(params, batch * kept[None]), tower)

    def an_array_of_a_towers_rows(params, batch, tower):
        offsets = np.tile(OFFSETS, len(batch) // len(OFFSETS))
        return mean(errors_of(params, batch) * offsets, tower)


# What the note says of each, with the name of the loss; and in which form it is so.
SAYS = {
    "the_max_of_a_number_of_rows": (
        "a replicated value divided by the number of towers compared with a replicated"
        " value"
    ),
    "the_max_of_a_sum": "the max of a sum over the tower's rows and a replicated value",
    "added_to_a_sum": "a sum over the tower's rows added to a replicated value",
    "a_sum_of_a_maximum": "the tower's rows minus a maximum over the tower's rows",
    "a_branch_by_a_maximum": "a choice by a maximum over the tower's rows",
    "a_finite_mean": "compared with a mean over the tower's own rows",
    "a_loop_over_the_rows": "the program differs between numbers of towers",
    "the_place_of_the_largest": "argmax over the tower's rows",
    "numbers_of_rows_in_an_index": (
        "a replicated value times the numbers of the tower's rows"
    ),
    "groups_of_rows": "a loop with the tower's rows in groups",
    "a_mask_for_all_rows": "a tower draws numbers that belong to no row",
    "an_array_of_a_towers_rows": "a constant has an element for each row of a tower",
}
PADDED = {"groups_of_rows", "a_sum_of_a_maximum"}


def step_of(name, towers):
    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    remainder = "pad" if name in PADDED else "error"
    options = {"remainder": remainder, "audit": False}  # whose line is asked of `check`
    return tj.build_train_step(
        getattr(Right, name), optax.sgd(0.1), strategy, **options
    )


def trained(name, towers):
    step = step_of(name, towers)
    state, metrics = step(step.init(PARAMS), X)
    return np.array([metrics["loss"], *state.params["w"]])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_a_right_program_is_unproved_for_the_reason_in_the_table(name):
    step = step_of(name, TOWERS)
    unproved = step.check(step.init(PARAMS), X).unproved
    assert SAYS[name] in unproved["loss"], unproved
    np.testing.assert_allclose(trained(name, TOWERS), trained(name, 1), 2e-5)


def test_each_has_its_row_in_the_table():
    table = "".join(re.findall(r"^\| `.*$", PAGE.read_text(), re.M))
    assert [text for text in SAYS.values() if f"`{text}`" not in table] == []
