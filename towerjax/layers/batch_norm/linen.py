"""``flax.linen.BatchNorm`` over several towers: a layer that takes the tower."""

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import canonicalize_dtype

from towerjax.layers.batch_norm.normalize import (
    BatchNormOptions,
    Moments,
    Statistics,
    normalize,
)
from towerjax.towers.tower import Tower

_NOT_TAKEN = "axis_name axis_index_groups use_fast_variance force_float32_reductions"


class TowerBatchNorm(linen.BatchNorm):
    """``flax.linen.BatchNorm`` over the examples of all towers.

    The variables are those of ``linen.BatchNorm``: ``params`` with ``scale`` and
    ``bias``, ``batch_stats`` with ``mean`` and ``var``, which must be mutable in
    training. Padding rows do not count, and the numbers do not depend on how many
    towers share the batch. See `towerjax.layers.batch_norm.normalize` for the formula.

    Attributes:
      statistics: ``"synchronised"``, ``"local"`` or ``"frozen"``; see
        `towerjax.layers.batch_norm.normalize.BatchNormOptions`. All others are those of
        ``linen.BatchNorm``, without ``axis_name``, ``axis_index_groups``,
        ``use_fast_variance`` and ``force_float32_reductions``.

    Raises:
      TypeError: An attribute that is not supported is set.
      ValueError: An option is out of range.

    Example:
      >>> norm = TowerBatchNorm(use_running_average=False)
      >>> x = jnp.array([[1.0], [3.0]])
      >>> variables = norm.init(jax.random.key(0), x, None)
      >>> y, updated = norm.apply(variables, x, None, mutable=["batch_stats"])
      >>> y.round(3).ravel().tolist()
      [-1.0, 1.0]
    """

    statistics: Statistics = "synchronised"

    def __post_init__(self) -> None:
        for name in _NOT_TAKEN.split():
            if getattr(self, name) != getattr(linen.BatchNorm, name):  # the default
                raise TypeError(f"TowerBatchNorm takes no {name}.")
        BatchNormOptions.of(self)
        super().__post_init__()

    @linen.compact
    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        tower: Tower | None,
        use_running_average: bool | None = None,
        *,
        mask: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """The normalised input.

        Args:
          x: ``[b, ...]``, this tower's rows.
          tower: The ``Tower``; None where there is one tower, whose rows all count.
            Required, because without it each tower would normalise its own rows.
          use_running_average: As the attribute.
          mask: Booleans or weights >= 0: ``[b]``, other leading dims of ``x``, or as
            many dims as ``x``; multiplied by ``tower.weight``.

        Returns:
          Like ``x``.

        Raises:
          ValueError: As `towerjax.layers.batch_norm.normalize.normalize`.
        """
        frozen = self.statistics == "frozen" or linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        options = BatchNormOptions.of(self, frozen)
        shape = [x.shape[i] for i in options.feature_axes(x.ndim)]
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        own: dict[str, jax.Array | None] = {"scale": None, "bias": None}
        if self.use_scale:
            own["scale"] = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            own["bias"] = self.param("bias", self.bias_init, shape, self.param_dtype)
        before = Moments(mean.value, var.value)
        tower = None if self.is_initializing() else tower
        y, running = normalize(x, tower, before, **own, mask=mask, options=options)
        if not (frozen or self.is_initializing()):
            mean.value, var.value = running.mean, running.var
        return y.astype(canonicalize_dtype(x, *own.values(), dtype=self.dtype))
