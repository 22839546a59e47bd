"""What is a metric, and how do its states merge, over towers and over batches?"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.reduce import strong
from towerjax.metrics.foreign import (
    Adapted,
    adapted,
    check_merge,
    is_collection,
    looks_like_state,
    merge_parts,
)
from towerjax.metrics.weighted import Means, Weighted
from towerjax.types import Sum
from towerjax.types.leaves import widened

_STATES = "A state is tj.Weighted.mean(hits, tower.weight), or another of tj.metrics."


def wide(x: Any) -> Any:
    """The array in a dtype in which counts and sums do not soon run over."""
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
    ``dataclasses.field(metadata={"static": True})``, and must be equal in what is
    merged. A tower returns sums over its rows, each times its weight; what is to be
    divided, ``compute`` divides, after all of them are added.

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
                f"Cannot merge {mine!r} with {others!r}: they are of different classes,"
                " or were made with different options. Make both by the same call."
            )
        return jax.tree.map(lambda x, y: wide(x) + wide(y), self, other)

    def compute(self) -> Any:
        """The value of what has been merged.

        Returns:
          One array.

        Raises:
          NotImplementedError: The class does not say.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no compute. Write one that returns an array."
        )


def is_metric(x: Any) -> bool:
    """Is it a metric state: ``Weighted``, or a pytree with ``merge`` and ``compute``?

    Args:
      x: Anything.

    Returns:
      Whether it is. A ``Collection`` of clu is several, and none.

    Example:
      >>> is_metric(Weighted(1.0, 2.0)), is_metric(jnp.zeros(3))
      (True, False)
    """
    return (
        looks_like_state(x)
        and not is_collection(x)
        and not jax.tree_util.all_leaves([x])
    )


def check(name: str, x: Any) -> Any:
    """A tower's state, before it is stacked, of strong arrays wide enough to add."""
    if isinstance(x, Means):
        terms = (check(f"{name}.terms[{i}]", term) for i, term in enumerate(x.terms))
        return Means(tuple(terms), strong(x.shared))
    if not is_metric(x):
        raise ValueError(f"{name} is {described(x)}. {_STATES}")
    if isinstance(x, Weighted):
        total, weight = jax.tree.map(strong, x.sum), strong(x.weight)
        total = jax.tree.map(lambda s: s.astype(widened(s.dtype)), total)
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(total)]
        dtype = functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))
        dtype = jnp.promote_types(dtype, weight.dtype)
        if jax.tree_util.all_leaves([total]):
            total = total.astype(dtype)
        real = jnp.finfo(dtype).dtype  # of a complex sum the weight is a number still
        return Weighted(total, weight.astype(jnp.promote_types(real, weight.dtype)))
    if _is_ours(x):
        return jax.tree.map(lambda leaf: wide(strong(leaf)), x)
    try:
        if any(
            isinstance(leaf, bool | int | float | str) for leaf in jax.tree.leaves(x)
        ):
            x = adapted(x)
        x = jax.tree.map(strong, x)
        check_merge(x)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return jax.tree.map(wide, x) if is_additive(x) else x


def _has_value(x: Any) -> bool:
    return isinstance(x, Means) or is_metric(x)


def described(x: Any) -> str:
    """What something that is no metric state is and, where it helps, what to write."""
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
            " subclass of tj.metrics.Additive, or register its class with"
            " jax.tree_util.register_dataclass"
        )
    return f"a {type(x).__name__}, which is no metric state"


def _is_ours(x: Any) -> bool:
    adds = isinstance(x, Additive) and type(x).merge is Additive.merge
    return adds or isinstance(x, Sum)


