"""The nouns of a user: Sum, Rows, Whole, PerTower, TowerOutput, Reduction, Layout."""

import dataclasses
import enum
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from towerjax.types.boundary import api_boundaries
from towerjax.types.notes import explain_missing

PyTree: TypeAlias = Any
"""Arrays in any nesting of dicts, lists, tuples and other nodes that JAX knows."""

ArrayLike: TypeAlias = jax.typing.ArrayLike
"""A JAX or NumPy array, or a number."""

Metrics: TypeAlias = dict[str, Any]
"""The value of each metric by its name; in an evaluation, its state."""


class Reduction(enum.Enum):
    """How the values of ``T`` towers become one value.

    ``SUM`` adds them. ``MEAN`` adds them and divides by ``T``. ``ONLY_FIRST_TOWER``
    takes the value of tower 0. ``NONE`` means that reducing the value is an error.
    """

    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_TOWER = "only_first_tower"
    NONE = "none"

    __repr__ = enum.Enum.__str__


class Layout(enum.Enum):
    """The layout of a value on the devices.

    ``MIRRORED`` is one value, the same on every tower. With ``PER_TOWER``, dim 0 runs
    over towers (or over the examples, tower after tower) and is split over the devices.
    With ``PER_TOWER_STEPS``, dim 0 runs over steps and dim 1 is split. ``SHARDED`` is
    one value, split over the devices along its longest dim that their number divides; a
    value without such a dim is mirrored.
    """

    MIRRORED = "mirrored"
    PER_TOWER = "per_tower"
    PER_TOWER_STEPS = "per_tower_steps"
    SHARDED = "sharded"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A value that is added over micro-batches and towers, and never divided.

    As a metric its value is the total of all rows.

    Attributes:
      value: An array or a pytree of arrays: one tower's sum, and after the merge the
        total. Dtypes narrower than 32 bits are added in 32 bits.

    Example:
      >>> Sum(3.0).merge(Sum(4.0)).value
      7.0
    """

    value: Any

    def merge(self, other: "Sum") -> "Sum":
        """Add both values, leaf by leaf."""
        return Sum(jax.tree.map(operator.add, self.value, other.value))

    def compute(self) -> Any:
        """Give the total."""
        return self.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """One result row for each row of the batch.

    Attributes:
      value: An array or a pytree of arrays: ``[b, ...]`` for a tower's rows, and after
        the merge ``[B, ...]`` in the order of the batch.

    Example:
      >>> import numpy as np
      >>> Rows(np.zeros((4, 2))).value.shape
      (4, 2)
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A leaf of a batch that is not split: it has no rows, and each tower gets it all.

    Examples are a temperature, an annealed rate and a teacher's parameters. The value
    is traced, so that a new value compiles nothing. The tower function gets the bare
    tree.

    Attributes:
      value: A pytree of arrays and numbers. Arrays that already lie on all the step's
        devices are not copied.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     errors = w - batch["x"] * batch["scale"]
      ...     return tj.Weighted.mean(errors**2, tower.weight)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.5), tj.Mirrored(towers=2))
      >>> batch = {"x": np.array([1, 3], np.float32), "scale": tj.Whole(2.0)}
      >>> float(step(step.init(0.0), batch)[0].params)
      4.0
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerTower:
    """One value per tower, side by side.

    Attributes:
      values: A tuple of the towers' values, whose shapes may differ. Or any other
        pytree, such as a list, of arrays ``[T, ...]``, whose row ``t`` belongs to tower
        ``t``.

    Example:
      >>> import numpy as np
      >>> PerTower(np.array([3.0, 4.0])).values.shape
      (2,)
    """

    values: Any

    if not TYPE_CHECKING:
        __getattr__ = explain_missing(
            "A PerTower is not an array. Write strategy.unwrap(x) for a list of all"
            " towers' values, strategy.unwrap(x)[t] for that of tower t, or"
            " strategy.reduce for one value."
        )


@jax.tree_util.register_dataclass
@api_boundaries
@dataclasses.dataclass(frozen=True)
class TowerOutput:
    """A tower's loss, with metrics, local variables and extra values beside it.

    Attributes:
      loss: A ``Weighted`` of two scalars, a sum of several, or with ``loss_reduction``
        a scalar.
      metrics: A dict of names and metric states (``Weighted``, ``Sum`` or others of
        ``tj.metrics``), which are merged over towers and micro-batches. Or a
        ``PerTower`` of a state, or a plain array; that it is the same on every tower is
        proved before the step is compiled. With several micro-batches a plain array
        keeps its last value, so return a state for anything that depends on the rows.
      local: The next value of the tower-local variables, with the structure, shapes and
        dtypes of ``tower.local``; None leaves them as they are.
      extra: The next value of ``tower.extra``, with the same tree; None leaves it as it
        is. ``Weighted`` and ``Sum`` leaves are merged over towers and micro-batches; a
        bare array is proved to be the same on every tower. If the step has
        ``update_extra``, any tree that a tower of `build_step` may return.

    Example:
      >>> import towerjax as tj
      >>> TowerOutput(tj.Weighted(3.0, 2.0), {"hits": tj.Weighted(1.0, 2.0)})
      TowerOutput(loss=Weighted(sum=3.0, weight=2.0), ...
    """

    loss: Any
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    local: PyTree = None
    extra: PyTree = None


LossFn: TypeAlias = Callable[[PyTree, PyTree, Any], Any]
"""``(params, batch, tower) -> Weighted | TowerOutput``: one tower's loss.

The loss may be a sum of several ``Weighted``. ``batch`` holds the tower's own rows,
``[b, ...]`` a leaf; ``tower`` is its `Tower`.
"""

MetricFn: TypeAlias = Callable[[PyTree, PyTree, Any], Mapping[str, Any]]
"""``(params, batch, tower) -> {name: state}``: one tower's part of each metric.

A state is ``Weighted`` or another metric state, see ``tj.metrics``.
"""

PredictFn: TypeAlias = Callable[[PyTree, PyTree, Any], PyTree]
"""``(params, batch, tower) -> outputs`` with leaves ``[b, ...]``, row for row."""
