"""What are the cells of a report? Times, ratios and shares, with their intervals."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towerjax.step.report.tables import Shown, Table
from towerjax.tools.bench.compare import Comparison
from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.protocol import Interval
from towerjax.tools.bench.results import Result

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
        """What is shown: results, those without figures, verdicts.

        Args:
          compared: What `compare` found.

        Returns:
          A table each, but for what is empty.
        """
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
