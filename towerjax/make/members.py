"""One program for several trainings, whose hyperparameters are arrays of the state."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.make.checked import step_of
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import place
from towerjax.step.passes.one_pass import Pass
from towerjax.step.plan import Plan, RunPass, StepOptions, WholeSteps, state_ins
from towerjax.step.run.compile import inline
from towerjax.step.state.checks import check_is_state
from towerjax.step.state.first_state import placed_state
from towerjax.step.state.next_state import Outcome
from towerjax.step.state.policies import StatePolicy
from towerjax.step.state.train_state import TrainState, state_layout
from towerjax.step.step import Step
from towerjax.towers.executors import Static, vmap_members
from towerjax.towers.outputs import unmark_per_tower
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree
from towerjax.types.refusals import a_type

Numbers: TypeAlias = Mapping[str, Any]
BuildMember: TypeAlias = Callable[[Numbers], tuple[Step, TrainState]]
"""``numbers -> (step, state)``, traced: the numbers are arrays ``()``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Members:
    """A step that is built inside its own program, from numbers that its state holds.

    One program serves all members that differ in these numbers alone. It trains one of
    them (numbers ``()``), or all together by ``vmap`` (numbers ``[M]``). In the second
    case dim 0 of parameters, optimizer state, tower-local variables, keys and metrics
    runs over members. ``state.extra`` is ``(numbers, the member's own extra)``.

    A refused step leaves its member unchanged, trains the others, and does not raise.

    Attributes:
      step: The step, of `begin`'s states.
      together: Whether it trains all members.
      first_state: ``numbers -> (state, how it was built)``, on no particular device.
    """

    step: Step
    together: bool
    first_state: Callable[[Numbers], tuple[TrainState, Static]]

    @classmethod
    def of(cls, build: BuildMember, numbers: Numbers) -> "Members":
        """Build a sweep's members; ``build(numbers)`` gives a member's step and state.

        Raises:
          ValueError: ``build`` returns something else than a step and a state, or
            members that train together have ``specs``.
        """
        together = any(x.ndim for x in numbers.values())
        of_one = functools.partial(_first_state, build)
        first_state = jax.jit(_of_members(of_one, together))
        _, built = jax.eval_shape(first_state, numbers)
        strategy, options = built.value
        if together and strategy.placement.specs is not None:
            raise ValueError(
                "Members that train together cannot have specs=..., because their"
                " parameters are stacked and specs describe those of one member. Say"
                " tj.sweep(..., order='in_turn'), or leave specs out."
            )
        plan = _plan_of_members(build, strategy, options, together=together)
        return cls(step_of(plan), together, first_state)

    def begin(self, numbers: Numbers) -> TrainState:
        """Make the first state, for numbers of the names and shapes that `of` got."""
        state, _ = self.first_state(numbers)
        state = dataclasses.replace(state, step=state.step.ravel()[0])
        strategy = self.step.strategy
        layout = _layout(strategy, self.together)
        return place(state, strategy.placement, layout, state.params)

    def of_member(self, values: np.ndarray, index: int) -> np.ndarray:
        """Pick one member's part of ``values``, which are stacked over steps."""
        return values[:, index] if self.together else values

    def member(self, state: TrainState, index: int) -> TrainState:
        """Take out one member's state, as a step built for it alone would have it."""
        return _member(self.step.strategy, self.together, state, index)


def _of_members(fn: Callable[..., PyTree], together: bool) -> Callable[..., PyTree]:
    """Map ``fn`` by ``vmap`` if members train together; else leave it."""
    return vmap_members(fn) if together else fn


def _first_state(build: BuildMember, numbers: Numbers) -> tuple[TrainState, Static]:
    """Build a member: its first state, and the strategy and options of its step."""
    built = build(numbers)
    if not isinstance(built, tuple) or len(built) != 2:
        raise ValueError(
            f"build returned {a_type(built)}, but must return a step and its first"
            " state. Write return step, state."
        )
    step, state = built
    check_is_state(state)
    state = dataclasses.replace(state, extra=(numbers, state.extra))
    return state, Static((step.strategy, step.options))


