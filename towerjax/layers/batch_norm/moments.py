"""Weighted moments of a batch over all towers, and the updated running ones."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.lib.array_utils import normalize_axis_tuple

from towerjax.jaxprs import tags
from towerjax.metrics.rows import quotient
from towerjax.metrics.weighted import Weighted
from towerjax.towers.tower import Tower, is_in_step
from towerjax.types import ArrayLike, Reduction
from towerjax.types.options import check_choice, check_number
from towerjax.types.trees import promote_dtypes

Statistics: TypeAlias = Literal["synchronised", "local", "frozen"]
"""Moments of all towers' rows, of this tower's rows, or the running ones, unchanged."""

Moments: TypeAlias = Mapping[str, jax.Array]
"""By name the mean and the (biased) variance of each feature."""

MOMENTS = ("mean", "var")

_NOT_TAKEN = ("axis_name", "axis_index_groups", "force_float32_reductions")


def check_options(layer: Any) -> None:
    """Raise if an option of the batch norm layer is not valid."""
    for name in _NOT_TAKEN:
        if getattr(layer, name, None) not in (None, True):
            raise TypeError(f"TowerBatchNorm does not support {name}.")
    check_choice("statistics", layer.statistics, get_args(Statistics))
    check_number("momentum", layer.momentum, "a number from 0 to 1", 1.0)
    check_number("epsilon", layer.epsilon, "a number >= 0")


def check_call(
    layer: Any, x: ArrayLike, tower: Tower | None
) -> tuple[jax.Array, tuple[int, ...]]:
    """Make an array of the input, and find the dims of its features.

    Raises if the input or the tower does not fit the layer.
    """
    if tower is not None and not isinstance(tower, Tower):
        raise ValueError(
            f"Batch norm got {tower!r} as its tower. Write norm(x, tower) with the"
            " tower of the tower function, or norm(x, None) for one tower whose rows"
            " all count."
        )
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x):
        raise ValueError(
            f"Batch norm got x of dtype {x.dtype}, but it needs real numbers."
            " Normalise real and imaginary parts separately."
        )
    try:
        axes = sorted(normalize_axis_tuple(layer.axis, x.ndim))
        if not axes:
            raise ValueError("no axis")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"axis={layer.axis!r} is not a dim of an input of {x.ndim} dims, or names"
            " one twice. Name the dims of features of the input, such as -1."
        ) from error
    return x, tuple(axes)


def moments_of(
    layer: Any,
    x: jax.Array,
    axes: tuple[int, ...],
    tower: Tower | None,
    mask: Any,
    running: Moments,
) -> tuple[Moments, Moments]:
    """Compute the moments to normalise with, and the running ones after them.

    `check_call` returns ``x`` and ``axes``, the dims of its features.

    The weight ``w`` of a row is 1 for an example and 0 for padding. The mean is ``sum w
    x / sum w``, and the variance is ``sum w (x - mean)^2 / sum w``. The sums are over
    the rows of all towers. So there are two passes over ``x``, each followed by one sum
    over towers.

    The gradient needs no custom rule, because the transpose of a sum over towers is a
    sum over towers. A tower's gradient is that of *all* towers' losses by its own
    input. The step adds these up to the gradient of the whole batch.

    If no row of any tower has weight, the moments are the running ones.

    Raises:
      ValueError: ``x`` has another number of rows than the tower; the mask does not
        fit, or is negative.

    Source:
      S. Ioffe and C. Szegedy, Batch Normalization, 2015, arXiv:1502.03167.
    """
    x = x.astype(promote_dtypes(layer.dtype or x.dtype, jnp.float32))
    weight = _weights(x, tower, mask, axes)
    if layer.statistics != "synchronised":
        tower = None
    total, *batch = _moments(x, weight, axes, tower)
    counts = jnp.broadcast_to(total > 0, batch[0].shape)
    used = {}
    new_running = {}
    for name, new in zip(MOMENTS, batch, strict=True):
        old = running[name]
        some = counts.reshape(old.shape)
        new = new.reshape(old.shape)
        used[name] = jnp.where(some, new, old)
        moved = layer.momentum * old + (1 - layer.momentum) * new
        new_running[name] = jnp.where(some, moved.astype(old.dtype), old)
    return used, new_running


def _weights(
    x: jax.Array,
    tower: Tower | None,
    mask: jax.typing.ArrayLike | None,
    axes: tuple[int, ...],
) -> jax.Array | None:
    """Weight each element; None if all weights are 1.

    The result can be broadcast to ``x``.
    """
    weight = None if mask is None else _check_mask(x, mask)
    # Outside a step a tower has no weights, so the mask alone says which rows count.
    if tower is None or (mask is not None and not is_in_step(tower)):
        return weight
    rows = tower.weight
    if 0 in axes or x.shape[:1] != rows.shape:
        raise ValueError(
            f"Batch norm got x of shape {x.shape}, whose feature dims are {axes}, in a"
            f" tower of {rows.shape[0]} rows, but dim 0 of x must run over the tower's"
            " rows. For anything else pass tower=None and mask=..., as for one tower."
        )
    rows = rows.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
    return rows if weight is None else rows * weight


def _check_mask(x: jax.Array, mask: jax.typing.ArrayLike) -> jax.Array:
    if isinstance(mask, list | tuple):
        mask = np.asarray(mask)
    Weighted(0.0, mask)  # raises for a negative weight
    shape = np.shape(mask)
    is_full = len(shape) == x.ndim
    fits = x.shape[: len(shape)] == shape or (
        is_full and all(m in (1, n) for m, n in zip(shape, x.shape, strict=True))
    )
    if not fits:
        raise ValueError(
            f"Batch norm got a mask of shape {shape} for x of shape {x.shape}. Give it"
            f" the leading dims of x, here {x.shape[:1]} for one weight per row, or as"
            " many dims as x, each of its size or 1."
        )
    mask = jnp.asarray(mask, x.dtype)
    return mask.reshape(shape + (1,) * (x.ndim - len(shape)))


def _moments(
    x: jax.Array, weight: jax.Array | None, axes: tuple[int, ...], tower: Tower | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the total weight, the mean and the variance, with the dims of ``x``."""
    over = tuple(i for i in range(x.ndim) if i not in axes)
    if weight is None:
        weight = jnp.ones((1,) * x.ndim, x.dtype)
    else:
        # Padding is replaced by 0 and not multiplied by 0, because NaN times 0 is NaN,
        # in the gradient too.
        x = jnp.where(weight != 0, x, 0)
    repeated = math.prod(x.shape[i] for i in over if weight.shape[i] == 1)
    added = functools.partial(jnp.sum, axis=over, keepdims=True)
    total, addends = _sum_over_towers(
        tower, added(weight) * repeated, added(weight * x)
    )
    mean = quotient(addends, total)
    (addends,) = _sum_over_towers(tower, added(weight * (x - mean) ** 2))
    return total, mean, quotient(addends, total)


def _sum_over_towers(tower: Tower | None, *parts: jax.Array) -> Sequence[jax.Array]:
    """Add several arrays over towers, by a single reduction of all of them."""
    if tower is None:
        return parts
    joined, taken_apart = ravel_pytree(parts)
    with jax.named_scope(tags.BATCH_NORM):
        return taken_apart(tower.reduce(Reduction.SUM, joined))
