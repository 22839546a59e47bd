"""Check metric states, merge them over towers and batches, compute their values."""

import dataclasses
from collections.abc import Callable
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import drop_weak_type
from towerjax.metrics.foreign import (
    Adapted,
    adapt,
    check_merge,
    is_collection,
    looks_like_state,
    merge_parts,
)
from towerjax.metrics.weighted import Means, Weighted
from towerjax.types import Sum
from towerjax.types.leaves import promote_dtypes, widen_dtype

_STATES = "A state is tj.Weighted.mean(hits, tower.weight), or another of tj.metrics."


def widen(x: Any) -> Any:
    """The array in at least 32 bits, so that sums do not soon overflow."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    dtype = x.dtype
    if dtype.itemsize >= 4 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return x
    floating = jnp.issubdtype(dtype, jnp.floating)
    return x.astype(jnp.float32 if floating else jnp.int32)


@dataclass_transform(frozen_default=True)
class Additive:
    """A state that merges by adding every leaf: write its fields and ``compute``.

    A subclass is made a frozen dataclass and a pytree; do not decorate it. A field
    that is no array, such as a threshold, is marked static by
    ``dataclasses.field(metadata={"static": True})``, and must be equal in states that
    are merged. A tower returns sums over its rows, each row multiplied by its weight;
    ``compute`` divides, after all sums are added.

    Example:
      >>> class Variance(Additive):
      ...     weight: jax.Array
      ...     total: jax.Array
      ...     squares: jax.Array
      ...
      ...     def compute(self):
      ...         return self.squares / self.weight - (self.total / self.weight) ** 2
      >>> low, high = Variance(2.0, 2.0, 4.0), Variance(1.0, 4.0, 16.0)
      >>> round(float(low.merge(high).compute()), 4)
      2.6667
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))

    def merge(self, other: Any) -> Any:
        """Both states added, leaf by leaf; neither is changed.

        Args:
          other: A state of the same class, of the same shapes.

        Returns:
          A state of this class.

        Raises:
          ValueError: It is of another class, its shapes or static fields differ.
        """
        mine, others = (jax.tree.map(np.shape, state) for state in (self, other))
        if jax.tree.structure(self) != jax.tree.structure(other) or mine != others:
            raise ValueError(
                f"Cannot merge {mine!r} with {others!r}: of different classes, or made"
                " with different options."
            )
        return jax.tree.map(lambda x, y: widen(x) + widen(y), self, other)

    def compute(self) -> Any:
        """The value of the merged state.

        Returns:
          One array.

        Raises:
          NotImplementedError: The subclass does not define ``compute``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compute.")


def is_metric(x: Any) -> bool:
    """Whether ``x`` is a metric state: a pytree with ``merge`` and ``compute``.

    Args:
      x: Anything.

    Returns:
      A bool; False of a ``Collection`` of clu, which is several metrics.

    Example:
      >>> is_metric(Weighted(1.0, 2.0)), is_metric(jnp.zeros(3))
      (True, False)
    """
    return (
        looks_like_state(x)
        and not is_collection(x)
        and not jax.tree_util.all_leaves([x])
    )


def check_metric(name: str, x: Any) -> Any:
    """A tower's state, checked; its leaves strongly typed and wide enough to add."""
    if isinstance(x, Means):
        terms = (check_metric(f"{name}.terms[{i}]", t) for i, t in enumerate(x.terms))
        return Means(tuple(terms), drop_weak_type(x.shared))
    if not is_metric(x):
        raise ValueError(f"{name} is {explain_misuse(x)}. {_STATES}")
    if isinstance(x, Weighted):
        return _check_weighted(name, x)
    try:
        if any(isinstance(y, bool | int | float | str) for y in jax.tree.leaves(x)):
            x = x if _is_known_additive(x) else adapt(x)
        x = jax.tree.map(drop_weak_type, x)
        if not _is_known_additive(x):
            check_merge(x)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return jax.tree.map(widen, x) if is_additive(x) else x


def _check_weighted(name: str, x: Weighted) -> Weighted:
    if not jax.tree_util.all_leaves([x.weight]):
        raise ValueError(
            f"{name}.weight is a {type(x.weight).__name__}, and a mean has one array as"
            " its weight. Take derivatives of the sum alone, such as jax.jacfwd(lambda"
            " params: tj.value_and_grad(loss_fn)(params, batch, tower)[1].sum), and"
            " return tj.Weighted(derivative, loss.weight)."
        )
    total, weight = jax.tree.map(drop_weak_type, x.sum), drop_weak_type(x.weight)
    total = jax.tree.map(lambda s: s.astype(widen_dtype(s.dtype)), total)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(total)]
    dtype = promote_dtypes(jnp.float32, weight.dtype, *dtypes)
    if jax.tree_util.all_leaves([total]):
        total = total.astype(dtype)
    real = jnp.finfo(dtype).dtype  # the weight of a complex sum is real
    return Weighted(total, weight.astype(promote_dtypes(real, weight.dtype)))


