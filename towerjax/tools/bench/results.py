"""What came of trials? Figures as intervals, a table, and verdicts over others."""

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
        """The result that a line holds."""
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


class Verdict(enum.Enum):
    """What two results of one trial say."""

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
      trial: What was measured.
      verdict: What they say.
      ratio: The new step time over the old one; its ends are as far apart as both
        intervals allow. None where one of them has no time.
    """

    trial: Trial
    verdict: Verdict
    ratio: Interval | None = None

    @property
    def is_worse(self) -> bool:
        """Slower, or failed and did not before?"""
        return self.verdict in (Verdict.SLOWER, Verdict.NEWLY_FAILED)


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Comparison]:
    """Each trial's new step time against its old one.

    Args:
      old: Such as ``read_results("old.jsonl")``.
      new: The results to judge.

    Returns:
      One `Comparison` for each trial of either, the new ones first.

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
    """In what the two sets of results were not measured alike."""
    lines = []
    for name in ("machine", "timing", "versions") if old and new else ():
        before, after = (x[0].record.get(name, {}) for x in (old, new))
        for key in dict.fromkeys([*before, *after]):
            was, now = before.get(key, "none"), after.get(key, "none")
            lines += [] if was == now else [f"{name}: {key} {was}, now {now}"]
    return lines


COLUMNS = ("trial", "step ms", "examples/s", "efficiency", "over hand", "sending")


def efficiency(result: Result, results: Sequence[Result]) -> Interval | None:
    """Examples/s for each device, over those of the smallest trial of its kind.

    Of its kind are trials that differ in ``T`` and ``D`` alone and have the same
    batch, or else the same batch for each tower. One tower reduces nothing, so it
    stands for each cross-tower op.
    """
    rate = result.examples_per_s
    for kind in (_of_same_batch, _of_same_rows):
        alike = [
            (other.trial.devices, other.trial.towers, i)
            for i, other in enumerate(results)
            if other.examples_per_s is not None
            and kind(other.trial) == kind(result.trial)
            and (
                other.trial.towers == 1
                or other.trial.cross_tower_ops == result.trial.cross_tower_ops
            )
        ]
        first = results[min(alike)[-1]] if alike else result
        if rate and first.examples_per_s and first.trial != result.trial:
            scale = first.trial.devices / result.trial.devices
            return rate.over(first.examples_per_s).scaled(scale)
    return None


def _of_same_batch(trial: Trial) -> Trial:
    return dataclasses.replace(
        trial, towers=1, devices=1, cross_tower_ops="AllReduce()"
    )


def _of_same_rows(trial: Trial) -> Trial:
    rows = trial.batch // trial.towers
    return dataclasses.replace(_of_same_batch(trial), batch=rows)


def over_hand(result: Result, results: Sequence[Result]) -> Interval | None:
    """The step over the hand-written one, of the same rounds where it has those."""
    step, paired = result.interval("step_s"), result.interval("over_hand")
    if paired is not None or step is None:
        return paired
    for other in results:
        hand = other.interval("hand_s")
        if hand and _one_step(other.trial) == _one_step(result.trial):
            return step.over(hand)
    return None


def _one_step(trial: Trial) -> tuple[Any, ...]:
    """What the hand-written step of a trial depends on."""
    repeats = (trial.micro_batches, trial.steps_per_call)
    return (trial.model, trial.devices, trial.batch, trial.dtype, *repeats)


class Results(list[Result], Shown):
    """The results of a sweep: a list, and a table where it is shown."""

    def tables(self, compared: Sequence[Comparison] = ()) -> tuple[Table, ...]:
        """What is shown: results, those without figures, and what `compare` found."""
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
            Table("Results", COLUMNS, tuple(rows_of(self))),
            Table("Without figures", ("status", "why", "trials"), tuple(without)),
            Table(
                "Compared",
                ("trial", "new over old step time", "verdict"),
                tuple(verdicts),
            ),
        )
        return found[:1] + tuple(table for table in found[1:] if table.rows)


def rows_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """The cells of the table, a row for each trial, under `COLUMNS`."""
    rows = []
    for result in results:
        step, rate = result.interval("step_s"), result.examples_per_s
        cells = [result.status, *["-"] * 4]
        if step is not None and rate is not None:
            over = _cell(over_hand(result, results), "{:.2f}")
            is_paired = over == "-" or "over_hand" in result.record
            cells = [
                _cell(step.scaled(1e3), "{:.3g}"),
                f"{rate.median:,.0f}",
                _cell(efficiency(result, results), "{:.2f}"),
                over if is_paired else f"*{over}*",
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
