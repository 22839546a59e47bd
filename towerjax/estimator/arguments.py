"""A model's options, and the arguments with which its function is called."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from towerjax.collectives.base import KeepsState
from towerjax.estimator.losses import LossReduction, check_loss_reduction
from towerjax.estimator.spec import Mode, ModelSpec
from towerjax.estimator.variables import VariablePlacement
from towerjax.step.compiled_step import StepOptions
from towerjax.towers.cross_tower.constant import key_of
from towerjax.towers.executors import in_tower_fn
from towerjax.towers.strategies import Strategy
from towerjax.towers.tower import Tower
from towerjax.types import PyTree
from towerjax.types.options import check_choice, check_function

Compat = Literal["tf1"]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """How a model function is replicated; see `replicate_model_fn`."""

    loss_reduction: LossReduction
    variable_placement: VariablePlacement
    compat: Compat | None
    step: StepOptions  # of a call

    def __post_init__(self) -> None:
        check_loss_reduction(self.loss_reduction)
        placements = tuple(VariablePlacement)
        check_choice("variable_placement", self.variable_placement, placements)
        check_choice("compat", self.compat, (None, *get_args(Compat)))

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise where the strategy's state layout or ops do not fit these options."""
        if isinstance(strategy.cross_tower_ops, KeepsState):
            raise ValueError(
                f"cross_tower_ops={strategy.cross_tower_ops!r} keeps a state, for which"
                " a model function has no place. Use tj.build_step, or tj.AllReduce()."
            )
        placed = self.variable_placement
        if strategy.state != "mirrored" and placed is not VariablePlacement.MIRRORED:
            raise ValueError(
                f"state={strategy.state!r} and variable_placement={placed!r} both say"
                " where variables wait. Leave one of them out."
            )


_BY_NAME = ("features", "labels", "mode")
_OPTIONAL = ("params", "config", "tower")


@dataclasses.dataclass(frozen=True)
class ModelFn:
    """A model function, and which of params, config and tower its signature has."""

    fn: Callable[..., Any]
    accepts: frozenset[str]  # of params, config and tower
    # Those with a default, or a value of functools.partial, used where None is given.
    has_default: frozenset[str] = frozenset()

    @classmethod
    def of(cls, fn: Any) -> "ModelFn":
        """Wrap ``fn``; raise unless its signature is that of a model function."""
        form = "model_fn(variables, features, labels, mode)"
        check_function("model_fn", fn, form, takes=False)
        parameters = dict(inspect.signature(fn).parameters)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return cls(fn, frozenset(_OPTIONAL))
        first, *named = list(parameters) or [""]
        missing = [name for name in _BY_NAME if name not in (first, *named)]
        if first in _BY_NAME:  # as TensorFlow's model functions are written
            missing = ["variables first", *missing]
        unknown = [
            name
            for name in named
            if name not in _BY_NAME + _OPTIONAL
            and parameters[name].default is inspect.Parameter.empty
        ]
        if missing or unknown:
            wrong = [f"does not take {', '.join(missing)}"] if missing else []
            wrong += [f"needs {', '.join(unknown)}"] if unknown else []
            raise ValueError(
                f"model_fn{inspect.signature(fn)} {' and '.join(wrong)}. A model"
                " function is def model_fn(variables, features, labels, mode,"
                " params=None, config=None, tower=None), the last three as you like."
            )
        accepts = frozenset(_OPTIONAL) & set(named)
        empty = inspect.Parameter.empty
        has_default = {x for x in accepts if parameters[x].default is not empty}
        return cls(fn, accepts, frozenset(has_default) - {"tower"})

    def refuse_unaccepted(self, given: Mapping[str, Any]) -> None:
        """Raise where an argument is given that the signature does not have."""
        for name, value in given.items():
            if value is not None and name not in self.accepts:
                raise ValueError(
                    f"{name} was given, but model_fn has no parameter {name!r}. Add"
                    f" {name}=None to its signature, or leave {name} out."
                )

    def call(
        self,
        variables: PyTree,
        batch: Mapping[str, PyTree],
        mode: Mode,
        tower: Tower,
        given: Mapping[str, Any],
    ) -> ModelSpec:
        """Call the function for one tower; raise unless it returns a fitting spec."""
        if not isinstance(batch, Mapping) or "features" not in batch:
            raise ValueError(
                f"A batch of a model's step is a {type(batch).__name__}; write"
                " {'features': ..., 'labels': ...}, or pass pairs (features, labels) to"
                " tj.estimator.train_and_evaluate, evaluate or predict."
            )
        values = {**copy_arguments(given), "tower": tower}
        accepted = {
            name: values[name]
            for name in self.accepts
            if values[name] is not None or name not in self.has_default
        }
        data = {"features": batch["features"], "labels": batch.get("labels")}
        try:
            with in_tower_fn():
                spec = self.fn(variables, **data, mode=mode, **accepted)
        except (TypeError, AttributeError) as error:
            if "labels" not in batch:
                error.add_note(f"No labels were given: labels is None in {mode!r}.")
            raise
        if not isinstance(spec, ModelSpec):
            raise ValueError(
                f"model_fn returned a {type(spec).__name__} in {mode!r}; return"
                " tj.estimator.ModelSpec(mode, ...) in each mode. Modes are"
                " tj.estimator.Mode.TRAIN, EVAL and PREDICT, and equal to no string."
            )
        if spec.mode is not mode:
            raise ValueError(
                f"model_fn was called in {mode!r} and returned a ModelSpec of"
                f" {spec.mode!r}. Return tj.estimator.ModelSpec(mode, ...)."
            )
        return spec


def not_none(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def static_keys(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Keys of the values, by which programs are cached: values are compiled in."""
    try:
        return tuple(key_of(name, value) for name, value in given.items())
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{error}. {_PLAIN_VALUES}") from error


def copy_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of the arguments, so that no call sees another call's changes."""
    try:
        return copy.deepcopy(dict(given))
    except TypeError as error:
        raise ValueError(
            f"A copy is made of {', '.join(given)}: {error}. {_PLAIN_VALUES}"
        ) from error


_PLAIN_VALUES = (
    "params and config are plain values, fixed when the step is compiled: numbers,"
    " strings, mappings, sequences or dataclasses; put arrays into variables, or write"
    " float(...)."
)
