"""Losses of towers that have one row each, where JAX traces other equations: a deck.

For a dim of size 1, JAX leaves equations out, and has other products and lookups.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import towerjax as tj

ROWS, TOKENS, WIDTH, HEADS, WORDS = 4, 5, 4, 2, 7
_DRAW = np.random.default_rng(0)


def drawn(*shape):
    return _DRAW.normal(size=shape).astype(np.float32)


def below(number, *shape):
    return _DRAW.integers(number, size=shape).astype(np.int32)


PARAMS = {
    "table": drawn(WORDS, WIDTH),
    "w": drawn(WIDTH, WIDTH),
    "out": drawn(WIDTH, WORDS),
    "v": drawn(WIDTH),
}
BATCH = {
    "tokens": below(WORDS, ROWS, TOKENS),
    "segments": below(2, ROWS, TOKENS),
    "mask": _DRAW.random((ROWS, TOKENS)) < 0.7,
    "x": drawn(ROWS, TOKENS, WIDTH),
    "z": drawn(ROWS, WIDTH),
    "at": below(TOKENS, ROWS, 3),
    "label": below(WORDS, ROWS),
    "square": drawn(ROWS, ROWS),
}


def mean(losses, tower, mask=None):
    weight = tower.weight.reshape(-1, *[1] * (losses.ndim - 1))
    weight = jnp.broadcast_to(weight, losses.shape)
    return tj.Weighted.mean(losses, weight if mask is None else weight * mask)


def in_heads(x):
    return jnp.swapaxes(x.reshape(*x.shape[:-1], HEADS, -1), -2, -3)


def attended(x, mask):
    q, k, v = in_heads(x), in_heads(jnp.tanh(x)), in_heads(-x)
    scores = jnp.where(mask, q @ jnp.swapaxes(k, -1, -2), -1e9)
    return jnp.swapaxes(jax.nn.softmax(scores) @ v, -2, -3).reshape(x.shape)


def entropy(params, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], labels)


def transformer_masked(params, batch, tower):
    x = params["table"][batch["tokens"]]
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool)) & batch["mask"][:, None, None]
    x = x + attended(x, mask)
    losses = entropy(params, x[:, :-1], batch["tokens"][:, 1:])
    return mean(losses, tower, batch["mask"][:, 1:])


def packed_sequences(params, batch, tower):
    segments = batch["segments"]
    mask = segments[:, None, :, None] == segments[:, None, None]
    x = params["table"][batch["tokens"]]
    return mean(entropy(params, x + attended(x, mask), batch["tokens"]), tower)


def hard_rows_of_batch(params, batch, tower):
    losses = (batch["z"] @ params["v"] - 1) ** 2
    every = tower.all_gather(losses).reshape(-1)
    limit = lax.stop_gradient(jnp.sort(every)[len(every) // 2])
    return mean(losses, tower, losses >= limit)


def graph_net(params, batch, tower):
    ends = [batch["at"], batch["at"][:, ::-1]]
    first, second = [
        jnp.take_along_axis(batch["x"], x[..., None], axis=1) for x in ends
    ]
    messages = jax.nn.relu((first - second) @ params["w"])
    heard = jnp.swapaxes(jax.nn.one_hot(ends[1], TOKENS), 1, 2) @ messages
    return mean(((batch["x"] + heard) ** 2).mean((1, 2)), tower)


def graph_net_of_degrees(params, batch, tower):
    near = jax.nn.softmax(batch["x"] @ jnp.swapaxes(batch["x"], 1, 2))
    near = near / near.sum(-1, keepdims=True)
    x = jax.nn.relu(near @ (batch["x"] @ params["w"]))
    return mean((x.sum(1) @ params["v"]) ** 2, tower)


def classified(params, batch, tower):
    return mean(entropy(params, batch["z"], batch["label"]), tower)


def covariances(params, batch, tower):
    x = batch["x"] @ params["w"]
    x = x - x.mean(1, keepdims=True)
    return mean(((jnp.swapaxes(x, 1, 2) @ x) ** 2).sum((1, 2)), tower)


def determinants(params, batch, tower):
    gram = batch["x"] @ jnp.swapaxes(batch["x"], 1, 2) + 9 * jnp.eye(TOKENS)
    return mean(jnp.linalg.slogdet(gram)[1] * params["v"][0], tower)


def forms(params, batch, tower):
    z = batch["z"]
    return mean((z[:, None] @ params["w"] @ z[:, :, None])[:, 0, 0], tower)


def queried(params, batch, tower):
    query = jnp.broadcast_to(params["table"], (len(batch["x"]), WORDS, WIDTH))
    scores = query @ jnp.swapaxes(batch["x"], 1, 2)
    return mean(jax.nn.logsumexp(scores, (1, 2)), tower)


def last_tokens(params, batch, tower):
    last = batch["mask"].sum(1) - 1
    x = jnp.take_along_axis(batch["x"], last[:, None, None], axis=1)
    return mean((x[:, 0] @ params["v"]) ** 2, tower)


def pairs_of_all(params, batch, tower):
    every = tower.all_gather(jnp.tanh(batch["z"] @ params["w"])).reshape(-1, WIDTH)
    label = tower.id * len(batch["z"]) + jnp.arange(len(batch["z"]))
    scores = batch["z"] @ every.T
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, label)
    return mean(losses, tower)


RIGHT = {
    fn.__name__: fn
    for fn in (
        *(transformer_masked, packed_sequences, hard_rows_of_batch, graph_net),
        *(graph_net_of_degrees, classified, covariances, determinants, forms),
        *(queried, last_tokens, pairs_of_all),
    )
}
# A full batch only: towers that are padded have other rows than one tower.
RIGHT_WHERE_FULL = {"hard_rows_of_batch", "pairs_of_all"}


def of_rows(change):
    """A loss of ``z [b, 4]`` that a function of all of the tower's rows changes."""
    return lambda params, batch, tower: mean(
        (change(batch["z"] * params["v"]) ** 2).sum(1), tower
    )


