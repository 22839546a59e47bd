"""A step before it is traced: passes of towers, then one function of the results."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self, TypeAlias, get_args

from towerjax.data.placer import BATCH_LAYOUT
from towerjax.data.shard import Remainder, check_remainder
from towerjax.proof.findings import Analysis
from towerjax.step.run.one_pass import FiniteSums, Pass, TowersFlags
from towerjax.step.state.accumulators import owned
from towerjax.step.state.next_state import (
    Guard,
    NextState,
    OnNonfinite,
    Outcome,
    Update,
)
from towerjax.step.state.train_state import TrainState, split_state, state_layout
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree, short_repr
from towerjax.types.options import cast_ints, check_choice, check_flag, check_whole


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


Finish: TypeAlias = Callable[..., Sequence[PyTree]]
"""``(donated, kept, what passes merged, what they looked at) -> results``, traced.

Both parts of the state are dicts of its fields. `NextState` makes an `Outcome`.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """Passes one after another, each given the merged result of the one before."""

    each: tuple[Pass, ...]  # none where the engine's ``finish`` runs whole steps
    # Of steps that are traced and proved there: the fields of a `Proof` each.
    proofs: list[tuple[Analysis, Callable[[], list[str]]]] = dataclasses.field(
        default_factory=list, kw_only=True
    )
    # Whether the update of the state is a part of what towers trace.
    hold_update: ClassVar[bool] = False

    @property
    def is_of_one_loss(self) -> bool:
        """Whether all gradients are derivatives of the loss, which needs none."""
        return len(self.each) == 1 and self.each[0].trained is not None

    def changed(self, **fields: Any) -> Self:
        """The same with these fields of each pass."""
        each = tuple(dataclasses.replace(x, **fields) for x in self.each)
        return dataclasses.replace(self, each=each)

    def run(self, call: RunPass, args: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """``(donated, kept, what each merged, what each looked at)``."""
        if not self.each:
            return tuple(args)
        donated, kept, *batch = args
        state = TrainState(**donated, **kept)
        merged = list[PyTree]()
        finite = list[PyTree]()
        for each in self.in_turn(merged):
            before = (owned(self.given(merged)),) if merged else ()
            out = call(each, (state, *batch, before))
            merged.append(out[0])
            finite.append(out[1])
        return donated, kept, merged, finite

    def in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        """The passes; ``merged`` has what those so far have merged."""
        return iter(self.each)

    def given(self, merged: list[PyTree]) -> PyTree:
        """The merged results of earlier passes that a pass gets."""
        return merged[-1]

    def compared(self, merged: list[PyTree]) -> list[PyTree]:
        """All of it."""
        return merged

    def why_not_proved(self) -> str:
        """Why the proof of equality cannot read how towers are merged; "" if it can."""
        return ""


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """Passes of towers, then one function of their merged results."""

    passes: Passes
    finish: Finish  # what the step returns, of what the passes give
    ins: dict[str, PyTree]  # by its name, a prefix tree of layouts for each argument
    # Such a tree for the results, for those that are not `TowersOwn`.
    outs: PyTree = Layout.MIRRORED
    donate: bool = False  # whether results may take over the first argument's buffers

    @property
    def gives_verdict(self) -> bool:
        """Whether its programs take the verdict of the call before, and give theirs."""
        return isinstance(self.outs, Outcome)

    @property
    def strategy(self) -> Strategy:
        """That of the towers."""
        return self.passes.each[0].strategy

    @property
    def accepts(self) -> bool:
        """Whether what is donated is kept unless the step is accepted."""
        return isinstance(self.finish, NextState)

    @property
    def refuses_by_tower(self) -> bool:
        """Whether each tower refuses a step for itself, and not all of them."""
        return isinstance(self.finish, NextState) and self.finish.by_tower

    def on(self, strategy: Strategy) -> "Engine":
        """The passes on other towers, without checks and without micro-batches."""
        alike = self.passes.changed(strategy=strategy, micro_batches=1, looks_at=None)
        return dataclasses.replace(self, passes=alike)

    def flagging(self) -> "Engine":
        """The towers once more, without an update, to flag what is not finite."""
        passes = self.passes.changed(looks_at=TowersFlags())
        seen = lambda *args: ([x for x in args[-1] if x is not None],)  # noqa: E731
        return Engine(passes, seen, self.ins)

    def merging(self) -> "Engine":
        """What the towers of each pass return, merged, without an update."""
        finish = lambda *args: self.passes.compared(args[2])  # noqa: E731
        return Engine(self.passes, finish, self.ins)


def state_ins(
    strategy: Strategy, layout: TrainState | None = None
) -> dict[str, PyTree]:
    """The layouts of a program's arguments: a state's two parts, and a batch."""
    donated, kept = split_state(layout or state_layout(strategy))
    return {"state": donated, "kept": kept, **BATCH_LAYOUT}


def training_engine(
    passes: Passes,
    update_fn: Update,
    options: StepOptions,
    **fields: Any,
) -> Engine:
    """The engine whose ``update_fn(state, merged)`` is given what all passes merged.

    ``fields`` are further ones of its `NextState`.
    """
    finish = NextState(update_fn, options.on_nonfinite, **fields)
    ins = state_ins(passes.each[0].strategy)
    outs = Outcome(ins["state"], *[Layout.MIRRORED] * 3)
    return Engine(passes, finish, ins, outs, donate=options.donate)


def training_pass(
    tower_fn: Callable[..., PyTree],
    strategy: Strategy,
    options: StepOptions,
    **fields: Any,
) -> Pass:
    """A pass of a training; ``fields`` are further ones of it."""
    looks = options.guard == "gradients" and options.on_nonfinite != "ignore"
    fields |= {"looks_at": FiniteSums() if looks else None}
    fields |= {"micro_batches": options.micro_batches}
    return Pass(tower_fn, strategy, **fields)


def of_last(update_fn: Update) -> Update:
    """The update, given what the last pass merged."""
    return lambda state, merged: update_fn(state, merged[-1])
