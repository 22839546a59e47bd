"""Accumulations of optax over several calls, and running means, as a Python loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

NUMBERS = (1, 2, 4)
DRAW = np.random.default_rng(1)
W = {"a": np.float32([0.3, -0.2, 0.5]), "b": np.float32(0.7)}
X = DRAW.normal(size=(16, 3)).astype(np.float32)
MASK = (DRAW.random(16) < 0.6).astype(np.float32)
MASK[4:8] = 0  # so that a micro-batch has no example


def errors(w, x):
    return (jnp.tanh(x @ w["a"]) - w["b"]) ** 2


def mean(w, x, mask):
    return errors(w, x).mean()


def total(w, x, mask):
    return (errors(w, x) * mask).sum()


def masked_mean(w, x, mask):
    return total(w, x, mask) / mask.sum()


def label_of(x):
    return (x[:, 1] > 0).astype(jnp.int32)


def of_table(w, x, mask):
    return ((x @ w["a"] - jnp.take(w["a"], label_of(x)) * w["b"]) ** 2).mean()


def cross_entropy(w, x, mask):
    logits = jnp.stack([x @ w["a"], jnp.tanh(x[:, 0] * w["b"])], axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label_of(x))
    return losses.mean()


def parts_of(n, x):
    return [x[i * len(x) // n : (i + 1) * len(x) // n] for i in range(n)]


def over_calls(optimizer_of, loss, *, jits=False, returns_state=False):
    """Train by ``n`` calls of a step whose optimizer accumulates."""

    def make(micro_batches):
        optimizer = optimizer_of(micro_batches)

        def step(w, state, x, mask):
            grads = jax.grad(loss)(w, x, mask)
            updates, state = optimizer.update(grads, state, w)
            return optax.apply_updates(w, updates), state

        step = jax.jit(step) if jits else step

        def train(w, x, mask):
            state = optimizer.init(w)
            pairs = zip(
                parts_of(micro_batches, x), parts_of(micro_batches, mask), strict=True
            )
            for rows, flags in pairs:
                w, state = step(w, state, rows, flags)
            return (w, state) if returns_state else w

        return jax.jit(train), (W, X, MASK)

    return make


def over_means(add_mean, loss=mean):
    """Join the gradients of ``n`` micro-batches by ``add_mean(i, all, of_one)``."""

    def make(micro_batches):
        def train(w, x, mask):
            result = jax.tree.map(jnp.zeros_like, w)
            pairs = zip(
                parts_of(micro_batches, x), parts_of(micro_batches, mask), strict=True
            )
            for i, (rows, flags) in enumerate(pairs):
                grads = jax.grad(loss)(w, rows, flags)
                result = jax.tree.map(lambda a, b: add_mean(i, a, b), result, grads)  # noqa: B023
            return result

        return jax.jit(train), (W, X, MASK)

    return make


def sums_and_a_read(micro_batches):
    """The gradient of a sum, and 0 times a parameter's elements, some out of bounds."""

    def train(w, x, mask):
        result = jax.tree.map(jnp.zeros_like, w)
        pairs = zip(
            parts_of(micro_batches, x), parts_of(micro_batches, mask), strict=True
        )
        for rows, flags in pairs:
            read = jnp.take(w["a"], label_of(rows) + micro_batches).sum()
            grads = jax.grad(total)(w, rows, flags)
            result = jax.tree.map(lambda a, b: a + b + 0.0 * read, result, grads)  # noqa: B023
        return result

    return jax.jit(train), (W, X, MASK)


def accumulated(optimizer, n, **options):
    return optax.MultiSteps(optimizer, n, **options).gradient_transformation()


