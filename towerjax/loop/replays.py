"""`Replays`: the steps of a run that are replayed on neighbouring devices."""

from towerjax.check.replay.replay import Replayer
from towerjax.check.replay.report import CorruptionError, ReplayReport
from towerjax.data.placer import PlacedBatch
from towerjax.loop.checkpoint.checkpointer import Checkpointer
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import Step


class Replays:
    """Replays every ``every``-th step, and knows the last one that agreed."""

    def __init__(self, step: Step, every: int) -> None:
        """Raise if the step cannot be replayed; see `Replayer`."""
        self._replayer = Replayer(step)
        self._processes = step.strategy.placement.processes
        self._every = every
        self._agreed = -1

    def is_due(self, number: int) -> bool:
        """Return whether the step of this number is replayed before it runs."""
        return number % self._every == 0

    def replay(self, state: TrainState, placed: PlacedBatch) -> ReplayReport:
        """Replay the step after ``state``."""
        report = self._replayer(state, placed)
        if report.agrees:
            self._agreed = report.step
        return report

    def error(
        self, report: ReplayReport, checkpointer: Checkpointer | None
    ) -> Exception:
        """Make the error for a report that does not agree."""
        if not (report.wrong or report.undecided or report.shared):
            return ValueError(f"replay_every={self._every} cannot be done. {report}")

        def newest() -> int | None:
            saved = () if checkpointer is None else checkpointer.steps
            return max([x for x in saved if x <= self._agreed], default=None)

        return CorruptionError(report, self._processes.call_on_first(newest))
