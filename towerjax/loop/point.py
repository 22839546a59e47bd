"""`Point`: where a run is, which a checkpoint saves and from which it goes on."""

import dataclasses

from towerjax.data.stream import Position, Source
from towerjax.loop.stopping import Watch
from towerjax.step.state import TrainState, step_number


def reaches_multiple(every: int | None, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` is > ``before`` and <= ``after``."""
    return every is not None and after // every > before // every


@dataclasses.dataclass
class Clock:
    """How far a run is, and what is to be done before its next step."""

    number: int  # of the last dispatched step
    is_evaluation_due: bool = False
    is_saving_due: bool = False

    def advance(self, steps: int, eval_every: int | None, every: int | None) -> None:
        """Count dispatched steps; ``every``: of a `Checkpointer`."""
        before, self.number = self.number, self.number + steps
        self.is_evaluation_due |= reaches_multiple(eval_every, before, self.number)
        self.is_saving_due |= reaches_multiple(every, before, self.number)


@dataclasses.dataclass
class Point:
    """Where a run is: it changes while signals are held back, all at once."""

    state: TrainState
    clock: Clock
    data: Position  # after the last dispatched step
    watch: Watch

    @classmethod
    def start(
        cls, state: TrainState, source: Source, watch: Watch | None = None
    ) -> "Point":
        """That before the first step."""
        clock = Clock(step_number(state))
        return cls(state, clock, source.position, watch or Watch((), None))
