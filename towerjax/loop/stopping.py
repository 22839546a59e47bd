"""Stop a run whose evaluations are good enough or stall, and keep its best state."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from towerjax.loop.progress import format_value
from towerjax.mesh.transfer import copy_to_host
from towerjax.step.state import TrainState
from towerjax.types.leaves import a_type
from towerjax.types.options import (
    check_choice,
    check_flag,
    check_number,
    check_text,
    check_whole,
    is_one_real,
    refuse_option,
)

Direction: TypeAlias = Literal["min", "max"]
Keep: TypeAlias = Literal["devices", "host"]


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stop a run once its evaluations no longer improve, or are good enough.

    An evaluation is an improvement when its value is less than the best before it
    minus ``min_delta`` (with ``"max"``: more than the best plus ``min_delta``). NaN
    never is, nor is the infinity on the wrong side. After ``patience`` evaluations
    in a row without an improvement the run ends. It also ends with an evaluation that
    reaches ``goal``. A resumed run counts from 0 again, unless a `Checkpointer` saved
    the count. Of a list of these, ``early_stopping=[first, second]``, any ends the run.

    Attributes:
      metric: The name of a scalar metric of the evaluation.
      patience: Evaluations in a row without an improvement, >= 1; None if only
        ``goal`` ends the run.
      mode: ``"min"`` if less is better, ``"max"`` if more is.
      min_delta: The least change that is an improvement, >= 0.
      goal: A value of the metric that is good enough, or None.
      min_steps: Evaluations before this step number do not count, >= 0.

    Example:
      >>> early = EarlyStopping("accuracy", goal=0.99, mode="max")
      >>> early.patience is None and early.min_steps == 0
      True

    Source: L. Prechelt, "Early Stopping - But When?", in Neural Networks: Tricks of
    the Trade, 1998, https://doi.org/10.1007/3-540-49430-8_3 (criterion UP).
    """

    metric: str
    patience: int | None = None
    mode: Direction = "min"
    min_delta: float = 0.0
    goal: float | None = None
    min_steps: int = 0

    def __post_init__(self) -> None:
        _check_metric("EarlyStopping", self.metric, self.mode)
        if self.goal is None and self.patience is None:
            raise ValueError(
                "EarlyStopping: patience=None and goal=None would never stop anything."
                " Give one of them, or both."
            )
        if self.patience is not None:
            check_whole("patience", self.patience, 1)
        goal = 0.0 if self.goal is None else self.goal
        if isinstance(goal, bool) or not (is_one_real(goal) and math.isfinite(goal)):
            refuse_option("goal", goal, "a finite number")
        what = "a finite number >= 0, in the unit of the metric"
        check_number("min_delta", self.min_delta, what)
        check_whole("min_steps", self.min_steps, 0)

    def is_reached(self, cost: float) -> bool:
        """Whether a cost, of which less is better, is as good as ``goal``."""
        return self.goal is not None and cost <= sign_of(self.mode) * self.goal


@dataclasses.dataclass(frozen=True)
class Best:
    """Keep the state of the best evaluation.

    The state is copied when an evaluation is better than all before it, so that it
    outlives the donation of the state to the next step.

    Attributes:
      metric: The name of a scalar metric of the evaluation.
      mode: ``"min"`` if less is better, ``"max"`` if more is. NaN never is better.
      keep: Where the copy is. ``"devices"``: on the state's devices, which takes its
        memory once more; a copy moves no bytes off the device. ``"host"``: NumPy
        arrays (keys stay on the devices); each new best is read from the devices.
      restore: Whether `run` returns a copy of the best state instead of the last
        state; ``history.best.state`` stays usable.

    Example:
      >>> Best("loss", keep="host")
      Best(metric='loss', mode='min', keep='host', restore=False)
    """

    metric: str
    mode: Direction = "min"
    keep: Keep = "devices"
    restore: bool = False

    def __post_init__(self) -> None:
        _check_metric("Best", self.metric, self.mode)
        check_choice("Best.keep", self.keep, get_args(Keep))
        check_flag("Best.restore", self.restore)


def _check_metric(what: str, metric: Any, mode: Any) -> None:
    """Raise unless ``metric`` is a name and ``mode`` says whether less is better."""
    check_text(f"{what}.metric", metric, "the name of a metric, such as 'loss'")
    check_choice(f"{what}.mode", mode, get_args(Direction))


def sign_of(mode: Direction) -> int:
    """The factor by which a metric is multiplied so that less is better."""
    return 1 if mode == "min" else -1


@dataclasses.dataclass(frozen=True, eq=False)
class BestEvaluation:
    """The best evaluation of a run; see `Best`.

    Attributes:
      step: The number of the last step before it.
      value: The value of the metric of `Best`.
      values: The whole evaluation, name -> float or array.
      state: A copy of the evaluated state, a ``TrainState`` on the devices or of
        NumPy arrays. None only in ``error.history``, when the copy failed: then
        ``error.state`` is that state.
    """

    step: int
    value: float
    values: dict[str, Any]
    state: TrainState | None = dataclasses.field(repr=False)


def rules_of(early_stopping: Any) -> tuple[EarlyStopping, ...]:
    """The rules of early stopping, of which any one ends a run."""
    given = () if early_stopping is None else early_stopping
    rules = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(rule, EarlyStopping) for rule in rules):
        what = "None or a tj.EarlyStopping(...), or a list of such"
        refuse_option("early_stopping", early_stopping, what)
    return rules


