"""One program for several trainings, whose hyperparameters are arrays of the state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.mesh.transfer import place
from towerjax.step.plan import Passes, Plan, state_ins
from towerjax.step.run.compile import inline
from towerjax.step.run.prove import Proof
from towerjax.step.state.accumulators import unmark_per_tower
from towerjax.step.state.checks import check_is_state
from towerjax.step.state.next_state import Outcome
from towerjax.step.state.policies import StatePolicy
from towerjax.step.state.train_state import TrainState, state_layout
from towerjax.step.step import Step
from towerjax.towers.executors import vmap_members
from towerjax.types import Layout, PyTree
from towerjax.types.refusals import a_type

Numbers: TypeAlias = Mapping[str, Any]
BuildMember: TypeAlias = Callable[[Numbers], tuple[Step, TrainState]]
"""``numbers -> (step, state)``, traced: the numbers are arrays ``()``."""


class Members:
    """A step that is built inside its own program, from numbers that its state holds.

    One program serves all members that differ in these numbers alone. Either it trains
    one of them (numbers ``()``), or all together by ``vmap`` (numbers ``[M]``); then
    dim 0 of parameters, optimizer state, tower-local variables, keys and metrics runs
    over members. ``state.extra`` is ``(numbers, the member's own extra)``.

    A refused step leaves its member unchanged, trains the others, and does not raise.

    Attributes:
      step: The step, of `begin`'s states.
    """

    def __init__(self, build: BuildMember, numbers: Numbers) -> None:
        self._build = build
        self._together = any(x.ndim for x in numbers.values())
        self._over = vmap_members if self._together else lambda fn: fn
        self._begin = jax.jit(self._over(self._begin_one))
        jax.eval_shape(self._begin, numbers)
        strategy = self._built.strategy
        options = self._built.options
        if self._together and strategy.placement.specs is not None:
            raise ValueError(
                "Members that train together are stacked, but specs=..."
                " describe one member."
                " Say tj.sweep(..., order='in_turn'), or leave specs out."
            )
        self._layout = state_layout(strategy)
        if self._together:
            own: Any = Layout.PER_TOWER_STEPS
            self._layout = dataclasses.replace(self._layout, local=own)
        if options.on_nonfinite == "raise":
            options = dataclasses.replace(options, on_nonfinite="skip")
        options = dataclasses.replace(options, donate=True)
        ins = state_ins(strategy, self._layout)
        outs = Outcome(ins["state"], *[Layout.MIRRORED] * 3)
        plan = Plan(
            strategy,
            options,
            Passes(()),
            self._finish,
            _OfMembers(strategy),
            ins,
            outs,
            donates=True,
            gives_step_flag=True,
            audited=self._first,
        )
        self.step = Step(plan)

    def _begin_one(self, numbers: Numbers) -> TrainState:
        """A member's first state; its step is kept to know how it was built."""
        made = self._build(numbers)
        if not isinstance(made, tuple) or len(made) != 2:
            kind = a_type(made)
            raise ValueError(f"build returned {kind}: write return step, state.")
        self._built, state = made
        check_is_state(state)
        return dataclasses.replace(state, extra=(numbers, state.extra))

    def begin(self, numbers: Numbers) -> TrainState:
        """The state before the first step, for numbers of the same names and shapes."""
        state = self._begin(numbers)
        state = dataclasses.replace(state, step=state.step.ravel()[0])
        return place(state, self.step.strategy.placement, self._layout, state.params)

    def of_member(self, values: np.ndarray, index: int) -> np.ndarray:
        """One member's part of results that are stacked over steps, ``[n, ...]``."""
        return values[:, index] if self._together else values

    def member(self, state: TrainState, index: int) -> TrainState:
        """One member's state, as a step built for it alone would have it."""
        if self._together:
            parts = dataclasses.replace(state, step=None)  # the same for all members
            parts = jax.tree.map(lambda x: x[index], parts)
            state = dataclasses.replace(parts, step=state.step)
        return self.step.place(dataclasses.replace(state, extra=state.extra[1]))

    def _first(self, state: TrainState) -> tuple[Plan, TrainState]:
        """The first member's plan and state."""
        numbers = state.extra[0]
        if self._together:
            numbers = jax.tree.map(lambda x: x[0], numbers)
        return self._build(numbers)[0].plan, self.member(state, 0)

    def _finish(
        self, proofs: list[Proof], donated: PyTree, kept: PyTree, *batch: PyTree
    ) -> Outcome:
        """One step of all members, of which each traces and proves its own."""
        placement = self.step.strategy.placement

        def train(donated: PyTree, rng: jax.Array) -> tuple[PyTree, ...]:
            numbers, extra = donated["extra"]
            plan = self._build(numbers)[0].plan
            given = {**donated, "extra": extra}, {**kept, "rng": rng}, *batch
            out, traced = inline(plan, placement, given)
            proofs.append(traced.proof)
            now = {name: x for name, x in out.now.items() if name != "step"}
            donated = {**out.donated, "extra": (numbers, out.donated["extra"])}
            return donated, now, unmark_per_tower(out.metrics), out.step_flag

        donated, now, metrics, refused = self._over(train)(donated, kept["rng"])
        now["step"] = kept["step"] + 1
        return Outcome(donated, now, metrics, refused.max())


@dataclasses.dataclass(frozen=True)
class _OfMembers(StatePolicy):
    """The state of several trainings; `Members.begin` or a step made it."""

    def start(self, given: PyTree, expected: TrainState | None) -> TrainState:
        """The state itself: nothing needs checking."""
        return given
