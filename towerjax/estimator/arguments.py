"""What is a model function asked with, and which options has a model?"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from towerjax.collectives.base import KeepsState
from towerjax.data.shard import Remainder, check_remainder
from towerjax.estimator.losses import LossReduction, check_loss_reduction
from towerjax.estimator.spec import Mode, ModelSpec
from towerjax.estimator.variables import VariablePlacement
from towerjax.towers.cross_tower.constant import key_of
from towerjax.towers.executors import tower_explained
from towerjax.towers.tower import Tower
from towerjax.types import PyTree
from towerjax.types.options import check_choice, check_flag, check_function, check_whole

Compat = Literal["tf1"]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """How a model function is replicated; see `replicate_model_fn`."""

    loss_reduction: LossReduction
    variable_placement: VariablePlacement
    remainder: Remainder
    compat: Compat | None
    donate: bool
    max_programs: int | None

    def __post_init__(self) -> None:
        check_loss_reduction(self.loss_reduction)
        check_remainder(self.remainder)
        placements = tuple(VariablePlacement)
        check_choice("variable_placement", self.variable_placement, placements)
        check_choice("compat", self.compat, (None, *get_args(Compat)))
        check_flag("donate", self.donate)
        check_whole("max_programs", self.max_programs, or_none=True)

    def check_state(self, strategy: Any) -> None:
        """Raise where a strategy and these options say two things of the variables."""
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
_WHERE_ASKED = ("params", "config", "tower")


@dataclasses.dataclass(frozen=True)
class ModelFn:
    """A model function, of any first name, and what it asks for."""

    fn: Callable[..., Any]
    asks_for: frozenset[str]  # of params, config and tower
    # Those of them with a value where none is given: a default, or functools.partial's.
    has_own: frozenset[str] = frozenset()

    @classmethod
    def of(cls, fn: Any) -> "ModelFn":
        """A function whose signature is that of a model function."""
        check_function("model_fn", fn, "model_fn(variables, features, labels, mode)")
        parameters = dict(inspect.signature(fn).parameters)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return cls(fn, frozenset(_WHERE_ASKED))
        first, *named = list(parameters) or [""]
        missing = [name for name in _BY_NAME if name not in (first, *named)]
        if first in _BY_NAME:  # as TensorFlow's model functions are written
            missing = ["variables first", *missing]
        unknown = [
            name
            for name in named
            if name not in _BY_NAME + _WHERE_ASKED
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
        asks_for = frozenset(_WHERE_ASKED) & set(named)
        empty = inspect.Parameter.empty
        has_own = {name for name in asks_for if parameters[name].default is not empty}
        return cls(fn, asks_for, frozenset(has_own) - {"tower"})

    @property
    def name(self) -> str:
        """What the function is called."""
        return getattr(self.fn, "__name__", repr(self.fn))

    def refuse_unasked(self, given: Mapping[str, Any]) -> None:
        """Raise where an argument is given that the function would never see."""
        for name, value in given.items():
            if value is not None and name not in self.asks_for:
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
        """What it returns for one tower."""
        values = {**copied(given), "tower": tower}
        asked = {
            name: values[name]
            for name in self.asks_for
            if values[name] is not None or name not in self.has_own
        }
        data = {"features": batch["features"], "labels": batch.get("labels")}
        try:
            with tower_explained():
                spec = self.fn(variables, **data, mode=mode, **asked)
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


def where_given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None, to hand on."""
    return {name: value for name, value in arguments.items() if value is not None}


def static_keys(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Keys that change when the values do: another program is compiled for them."""
    try:
        return tuple(key_of(name, value) for name, value in given.items())
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{error}. {_PLAIN}") from error


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the arguments, so that what one call changes no other one sees."""
    try:
        return copy.deepcopy(dict(given))
    except TypeError as error:
        raise ValueError(
            f"A copy is made of {', '.join(given)}: {error}. {_PLAIN}"
        ) from error


_PLAIN = (
    "params and config are plain values, fixed when the step is compiled: numbers,"
    " strings, mappings, sequences or dataclasses; put arrays into variables, or write"
    " float(...)."
)
