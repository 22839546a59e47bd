"""How do trainings share one program? What differs is in their state, as arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from towerjax.mesh.placement import place
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.given_state import check_is_state
from towerjax.step.program import Runner
from towerjax.step.state import KEPT_LAYOUT, TrainState, donated_layout
from towerjax.step.step import Step
from towerjax.towers.executors import over_members
from towerjax.types import Layout, PyTree

Numbers: TypeAlias = Mapping[str, Any]
Build: TypeAlias = Callable[[Numbers], tuple[Step, TrainState]]
"""``numbers -> (step, state)``, traced: the numbers are arrays ``()``."""


class MembersStep(CompiledStep):
    """A step that is built inside its own program, of numbers that its state holds.

    One program serves all members that differ in these numbers alone. Either it trains
    one of them (numbers ``()``), or all together by ``vmap`` (numbers ``[M]``); then
    parameters, optimizer state, tower-local variables, keys and metrics have a dim of
    members first. ``state.extra`` is ``(numbers, the member's own extra)``.

    A refused step leaves its member as it was, and the others go on: none raises.
    """

    def __init__(self, build: Build, numbers: Numbers) -> None:
        self._build, self._numbers = build, numbers
        self._together = any(x.ndim for x in numbers.values())
        built: list[Step] = []

        def begin(numbers: Numbers) -> TrainState:
            step, state = build(numbers)
            check_is_state(state)
            built.append(step)
            return dataclasses.replace(state, extra=(numbers, state.extra))

        self._begin = jax.jit(over_members(begin) if self._together else begin)
        shapes = jax.eval_shape(self._begin, numbers)
        strategy, options = built[-1].strategy, built[-1].options
        self._layout = donated_layout(strategy)
        if self._together:
            self._layout["local"] = self._layout["own"] = Layout.PER_TOWER_STEPS
        if options.check is not None:
            raise ValueError(
                f"check={options.check} looks at one training, and this program trains"
                " several. Build the step without."
            )
        goes_on = "skip" if options.on_nonfinite == "raise" else options.on_nonfinite
        super().__init__(
            self._fn,
            strategy,
            dataclasses.replace(options, on_nonfinite=goes_on, donate=True),
            layout=self._layout,
            counts_examples=shapes.seen is not None,
        )

    def begin(self, numbers: Numbers) -> TrainState:
        """The state before the first step, of other numbers of the same kind."""
        state = self._begin(numbers)
        state = dataclasses.replace(state, step=state.step.ravel()[0])
        layouts: Any = {**self._layout, **KEPT_LAYOUT}
        return place(state, self.strategy.placement, TrainState(**layouts))

    def of_member(self, values: Any, index: int) -> Any:
        """One member's of what several steps returned, ``[n, ...]``."""
        return values[:, index] if self._together else values

    def member(self, state: TrainState, index: int) -> TrainState:
        """One member's state as its own step has it."""
        if self._together:
            parts = dataclasses.replace(state, step=None)  # that is the same of all
            parts = jax.tree.map(lambda x: x[index], parts)
            state = dataclasses.replace(parts, step=state.step)
        return self.place(dataclasses.replace(state, extra=state.extra[1]))

    def _fn(self, run: Any, donated: Any, kept: Any, *batch: PyTree) -> tuple[Any, ...]:
        def one(donated: Any, rng: Any) -> tuple[Any, ...]:
            numbers, extra = donated["extra"]
            engine = self._build(numbers)[0].engine
            now = {**kept, "rng": rng}
            donated, now, metrics, whole, *_ = engine.step(
                run, {**donated, "extra": extra}, now, *batch
            )
            del now["step"]
            metrics = {**metrics["one"], **metrics["own"]}
            whole = jnp.isfinite(metrics["loss"]) if whole is None else whole
            donated = {**donated, "extra": (numbers, donated["extra"])}
            return donated, now, metrics, whole

        one = over_members(one) if self._together else one
        donated, now, metrics, whole = one(donated, kept["rng"])
        now["step"] = kept["step"] + 1
        return donated, now, {"one": metrics, "own": {}}, whole.all()

    def _ready(self, state: Any, runner: Runner) -> TrainState:
        """As `begin` or a step made it, so there is nothing to check."""
        return state
