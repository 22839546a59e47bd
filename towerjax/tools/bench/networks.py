"""What does the larger model look like? A transformer, in Flax."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from towerjax.tools.bench.model import Model, cross_entropy, normal
from towerjax.types import PyTree

_VOCABULARY, _TOKENS = 512, 64


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

    def init(seed: int) -> PyTree:
        # By NumPy: nothing is compiled for them.
        tokens = jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32)
        shapes = jax.eval_shape(module.init, jax.random.key(0), tokens)["params"]
        rng = np.random.default_rng(seed)

        def numbers(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            name, rows = path[-1].key, leaf.shape[:-1]
            if name in ("kernel", "embedding"):
                fan_in = leaf.shape[-1] if name == "embedding" else math.prod(rows)
                return normal(rng, leaf.shape, fan_in)
            return np.full(leaf.shape, float(name == "scale"), np.float32)

        return jax.tree_util.tree_map_with_path(numbers, shapes)

    return Model(init, losses, make_batch)
