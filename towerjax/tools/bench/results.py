"""The results of trials: intervals, a table, and comparisons with other results."""

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Any

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.protocol import Interval
from towerjax.tools.sweep.record_file import read_records
from towerjax.types.tables import Shown, Table


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one trial.

    Attributes:
      trial: The trial.
      status: ``"ok"``, ``"failed"`` or ``"not available"``.
      record: The whole record: figures or ``error``, ``machine``, ``versions``,
        ``timing``, ``load``.
    """

    trial: Trial
    status: str
    record: dict[str, Any]

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Result":
        """Make a result from a record."""
        return cls(Trial(**record["trial"]), record["status"], record)

    def interval(self, name: str) -> Interval | None:
        """A figure: ``step_s, return_s, hand_s, over_hand, communication``.

        Args:
          name: The figure's name.

        Returns:
          The figure's interval; None if it was not measured.
        """
        found = self.record.get(name)
        return None if found is None else Interval(**found)

    @property
    def examples_per_s(self) -> Interval | None:
        """The batch over the step's time."""
        step = self.interval("step_s")
        size = self.trial.batch
        return None if step is None else Interval(size, size, size).over(step)


def read_results(path: str | os.PathLike[str]) -> list[Result]:
    """The results in a file of `sweep`.

    Args:
      path: The file.

    Returns:
      A `Result` for each trial, the last of several.

    Raises:
      ValueError: A line is not a result; a torn last line is left out.
      OSError: The file cannot be read.
    """
    return [Result.of(record) for record in read_records(path, "trial")]


