"""The results of trials: intervals, a table, and comparisons with other results."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from towerjax.loop.writers import read_lines
from towerjax.tools.bench.protocol import Interval, Trial
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
    lines = read_lines(pathlib.Path(path), "trial", "a sweep")
    results = (Result.of(record) for record, _ in lines)
    return list({result.trial: result for result in results}.values())


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two results of one trial.

    Attributes:
      trial: The trial.
      verdict: ``"faster"`` or ``"slower"`` where the intervals do not overlap; else in
        words why neither is said.
      ratio: The new step time over the old one; its ends are as far apart as both
        intervals allow. None if one of them has no time.
    """

    trial: Trial
    verdict: str
    ratio: Interval | None = None

    @property
    def is_worse(self) -> bool:
        """Whether the new result is slower, or failed and did not before."""
        return self.verdict in ("slower", _NEWLY_FAILED)


_NEWLY_FAILED = "failed, and did not before"


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
      >>> found.verdict, found.ratio.median
      ('slower', 1.5)
    """
    before = {result.trial: result for result in old}
    after = {result.trial: result for result in new}
    return [
        _judge(trial, after.get(trial), before.get(trial)) for trial in after | before
    ]


def _judge(trial: Trial, new: Result | None, old: Result | None) -> Comparison:
    if new is None or old is None:
        which = "old" if new is None else "new"
        return Comparison(trial, f"only in the {which} results")
    after, before = new.interval("step_s"), old.interval("step_s")
    if after is None:
        verdict = "not ok, as before" if before is None else _NEWLY_FAILED
    elif before is None:
        verdict = "ok, and was not before"
    elif after.high < before.low:
        verdict = "faster"
    else:
        verdict = "slower" if after.low > before.high else "intervals overlap"
    return Comparison(trial, verdict, after.over(before) if after and before else None)


def differences(old: Sequence[Result], new: Sequence[Result]) -> list[str]:
    """Sentences on the differences in machine, timing and versions of two results."""
    lines = []
    for name in ("machine", "timing", "versions") if old and new else ():
        before, after = (x[0].record.get(name, {}) for x in (old, new))
        for key in dict.fromkeys([*before, *after]):
            was, now = before.get(key, "none"), after.get(key, "none")
            lines += [] if was == now else [f"{name}: {key} {was}, now {now}"]
    return lines


def efficiency(result: Result, results: Sequence[Result]) -> Interval | None:
    """Examples/s for each device, over those of the smallest comparable trial.

    Trials are comparable if they differ in ``T`` and ``D`` alone and have the same
    batch, or else the same batch for each tower. A trial of one tower, which reduces
    nothing, is comparable for each cross-tower op.
    """
    trial = result.trial

    def is_alike(other: Trial, *, rows: bool) -> bool:
        changes: dict[str, Any] = {"towers": trial.towers, "devices": trial.devices}
        if rows:
            changes["batch"] = other.batch // other.towers * trial.towers
        if other.towers == 1:
            changes["cross_tower_ops"] = trial.cross_tower_ops
        return dataclasses.replace(other, **changes) == trial

    for rows in (False, True):
        rates = {
            (other.trial.devices, other.trial.towers): other.examples_per_s
            for other in results
            if other.examples_per_s and is_alike(other.trial, rows=rows)
        }
        size = min(rates, default=None)
        if size and result.examples_per_s and size != (trial.devices, trial.towers):
            ratio = result.examples_per_s.over(rates[size])
            return ratio.times(size[0] / trial.devices)
    return None


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
        without = [
            (x.trial.describe(), x.status, " ".join(x.record["error"].split())[:400])
            for x in self
            if x.status != "ok"
        ]
        verdicts = [
            (c.trial.describe(), _cell(c.ratio, "{:.2f}"), c.verdict) for c in compared
        ]
        head = ("trial", "step ms", "examples/s", "efficiency", "over hand", "sending")
        rows = [self._row(x) for x in self if x.status != "not available"]
        compared_head = ("trial", "new over old step time", "verdict")
        found = (
            Table("Results", head, tuple(rows)),
            Table("Without figures", ("trial", "status", "why"), tuple(without)),
            Table("Compared", compared_head, tuple(verdicts)),
        )
        return found[:1] + tuple(table for table in found[1:] if table.rows)

    def _row(self, result: Result) -> tuple[str, ...]:
        name, rate = result.trial.describe(), result.examples_per_s
        step = result.interval("step_s")
        if step is None or rate is None:
            return name, result.status, *["-"] * 4
        over = _cell(over_hand(result, self), "{:.2f}")
        if over != "-" and "over_hand" not in result.record:
            over = f"*{over}*"  # not of the same rounds
        return (
            name,
            _cell(step.times(1e3), "{:.3g}"),
            f"{rate.median:,.0f}",
            _cell(efficiency(result, self), "{:.2f}"),
            over,
            _cell(result.interval("communication"), "{:.1%}"),
        )


def _cell(value: Interval | None, form: str) -> str:
    if value is None:
        return "-"
    ends = (form.format(x) for x in (value.median, value.low, value.high))
    return "{} [{}, {}]".format(*ends)
