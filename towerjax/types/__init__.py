"""Types of values: Sum, Rows, Whole, PerTower, TowerOutput, Reduction and Layout."""

import contextlib
import dataclasses
import enum
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax

from towerjax.types.missing import explain_missing

PyTree: TypeAlias = Any
ArrayLike: TypeAlias = jax.typing.ArrayLike
Metrics: TypeAlias = dict[str, Any]
"""By its name the value of a metric, or of an evaluation its state."""


class Reduction(enum.Enum):
    """How the values of ``T`` towers become one value.

    ``SUM`` adds them, ``MEAN`` adds them and divides by ``T``,
    ``ONLY_FIRST_TOWER`` takes tower 0's, ``NONE`` forbids it: reducing the value is an
    error.
    """

    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_TOWER = "only_first_tower"
    NONE = "none"

    __repr__ = enum.Enum.__str__


class Layout(enum.Enum):
    """How one value lies on the devices.

    ``MIRRORED``: one value, the same on every tower. ``PER_TOWER``: dim 0 runs
    over towers (or over the examples, tower after tower) and is split over the
    devices. ``PER_TOWER_STEPS``: dim 0 runs over steps and dim 1 is split.
    ``SHARDED``: one value, split over the devices along its longest dim that their
    number divides; a value without such a dim is mirrored.
    """

    MIRRORED = "mirrored"
    PER_TOWER = "per_tower"
    PER_TOWER_STEPS = "per_tower_steps"
    SHARDED = "sharded"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A value that is added over micro-batches and towers, and never divided.

    A metric state: as a metric its value is the total of all rows.

    Attributes:
      value: An array or a pytree of arrays, a tower's part; after the merge the total.
        Dtypes narrower than 32 bits are added in 32.

    Example:
      >>> Sum(3.0).merge(Sum(4.0)).value
      7.0
    """

    value: Any

    def merge(self, other: "Sum") -> "Sum":
        """The sum of both, leaf by leaf."""
        return Sum(jax.tree.map(operator.add, self.value, other.value))

    def compute(self) -> Any:
        """The total."""
        return self.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """One result row for each row of the batch.

    Attributes:
      value: An array or a pytree of arrays ``[b, ...]``, of a tower's rows; after the
        merge ``[B, ...]``, in the order of the batch.

    Example:
      >>> import numpy as np
      >>> Rows(np.zeros((4, 2))).value.shape
      (4, 2)
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """A leaf of a batch that has no rows: the same on all towers, not split.

    A temperature, an annealed rate, a teacher's parameters. It is traced, so a new
    value compiles nothing, and the tower function gets the bare tree.

    Attributes:
      value: A pytree of arrays and numbers. Arrays that lie on all the step's devices
        already are not copied.

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
    """One value a tower, side by side.

    Attributes:
      values: A tuple of the towers' values, whose shapes may differ. Or an array
        ``[T, ...]`` or any other pytree of them, a list and a named tuple included:
        row ``t`` of each is tower ``t``'s.

    Example:
      >>> import numpy as np
      >>> PerTower(np.array([3.0, 4.0])).values.shape
      (2,)
    """

    values: Any

    if not TYPE_CHECKING:
        __getattr__ = explain_missing(
            "A PerTower is no array: strategy.unwrap(x) is a list of all towers' values"
            " and strategy.unwrap(x)[t] that of tower t; strategy.reduce makes one."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerOutput:
    """What a tower's loss function may return besides its loss.

    Attributes:
      loss: ``Weighted`` of two scalars, a sum of such, or with ``loss_reduction`` a
        scalar.
      metrics: Name -> ``Weighted``, ``Sum`` or another metric state (``tj.metrics``),
        merged over towers and micro-batches; ``PerTower`` of one; or a plain array that
        is the same on every tower, which is proved before the step is compiled. Of
        several micro-batches a plain array's last value is kept: make it a state where
        it depends on the rows.
      local: The next value of the tower-local variables, of the same structure,
        shapes and dtypes as ``tower.local``; None leaves them as they are.
      extra: The next value of ``tower.extra``, of the same tree: ``Weighted`` and
        ``Sum`` leaves are merged over towers and micro-batches, a bare array is proved
        to be the same on every tower; None leaves it as it is. With ``update_extra``
        of the step any tree of what a tower of `build_step` may return.

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


class Portable(Exception):
    """An error that is copied and pickled by its text, attributes and notes."""

    def __reduce__(self) -> Any:
        """The text and the attributes; the constructor is not called again."""
        return type(self).__new__, (type(self), *self.args), vars(self)


def short_repr(self: Any) -> str:
    """The constructor call of an equal object, without arguments left at defaults."""
    shown = [
        f"{field.name}={getattr(self, field.name)!r}"
        for field in dataclasses.fields(self)
        if getattr(self, field.name) != field.default
    ]
    return f"{type(self).__name__}({', '.join(shown)})"


def leaf_name(root: str, path: tuple[Any, ...]) -> str:
    """The name of a leaf in errors, e.g. ``batch['image']``."""
    return f"{root}{jax.tree_util.keystr(path)}"


def name_by_key(path: tuple[Any, ...]) -> str:
    """The name of a leaf in a tree whose first key names the part."""
    name = leaf_name("", path)
    if name.startswith("['"):
        return name.removeprefix("['").replace("']", "", 1)
    return f"result{name}"


def names_by_key(tree: PyTree) -> list[str]:
    """`name_by_key` of each leaf, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [name_by_key(path) for path, _ in leaves]


def named_leaves(root: str, tree: PyTree, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """``(name, leaf)`` of every leaf, in tree order."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    except ValueError:
        refuse_unsortable(root, tree)
        raise
    keystr = jax.tree_util.keystr
    return [(f"{root}{keystr(path)}", leaf) for path, leaf in leaves]


@contextlib.contextmanager
def sorted_keys(root: str, tree: PyTree) -> Iterator[None]:
    """The context that names the dict of a tree whose keys JAX cannot sort."""
    try:
        yield
    except ValueError:
        refuse_unsortable(root, tree)
        raise


def refuse_unsortable(root: str, tree: PyTree) -> None:
    """Raise if a dict has keys that JAX cannot sort."""
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_unsortable)
    for path, x in named:
        if _is_unsortable(x):
            raise ValueError(
                f"{leaf_name(root, path)} is a dict with the keys"
                f" {', '.join(map(repr, x)):.200}, of several types, which JAX cannot"
                " sort. Make them all texts."
            )


def _is_unsortable(x: Any) -> bool:
    """Whether ``x`` is a dict with keys of several types."""
    try:
        sorted(x if isinstance(x, dict) else ())
    except TypeError:
        return True
    return False


def readable_leaves(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """``(name, leaf)`` of every leaf, in tree order, with ``/`` between keys."""
    keystr = jax.tree_util.keystr
    return [
        ("/".join(filter(None, [root, keystr(path, simple=True, separator="/")])), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