class Verdict(enum.Enum):
    """The outcome of comparing two results of one trial."""

    FASTER = "faster"
    SLOWER = "slower"
    OPEN = "intervals overlap"
    NEWLY_FAILED = "failed, and did not before"
    NEWLY_OK = "ok, and was not before"
    STILL_NOT_OK = "not ok, as before"
    ONLY_OLD = "only in the old results"
    ONLY_NEW = "only in the new results"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two results of one trial.

    Attributes:
      trial: The trial.
      verdict: The outcome.
      ratio: The new step time over the old one; its ends are as far apart as both
        intervals allow. None if one of them has no time.
    """

    trial: Trial
    verdict: Verdict
    ratio: Interval | None = None

    @property
    def is_worse(self) -> bool:
        """Whether the new result is slower, or failed and did not before."""
        return self.verdict in (Verdict.SLOWER, Verdict.NEWLY_FAILED)


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Comparison]:
    """Each trial's new step time against its old one.

    Args:
      old: Such as ``read_results("old.jsonl")``.
      new: The results to judge.

    Returns:
      A `Comparison` for each trial of either, the new ones first.

    Example:
      >>> step = {"median": 1.0, "low": 0.9, "high": 1.1}
      >>> slow = {"median": 1.5, "low": 1.2, "high": 1.6}
      >>> trial = Trial("mlp", 64)
      >>> old = Result(trial, "ok", {"step_s": step})
      >>> [found] = compare([old], [Result(trial, "ok", {"step_s": slow})])
      >>> found.verdict.value, found.ratio.median
      ('slower', 1.5)
    """
    before = {result.trial: result for result in old}
    after = {result.trial: result for result in new}
    found = [_judge(result, before.get(trial)) for trial, result in after.items()]
    gone = [trial for trial in before if trial not in after]
    return found + [Comparison(trial, Verdict.ONLY_OLD) for trial in gone]


def _judge(new: Result, old: Result | None) -> Comparison:
    if old is None:
        return Comparison(new.trial, Verdict.ONLY_NEW)
    after, before = new.interval("step_s"), old.interval("step_s")
    if after is None or before is None:
        verdict = Verdict.STILL_NOT_OK if after is None else Verdict.NEWLY_OK
        verdict = verdict if before is None else Verdict.NEWLY_FAILED
        return Comparison(new.trial, verdict)
    verdict = Verdict.FASTER if after.high < before.low else Verdict.OPEN
    verdict = Verdict.SLOWER if after.low > before.high else verdict
    return Comparison(new.trial, verdict, after.over(before))


def differences(old: Sequence[Result], new: Sequence[Result]) -> list[str]:
    """Sentences on the differences in machine, timing and versions of two results."""
    lines = []
    for name in ("machine", "timing", "versions") if old and new else ():
        before, after = (x[0].record.get(name, {}) for x in (old, new))
        for key in dict.fromkeys([*before, *after]):
            was, now = before.get(key, "none"), after.get(key, "none")
            lines += [] if was == now else [f"{name}: {key} {was}, now {now}"]
    return lines


COLUMNS = ("trial", "step ms", "examples/s", "efficiency", "over hand", "sending")


def efficiency(result: Result, results: Sequence[Result]) -> Interval | None:
    """Examples/s for each device, over those of the smallest comparable trial.

    Trials are comparable if they differ in ``T`` and ``D`` alone and have the same
    batch, or else the same batch for each tower. A trial of one tower, which reduces
    nothing, is comparable for each cross-tower op.
    """
    rate = result.examples_per_s
    for kind in (_batch_group, _rows_group):
        alike = [
            other
            for other in results
            if other.examples_per_s is not None
            and kind(other.trial) == kind(result.trial)
            and (
                other.trial.towers == 1
                or other.trial.cross_tower_ops == result.trial.cross_tower_ops
            )
        ]
        smallest = min(
            alike, key=lambda x: (x.trial.devices, x.trial.towers), default=result
        )
        if rate and smallest.examples_per_s and smallest.trial != result.trial:
            scale = smallest.trial.devices / result.trial.devices
            return rate.over(smallest.examples_per_s).times(scale)
    return None


def _batch_group(trial: Trial) -> Trial:
    return dataclasses.replace(
        trial, towers=1, devices=1, cross_tower_ops="AllReduce()"
    )


def _rows_group(trial: Trial) -> Trial:
    rows = trial.batch // trial.towers
    return dataclasses.replace(_batch_group(trial), batch=rows)


def over_hand(result: Result, results: Sequence[Result]) -> Interval | None:
    """The step's time over the hand-written step's, if possible of the same rounds."""
    step, paired = result.interval("step_s"), result.interval("over_hand")
    if paired is not None or step is None:
        return paired
    for other in results:
        hand = other.interval("hand_s")
        if hand and _hand_step_key(other.trial) == _hand_step_key(result.trial):
            return step.over(hand)
    return None


def _hand_step_key(trial: Trial) -> tuple[Any, ...]:
    """The options on which the hand-written step of a trial depends."""
    repeats = (trial.micro_batches, trial.steps_per_call)
    return (trial.model, trial.devices, trial.batch, trial.dtype, *repeats)


class Results(list[Result], Shown):
    """The results of a sweep: a list that prints as a table."""

    def tables(self, compared: Sequence[Comparison] = ()) -> tuple[Table, ...]:
        """The shown tables: results, trials without figures, and comparisons."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for result in self:
            if result.status != "ok":
                why = " ".join(str(result.record.get("error", "")).split())
                trials = reasons.setdefault((result.status, why[:400]), [])
                trials.append(result.trial.describe())
        without = [(*reason, "; ".join(trials)) for reason, trials in reasons.items()]
        verdicts = [
            (c.trial.describe(), _cell(c.ratio, "{:.2f}"), c.verdict.value)
            for c in compared
        ]
        found = (
            Table("Results", COLUMNS, tuple(cells_of(self))),
            Table("Without figures", ("status", "why", "trials"), tuple(without)),
            Table(
                "Compared",
                ("trial", "new over old step time", "verdict"),
                tuple(verdicts),
            ),
        )
        return found[:1] + tuple(table for table in found[1:] if table.rows)


def cells_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The cells of the table, a row for each trial, under `COLUMNS`."""
    rows = []
    for result in results:
        step, rate = result.interval("step_s"), result.examples_per_s
        cells = [result.status, *["-"] * 4]
        if step is not None and rate is not None:
            over = _cell(over_hand(result, results), "{:.2f}")
            is_paired = over == "-" or "over_hand" in result.record
            cells = [
                _cell(step.times(1e3), "{:.3g}"),
                f"{rate.median:,.0f}",
                _cell(efficiency(result, results), "{:.2f}"),
                over if is_paired else f"*{over}*",  # not of the same rounds
                _cell(result.interval("communication"), "{:.1%}"),
            ]
        if result.status != "not available":
            rows.append((result.trial.describe(), *cells))
    return rows


def _cell(value: Interval | None, form: str) -> str:
    if value is None:
        return "-"
    low, high = form.format(value.low), form.format(value.high)
    return f"{form.format(value.median)} [{low}, {high}]"
