"""The commands of ``towerjax``; the docstring of each is its help."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towerjax.mesh.absent import Absent
from towerjax.mesh.cluster.launcher import launch as launch_processes
from towerjax.step.caller import Caller
from towerjax.tools import shell
from towerjax.tools.bench.protocol import read_toml
from towerjax.tools.bench.results import compare, differences, read_results
from towerjax.tools.bench.sweep import sweep
from towerjax.tools.shell import FAULT, OK, option
from towerjax.tools.testing import SplitError, assert_replicates
from towerjax.towers.strategies import Mirrored
from towerjax.types import Reduction
from towerjax.types.tables import as_text
from towerjax.types.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a ``towerjax`` command; return its exit code."""
    parser = shell.Parser(
        prog="towerjax",
        description="Replicated training with JAX. Arguments of a command:"
        " towerjax command --help",
    )
    version = f"towerjax {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error was raised"
    )
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    for run, options in _COMMANDS.items():
        shell.add_command(commands, run, options)
    return shell.run_parsed(parser.parse_args(arguments))


def launch(**options: Any) -> int:
    """Run a command in several local processes that form one job.

    The first that fails ends the others, and its exit code is the job's.

    Example:
      towerjax launch --processes 2 --devices-per-process 4 -- python train.py

    train.py calls towerjax.cluster.initialize() before it uses JAX.

      towerjax launch --processes 2 --restarts 5 --hang-timeout 60 -- python train.py

    exit code: 0 if all processes returned 0; 75 if the job is to be started again; else
    that of the first that failed.
    """
    return launch_processes(**options)


def audit(loss_fn: str, json: bool = False, **options: Any) -> int:
    """Check that a loss is the same on any number of towers.

    Several numbers of towers are compared with one tower, on one device. Parameters,
    batch and state are named values, or functions without arguments that make them.

    Example:
      towerjax audit train:loss_fn --params train:make_params --batch train:make_batch

    exit code: 0 if nothing depends on the split, 1 if something does, 2 for wrong
    arguments.
    """
    for name in {"params", "batch", "local", "extra"} & options.keys():
        options[name] = shell.resolve_value(options[name])
    if not callable(found := shell.resolve(loss_fn)):
        raise ValueError(f"{loss_fn} is no function: {found!r}.")
    try:
        report = assert_replicates(found, **options)
    except SplitError as error:
        findings = [dataclasses.asdict(finding) for finding in error.findings]
        shell.show(str(error), {"same": False, "findings": findings}, json)
        return FAULT
    shell.show(str(report), {"same": True, **dataclasses.asdict(report)}, json)
    return OK


def report(
    make_step: str,
    on: str | None = None,
    timed_calls: int = 0,
    json: bool = False,
) -> int:
    """Show what a compiled step sends, holds and waits for.

    Example:
      towerjax report train:make_step --timed-calls 10
      towerjax report train:make_step --on h200:8

    where make_step() returns (step, state, batch), and with --on make_step(strategy)
    returns (step, params, batch), of which only the shapes are used.

    exit code: 0 if all went well, 2 for wrong arguments.
    """
    given = (Mirrored(devices=_devices_of(on)),) if on else ()
    match shell.call_named(make_step, *given):
        case Caller() as step, state, batch:
            found = step.report(state, batch, timed_calls=timed_calls)
        case _:
            raise ValueError(
                f"{make_step} must be a function that returns (step, state, batch)."
            )
    shell.show(str(found), dataclasses.asdict(found), json)
    return OK


def _devices_of(text: str) -> Absent:
    """The absent devices of ``"h200:8"``, or of a TPU topology, ``"v5e:2x4"``."""
    if Absent.is_topology(text):
        return Absent(text)
    target, _, number = text.rpartition(":")
    if not (target and number.isdecimal()):
        name = target or text
        raise ValueError(f"--on {text!r} says not how many; write --on {name}:8.")
    return Absent(target, int(number))