@dataclasses.dataclass(frozen=True)
class Count:
    """What a rule of early stopping has counted of the evaluations of a run."""

    metric: str  # this and the mode as the rule has them
    mode: Direction
    lowest: float = math.inf  # the lowest cost so far
    lowest_after: int | None = None  # the step before that
    without: int = 0  # how many evaluations came since
    counted_after: int = -1  # the step before the last evaluation

    def after(self, rule: EarlyStopping, number: int, cost: float) -> "Count":
        """The count with another evaluation, which counts once."""
        if number == self.counted_after:
            return self
        changes: dict[str, Any] = {"counted_after": number}
        if number >= rule.min_steps:
            if rule.is_reached(cost) or cost < self.lowest - rule.min_delta:
                changes |= {"lowest": cost, "lowest_after": number, "without": 0}
            else:
                changes["without"] = self.without + 1
        return dataclasses.replace(self, **changes)

    def reason(self, rule: EarlyStopping) -> str | None:
        """Why the run is to end, in words; None if it is not."""
        if rule.is_reached(self.lowest):
            text = f"{rule.metric} reached {format_value(rule.goal)}"
        elif rule.patience is not None and self.without >= rule.patience:
            text = f"{rule.metric} did not improve in {self.without} evaluation"
            text += "s in a row" * (self.without > 1)
        else:
            return None
        return text + self.lowest_in_words()

    def lowest_in_words(self) -> str:
        """The best evaluation of those counted, to be added to a sentence."""
        if self.lowest_after is None:
            return ""
        best = format_value(sign_of(self.mode) * self.lowest)
        return f", best {best} after {self.lowest_after}"


class Watch:
    """Counts the evaluations of a run for early stopping, and keeps the best."""

    def __init__(self, rules: Sequence[EarlyStopping], best: Best | None) -> None:
        self.best: BestEvaluation | None = None
        self.counts = tuple(Count(rule.metric, rule.mode) for rule in rules)
        self._rules, self._best = rules, best
        self._lowest = math.inf  # the cost of the best

    @property
    def stopped(self) -> str | None:
        """Why the run is to end, in words; None if it is not."""
        reasons = map(Count.reason, self.counts, self._rules)
        return next(filter(None, reasons), None)

    def restore_counts(self, saved: Sequence[Count]) -> None:
        """Go on from the counts of a saved run that are of the same metrics."""
        pairs = zip(self.counts, saved, strict=False)
        known = [y if (x.metric, x.mode) == (y.metric, y.mode) else x for x, y in pairs]
        self.counts = (*known, *self.counts[len(saved) :])

    def add(self, number: int, values: dict[str, Any], state: TrainState) -> None:
        """Count an evaluation, and keep its state if it is the best."""
        best = self._best
        # All metrics are read before anything is counted or copied.
        costs = [cost_of(values, rule) for rule in self._rules]
        to_keep = math.nan if best is None else cost_of(values, best)
        counted = zip(self.counts, self._rules, costs, strict=True)
        self.counts = tuple(x.after(rule, number, cost) for x, rule, cost in counted)
        if best is not None and to_keep < self._lowest:
            self._lowest, value = to_keep, float(values[best.metric])
            # The old copy is freed first: two copies and the state may not fit.
            self.best = BestEvaluation(number, value, values, None)
            copy = copy_state(state, best.keep)
            self.best = dataclasses.replace(self.best, state=copy)

    def final_state(self, state: TrainState) -> TrainState:
        """The state that `run` returns."""
        if self._best is None or not self._best.restore or self.best is None:
            return state
        return _restore_copy(self.best.state, state)

    def describe(self, number: int, values: Mapping[str, Any]) -> str:
        """The last evaluation in a few words, and the best."""
        option = self._best or next(iter(self._rules), None)
        name = "loss" if "loss" in values else min(values, default="")
        name = option.metric if option else name
        if name not in values:
            return ""
        text = f"evaluated {name} {format_value(values[name])} after {number}"
        if (best := self.best) is not None:
            return f"{text}, best {format_value(best.value)} after {best.step}"
        counts = [] if self._best else self.counts[:1]
        return text + "".join(count.lowest_in_words() for count in counts)


def cost_of(values: Mapping[str, Any], option: Any, name: str = "metric") -> float:
    """The metric of an evaluation, negated where more is better: less cost is better.

    NaN is not better than anything, since no comparison with it is true.
    """
    metric = getattr(option, name)
    what = f"{type(option).__name__}.{name}={metric!r}"
    if metric not in values:
        names = sorted(values)
        raise ValueError(f"{what}: the evaluation has no such metric, but {names}.")
    value = values[metric]
    if not is_one_real(value):
        kind = f"{a_type(value)}{getattr(value, 'shape', '')}"
        raise ValueError(f"{what}: its value is {kind}, not one real number.")
    return sign_of(option.mode) * float(value)


def copy_state(state: TrainState, keep: Keep) -> TrainState:
    """A copy of a state, which outlives the donation of the state."""
    # jnp.copy keeps shardings.
    return jax.tree.map(jnp.copy if keep == "devices" else copy_to_host, state)


def _restore_copy(kept: Any, like: TrainState) -> TrainState:
    """A copy of a kept state with the shardings of another state."""

    def restore(kept: Any, now: jax.Array) -> Any:
        if isinstance(kept, jax.Array):
            return jnp.copy(kept)
        # Copied: on the CPU a JAX array may share memory with the NumPy array.
        return jax.make_array_from_callback(
            kept.shape, now.sharding, lambda at: kept[at].copy()
        )

    return jax.tree.map(restore, kept, like)
