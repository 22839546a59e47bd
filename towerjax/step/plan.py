"""A step before it is traced: its passes of towers, and then one function."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, get_args

import jax

from towerjax.data.batch_rows import Remainder, check_remainder
from towerjax.data.placer import BATCH_LAYOUT
from towerjax.step.passes.one_pass import FiniteSums, Pass, TowersFlags
from towerjax.step.state.next_state import (
    Guard,
    NextState,
    OnNonfinite,
    Outcome,
    Update,
)
from towerjax.step.state.policies import StatePolicy
from towerjax.step.state.train_state import TrainState, split_state, state_layout
from towerjax.towers.outputs import mark_per_tower, unmark_per_tower
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree
from towerjax.types.options import (
    cast_ints,
    check_choice,
    check_flag,
    check_whole,
    short_repr,
)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a step treats its batch and its loss; see `build_train_step`."""

    micro_batches: int = 1
    remainder: Remainder = "error"
    on_nonfinite: OnNonfinite = "raise"
    guard: Guard = "gradients"
    donate: bool = True
    max_programs: int | None = 1
    audit: bool | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_remainder(self.remainder)
        check_choice("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        check_choice("guard", self.guard, get_args(Guard))
        check_whole("micro_batches", self.micro_batches)
        check_whole("max_programs", self.max_programs, or_none=True)
        check_flag("donate", self.donate)
        check_choice("audit", self.audit, (None, True, False))
        cast_ints(self)


RunPass: TypeAlias = Callable[[Pass, tuple[PyTree, ...]], tuple[PyTree, PyTree]]
"""``(pass, its arguments) -> (merged, what it looks at)``, traced or run."""


Next: TypeAlias = Callable[..., Sequence[PyTree]]
"""``(donated, kept, what passes merged, what they looked at) -> results``, traced.

Both parts of the state are dicts of its fields. `NextState` makes an `Outcome`. That of
a sweep runs whole steps, and returns `WholeSteps`.
"""


class WholeSteps(NamedTuple):
    """The results of whole steps, which a plan's ``next`` has run, and their proof."""

    results: Sequence[PyTree]
    proof: Any


class Passes(Protocol):
    """What the towers of a step compute.

    `PassesInOrder` are known before they are traced. The passes of a model function are
    found while it is traced (`tf1/estimator/model_passes.py`). A sweep has none
    (`make/members.py`).
    """

    @property
    def each(self) -> tuple[Pass, ...]:
        """The passes that are known before tracing."""
        ...

    @property
    def why_not_proved(self) -> str:
        """The reason why no proof of equality can read how towers are merged, or ""."""
        ...

    @property
    def why_not_audited(self) -> str:
        """The reason why one tower differs from several on purpose, or ""."""
        ...

    @property
    def hold_update(self) -> bool:
        """Whether the program that towers trace also updates the state."""
        ...

    @property
    def is_of_one_loss(self) -> bool:
        """Whether the only gradient is that of one pass's loss.

        An audit then compares the loss, from which the gradient follows.
        """
        ...

    def changed(self, **fields: Any) -> "Passes":
        """Change these fields in each of the passes."""
        ...

    def run(self, call: RunPass, args: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Run the passes, and return ``(donated, kept, merged, reports)``.

        The last two are lists with an entry for each pass: its merged results, and the
        report of its `Look`.
        """
        ...

    def in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        """Yield the passes in order.

        The caller runs each yielded pass, and appends its results to ``merged``, from
        which the next pass can be made.
        """
        ...

    def given(self, merged: list[PyTree]) -> PyTree:
        """Choose the part of ``merged`` that the next pass, or the update, takes."""
        ...

    def compared(self, merged: list[PyTree]) -> list[PyTree]:
        """Choose the part of ``merged`` that an audit compares."""
        ...


def run_in_turn(
    passes: "Passes", call: RunPass, args: Sequence[PyTree]
) -> tuple[PyTree, ...]:
    """Run the passes one after another, each on the merged results before it.

    ``args`` are ``(donated, kept, *batch)``: a state's two parts, and a batch. Returns
    ``(donated, kept, merged, reports)`` with lists of what each pass returned.
    """
    donated, kept, *batch = args
    state = TrainState(**donated, **kept)
    merged = list[PyTree]()
    looked_at = list[PyTree]()
    for pass_ in passes.in_turn(merged):
        before = (unmark_per_tower(passes.given(merged)),) if merged else ()
        of_pass, look = call(pass_, (state, *batch, before))
        merged.append(of_pass)
        looked_at.append(look)
    return donated, kept, merged, looked_at


@dataclasses.dataclass(frozen=True, eq=False)
class PassesInOrder:
    """The `Passes` of a builder that knows all of its passes before a trace."""

    each: tuple[Pass, ...]
    why_not_proved = ""
    why_not_audited = ""
    hold_update = False

    @property
    def is_of_one_loss(self) -> bool:
        """Whether the only gradient is that of one pass's loss."""
        return len(self.each) == 1 and self.each[0].trained is not None

    def changed(self, **fields: Any) -> "PassesInOrder":
        """Change these fields in each of the passes."""
        return PassesInOrder(
            tuple(dataclasses.replace(pass_, **fields) for pass_ in self.each)
        )

    run = run_in_turn

    def in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        """Yield the passes in order. They do not depend on ``merged``."""
        return iter(self.each)

    def given(self, merged: list[PyTree]) -> PyTree:
        """Give what the last pass has merged."""
        return merged[-1]

    def compared(self, merged: list[PyTree]) -> list[PyTree]:
        """Give all merged results: an audit compares each of them."""
        return merged


class TowersTrain(enum.Enum):
    """What towers do with a step, and with their tower-local variables."""

    TOGETHER = "all refuse a step, or none; each keeps the variables that it returned"
    AS_UPDATED = "all refuse a step, or none; the update makes the variables"
    ALONE = "each refuses its own step; the update makes the variables"


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A step before it is traced, as a builder describes it.

    Attributes:
      strategy: The towers, and where they are.
      options: How the step treats its batch and its loss.
      passes: What towers compute.
      next: Makes the step's results from what the passes give.
      states: The states that its calls take, and what the calls return.
      ins: For each argument of its program, by its name, a prefix tree of layouts.
      outs: A prefix tree for the results: the name of the argument that a result lies
        as, or ``MIRRORED`` for all but `PerTowerValue`.
      towers_train: What towers do with a step and with their variables.
      remade: Makes the same plan on other towers, with other options; None if its
        builder cannot. `build_train_step` and `build_step` set it.
      moved: Makes the same plan on other devices. If it is None, a plan that only
        reads is moved by its fields, and others cannot be moved.
      audited: Gives another plan and state, which are proved and audited in place of
        these; None if there are no others. A sweep sets it, to its first member.
    """

    strategy: Strategy
    options: StepOptions
    passes: Passes
    next: Next
    states: StatePolicy
    ins: dict[str, PyTree]
    outs: PyTree = Layout.MIRRORED
    towers_train: TowersTrain = TowersTrain.AS_UPDATED
    remade: "Callable[[Strategy, StepOptions], Plan] | None" = None
    moved: "Callable[[Strategy, StepOptions], Plan] | None" = None
    audited: "Callable[[TrainState], tuple[Plan, TrainState]] | None" = None

    @functools.cached_property
    def gives_step_flag(self) -> bool:
        """Whether its program also takes the step flag of the call before."""
        return isinstance(self.outs, Outcome)

    @property
    def accepts(self) -> bool:
        """Whether a state is kept unless the step is accepted, as by `NextState`."""
        return isinstance(self.next, NextState)

    @functools.cached_property
    def donates(self) -> bool:
        """Whether results may take over the buffers of the state's first part."""
        return self.options.donate and "state" in jax.tree.leaves(self.outs)

    @property
    def by_tower(self) -> bool:
        """Whether each tower refuses a step for itself, and not all of them."""
        return self.towers_train is TowersTrain.ALONE

    @property
    def keeps_local(self) -> bool:
        """Whether the next tower-local variables are what towers returned."""
        return self.towers_train is TowersTrain.TOGETHER

    def towers_on(self, strategy: Strategy) -> "Plan":
        """Put the plan on another strategy, without guards and micro-batches."""
        passes = self.passes.changed(strategy=strategy, micro_batches=1, looks_at=None)
        return dataclasses.replace(self, strategy=strategy, passes=passes)

    def on(self, strategy: Strategy) -> "Plan":
        """Put the plan on other devices, for as many towers.

        Raises a ``ValueError`` if the plan's functions belong to its devices.
        """
        if self.moved is not None:
            return self.moved(strategy, self.options)
        if self.gives_step_flag or not isinstance(self.passes, PassesInOrder):
            raise ValueError(
                "a step of a model function, or of a sweep's members, cannot be moved"
                " to other devices"
            )
        passes = self.passes.changed(strategy=strategy)
        states = dataclasses.replace(self.states, strategy=strategy)
        return dataclasses.replace(
            self, strategy=strategy, passes=passes, states=states
        )

    def flagging(self) -> "Plan":
        """Run towers alone, and flag values that are not finite."""
        passes = self.passes.changed(looks_at=TowersFlags())

        def seen(*args: PyTree) -> tuple[PyTree]:
            return ([x for x in args[-1] if x is not None],)

        return self._reading(passes, seen)

    def merging(self) -> "Plan":
        """Run towers alone, and return the results of each pass."""

        def merged(*args: PyTree) -> list[PyTree]:
            return self.passes.compared(args[2])

        return self._reading(self.passes, merged)

    def _reading(self, passes: Passes, results: Next) -> "Plan":
        return Plan(self.strategy, self.options, passes, results, self.states, self.ins)


def state_ins(
    strategy: Strategy, layout: TrainState | None = None
) -> dict[str, PyTree]:
    """Lay out a program's arguments: a state's two parts, and a batch."""
    donated, kept = split_state(layout or state_layout(strategy))
    return {"state": donated, "kept": kept, **BATCH_LAYOUT}


def training_plan(
    strategy: Strategy,
    options: StepOptions,
    passes: Passes,
    update_fn: Update,
    states: StatePolicy,
    *,
    towers_train: TowersTrain = TowersTrain.AS_UPDATED,
    remade: Callable[[Strategy, StepOptions], Plan] | None = None,
    moved: Callable[[Strategy, StepOptions], Plan] | None = None,
    **fields: Any,
) -> Plan:
    """Plan a training step.

    ``update_fn`` takes the merged results, as one more pass would take them. ``fields``
    are further fields of the plan's `NextState`.
    """
    return Plan(
        strategy,
        options,
        passes,
        NextState(update_fn, passes.given, options.on_nonfinite, **fields),
        states,
        state_ins(strategy),
        Outcome("state", *[Layout.MIRRORED] * 3),
        towers_train=towers_train,
        remade=remade,
        moved=moved,
    )


def unguarded_plan(
    strategy: Strategy,
    options: StepOptions,
    passes: Passes,
    results_fn: Callable[[TrainState, list[PyTree]], tuple[TrainState, PyTree]],
    states: StatePolicy,
    *,
    changes_state: bool = False,
) -> Plan:
    """Plan a step that is never refused, such as an evaluation.

    ``results_fn(state, merged)`` returns the next state and the results, from the
    merged results of all passes. The program returns ``(results,)``. With
    ``changes_state`` it returns the two parts of the next state before the results.
    """

    def finish(
        donated: PyTree, kept: PyTree, merged: list[PyTree], looked_at: PyTree
    ) -> tuple[PyTree, ...]:
        after, results = results_fn(TrainState(**donated, **kept), merged)
        marked = mark_per_tower(results)
        return (*split_state(after), marked) if changes_state else (marked,)

    of_state = ("state", "kept") if changes_state else ()
    return Plan(
        strategy,
        options,
        passes,
        finish,
        states,
        state_ins(strategy),
        outs=(*of_state, Layout.MIRRORED),
    )


def training_pass(
    tower_fn: Callable[..., PyTree],
    strategy: Strategy,
    options: StepOptions,
    **fields: Any,
) -> Pass:
    """Describe a pass of a training step; ``fields`` are further ones of `Pass`."""
    looks = options.guard == "gradients" and options.on_nonfinite != "ignore"
    fields |= {"looks_at": FiniteSums() if looks else None}
    fields |= {"micro_batches": options.micro_batches}
    return Pass(tower_fn, strategy, **fields)
