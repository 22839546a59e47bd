"""Metric states, ours and other libraries': check, merge, and compute values."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import drop_weak_type
from towerjax.collectives.sparse_rows import map_values
from towerjax.metrics.weighted import Additive, Means, Tally, Weighted, widen
from towerjax.types import Sum
from towerjax.types.refusals import a_type, check_like
from towerjax.types.trees import parts_of, promote_dtypes, widen_dtype

_STATES = "A state is tj.Weighted.mean(hits, tower.weight), or another of tj.metrics."


# A field by which a Collection of clu is recognized.
_OF_COLLECTION = "_reduction_counter"


def looks_like_state(x: Any) -> bool:
    """Return whether the class of ``x`` has ``merge`` and ``compute``."""
    # The class is asked and not the object, because a flax.nnx variable forwards to its
    # value.
    cls = type(x)
    merges = getattr(cls, "merge", None)
    computes = getattr(cls, "compute", None)
    return callable(merges) and callable(computes)


def is_collection(x: Any) -> bool:
    """Return whether ``x`` is a ``clu.metrics.Collection``, an object of metrics."""
    return looks_like_state(x) and hasattr(x, _OF_COLLECTION)


def merge_parts(first: Any, second: Any) -> Any:
    """Merge the metrics of two parts of one batch."""
    # The LastValue of clu averages the parts of a batch, and keeps the last of several
    # batches. This method of clu merges parts of a batch.
    of_parts = getattr(first, "_reduce_merge", None)
    return first.merge(second) if of_parts is None else of_parts(second)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A metric of another library as a metric state.

    Numbers among its leaves are static, because they may decide shapes.
    """

    arrays: list[Any]  # the metric's leaves, in tree order; None for each number
    # The leaves that are numbers, in tree order; None for each array.
    numbers: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, metric: Any, numbers: Sequence[Any]) -> "Adapted":
        """Take a metric apart into arrays and numbers.

        ``numbers`` has None for each leaf that is an array.
        """
        leaves, treedef = jax.tree.flatten(metric)
        pairs = zip(leaves, numbers, strict=True)
        arrays = [leaf if number is None else None for leaf, number in pairs]
        return cls(arrays, tuple(numbers), treedef)

    @property
    def metric(self) -> Any:
        """The metric, an object of its own class."""
        pairs = zip(self.arrays, self.numbers, strict=True)
        leaves = [array if number is None else number for array, number in pairs]
        return jax.tree.unflatten(self.treedef, leaves)

    def merge(self, other: "Adapted") -> "Adapted":
        """Merge the metrics of two batches, by the ``merge`` of their class."""
        return Adapted.of(self.metric.merge(other.metric), self.numbers)

    def _reduce_merge(self, other: "Adapted") -> "Adapted":
        return Adapted.of(merge_parts(self.metric, other.metric), self.numbers)

    def compute(self) -> Any:
        """Compute the value by the class's ``compute``, with ``jax.Array`` leaves."""
        return jax.tree.map(jnp.asarray, self).metric.compute()


def from_clu(metric: Any) -> Any:
    """Convert a metric of ``clu.metrics`` or ``metrax`` to a metric state.

    A step converts a ``Metric`` by itself. A ``Collection`` becomes a dict of its
    metrics: write ``{**from_clu(collection)}``. The library computes the value, so
    ``clu.metrics.Average`` is NaN if no example counts. Give the metric
    ``tower.weight`` as ``mask`` or ``sample_weights``.

    Args:
      metric: An object made by ``from_model_output(...)`` of its class.

    Returns:
      A state with ``merge`` and ``compute``, a pytree; for a ``Collection`` a dict of
      names and states.

    Raises:
      ValueError: ``metric`` is a class, or has no ``merge`` and ``compute``. Or its
        merge cannot be traced, or changes shapes, like that of a ``CollectingMetric``.

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
            f"from_clu got {metric!r}, which is not a pytree with merge and compute."
            " Pass the result of from_model_output(...)."
        )
    return adapt(metric)


def adapt(metric: Any) -> Adapted:
    """Adapt another library's state; numbers that no merge changes stay static."""
    leaves = jax.tree.leaves(metric)
    numbers = [x if isinstance(x, bool | int | float | str) else None for x in leaves]
    merged: list[Any] = []

    def merge(first: Adapted, second: Adapted) -> None:
        merged[:] = jax.tree.leaves(merge_parts(first.metric, second.metric))

    _trace_merge(type(metric).__name__, merge, Adapted.of(metric, numbers))
    if len(merged) == len(leaves):  # otherwise check_merge raises
        pairs = zip(numbers, merged, strict=True)
        numbers = [x if isinstance(y, type(x)) and y == x else None for x, y in pairs]
    state = jax.tree.map(drop_weak_type, Adapted.of(metric, numbers))
    check_merge(state)
    return state


