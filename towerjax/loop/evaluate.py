"""Evaluate a whole data set: merge the metrics of its batches, and divide once."""

import collections
import contextlib
import operator
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import jax

from towerjax.data.placer import PlacedBatch
from towerjax.data.stream import check_batches, close
from towerjax.data.stream import prefetch as prefetch_batches
from towerjax.metrics.state import add_batch, has_invalid_rows, value_on_host
from towerjax.step.step import Step
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary, warn
from towerjax.types.options import check_methods, check_whole
from towerjax.types.refusals import a_type, shown
from towerjax.types.tables import number_of

AnyBatches: TypeAlias = Iterable[PyTree] | Callable[[], Iterable[PyTree]]
"""An iterable of batches that can be iterated again, or a function that returns one."""


class EvaluationStep(Protocol):
    """A step that `evaluate` can call, such as one of `build_eval_step`."""

    def place_batch(self, batch: PyTree) -> PlacedBatch:
        """Place a batch on the devices of its towers; called in a thread."""
        ...

    def __call__(self, state: PyTree, batch: PlacedBatch, /) -> PyTree:
        """Compute metric states by name; the state is not donated."""
        ...


@api_boundary
def evaluate(
    step: EvaluationStep,
    state: PyTree,
    batches: AnyBatches,
    *,
    prefetch: int = 2,
) -> dict[str, Any]:
    """Evaluate a whole data set; the metrics are exact for any batch size.

    A ``Weighted`` metric becomes ``sum_b s_b / sum_b w_b`` over the batches, added in
    float64 on the host and divided once. Other metric states are merged in the same way
    and computed once; see ``tj.metrics``. A plain array cannot be merged, so the value
    of the last batch is returned.

    Args:
      step: The result of `build_eval_step`, or another `EvaluationStep`.
      state: A ``TrainState``, or the parameters alone.
      batches: Global batches, or a function that returns them.
      prefetch: How many placed batches may wait; 0 uses no thread.

    Returns:
      A dict of names and floats, with an array for a metric that has dims. If a state's
      merge does more than add every leaf, its ``compute`` gets ``jax.Array``.

    Raises:
      ValueError: There are no batches, or ``step`` returns no metrics.

    Example:
      >>> import jax.numpy as jnp, numpy as np, towerjax as tj
      >>> def metric_fn(params, batch, tower):
      ...     return {"mean": tj.Weighted.mean(params * batch, tower.weight)}
      >>> step = tj.build_eval_step(metric_fn, tj.Mirrored(towers=2))
      >>> data = np.array([1, 2, 3, 4, 10], np.float32)
      >>> evaluate(step, jnp.float32(2), tj.batches(data, 4))
      {'mean': 8.0}
    """
    check_evaluate(step)
    check_batches("batches", batches, or_function=True)
    check_whole("prefetch", prefetch, 0)
    totals: dict[str, Any] | None = None
    outputs_of_batches = outputs_on_host(step, state, batches, prefetch)
    with contextlib.closing(outputs_of_batches) as outputs:
        for metrics in outputs:
            if not isinstance(metrics, Mapping):
                raise ValueError(
                    f"The step returned {a_type(metrics)}, but evaluate needs a dict of"
                    " metrics. Pass a step of tj.build_eval_step."
                )
            totals = totals or {}
            for name, metric in metrics.items():
                totals[name] = add_batch(totals.get(name), metric)
    if totals is None:
        raise ValueError(
            "There are no batches to evaluate. An iterator is empty after its first"
            " use: pass a list, or a function that makes the batches."
        )
    if invalid := [name for name, total in totals.items() if has_invalid_rows(total)]:
        warn(
            f"{', '.join(invalid)}: NaN, because a row has an invalid label, prediction"
            " or weight, such as a class id outside of 0 to num_classes - 1, or a score"
            " outside of 0 to 1. Give weight 0 to rows that should not count."
        )
    return {name: value_on_host(total) for name, total in totals.items()}


def count_in_words(batches: Iterable[PyTree]) -> str:
    """Count the batches in words, if their number is known without reading."""
    known = operator.length_hint(batches, -1)
    if known < 0:
        return "no known number of batches"
    return number_of(known, "batch", "batches")


def check_evaluate(evaluate: Any) -> None:
    """Raise unless ``evaluate`` is an `EvaluationStep`."""
    example = "tj.build_eval_step(metric_fn, strategy)"
    check_methods("evaluate", evaluate, "place_batch __call__", example)
    if isinstance(evaluate, Step) and evaluate.plan.gives_step_flag:
        raise ValueError(
            f"evaluate={shown(evaluate)} is a train step, which returns a state and"
            f" donates the one that it is given. Pass {example}."
        )


def outputs_on_host(
    step: EvaluationStep, state: PyTree, batches: AnyBatches, prefetch: int
) -> Generator[PyTree, None, None]:
    """Yield the step's outputs for each batch, on the host.

    If a batch fails, the outputs before it are yielded first, and then the error is
    raised.
    """
    source: Any = batches
    if callable(batches) and not isinstance(batches, Iterable):
        source = batches()
        check_batches("batches()", source)
    strategy = getattr(step, "strategy", None)
    if strategy is not None and strategy.placement.num_processes > 1:
        strategy.placement.processes.require_same(
            "The data to evaluate or predict",
            count_in_words(source),
            "Give every process all batches, or each a part of its own with"
            " strategy.distribute_dataset(lambda context: ...).",
        )
    if isinstance(step, Step):
        state = step.start(state)  # checked once, not for each batch
    running: collections.deque[PyTree] = collections.deque()
    failure: Exception | None = None
    depth = 0 if getattr(source, "prefetches", False) else prefetch
    elements = iter(source)
    with contextlib.ExitStack() as stack:
        if elements is not batches:  # an iterator that the user passed in stays open
            stack.callback(close, elements)
        placed_batches = prefetch_batches(elements, step.place_batch, depth=depth)
        stack.enter_context(contextlib.closing(placed_batches))
        try:
            for placed in placed_batches:
                running.append(step(state, placed))
                # Results are fetched while the next batch is computed.
                if len(running) > 1:
                    yield jax.device_get(running.popleft())
        except Exception as error:
            failure = error
    while running:
        yield jax.device_get(running.popleft())
    if failure is not None:
        raise failure
