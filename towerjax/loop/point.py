"""`Point`: where a run is, which a checkpoint saves and from which it goes on."""

import dataclasses

from towerjax.loop.stopping import Watch
from towerjax.step.state.train_state import TrainState, step_number


def reaches_multiple(every: int | None, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` is > ``before`` and <= ``after``."""
    return every is not None and after // every > before // every


@dataclasses.dataclass
class Point:
    """Where a run is: it changes while signals are held back, all at once."""

    state: TrainState
    watch: Watch = dataclasses.field(default_factory=lambda: Watch(()))
    number: int = dataclasses.field(init=False)  # of the last dispatched step
    # What is to be done before the next step.
    is_evaluation_due: bool = False
    is_saving_due: bool = False

    def __post_init__(self) -> None:
        """Count from the state's number on."""
        self.number = step_number(self.state)

    def advance(self, eval_every: int | None, every: int | None) -> None:
        """Count a dispatched step; ``every``: of a `Checkpointer`."""
        before, self.number = self.number, self.number + 1
        self.is_evaluation_due |= reaches_multiple(eval_every, before, self.number)
        self.is_saving_due |= reaches_multiple(every, before, self.number)
