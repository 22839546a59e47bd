"""What is a model here? Parameters, a loss for each example, a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    """Each leaf in the dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Of each example."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1)[..., 0]


def images(seed: int, size: int, side: int) -> PyTree:
    """A batch of random images of 10 classes."""
    rng = np.random.default_rng(seed)
    image = normal(rng, (size, side, side, 3), 1)
    return {"image": image, "label": rng.integers(0, 10, size).astype(np.int32)}


def normal(rng: Any, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    """Numbers of variance ``1 / fan_in``, ``shape`` float32."""
    return rng.normal(size=shape).astype(np.float32) / np.float32(fan_in**0.5)