CLIP = optax.clip_by_global_norm(0.1)
RIGHT = {
    "sgd": over_calls(lambda n: accumulated(optax.sgd(0.1), n), mean),
    "adam": over_calls(lambda n: accumulated(optax.adam(0.1), n), mean),
    "adamw, jit": over_calls(
        lambda n: accumulated(optax.adamw(0.1), n), mean, jits=True
    ),
    "momentum, its state": over_calls(
        lambda n: accumulated(optax.sgd(0.1, 0.9), n), mean, returns_state=True
    ),
    "clipped after": over_calls(
        lambda n: accumulated(optax.chain(CLIP, optax.adam(0.1)), n), mean
    ),
    "classes": over_calls(lambda n: accumulated(optax.adam(0.1), n), cross_entropy),
    "a table": over_calls(lambda n: accumulated(optax.adam(0.1), n), of_table),
    "sums": over_calls(
        lambda n: accumulated(optax.sgd(0.1), n, use_grad_mean=False), total
    ),
    "apply_every": over_calls(
        lambda n: optax.chain(optax.apply_every(n), optax.sgd(0.1)), total
    ),
    "apply_every of shares": over_calls(
        lambda n: optax.chain(optax.scale(1 / n), optax.apply_every(n), optax.sgd(0.1)),
        mean,
    ),
    "running mean": over_means(lambda i, a, b: a + (b - a) / (i + 1)),
    "weighted mean": over_means(lambda i, a, b: a * (i / (i + 1)) + b / (i + 1)),
}
WRONG = {
    "sums of means": over_calls(
        lambda n: accumulated(optax.sgd(0.1), n, use_grad_mean=False), mean
    ),
    "means of sums": over_calls(lambda n: accumulated(optax.sgd(0.1), n), total),
    "means of masked means": over_calls(
        lambda n: accumulated(optax.sgd(0.1), n), masked_mean
    ),
    "clipped before": over_calls(
        lambda n: optax.chain(CLIP, accumulated(optax.sgd(0.1), n)), mean
    ),
    "one call too few": over_calls(
        lambda n: accumulated(optax.sgd(0.1), n + (n > 1)), mean
    ),
    "every call": over_calls(lambda n: optax.sgd(0.1), mean),
    "apply_every of means": over_calls(
        lambda n: optax.chain(optax.apply_every(n), optax.sgd(0.1)), mean
    ),
    "apply_every after a clip": over_calls(
        lambda n: optax.chain(CLIP, optax.apply_every(n), optax.sgd(0.1)), total
    ),
    "apply_every before adam": over_calls(
        lambda n: optax.chain(optax.apply_every(n), optax.adam(0.1)), total
    ),
    "apply_every of quotients": over_calls(
        lambda n: optax.chain(optax.apply_every(n), optax.sgd(0.1)), masked_mean
    ),
    "a mean of halves": over_means(lambda i, a, b: (a + b) / 2),
    "a mean that forgets": over_means(lambda i, a, b: a + 0.5 * (b - a) if i else b),
    "the first counts more": over_means(lambda i, a, b: a + b / (i + 2), total),
    "0 times a quotient": over_means(
        lambda i, a, b: a + 0.0 * b, lambda w, x, m: total(w, x, m) / m.sum()
    ),
    "0 times what is out of bounds": sums_and_a_read,
    "differences": over_means(lambda i, a, b: b - a),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_accumulation_over_calls_is_proved(name):
    assert tj.testing.prove(RIGHT[name], micro_batches=NUMBERS).unproved == {}
    assert tj.testing.same_for(RIGHT[name], micro_batches=NUMBERS, rtol=1e-4)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", WRONG)
def test_no_wrong_accumulation_over_calls_is_proved(name):
    with pytest.raises(tj.testing.SplitError):
        tj.testing.same_for(WRONG[name], micro_batches=NUMBERS)
    try:
        assert tj.testing.prove(WRONG[name], micro_batches=NUMBERS).unproved
    except tj.ReplicationError:
        pass  # refuted


@pytest.mark.slow
def test_an_update_by_sums_of_means_is_told_as_such():
    report = tj.testing.prove(WRONG["sums of means"], micro_batches=NUMBERS)
    assert "times the number of micro-batches" in str(report)
    assert "depends on the number n of micro-batches" in str(report)


@pytest.mark.slow
def test_a_quotient_that_may_be_infinite_is_named():
    """A call that only accumulates adds 0 times an update, which may be NaN."""
    report = tj.testing.prove(WRONG["means of masked means"], micro_batches=NUMBERS)
    [why] = set(report.unproved.values())
    assert "where that value is infinite or NaN, as it may be, at" in why
    assert "(masked_mean)" in why


@pytest.mark.slow
def test_a_step_that_prints_its_gradient_is_proved():
    def printed(grads, _):
        jax.debug.print("gradient {}", grads["b"])
        return grads

    def optimizer_of(n):
        return optax.chain(optax.stateless(printed), accumulated(optax.sgd(0.1), n))

    make = over_calls(optimizer_of, mean)
    assert tj.testing.prove(make, micro_batches=NUMBERS).unproved == {}
