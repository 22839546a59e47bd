"""What does a whole data set say? Every batch evaluated, divided once, exactly."""

import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax

from towerjax.inference import InferenceStep
from towerjax.input import feed
from towerjax.input.distribute import DistributedDataset
from towerjax.metrics.host import add_batch, on_host, value_on_host
from towerjax.metrics.state import is_metric
from towerjax.types import PyTree

Batches: TypeAlias = Iterable[PyTree] | Callable[[], Iterable[PyTree]]
"""Batches that can be gone through again, or a function that gives them anew."""


def evaluate_all(
    evaluate: InferenceStep,
    state: Any,
    batches: Batches,
    *,
    prefetch: int = 2,
    in_flight: int = 2,
) -> dict[str, Any]:
    """The metrics over a whole data set, exact however it is cut into batches.

    ``sum_b s_b / sum_b w_b`` over the batches' ``Weighted`` metrics, added in float64
    on the host and divided once; other metric states merge in the same way and are
    computed once, see ``tj.metrics``. A plain array cannot be merged: its value is
    that of the last batch.

    Args:
      evaluate: As `build_eval_step` returns it.
      state: A ``TrainState``, or parameters alone.
      batches: Global batches, or a function that gives them.
      prefetch: How many placed batches may wait; 0 uses no thread.
      in_flight: How many evaluations may run without being waited for.

    Returns:
      Name -> float, or an array for a metric that has dims. ``compute`` of a state
      whose merge is not an addition of every leaf is called with ``jax.Array``.

    Raises:
      ValueError: There are no batches, or ``evaluate`` returns no metrics.

    Example:
      >>> import jax.numpy as jnp, numpy as np, towerjax as tj
      >>> def metric_fn(params, batch, tower):
      ...     return {"mean": tj.Weighted.mean(params * batch, tower.weight)}
      >>> evaluate = tj.build_eval_step(metric_fn, tj.Mirrored(towers=2))
      >>> data = np.array([1, 2, 3, 4, 10], np.float32)
      >>> evaluate_all(evaluate, jnp.float32(2), feed.batches(data, 4))
      {'mean': 8.0}
    """
    source = batches if isinstance(batches, Iterable) else batches()
    totals: dict[str, Any] = {}
    running: collections.deque[Any] = collections.deque()
    count = 0
    depth = 0 if isinstance(source, DistributedDataset) else prefetch  # it has its own
    placed_batches = feed.prefetch(source, evaluate.place_batch, depth=depth)
    with contextlib.closing(placed_batches):
        for placed in placed_batches:
            if len(running) == in_flight:
                _add_metrics(totals, running.popleft())
            running.append(evaluate(state, placed))
            count += 1
    while running:
        _add_metrics(totals, running.popleft())
    if count == 0:
        raise ValueError(
            "There are no batches to evaluate. An iterator is empty the second time:"
            " pass a list, or a function that gives the batches anew."
        )
    return {name: value_on_host(total) for name, total in totals.items()}


def _add_metrics(totals: dict[str, Any], metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"evaluate returned a {type(metrics).__name__} instead of metrics by name."
            " Pass a step of tj.build_eval_step."
        )
    for name, metric in jax.device_get(metrics).items():
        if is_metric(metric):
            metric = add_batch(totals.get(name), on_host(metric))
        totals[name] = metric