def bench(
    grid: Sequence[str],
    out: str,
    compare_with: str | None = None,
    quiet: bool = False,
    json: bool = False,
    **options: Any,
) -> int:
    """Time a grid of trials, each in turns with hand-written JAX.

    Example:
      towerjax bench 'models=["mlp"]' 'towers=[1, 2]' 'batches=[128]' --out a.jsonl
      towerjax bench grid.toml --out new.jsonl --compare old.jsonl

    grid.toml, each line of which may be an argument in its place:
      models = ["mlp", "mine:factory"]  # also cnn, transformer, embedding
      towers = [1, 2, 4, 8]
      devices = [2]  # default: one a tower
      batches_per_tower = [32]  # or batches = [...], of all towers
      strategies = ["mirrored"]  # also mirrored_scan, mirrored_pmap, one_device
      cross_tower_ops = ["AllReduce()", "PinnedTree()"]
      dtypes = ["float32"]
      micro_batches = [1]
      steps_per_call = [1]
      peers = ["jit", "pmap"]  # or module:function of your own
      [protocol]
      rounds = 11
      seconds_per_round = 0.25

    Trials that --out has are not run again.

    exit code: 0 if all trials ran, 1 if one failed or is slower than in --compare, 2
    for wrong arguments.
    """
    trials, timing = read_toml(*grid)
    old = read_results(compare_with) if compare_with else []
    options["progress"] = False if quiet or json else None
    results = sweep(trials, out, timing, **options)
    compared = compare(old, results) if compare_with else []
    notes = differences(old, results)
    fields = {
        "results": [result.record for result in results],
        "compared": [dataclasses.asdict(found) for found in compared],
        "differences": notes,
    }
    shell.show("\n".join([as_text(results.tables(compared)), *notes]), fields, json)
    failed = any(result.status == "failed" for result in results)
    return FAULT if failed or any(c.is_worse for c in compared) else OK


_JSON = option("--json", True, "print one JSON object")
_COMMANDS = {
    launch: (
        option("--processes", int, "how many", required=True),
        option("--devices-per-process", int, "CPU devices of each; default: JAX's"),
        option("--port", int, "where process 0 listens; default: a free one"),
        option("--restarts", int, "restart after so many losses of a process"),
        option("--towers", int, "the program's, which the devices left must divide"),
        option("--grace-seconds", float, "SIGTERM to SIGKILL (default: 5)", "grace_s"),
        option("--hang-timeout", float, "seconds of no sign of life", "hang_timeout_s"),
        option("--step-timeout", float, "seconds without a step", "step_timeout_s"),
        option("--regrow-seconds", float, "to try the lost again (60)", "regrow_s"),
        option("command", str, "after --, with its arguments", nargs="+"),
    ),
    audit: (
        option("loss_fn", str, "module:function"),
        option("--params", str, "module:name of the parameters", required=True),
        option("--batch", str, "module:name of the batch", required=True),
        option("--local", str, "module:name of tower-local variables"),
        option("--extra", str, "module:name of the extra state"),
        option("--towers", shell.whole_numbers, "how many (default: 1,2,3,4,8)"),
        option("--rtol", float, "the largest relative difference (default: 1e-4)"),
        option("--loss-reduction", Reduction, "what a bare scalar means: sum or mean"),
        option("--in-order", False, "do not permute the rows", "permuted"),
        option("--no-padding", False, "only even splits, without padding", "padding"),
        _JSON,
    ),
    report: (
        option("make_step", str, "module:function"),
        option("--timed-calls", int, "time so many calls (default: none)"),
        option("--on", str, "devices that are not here: h200:8, a100:64, v5e:2x4 ..."),
        _JSON,
    ),
    bench: (
        option("grid", str, "a TOML file, or lines of one: 'towers=[1, 2]'", nargs="+"),
        option("--out", str, "a file of results, as JSON lines", required=True),
        option("--compare", str, "judge against results in this file", "compare_with"),
        option("--retry-failed", True, "run again what failed before"),
        option("--trial-timeout", float, "seconds (1800)", "trial_timeout_s"),
        option("--quiet", True, "no progress"),
        _JSON,
    ),
}