def has_value(x: Any) -> bool:
    """Whether `compute` takes ``x``: a metric state, or a sum of means."""
    return isinstance(x, Means) or is_metric(x)


def explain_misuse(x: Any) -> str:
    """For an error: what ``x`` is, which is no metric state, and what to write."""
    if isinstance(x, type):
        return f"the class {x.__name__}, and no object made from the tower's rows"
    if is_collection(x):
        return (
            f"a Collection ({type(x).__name__}), which is several metrics: write"
            " {**tj.metrics.from_clu(collection)}"
        )
    if looks_like_state(x):
        return (
            f"a {type(x).__name__} with merge and compute that is no pytree: make it a"
            " subclass of tj.metrics.Additive, or register its class"
        )
    return f"a {type(x).__name__}, which is no metric state"


def _is_known_additive(x: Any) -> bool:
    adds = isinstance(x, Additive) and type(x).merge is Additive.merge
    return adds or isinstance(x, Sum)


def is_additive(state: Any, merge: Callable[[Any, Any], Any] = merge_parts) -> bool:
    """Whether merging two parts of a batch adds every leaf, and does nothing else.

    True of ``Weighted`` and `Additive`; for other classes the jaxpr of their merge
    shows it. States that add join the step's one reduction.
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
        return False  # merged one after another, where the error is raised again
    adds = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "add"]
    added = {id(eqn.outvars[0]): set(map(id, eqn.invars)) for eqn in adds}
    pairs = zip(jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :], strict=True)
    expected = [set(map(id, pair)) for pair in pairs]
    return [added.get(id(out)) for out in jaxpr.outvars] == expected


def merge(first: Any, second: Any) -> Any:
    """Merge the states of two disjoint sets of examples.

    Associative and commutative up to rounding; neither operand is changed.

    Args:
      first: A ``Weighted``, or any metric state.
      second: One made by the same call on other examples.

    Returns:
      A state of the same class.

    Raises:
      ValueError: One is no metric state, or they were not made by the same call.

    Example:
      >>> merge(Weighted(1.0, 2.0), Weighted(5.0, 1.0))
      Weighted(sum=6.0, weight=3.0)
    """
    for name, state in (("first", first), ("second", second)):
        if not is_metric(state):
            raise ValueError(f"merge got as {name} {explain_misuse(state)}. {_STATES}")
    if isinstance(first, Weighted | Sum | Additive) and type(first) is not type(second):
        names = f"{type(first).__name__} and a {type(second).__name__}"
        raise ValueError(f"merge got a {names}; merge states that the same call made.")
    return first.merge(second)


def compute(state: Any) -> Any:
    """The value of a state, which is not changed.

    Args:
      state: A ``Weighted``, a sum of such, or any metric state. NumPy arrays are
        computed by NumPy, in their precision; states of other libraries are given
        ``jax.Array``.

    Returns:
      What the state's ``compute`` returns: an array. 0 where no example counts.

    Raises:
      ValueError: It is no metric state.

    Example:
      >>> float(compute(Weighted(6.0, 3.0)))
      2.0
    """
    if not has_value(state):
        raise ValueError(f"compute got {explain_misuse(state)}. {_STATES}")
    if isinstance(state, Weighted | Means | Sum | Additive | Adapted):
        return state.compute()
    return jax.tree.map(jnp.asarray, state).compute()


def merge_stacked(rows: Any) -> Any:
    """Merge stacked states, which are not additive, one after another in order."""
    first = jax.tree.map(lambda x: x[0], rows)
    rest = jax.tree.map(lambda x: x[1:], rows)
    if jax.tree.leaves(rest)[0].shape[0] == 0:
        return first
    return lax.scan(lambda done, row: (merge_parts(done, row), None), first, rest)[0]


def on_host(state: Any) -> Any:
    """A batch's state on the host, in 64 bits where merging adds the leaves."""
    state = jax.device_get(state)
    # Others stay JAX arrays: their merge may divide by 0, where NumPy would warn.
    adds = is_additive(state, lambda first, second: first.merge(second))
    convert = _in_64_bits if adds else jnp.asarray
    return jax.tree.map(convert, state)


def _in_64_bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, np.floating):  # bfloat16 is of kind "V"
        return x.astype(np.float64)
    return x.astype({"u": np.uint64, "c": np.complex128}.get(x.dtype.kind, np.int64))


def add_batch(total: Any, metric: Any) -> Any:
    """Merge a batch's metric into the total, on the host; an array replaces it."""
    if isinstance(metric, Means):
        before = [None] * len(metric.terms) if total is None else total.terms
        return Means(tuple(map(add_batch, before, metric.terms)), metric.shared)
    if not is_metric(metric):
        return metric
    state = on_host(metric)
    return state if total is None else merge(total, state)


def value_on_host(total: Any) -> Any:
    """The value of a data set's state, scalars as Python numbers."""
    value = jax.tree.map(np.asarray, compute(total) if has_value(total) else total)
    return jax.tree.map(lambda x: x if x.ndim else x.item(), value)
