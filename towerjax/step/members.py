"""One program for several trainings, whose hyperparameters are arrays of the state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from towerjax.mesh.transfer import place
from towerjax.step.comparison import AuditReport
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.engine import Outcome
from towerjax.step.state import TrainState, state_layout
from towerjax.step.state_checks import check_is_state
from towerjax.step.step import Step
from towerjax.towers.executors import vmap_members
from towerjax.types import Layout, PyTree

Numbers: TypeAlias = Mapping[str, Any]
BuildMember: TypeAlias = Callable[[Numbers], tuple[Step, TrainState]]
"""``numbers -> (step, state)``, traced: the numbers are arrays ``()``."""


class MembersStep(CompiledStep):
    """A step that is built inside its own program, from numbers that its state holds.

    One program serves all members that differ in these numbers alone. Either it trains
    one of them (numbers ``()``), or all together by ``vmap`` (numbers ``[M]``); then
    dim 0 of parameters, optimizer state, tower-local variables, keys and metrics runs
    over members. ``state.extra`` is ``(numbers, the member's own extra)``.

    A refused step leaves its member unchanged, trains the others, and does not raise.
    """

    def __init__(self, build: BuildMember, numbers: Numbers) -> None:
        self._build = build
        self._together = any(x.ndim for x in numbers.values())
        built: list[Step] = []

        def begin(numbers: Numbers) -> TrainState:
            made = build(numbers)
            if not isinstance(made, tuple) or len(made) != 2:
                found = type(made).__name__
                raise ValueError(f"build returned a {found}: write return step, state.")
            step, state = made
            check_is_state(state)
            built.append(step)
            return dataclasses.replace(state, extra=(numbers, state.extra))

        self._begin = jax.jit(vmap_members(begin) if self._together else begin)
        jax.eval_shape(self._begin, numbers)
        strategy, options = built[-1].strategy, built[-1].options
        if self._together and strategy.placement.specs is not None:
            raise ValueError(
                "Members that train together are stacked, and specs=... are of one."
                " Say tj.sweep(..., order='in_turn'), or leave specs out."
            )
        self._layout = state_layout(strategy)
        if self._together:
            own: Any = Layout.PER_TOWER_STEPS
            self._layout = dataclasses.replace(self._layout, local=own)
        changes: Any = {"donate": True}
        if options.on_nonfinite == "raise":
            changes["on_nonfinite"] = "skip"
        options = dataclasses.replace(options, **changes)
        super().__init__(self._fn, strategy, options, layout=self._layout)

    def begin(self, numbers: Numbers) -> TrainState:
        """The state before the first step, for numbers of the same names and shapes."""
        state = self._begin(numbers)
        state = dataclasses.replace(state, step=state.step.ravel()[0])
        return place(state, self.strategy.placement, self._layout, state.params)

    def of_member(self, values: Any, index: int) -> Any:
        """One member's part of results that are stacked over steps, ``[n, ...]``."""
        return values[:, index] if self._together else values

    def member(self, state: TrainState, index: int) -> TrainState:
        """One member's state, as a step built for it alone would have it."""
        if self._together:
            parts = dataclasses.replace(state, step=None)  # the same for all members
            parts = jax.tree.map(lambda x: x[index], parts)
            state = dataclasses.replace(parts, step=state.step)
        return self.place(dataclasses.replace(state, extra=state.extra[1]))

    def _fn(self, run: Any, donated: Any, kept: Any, *batch: PyTree) -> Outcome:
        def one(donated: Any, rng: Any) -> tuple[Any, ...]:
            numbers, extra = donated["extra"]
            engine = self._build(numbers)[0].engine
            now = {**kept, "rng": rng}
            out = engine.step(run, {**donated, "extra": extra}, now, *batch)
            now = {name: x for name, x in out.now.items() if name != "step"}
            metrics, finite = {**out.metrics["one"], **out.metrics["own"]}, out.finite
            finite = jnp.isfinite(metrics["loss"]) if finite is None else finite
            donated = {**out.donated, "extra": (numbers, out.donated["extra"])}
            return donated, now, metrics, finite

        one = vmap_members(one) if self._together else one
        donated, now, metrics, finite = one(donated, kept["rng"])
        now["step"] = kept["step"] + 1
        return Outcome(donated, now, {"one": metrics, "own": {}}, finite.all())

    def audit(self, state: Any, batch: PyTree) -> AuditReport:
        """As `Step.audit`, of the first member."""
        numbers, _ = state.extra
        if self._together:
            numbers = jax.tree.map(lambda x: x[0], numbers)
        report = self._build(numbers)[0].audit(self.member(state, 0), batch)
        self._audits, self.is_audited = False, True
        return report

    def start(self, state: Any) -> TrainState:
        """The state itself: `begin` or a step made it, so nothing needs checking."""
        return state
