"""A step before it is traced: passes of towers, then a function of what they merge."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

from towerjax.data.placer import BATCH_LAYOUT
from towerjax.data.shard import Remainder, check_remainder
from towerjax.metrics.weighted import Weighted
from towerjax.step.accumulators import owned
from towerjax.step.next_state import Guard, NextState, OnNonfinite, Outcome
from towerjax.step.one_pass import Pass
from towerjax.step.state import TrainState, split_state, state_layout
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
    audit: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_remainder(self.remainder)
        check_choice("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        check_choice("guard", self.guard, get_args(Guard))
        check_whole("micro_batches", self.micro_batches)
        check_whole("max_programs", self.max_programs, or_none=True)
        check_flag("donate", self.donate)
        check_flag("audit", self.audit)
        cast_ints(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
    """Passes of towers, one after another, then once a function of what they merged."""

    passes: tuple[Pass, ...]  # each is given the merged result of the one before
    # (donated, kept, merged, finite) -> what the step returns. Both parts of the state
    # are dicts of its fields; of each pass it gets what was merged, and looked at.
    finish: Callable[..., Any]
    ins: dict[str, PyTree]  # by its name, a prefix tree of layouts for each argument
    outs: PyTree  # such a tree for the results, for those that are not `TowersOwn`
    donate: bool = False  # whether results may take over the first argument's buffers
    # Whether ``finish`` returns ``(accepted, donated, rest)``, for an `Outcome` that
    # keeps what is donated unless it is accepted.
    accepts: bool = False
    # Whether each pass gets a list of all merged results so far, in place of the last.
    keeps_all: bool = False
    # Whether what passes return is used further, and so has to have the same bits.
    goes_on: bool = True
    # Whether the last pass runs once more, after what was merged so far.
    again: Callable[[list[PyTree]], bool] | None = None
    # Of steps that ``finish`` itself traces and proves, while it is traced.
    proofs: list[Any] = dataclasses.field(default_factory=list)
    # What an audit compares of one merged tree.
    compared: Callable[[PyTree], PyTree] | None = None

    @property
    def strategy(self) -> Strategy:
        """That of the towers."""
        return self.passes[0].strategy

    def on(self, strategy: Strategy) -> "Engine":
        """The passes on other towers, without checks and without micro-batches."""
        changes: Any = {"strategy": strategy, "micro_batches": 1, "looks_at": None}
        return dataclasses.replace(self, passes=self._changed(**changes))

    def flagging(self) -> "Engine":
        """The towers once more, without an update, to flag what is not finite."""

        def finish(*args: Any) -> tuple[Any]:
            return args[-1:]

        passes = self._changed(looks_at="towers")
        return self._returning(finish, (Layout.MIRRORED,), passes)

    def merging(self) -> "Engine":
        """What the towers of each pass return, merged, without an update."""

        def finish(_: Any, __: Any, merged: list[PyTree], ___: Any) -> list[PyTree]:
            return merged if self.compared is None else [*map(self.compared, merged)]

        return self._returning(finish, Layout.MIRRORED, self.passes)

    def run(
        self,
        call: Callable[[Pass, tuple[PyTree, ...]], tuple[PyTree, Any]],
        args: Sequence[PyTree],
    ) -> tuple[PyTree, ...]:
        """The arguments of ``finish``, of the results of ``call(pass, its arguments)``.

        ``args`` are ``(donated, kept, *batch)``, values or shapes. Without passes they
        are what ``finish`` gets, which traces a step of its own.
        """
        if not self.passes:
            return (*args,)
        donated, kept, *batch = args
        state, before = TrainState(**donated, **kept), ()
        merged, finite = [], []
        for each in self._in_turn(merged):
            out = call(each, (state, *batch, before))
            merged.append(out[0])
            finite.append(out[1])
            before = (owned([*merged] if self.keeps_all else merged[-1]),)
        return donated, kept, merged, finite

    def _in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        yield from self.passes
        while self.again is not None and self.again(merged):
            yield self.passes[-1]

    def _changed(self, **fields: Any) -> tuple[Pass, ...]:
        return tuple(dataclasses.replace(each, **fields) for each in self.passes)

    def _returning(
        self, finish: Callable[..., Any], outs: PyTree, passes: tuple[Pass, ...]
    ) -> "Engine":
        how: Any = {"finish": finish, "outs": outs, "passes": passes}
        return dataclasses.replace(self, **how, donate=False, accepts=False)


def state_ins(
    strategy: Strategy, names: tuple[str, str], layout: TrainState | None = None
) -> dict[str, PyTree]:
    """The layouts of a program's arguments: a state's two parts, and a batch."""
    parts = split_state(layout or state_layout(strategy))
    return dict(zip(names, parts, strict=True)) | BATCH_LAYOUT


def outcome_layout(donated: PyTree) -> Outcome:
    """The layouts of an `Outcome`, whose state lies as ``donated`` says."""
    mirrored = Layout.MIRRORED
    return Outcome(donated, mirrored, mirrored, mirrored)


def training_engine(
    tower_fns: Sequence[Callable[..., PyTree]],
    update_fn: Callable[..., Any],
    strategy: Strategy,
    options: StepOptions,
    *,
    needs_examples: bool = True,
    keeps_all: bool = False,
    other_losses: Callable[[Any], Sequence[Weighted]] | None = None,
    **of_passes: Any,
) -> Engine:
    """The engine of these functions; ``of_passes`` are further fields of its passes."""
    how: Any = {"micro_batches": options.micro_batches, **of_passes}
    on_nonfinite = options.on_nonfinite
    looks = options.guard == "gradients" and on_nonfinite != "ignore"
    how["looks_at"] = "sums" if looks else None
    finish = NextState(update_fn, on_nonfinite, keeps_all, needs_examples, other_losses)
    ins = state_ins(strategy, ("state", "kept"))
    return Engine(
        tuple(Pass(tower_fn, strategy, **how) for tower_fn in tower_fns),
        finish,
        ins,
        outcome_layout(ins["state"]),
        donate=options.donate,
        accepts=True,
        keeps_all=keeps_all,
    )