def of_tokens(change):
    """A loss of ``x [b, 5, 4]`` that a function of all of its rows changes."""
    return lambda params, batch, tower: mean(
        (change(batch["x"] * params["v"]) ** 2).sum((1, 2)), tower
    )


def attended_over_rows(x):
    joined = x.reshape(1, -1, WIDTH)
    return attended(joined, True).reshape(x.shape)


def in_columns(x):
    return x.T.reshape(x.shape) * jnp.arange(WIDTH)


def shared_product(x):
    return x @ jnp.swapaxes(x.mean(0, keepdims=True), 1, 2)


def of_the_first(x):
    return x @ jnp.swapaxes(x[:1], 1, 2)


def first_row(x):
    return x + x[0]


def last_row(x):
    return x * jnp.roll(x, 1, axis=0)


def looked_up_among_rows(x):
    at = jnp.argsort(x[:, 0])[:, None]
    return x + jnp.take_along_axis(x, jnp.broadcast_to(at, x.shape), axis=0)


def squeezed(x):
    return x * jnp.squeeze(x).max(0).sum()


WRONG = {
    "own similarities": of_rows(lambda x: jax.nn.softmax(x @ x.T) @ x),
    "attention over all tokens": of_tokens(attended_over_rows),
    "less the mean": of_rows(lambda x: x - 0.5 * x.mean(0)),
    "a mean in a product": of_tokens(shared_product),
    "by the norm": of_rows(lambda x: x / jnp.linalg.norm(x)),
    "by the largest": of_rows(lambda x: x / jnp.abs(x).max(0)),
    "times the rows": of_rows(lambda x: x * len(x)),
    "by a row of the batch": of_rows(lambda x: x / (ROWS // len(x))),
    "in columns": of_rows(in_columns),
    "with the first": of_rows(first_row),
    "with the last": of_rows(last_row),
    "a product with the first": of_tokens(of_the_first),
    "a sum so far": of_rows(lambda x: jnp.cumsum(x, axis=0)),
    "looked up among rows": of_rows(looked_up_among_rows),
    "squeezed": of_rows(squeezed),
    "repeated to the batch": of_rows(
        lambda x: x + jnp.sin(jnp.broadcast_to(x, (ROWS, WIDTH))).sum(0)
    ),
    "mixed by ones": of_rows(lambda x: jnp.sin(jnp.ones((ROWS, len(x))) @ x)[: len(x)]),
    "products of rows": of_rows(lambda x: x @ (x.T @ x)),
    "an outer product": of_rows(lambda x: (x[:, None] * x[None]).sum(1)),
    "by all rows": of_tokens(lambda x: x - 0.5 * x.mean((0, 1))),
    "rows as heads": of_tokens(
        lambda x: attended(x.swapaxes(0, 1), True).swapaxes(0, 1)
    ),
    "by another product": of_rows(lambda x: x @ x.T @ x if len(x) > 1 else x),
    "transposed once": of_tokens(
        lambda x: x @ (x.swapaxes(1, 2) if len(x) > 1 else x.reshape(1, WIDTH, TOKENS))
    ),
    "other dims of a product": of_rows(
        lambda x: x @ jnp.outer(x[0], jnp.arange(4.0)) if len(x) == 1 else x
    ),
}
