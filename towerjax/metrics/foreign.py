"""How do metrics of other libraries become states? By their own merge and compute."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.collectives.reduce import strong
from towerjax.types import PyTree
from towerjax.types.leaves import listed


def looks_like_state(x: Any) -> bool:
    """Does it have ``merge`` and ``compute``, as an object and not as a class?"""
    return not isinstance(x, type) and all(
        callable(getattr(x, name, None)) for name in ("merge", "compute")
    )


def is_collection(x: Any) -> bool:
    """Is it a ``clu.metrics.Collection``, several metrics in one object?"""
    return looks_like_state(x) and hasattr(x, "_reduction_counter")


def merge_parts(first: Any, second: Any) -> Any:
    """The metric of two parts of one batch.

    ``clu.metrics`` tells parts of a batch from batches: its ``LastValue`` averages
    over parts and keeps the last batch. Others have ``merge`` for both.
    """
    of_parts = getattr(first, "_reduce_merge", None)
    return first.merge(second) if of_parts is None else of_parts(second)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A metric of another library: its arrays, and apart what is no array.

    So a number that decides a shape, such as ``num_thresholds``, stays a number
    when arrays travel over towers. Made by `from_clu`.
    """

    arrays: list[Any]  # the metric's arrays, in tree order
    # Its other leaves, and None in the arrays' places.
    numbers: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})

    @property
    def metric(self) -> Any:
        """The metric, an object of its own class."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x for x in self.numbers]
        return jax.tree.unflatten(self.treedef, leaves)

    def merge(self, other: "Adapted") -> "Adapted":
        """The metric of two batches, by the class's ``merge``."""
        return self._like_this(self.metric.merge(other.metric))

    def _reduce_merge(self, other: "Adapted") -> "Adapted":
        return self._like_this(merge_parts(self.metric, other.metric))

    def _like_this(self, metric: Any) -> "Adapted":
        leaves = jax.tree.leaves(metric)
        pairs = zip(leaves, self.numbers, strict=True)
        arrays = [leaf for leaf, number in pairs if number is None]
        return dataclasses.replace(self, arrays=arrays)

    def compute(self) -> Any:
        """The value, by the class's ``compute`` on ``jax.Array``."""
        arrays = [jnp.asarray(x) for x in self.arrays]
        return dataclasses.replace(self, arrays=arrays).metric.compute()


def from_clu(metric: Any) -> Any:
    """A metric of ``clu.metrics`` or ``metrax`` as a metric state.

    A ``Metric`` may be put into the metrics of a step as it is; this does the same
    beforehand. A ``Collection`` becomes a dict of its metrics: write
    ``{**from_clu(collection)}``. Values are the library's own: ``clu.metrics.Average``
    of nothing is NaN. Give it ``tower.weight`` as ``mask`` or ``sample_weights``.

    Args:
      metric: An object made by ``from_model_output(...)`` of its class.

    Returns:
      A state with ``merge`` and ``compute``, a pytree; or name -> state.

    Raises:
      ValueError: It is a class, or has no ``merge`` and ``compute``; its merge
        cannot be traced or changes shapes, as that of a ``CollectingMetric``.

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
            " what from_model_output(...) of a clu.metrics or metrax class returns."
        )
    return adapted(metric)


def adapted(metric: Any) -> Adapted:
    """A state of another class as an `Adapted`.

    A Python number that the class's merge leaves as it is stays one; every other
    leaf becomes an array.
    """
    leaves, treedef = jax.tree.flatten(metric)
    plain = [isinstance(x, bool | int | float | str) for x in leaves]
    whole = Adapted(
        [strong(x) for x, is_plain in zip(leaves, plain, strict=True) if not is_plain],
        tuple(
            x if is_plain else None for x, is_plain in zip(leaves, plain, strict=True)
        ),
        treedef,
    )
    merged = merged_leaves(whole.metric, merge_parts)
    kept = [
        is_plain and isinstance(new, type(x)) and new == x
        for x, new, is_plain in zip(leaves, merged, plain, strict=True)
    ]
    arrays = [strong(x) for x, is_kept in zip(leaves, kept, strict=True) if not is_kept]
    numbers = (x if is_kept else None for x, is_kept in zip(leaves, kept, strict=True))
    state = Adapted(arrays, tuple(numbers), treedef)
    merged_leaves(state, merge_parts)
    return state


def merged_leaves(state: PyTree, merge: Callable[[Any, Any], Any]) -> list[Any]:
    """What the leaves become when the state is merged with one of its kind."""
    leaves, treedef = jax.tree.flatten(state)
    is_array = [hasattr(x, "shape") for x in leaves]
    numbers: list[Any] = []
    trees = [treedef]

    def traced(first: list[Any], second: list[Any]) -> list[Any]:
        both = [
            jax.tree.unflatten(
                treedef,
                [
                    arrays.pop(0) if a else x
                    for x, a in zip(leaves, is_array, strict=True)
                ],
            )
            for arrays in (list(first), list(second))
        ]
        out, trees[0] = jax.tree.flatten(merge(*both))
        numbers[:] = [None if hasattr(x, "shape") else x for x in out]
        return [x for x in out if hasattr(x, "shape")]

    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    kind = type(getattr(state, "metric", state)).__name__
    try:
        shapes = jax.eval_shape(traced, arrays, arrays)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"The merge of a {kind} cannot be traced, so its towers cannot be merged in"
            f" a step: {error} A state has arrays of fixed shapes, and merges them with"
            " jax.numpy."
        ) from error
    pool = iter(shapes)
    merged = [next(pool) if x is None else x for x in numbers]
    _check_alike(kind, leaves, merged)
    if trees[0] != treedef:
        raise ValueError(
            f"The merge of two {kind} changes what is no array in it: {treedef} becomes"
            f" {trees[0]}. Only arrays travel over towers: make it an array, such as"
            " jnp.int32(1) for a count."
        )
    return merged


def _check_alike(kind: str, leaves: list[Any], merged: list[Any]) -> None:
    def text(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)

    bad = [
        f"leaf {i} was {text(old)} and is {text(new)}"
        for i, (old, new) in enumerate(zip(leaves, merged, strict=False))
        if hasattr(old, "shape") and text(old) != text(new)
    ]
    if len(leaves) != len(merged):
        bad = [f"it had {len(leaves)} leaves and has {len(merged)}"]
    if bad:
        raise ValueError(
            f"The merge of two {kind} changes the state: {listed(bad)}. Towers are"
            " merged in a compiled program, so shapes and dtypes stay: keep sums or"
            " histograms, and concatenate on the host what a predict step returns."
        )
