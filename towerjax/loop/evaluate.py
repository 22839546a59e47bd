"""What does a whole data set say? Every batch evaluated, divided once, exactly."""

import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax

from towerjax.data import feed
from towerjax.loop.steps import EvaluationStep
from towerjax.metrics.host import add_batch, on_host, value_on_host
from towerjax.metrics.state import is_metric
from towerjax.types import PyTree
from towerjax.types.options import check_does, check_whole

Batches: TypeAlias = Iterable[PyTree] | Callable[[], Iterable[PyTree]]
"""Batches that can be gone through again, or a function that gives them anew."""


def evaluate(
    step: EvaluationStep,
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
      step: As `build_eval_step` returns it, or another `EvaluationStep`.
      state: A ``TrainState``, or parameters alone.
      batches: Global batches, or a function that gives them.
      prefetch: How many placed batches may wait; 0 uses no thread.
      in_flight: How many evaluations may run without being waited for.

    Returns:
      Name -> float, or an array for a metric that has dims. ``compute`` of a state
      whose merge is not an addition of every leaf is called with ``jax.Array``.

    Raises:
      ValueError: There are no batches, or ``step`` returns no metrics.

    Example:
      >>> import jax.numpy as jnp, numpy as np, towerjax as tj
      >>> def metric_fn(params, batch, tower):
      ...     return {"mean": tj.Weighted.mean(params * batch, tower.weight)}
      >>> step = tj.build_eval_step(metric_fn, tj.Mirrored(towers=2))
      >>> data = np.array([1, 2, 3, 4, 10], np.float32)
      >>> evaluate(step, jnp.float32(2), feed.batches(data, 4))
      {'mean': 8.0}
    """
    check_evaluate(step)
    check_whole("prefetch", prefetch, 0)
    check_whole("in_flight", in_flight, 1)
    is_ours = not isinstance(batches, Iterable)
    source = batches() if is_ours else batches
    totals: dict[str, Any] = {}
    running: collections.deque[Any] = collections.deque()
    count = 0
    depth = 0 if getattr(source, "prefetches", False) else prefetch
    with (
        feed.closing_iterator(source, is_ours=is_ours) as iterator,
        contextlib.closing(
            feed.prefetch(iterator, step.place_batch, depth=depth)
        ) as placed_batches,
    ):
        for placed in placed_batches:
            if len(running) == in_flight:
                _add_metrics(totals, running.popleft())
            running.append(step(state, placed))
            count += 1
    while running:
        _add_metrics(totals, running.popleft())
    if count == 0:
        raise ValueError(
            "There are no batches to evaluate. An iterator is empty the second time:"
            " pass a list, or a function that gives the batches anew."
        )
    return {name: value_on_host(total) for name, total in totals.items()}


def check_evaluate(evaluate: Any) -> None:
    """Raise unless it is an `EvaluationStep`."""
    example = (
        "tj.build_eval_step(metric_fn, strategy) of a metric_fn(params, batch, tower)"
        " that returns {name: tj.Weighted.mean(..., tower.weight)}"
    )
    check_does("evaluate", evaluate, "place_batch __call__", example)


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
