"""Which models are measured? Four, and what ``module:factory`` makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.tools.bench.model import (
    Factory,
    Model,
    cast,
    cross_entropy,
    images,
    normal,
)
from towerjax.tools.named import named
from towerjax.types import PyTree


def mlp(dtype: Any, *, layers: int = 4, width: int = 384) -> Model:
    """Layers of tanh, a mean squared error; each layer has two leaves."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        shape = (width, width)
        return [
            {"w": normal(rng, shape, width), "b": np.zeros(width, np.float32)}
            for _ in range(layers)
        ]

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        params, x = cast(params, dtype), batch["x"].astype(dtype)
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
    """Two 3 x 3 convolutions, the second of stride 2, a mean and a dense layer."""

    def init(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        pairs = zip(CNN_CHANNELS, CNN_CHANNELS[1:], strict=False)
        convs = [normal(rng, (3, 3, i, o), 9 * i) for i, o in pairs]
        return {"convs": convs, "dense": normal(rng, (CNN_CHANNELS[-1], 10), 64)}

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        params, x = cast(params, dtype), batch["image"].astype(dtype)
        for stride, kernel in enumerate(params["convs"], 1):
            dims = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(
                x, kernel, (stride, stride), "SAME", dimension_numbers=dims
            )
            x = jax.nn.relu(x)
        return cross_entropy(x.mean(axis=(1, 2)) @ params["dense"], batch["label"])

    def make_batch(seed: int, size: int) -> PyTree:
        return images(seed, size, CNN_SIDE)

    return Model(init, losses, make_batch)


def embedding(dtype: Any, *, rows: int = 100_000, width: int = 32) -> Model:
    """A wide table of which each example reads 16 rows, their mean, a dense layer."""

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


def transformer(dtype: Any) -> Model:
    """A causal language model: 2 layers of width 128, 64 tokens."""
    # Flax comes only where it is measured.
    from towerjax.tools.bench.networks import transformer_of

    return transformer_of(dtype)


MODELS: dict[str, Factory] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "embedding": embedding,
}


def find_model(name: str, dtype: str) -> Model:
    """The model of that name."""
    factory = MODELS.get(name) if ":" not in name else named(name)
    if factory is None:
        raise ValueError(
            f"model {name!r} is none of {', '.join(MODELS)}; one of your own is"
            " written module:factory."
        )
    model = factory(jnp.dtype(dtype))
    if not isinstance(model, Model):
        raise ValueError(
            f"{name}(dtype) returned a {type(model).__name__}; a factory returns"
            " tj.tools.bench.Model(init, losses, make_batch)."
        )
    return model
