"""``flax.linen.BatchNorm`` over several towers: a layer that takes the tower."""

from typing import Any

import jax
from flax import linen

from towerjax.layers.batch_norm import moments
from towerjax.towers.tower import Tower


class TowerBatchNorm(linen.BatchNorm):
    """``flax.linen.BatchNorm`` over the examples of all towers.

    It is Flax's layer with the moments of the whole batch. Padding rows do not count,
    and the result does not depend on the number of towers that share the batch. See
    `towerjax.layers.batch_norm.moments.moments_of` for the formula. In training
    ``batch_stats`` must be mutable.

    Attributes:
      statistics: ``"synchronised"`` normalises with the moments of the rows of all
        towers. ``"local"`` normalises with the moments of this tower's own rows, and
        sends nothing. ``"frozen"`` normalises with the running moments, and does not
        change them. All other attributes are those of ``linen.BatchNorm``, except
        ``axis_name`` and ``axis_index_groups``. The variance always takes two passes.

    Raises:
      TypeError: An attribute that is not supported is set.
      ValueError: An option is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> norm = TowerBatchNorm(use_running_average=False)
      >>> x = jnp.array([[1.0], [3.0]])
      >>> variables = norm.init(jax.random.key(0), x, None)
      >>> y, updated = norm.apply(variables, x, None, mutable=["batch_stats"])
      >>> y.round(3).ravel().tolist()
      [-1.0, 1.0]
    """

    statistics: moments.Statistics = "synchronised"

    def __post_init__(self) -> None:
        moments.check_options(self)
        super().__post_init__()

    def __call__(  # type: ignore[override]
        self,
        x: jax.Array,
        tower: Tower | None,
        use_running_average: bool | None = None,
        *,
        mask: jax.typing.ArrayLike | None = None,
    ) -> jax.Array:
        """Normalise the input by the moments that ``statistics`` chooses.

        Args:
          x: ``[b, ...]``, this tower's rows.
          tower: The ``Tower``, or None if there is one tower and all its rows count. It
            is required, because without it each tower would normalise its own rows.
          use_running_average: As the attribute.
          mask: Booleans or weights >= 0, which are multiplied by ``tower.weight``. The
            shape is ``[b]``, that of more leading dims of ``x``, or as many dims as
            ``x`` has.

        Returns:
          Like ``x``.

        Raises:
          ValueError: ``tower`` is not a `Tower`; ``x`` is not real, lacks the axis, or
            has another number of rows than the tower; or the mask does not fit.
        """
        x, axes = moments.check_call(self, x, tower)
        if self.statistics == "frozen" and self.use_running_average is None:
            use_running_average = True
        reads_average = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        if reads_average or self.is_initializing():
            return super().__call__(x, use_running_average)
        used = {
            name: self.get_variable("batch_stats", name) for name in moments.MOMENTS
        }
        if self.statistics != "frozen":
            used, running = moments.moments_of(self, x, axes, tower, mask, used)
            for name, value in running.items():
                self.put_variable("batch_stats", name, value)
        whole = self.clone(parent=None, use_running_average=True)
        variables = {"params": self.variables.get("params", {}), "batch_stats": used}
        y: Any = whole.apply(variables, x, None)
        return y
