"""A model's options, and the arguments with which its function is called."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from towerjax.collectives.base import KeepsState
from towerjax.estimator.losses import LossReduction, check_loss_reduction
from towerjax.estimator.spec import Mode, ModelSpec, check_spec
from towerjax.estimator.variables import VariablePlacement
from towerjax.step.compiled_step import StepOptions
from towerjax.towers.cross_tower.call import key_of
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


_OPTIONAL = ("params", "config", "tower")


@dataclasses.dataclass(frozen=True)
class ModelFn:
    """A model function, and which of params, config and tower its signature has."""

    fn: Callable[..., Any]
    # Name -> whether it has a default, also by functools.partial, used for None.
    accepts: Mapping[str, bool]

    @classmethod
    def of(cls, fn: Any) -> "ModelFn":
        """Wrap ``fn``; raise unless its signature is that of a model function."""
        form = "model_fn(variables, features, labels, mode)"
        check_function("model_fn", fn, form, takes=False)
        signature = inspect.signature(fn)
        parameters = signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names = _OPTIONAL if takes_any else [x for x in _OPTIONAL if x in parameters]
        given = dict.fromkeys(("features", "labels", "mode", *names))
        try:
            signature.bind(None, **given)
        except TypeError as error:
            raise ValueError(
                f"model_fn{signature}: {error}. Write def model_fn(variables, features,"
                " labels, mode, params=None, config=None, tower=None), the last three"
                " as you like."
            ) from error
        defaults = {name: p.default for name, p in parameters.items()}
        empty = inspect.Parameter.empty
        return cls(fn, {x: defaults.get(x, empty) is not empty for x in names})

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
                " {'features': ..., 'labels': ...}; only the functions of tj.estimator,"
                " such as train_and_evaluate, take pairs (features, labels)."
            )
        values = {**copy.deepcopy(dict(given)), "tower": tower}
        accepted = {
            name: values[name]
            for name, has_default in self.accepts.items()
            if values[name] is not None or not has_default
        }
        data = {"features": batch["features"], "labels": batch.get("labels")}
        try:
            with in_tower_fn():
                spec = self.fn(variables, **data, mode=mode, **accepted)
        except (TypeError, AttributeError) as error:
            if "labels" not in batch:
                error.add_note(f"No labels were given: labels is None in {mode!r}.")
            raise
        return check_spec(spec, mode)


def not_none(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def static_keys(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Keys of the values, by which programs are cached: values are compiled in."""
    try:
        return tuple(key_of(name, value) for name, value in given.items())
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{error}. {_PLAIN_VALUES}") from error


_PLAIN_VALUES = (
    "params and config are plain values, which are compiled in: put arrays into"
    " variables, or write float(...)."
)
