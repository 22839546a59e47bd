"""What does ``towerjax bench`` do? It runs a grid, and says what came out."""

import argparse
import dataclasses
from typing import Any

from towerjax.step.report.tables import as_text
from towerjax.tools.bench.grid import read_toml
from towerjax.tools.bench.results import compare, differences, read_results
from towerjax.tools.bench.sweep import sweep
from towerjax.tools.shell import NOT_SO, OK, add_command, show

_EXAMPLE = """\
example:
  towerjax bench 'models=["mlp", "cnn"]' 'towers=[1, 2]' 'batches=[128]' --out a.jsonl
  towerjax bench grid.toml --out new.jsonl --compare old.jsonl

grid.toml, of which each line may stand in the command as well:
  models = ["mlp", "mine:factory"]      # also cnn, transformer, embedding
  towers = [1, 2, 4, 8]
  devices = [2]                         # where left out, one a tower
  batches_per_tower = [32]              # or batches = [...], of all towers
  strategies = ["mirrored"]             # also mirrored_scan, mirrored_pmap, one_device
  cross_tower_ops = ["AllReduce()", "PinnedTree()"]
  dtypes = ["float32"]
  micro_batches = [1]
  steps_per_call = [1]
  peers = ["jit", "pmap"]               # or module:function of your own
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
    add = parser.add_argument
    add("grid", nargs="+", help="a TOML file, or lines of one: 'towers=[1, 2]'")
    add("--out", required=True, metavar="FILE", help="the results, as JSON lines")
    add("--compare", metavar="OLD", help="judge against the results of another file")
    add("--retry-failed", action="store_true", help="run again what failed before")
    add("--trial-timeout", type=float, default=1800.0, metavar="S", help="seconds")
    add("--quiet", action="store_true", help="no progress")


def _bench(options: argparse.Namespace) -> int:
    grid, timing = read_toml(*options.grid)
    old = read_results(options.compare) if options.compare else []
    results = sweep(
        grid,
        options.out,
        timing,
        retry_failed=options.retry_failed,
        trial_timeout_s=options.trial_timeout,
        progress=False if options.quiet or options.json else None,
    )
    compared = compare(old, results) if options.compare else []
    notes = differences(old, results)
    verdicts = [{**dataclasses.asdict(x), "verdict": x.verdict.value} for x in compared]
    fields = {
        "results": [result.record for result in results],
        "compared": verdicts,
        "differences": notes,
    }
    text = "\n".join([as_text(results.tables(compared)), *notes])
    show(options, text, fields)
    failed = any(result.status == "failed" for result in results)
    return NOT_SO if failed or any(c.is_worse for c in compared) else OK
