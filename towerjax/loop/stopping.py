"""The position of a run, and the rules by which evaluations end it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from towerjax.loop.direction import Direction, sign_of
from towerjax.loop.progress import format_value
from towerjax.step.state.train_state import TrainState, step_number
from towerjax.types.boundary import api_boundaries
from towerjax.types.options import (
    check_number,
    check_text,
    check_whole,
    is_one_real,
    refuse_option,
)
from towerjax.types.refusals import a_type


@api_boundaries
@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """A rule that ends a run when its evaluations stop improving, or are good enough.

    With ``"min"`` an evaluation is an improvement if its value is less than the best
    value before it minus ``min_delta``. With ``"max"`` it must be more than the best
    plus ``min_delta``.
    NaN is never an improvement. Neither is infinity with ``"min"``, or minus infinity
    with ``"max"``. The run ends after ``patience`` evaluations in a row without an
    improvement, or with an evaluation that reaches ``goal``. A resumed run counts from
    0 again, unless a `Checkpointer` saved the count. With several rules,
    ``early_stopping=[first, second]``, any one of them ends the run.

    Attributes:
      metric: The name of a scalar metric of the evaluation.
      patience: The number of evaluations in a row without an improvement that ends the
        run, >= 1; None if only ``goal`` ends it.
      mode: ``"min"`` if less is better, ``"max"`` if more is. None takes it from the
        metric's name: less of a loss or error is better, more of an accuracy, AUC,
        precision, recall, IoU, F1, BLEU or PSNR. Any other name needs a mode.
      min_delta: The smallest change that counts as an improvement, >= 0.
      goal: A value of the metric that is good enough, or None.
      min_steps: Evaluations before this step number do not count, >= 0.

    Example:
      >>> early = EarlyStopping("loss", patience=3)
      >>> enough = EarlyStopping("accuracy", goal=0.99)
      >>> early.goal is None and enough.patience is None
      True

    Source: L. Prechelt, "Early Stopping - But When?", in Neural Networks: Tricks of
    the Trade, 1998, https://doi.org/10.1007/3-540-49430-8_3 (criterion UP).
    """

    metric: str
    patience: int | None = None
    mode: Direction | None = None
    min_delta: float = 0.0
    goal: float | None = None
    min_steps: int = 0

    def __post_init__(self) -> None:
        form = "the name of a metric, such as 'loss'"
        check_text("EarlyStopping.metric", self.metric, form)
        sign_of("EarlyStopping.mode", self.metric, self.mode)
        if self.goal is None and self.patience is None:
            raise ValueError(
                "EarlyStopping with patience=None and goal=None would never stop a run."
                " Give one of them, or both."
            )
        if self.patience is not None:
            check_whole("patience", self.patience, 1)
        goal = 0.0 if self.goal is None else self.goal
        if isinstance(goal, bool) or not (is_one_real(goal) and math.isfinite(goal)):
            refuse_option("goal", goal, "a finite number")
        form = "a finite number >= 0, in the unit of the metric"
        check_number("min_delta", self.min_delta, form)
        check_whole("min_steps", self.min_steps, 0)

    def reason(self, values: Mapping[int, float]) -> str | None:
        """Tell why a loop with these evaluations ends; None if it goes on.

        `run` asks its rules by itself; this is for a loop of your own.

        Args:
          values: The values of ``metric`` so far, by step number, in order.

        Returns:
          The reason, as text for people, or None.

        Example:
          >>> early = EarlyStopping("loss", patience=2)
          >>> early.reason({10: 0.5, 20: 0.6}) is None
          True
          >>> early.reason({10: 0.5, 20: 0.6, 30: 0.5})
          'loss did not improve in 2 evaluations in a row, best 0.5000 after 10'
        """
        return reason_to_stop(self, values)


def rules_of(early_stopping: Any) -> tuple[EarlyStopping, ...]:
    """List the rules of early stopping; any one of them ends a run."""
    listed_rules = () if early_stopping is None else early_stopping
    rules = (
        tuple(listed_rules)
        if isinstance(listed_rules, list | tuple)
        else (listed_rules,)
    )
    if not all(isinstance(rule, EarlyStopping) for rule in rules):
        form = "None, a tj.EarlyStopping(...), or a list of these"
        refuse_option("early_stopping", early_stopping, form)
    return rules


def reason_to_stop(rule: EarlyStopping, values: Mapping[int, float]) -> str | None:
    """Tell why a run with these evaluations ends; None if it goes on."""
    sign = sign_of("EarlyStopping.mode", rule.metric, rule.mode)
    goal = rule.goal

    def is_reached(cost: float) -> bool:
        return goal is not None and cost <= sign * goal

    lowest = math.inf
    after = None
    without = 0
    for number, value in values.items():
        if number >= rule.min_steps:
            cost = sign * value
            without = without + 1
            if is_reached(cost) or cost < lowest - rule.min_delta:
                lowest = cost
                after = number
                without = 0
    if is_reached(lowest):
        text = f"{rule.metric} reached {format_value(rule.goal)}"
    elif rule.patience is not None and without >= rule.patience:
        text = f"{rule.metric} did not improve in {without} evaluation"
        text += "s in a row" * (without > 1)
    else:
        return None
    if after is None:
        return text
    return f"{text}, best {format_value(sign * lowest)} after {after}"


class Watch:
    """The evaluations of a run, and whether the rules of early stopping end it.

    Attributes:
      values: The values of each metric by step number.
      stopped: The reason why the run must end, as text; None if it continues.
    """

    def __init__(self, rules: Sequence[EarlyStopping]) -> None:
        self._rules = rules
        self.stopped: str | None = None
        self.values: dict[str, dict[int, float]] = {rule.metric: {} for rule in rules}

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Add an evaluation; a second one after the same step replaces the first."""
        metrics = [x.metric for x in self._rules]
        option = "EarlyStopping.metric"
        self.go_on({x: {number: value_of(values, option, x)} for x in metrics})

    def go_on(self, evaluated: Mapping[str, Mapping[int, float]]) -> None:
        """Add earlier evaluations, such as those of a run that is resumed."""
        for metric, known in self.values.items():
            known |= evaluated.get(metric, {})
        reasons = (reason_to_stop(x, self.values[x.metric]) for x in self._rules)
        self.stopped = next(filter(None, reasons), None)


