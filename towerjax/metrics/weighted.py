"""The states `Weighted`, `Means` (a sum of several means) and `Additive`."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from towerjax.collectives.sparse_rows import add_trees, map_values
from towerjax.jaxprs import tags
from towerjax.metrics import rows
from towerjax.metrics.rows import as_floats, quotient, ratio
from towerjax.types import ArrayLike, PyTree
from towerjax.types.notes import noted
from towerjax.types.options import check_choice, check_methods
from towerjax.types.refusals import a_type, problem_of, refuse_no_numbers
from towerjax.types.trees import native
from towerjax.types.version import page


def _refuse_unclear(totals: list[Any], dims: tuple[int, ...]) -> None:
    """Raise if a weight could belong to the leading dims or to the last dims."""
    shapes = [x for x in map(jnp.shape, totals) if x[: len(dims)] == dims != x]
    if shapes and max(dims, default=1) > 1:
        raise ValueError(
            f"Weighted.weight of shape {dims} may belong to the first dims or to the"
            f" last dims of a sum of shape {shapes[0]}. Give it as many dims, such as"
            " weight[None]. For stacked values map lambda x: x.value"
            " over them with jax.vmap."
        )


class _LossTerm:
    """Operators of a loss term, such as ``-``, that follow from its ``+`` and ``*``."""

    __array_ufunc__ = None  # None makes NumPy numbers call __radd__, __rmul__

    def __neg__(self: Any) -> Any:
        return self * -1

    def __sub__(self: Any, other: Any) -> "Means":
        return self + other * -1

    def __rsub__(self: Any, other: Any) -> "Means":
        return self * -1 + other

    def __truediv__(self: Any, factor: ArrayLike) -> Any:
        return self * (1 / factor)

    def _refuse(self, *_: Any) -> Any:
        """Raise, because a function of a mean is not a mean."""
        raise ValueError(
            "A function of a mean is not a mean, so it cannot be merged over towers."
            " After the merge write mean.value. In a loss take the mean in an earlier"
            " pass of tj.build_step, as in"
            f" {page('how_to/several_losses', 'A function of a mean')}"
        )

    __rtruediv__ = __pow__ = __rpow__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


class _NamesOfWeighted(type):
    """The metaclass of `Weighted`: its error for a missing name says what to write."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            note = "Write tj.Sum(values.sum()) for a sum, tj.Weighted.mean for a mean."
            with noted(note if name == "sum" else None):
                return type.__getattribute__(cls, name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted(_LossTerm, metaclass=_NamesOfWeighted):
    """A mean that is not divided yet: its numerator and its denominator.

    A step averages nothing else. The values of towers, micro-batches and batches are
    merged by adding both fields, and ``value`` divides once. So the mean is exact with
    unequal weights, padding and towers without rows. ``merge`` makes one mean of two
    sets of rows; ``+`` makes a sum of two means.

    Attributes:
      sum: The weighted total: shape ``()`` for a loss, any shape for a metric. It may
        be a pytree of arrays, such as a gradient; each array is divided by ``weight``.
      weight: The number to divide ``sum`` by, >= 0, broadcastable to ``sum``.

    Raises:
      ValueError: ``weight`` is a number or a NumPy array and has a negative element.

    Example:
      >>> first = Weighted.mean(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
      >>> second = Weighted.mean(np.array([6.0, 9.0]), np.array([1.0, 0.0]))
      >>> float(first.merge(second).value)
      3.0
    """

    sum: Any
    weight: ArrayLike

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            is_held = not isinstance(x, str | bytes | np.ndarray)
            if not is_held and (problem := problem_of(x)):
                raise ValueError(f"Weighted.{name} is {problem}.")
        is_known = isinstance(self.weight, int | float | np.ndarray | np.generic)
        if is_known and (lowest := np.min(self.weight, initial=0)) < 0:
            raise ValueError(
                f"Weighted.weight must be >= 0, but has {lowest}. Put a sign into the"
                " sum."
            )

    @classmethod
    def mean(
        cls,
        values: PyTree,
        weight: ArrayLike | None = None,
        *,
        axis: Literal[0] | None = None,
    ) -> "Weighted":
        """Average ``values`` by weight, as a numerator and a denominator.

        ``sum = sum_i w_i v_i`` and ``weight = sum_i w_i``, both at least float32. An
        element of weight 0 is left out even if its value is NaN. Its gradient may still
        be NaN, because NaN times 0 is NaN, and a step refuses that. Replace bad inputs
        with ``jnp.where`` before the model sees them.

        Args:
          values: Numbers or booleans of shape ``[b, ...]`` or ``()``. With ``axis=0``
            a pytree of arrays ``[b, ...]``.
          weight: Weights >= 0, whose shape is that of the leading dims of ``values``;
            ``[b]`` or ``[b, 1]`` is one weight per example. With ``axis=0`` always
            ``[b]``. None counts every element once.
          axis: None gives the mean of all elements, which is a number. 0 gives the mean
            of the rows: a mean vector, or the mean of per-example gradients.

        Returns:
          A ``Weighted`` of two scalars; with ``axis=0`` its ``sum`` is a tree of arrays
          ``[...]``.

        Raises:
          ValueError: A weight that is known before tracing is negative; ``weight``
            does not have the shape of the leading dims of ``values``; or ``values`` is
            a tree without ``axis=0``, or one whose leaves differ in dim 0.

        Example:
          >>> float(Weighted.mean(np.array([1.0, 5.0]), np.array([3.0, 1.0])).value)
          2.0
          >>> rows = np.array([[1.0, 2.0], [5.0, 2.0]])
          >>> Weighted.mean(rows, np.array([3.0, 1.0]), axis=0).value.tolist()
          [2.0, 2.0]
        """
        check_choice("Weighted.mean: axis", axis, (None, 0))
        if weight is not None:
            refuse_no_numbers("Weighted.mean: weight", weight)
        if axis is None:
            values = as_floats(values)
        else:
            values = jax.tree.map(as_floats, values)
        leaves = jax.tree.leaves(values)
        shapes = [x.shape for x in leaves]
        if axis == 0 and (len({x[:1] for x in shapes} - {()}) != 1 or () in shapes):
            raise ValueError(
                "Weighted.mean(..., axis=0) needs leaves [b, ...] with the same b, but"
                f" got shapes {shapes}."
            )
        shape = shapes[0][:1] if axis == 0 else shapes[0]
        dtype = jnp.finfo(jnp.result_type(*leaves)).dtype
        if weight is None:
            total = jax.tree.map(lambda x: x.sum(axis), values)
            return cls(total, jnp.asarray(math.prod(shape), dtype))
        weights = rows.element_weights("Weighted.mean", shape, weight, "values")
        return mean_of(values, weights, axis, dtype)

    def merge(self, other: "Weighted") -> "Weighted":
        """Merge two means of different rows: add both sums and both weights."""
        check_methods("other", other, "sum weight", "a Weighted, as merge adds two")
        return Weighted(add_trees(self.sum, other.sum), self.weight + other.weight)

    def __add__(self, other: Any) -> "Means":
        """Add two means, each with its own denominator; see `Means`."""
        return Means((self,)) + other

    __radd__ = __add__

    def __mul__(self, factor: ArrayLike) -> "Weighted":
        """Multiply the mean by a number that is the same on all towers."""
        if isinstance(factor, Weighted | Means):
            raise ValueError(
                "A mean times a mean is not a mean. Multiply the rows; or take one mean"
                " in an earlier pass of tj.build_step, where its .value is a number."
            )
        if isinstance(factor, Tracer):
            factor = checkpoint_name(factor, tags.MUST_BE_REPLICATED)
        return Weighted(map_values(lambda x: x * factor, self.sum), self.weight)

    __rmul__ = __mul__

    def compute(self) -> Any:
        """Divide; NumPy arrays are divided by NumPy, in their own dtype."""
        kinds = np.ndarray | np.generic
        totals = jax.tree.leaves(self.sum)
        if not all(isinstance(x, kinds) for x in [*totals, self.weight]):
            return self.value
        _refuse_unclear(totals, np.shape(self.weight))
        return map_values(lambda x: ratio(x, self.weight), self.sum)

    @property
    def value(self) -> Any:
        """The mean, ``sum / weight``; 0 where the weight is 0.

        The leaves of a tree are multiplied by one reciprocal of the weight.
        """
        total = jax.tree.map(native, self.sum)
        weight = jnp.asarray(native(self.weight))
        _refuse_unclear(jax.tree.leaves(total), weight.shape)
        if jax.tree_util.all_leaves([total]):
            return quotient(jnp.asarray(total), weight)
        # The tree is multiplied by one reciprocal, which a barrier keeps as it is.
        # Otherwise XLA would turn only some divisions into products, and bits would
        # depend on the number of devices.
        scale = lax.optimization_barrier(quotient(1.0, weight))
        return map_values(lambda x: x * scale.astype(x.dtype), total)


def mean_of(
    values: PyTree, weights: jax.Array, axis: int | None, dtype: Any
) -> Weighted:
    """Take `Weighted.mean` of floats and weights that are already checked."""

    def weighted_sum(x: jax.Array) -> jax.Array:
        # Functions of lax are used, because JAX traces each function of jnp as a
        # function of its own, which makes a step's first call slower.
        weights_of_dtype = weights.astype(x.dtype)
        zero = lax.full_like(x, 0)
        weights_of_dtype = lax.broadcast_in_dim(
            weights_of_dtype, x.shape, range(weights.ndim)
        )
        return lax.select(
            lax.ne(weights_of_dtype, zero), lax.mul(x, weights_of_dtype), zero
        ).sum(axis)

    total = jax.tree.map(weighted_sum, values)
    return Weighted(total, weights.astype(dtype).sum())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Means(_LossTerm):
    """A sum of means, each with its own denominator, plus a replicated term.

    ``+`` of ``Weighted`` makes it, as in ``ce + 0.1 * aux + tj.penalty(l2)``. It is a
    loss of several terms, exact over towers, micro-batches and padding.

    Attributes:
      terms: One ``Weighted`` or several.
      penalty: A number ``()`` that is the same on every tower; the step proves this.

    Example:
      >>> first, second = Weighted(6.0, 3.0), Weighted(1.0, 4.0)
      >>> float((first + 2 * second + penalty(10.0)).value)
      12.5
    """

    terms: tuple[Weighted, ...]
    penalty: Any = 0.0

    @property
    def value(self) -> Any:
        """The sum of the terms' values and the penalty."""
        return sum((term.value for term in self.terms), self.penalty)

    def compute(self) -> Any:
        """Add the terms; NumPy computes terms of NumPy arrays, in their own dtype."""
        return sum((term.compute() for term in self.terms), self.penalty)

    def by_name(self) -> dict[str, Any]:
        """Name the terms and the penalty as in a step's metrics."""
        terms = {f"loss/{i}": term for i, term in enumerate(self.terms)}
        return terms | {"loss/penalty": self.penalty}

    def __add__(self, other: Any) -> "Means":
        if isinstance(other, int | float) and other == 0:  # the start of sum()
            return self
        if isinstance(other, Weighted):
            other = Means((other,))
        if not isinstance(other, Means):
            raise ValueError(
                f"A mean plus {a_type(other)} is not defined. Write mean +"
                " tj.penalty(number) for a number that is the same on all towers, such"
                " as 0.1 * l2(params), or add a mean of the rows,"
                " tj.Weighted.mean(values, tower.weight). After the merge write .value,"
                " as in merged['grads'].value."
            )
        return Means((*self.terms, *other.terms), self.penalty + other.penalty)

    __radd__ = __add__

    def __mul__(self, factor: ArrayLike) -> "Means":
        """Multiply each term by a number that is the same on all towers."""
        return Means(tuple(x * factor for x in self.terms), self.penalty * factor)

    __rmul__ = __mul__


def penalty(value: ArrayLike) -> Means:
    """Make a loss term that is the same on every tower and counts once.

    An example is a penalty on the parameters. The step proves that the term is the same
    on every tower.

    Args:
      value: A floating number, ``()``.

    Returns:
      A term to add to a ``Weighted``.

    Example:
      >>> float((Weighted(6.0, 3.0) + penalty(0.5)).value)
      2.5
    """
    if not jax.tree_util.all_leaves([value]):
        raise ValueError(
            f"tj.penalty takes one number, but got {a_type(value)}. Write"
            " tj.penalty(1e-4 * optax.tree.norm(params, squared=True))."
        )
    refuse_no_numbers("tj.penalty: value", value)
    if isinstance(value, Tracer):
        value = checkpoint_name(value, tags.MUST_BE_REPLICATED)
    return Means((), value)


def one_mean(loss: Weighted | Means) -> Weighted | None:
    """Write the loss as one mean with the penalty in it, or None.

    It is None if the loss has several means.
    """
    if isinstance(loss, Weighted):
        return loss
    term, *others = loss.terms
    if others:
        return None
    return Weighted(term.sum + term.weight * loss.penalty, term.weight)


def widen(x: Any) -> Any:
    """Cast to at least 32 bits, so that a sum does not overflow soon."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    dtype = x.dtype
    if dtype.itemsize >= 4 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return x
    floating = jnp.issubdtype(dtype, jnp.floating)
    return x.astype(jnp.float32 if floating else jnp.int32)


@dataclass_transform(frozen_default=True)
class Additive:
    """A base class of states whose merge adds every leaf.

    A subclass names its fields and defines ``compute``. It becomes a frozen dataclass
    and a pytree by itself; do not decorate it. The fields are sums over a tower's rows,
    with each row multiplied by its weight. ``compute`` divides after all sums are
    added. Mark a field that is not an array, such as a threshold, as static:
    ``dataclasses.field(metadata={"static": True})``. It must be equal in states that
    are merged. If the sums depend on the number of towers by design, ``counts_towers:
    ClassVar = True`` leaves them out of audits.

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
        """Add both states, leaf by leaf; neither is changed.

        It raises a ``ValueError`` if ``other`` has another class, other shapes or other
        static fields.
        """
        mine, others = (jax.tree.map(np.shape, state) for state in (self, other))
        if jax.tree.structure(self) != jax.tree.structure(other) or mine != others:
            raise ValueError(
                f"{mine!r} cannot be merged with {others!r}: different options made"
                " them. Merge states of one metric, made with the same options."
            )
        return jax.tree.map(lambda x, y: widen(x) + widen(y), self, other)

    def compute(self) -> Any:
        """Compute the value of the merged state, an array; each subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} has no compute.")


class Tally(Additive):
    """Sums over rows, and the function that computes their value once all are added."""

    sums: tuple[Any, ...]
    value: Callable[..., Any] = dataclasses.field(metadata={"static": True}, repr=False)
    options: tuple[Any, ...] = dataclasses.field(default=(), metadata={"static": True})
    counted_by: Any = dataclasses.field(default=None, metadata={"static": True})

    def compute(self) -> Any:
        """Compute the value of the merged sums."""
        return self.value(*self.sums, *self.options)
