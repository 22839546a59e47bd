"""Networks as people write them, of which the first call is timed."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.models import Model, cross_entropy, embedding, mlp, normal, transformer
from towerjax.types import PyTree

_WIDTH = 64
_TOKENS = 16


def conv_net(blocks: int, widths: tuple[int, ...]) -> Model:
    """Return residual blocks of two convolutions with instance norm, at each width."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        last = 3
        stages = []
        for width in widths:
            for _ in range(blocks):
                ins = (last, width)
                kernels = [normal(rng, (3, 3, i, width), 9 * i) for i in ins]
                norms = np.stack([np.ones(width), np.zeros(width)]).astype(np.float32)
                skip = normal(rng, (1, 1, last, width), last)
                stages.append({"kernels": kernels, "norms": [norms] * 2, "skip": skip})
                last = width
        return {"blocks": stages, "dense": normal(rng, (last, 10), last)}

    def convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=dims
        )

    def normalise(x: jax.Array, norm: jax.Array) -> jax.Array:
        own = {"axis": (1, 2), "keepdims": True}  # over each image
        x = (x - x.mean(**own)) * lax.rsqrt(x.var(**own) + 1e-5)
        return x * norm[0] + norm[1]

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["image"]
        for i, block in enumerate(params["blocks"]):
            stride = 2 if i and i % blocks == 0 else 1
            y = convolve(x, block["kernels"][0], stride)
            y = jax.nn.relu(normalise(y, block["norms"][0]))
            y = normalise(convolve(y, block["kernels"][1], 1), block["norms"][1])
            x = jax.nn.relu(y + convolve(x, block["skip"], stride))
        return cross_entropy(x.mean((1, 2)) @ params["dense"], batch["label"])

    def make_batch(seed: int, size: int) -> PyTree:
        rng = np.random.default_rng(seed)
        label = rng.integers(0, 10, size).astype(np.int32)
        return {"image": normal(rng, (size, 16, 16, 3), 1), "label": label}

    return Model(init, losses, make_batch)


def attention_net(layers: int, *, scans: bool) -> Model:
    """Return a causal transformer by hand; its layers are unrolled or scanned."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        shapes = {"qkv": (_WIDTH, 3, 4, _WIDTH // 4), "out": (_WIDTH, _WIDTH)}
        shapes |= {"up": (_WIDTH, 4 * _WIDTH), "down": (4 * _WIDTH, _WIDTH)}
        each = [
            {
                **{name: normal(rng, x, x[0]) for name, x in shapes.items()},
                "scales": [np.ones(_WIDTH, np.float32) for _ in range(2)],
            }
            for _ in range(layers)
        ]
        stacked = jax.tree.map(lambda *x: np.stack(x), *each) if scans else each
        return {"embed": normal(rng, (256, _WIDTH), _WIDTH), "layers": stacked}

    def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def apply(x: jax.Array, layer: PyTree) -> jax.Array:
        y = layer_norm(x, layer["scales"][0])
        q, k, v = jnp.moveaxis(jnp.einsum("btw,wchd->btchd", y, layer["qkv"]), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + y.reshape(x.shape) @ layer["out"]
        y = layer_norm(x, layer["scales"][1])
        return x + jax.nn.gelu(y @ layer["up"]) @ layer["down"]

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]]
        if scans:
            x, _ = lax.scan(lambda x, y: (apply(x, y), None), x, params["layers"])
        else:
            for layer in params["layers"]:
                x = apply(x, layer)
        return cross_entropy(x @ params["embed"].T, tokens[:, 1:]).mean(axis=1)

    return Model(init, losses, _make_tokens)


def lstm() -> Model:
    """Return an LSTM language model, which scans over time."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        table = normal(rng, (256, _WIDTH), _WIDTH)
        gates = normal(rng, (2 * _WIDTH, 4 * _WIDTH), 2 * _WIDTH)
        bias = np.zeros(4 * _WIDTH, np.float32)
        return {"embed": table, "gates": gates, "bias": bias}

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        xs = jnp.swapaxes(params["embed"][tokens[:, :-1]], 0, 1)

        def cell(carry: Any, x: jax.Array) -> Any:
            hidden, memory = carry
            z = jnp.concatenate([x, hidden], -1) @ params["gates"] + params["bias"]
            i, f, g, o = jnp.split(z, 4, axis=-1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (hidden, memory), hidden

        zeros = jnp.zeros_like(xs[0])
        _, out = lax.scan(cell, (zeros, zeros), xs)
        logits = jnp.swapaxes(out, 0, 1) @ params["embed"].T
        return cross_entropy(logits, tokens[:, 1:]).mean(axis=1)

    return Model(init, losses, _make_tokens)


def nnx_net() -> Model:
    """Return a ``flax.nnx`` classifier: embedding, three dense layers, layer norms."""
    from flax import nnx  # here: the other models do not need flax

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(256, _WIDTH, rngs=rngs)
            dense = [nnx.Linear(_WIDTH, _WIDTH, rngs=rngs) for _ in range(3)]
            self.norms = nnx.List([nnx.LayerNorm(_WIDTH, rngs=rngs) for _ in dense])
            self.dense = nnx.List(dense)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for dense, norm in zip(self.dense, self.norms, strict=True):
                x = x + nnx.gelu(dense(norm(x)))
            return self.embed.attend(x)

    graph, params = nnx.split(Net(nnx.Rngs(0)))
    params = jax.tree.map(np.asarray, params)

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean(axis=1)

    return Model(lambda seed: params, losses, _make_tokens)


def _make_tokens(seed: int, size: int) -> PyTree:
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, 256, (size, _TOKENS + 1)).astype(np.int32)}


_adam = functools.partial(optax.adam, 1e-3)
_sgd = functools.partial(optax.sgd, 0.1)
_momentum = functools.partial(optax.sgd, 0.1, 0.9)
NETWORKS: dict[str, tuple[Callable[[], Model], Callable[[], Any]]] = {
    "mlp, 2 layers, sgd": (lambda: mlp(np.float32, layers=2, width=32), _sgd),
    "mlp, 2 layers, adam": (lambda: mlp(np.float32, layers=2, width=32), _adam),
    "mlp, 25 layers, adam": (lambda: mlp(np.float32, layers=25, width=16), _adam),
    "cnn, instance norm, momentum": (lambda: conv_net(1, (16, 32)), _momentum),
    "resnet, 17 layers, momentum": (lambda: conv_net(2, (16, 32, 64, 128)), _momentum),
    "transformer, 4 layers, adam": (lambda: attention_net(4, scans=False), _adam),
    "transformer, 12 layers, adam": (lambda: attention_net(12, scans=False), _adam),
    "transformer, 12 scanned, adam": (lambda: attention_net(12, scans=True), _adam),
    "lstm, scanned, adam": (lstm, _adam),
    "embedding, sgd": (lambda: embedding(np.float32, rows=1000), _sgd),
    "linen transformer, adam": (lambda: transformer(np.float32), _adam),
    "nnx, 3 layers, adam": (nnx_net, _adam),
}
"""Name -> how to make the network, and its optimizer."""
