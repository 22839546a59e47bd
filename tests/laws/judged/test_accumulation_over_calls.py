"""Accumulations of optax over several calls, and running means: they are run."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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
def test_a_right_accumulation_over_calls_ran_the_same(name):
    report = tj.testing.prove(RIGHT[name], micro_batches=NUMBERS)
    assert {x.says for x in report.equal} == {"ran the same"}
    assert report.unproved.keys() == {x.leaf for x in report.equal}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_no_wrong_accumulation_over_calls_passes(name):
    with pytest.raises(tj.testing.SplitError, match="depends? on micro_batches"):
        tj.testing.prove(WRONG[name], micro_batches=NUMBERS)


# Programs whose fault the given rows hide, or that draw by a key for each micro-batch.


def parts(n, *arrays):
    return zip(*[jnp.split(x, n) for x in arrays], strict=True)


def gradients_of(loss, *given):
    """The sum of the gradients of ``loss(w, *rows, i)`` over micro-batches."""

    def make(micro_batches):
        def train(w, *arrays):
            grads = jnp.zeros(3)
            for i, rows in enumerate(parts(micro_batches, *arrays)):
                grads += jax.grad(loss)(w, *rows, i, micro_batches)
            return {"grads": grads}  # no state, so that there is one call

        return jax.jit(train), given

    return make


ZEROS = np.zeros(3, np.float32)
KEY = jax.random.key(3)


def dropped(w, x, i, n):
    kept = jax.random.bernoulli(jax.random.fold_in(KEY, i), 0.5, x.shape)
    return (((x * kept) @ w - 1) ** 2).sum()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


def dropped_by_linen(w, x, i, n):
    kept = Linen().apply({}, x, rngs={"dropout": jax.random.fold_in(KEY, i)})
    return ((kept @ w - 1) ** 2).sum()


def dropped_by_nnx(micro_batches):
    def train(w, x):
        rngs = nnx.Rngs(0)
        grads = jnp.zeros(3)
        for (rows,) in parts(micro_batches, x):
            kept = jax.random.bernoulli(rngs.dropout(), 0.5, rows.shape)
            grads += jax.grad(lambda w: (((rows * kept) @ w - 1) ** 2).sum())(w)  # noqa: B023
        return grads

    return jax.jit(train), (ZEROS, X)


def mean_of_means(w, x, mask, i, n):
    return (((x @ w - 1) ** 2) * mask).sum() / mask.sum() / n


def with_a_penalty(w, x, i, n):
    return ((x @ w - 1) ** 2).sum() + 0.1 * (w**2).sum()


HIDDEN = {
    "a key of each": gradients_of(dropped, ZEROS, X),
    "dropout of linen": gradients_of(dropped_by_linen, ZEROS, X),
    "nnx.Rngs": dropped_by_nnx,
    "weights of 1": gradients_of(mean_of_means, ZEROS, X, np.ones(16, np.float32)),
    "flags that are set": gradients_of(mean_of_means, ZEROS, X, np.ones(16, bool)),
    "a mask of ones": gradients_of(mean_of_means, ZEROS, X, np.ones(16, np.int32)),
    "parameters of 0": gradients_of(with_a_penalty, ZEROS, X),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HIDDEN)
def test_no_fault_is_hidden_by_the_rows_that_are_given(name):
    with pytest.raises(tj.testing.SplitError, match="depends? on micro_batches"):
        tj.testing.prove(HIDDEN[name], micro_batches=NUMBERS)


def of_sums(loss, *given):
    def make(micro_batches):
        def total(w, *arrays):
            return sum(loss(w, *rows) for rows in parts(micro_batches, *arrays))

        return total, given

    return make


def in_16_bits(w, x):
    return ((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) - 1) ** 2).sum()


def only_given(w, x):
    is_traced = isinstance(x, jax.core.Tracer)
    assert is_traced or any((x[0] == X[i]).all() for i in (0, 8)), "other rows"
    return (x @ w).sum()


def in_float32(w, x):
    def add(i, total):
        return total + x.T @ (x @ w)

    return jax.lax.fori_loop(0, 1, add, jnp.zeros(3, jnp.float32)).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss, given, says, told",
    [
        (in_16_bits, (W["a"], X), "ran the same", "only scalars were compared"),
        (in_float32, (W["a"], X), "ran the same", "in float64 it raises TypeError"),
        (only_given, (W["a"], X), "unknown", "on drawn ones it raises AssertionErr"),
        (lambda w, x: jnp.log(0 * (x @ w) - 1).sum(), (W["a"], X), "unknown",
            "on drawn rows it has no finite value"),
        (lambda w, x: (x @ w).sum(), jax.eval_shape(lambda: (W["a"], X)), "unknown",
            "nothing was run, because arguments are shapes alone"),
    ],
    ids=["16 bits", "float32", "other rows", "no number", "shapes"],
)  # fmt: skip
def test_what_was_not_compared_is_told(loss, given, says, told):
    report = tj.testing.prove(of_sums(loss, *given), micro_batches=(1, 2))
    assert [x.says for x in report.equal] == [says]
    assert told in str(report)
