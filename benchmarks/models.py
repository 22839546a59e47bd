"""The models whose steps are measured."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.types import PyTree


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to measure, the same for every contender.

    Attributes:
      init: ``seed -> params``: floating NumPy or JAX arrays.
      losses: ``(params, batch) -> [b]``: a loss for each example, on its own.
      make_batch: ``(seed, size) -> batch``: arrays ``[size, ...]``.
    """

    init: Callable[[int], PyTree]
    losses: Callable[[PyTree, PyTree], jax.Array]
    make_batch: Callable[[int, int], PyTree]


Factory = Callable[[Any], Model]
"""``dtype -> Model``: parameters are float32, ``losses`` computes in ``dtype``."""


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Cast each leaf to a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each example."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]


def normal(rng: Any, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    """Draw normal random numbers of variance ``1 / fan_in``, in float32."""
    return rng.normal(size=shape).astype(np.float32) / np.float32(fan_in**0.5)


def mlp(dtype: Any, *, layers: int = 4, width: int = 384) -> Model:
    """Return layers of tanh with a mean squared error; each layer has two leaves."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        bias = np.zeros(width, np.float32)
        return [
            {"w": normal(rng, (width, width), width), "b": bias} for _ in range(layers)
        ]

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        params = cast(params, dtype)
        x = batch["x"].astype(dtype)
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"][None])
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2, axis=-1)

    def make_batch(seed: int, size: int) -> PyTree:
        rng = np.random.default_rng(seed)
        return {name: normal(rng, (size, width), 1) for name in "xy"}

    return Model(init, losses, make_batch)


CNN_CHANNELS = (3, 32, 64)
CNN_SIDE = 16


def cnn(dtype: Any) -> Model:
    """Return two 3 x 3 convolutions, the second of stride 2, and a dense layer.

    A mean over the image stands between them.
    """

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        pairs = zip(CNN_CHANNELS, CNN_CHANNELS[1:], strict=False)
        convs = [normal(rng, (3, 3, i, o), 9 * i) for i, o in pairs]
        return {"convs": convs, "dense": normal(rng, (CNN_CHANNELS[-1], 10), 64)}

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        params = cast(params, dtype)
        x = batch["image"].astype(dtype)
        for stride, kernel in enumerate(params["convs"], 1):
            dims = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x, kernel, (stride, stride), "SAME", dimension_numbers=dims
            )
            x = jax.nn.relu(x)
        return cross_entropy(x.mean(axis=(1, 2)) @ params["dense"], batch["label"])

    def make_batch(seed: int, size: int) -> PyTree:
        rng = np.random.default_rng(seed)
        image = normal(rng, (size, CNN_SIDE, CNN_SIDE, 3), 1)
        return {"image": image, "label": rng.integers(0, 10, size).astype(np.int32)}

    return Model(init, losses, make_batch)


def embedding(dtype: Any, *, rows: int = 100_000, width: int = 32) -> Model:
    """Return a model with a large table of embeddings and a dense layer.

    The dense layer reads the mean of the 16 rows that an example names.
    """

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        table = normal(rng, (rows, width), width)
        return {"table": table, "dense": normal(rng, (width, 10), width)}

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        read = params["table"][batch["ids"]].astype(dtype).mean(axis=1)
        return cross_entropy(read @ params["dense"].astype(dtype), batch["label"])

    def make_batch(seed: int, size: int) -> PyTree:
        rng = np.random.default_rng(seed)
        ids = np.minimum(rng.zipf(1.2, size=(size, 16)) - 1, rows - 1).astype(np.int32)
        return {"ids": ids, "label": rng.integers(0, 10, size).astype(np.int32)}

    return Model(init, losses, make_batch)


_VOCABULARY = 512
_TOKENS = 64


def _transformer_module(dtype: Any, width: int = 128) -> Any:
    """Return a transformer of Flax, with norms before sublayers.

    It is that of Vaswani et al., https://arxiv.org/abs/1706.03762.
    """
    import flax.linen as nn  # here: ``import towerjax`` does not need flax

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(_VOCABULARY, width, dtype=dtype)
            positions = nn.Embed(_TOKENS, width, dtype=dtype)
            x = embed(tokens) + positions(jnp.arange(_TOKENS))[None]
            mask = nn.make_causal_mask(tokens)
            for _ in range(2):
                y = nn.LayerNorm(dtype=dtype)(x)
                x += nn.MultiHeadDotProductAttention(4, dtype=dtype)(y, mask=mask)
                y = nn.LayerNorm(dtype=dtype)(x)
                y = nn.gelu(nn.Dense(4 * width, dtype=dtype)(y))
                x += nn.Dense(width, dtype=dtype)(y)
            return embed.attend(nn.LayerNorm(dtype=dtype)(x))

    return Transformer()


def transformer(dtype: Any) -> Model:
    """Return a causal language model: 2 layers of width 128, 64 tokens."""
    module = _transformer_module(dtype)

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        logits = module.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean(axis=1)  # pyright: ignore[reportArgumentType]

    def make_batch(seed: int, size: int) -> PyTree:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, _VOCABULARY, (size, _TOKENS + 1))
        return {"tokens": tokens.astype(np.int32)}

    def init(seed: int) -> PyTree:
        # NumPy makes the parameters, so that nothing is compiled for them. Vectors are
        # 1, and so are biases.
        tokens = jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32)
        shapes = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
        rng = np.random.default_rng(seed)

        def numbers(x: jax.ShapeDtypeStruct) -> np.ndarray:
            is_matrix = len(x.shape) > 1
            return normal(rng, x.shape, x.shape[0]) if is_matrix else np.ones(x.shape)

        return cast(jax.tree.map(numbers, shapes), np.float32)

    return Model(init, losses, make_batch)


MODELS: dict[str, Factory] = {
    each.__name__: each for each in (mlp, cnn, transformer, embedding)
}