@dataclasses.dataclass
class Point:
    """The position of a run, and the state there.

    It changes only while signals are held back, so its parts always fit together.
    """

    state: TrainState
    watch: Watch = dataclasses.field(default_factory=lambda: Watch(()))
    # The number of the last dispatched step. The loop knows from it which step was
    # recorded last, and which had its hooks called. The number of the last saved step
    # is on the disk.
    number: int = dataclasses.field(init=False)
    # Whether to evaluate, and to save, before the next step.
    is_evaluation_due: bool = False
    is_saving_due: bool = False

    def __post_init__(self) -> None:
        """Start counting at the state's step number."""
        self.number = step_number(self.state)

    def advance(self, eval_every: int | None, every: int | None) -> None:
        """Count a dispatched step, and note whether to evaluate and save after it.

        ``every`` is that of the `Checkpointer`.
        """
        self.number += 1
        self.is_evaluation_due |= bool(eval_every) and self.number % eval_every == 0
        self.is_saving_due |= bool(every) and self.number % every == 0


def value_of(values: Mapping[str, Any], option: str, metric: str) -> float:
    """Read the metric of an evaluation that an option names, one real number."""
    name = f"{option}={metric!r}"
    if metric not in values:
        names = sorted(values)
        raise ValueError(
            f"{name} is not a metric of the evaluation, which has {names}. Name one of"
            " these."
        )
    value = values[metric]
    if not is_one_real(value):
        kind = f"{a_type(value)}{getattr(value, 'shape', '')}"
        raise ValueError(
            f"{name} must name a metric that is one real number, but its value is"
            f" {kind}."
        )
    return float(value)
