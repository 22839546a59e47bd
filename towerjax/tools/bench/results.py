"""What came of a trial? A line of a file, with its figures as intervals."""

import dataclasses
import os
from typing import Any

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.protocol import Interval
from towerjax.tools.sweep.record_file import read_records


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one trial.

    Attributes:
      trial: What was measured.
      status: ``"ok"``, ``"failed"`` or ``"not available"``.
      record: The whole line: figures or ``error``, ``machine``, ``versions``,
        ``timing``, ``load``.
    """

    trial: Trial
    status: str
    record: dict[str, Any]

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Result":
        """The result that a line holds.

        Args:
          record: What the line says.

        Returns:
          A `Result`.
        """
        return cls(Trial(**record["trial"]), record["status"], record)

    def interval(self, name: str) -> Interval | None:
        """A figure: ``step_s, return_s, hand_s, over_hand, communication``.

        Args:
          name: Its name.

        Returns:
          Its interval; None where it was not measured.
        """
        found = self.record.get(name)
        return None if found is None else Interval(**found)

    @property
    def examples_per_s(self) -> Interval | None:
        """The batch over the step's time."""
        step = self.interval("step_s")
        return None if step is None else step.inverse(self.trial.batch)


def read_results(path: str | os.PathLike[str]) -> list[Result]:
    """The results in a file of `sweep`.

    Args:
      path: The file.

    Returns:
      One for each trial, the last where there are several.

    Raises:
      ValueError: A line is not a result; a torn last one is left out.
      OSError: It cannot be read.
    """
    return [Result.of(record) for record in read_records(path, "trial")]
