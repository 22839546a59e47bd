"""A model function: its options, its arguments, and ``ModelSpec``, its result."""

import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

import towerjax as tj
from towerjax.data.batch_rows import concat_rows, refuse_other_than_rows
from towerjax.step.plan import StepOptions
from towerjax.step.state.train_state import TrainState
from towerjax.tf1.call import key_of
from towerjax.tf1.estimator.losses import LossReduction, check_loss_reduction
from towerjax.tf1.estimator.variables import VariablePlacement
from towerjax.towers.variables import is_per_tower
from towerjax.types import PerTower, PyTree, Rows
from towerjax.types.options import check_choice, check_function, check_list
from towerjax.types.refusals import a_type, listed, refuse_unheld
from towerjax.types.trees import map_parts, named_leaves

Compat = Literal["tf1"]
_FIXED = {"static": True}


class Mode(enum.Enum):
    """The mode in which a model function is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"

    __repr__ = enum.Enum.__str__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PredictOutput:
    """Outputs that are exported unchanged.

    Attributes:
      outputs: A dict of arrays ``[b, ...]`` with a row per example; or one such array.

    Example:
      >>> import numpy as np
      >>> sorted(PredictOutput({"probabilities": np.ones((4, 2))}).outputs)
      ['probabilities']
    """

    outputs: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegressionOutput:
    """The output of a regression, to be exported.

    Attributes:
      value: The predicted values, ``[b, ...]``.

    Example:
      >>> import numpy as np
      >>> RegressionOutput(np.ones(4)).value.shape
      (4,)
    """

    value: PyTree


@jax.tree_util.register_static
class ClassNames(tuple[str, ...]):
    """The names of classes, as a pytree without leaves, so that JAX can return it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClassificationOutput:
    """The output of a classification, to be exported: scores, classes or both.

    Attributes:
      scores: A score for each class, ``[b, n]``, or None.
      classes: Integers ``[b, ...]``; or the names of the ``n`` classes, a tuple of
        strings that is the same for every row; or None.

    Example:
      >>> import numpy as np
      >>> ClassificationOutput(np.ones((4, 2)), classes=("cat", "dog")).classes
      ('cat', 'dog')
    """

    scores: PyTree = None
    classes: PyTree = None

    def __post_init__(self) -> None:
        names = self.classes
        if isinstance(names, tuple | list) and names:
            if all(isinstance(name, str) for name in names):
                object.__setattr__(self, "classes", ClassNames(names))


ModelHook: TypeAlias = Callable[[int, dict[str, Any]], None]
"""``(step number, metrics)``, called after each step with values on the host."""

