"""What the nouns are: Weighted, Reduction, Layout, PerTower, TowerOutput."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.html_form import leaf_table

PyTree: TypeAlias = Any
ArrayLike: TypeAlias = jax.typing.ArrayLike


class Reduction(enum.Enum):
    """How the values of ``T`` towers become one value.

    ``SUM`` adds them, ``MEAN`` adds them and divides by ``T``,
    ``ONLY_FIRST_TOWER`` takes tower 0's, ``NONE`` says that the value is not to
    be reduced: asking for one value of it is an error.
    """

    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_TOWER = "only_first_tower"
    NONE = "none"

    def __repr__(self) -> str:
        """Text that can be pasted back."""
        return f"Reduction.{self.name}"


class Layout(enum.Enum):
    """Where one value lies.

    ``MIRRORED``: one value, the same on every tower. ``PER_TOWER``: dim 0 runs
    over towers (or over the examples, tower after tower) and is split over the
    devices. ``PER_TOWER_STEPS``: dim 0 runs over steps and dim 1 is split.
    """

    MIRRORED = "mirrored"
    PER_TOWER = "per_tower"
    PER_TOWER_STEPS = "per_tower_steps"


def _refuse_negative(weight: Any) -> None:
    """Raise for a weight that is known before tracing and negative."""
    if isinstance(weight, int | float | np.ndarray | np.generic):
        lowest = np.min(weight, initial=0)
        if lowest < 0:
            raise ValueError(
                f"Weighted.weight must be >= 0, got {lowest}. A weight counts"
                " examples: mask an example with weight 0, and put a sign into the sum."
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weighted:
    """A numerator and a denominator that travel together.

    The only thing that may be averaged: towers, micro-batches and batches merge
    by adding both fields, and ``value`` divides once, at the end. So unequal
    weights, padding and empty towers are exact.

    Attributes:
      sum: The weighted total, shape ``()`` for a loss or any shape for a metric.
      weight: What the total is divided by, broadcastable to ``sum``, >= 0.

    Raises:
      ValueError: A ``weight`` that is a number or a NumPy array holds a negative.

    Example:
      >>> first = Weighted.mean(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
      >>> second = Weighted.mean(np.array([6.0, 9.0]), np.array([1.0, 0.0]))
      >>> float((first + second).value)
      3.0
    """

    sum: ArrayLike
    weight: ArrayLike

    def __post_init__(self) -> None:
        """Refuse weights that are negative where that can be known."""
        _refuse_negative(self.weight)

    @classmethod
    def mean(cls, values: ArrayLike, weight: ArrayLike | None = None) -> "Weighted":
        """The mean of ``values`` in which each example counts by its weight.

        ``sum = sum_i w_i v_i`` and ``weight = sum_i w_i``, both at least float32.
        An element of weight 0 is left out even when its value is NaN. Its gradient
        is not: NaN times 0 is NaN, so replace bad inputs before the model, with
        ``jnp.where``, or build the step with ``guard="gradients"``.

        Args:
          values: Shape ``[b, ...]`` or ``()``, numbers or booleans.
          weight: Shape equal to the leading dims of ``values`` (``[b]`` for
            per-example weights), >= 0; None counts every element once.

        Returns:
          A ``Weighted`` of two scalars.

        Raises:
          ValueError: ``weight`` is negative where that is known before tracing, or
            its shape is not a leading part of the shape of ``values``.

        Example:
          >>> float(Weighted.mean(np.array([1.0, 5.0]), np.array([3.0, 1.0])).value)
          2.0
        """
        values = jnp.asarray(values)
        values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
        if weight is None:
            return cls(values.sum(), jnp.asarray(values.size, values.dtype))
        _refuse_negative(weight)
        weight = jnp.asarray(weight)
        if values.shape[: weight.ndim] != weight.shape:
            raise ValueError(
                f"Weighted.mean got values of shape {values.shape} and weights of shape"
                f" {weight.shape}. Weights must have the leading dims of the values,"
                f" here {values.shape[:1]} for one weight per example."
            )
        weight = weight.astype(values.dtype)
        weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
        weight = jnp.broadcast_to(weight, values.shape)
        counted = jnp.where(weight != 0, values * weight, 0)
        return cls(counted.sum(), weight.sum())

    def __add__(self, other: "Weighted") -> "Weighted":
        """Both sums and both weights added."""
        return Weighted(self.sum + other.sum, self.weight + other.weight)

    def merge(self, other: "Weighted") -> "Weighted":
        """Both sums and both weights added, as for every metric state."""
        return self + other

    def compute(self) -> Any:
        """``value``; in NumPy, in their precision, where both fields are of NumPy."""
        kinds = np.ndarray | np.generic
        if not (isinstance(self.sum, kinds) and isinstance(self.weight, kinds)):
            return self.value
        empty = self.weight == 0
        return np.where(empty, 0.0, self.sum / np.where(empty, 1.0, self.weight))

    @property
    def value(self) -> jax.Array:
        """``sum / weight``; 0 where the weight is 0, never NaN from an empty set."""
        weight = jnp.asarray(self.weight)
        empty = weight == 0
        return jnp.where(empty, 0, jnp.asarray(self.sum) / jnp.where(empty, 1, weight))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerTower:
    """One value a tower, side by side.

    Attributes:
      values: An array ``[T, ...]`` (or a pytree of them); row ``t`` is tower ``t``'s
        value. Or a tuple of the towers' values, whose shapes may differ.

    Example:
      >>> PerTower(np.array([3.0, 4.0])).values.shape
      (2,)
    """

    values: Any

    def _repr_html_(self) -> str:
        leaves = named_leaves("values", self.values)
        return leaf_table("PerTower", [(*leaf, "per tower") for leaf in leaves])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerOutput:
    """What a tower's loss function may return besides its loss.

    Attributes:
      loss: ``Weighted`` of two scalars (or a scalar, with ``loss_reduction``).
      metrics: Name -> ``Weighted`` or another metric state (``tj.metrics``), merged
        over towers and micro-batches; or a plain array that is the same on every
        tower, which is proved before the step is compiled. Of several micro-batches
        a plain array's last value is kept: make it a state where it depends on the
        rows.
      local: The next value of the tower-local variables, of the same structure,
        shapes and dtypes as ``tower.local``; None leaves them as they are.

    Example:
      >>> TowerOutput(loss=Weighted(3.0, 2.0), metrics={"hits": Weighted(1.0, 2.0)})
      TowerOutput(loss=Weighted(sum=3.0, weight=2.0), ...
    """

    loss: Any
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    local: PyTree = None


LossFn: TypeAlias = Callable[[PyTree, PyTree, Any], Any]
"""``(params, batch, tower) -> Weighted | TowerOutput``: one tower's loss.

``batch`` holds the tower's own rows, ``[b, ...]`` a leaf; ``tower`` is its `Tower`.
"""

MetricFn: TypeAlias = Callable[[PyTree, PyTree, Any], Mapping[str, Any]]
"""``(params, batch, tower) -> {name: state}``: one tower's part of each metric.

A state is ``Weighted`` or another metric state, see ``tj.metrics``.
"""

PredictFn: TypeAlias = Callable[[PyTree, PyTree, Any], PyTree]
"""``(params, batch, tower) -> outputs`` with leaves ``[b, ...]``, row for row."""


def short_repr(options: Any) -> str:
    """The call that makes an equal object: only what differs from the defaults.

    Args:
      options: A dataclass of plain values.

    Returns:
      Text that can be pasted back.
    """
    shown = [
        f"{field.name}={getattr(options, field.name)!r}"
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    ]
    return f"{type(options).__name__}({', '.join(shown)})"


def leaf_name(root: str, path: tuple[Any, ...]) -> str:
    """The name by which errors call a leaf, e.g. ``batch['image']``.

    Args:
      root: What the whole tree is called.
      path: The key path of the leaf, as ``jax.tree_util`` gives it.

    Returns:
      ``root`` followed by the path.
    """
    return f"{root}{jax.tree_util.keystr(path)}"


def named_leaves(root: str, tree: PyTree, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """``(name, leaf)`` of every leaf, in tree order.

    Args:
      root: What the whole tree is called.
      tree: Any pytree.
      is_leaf: As in ``jax.tree.leaves``.

    Returns:
      A list of pairs; names as `leaf_name` gives them.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return [(leaf_name(root, path), leaf) for path, leaf in leaves]


def readable_leaves(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """``(name, leaf)`` of every leaf, in tree order, as models call them.

    Args:
      root: What the whole tree is called; may be empty.
      tree: Any pytree.

    Returns:
      A list of pairs.

    Example:
      >>> readable_leaves("params", {"Dense_0": {"kernel": 1.0}})
      [('params/Dense_0/kernel', 1.0)]
    """
    keystr = jax.tree_util.keystr
    return [
        ("/".join(filter(None, [root, keystr(path, simple=True, separator="/")])), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
