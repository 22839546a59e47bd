"""What is ``flax.nnx.BatchNorm`` on several towers? A layer that knows its tower."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from towerjax.layers.batch_norm.normalize import (
    BatchNormOptions,
    Moments,
    Statistics,
    normalize,
    scaled,
)
from towerjax.towers.tower import Tower

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})
_ZEROS, _ONES = nnx.initializers.zeros_init(), nnx.initializers.ones_init()


class TowerBatchNorm(nnx.Module):
    """``flax.nnx.BatchNorm`` that is the batch norm of all towers' examples.

    The variables are those of ``nnx.BatchNorm``: ``Param`` ``scale`` and ``bias``,
    ``BatchStat`` ``mean`` and ``var``. Padded rows do not count, and the numbers do not
    depend on how many towers share the batch. See
    `towerjax.layers.batch_norm.normalize`.

    Args:
      num_features: How many features there are.
      use_running_average: Normalise by the running statistics? Set by ``train()`` and
        ``eval()``; a value at the call goes before.
      axis: The feature dim of the input.
      momentum: How much of the running statistics a step keeps.
      epsilon: Added to the variance.
      dtype: Of the result; None takes the input's and the variables'.
      param_dtype: Of scale and bias.
      use_bias: Is a bias added?
      use_scale: Is the result scaled?
      bias_init: Makes the bias.
      scale_init: Makes the scale.
      rngs: Keys, of which ``params`` makes scale and bias.
      bias_metadata: Of the variable ``bias``.
      scale_metadata: Of the variable ``scale``.
      statistics: ``"synchronised"``, ``"local"`` or ``"frozen"``; see
        `towerjax.layers.batch_norm.normalize.BatchNormOptions`.

    Raises:
      ValueError: An argument cannot be honoured.

    Example:
      >>> norm = TowerBatchNorm(1, rngs=nnx.Rngs(0))
      >>> norm(jnp.array([[1.0], [3.0]]), None).round(3).ravel().tolist()
      [-1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Any = _ZEROS,
        scale_init: Any = _ONES,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        scale_metadata: Mapping[str, Any] = _NO_METADATA,
        statistics: Statistics = "synchronised",
    ) -> None:
        if isinstance(axis, tuple | list):
            raise ValueError(
                f"TowerBatchNorm got axis={axis!r}. num_features is the size of one"
                " dim: pass an int."
            )
        shape = (num_features,)
        self.mean = nnx.BatchStat(jnp.zeros(shape, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(shape, jnp.float32))
        self.scale, self.bias = nnx.data(None), nnx.data(None)
        if use_scale:
            made = scale_init(rngs.params(), shape, param_dtype)
            self.scale = nnx.Param(made, **scale_metadata)
        if use_bias:
            made = bias_init(rngs.params(), shape, param_dtype)
            self.bias = nnx.Param(made, **bias_metadata)
        self.num_features, self.use_running_average = num_features, use_running_average
        # As Flax's layer has them, to be read and set.
        self.axis, self.momentum, self.epsilon = axis, momentum, epsilon
        self.dtype, self.param_dtype = dtype, param_dtype
        self.use_bias, self.use_scale = use_bias, use_scale
        self.statistics: Statistics = statistics
        self._options()

    def _options(self) -> BatchNormOptions:
        return BatchNormOptions(
            self.axis, self.momentum, self.epsilon, self.statistics, self.dtype
        )

    def __call__(
        self,
        x: jax.Array,
        tower: Tower | None,
        use_running_average: bool | None = None,
        *,
        mask: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """The normalised input; moves the running statistics.

        Args:
          x: ``[b, ...]``, this tower's rows.
          tower: The ``Tower``; None where there is one, whose rows all count. To be
            written out, because to forget it would be to normalise each tower alone.
          use_running_average: Goes before that of the layer.
          mask: Booleans or weights >= 0: ``[b]``, other leading dims of ``x``, or as
            many dims as ``x``; multiplied by ``tower.weight``.

        Returns:
          Like ``x``.

        Raises:
          ValueError: As `towerjax.layers.batch_norm.normalize.normalize`; ``x`` has
            another number of features.
        """
        options = self._options()
        (axis,) = options.feature_axes(x.ndim)
        if x.shape[axis] != self.num_features:
            raise ValueError(
                f"TowerBatchNorm got x of shape {x.shape}, with {x.shape[axis]}"
                f" features along axis={options.axis}, and was made for num_features="
                f"{self.num_features}. Pass the size of that dim."
            )
        if options.statistics == "frozen":
            use_running_average = True
        elif use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError(
                "TowerBatchNorm got use_running_average=None, at the layer and at the"
                " call. Pass True or False to one of them."
            )
        before = Moments(self.mean[...], self.var[...])
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        y, running = normalize(
            x,
            tower,
            before,
            mask=mask,
            options=options,
            use_running_average=use_running_average,
        )
        if not use_running_average:
            self.mean[...], self.var[...] = running.mean, running.var
        values = (x, before.mean, before.var, scale, bias)
        dtype = dtypes.canonicalize_dtype(*values, dtype=options.dtype)
        return scaled(y, scale, bias, options).astype(dtype)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """What ``nnx.view`` calls.

        Args:
          use_running_average: As for the layer; None leaves it as it is.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
