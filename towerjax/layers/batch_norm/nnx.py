"""``flax.nnx.BatchNorm`` over several towers: a layer that takes the tower."""

from typing import Any

import jax
from flax import nnx
from flax.nnx.module import first_from

from towerjax.layers.batch_norm import moments
from towerjax.towers.tower import Tower


class TowerBatchNorm(nnx.BatchNorm):
    """``flax.nnx.BatchNorm`` over the examples of all towers.

    It is Flax's layer with the moments of the whole batch. Padding rows do not count,
    and the result does not depend on the number of towers that share the batch. See
    `towerjax.layers.batch_norm.moments.moments_of` for the formula.

    Args:
      num_features: The number of features.
      rngs: The keys; ``params`` initialises scale and bias.
      statistics: ``"synchronised"`` normalises with the moments of the rows of all
        towers. ``"local"`` normalises with the moments of this tower's own rows, and
        sends nothing. ``"frozen"`` normalises with the running moments, and does not
        change them.
      **options: Those of ``nnx.BatchNorm``, except ``axis_name`` and
        ``axis_index_groups``. The variance always takes two passes.

    Raises:
      TypeError: An argument is not supported.
      ValueError: An option is out of range.

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
        statistics: moments.Statistics = "synchronised",
        **options: Any,
    ) -> None:
        super().__init__(num_features, rngs=rngs, **options)
        self.statistics: moments.Statistics = statistics
        moments.check_options(self)

    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        tower: Tower | None,
        use_running_average: bool | None = None,
        *,
        mask: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """Normalise the input, and update the running statistics.

        Arguments and errors are those of the layer of ``linen``.
        ``use_running_average`` overrides that of the layer; one of the two must be
        given.
        """
        moments.check_options(self)  # a user may have changed them
        x, axes = moments.check_call(self, x, tower)
        if [x.shape[i] for i in axes] != [self.num_features]:
            raise ValueError(
                f"TowerBatchNorm got x of shape {x.shape}, whose features along"
                f" axis={self.axis} are not num_features={self.num_features}"
                " in number. Build the layer with the number of features of x."
            )
        frozen = self.statistics == "frozen" or first_from(
            use_running_average,
            self.use_running_average,
            error_msg="TowerBatchNorm got use_running_average=None both in the layer"
            " and in the call. Pass True or False to one of them.",
        )
        if frozen:
            return super().__call__(x, True)
        variables = {name: getattr(self, name) for name in moments.MOMENTS}
        running = {name: variable[...] for name, variable in variables.items()}
        used, new_running = moments.moments_of(self, x, axes, tower, mask, running)
        for name, variable in variables.items():
            variable.set_value(used[name])
        y = super().__call__(x, True)
        for name, variable in variables.items():
            variable.set_value(new_running[name])
        return y
