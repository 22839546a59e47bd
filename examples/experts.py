"""Train a mixture of experts, of which each device of a tower holds some.

Every token goes to its two best experts, and each expert takes a limited number of
tokens per row (Lepikhin et al., 2020). The rows of a tower are split over its devices,
and so are the experts; the compiler exchanges tokens by an all-to-all. The load is
balanced over all tokens of the batch, so towers add up how many tokens each expert
gets. The output is the loss after 20 steps, with its two terms: the error of the tokens
and the balance of the experts.

    python examples/experts.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import towerjax as tj

WIDTH = 16
HIDDEN = 32
EXPERTS = 8
LENGTH = 12
ROWS = 13
CAPACITY = 2 * 2 * LENGTH // EXPERTS  # tokens of a row that an expert takes
WITHIN = {"expert": 4}
ROWS_ALONG = "expert"
# of [experts, rows, ...]
BY_EXPERT = P("expert")
BY_ROW = P(None, "expert")
SPECS = {"router": P(), "up": BY_EXPERT, "down": BY_EXPERT}


def init(rng):
    def draw(*shape):
        return rng.normal(size=shape) * shape[-2] ** -0.5

    up = draw(EXPERTS, WIDTH, HIDDEN)
    down = draw(EXPERTS, HIDDEN, WIDTH)
    return {"router": draw(WIDTH, EXPERTS), "up": up, "down": down}


def make_batch(rng):
    x, y = rng.normal(size=(2, ROWS, LENGTH, WIDTH))
    return {"x": x, "y": y, "length": rng.integers(1, LENGTH + 1, ROWS)}


def route(logits, counts):
    """Return the experts of each token, its places with them, and the places' gates."""
    gates, experts = jax.lax.top_k(jax.nn.softmax(logits), 2)
    chosen = jax.nn.one_hot(experts, EXPERTS) * counts[..., None, None]
    in_turn = chosen.swapaxes(1, 2)  # first choices come before second ones
    flat = in_turn.reshape(len(logits), -1, EXPERTS)
    places = (jnp.cumsum(flat, axis=1) - flat).reshape(in_turn.shape).swapaxes(1, 2)
    places = jax.nn.one_hot(places.astype(int), CAPACITY) * chosen[..., None]
    gates = gates / gates.sum(-1, keepdims=True)
    return chosen, places.sum(2), jnp.einsum("btk,btkec->btec", gates, places)


def exchanged(x, *specs):
    for spec in specs:
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def loss_fn(params, batch, tower):
    x = batch["x"]
    counts = jnp.arange(LENGTH)[None] < batch["length"][:, None]
    counts = counts * tower.weight[:, None]
    logits = x @ params["router"]
    chosen, places, combine = route(logits, counts)

    inner = exchanged(jnp.einsum("btec,btd->ebcd", places, x), BY_ROW, BY_EXPERT)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edh->ebch", inner, params["up"]))
    inner = jnp.einsum("ebch,ehd->ebcd", hidden, params["down"])
    inner = exchanged(inner, BY_EXPERT, BY_ROW)
    out = x + jnp.einsum("btec,ebcd->btd", combine, inner)
    losses = ((out - batch["y"]) ** 2).mean(-1)

    # Of all tokens of all towers: which part each expert was to get.
    share = tj.Weighted(chosen.sum((0, 1, 2)), 2 * counts.sum())
    share = tower.reduce(tj.Reduction.SUM, share).value
    balance = EXPERTS * jax.nn.softmax(logits) @ jax.lax.stop_gradient(share)
    return tj.Weighted.mean(losses, counts) + 0.01 * tj.Weighted.mean(balance, counts)


def main():
    jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices
    rng = np.random.default_rng(0)
    params = init(rng)
    batch = make_batch(rng)
    strategy = tj.Mirrored(towers=2, within=WITHIN, rows=ROWS_ALONG, specs=SPECS)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, remainder="pad")
    state = step.init(jax.tree.map(np.float32, params))
    for _ in range(20):
        state, metrics = step(state, batch)
    step.settle()
    print({name: f"{metrics[name]:.4f}" for name in ("loss", "loss/0", "loss/1")})


if __name__ == "__main__":
    main()
