"""Train a small GPT whose parameters are sharded over all devices, and let it write.

The text is Python's installed standard library, byte by byte. Layers are stacked and
scanned, each computed again in the backward pass, in bfloat16, the state in float32.
`--state sharded` keeps a shard of parameters, gradients and optimizer state on each
device (FSDP), and gathers a layer where it is used; the loss function is the same for
every `--state`, and so is the loss. `--pinned` ends on the same bits in all of them.

    python examples/gpt.py
    python examples/gpt.py --state mirrored --devices 1
"""

import argparse
import hashlib
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import towerjax as tj

WIDTH = 128
LAYERS = 4
HEADS = 4
LENGTH = 64
BATCH = 32
BYTES = 256


def load_text() -> np.ndarray:
    """Return the bytes of some modules."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "datetime", "decimal", "inspect", "socket", "typing")
    texts = [(folder / f"{name}.py").read_bytes() for name in names]
    return np.frombuffer(b"".join(texts), np.uint8)


def init(key: jax.Array) -> dict:
    """Parameters; those of the layers are stacked."""

    def normal(number: int, *shape: int) -> jax.Array:
        draw = jax.random.normal(jax.random.fold_in(key, number), shape)
        return draw * shape[-2] ** -0.5

    layers = {
        "qkv": normal(0, LAYERS, WIDTH, 3 * WIDTH),
        "out": normal(1, LAYERS, WIDTH, WIDTH) / LAYERS,
        "up": normal(2, LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(3, LAYERS, 4 * WIDTH, WIDTH) / LAYERS,
        "scales": jnp.ones((LAYERS, 2, WIDTH)),
    }
    embed = 0.1 * normal(4, BYTES, WIDTH)
    place = 0.1 * normal(5, LENGTH, WIDTH)
    return {"layers": layers, "embed": embed, "place": place}


def norm(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    square = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
    return (x * lax.rsqrt(square + 1e-6) * scale).astype(x.dtype)


def logits_of(params: dict, tokens: jax.Array) -> jax.Array:
    """``[rows, length, 256]`` of ``[rows, length]``; computed in bfloat16."""

    @jax.checkpoint
    def layer(x: jax.Array, p: dict) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda v: v.astype(jnp.bfloat16), p)
        parts = jnp.split(norm(x, p["scales"][0]) @ p["qkv"], 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in parts)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + y.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x, p["scales"][1]) @ p["up"]) @ p["down"], None

    embed = params["embed"].astype(jnp.bfloat16)
    x = embed[tokens] + params["place"][: tokens.shape[1]].astype(jnp.bfloat16)
    x, _ = lax.scan(layer, x, params["layers"])
    return (norm(x) @ embed.T).astype(jnp.float32)


def loss_fn(params: dict, batch: dict, tower: tj.Tower) -> tj.Weighted:
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, tokens[:, :-1]), tokens[:, 1:]
    )
    return tj.Weighted.mean(losses.mean(-1), tower.weight)


def batches(text: np.ndarray, seed: int):
    draw = np.random.default_rng(seed)
    while True:
        starts = draw.integers(len(text) - LENGTH - 1, size=BATCH)
        rows = text[starts[:, None] + np.arange(LENGTH + 1)]
        yield {"tokens": rows.astype(np.int32)}


def write(params: dict, prompt: bytes, count: int, key: jax.Array) -> str:
    """Write on after a prompt."""

    def another(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
        tokens, at = carry
        logits = logits_of(params, tokens)[0, at - 1]
        tokens = tokens.at[0, at].set(jax.random.categorical(key, logits / 0.7))
        return (tokens, at + 1), None

    first = np.zeros((1, LENGTH), np.int32)
    first[0, : len(prompt)] = list(prompt)
    keys = jax.random.split(key, count)
    (tokens, end), _ = lax.scan(another, (jnp.asarray(first), len(prompt)), keys)
    return bytes(np.asarray(tokens[0, : int(end)], np.uint8)).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    states = "mirrored", "sharded_optimizer", "sharded"
    parser.add_argument("--state", choices=states, default="sharded")
    parser.add_argument("--towers", type=int, default=8)
    parser.add_argument("--devices", type=int, help="how many they share: all here")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--pinned", action="store_true", help="the same bits in all")
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", args.devices or args.towers)
    devices = args.devices or min(args.towers, jax.device_count())
    names = [f"{jax.default_backend()}:{i}" for i in range(devices)]
    how = (
        {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree()}
        if args.pinned
        else {}
    )
    strategy = tj.Mirrored(names, towers=args.towers, state=args.state, **how)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
    step = tj.build_train_step(
        loss_fn, optimizer, strategy, micro_batches=args.micro_batches
    )
    state = step.init(init, rng=jax.random.key(0))
    trained = (state.params, state.opt_state)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trained))
    memory = step.report(state, next(batches(load_text(), 0))).memory
    more = memory.by_kind["temporaries"]
    print(
        f"{args.state}: {args.towers} towers, {devices} devices, on each"
        f" {held / 1e6:.2f} MB of the state and {more / 1e6:.1f} MB while it runs"
    )
    state, history = tj.run(step, state, batches(load_text(), 1), steps=args.steps)
    losses = history.metrics["loss"]
    params = tj.towers.saved_values(state.params)
    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]
    bits = hashlib.sha256(b"".join(leaves)).hexdigest()
    print(
        f"loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}, {bits[:12]}"
    )
    print(write(params, b"def ", LENGTH - 4, jax.random.key(1)))


if __name__ == "__main__":
    main()
