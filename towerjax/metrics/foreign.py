"""Use metrics of other libraries as states, by their own ``merge`` and ``compute``."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.collectives.reduce import drop_weak_type
from towerjax.types.leaves import changes, listed


def looks_like_state(x: Any) -> bool:
    """Whether the class of ``x`` has ``merge`` and ``compute``.

    The object is not asked: a ``flax.nnx`` variable forwards attributes to its value.
    """
    cls = type(x)
    return all(callable(getattr(cls, name, None)) for name in ("merge", "compute"))


def is_collection(x: Any) -> bool:
    """Whether ``x`` is a ``clu.metrics.Collection``, several metrics in one object."""
    return looks_like_state(x) and hasattr(x, "_reduction_counter")


def merge_parts(first: Any, second: Any) -> Any:
    """Merge the metrics of two parts of one batch.

    ``clu.metrics`` merges parts of a batch in another way than batches: ``LastValue``
    averages over parts and keeps the last batch. Others have ``merge`` for both.
    """
    of_parts = getattr(first, "_reduce_merge", None)
    return first.merge(second) if of_parts is None else of_parts(second)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A metric of another library, with its Python numbers kept static.

    So a number that decides a shape, such as ``num_thresholds``, stays a number
    when the arrays are traced. Made by `from_clu`.
    """

    arrays: list[Any]  # the metric's arrays, in tree order
    # Its other leaves, in tree order; None for each array.
    numbers: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})

    @property
    def metric(self) -> Any:
        """The metric, an object of its own class."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x for x in self.numbers]
        return jax.tree.unflatten(self.treedef, leaves)

    def merge(self, other: "Adapted") -> "Adapted":
        """Merge the metrics of two batches, by the class's ``merge``."""
        return self._like_this(self.metric.merge(other.metric))

    def _reduce_merge(self, other: "Adapted") -> "Adapted":
        return self._like_this(merge_parts(self.metric, other.metric))

    def _like_this(self, metric: Any) -> "Adapted":
        pairs = zip(jax.tree.leaves(metric), self.numbers, strict=True)
        arrays = [leaf for leaf, number in pairs if number is None]
        return dataclasses.replace(self, arrays=arrays)

    def compute(self) -> Any:
        """The value, by the class's ``compute`` on ``jax.Array``."""
        arrays = [jnp.asarray(x) for x in self.arrays]
        return dataclasses.replace(self, arrays=arrays).metric.compute()


def from_clu(metric: Any) -> Any:
    """A metric of ``clu.metrics`` or ``metrax`` as a metric state.

    A step converts a ``Metric`` among its metrics by itself. A ``Collection`` becomes
    a dict of its metrics: write ``{**from_clu(collection)}``. Values are the library's
    own: ``clu.metrics.Average`` of nothing is NaN. Give the metric ``tower.weight`` as
    ``mask`` or ``sample_weights``.

    Args:
      metric: An object made by ``from_model_output(...)`` of its class.

    Returns:
      A state with ``merge`` and ``compute``, a pytree; or name -> state.

    Raises:
      ValueError: ``metric`` is a class, or has no ``merge`` and ``compute``; or its
        merge cannot be traced or changes shapes, as that of a ``CollectingMetric``.

    Example:
      >>> from clu import metrics as clu_metrics
      >>> average = clu_metrics.Average.from_model_output(
      ...     jnp.array([1.0, 5.0, 9.0]), mask=jnp.array([1, 1, 0]))
      >>> state = from_clu(average)
      >>> float(state.merge(state).compute())
      3.0

    Source:
      ``clu.metrics`` (Common Loop Utils, 2021),
      https://github.com/google/CommonLoopUtils; ``metrax`` builds on it,
      https://github.com/google/metrax.
    """
    if is_collection(metric):
        parts = {name: part for name, part in vars(metric).items() if name[0] != "_"}
        return {name: from_clu(part) for name, part in parts.items()}
    if isinstance(metric, Adapted):
        return metric
    if not looks_like_state(metric) or jax.tree_util.all_leaves([metric]):
        raise ValueError(
            f"from_clu got {metric!r}, which is no pytree with merge and compute. Pass"
            " what from_model_output(...) returns."
        )
    return adapt(metric)


def adapt(metric: Any) -> Adapted:
    """Another library's state as an `Adapted`.

    A Python number that the class's merge does not change stays a number; every other
    leaf becomes an array.
    """
    leaves, treedef = jax.tree.flatten(metric)
    numbers = [x if isinstance(x, bool | int | float | str) else None for x in leaves]
    merged: list[Any] = []

    def merge(first: Adapted, second: Adapted) -> None:
        merged[:] = jax.tree.leaves(merge_parts(first.metric, second.metric))

    def adapted() -> Adapted:
        pairs = zip(leaves, numbers, strict=True)
        arrays = [drop_weak_type(x) for x, number in pairs if number is None]
        return Adapted(arrays, tuple(numbers), treedef)

    _trace_merge(type(metric).__name__, merge, adapted())
    if len(merged) == len(leaves):  # else check_merge raises
        for i, (number, new) in enumerate(zip(numbers, merged, strict=True)):
            if not (isinstance(new, type(number)) and new == number):
                numbers[i] = None
    state = adapted()
    check_merge(state)
    return state


def check_merge(state: Any) -> None:
    """Raise unless merging keeps the state's structure, shapes and dtypes."""
    name = type(getattr(state, "metric", state)).__name__
    if bad := changes("it", state, _trace_merge(name, merge_parts, state)):
        raise ValueError(
            f"The merge of two {name} changes the state: {listed(bad)}. In a step only"
            " arrays travel over towers, of fixed shapes and dtypes: make a count an"
            " array, and concatenate on the host what a predict step returns."
        )


def _trace_merge(name: str, merge: Callable[[Any, Any], Any], state: Any) -> Any:
    try:
        return jax.eval_shape(merge, state, state)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"The merge of a {name} cannot be traced, so a step cannot merge its"
            f" towers: {error} A state merges arrays of fixed shapes with jax.numpy."
        ) from error
