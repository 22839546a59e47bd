"""``flax.nnx.BatchNorm`` over several towers: a layer that takes the tower."""

from typing import Any

import jax
from flax import nnx
from flax.nnx.module import first_from
from flax.nnx.nn import dtypes

from towerjax.layers.batch_norm.normalize import (
    BatchNormOptions,
    Moments,
    Statistics,
    normalize,
)
from towerjax.towers.tower import Tower

_UNSUPPORTED = ("axis_name", "axis_index_groups", "use_fast_variance", "promote_dtype")


class TowerBatchNorm(nnx.BatchNorm):
    """``flax.nnx.BatchNorm`` over the examples of all towers.

    The variables are those of ``nnx.BatchNorm``: ``Param`` ``scale`` and ``bias``,
    ``BatchStat`` ``mean`` and ``var``. Padding rows do not count, and the numbers do
    not depend on how many towers share the batch. See
    `towerjax.layers.batch_norm.normalize`.

    Args:
      num_features: The number of features.
      rngs: Keys; ``params`` initialises scale and bias.
      statistics: ``"synchronised"``, ``"local"`` or ``"frozen"``; see
        `towerjax.layers.batch_norm.normalize.BatchNormOptions`.
      **options: ``use_running_average``, ``axis``, ``momentum``, ``epsilon``,
        ``dtype``, ``param_dtype``, ``use_bias``, ``use_scale``, ``bias_init``,
        ``scale_init``, ``bias_metadata`` and ``scale_metadata`` of ``nnx.BatchNorm``.

    Raises:
      TypeError: An argument is not supported.
      ValueError: An option is out of range, or ``axis`` is a tuple.

    Example:
      >>> import jax.numpy as jnp
      >>> norm = TowerBatchNorm(1, rngs=nnx.Rngs(0))
      >>> norm(jnp.array([[1.0], [3.0]]), None).round(3).ravel().tolist()
      [-1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        rngs: nnx.Rngs,
        statistics: Statistics = "synchronised",
        **options: Any,
    ) -> None:
        if isinstance(axis := options.get("axis"), tuple | list):
            raise ValueError(
                f"TowerBatchNorm got axis={axis!r}. num_features is of one: an int."
            )
        if unknown := [name for name in _UNSUPPORTED if name in options]:
            raise TypeError(f"TowerBatchNorm takes no {', '.join(unknown)}.")
        super().__init__(num_features, rngs=rngs, **options)
        for name in _UNSUPPORTED:  # setting one later would have no effect
            delattr(self, name)
        self.statistics: Statistics = statistics
        BatchNormOptions.of(self)

    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        tower: Tower | None,
        use_running_average: bool | None = None,
        *,
        mask: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """The normalised input; updates the running statistics.

        Args:
          x: ``[b, ...]``, this tower's rows.
          tower: The ``Tower``; None where there is one tower, whose rows all count.
            Required, because without it each tower would normalise its own rows.
          use_running_average: Overrides that of the layer.
          mask: Booleans or weights >= 0: ``[b]``, other leading dims of ``x``, or as
            many dims as ``x``; multiplied by ``tower.weight``.

        Returns:
          Like ``x``.

        Raises:
          ValueError: As `towerjax.layers.batch_norm.normalize.normalize`; ``x`` has
            another number of features; or ``use_running_average`` is None in both.
        """
        frozen = self.statistics == "frozen" or first_from(
            use_running_average,
            self.use_running_average,
            error_msg="TowerBatchNorm got use_running_average=None, at the layer and at"
            " the call. Pass True or False to one of them.",
        )
        options = BatchNormOptions.of(self, frozen)
        (axis,) = options.feature_axes(x.ndim)
        if x.shape[axis] != self.num_features:
            raise ValueError(
                f"TowerBatchNorm got x of shape {x.shape}, with {x.shape[axis]}"
                f" features along axis={options.axis}, not {self.num_features=}."
            )
        before = Moments(self.mean[...], self.var[...])
        scale, bias = (x if x is None else x[...] for x in (self.scale, self.bias))
        y, running = normalize(
            x, tower, before, scale=scale, bias=bias, mask=mask, options=options
        )
        if not frozen:
            self.mean[...], self.var[...] = running.mean, running.var
        values = (x, before.mean, before.var, scale, bias)
        return y.astype(dtypes.canonicalize_dtype(*values, dtype=options.dtype))