def check_merge(state: Any) -> None:
    """Raise unless merging keeps the state's structure, shapes and dtypes."""
    name = type(getattr(state, "metric", state)).__name__
    merged = _trace_merge(name, merge_parts, state)
    merge_of = f"The merge of two {name}"
    advice = (
        "Keep shapes and dtypes. To concatenate, do so on the host with the results of"
        " a predict step."
    )
    check_like("it", merged, state, f"{merge_of} changes the state", advice)


def _trace_merge(name: str, merge: Callable[[Any, Any], Any], state: Any) -> Any:
    try:
        return jax.eval_shape(merge, state, state)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"The merge of a {name} cannot be traced, so a step cannot merge its"
            f" towers: {error} A state must merge arrays of fixed shapes with"
            " jax.numpy."
        ) from error


def is_metric(x: Any) -> bool:
    """Return whether ``x`` is a metric state: a pytree with ``merge`` and ``compute``.

    Args:
      x: Any value.

    Returns:
      A bool; False for a ``Collection`` of clu, which is several metrics.

    Example:
      >>> is_metric(Weighted(1.0, 2.0)), is_metric(jnp.zeros(3))
      (True, False)
    """
    return (
        looks_like_state(x)
        and not hasattr(x, _OF_COLLECTION)
        and not jax.tree_util.all_leaves([x])
    )


def check_metric(name: str, x: Any) -> Any:
    """Check the metric state that a tower returned, and widen its dtypes for adding."""
    if isinstance(x, Means):
        terms = (check_metric(f"{name}.terms[{i}]", t) for i, t in enumerate(x.terms))
        return Means(tuple(terms), drop_weak_type(x.penalty))
    if not is_metric(x):
        raise ValueError(f"{name} is {explain_misuse(x)}. {_STATES}")
    if isinstance(x, Weighted):
        return _check_weighted(name, x)
    try:
        if _is_known_additive(x):
            x = jax.tree.map(drop_weak_type, x)
        elif parts_of(bool | int | float | str, x):
            x = adapt(x)
        else:
            check_merge(x := jax.tree.map(drop_weak_type, x))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return jax.tree.map(widen, x) if is_additive(x) else x


def _check_weighted(name: str, x: Weighted) -> Weighted:
    if not jax.tree_util.all_leaves([x.weight]):
        raise ValueError(
            f"{name}.weight is {a_type(x.weight)}, but the weight of a mean must be one"
            " array. Differentiate the sum alone, and return tj.Weighted(derivative,"
            " loss.weight)."
        )
    total = jax.tree.map(drop_weak_type, x.sum)
    weight = drop_weak_type(x.weight)
    total = map_values(lambda s: s.astype(widen_dtype(s.dtype)), total)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(total)]
    dtype = promote_dtypes(jnp.float32, weight.dtype, *dtypes)
    if jax.tree_util.all_leaves([total]):
        total = total.astype(dtype)
    real = jnp.finfo(dtype).dtype  # the weight of a complex sum is real
    return Weighted(total, weight.astype(promote_dtypes(real, weight.dtype)))


def has_value(x: Any) -> bool:
    """Return whether `compute` accepts ``x``: a metric state, or a sum of means."""
    return isinstance(x, Means) or is_metric(x)


def explain_misuse(x: Any) -> str:
    """Say what ``x`` is in place of a metric state.

    It also says what to write.
    """
    if isinstance(x, type):
        return f"the class {x.__name__}, not an object made from the tower's rows"
    if is_collection(x):
        return (
            f"a Collection ({type(x).__name__}), which is several metrics: write"
            " {**tj.metrics.from_clu(collection)}"
        )
    if looks_like_state(x):
        return (
            f"{a_type(x)} with merge and compute that is not a pytree: make it a"
            " subclass of tj.metrics.Additive, or register its class"
        )
    return f"{a_type(x)}, which is not a metric state"


def _misused(function: str, role: str, x: Any) -> ValueError:
    """Make the error of a function that did not get a metric state."""
    text = f"{function} got {role}{explain_misuse(x)}. {_STATES}"
    if isinstance(x, Mapping):
        call = f"tj.metrics.{function}, ..., is_leaf=tj.metrics.is_metric"
        text += f" For a dict of states write jax.tree.map({call})."
    return ValueError(text)


def _is_known_additive(x: Any) -> bool:
    adds = isinstance(x, Additive) and type(x).merge is Additive.merge
    return adds or isinstance(x, Sum)