ExportOutput = PredictOutput | RegressionOutput | ClassificationOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The result of a model function in one mode, a pytree.

    Attributes:
      mode: The mode of the call.
      predictions: A dict of arrays with a row per example; needed in PREDICT, allowed
        in any mode.
      loss: This tower's loss, a ``Weighted`` or a scalar; needed in TRAIN and EVAL.
      train_op: The next variables, like ``variables``; needed in TRAIN, ignored in
        other modes.
      eval_metrics: A dict of this tower's metric states, ``Weighted`` or others of
        ``tj.metrics``.
      export_outputs: A dict of `PredictOutput`, `RegressionOutput` or
        `ClassificationOutput`.
      hooks: Functions ``(step number, metrics)`` that
        ``tj.estimator.train_and_evaluate`` calls after each step, with values on the
        host.

    Example:
      >>> import numpy as np
      >>> spec = ModelSpec(Mode.PREDICT, predictions={"x": np.ones(2)})
      >>> spec.mode, spec.loss
      (Mode.PREDICT, None)

    Source:
      ``tf.estimator.EstimatorSpec`` of TensorFlow 1.
    """

    mode: Mode = dataclasses.field(metadata=_FIXED)
    predictions: Mapping[str, PyTree] | None = None
    loss: Any = None
    train_op: PyTree = None
    eval_metrics: Mapping[str, Any] | None = None
    export_outputs: Mapping[str, ExportOutput] | None = None
    hooks: tuple[ModelHook, ...] = dataclasses.field(default=(), metadata=_FIXED)


_NEEDED = {
    Mode.TRAIN: ("loss", "train_op"),
    Mode.EVAL: ("loss",),
    Mode.PREDICT: ("predictions",),
}


def check_spec(spec: Any, mode: Mode) -> ModelSpec:
    """Refuse a result of a model function unless it is a spec of ``mode``.

    The spec must have the fields that the mode needs.
    """
    if not isinstance(spec, ModelSpec) or spec.mode is not mode:
        of_mode = f" of {spec.mode!r}" if isinstance(spec, ModelSpec) else ""
        raise ValueError(
            f"model_fn was called in {mode!r} but returned {a_type(spec)}{of_mode}."
            " Return tj.estimator.ModelSpec(mode, ...) in each mode."
        )
    if missing := [name for name in _NEEDED[mode] if getattr(spec, name) is None]:
        raise ValueError(
            f"A ModelSpec of {mode!r} needs {' and '.join(missing)}. The train_op is"
            " the next variables."
        )
    op = spec.train_op
    if isinstance(op, tuple) and [isinstance(x, TrainState) for x in op] == [0, 1]:
        raise ValueError(
            "train_op is a pair of a loss and the next variables, but must be the next"
            " variables alone. Write loss, train_op = optimizer.minimize(loss_fn,"
            " variables)."
        )
    for name in ("predictions", "eval_metrics", "export_outputs"):
        parts = getattr(spec, name)
        if not isinstance(parts, Mapping | None):
            raise ValueError(
                f"{name} is {a_type(parts)}, but must be a dict. Write {name}={{'name':"
                " ...}."
            )
    for name, output in (spec.export_outputs or {}).items():
        if not isinstance(output, ExportOutput):
            raise ValueError(
                f"export_outputs[{name!r}] is {a_type(output)}, but must be a"
                " tj.estimator.PredictOutput, RegressionOutput or ClassificationOutput."
            )
    return dataclasses.replace(spec, hooks=checked_hooks(spec.hooks))


def checked_hooks(hooks: Any) -> tuple[Any, ...]:
    """Make a tuple of the hooks; raise if one cannot be called."""
    hooks = check_list("hooks", hooks)
    for i, hook in enumerate(hooks):
        if not isinstance(hook, tj.loop.WithState):
            check_function(f"hooks[{i}]", hook, "hook(number, metrics)")
    return hooks


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The options by which a model function is replicated; see `replicate_model_fn`."""

    loss_reduction: LossReduction
    variable_placement: VariablePlacement
    compat: Compat | None
    step: StepOptions  # the step's options when the model is called

    def __post_init__(self) -> None:
        check_loss_reduction(self.loss_reduction)
        placements = tuple(VariablePlacement)
        check_choice("variable_placement", self.variable_placement, placements)
        check_choice("compat", self.compat, (None, *get_args(Compat)))


_OPTIONAL = ("params", "config", "tower")


