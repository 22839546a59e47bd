"""Where a run is, and whether its evaluations are good enough or stall."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from towerjax.loop.progress import format_value
from towerjax.step.state.train_state import TrainState, step_number
from towerjax.types.leaves import a_type
from towerjax.types.options import (
    check_choice,
    check_number,
    check_text,
    check_whole,
    is_one_real,
    refuse_option,
)

Direction: TypeAlias = Literal["min", "max"]


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
        what = "the name of a metric, such as 'loss'"
        check_text("EarlyStopping.metric", self.metric, what)
        check_choice("EarlyStopping.mode", self.mode, get_args(Direction))
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


def sign_of(mode: Direction) -> int:
    """The factor by which a metric is multiplied so that less is better."""
    return 1 if mode == "min" else -1


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
        if self.lowest_after is not None:
            best = format_value(sign_of(self.mode) * self.lowest)
            text += f", best {best} after {self.lowest_after}"
        return text


class Watch:
    """Counts the evaluations of a run for early stopping."""

    def __init__(self, rules: Sequence[EarlyStopping]) -> None:
        self.counts = tuple(Count(rule.metric, rule.mode) for rule in rules)
        self._rules = rules

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

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Count an evaluation."""
        # All metrics are read before anything is counted.
        what = "EarlyStopping.metric"
        costs = [cost_of(values, what, x.metric, x.mode) for x in self._rules]
        counted = zip(self.counts, self._rules, costs, strict=True)
        self.counts = tuple(x.after(rule, number, cost) for x, rule, cost in counted)


def reaches_multiple(every: int | None, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` is > ``before`` and <= ``after``."""
    return every is not None and after // every > before // every


@dataclasses.dataclass
class Point:
    """Where a run is: it changes while signals are held back, all at once."""

    state: TrainState
    watch: Watch = dataclasses.field(default_factory=lambda: Watch(()))
    # Of the last dispatched step: the run's one count, of which it derives the last
    # recorded and the last hooked one. What is saved is a number of the disk.
    number: int = dataclasses.field(init=False)
    # What is to be done before the next step.
    is_evaluation_due: bool = False
    is_saving_due: bool = False

    def __post_init__(self) -> None:
        """Count from the state's number on."""
        self.number = step_number(self.state)

    def advance(self, eval_every: int | None, every: int | None) -> None:
        """Count a dispatched step; ``every``: of a `Checkpointer`."""
        before, self.number = self.number, self.number + 1
        self.is_evaluation_due |= reaches_multiple(eval_every, before, self.number)
        self.is_saving_due |= reaches_multiple(every, before, self.number)


def cost_of(
    values: Mapping[str, Any], option: str, metric: str, mode: Direction
) -> float:
    """The metric of an evaluation, negated where more is better: less cost is better.

    NaN is not better than anything, since no comparison with it is true.
    """
    what = f"{option}={metric!r}"
    if metric not in values:
        names = sorted(values)
        raise ValueError(f"{what}: the evaluation has no such metric, but {names}.")
    value = values[metric]
    if not is_one_real(value):
        kind = f"{a_type(value)}{getattr(value, 'shape', '')}"
        raise ValueError(f"{what}: its value is {kind}, not one real number.")
    return sign_of(mode) * float(value)