def _layout(strategy: Strategy, together: bool) -> TrainState:
    """Lay out a state.

    If members train together, leaves have a dim of members before that of towers.
    """
    layout = state_layout(strategy)
    if not together:
        return layout
    local: Any = Layout.PER_TOWER_STEPS
    return dataclasses.replace(layout, local=local)


def _member(
    strategy: Strategy, together: bool, state: TrainState, index: int
) -> TrainState:
    """Take out one member's state, without its numbers."""
    if together:
        # All members share one step number, so it is not indexed.
        parts = dataclasses.replace(state, step=None)
        parts = jax.tree.map(lambda x: x[index], parts)
        state = dataclasses.replace(parts, step=state.step)
    _, extra = state.extra
    return placed_state(strategy, dataclasses.replace(state, extra=extra))


def _plan_of_members(
    build: BuildMember, strategy: Strategy, options: StepOptions, *, together: bool
) -> Plan:
    """Plan a step that runs the step of each member."""
    if options.on_nonfinite == "raise":
        options = dataclasses.replace(options, on_nonfinite="skip")
    options = dataclasses.replace(options, donate=True)

    def first_member(state: TrainState) -> tuple[Plan, TrainState]:
        numbers, _ = state.extra
        if together:
            numbers = jax.tree.map(lambda x: x[0], numbers)
        step, _ = build(numbers)
        return step.plan, _member(strategy, together, state, 0)

    return Plan(
        strategy,
        options,
        _NoPasses(),
        _StepOfEach(build, strategy.placement, together),
        _StatesOfMembers(strategy),
        state_ins(strategy, _layout(strategy, together)),
        Outcome("state", *[Layout.MIRRORED] * 3),
        audited=first_member,
    )


class _NoPasses:
    """The `Passes` of a sweep: none, because its ``next`` runs whole steps."""

    each = ()
    why_not_proved = ""
    why_not_audited = ""
    hold_update = False
    is_of_one_loss = False

    def changed(self, **fields: Any) -> "_NoPasses":
        """Change nothing, because there are no passes to change."""
        return self

    def run(self, call: RunPass, args: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Run no pass; return the batch in place of merged results."""
        donated, kept, *batch = args
        return donated, kept, batch, []

    def in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        """Yield nothing, because there are no passes."""
        return iter(())

    def given(self, merged: list[PyTree]) -> PyTree:
        """Pass ``merged`` on, which is the batch."""
        return merged

    def compared(self, merged: list[PyTree]) -> list[PyTree]:
        """Compare all of ``merged``, which is the batch."""
        return merged


@dataclasses.dataclass(frozen=True, eq=False)
class _StepOfEach:
    """The ``next`` of a sweep's plan, which runs the step of each member."""

    build: BuildMember
    placement: Placement
    together: bool

    def __call__(
        self, donated: PyTree, kept: PyTree, batch: PyTree, _: PyTree
    ) -> WholeSteps:
        """Run one step of all members; one proof holds for all.

        All members share the step number and the step flag.
        """

        def train(donated: PyTree, rng: jax.Array) -> tuple[Outcome, Static]:
            numbers, extra = donated["extra"]
            step, _ = self.build(numbers)
            args = {**donated, "extra": extra}, {**kept, "rng": rng}, *batch
            out, traced = inline(step.plan, self.placement, args)
            now = {name: x for name, x in out.now.items() if name != "step"}
            donated = {**out.donated, "extra": (numbers, out.donated["extra"])}
            metrics = unmark_per_tower(out.metrics)
            outcome = Outcome(donated, now, metrics, out.step_flag)
            return outcome, Static(traced.proof)

        run = _of_members(train, self.together)
        out, proof = run(donated, kept["rng"])
        now = {**out.now, "step": kept["step"] + 1}
        out = out._replace(now=now, step_flag=out.step_flag.max())
        return WholeSteps(out, proof.value)


@dataclasses.dataclass(frozen=True)
class _StatesOfMembers(StatePolicy):
    """The states of several trainings, which `Members.begin` or a step made."""

    def start(self, state_or_params: PyTree, expected: TrainState | None) -> TrainState:
        """Take the state unchanged, because it needs no check."""
        return state_or_params
