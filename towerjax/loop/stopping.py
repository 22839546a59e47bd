"""Which evaluation was the best, and when is it time to stop?"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.loop.progress import format_value
from towerjax.mesh.placement import Placement, on_every_process
from towerjax.step.state import TrainState
from towerjax.types.leaves import is_key
from towerjax.types.options import (
    check_choice,
    check_flag,
    check_number,
    check_text,
    check_whole,
)

Mode: TypeAlias = Literal["min", "max"]
Keep: TypeAlias = Literal["devices", "host"]


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stop once the evaluations have stopped getting better.

    An evaluation is an improvement when its value is less than the best before it
    minus ``min_delta`` (with ``"max"``: more than the best plus ``min_delta``). NaN
    never is, nor is the infinity on the wrong side. After ``patience`` evaluations
    in a row without one the run ends. A resumed run begins to count anew,
    unless a `Checkpointer` saved the count.

    Attributes:
      metric: The name of a scalar metric of the evaluation.
      patience: Evaluations in a row without an improvement, >= 1.
      mode: Is less better, or more?
      min_delta: By how much, >= 0.

    Example:
      >>> EarlyStopping("accuracy", patience=3, mode="max")
      EarlyStopping(metric='accuracy', patience=3, mode='max', min_delta=0.0)

    Source: L. Prechelt, "Early Stopping - But When?", in Neural Networks: Tricks of
    the Trade, 1998, https://doi.org/10.1007/3-540-49430-8_3 (criterion UP).
    """

    metric: str
    patience: int
    mode: Mode = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        _check_metric("EarlyStopping", self.metric, self.mode)
        check_whole("patience", self.patience, 1)
        what = "a finite number >= 0, in the unit of the metric"
        check_number("min_delta", self.min_delta, what)


@dataclasses.dataclass(frozen=True)
class Best:
    """Keep the state of the best evaluation.

    The state is copied when an evaluation is better than all before it, so that it
    outlives the donation of the state to the next step.

    Attributes:
      metric: The name of a scalar metric of the evaluation.
      mode: Is less better, or more? NaN never is better.
      keep: Where the copy lies. ``"devices"``: beside the state, which takes its
        memory once more; a copy moves no bytes off the device. ``"host"``: NumPy
        arrays (keys stay where they are); each new best is read from the devices.
      restore: Does `run` return the best state instead of the last one? Again as a
        copy, so that ``history.best.state`` stays usable.

    Example:
      >>> Best("loss", keep="host")
      Best(metric='loss', mode='min', keep='host', restore=False)
    """

    metric: str
    mode: Mode = "min"
    keep: Keep = "devices"
    restore: bool = False

    def __post_init__(self) -> None:
        _check_metric("Best", self.metric, self.mode)
        check_choice("Best.keep", self.keep, get_args(Keep))
        check_flag("Best.restore", self.restore)


def _check_metric(what: str, metric: Any, mode: Any) -> None:
    """Raise unless it names a metric and says whether less of it is better."""
    check_text(f"{what}.metric", metric, "the name of a metric, such as 'loss'")
    check_choice(f"{what}.mode", mode, get_args(Mode))


def sign_of(mode: Mode) -> int:
    """By what a metric is multiplied so that less of it is better."""
    return 1 if mode == "min" else -1


@dataclasses.dataclass(frozen=True, eq=False)
class BestEvaluation:
    """The best evaluation of a run; see `Best`.

    Attributes:
      step: The number of the step before it.
      value: Of the metric that was looked at.
      values: The whole evaluation, name -> float or array.
      state: A copy of the state that was evaluated, a ``TrainState`` on the devices
        or of NumPy arrays. None only in ``error.history``, when the copy failed:
        then ``error.state`` is that state.

    Example:
      >>> BestEvaluation(20, 0.5, {"loss": 0.5}, None).value
      0.5
    """

    step: int
    value: float
    values: dict[str, Any]
    state: TrainState | None = dataclasses.field(repr=False)


