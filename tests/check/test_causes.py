"""A refusal names the line of the cause: where the proof stopped, not a guess."""

import inspect
import re

import audited_losses
import jax
import jax.numpy as jnp
import known_wrong
import numpy as np
import optax
import pytest
from proved_decks import TWO, WRONG

import towerjax as tj

LOSSES = [
    *[("known_wrong", name) for name in WRONG["known_wrong"]],
    *[("audited_losses", name) for name in WRONG["audited_losses"]],
]
FILES = {"known_wrong": known_wrong, "audited_losses": audited_losses}
# The line of a function that they call is named: for one, that of its cause; for the
# others, that of their loss, and not of the sum that they add up once more.
ELSEWHERE = {"in_a_sum_of_means", "gradient_added_up_twice"}
ELSEWHERE |= {
    "gradient_of_a_product_added_up_twice",
    "gradient_of_a_parameters_multiple_added_up_twice",
}


def refusal_of(loss_fn, params, batch, **options):
    """The text of the error of a first call, with the defaults that a user has."""
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), TWO, **options)
    with pytest.raises(tj.ReplicationError) as caught:
        step(step.init(params, rng=jax.random.key(0)), batch)
    return str(caught.value)


def lines_of(text, file):
    return [int(x) for x in re.findall(rf"at tests/{file}\.py:(\d+)", text)]


def source_of(deck, name):
    """The lines of a wrong loss: those where its name stands, and below."""
    lines = inspect.getsource(FILES[deck]).splitlines()
    starts = [i for i, x in enumerate(lines, 1) if re.search(rf"\b{name}\b", x)]
    ends = [i for i, x in enumerate(lines, 1) if re.match(r"    (def|@|\w+=)|\S", x)]
    spans = [(i, next((e for e in ends if e > i), i + 30)) for i in starts]
    return {n for first, last in spans for n in range(first, last)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?s)not proved")
@pytest.mark.parametrize("deck, name", LOSSES)
def test_a_refusal_names_a_line_of_the_wrong_loss(deck, name):
    model = WRONG[deck][name]()
    text = refusal_of(model.loss_fn, model.params, model.batch)
    lines = lines_of(text, f"decks/{deck}")
    assert lines, text
    if name not in ELSEWHERE and re.fullmatch(r"\w+", name):
        assert source_of(deck, name).intersection(lines), text


PARAMS = {"w": np.float32([1, 2, 3])}
BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=8).astype(np.float32),
}


def scores(params, batch):
    return batch["x"] @ params["w"]


def with_a_dead_value(params, batch, tower):
    z = scores(params, batch)
    z.max()  # a log that nobody returns
    gain = z - z.mean()  # the cause
    return tj.Weighted.mean(gain * batch["y"], tower.weight)


def with_a_softmax_within_a_row(params, batch, tower):
    shares = jax.nn.softmax(batch["x"] * params["w"][None], axis=1)
    best = shares.max(axis=1)
    gain = best - best.mean()  # the cause
    return tj.Weighted.mean(gain * batch["y"], tower.weight)


def with_a_key_of_the_row(params, batch, tower):
    number = jnp.arange(len(batch["y"]))
    keys = jax.vmap(lambda i: jax.random.fold_in(tower.rng, i))(number)
    noise = jax.vmap(jax.random.normal)(keys)
    z = scores(params, batch) + noise
    return tj.Weighted.mean((z - z.mean()) * batch["y"], tower.weight)  # the cause


HARMLESS = [with_a_dead_value, with_a_softmax_within_a_row, with_a_key_of_the_row]


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", HARMLESS)
def test_a_harmless_line_is_not_named(loss_fn):
    text = refusal_of(loss_fn, PARAMS, BATCH)
    lines, first = inspect.getsourcelines(loss_fn)
    [cause] = [i for i, x in enumerate(lines, first) if "# the cause" in x]
    assert set(lines_of(text, "check/test_causes")) == {cause}, text


@pytest.mark.slow
def test_a_power_is_told_as_the_number_of_towers():
    def loss_fn(params, batch, tower):
        z = scores(params, batch)
        return tj.Weighted.mean(z - z.sum() * tower.num_towers**2, tower.weight)

    text = refusal_of(loss_fn, PARAMS, BATCH)
    assert "times the number of towers" in text and "T^" not in text