@dataclasses.dataclass(frozen=True)
class ModelFn:
    """A model function, and which of params, config and tower it takes."""

    fn: Callable[..., Any]
    # The model function's parameters and their defaults, those of functools.partial
    # included. The default is passed where a call gives no value, or None.
    accepts: Mapping[str, Any]

    @classmethod
    def of(cls, fn: Any) -> "ModelFn":
        """Wrap ``fn``; raise unless it has the signature of a model function."""
        form = "model_fn(variables, features, labels, mode)"
        check_function("model_fn", fn, form, takes=False)
        signature = inspect.signature(fn)
        parameters = signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names = _OPTIONAL if takes_any else [x for x in _OPTIONAL if x in parameters]
        arguments = dict.fromkeys(("features", "labels", "mode", *names))
        try:
            signature.bind(None, **arguments)
        except TypeError as error:
            raise ValueError(
                f"model_fn{signature}: {error}. Write def model_fn(variables, features,"
                " labels, mode), and optionally params=None, config=None, tower=None."
            ) from error
        empty = inspect.Parameter.empty
        known = {x: p.default for x, p in parameters.items() if p.default is not empty}
        return cls(fn, {name: known.get(name) for name in names})

    def call(
        self,
        variables: PyTree,
        batch: Mapping[str, PyTree],
        mode: Mode,
        tower: tj.Tower,
        params_and_config: Mapping[str, Any],
    ) -> ModelSpec:
        """Call the function for one tower; raise unless its spec fits the mode."""
        if not isinstance(batch, Mapping) or "features" not in batch:
            raise ValueError(
                f"A batch of a model's step is {a_type(batch)}, but must be"
                " {'features': ..., 'labels': ...}. Only functions of tj.estimator,"
                " such as train_and_evaluate, take pairs (features, labels)."
            )
        values = {**copy.deepcopy(dict(params_and_config)), "tower": tower}
        accepted = {
            name: default if values[name] is None else values[name]
            for name, default in self.accepts.items()
        }
        data = {"features": batch["features"], "labels": batch.get("labels")}
        try:
            spec = self.fn(variables, **data, mode=mode, **accepted)
        except (TypeError, AttributeError) as error:
            if "labels" not in batch:
                error.add_note(f"No labels were given, so labels is None in {mode!r}.")
            raise
        return check_spec(spec, mode)


def not_none(**arguments: Any) -> dict[str, Any]:
    """Leave out the arguments that are None."""
    return {name: value for name, value in arguments.items() if value is not None}


def static_keys(params_and_config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Make the cache keys of these values, which are compiled into programs."""
    try:
        return tuple(key_of(name, value) for name, value in params_and_config.items())
    except TypeError as error:
        raise ValueError(
            f"{error}. params and config must be plain values, because they are"
            " compiled in. Put arrays into variables, or pass float(x) for a scalar"
            " and vars(x) for an object."
        ) from error


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeveralRows:
    """An output with ``n`` rows per example, as ``Rows`` ``[b, n, ...]``."""

    rows: Any


def typed_rows(
    name: str, outputs: PyTree, rows: int, *, stacked_classes: bool
) -> PyTree:
    """Give one tower's outputs the types by which a pass merges them.

    Leaves become `Rows`, or `SeveralRows` if they have ``n`` rows per example. With
    ``stacked_classes`` the classes of a `ClassificationOutput` become `PerTower`. Raise
    for a leaf whose number of rows is no multiple of ``rows``.
    """
    refuse_other_than_rows(outputs, name)
    refuse_unheld(name, outputs)
    outputs = jax.tree.map(jnp.asarray, dict(outputs))
    if stacked_classes:

        def keep(x: ClassificationOutput) -> ClassificationOutput:
            return dataclasses.replace(x, classes=jax.tree.map(PerTower, x.classes))

        outputs = map_parts(ClassificationOutput, keep, outputs)
    bad = [
        f"{leaf} has shape {jnp.shape(x)}"
        for leaf, x in named_leaves(name, outputs, is_leaf=is_per_tower)
        if not is_per_tower(x) and (not x.shape or not len(x) or len(x) % rows)
    ]
    if bad:
        raise ValueError(
            f"The towers' outputs are joined, so each leaf must have {rows} rows (or a"
            f" multiple), but {listed(bad)}. Repeat a single number,"
            " jnp.full(tower.rows, x)."
        )

    def as_rows(x: Any) -> Any:
        if is_per_tower(x):
            return x
        shape = (rows, len(x) // rows, *x.shape[1:])
        return Rows(x) if len(x) == rows else SeveralRows(Rows(x.reshape(shape)))

    return jax.tree.map(as_rows, outputs, is_leaf=is_per_tower)


def joined_outputs(outputs: PyTree) -> PyTree:
    """Join the outputs of all towers to arrays ``[B, ...]``, without padding."""
    outputs = map_parts(SeveralRows, lambda x: concat_rows(x.rows), outputs)
    return map_parts(PerTower, lambda x: x.values, outputs)
