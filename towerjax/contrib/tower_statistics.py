"""Statistics of the towers' gradients: gradient noise, and how far towers differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import towerjax as tj

_MORE = "use several towers, or micro_batches=2 or more"


class Parts(tj.metrics.Additive):
    """What the parts of a batch add up to for the gradient noise."""

    counts_towers: ClassVar[bool] = True

    squares: Any  # of each part's gradient, over its weight
    number: Any  # of parts that have weight

    def compute(self) -> Any:
        """The mean square of a part."""
        return tj.metrics.ratio(self.squares, self.number)


@dataclasses.dataclass(frozen=True)
class TowerStatistics:
    """Gradient noise, which says how large a batch is useful, and statistics per tower.

    Give it to ``build_train_step(..., extend=)``; in a step of your own call `of_tower`
    in the tower function, and `metrics` in the update.

    A part ``p`` is a tower's micro-batch, of weight ``w_p``; ``g_p`` is its gradient,
    ``G = sum_p w_p g_p / W`` that of all ``P`` parts. A mean of weight ``w`` has the
    variance of one row divided by ``w``, so these estimates have no bias:

    * ``noise = (sum_p w_p |g_p|^2 - W |G|^2) / (P - 1)``, the trace of the covariance
      of one row's gradient,
    * ``signal = |G|^2 - noise / W``, the square of the true gradient's norm.

    Both sums are part of the step's one reduction. Rows count by their weights: one of
    weight 2 is two rows. Where the weight counts tokens, so does the noise scale.

    Metrics of a step: ``gradient/norm``, ``gradient/noise`` (NaN of one part) and
    ``gradient/signal``, which `noise_scale` smooths and divides. With ``per_tower``
    also ``towers/loss``, ``towers/norm`` and ``towers/cosine`` (of a tower's gradient
    with ``G``), ``[T]``: these stay on the towers' devices, and nothing is sent.

    Attributes:
      per_tower: Whether to give the metrics of each tower. Each tower's gradient is
        then kept until all are merged: ``T / D`` gradients more on a device.

    Example:
      >>> import optax, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2),
      ...     extend=TowerStatistics())
      >>> _, metrics = step(step.init(0.0), np.array([1, 3], np.float32))
      >>> float(metrics["gradient/noise"]), metrics["towers/norm"].tolist()
      (8.0, [2.0, 6.0])

    Source:
      McCandlish et al. (2018), "An Empirical Model of Large-Batch Training", appendix
      A.1, https://arxiv.org/abs/1812.06162; here for parts of any weights.
    """

    per_tower: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.per_tower, bool):
            raise ValueError(
                f"TowerStatistics.per_tower={self.per_tower!r} must be True or False."
            )

    def __call__(self, fns: Any) -> Any:
        """The functions of a train step, whose metrics are also these."""
        parts = fns.strategy.num_towers * fns.options.micro_batches
        if parts == 1:
            raise ValueError(
                f"{self!r} compares several parts of a batch, and here 1 would be"
                f" compared: {_MORE}."
            )

        def tower_fn(*args: Any) -> dict[str, Any]:
            out = fns.tower(*args)
            return {**out, "statistics": self.of_tower(out["loss"], out["grads"])}

        def update_fn(state: Any, merged: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            state, metrics = fns.update(state, merged)
            more = self.metrics(merged["statistics"], merged["grads"])
            if both := sorted(metrics.keys() & more.keys()):
                raise ValueError(
                    f"metrics[{both[0]!r}] is a name of TowerStatistics; give yours"
                    " another."
                )
            return state, metrics | more

        return fns._replace(tower=tower_fn, update=update_fn)

    def of_tower(self, loss: Any, grads: Any) -> dict[str, Any]:
        """The leaves that a tower function returns for `metrics`.

        Args:
          loss: The tower's loss, as `towerjax.value_and_grad` gives it.
          grads: The tower's gradient, as `towerjax.value_and_grad` gives it.

        Returns:
          A tree of leaves that the step merges.

        Raises:
          ValueError: The loss is a sum of several means, or has reduction SUM.
        """
        if not isinstance(grads, tj.Weighted):
            raise ValueError(
                "TowerStatistics got a gradient that has no one weight, of a sum of"
                " several means or of loss_reduction=SUM. Return one tj.Weighted."
            )
        square = _tree_dot(grads.sum, grads.sum)
        counts = jnp.asarray(grads.weight != 0, square.dtype)
        sums = Parts(tj.metrics.ratio(square, grads.weight), counts)
        if not isinstance(loss, tj.Weighted):  # with a penalty
            loss = tj.Weighted(loss.value * grads.weight, grads.weight)
        own = tj.PerTower({"loss": loss, "grads": grads})
        return {"sums": sums, "own": own if self.per_tower else None}

    def metrics(self, merged: dict[str, Any], grads: tj.Weighted) -> dict[str, Any]:
        """The metrics of a step, for an update function.

        Args:
          merged: The merged leaves of `of_tower`.
          grads: The merged gradient.

        Returns:
          A dict of arrays and ``PerTower`` arrays.
        """
        sums, total, weight = merged["sums"], grads.sum, grads.weight
        square, parts = _tree_dot(total, total), sums.number
        norm = tj.metrics.ratio(jnp.sqrt(square), weight)
        large = tj.metrics.ratio(square, weight)
        noise = (sums.squares - large) / jnp.maximum(parts - 1, 1)
        noise = jnp.where(parts > 1, noise, jnp.nan)
        metrics = {"gradient/norm": norm, "gradient/noise": noise}
        metrics["gradient/signal"] = tj.metrics.ratio(large - noise, weight)
        if self.per_tower:
            loss, own = (merged["own"].values[name] for name in ("loss", "grads"))
            norms = jnp.sqrt(_tree_dot(own.sum, own.sum, lead=1))
            dots = _tree_dot(own.sum, jax.tree.map(lambda x: x[None], total), lead=1)
            metrics["towers/loss"] = tj.PerTower(loss.value)
            metrics["towers/norm"] = tj.PerTower(tj.metrics.ratio(norms, own.weight))
            cosines = tj.metrics.ratio(tj.metrics.ratio(dots, norms), jnp.sqrt(square))
            metrics["towers/cosine"] = tj.PerTower(cosines)
        return metrics

    @staticmethod
    def noise_scale(
        metrics: Mapping[str, Any], *, smoothing: float = 0.99
    ) -> np.ndarray:
        """The simple noise scale ``B = noise / signal`` after each step, in rows.

        Batches much smaller than ``B`` need nearly half the steps when doubled, much
        larger ones nearly as many. One step's noise and signal vary much, so each is
        averaged over steps before they are divided.

        Args:
          metrics: ``history.metrics``.
          smoothing: The decay of the average: 0 takes each step alone, 0.99 about the
            last hundred steps, 1 all steps alike.

        Returns:
          ``[n]`` float64; NaN before the first finite numbers, infinite or negative
          where the noise hides the signal.

        Raises:
          ValueError: ``smoothing`` is not from 0 to 1, or there are no statistics.

        Example:
          >>> seen = {"gradient/noise": [4.0, 8.0], "gradient/signal": [2.0, 1.0]}
          >>> TowerStatistics.noise_scale(seen, smoothing=1).tolist()
          [2.0, 4.0]
        """
        if not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
            raise ValueError(f"smoothing={smoothing!r} must be a number from 0 to 1.")
        names = ("gradient/noise", "gradient/signal")
        if missing := [name for name in names if name not in metrics]:
            raise ValueError(
                f"metrics has no {missing[0]!r}: build the step with"
                " extend=TowerStatistics()."
            )
        totals = [np.zeros(2)]
        for row in np.stack([np.asarray(metrics[name], float) for name in names], 1):
            known = np.isfinite(row).all()
            totals.append(smoothing * totals[-1] + row if known else totals[-1])
        noise, signal = np.array(totals[1:]).reshape(-1, 2).T
        with np.errstate(divide="ignore", invalid="ignore"):
            return noise / signal


def _tree_dot(first: Any, second: Any, *, lead: int = 0) -> jax.Array:
    def of_leaves(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x * y.conj()).real.sum(axis=tuple(range(lead, x.ndim)))

    return jax.tree.reduce(jnp.add, jax.tree.map(of_leaves, first, second))
