"""Passes one after another, each given the merged result of the one before."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from towerjax.step.passes.one_pass import Pass
from towerjax.step.state.accumulators import unmark_per_tower
from towerjax.step.state.train_state import TrainState
from towerjax.types import PyTree

RunPass: TypeAlias = Callable[[Pass, tuple[PyTree, ...]], tuple[PyTree, PyTree]]
"""``(pass, its arguments) -> (merged, what it looks at)``, traced or run."""


class InTurn(Protocol):
    """Passes that can be run one after another."""

    def in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        """Yield the passes; ``merged`` has what those so far have merged."""
        ...

    def given(self, merged: list[PyTree]) -> PyTree:
        """Return the merged results that the next pass, or the update, is given."""
        ...


def run_in_turn(
    passes: InTurn, call: RunPass, args: Sequence[PyTree]
) -> tuple[PyTree, ...]:
    """Run passes, and return ``(donated, kept, all merged, all looked at)``.

    ``args`` are ``(donated, kept, *batch)``.
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
    """The `Passes` of a builder that knows all of them; see the protocol."""

    each: tuple[Pass, ...]
    why_not_proved = ""
    why_not_audited = ""
    hold_update = False

    @property
    def is_of_one_loss(self) -> bool:
        """Whether the one gradient is that of a pass's loss, which it follows from."""
        return len(self.each) == 1 and self.each[0].trained is not None

    def changed(self, **fields: Any) -> "PassesInOrder":
        """Return the same passes, with these fields of each."""
        return PassesInOrder(
            tuple(dataclasses.replace(pass_, **fields) for pass_ in self.each)
        )

    run = run_in_turn

    def in_turn(self, merged: list[PyTree]) -> Iterator[Pass]:
        """Yield the passes; they are known, whatever was merged."""
        return iter(self.each)

    def given(self, merged: list[PyTree]) -> PyTree:
        """Return the last merged result."""
        return merged[-1]

    def compared(self, merged: list[PyTree]) -> list[PyTree]:
        """Return all that was merged, which an audit compares."""
        return merged

    def run_whole_steps(
        self, donated: PyTree, kept: PyTree, merged: PyTree
    ) -> tuple[PyTree, None]:
        """Return what was merged: there are no whole steps to run."""
        return merged, None