def is_additive(state: Any, merge: Callable[[Any, Any], Any] = merge_parts) -> bool:
    """Decide whether merging two such states only adds their leaves.

    The jaxpr of the merge shows this.
    """
    if isinstance(state, Weighted) or _is_known_additive(state):
        return True
    leaves, treedef = jax.tree.flatten(state)
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    def merged(*parts: list[Any]) -> list[Any]:
        return jax.tree.leaves(merge(*map(treedef.unflatten, parts)))

    try:
        jaxpr = jax.make_jaxpr(merged)(shapes, shapes).jaxpr
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # merging the states one after another will raise this error
    adds = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "add"]
    added = {id(eqn.outvars[0]): set(map(id, eqn.invars)) for eqn in adds}
    pairs = zip(jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :], strict=True)
    expected = [set(map(id, pair)) for pair in pairs]
    return [added.get(id(out)) for out in jaxpr.outvars] == expected


def merge(first: Any, second: Any) -> Any:
    """Merge the states of two disjoint sets of examples.

    The order of merges changes the result by rounding only. Neither operand is changed.

    Args:
      first: A ``Weighted``, or any metric state.
      second: A state made by the same call on other examples.

    Returns:
      A state of the same class.

    Raises:
      ValueError: One of them is not a metric state, or different calls made them.

    Example:
      >>> merge(Weighted(1.0, 2.0), Weighted(5.0, 1.0))
      Weighted(sum=6.0, weight=3.0)
    """
    for name, state in (("first", first), ("second", second)):
        if not is_metric(state):
            raise _misused("merge", f"as {name} ", state)
    if isinstance(first, Weighted | Sum | Additive) and type(first) is not type(second):
        names = f"{a_type(first)} and {a_type(second)}"
        raise ValueError(
            f"merge got {names}, which cannot be merged. Merge two states of one"
            " metric, made by calls of the same function."
        )
    return first.merge(second)


def compute(state: Any) -> Any:
    """Compute the value of a state; the state is not changed.

    Args:
      state: A ``Weighted``, a sum of several, or any metric state. If its arrays are
        NumPy's, NumPy computes the value in their dtype. States of other classes
        compute with ``jax.Array``.

    Returns:
      The result of the state's ``compute``, an array; 0 if no example counts.

    Raises:
      ValueError: ``state`` is not a metric state.

    Example:
      >>> float(compute(Weighted(6.0, 3.0)))
      2.0
    """
    if not has_value(state):
        raise _misused("compute", "", state)
    if isinstance(state, Weighted | Means | Sum | Additive | Adapted):
        return state.compute()
    return jax.tree.map(jnp.asarray, state).compute()


def merge_stacked(rows: Any) -> Any:
    """Merge stacked states one after another, because they are not additive."""
    first = jax.tree.map(lambda x: x[0], rows)
    rest = jax.tree.map(lambda x: x[1:], rows)
    if jax.tree.leaves(rest)[0].shape[0] == 0:
        return first
    return lax.scan(lambda done, row: (merge_parts(done, row), None), first, rest)[0]


def on_host(state: Any) -> Any:
    """Copy a batch's state to the host, in 64 bits if merging adds the leaves."""
    state = jax.device_get(state)
    # Other states stay JAX arrays: their merge may divide by 0, where NumPy would warn.
    adds = is_additive(state, lambda first, second: first.merge(second))
    convert = _in_64_bits if adds else jnp.asarray
    return jax.tree.map(convert, state)


def _in_64_bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, np.floating):  # bfloat16 is of kind "V"
        return x.astype(np.float64)
    return x.astype({"u": np.uint64, "c": np.complex128}.get(x.dtype.kind, np.int64))


def add_batch(total: Any, metric: Any) -> Any:
    """Merge a batch's metric into the total.

    A bare array replaces the total.
    """
    if isinstance(metric, Means):
        before = [None] * len(metric.terms) if total is None else total.terms
        return Means(tuple(map(add_batch, before, metric.terms)), metric.penalty)
    if not is_metric(metric):
        return metric
    state = on_host(metric)
    return state if total is None else merge(total, state)


def has_invalid_rows(total: Any) -> bool:
    """Look for a weight of a state on the host that `Pairs` made NaN."""
    if not isinstance(total, Weighted | Tally):
        return False
    weights = jax.tree.leaves(total)[-1]
    return bool(np.isnan(weights).any())


def value_on_host(total: Any) -> Any:
    """Compute a data set's value, with scalars as Python numbers."""
    value = jax.tree.map(np.asarray, compute(total) if has_value(total) else total)
    return jax.tree.map(lambda x: x if x.ndim else x.item(), value)
