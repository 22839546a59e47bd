"""How are results kept? One line of JSON a trial; a killed sweep goes on after it."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.protocol import Interval


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
    return list(_read(pathlib.Path(path))[0].values())


def _read(path: pathlib.Path) -> tuple[dict[Trial, Result], int]:
    """The results, and how many bytes their whole lines have."""
    found: dict[Trial, Result] = {}
    kept = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # torn by a kill or a full disk
            try:
                result = Result.of(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"Line {number} of {str(path)!r} is no result of a sweep:"
                    f" {line[:60]!r}. Nothing was changed; use another path."
                ) from error
            found[result.trial] = result
            kept += len(line)
    return found, kept


class ResultFile:
    """A file of results that a sweep goes on in."""

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any]) -> None:
        self.path, self._about = pathlib.Path(path), about
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[Trial, Result] = {}
        if self.path.exists():
            self.found, kept = _read(self.path)
            for result in self.found.values():
                self._check_same(result)
            if kept < self.path.stat().st_size:
                os.truncate(self.path, kept)

    def _check_same(self, result: Result) -> None:
        for name, value in self._about.items():
            if (old := result.record.get(name)) != value:
                raise ValueError(
                    f"{str(self.path)!r} holds results with the {name} {old}, and this"
                    f" sweep has {value}. Use another path; --compare compares two."
                )

    def add(self, record: dict[str, Any]) -> Result:
        """Append a line."""
        record = {**record, **self._about}
        # Unbuffered and in one call: a kill leaves whole lines, but for the last.
        with self.path.open("ab", buffering=0) as file:
            rest = memoryview(json.dumps(record).encode() + b"\n")
            while rest:
                rest = rest[file.write(rest) :]
        result = self.found[Trial(**record["trial"])] = Result.of(record)
        return result

    def done(self, trials: Sequence[Trial], *, retry_failed: bool) -> set[Trial]:
        """Which of the trials need not run."""
        return {
            trial
            for trial in trials
            if trial in self.found
            and (self.found[trial].status == "ok" or not retry_failed)
        }