class Watch:
    """What the evaluations of a run come to."""

    def __init__(
        self,
        early_stopping: EarlyStopping | None,
        best: Best | None,
        placement: Placement,
    ) -> None:
        self.best: BestEvaluation | None = None
        self.stopped: str | None = None
        self._early_stopping, self._best = early_stopping, best
        self._placement = placement
        self._lowest: tuple[float, int | None] = (math.inf, None)
        self._without, self._counted = 0, -1  # after which step was the last counted?

    @property
    def memory(self) -> dict[str, Any]:
        """What early stopping has counted, as JSON can hold it; empty without it."""
        option, (lowest, number) = self._early_stopping, self._lowest
        if option is None:
            return {}
        lowest = lowest if math.isfinite(lowest) else None
        return {
            "metric": option.metric,
            "mode": option.mode,
            "lowest": lowest,
            "lowest_after": number,
            "without": self._without,
            "counted_after": self._counted,
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on counting where another process stopped."""
        option = self._early_stopping
        asked = option and (option.metric, option.mode)
        if not asked or asked != (memory.get("metric"), memory.get("mode")):
            return
        if memory["lowest"] is not None:
            self._lowest = memory["lowest"], memory["lowest_after"]
        self._without = memory["without"]
        self._counted = memory["counted_after"]
        self._stop_if_enough()

    def see(self, number: int, values: dict[str, Any], state: TrainState) -> None:
        """Look at an evaluation."""
        for option in (self._early_stopping, self._best):
            if option is not None:
                _value(option, values)  # all names before the first copy
        if self._early_stopping is not None:
            self._count(self._early_stopping, number, values)
        if self._best is not None:
            self._keep(self._best, number, values, state)

    def _count(
        self, option: EarlyStopping, number: int, values: Mapping[str, Any]
    ) -> None:
        if number == self._counted:  # a finished run that is started again
            return
        self._counted = number
        # As a cost, of which less is better; a comparison with NaN is never true.
        cost = sign_of(option.mode) * _value(option, values)
        if cost < self._lowest[0] - option.min_delta:
            self._lowest, self._without = (cost, number), 0
            return
        self._without += 1
        self._stop_if_enough()

    def _stop_if_enough(self) -> None:
        option, (lowest, lowest_number) = self._early_stopping, self._lowest
        if option is None or self._without < option.patience:
            return
        text = f"{option.metric} did not improve in {self._without}"
        text += " evaluation" if self._without == 1 else " evaluations in a row"
        if lowest_number is not None:
            shown = format_value(sign_of(option.mode) * lowest)
            text += f": best {shown} after step {lowest_number}"
        self.stopped = text

    def _keep(
        self, option: Best, number: int, values: dict[str, Any], state: TrainState
    ) -> None:
        value = _value(option, values)
        best = sign_of(option.mode) * self.best.value if self.best else math.inf
        if not sign_of(option.mode) * value < best:
            return
        # The old copy goes first: two of them and the state may not fit.
        self.best = BestEvaluation(number, value, values, None)
        copy = copied(state, option.keep, self._placement)
        self.best = dataclasses.replace(self.best, state=copy)

    def to_return(self, state: TrainState) -> TrainState:
        """The state that a run returns."""
        if self._best is None or not self._best.restore or self.best is None:
            return state
        return _restored(self.best.state, state)

    def describe(self, number: int, values: Mapping[str, Any]) -> str:
        """The last evaluation in a few words, and the best."""
        option = self._best or self._early_stopping
        name = "loss" if "loss" in values else min(values, default="")
        name = option.metric if option else name
        if name not in values:
            return ""
        text = f"evaluated {name} {format_value(values[name])} after {number}"
        best = (self.best.value, self.best.step) if self.best else None
        if self._best is None and self._early_stopping and self._lowest[1] is not None:
            sign = sign_of(self._early_stopping.mode)
            best = (sign * self._lowest[0], self._lowest[1])
        if best is not None:
            text += f", best {format_value(best[0])} after {best[1]}"
        return text


def _value(option: EarlyStopping | Best, values: Mapping[str, Any]) -> float:
    what = f"{type(option).__name__}(metric={option.metric!r})"
    if option.metric not in values:
        raise ValueError(
            f"{what}: the evaluation has no such metric, but {sorted(values)}. Name one"
            " of these, or return it from the evaluation."
        )
    value = values[option.metric]
    if np.ndim(value) != 0:
        raise ValueError(
            f"{what}: its value is an array{list(np.shape(value))}, of which none is"
            " the best. Name a scalar metric, such as its mean."
        )
    return float(value)


def copied(state: TrainState, keep: Keep, placement: Placement) -> TrainState:
    """A copy of a state, which outlives the donation of the state."""
    if keep == "devices":
        return jax.tree.map(jnp.copy, state)  # which keeps shardings

    def on_host(leaf: jax.Array) -> Any:
        if is_key(leaf):
            return leaf.copy()
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            leaf = on_every_process(leaf, placement)
        return np.array(leaf)

    return jax.tree.map(on_host, state)


def _restored(kept: Any, like: TrainState) -> TrainState:
    """A copy of a kept state where another one lies."""

    def restored(kept: Any, now: jax.Array) -> Any:
        if isinstance(kept, jax.Array):
            return jnp.copy(kept)
        # Copied: on the CPU an array may share the memory of what it is made from.
        return jax.make_array_from_callback(
            kept.shape, now.sharding, lambda at: kept[at].copy()
        )

    return jax.tree.map(restored, kept, like)
