"""Split a sequence over a tower's devices: attention by a constraint and by a ring.

A constraint on the queries is enough: the compiler then gathers keys and values. In a
ring (Liu et al., 2023) keys and values go from device to device instead, and no device
holds more of them than its own part and its neighbour's. The output is the loss after
20 steps of each, which is the same.

    python examples/context_parallel.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import towerjax as tj

WIDTH = 16
HEADS = 2
LENGTH = 32
ROWS = 5
WITHIN = {"context": 4}
PARTS = P(None, "context")  # of [b, t, ...]
FAR = -1e30  # finite: a ring sees parts of which no key counts


def init(rng):
    def draw(*shape):
        return rng.normal(size=shape) * WIDTH**-0.5

    head = WIDTH // HEADS
    qkv = draw(WIDTH, 3, HEADS, head)
    out = draw(HEADS, head, WIDTH)
    return {"qkv": qkv, "out": out, "places": 0.1 * draw(LENGTH, WIDTH)}


def make_batch(rng):
    x, y = rng.normal(size=(2, ROWS, LENGTH, WIDTH))
    return {"x": x, "y": y, "length": rng.integers(1, LENGTH + 1, ROWS)}


def scores(q, k, where, keys):
    """Of each query with each key at or before it, ``[b, h, q, k]``."""
    found = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.where(keys[None] <= where[:, None], found, FAR)


def by_constraint(q, k, v):
    q = lax.with_sharding_constraint(q, PARTS)
    k, v = lax.with_sharding_constraint((k, v), P())
    where = jnp.arange(LENGTH)
    weights = jax.nn.softmax(scores(q, k, where, where))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def by_ring(q, k, v):
    specs = {"in_specs": PARTS, "out_specs": PARTS, "axis_names": {"context"}}
    return jax.shard_map(ring_of_parts, check_vma=False, **specs)(q, k, v)


def ring_of_parts(q, k, v):
    """Of a device's part of the sequence, ``[b, t / devices, h, d]``."""
    length = q.shape[1]
    devices = lax.axis_size("context")
    own = lax.axis_index("context")
    here = jnp.arange(length)

    def turn(carry, number):
        (k, v), most, total, out = carry
        keys = (own - number) % devices * length + here
        found = scores(q, k, own * length + here, keys)
        new = jnp.maximum(most, found.max(-1))
        weights = jnp.exp(found - new[..., None])
        shrink = jnp.exp(most - new)
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
        ring = [(i, (i + 1) % devices) for i in range(devices)]
        return (lax.ppermute((k, v), "context", ring), new, total, out), None

    most = jnp.full((len(q), HEADS, length), FAR, q.dtype)
    first = (k, v), most, jnp.zeros_like(most), jnp.zeros_like(q.swapaxes(1, 2))
    (_, _, total, out), _ = lax.scan(turn, first, jnp.arange(devices))
    return (out / total[..., None]).swapaxes(1, 2)


def loss_by(attend):
    def loss_fn(params, batch, tower):
        x = batch["x"] + params["places"][None]
        x = lax.with_sharding_constraint(x, PARTS)
        q, k, v = jnp.einsum("btd,dnhk->nbthk", x, params["qkv"])
        out = x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), params["out"])
        losses = ((out - batch["y"]) ** 2).mean(-1)
        counts = jnp.arange(LENGTH)[None] < batch["length"][:, None]
        return tj.Weighted.mean(losses, counts * tower.weight[:, None])

    return loss_fn


def main():
    jax.config.update("jax_num_cpu_devices", 8)  # a laptop as 8 devices
    rng = np.random.default_rng(0)
    params = init(rng)
    batch = make_batch(rng)
    for attend in (by_constraint, by_ring):
        strategy = tj.Mirrored(towers=2, within=WITHIN)
        step = tj.build_train_step(
            loss_by(attend), optax.sgd(0.1), strategy, remainder="pad"
        )
        state = step.init(jax.tree.map(np.float32, params))
        for _ in range(20):
            state, metrics = step(state, batch)
        step.settle()
        print(f"{attend.__name__} loss {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
