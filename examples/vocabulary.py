"""Split a vocabulary over the devices of a tower: each has some of the words.

No device ever has all logits: each takes the exponentials of its own words, and the
device that has a label gives its logit. The rows of a tower are split, too, over
another axis. The loss is written twice, for whole arrays and by hand for the words of
one device. The output is the shape of a device's part of the table and the loss after
20 steps of each, which is the same.

    python examples/vocabulary.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import towerjax as tj

WORDS = 96
WIDTH = 16
LENGTH = 12
ROWS = 13
WITHIN = {"data": 2, "model": 2}
ROWS_ALONG = "data"
SPECS = {"table": P("model"), "mix": P()}
SMOOTH = 0.1


def init(rng):
    table = rng.normal(size=(WORDS, WIDTH)) * WIDTH**-0.5
    return {"table": table, "mix": rng.normal(size=(WIDTH, WIDTH)) * WIDTH**-0.5}


def make_batch(rng):
    tokens = rng.integers(WORDS, size=(ROWS, LENGTH + 1)).astype(np.int32)
    return {"tokens": tokens, "length": rng.integers(1, LENGTH + 1, ROWS)}


def by_mask(x, table, labels):
    """Smoothed cross-entropy, ``[b, t]``; XLA aborts at a `take_along_axis` here."""
    logits = lax.with_sharding_constraint(x @ table.T, P("data", None, "model"))
    is_label = labels[..., None] == jnp.arange(WORDS)[None, None]
    own = jnp.where(is_label, logits, 0).sum(-1)
    target = (1 - SMOOTH) * own + SMOOTH * logits.mean(-1)
    return jax.nn.logsumexp(logits, axis=-1) - target


def by_hand(x, table, labels):
    rows = P("data")
    specs = {"in_specs": (rows, P("model"), rows), "out_specs": rows}
    return jax.shard_map(of_own_words, check_vma=False, **specs)(x, table, labels)


def of_own_words(x, table, labels):
    """Compute the same on a device that has the rows ``table`` of the whole table."""
    logits = x @ table.T
    most = lax.pmax(lax.stop_gradient(logits.max(-1)), "model")
    words = lax.axis_index("model") * len(table) + jnp.arange(len(table))
    is_label = labels[..., None] == words[None, None]
    of_label = jnp.where(is_label, logits, 0).sum(-1)
    exps = jnp.exp(logits - most[..., None]).sum(-1)
    of_label, exps, every = lax.psum((of_label, exps, logits.sum(-1)), "model")
    return most + jnp.log(exps) - (1 - SMOOTH) * of_label - SMOOTH * every / WORDS


def loss_by(cross_entropy):
    def loss_fn(params, batch, tower):
        tokens = batch["tokens"]
        table = params["table"]
        x = jnp.tanh(table[tokens[:, :-1]] @ params["mix"])
        losses = cross_entropy(x, table, tokens[:, 1:])
        counts = jnp.arange(LENGTH)[None] < batch["length"][:, None]
        return tj.Weighted.mean(losses, counts * tower.weight[:, None])

    return loss_fn


def main():
    jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices
    rng = np.random.default_rng(0)
    params = init(rng)
    batch = make_batch(rng)
    for cross_entropy in (by_mask, by_hand):
        how = {"within": WITHIN, "rows": ROWS_ALONG, "specs": SPECS}
        step = tj.build_train_step(
            loss_by(cross_entropy),
            optax.sgd(0.5),
            tj.Mirrored(towers=2, **how),
            remainder="pad",
        )
        state = step.init(jax.tree.map(np.float32, params))
        for _ in range(20):
            state, metrics = step(state, batch)
        step.settle()
        part = state.params["table"].addressable_shards[0].data.shape
        print(f"{cross_entropy.__name__} {part} a device, loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
