"""What came out? A Markdown page, with its plots beside it."""

import os
import pathlib
from collections.abc import Sequence

from towerjax.tools.bench.compare import Comparison
from towerjax.tools.bench.plots import write_plots
from towerjax.tools.bench.protocol import TimingProtocol
from towerjax.tools.bench.results import Result
from towerjax.tools.bench.table import Results

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
    """The text of a report."""
    parts = ["# Benchmark report", *_about(results)]
    if command:
        parts.append(f"Made by\n\n```bash\n{command}\n```")
    after = {"Results": [_MEANING.strip(), *(f"![{t}]({name})" for name, t in plots)]}
    after["Compared"] = [f"* {note}" for note in notes]
    for table in Results(results).tables(compared):
        cells = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
        lines = [table.head, ["---"] * len(table.head), *cells]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts += [f"## {table.title}", text, *after.get(table.title, [])]
    return "\n\n".join(parts) + "\n"


def _about(results: Sequence[Result]) -> list[str]:
    first = results[0].record
    machine, versions = first["machine"], first["versions"]
    found = [r.record["device"] for r in results if "device" in r.record]
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
