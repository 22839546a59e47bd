"""What a loss of a public model is given: shapes of parameters, and rows."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

import towerjax as tj

ROWS = 8
WORDS = 6
CLASSES = 5

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Loss(NamedTuple):
    """A loss of a tower, with shapes of what it is given.

    Attributes:
      loss_fn: ``(params, batch, tower)``.
      params: Parameters, or shapes.
      batch: Arrays ``[ROWS, ...]``.
      local: Variables of each tower, such as running means.
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    local: Any = None


def floats(*shape: int) -> np.ndarray:
    """A leaf of a batch."""
    return np.zeros((ROWS, *shape), np.float32)


def ints(*shape: int) -> np.ndarray:
    """A leaf of a batch, of whole numbers."""
    return np.zeros((ROWS, *shape), np.int32)


def shapes(module: nn.Module, *args: Any, **options: Any) -> Any:
    """The shapes of a module's variables."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    return jax.eval_shape(functools.partial(module.init, **options), keys, *args)


def mean(values: Any, mask: Any, tower: tj.Tower) -> tj.Weighted:
    """The mean of ``[b, ...]`` over the elements that a mask keeps."""
    weight = tower.weight.reshape((-1,) + (1,) * (values.ndim - 1))
    return tj.Weighted.mean(values, mask * weight)
