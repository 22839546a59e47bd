"""What do the towers know? How noisy the gradient is, and how far towers differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.metrics.rows import ratio
from towerjax.metrics.weighted import Weighted, one_mean
from towerjax.types import ArrayLike, PerTower, PyTree, Sum, short_repr
from towerjax.types.options import check_flag


@dataclasses.dataclass(frozen=True)
class TowerStatistics:
    """What towers' own gradients tell: how large a batch is worth it, and who differs.

    A part ``p`` is a tower's micro-batch, of weight ``w_p``; ``g_p`` is its gradient,
    ``G = sum_p w_p g_p / W`` that of all ``P`` parts. A mean of weight ``w`` has the
    noise of one row divided by ``w``, so that without bias

    * ``noise = (sum_p w_p |g_p|^2 - W |G|^2) / (P - 1)`` is the trace of the covariance
      of one row's gradient,
    * ``signal = |G|^2 - noise / W`` is the square of the true gradient's norm.

    Both sums travel in the step's one reduction. Rows count by their weights: one of
    weight 2 is two rows. Where the weight counts tokens, so does the noise scale.

    Metrics of a step: ``gradient/norm``, ``gradient/noise`` (NaN of one part) and
    ``gradient/signal``, which `noise_scale` smooths and divides. With ``per_tower``
    also ``towers/loss``, ``towers/norm`` and ``towers/cosine`` (of a tower's gradient
    with ``G``), ``[T]``: these stay on the towers' devices, and nothing is sent.

    Attributes:
      per_tower: Tell of each tower, too? Each tower's gradient is then held until all
        are merged: ``T / D`` gradients more on a device.

    Example:
      >>> import optax, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2),
      ...     statistics=tj.TowerStatistics())
      >>> _, metrics = step(step.init(0.0), np.array([1, 3], np.float32))
      >>> float(metrics["gradient/noise"]), metrics["towers/norm"].tolist()
      (8.0, [2.0, 6.0])

    Source:
      McCandlish et al. (2018), "An Empirical Model of Large-Batch Training", appendix
      A.1, https://arxiv.org/abs/1812.06162; here for parts of any weights.
    """

    per_tower: bool = True

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_flag("TowerStatistics.per_tower", self.per_tower)

    def of_tower(self, loss: Any, grads: Any) -> dict[str, Any]:
        """What a tower function returns besides, for `metrics`.

        Args:
          loss: As `towerjax.value_and_grad` gives it.
          grads: The same.

        Returns:
          A tree of leaves that the step merges.

        Raises:
          ValueError: The loss is a sum of several means, or of towers' totals.
        """
        if not isinstance(grads, Weighted):
            raise ValueError(
                "tj.TowerStatistics got a gradient that has no one weight, of a sum of"
                " several means or of loss_reduction=SUM. Leave the statistics out, or"
                " return one tj.Weighted, and other terms as tj.shared(...)."
            )
        square = _dot(grads.sum, grads.sum)
        counts = jnp.asarray(grads.weight != 0, square.dtype)
        sums = {"squares": ratio(square, grads.weight), "parts": counts}
        own = PerTower({"loss": one_mean(loss), "grads": grads})
        return {"sums": Sum(sums), "own": own if self.per_tower else None}

    def metrics(self, merged: dict[str, Any], grads: Weighted) -> dict[str, Any]:
        """The metrics of a step, for an update function.

        Args:
          merged: What the towers' `of_tower` came to.
          grads: The merged gradient.

        Returns:
          Names to arrays and ``PerTower`` ones.
        """
        sums, total, weight = merged["sums"].value, grads.sum, grads.weight
        square, parts = _dot(total, total), sums["parts"]
        norm, large = ratio(jnp.sqrt(square), weight), ratio(square, weight)
        noise = (sums["squares"] - large) / jnp.maximum(parts - 1, 1)
        noise = jnp.where(parts > 1, noise, jnp.nan)
        metrics = {"gradient/norm": norm, "gradient/noise": noise}
        metrics["gradient/signal"] = ratio(large - noise, weight)
        if self.per_tower:
            loss, own = (merged["own"].values[name] for name in ("loss", "grads"))
            norms = jnp.sqrt(_dot(own.sum, own.sum, lead=1))
            dots = _dot(own.sum, jax.tree.map(lambda x: x[None], total), lead=1)
            metrics["towers/loss"] = PerTower(loss.value)
            metrics["towers/norm"] = PerTower(ratio(norms, own.weight))
            cosines = ratio(ratio(dots, norms), jnp.sqrt(square))
            metrics["towers/cosine"] = PerTower(cosines)
        return metrics

    @staticmethod
    def noise_scale(
        metrics: Mapping[str, ArrayLike], *, smoothing: float = 0.99
    ) -> np.ndarray:
        """How many rows make noise and signal equal, after each of a run's steps.

        The simple noise scale ``B = noise / signal``: of much smaller batches twice the
        rows save nearly half of the steps, of much larger ones nearly none. One step's
        two numbers are noisy, so that each is averaged before they are divided.

        Args:
          metrics: ``history.metrics``.
          smoothing: How much the average before counts at each step: 0 is each step's
            own, 0.99 some last hundred steps, 1 all steps alike.

        Returns:
          ``[n]`` float64; NaN before there was a number, infinite or negative where
          noise hides the signal.

        Raises:
          ValueError: ``smoothing`` is not from 0 to 1, or there are no statistics.

        Example:
          >>> seen = {"gradient/noise": [4.0, 8.0], "gradient/signal": [2.0, 1.0]}
          >>> TowerStatistics.noise_scale(seen, smoothing=1).tolist()
          [2.0, 4.0]
        """
        if not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing={smoothing!r} must be from 0 to 1.")
        names = ("gradient/noise", "gradient/signal")
        if missing := [name for name in names if name not in metrics]:
            raise ValueError(
                f"metrics has no {missing[0]!r}: build the step with"
                " statistics=tj.TowerStatistics()."
            )
        total, scales = np.zeros(2), []
        for row in np.stack([np.asarray(metrics[name], float) for name in names], 1):
            if np.isfinite(row).all():
                total = smoothing * total + row
            with np.errstate(divide="ignore", invalid="ignore"):
                scales.append(total[0] / total[1])
        return np.array(scales)


def _dot(first: PyTree, second: PyTree, *, lead: int = 0) -> jax.Array:
    def of_leaves(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x * y.conj()).real.sum(axis=tuple(range(lead, x.ndim)))

    return jax.tree.reduce(jnp.add, jax.tree.map(of_leaves, first, second))
