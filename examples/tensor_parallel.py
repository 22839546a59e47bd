"""Split the heads and the hidden units of a layer over a tower's devices.

Each device computes its heads and its columns, and the results are summed over the
tower's devices (Shoeybi et al., 2019). The loss is written for whole arrays: the mean
over the tokens that count, whose number differs from row to row. The output is the
shape of a device's part of a matrix, and the loss after 20 steps.

    python examples/tensor_parallel.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import towerjax as tj

WIDTH = 32
HEADS = 8
LENGTH = 12
ROWS = 13
WITHIN = {"model": 4}
COLUMNS = P(None, "model")
LINES = P("model")
SPECS = {"qkv": P(None, None, "model"), "out": P("model"), "scales": P()} | {
    "up": COLUMNS,
    "bias": LINES,
    "down": LINES,
}


def init(rng):
    def draw(*shape):
        return rng.normal(size=shape) * shape[0] ** -0.5

    head = WIDTH // HEADS
    return {
        "qkv": draw(WIDTH, 3, HEADS, head),
        "out": draw(HEADS, head, WIDTH),
        "up": draw(WIDTH, 4 * WIDTH),
        "bias": 0.1 * rng.normal(size=4 * WIDTH),
        "down": draw(4 * WIDTH, WIDTH),
        "scales": np.ones((2, WIDTH)),
    }


def make_batch(rng):
    x, y = rng.normal(size=(2, ROWS, LENGTH, WIDTH))
    lengths = rng.integers(1, LENGTH + 1, ROWS)
    return {"x": x, "y": y, "length": lengths}


def norm(x, scale):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


def loss_fn(params, batch, tower):
    x = batch["x"]
    q, k, v = jnp.einsum("btd,dnhk->nbthk", norm(x, params["scales"][0]), params["qkv"])
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) * q.shape[-1] ** -0.5
    past = jnp.tri(LENGTH, dtype=bool)[None, None]
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
    y = jnp.einsum("bhqt,bthk->bqhk", weights, v)
    x = x + jnp.einsum("bthk,hkd->btd", y, params["out"])
    hidden = norm(x, params["scales"][1]) @ params["up"] + params["bias"][None, None]
    x = x + jax.nn.gelu(hidden) @ params["down"]
    losses = ((x - batch["y"]) ** 2).mean(-1)
    counts = jnp.arange(LENGTH)[None] < batch["length"][:, None]
    return tj.Weighted.mean(losses, counts * tower.weight[:, None])


def main():
    jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices
    rng = np.random.default_rng(0)
    params = init(rng)
    batch = make_batch(rng)
    strategy = tj.Mirrored(towers=2, within=WITHIN, specs=SPECS)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, remainder="pad")
    state = step.init(jax.tree.map(np.float32, params))
    for _ in range(20):
        state, metrics = step(state, batch)
    step.settle()
    part = state.params["up"].addressable_shards[0].data.shape
    print(f"{part} of {params['up'].shape} a device, loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
