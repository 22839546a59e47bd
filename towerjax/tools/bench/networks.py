"""What do the larger models look like? ResNet-18 and a transformer, in Flax."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from towerjax.tools.bench.model import Model, cross_entropy, images
from towerjax.types import PyTree

_VOCABULARY, _TOKENS = 512, 64


class _Block(nn.Module):
    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        strides = (self.stride, self.stride)
        conv = {"use_bias": False, "dtype": self.dtype}
        y = nn.Conv(self.features, (3, 3), strides, **conv)(x)
        y = nn.relu(nn.GroupNorm(8, dtype=self.dtype)(y))
        y = nn.Conv(self.features, (3, 3), **conv)(y)
        y = nn.GroupNorm(8, dtype=self.dtype)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), strides, **conv)(x)
            x = nn.GroupNorm(8, dtype=self.dtype)(x)
        return nn.relu(x + y)


class _ResNet18(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(64, (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.GroupNorm(8, dtype=self.dtype)(x))
        for stage in range(4):
            for block in range(2):
                stride = 2 if stage and not block else 1
                x = _Block(64 * 2**stage, stride, self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=(1, 2)))


class _Transformer(nn.Module):
    dtype: Any
    width: int = 128

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(_VOCABULARY, self.width, dtype=self.dtype)
        places = nn.Embed(_TOKENS, self.width, dtype=self.dtype)
        x = embed(tokens) + places(jnp.arange(_TOKENS))[None]
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x += nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, mask=mask)
            y = nn.LayerNorm(dtype=self.dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(y))
            x += nn.Dense(self.width, dtype=self.dtype)(y)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def resnet18_of(dtype: Any) -> Model:
    """As `towerjax.tools.bench.models.resnet18`.

    Source:
      He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition (2016),
      https://arxiv.org/abs/1512.03385, with the first layer for small images; group
      norm (Wu and He 2018, https://arxiv.org/abs/1803.08494), so that an example's
      loss is its own.
    """
    module = _ResNet18(dtype)

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        logits = module.apply({"params": params}, batch["image"])
        return cross_entropy(logits, batch["label"])  # pyright: ignore[reportArgumentType]

    def make_batch(seed: int, size: int) -> PyTree:
        return images(seed, size, 32)

    image = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
    return Model(lambda seed: _random_params(module, image, seed), losses, make_batch)


def transformer_of(dtype: Any) -> Model:
    """As `towerjax.tools.bench.models.transformer`.

    Source:
      Vaswani et al., Attention Is All You Need (2017),
      https://arxiv.org/abs/1706.03762; norms come first.
    """
    module = _Transformer(dtype)

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        logits = module.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]).mean(axis=1)  # pyright: ignore[reportArgumentType]

    def make_batch(seed: int, size: int) -> PyTree:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, _VOCABULARY, (size, _TOKENS + 1))
        return {"tokens": tokens.astype(np.int32)}

    tokens = jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32)
    return Model(lambda seed: _random_params(module, tokens, seed), losses, make_batch)


def _random_params(module: nn.Module, x: jax.ShapeDtypeStruct, seed: int) -> PyTree:
    """Numbers of the module's shapes, by NumPy: nothing is compiled for them."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    rng = np.random.default_rng(seed)

    def numbers(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        if name in ("kernel", "embedding"):
            of_rows = name == "embedding"
            fan_in = leaf.shape[-1] if of_rows else math.prod(leaf.shape[:-1])
            scale = np.float32(fan_in**-0.5)
            return rng.normal(size=leaf.shape).astype(np.float32) * scale
        return np.full(leaf.shape, float(name == "scale"), np.float32)

    return jax.tree_util.tree_map_with_path(numbers, shapes)
