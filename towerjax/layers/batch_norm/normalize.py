"""Batch norm over towers: its options, weighted moments and running statistics."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from numpy.lib.array_utils import normalize_axis_tuple

from towerjax.metrics.rows import ratio
from towerjax.metrics.weighted import Weighted
from towerjax.proof import tags
from towerjax.towers.tower import Tower, is_in_step
from towerjax.types import Reduction
from towerjax.types.leaves import promote_dtypes
from towerjax.types.options import check_choice, check_number, is_whole

Statistics: TypeAlias = Literal["synchronised", "local", "frozen"]
"""Moments of all towers' rows, of this tower's rows, or the running ones, unchanged."""


@dataclasses.dataclass(frozen=True)
class BatchNormOptions:
    """How to normalise; the names are those of Flax."""

    axis: int | tuple[int, ...] = -1  # the feature dim of the input, or a tuple of them
    momentum: float = 0.99  # how much of the running statistics a step keeps, 0 to 1
    epsilon: float = 1e-5  # added to the variance, >= 0
    # "synchronised": of the rows of all towers, as on one tower. "local": of this
    # tower's rows; nothing is sent. "frozen": the running ones, which do not change.
    statistics: Statistics = "synchronised"
    dtype: Any = None  # None is the input's; statistics are float32 or wider

    @classmethod
    def of(cls, layer: Any, use_running_average: bool = False) -> "BatchNormOptions":
        """The options of a layer, checked; with the running average it is frozen."""
        options = {x.name: getattr(layer, x.name) for x in dataclasses.fields(cls)}
        if use_running_average:
            options["statistics"] = "frozen"
        return cls(**options)

    def __post_init__(self) -> None:
        check_choice("statistics", self.statistics, get_args(Statistics))
        several = isinstance(self.axis, tuple | list)
        axes: Any = self.axis if several else (self.axis,)
        if not axes or not all(map(is_whole, axes)):
            raise ValueError(
                f"axis={self.axis!r} must be an int or a tuple of ints, the feature"
                " dims of the input, such as -1."
            )
        axes = tuple(map(int, axes))
        object.__setattr__(self, "axis", axes if several else axes[0])
        check_number("momentum", self.momentum, "a number from 0 to 1", 1.0)
        check_number("epsilon", self.epsilon, "a number >= 0")

    def feature_axes(self, num_dims: int) -> tuple[int, ...]:
        """The feature dims of an input, as ascending non-negative numbers."""
        try:
            return tuple(sorted(normalize_axis_tuple(self.axis, num_dims)))
        except ValueError as error:
            raise ValueError(
                f"axis={self.axis!r} is not a dim of an input of {num_dims} dims, or"
                " names one twice. It names the features of the input, such as -1."
            ) from error


_DEFAULTS = BatchNormOptions()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """A mean and a (biased) variance of each feature."""

    mean: jax.Array  # [c], or the shape of the feature dims
    var: jax.Array  # like mean


def normalize(
    x: jax.Array,
    tower: Tower | None,
    running: Moments,
    *,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.typing.ArrayLike | None = None,
    options: BatchNormOptions = _DEFAULTS,
) -> tuple[jax.Array, Moments]:
    """``scale (x - mean) / sqrt(var + epsilon) + bias``, and the running statistics.

    With weights ``w`` (1 for an example, 0 for padding) the mean is ``sum w x / sum w``
    and the variance ``sum w (x - mean)^2 / sum w``, sums over the rows of all towers:
    two passes over ``x``, each followed by one sum over towers. The gradient needs no
    custom rule: the transpose of a sum over towers is a sum over towers, so a tower's
    gradient is that of *all* towers' losses by its own input, and the step's reduction
    adds these to the gradient of the whole batch.

    If no row has weight, on any tower, the running statistics are used and kept.

    Raises:
      ValueError: ``tower`` is no `Tower`; ``x`` is not real, or has no such axis or
        another number of rows than the tower; the mask does not fit, or is negative.

    Source:
      S. Ioffe and C. Szegedy, Batch Normalization, 2015, arXiv:1502.03167.
    """
    if tower is not None and not isinstance(tower, Tower):
        raise ValueError(
            f"Batch norm got {tower!r} as its tower. Write norm(x, tower) with that of"
            " the tower function, or norm(x, None) of one tower whose rows all count."
        )
    x = jnp.asarray(x)
    axes = options.feature_axes(x.ndim)
    dtype = promote_dtypes(options.dtype or x.dtype, jnp.float32)
    if jnp.iscomplexobj(x) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Batch norm got x of dtype {x.dtype} and dtype={options.dtype}; it takes"
            " real numbers. Normalise real and imaginary parts by themselves."
        )

    def expand(values: jax.Array) -> jax.Array:
        """Values of the features, reshaped to broadcast against ``x``."""
        shape = [n if i in axes else 1 for i, n in enumerate(x.shape)]
        return values.reshape(shape)

    x, used = x.astype(dtype), jax.tree.map(expand, running)
    if options.statistics != "frozen":
        weight = _weights(x, tower, mask, axes)
        reducer = tower if options.statistics == "synchronised" else None
        total, batch = _moments(x, weight, axes, reducer)
        used, kept = _blend(total, batch, used, options.momentum)
        running = jax.tree.map(lambda x, old: x.reshape(old.shape), kept, running)
    deviation = lax.rsqrt(used.var.astype(dtype) + options.epsilon)
    y = (x - used.mean.astype(dtype)) * deviation
    y = y if scale is None else y * expand(scale).astype(dtype)
    return y if bias is None else y + expand(bias).astype(dtype), running


def _blend(
    total: jax.Array, batch: Moments, running: Moments, momentum: float
) -> tuple[Moments, Moments]:
    """The moments to use and to keep: the running ones where nothing has weight."""

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        return (momentum * old + (1 - momentum) * new).astype(old.dtype)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(total > 0, new, old)

    both = batch, jax.tree.map(moved, running, batch)
    used, kept = (jax.tree.map(choose, new, running) for new in both)
    return used, kept


def _weights(
    x: jax.Array,
    tower: Tower | None,
    mask: jax.typing.ArrayLike | None,
    axes: tuple[int, ...],
) -> jax.Array | None:
    """The elements' weights, with as many dims as ``x``; None where all are 1."""
    weight = None if mask is None else _check_mask(x, mask)
    # Outside a step a tower has no weights: the mask alone says which rows count.
    if tower is None or (mask is not None and not is_in_step(tower)):
        return weight
    rows = tower.weight
    if 0 in axes or x.shape[:1] != rows.shape:
        raise ValueError(
            f"Batch norm got x of shape {x.shape}, whose feature dims are {axes}, in a"
            f" tower of {rows.shape[0]} rows. Dim 0 of x must run over the tower's rows"
            "; for anything else pass tower=None and mask=..., which has one tower."
        )
    rows = rows.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
    return rows if weight is None else rows * weight


