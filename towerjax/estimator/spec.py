"""``ModelSpec``, the result of a model function, and how its rows are joined."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import concat_rows, refuse_other_than_rows
from towerjax.step.returned import without_padding
from towerjax.towers.variables import is_per_tower
from towerjax.types import PerTower, PyTree, Rows, named_leaves
from towerjax.types.leaves import listed, map_parts, refuse_unheld
from towerjax.types.options import check_choice


class Mode(enum.Enum):
    """The mode in which a model function is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"

    __repr__ = enum.Enum.__str__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PredictOutput:
    """Outputs to be exported as they are.

    Attributes:
      outputs: Name -> array ``[b, ...]``, a row for each example; or one array.

    Example:
      >>> import numpy as np
      >>> sorted(PredictOutput({"probabilities": np.ones((4, 2))}).outputs)
      ['probabilities']
    """

    outputs: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegressionOutput:
    """A regression's output to be exported.

    Attributes:
      value: ``[b, ...]``.

    Example:
      >>> import numpy as np
      >>> RegressionOutput(np.ones(4)).value.shape
      (4,)
    """

    value: PyTree


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class ClassificationOutput:
    """A classification's output to be exported: scores, classes or both.

    Attributes:
      scores: ``[b, n]``, one for each class, or None.
      classes: Integers ``[b, ...]``, or the names of the ``n`` classes, a tuple of
        strings, the same for every row; or None.

    Raises:
      ValueError: Both are None.

    Example:
      >>> import numpy as np
      >>> ClassificationOutput(np.ones((4, 2)), classes=("cat", "dog")).classes
      ('cat', 'dog')
    """

    scores: PyTree = None
    classes: PyTree = None

    def __post_init__(self) -> None:
        if self.scores is None and self.classes is None:
            raise ValueError("ClassificationOutput needs scores, classes or both.")
        if _are_names(self.classes):
            object.__setattr__(self, "classes", tuple(self.classes))

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, Any], Any]:
        """Arrays are children; names are not."""
        names = self.classes if _are_names(self.classes) else None
        classes = None if names else self.classes
        key = jax.tree_util.GetAttrKey
        return ((key("scores"), self.scores), (key("classes"), classes)), names

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> "ClassificationOutput":
        """The inverse, unchecked, because JAX puts placeholders in place of leaves."""
        return _make_unchecked(
            cls, scores=children[0], classes=children[1] if names is None else names
        )


ExportOutput = PredictOutput | RegressionOutput | ClassificationOutput


def _are_names(classes: Any) -> bool:
    is_some = isinstance(classes, tuple | list) and bool(classes)
    return is_some and all(isinstance(name, str) for name in classes)


def _make_unchecked(cls: Any, **values: Any) -> Any:
    made = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What a model function returns: the values of one mode, a pytree.

    Attributes:
      mode: The mode of the call.
      predictions: Name -> array with a row for each example, in any mode; needed in
        PREDICT.
      loss: ``Weighted``, or a scalar, of this tower; needed in TRAIN and EVAL.
      train_op: The next variables, like ``variables``; needed in TRAIN, and ignored
        in other modes.
      eval_metrics: Name -> a metric state of this tower: ``Weighted``, or one of
        ``tj.metrics``.
      export_outputs: Name -> `PredictOutput`, `RegressionOutput` or
        `ClassificationOutput`.
      hooks: Functions ``(step number, metrics)`` that
        ``tj.estimator.train_and_evaluate`` calls after each step, with host values.

    Raises:
      ValueError: A part that the mode needs is missing, or a part has a wrong type.

    Example:
      >>> import numpy as np
      >>> spec = ModelSpec(Mode.PREDICT, predictions={"x": np.ones(2)})
      >>> spec.mode, spec.loss
      (Mode.PREDICT, None)

    Source:
      ``tf.estimator.EstimatorSpec`` of TensorFlow 1.
    """

    mode: Mode
    predictions: Mapping[str, PyTree] | None = None
    loss: Any = None
    train_op: PyTree = None
    eval_metrics: Mapping[str, Any] | None = None
    export_outputs: Mapping[str, ExportOutput] | None = None
    hooks: tuple[Callable[[int, dict[str, Any]], None], ...] = ()

    def __post_init__(self) -> None:
        """Check that each part is there where the mode needs it, and of its type."""
        check_choice("mode", self.mode, tuple(Mode))
        _check_needed(self)
        _check_mapping("predictions", self.predictions, "{'probabilities': ...}")
        _check_mapping("eval_metrics", self.eval_metrics, "{'accuracy': ...}")
        if "loss" in (self.eval_metrics or {}):
            raise ValueError(
                "eval_metrics['loss'] is the name of the loss, which is evaluated"
                " anyway; give yours another name."
            )
        outputs = self.export_outputs
        _check_mapping(
            "export_outputs", outputs, "{'serving': tj.estimator.PredictOutput(...)}"
        )
        for name, output in (outputs or {}).items():
            if not isinstance(output, ExportOutput):
                raise ValueError(
                    f"export_outputs[{name!r}] is a {type(output).__name__}; write"
                    " tj.estimator.PredictOutput, tj.estimator.RegressionOutput or"
                    " tj.estimator.ClassificationOutput."
                )
        hooks = self.hooks
        if not isinstance(hooks, Sequence) or not all(map(callable, hooks)):
            raise ValueError(
                f"hooks={hooks!r} must be a tuple of functions (step number, metrics)."
            )
        object.__setattr__(self, "hooks", tuple(hooks))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arrays are children; mode and hooks are not."""
        children = tuple(getattr(self, name) for name in _CHILDREN)
        return children, (self.mode, self.hooks)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "ModelSpec":
        """The inverse, unchecked, because JAX puts placeholders in place of leaves."""
        values = dict(zip(_CHILDREN, children, strict=True))
        return _make_unchecked(cls, mode=aux[0], hooks=aux[1], **values)


