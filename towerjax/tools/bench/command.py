"""What does ``towerjax bench`` do? It runs a grid, and says what came out."""

import argparse
import dataclasses
import pathlib
import shlex
import sys
from typing import Any, get_args

from towerjax.tools.bench.compare import compare, differences
from towerjax.tools.bench.grid import PEERS, Grid, read_toml
from towerjax.tools.bench.plots import check_matplotlib
from towerjax.tools.bench.protocol import TimingProtocol
from towerjax.tools.bench.report import write_report
from towerjax.tools.bench.results import read_results
from towerjax.tools.bench.sweep import sweep
from towerjax.tools.bench.table import (
    COLUMNS,
    WITHOUT,
    comparison_rows,
    rich_table,
    rows_of,
    without_figures,
)
from towerjax.tools.shell import NOT_SO, OK, add_command, show

_OPS = "cross_tower_ops"

_EXAMPLE = """\
example:
  towerjax bench --models mlp,cnn --towers 1,2,4 --batches 128 --out runs/bench.jsonl
  towerjax bench grid.toml --out new.jsonl --compare old.jsonl --report runs/new

grid.toml:
  models = ["mlp", "mine:factory"]      # also cnn, resnet18, transformer, embedding
  towers = [1, 2, 4, 8]
  devices = [2]                         # where left out, one a tower
  batches_per_tower = [32]              # or batches = [...], of all towers
  strategies = ["mirrored"]             # also mirrored_scan, mirrored_pmap, one_device
  cross_tower_ops = ["AllReduce()", "PinnedTree()"]
  dtypes = ["float32"]
  micro_batches = [1]
  steps_per_call = [1]
  peers = ["jit", "pmap"]               # also keras, tensorflow, torch
  [protocol]
  rounds = 11
  seconds_per_round = 0.25

What --out has is not run again.

exit code: 0 if all trials ran, 1 if one failed or is slower than in --compare, 2 for
wrong arguments.
"""


def add_bench(commands: Any) -> None:
    """Add the command ``bench`` to those of ``towerjax``."""
    parser = add_command(
        commands,
        "bench",
        _bench,
        summary="time a grid of models, towers, devices and options",
        description="Time a grid of trials in turns with hand-written JAX.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("grid", nargs="?", metavar="grid.toml", help="what to measure")
    for kind, of_what in ((Grid, "the grid's"), (TimingProtocol, "the protocol's")):
        for field in dataclasses.fields(kind):
            metavar = "A,B" if kind is Grid else "X"
            metavar = "'A();B()'" if field.name == _OPS else metavar
            parser.add_argument(
                _flag(field.name), metavar=metavar, help=f"{of_what} {field.name}"
            )
    add = parser.add_argument
    add("--out", required=True, metavar="FILE", help="the results, as JSON lines")
    add("--report", metavar="FOLDER", help="write report.md and plots there")
    add("--compare", metavar="OLD", help="judge against the results of another file")
    add("--retry-failed", action="store_true", help="run again what failed before")
    add("--trial-timeout", type=float, default=1800.0, metavar="S", help="seconds")
    add("--quiet", action="store_true", help="no progress")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _bench(options: argparse.Namespace) -> int:
    grid, timing = _asked(options)
    old = read_results(options.compare) if options.compare else []
    if options.report:
        check_matplotlib()  # before hours of measuring
    results = sweep(
        grid,
        options.out,
        timing,
        retry_failed=options.retry_failed,
        trial_timeout_s=options.trial_timeout,
        progress=False if options.quiet or options.json else None,
    )
    compared = compare(old, results) if options.compare else []
    notes, page = differences(old, results), None
    if not options.json:
        _print(results, compared, notes)
    if options.report:
        command = shlex.join(["towerjax", *sys.argv[1:]])
        page = write_report(
            results, options.report, command=command, compared=compared, notes=notes
        )
    if options.json or page:
        show(options, f"Written: {page}", _fields(results, compared, notes, page))
    failed = any(result.status == "failed" for result in results)
    return NOT_SO if failed or any(c.is_worse for c in compared) else OK


def _fields(results: Any, compared: Any, notes: list[str], page: Any) -> dict[str, Any]:
    comparisons = [
        {**dataclasses.asdict(one), "verdict": one.verdict.value} for one in compared
    ]
    return {
        "results": [result.record for result in results],
        "compared": comparisons,
        "differences": notes,
        "report": None if page is None else str(page),
    }


def _print(results: Any, compared: Any, notes: list[str]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(rich_table(COLUMNS, rows_of(results)))
    if rows := without_figures(results):
        console.print(rich_table(WITHOUT, rows))
    if compared:
        for note in notes:
            console.print(note, highlight=False)
        head = ("trial", "new over old", "verdict")
        console.print(rich_table(head, comparison_rows(compared)))


def _asked(options: argparse.Namespace) -> tuple[Grid, TimingProtocol]:
    """The grid and timing of the file, with what the other arguments say instead."""
    given = vars(options)
    changes = {
        field.name: _list(field, given[field.name])
        for field in dataclasses.fields(Grid)
        if given[field.name] is not None
    }
    timing_changes = {
        field.name: _number(field.name, given[field.name], type(field.default))
        for field in dataclasses.fields(TimingProtocol)
        if given[field.name] is not None
    }
    if options.grid is not None:
        grid, timing = read_toml(pathlib.Path(options.grid))
        grid = dataclasses.replace(grid, **changes)
    elif "models" not in changes:
        raise ValueError(
            "Say what to measure: a grid.toml, or --models mlp --batches 64."
        )
    else:
        grid, timing = Grid(**changes), TimingProtocol()
    return grid, dataclasses.replace(timing, **timing_changes)


def _list(field: dataclasses.Field, text: str) -> tuple[Any, ...]:
    if field.name == "peers" and text == "all":
        return PEERS
    # An op may have several options, with commas between.
    parts = text.split(";" if field.name == _OPS else ",")
    (kind,) = get_args(field.type)
    return tuple(_number(field.name, x, int) if kind is int else x for x in parts)


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{_flag(name)}: {text!r} is not {what}.") from None