def is_additive(state: Any, merge: Callable[[Any, Any], Any] = merge_parts) -> bool:
    """Does merging two parts of a batch add every leaf, and nothing else?

    Known of ``Weighted`` and `Additive`; of other classes read off the traced merge,
    so that their sums may travel with all others.
    """
    if isinstance(state, Weighted) or _is_ours(state):
        return True
    leaves, treedef = jax.tree.flatten(state)
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    def merged(first: list[Any], second: list[Any]) -> list[Any]:
        both = (jax.tree.unflatten(treedef, x) for x in (first, second))
        return jax.tree.leaves(merge(*both))

    try:
        jaxpr = jax.make_jaxpr(merged)(shapes, shapes).jaxpr
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # it is merged one after another, where its error is told
    added = {
        id(eqn.outvars[0]): sorted(map(id, eqn.invars))
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "add"
    }
    firsts, seconds = jaxpr.invars[: len(leaves)], jaxpr.invars[len(leaves) :]
    return len(jaxpr.outvars) == len(leaves) and all(
        added.get(id(out)) == sorted((id(first), id(second)))
        for out, first, second in zip(jaxpr.outvars, firsts, seconds, strict=True)
    )


def merge(first: Any, second: Any) -> Any:
    """The state of two disjoint sets of examples, from their states.

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
            raise ValueError(f"merge got as {name} {described(state)}. {_STATES}")
    if isinstance(first, Weighted | Sum | Additive) and type(first) is not type(second):
        raise ValueError(
            f"merge got a {type(first).__name__} and a {type(second).__name__}. Merge"
            " states that the same call made."
        )
    return first.merge(second)


def compute(state: Any) -> Any:
    """The value of a state, as often as you like.

    Args:
      state: A ``Weighted``, a sum of such, or any metric state. Of NumPy arrays the
        value is made in NumPy, in their precision; those of other libraries are given
        ``jax.Array``.

    Returns:
      What the state's ``compute`` returns: an array. 0 where no example counts.

    Raises:
      ValueError: It is no metric state.

    Example:
      >>> float(compute(Weighted(6.0, 3.0)))
      2.0
    """
    if not _has_value(state):
        raise ValueError(f"compute got {described(state)}. {_STATES}")
    if isinstance(state, Weighted | Means | Sum | Additive | Adapted):
        return state.compute()
    return jax.tree.map(jnp.asarray, state).compute()


def merged_rows(rows: Any) -> Any:
    """The states that lie side by side, which do not add up, merged in their order."""
    first = jax.tree.map(lambda x: x[0], rows)
    rest = jax.tree.map(lambda x: x[1:], rows)
    if jax.tree.leaves(rest)[0].shape[0] == 0:
        return first
    return lax.scan(lambda done, row: (merge_parts(done, row), None), first, rest)[0]


def on_host(state: Any) -> Any:
    """A batch's state on the host, in 64 bits where its leaves are to be added."""
    state = jax.device_get(state)
    # Other classes may divide by 0 when they merge, which NumPy warns of.
    adds = is_additive(state, lambda first, second: first.merge(second))
    convert = _in_64_bits if adds else jnp.asarray
    return jax.tree.map(convert, state)


def _in_64_bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, np.floating):  # bfloat16 is of kind "V"
        return x.astype(np.float64)
    kinds = {"b": np.int64, "i": np.int64, "u": np.uint64}
    return x.astype(kinds.get(x.dtype.kind, x.dtype))


def add_batch(total: Any, metric: Any) -> Any:
    """A metric of the batches so far and one more, on the host; of arrays the last."""
    if isinstance(metric, Means):
        before = [None] * len(metric.terms) if total is None else total.terms
        return Means(tuple(map(add_batch, before, metric.terms)), metric.shared)
    if not is_metric(metric):
        return metric
    state = on_host(metric)
    return state if total is None else merge(total, state)


def value_on_host(total: Any) -> Any:
    """The value of a data set's state."""

    def plain(x: Any) -> Any:
        x = np.asarray(x)
        return x.item() if x.ndim == 0 else x

    return jax.tree.map(plain, compute(total) if _has_value(total) else total)
