"""What came out? A table for the terminal, and a Markdown page with plots."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from towerjax.bench.compare import Comparison
from towerjax.bench.grid import Trial
from towerjax.bench.protocol import Interval, TimingProtocol
from towerjax.bench.results import Result

COLUMNS = ("trial", "step ms", "examples/s", "efficiency", "over hand", "sending")

_MEANING = """\
* **step**: milliseconds of one optimizer step, awaited.
* **efficiency**: examples/s for each device, over those of the trial with the fewest
  devices and towers, else the same; its batch is the same in all, or the same for each
  tower.
* **over hand**: the step over the hand-written `jit(shard_map(...))` step with
  `pmean(gradients)` on the same devices, one tower on each, in the same rounds. In
  italics, for a peer that is not JAX: over the hand-written step of another trial, in
  rounds of another process.
* **sending**: the share of a step that the reduction of the gradients takes when it is
  alone: a program that does only that, eight times in a row, divided by eight. What of
  it a step can hide behind computation is not measured.
"""


def efficiency(result: Result, results: Sequence[Result]) -> Interval | None:
    """Examples/s for each device, over those of the smallest trial of its kind.

    Of its kind are trials that differ in ``T`` and ``D`` alone and have the same
    batch, or else the same batch for each tower. One tower reduces nothing, so it
    stands for each cross-tower op.

    Args:
      result: Of one trial.
      results: Of all.

    Returns:
      The ratio; None where the trial is the smallest one, or has no time.
    """
    rate = result.examples_per_s
    for kind in (_of_same_batch, _of_same_rows):
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
        alike.sort(key=lambda other: (other.trial.devices, other.trial.towers))
        if rate and alike and alike[0].trial != result.trial:
            first = alike[0]
            assert first.examples_per_s is not None
            scale = first.trial.devices / result.trial.devices
            return rate.over(first.examples_per_s).scaled(scale)
    return None


def _of_same_batch(trial: Trial) -> Trial:
    alone = dataclasses.replace(trial, towers=1, devices=1)
    return dataclasses.replace(alone, cross_tower_ops="AllReduce()")


def _of_same_rows(trial: Trial) -> Trial:
    rows = trial.batch // trial.towers
    return dataclasses.replace(_of_same_batch(trial), batch=rows)


def over_hand(result: Result, results: Sequence[Result]) -> Interval | None:
    """The step over the hand-written one, of the same rounds where it has those.

    Args:
      result: Of one trial.
      results: Of all.

    Returns:
      The ratio; for a peer that is not JAX over the hand-written step of another
      trial of the same model, devices, batch and dtype; None where there is none.
    """
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


def rows_of(results: Sequence[Result]) -> list[list[str]]:
    """The cells of the table, a row for each trial, under `COLUMNS`.

    Args:
      results: Of all trials.

    Returns:
      Texts; for a trial without figures its status in the second column.
    """
    rows = []
    for result in results:
        step, rate = result.interval("step_s"), result.examples_per_s
        if step is None or rate is None:
            rows.append([result.trial.describe(), result.status, *["-"] * 4])
            continue
        over = _cell(over_hand(result, results), "{:.2f}")
        rows.append(
            [
                result.trial.describe(),
                _cell(step.scaled(1e3), "{:.3g}"),
                f"{rate.median:,.0f}",
                _cell(efficiency(result, results), "{:.2f}"),
                over if "over_hand" in result.record or over == "-" else f"*{over}*",
                _cell(result.interval("communication"), "{:.1%}"),
            ]
        )
    return rows


def _cell(value: Interval | None, form: str) -> str:
    if value is None:
        return "-"
    low, high = form.format(value.low), form.format(value.high)
    return f"{form.format(value.median)} [{low}, {high}]"


def rich_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table for the terminal.

    Args:
      head: Its columns.
      rows: Its cells.

    Returns:
      A ``rich.table.Table``.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(*head)
    for row in rows:
        table.add_row(*[Text(cell.strip("*")) for cell in row])
    return table


def comparison_rows(found: Sequence[Comparison]) -> list[list[str]]:
    """The cells of a comparison: trial, new over old, verdict.

    Args:
      found: What `compare` found.

    Returns:
      Texts.
    """
    return [
        [c.trial.describe(), _cell(c.ratio, "{:.2f}"), c.verdict.value] for c in found
    ]


def write_report(
    results: Sequence[Result],
    folder: str | os.PathLike[str],
    *,
    command: str | None = None,
    compared: Sequence[Comparison] = (),
    notes: Sequence[str] = (),
) -> pathlib.Path:
    """A page ``report.md`` with its plots beside it.

    Args:
      results: What `sweep` or `read_results` returned, at least one.
      folder: Where to; made if need be.
      command: What makes the same again.
      compared: What `compare` found.
      notes: Lines that stand above the comparison.

    Returns:
      The page's path.

    Raises:
      ValueError: There are no results, or no Matplotlib.
    """
    from towerjax.bench.plots import write_plots

    if not results:
        raise ValueError("A report needs results; there are none.")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(results, folder)
    page = folder / "report.md"
    page.write_text(markdown(results, plots, command, compared, notes))
    return page


def markdown(
    results: Sequence[Result],
    plots: Sequence[tuple[str, str]],
    command: str | None = None,
    compared: Sequence[Comparison] = (),
    notes: Sequence[str] = (),
) -> str:
    """The text of a report.

    Args:
      results: At least one.
      plots: File name and title of each plot.
      command: What makes the same again.
      compared: What `compare` found.
      notes: Lines above the comparison.

    Returns:
      Markdown.
    """
    parts = ["# Benchmark report", *_about(results)]
    if command:
        parts.append(f"Made by\n\n```bash\n{command}\n```")
    parts += ["## Results", _table(COLUMNS, rows_of(results)), _MEANING.strip()]
    parts += [f"![{title}]({name})" for name, title in plots]
    if failed := [result for result in results if result.status != "ok"]:
        rows = [
            [r.trial.describe(), r.status, _in_a_cell(r.record.get("error", ""))]
            for r in failed
        ]
        head = ("trial", "status", "why")
        parts += ["## Without figures", _table(head, rows)]
    if compared:
        parts += ["## Compared", *[f"* {note}" for note in notes]]
        head = ("trial", "new over old step time", "verdict")
        parts += [_table(head, comparison_rows(compared))]
    return "\n\n".join(parts) + "\n"


def _about(results: Sequence[Result]) -> list[str]:
    first = results[0].record
    machine, versions = first["machine"], first["versions"]
    found = [
        result.record[name]
        for name in ("device",)
        for result in results
        if name in result.record
    ]
    loads = [r.record["load"] for r in results if r.record.get("load") is not None]
    devices = ", ".join(dict.fromkeys(found)) or "unknown"
    text = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']};"
        f" devices: {devices}."
    )
    if loads:
        text += f" Load of the machine before each trial: {min(loads)} to {max(loads)}."
    if any(r.trial.devices > machine["cores"] for r in results) and "cpu" in devices:
        text += (
            f" CPU devices share its {machine['cores']} cores: more of them than cores"
            " cannot be faster, and show what N towers cost, not how they scale."
        )
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [text, f"Versions: {named}.", TimingProtocol(**first["timing"]).describe()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _in_a_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:400]