def _check_mask(x: jax.Array, mask: jax.typing.ArrayLike) -> jax.Array:
    if isinstance(mask, list | tuple):
        mask = np.asarray(mask)
    Weighted(0.0, mask)  # refuses what is negative
    shape = np.shape(mask)
    is_full = len(shape) == x.ndim
    fits = x.shape[: len(shape)] == shape or (
        is_full and all(m in (1, n) for m, n in zip(shape, x.shape, strict=True))
    )
    if not fits:
        raise ValueError(
            f"Batch norm got a mask of shape {shape} for x of shape {x.shape}. A mask"
            f" has the leading dims of x, here {x.shape[:1]} for one weight a row, or"
            f" as many dims as x, each of its size or 1."
        )
    mask = jnp.asarray(mask, x.dtype)
    return mask.reshape(shape + (1,) * (x.ndim - len(shape)))


def _moments(
    x: jax.Array, weight: jax.Array | None, axes: tuple[int, ...], tower: Tower | None
) -> tuple[jax.Array, Moments]:
    """The total weight and the moments, with as many dims as ``x``."""
    over = tuple(i for i in range(x.ndim) if i not in axes)
    if weight is None:
        weight = jnp.ones((1,) * x.ndim, x.dtype)
    else:
        # A product with 0 would keep NaN, in the gradient too.
        x = jnp.where(weight != 0, x, 0)
    repeated = math.prod(x.shape[i] for i in over if weight.shape[i] == 1)
    added = functools.partial(jnp.sum, axis=over, keepdims=True)
    parts = added(weight) * repeated, added(weight * x)
    total, addends = _sum_over_towers(tower, *parts)
    mean = ratio(addends, total)
    (addends,) = _sum_over_towers(tower, added(weight * (x - mean) ** 2))
    return total, Moments(mean, ratio(addends, total))


def _sum_over_towers(tower: Tower | None, *parts: jax.Array) -> Sequence[jax.Array]:
    """The arrays, summed over towers by one reduction of their concatenation."""
    if tower is None:
        return parts
    joined, taken_apart = ravel_pytree(parts)
    with jax.named_scope(tags.BATCH_NORM):
        return taken_apart(tower.reduce(Reduction.SUM, joined))