_CHILDREN = ("predictions", "loss", "train_op", "eval_metrics", "export_outputs")
_NEEDED = {
    Mode.TRAIN: ("loss", "train_op"),
    Mode.EVAL: ("loss",),
    Mode.PREDICT: ("predictions",),
}


def _check_needed(spec: ModelSpec) -> None:
    missing = [name for name in _NEEDED[spec.mode] if getattr(spec, name) is None]
    if missing:
        raise ValueError(
            f"A ModelSpec of {spec.mode!r} needs {' and '.join(missing)}. In TRAIN give"
            " loss and train_op (the next variables), in EVAL loss, in PREDICT"
            " predictions."
        )


def _check_mapping(name: str, value: Any, example: str) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} is a {type(value).__name__}, which has no names; return a dict,"
            f" such as {name}={example}."
        )
    bad = [key for key in value if not isinstance(key, str)]
    if bad:
        raise ValueError(f"{name} has the names {bad}; names are strings.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeveralRows:
    """An output with ``n`` rows for each example: ``Rows`` ``[b, n, ...]``."""

    rows: Any


def typed_rows(
    name: str, outputs: PyTree, rows: int, *, stacked_classes: bool
) -> PyTree:
    """One tower's outputs in the types that a pass merges: `Rows` or `PerTower`."""
    refuse_other_than_rows(outputs, name)
    refuse_unheld(name, outputs)
    outputs = jax.tree.map(jnp.asarray, dict(outputs))
    if stacked_classes:
        outputs = map_parts(ClassificationOutput, _keep_classes_per_tower, outputs)
    bad = [
        f"{leaf} has shape {jnp.shape(x)}"
        for leaf, x in named_leaves(name, outputs, is_leaf=is_per_tower)
        if not is_per_tower(x) and (not x.shape or not len(x) or len(x) % rows)
    ]
    if bad:
        raise ValueError(
            f"The towers' outputs are joined row by row, so each leaf has {rows} rows"
            f" (or a multiple) for a tower's {rows} rows, but {listed(bad)}. Repeat a"
            " number that all rows share, jnp.full(tower.rows, x)."
        )

    def one(x: Any) -> Any:
        if is_per_tower(x):
            return x
        shape = (rows, len(x) // rows, *x.shape[1:])
        return Rows(x) if len(x) == rows else SeveralRows(Rows(x.reshape(shape)))

    return jax.tree.map(one, outputs, is_leaf=is_per_tower)


def concat_outputs(outputs: PyTree, batch: PlacedBatch) -> PyTree:
    """The outputs as bare arrays, in the order of the examples, without padding."""
    outputs = without_padding(outputs, batch)
    outputs = map_parts(SeveralRows, lambda x: concat_rows(x.rows), outputs)
    return map_parts(PerTower, lambda x: x.values, outputs)


def _keep_classes_per_tower(x: ClassificationOutput) -> ClassificationOutput:
    if isinstance(x.classes, tuple):
        return x
    return dataclasses.replace(x, classes=jax.tree.map(PerTower, x.classes))
