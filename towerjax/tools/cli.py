"""What can be done from a shell? The commands of ``towerjax``, and their help."""

import argparse
import dataclasses
import functools
import inspect
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, get_args

from towerjax.mesh.absent import Absent
from towerjax.mesh.cluster.launcher import launch as launch_processes
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.inference import InferenceStep
from towerjax.step.report.step_report import StepReport
from towerjax.tools.bench.grid import read_toml
from towerjax.tools.bench.results import compare, differences, read_results
from towerjax.tools.bench.sweep import sweep
from towerjax.tools.doctor.command import doctor
from towerjax.tools.report.plan import Plan
from towerjax.tools.report.plan import plan as plan_of
from towerjax.tools.shell import (
    NOT_SO,
    OK,
    Parser,
    add_command,
    called,
    finished,
    here_importable,
    made,
    named,
    show,
    whole_numbers,
)
from towerjax.tools.testing.audit import SplitError, assert_replicates
from towerjax.towers.strategies import Mirrored, StateLayout
from towerjax.types import Reduction
from towerjax.types.tables import as_html, as_text
from towerjax.types.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a ``towerjax`` command."""
    parser = Parser(
        prog="towerjax",
        description="Replicated training with JAX. What a command takes:"
        " towerjax command --help",
    )
    version = f"towerjax {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error was raised"
    )
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    for add_to in (_add_launch, _add_audit, _add_report, _add_plan, _add_bench):
        add_to(commands)
    add = add_command(commands, doctor).add_argument
    what = "what each device adds and receives (default: %(default)s)"
    add("--mebibytes", type=int, default=4, metavar="N", help=what)
    return finished(parser.parse_args(arguments))


def launch(options: argparse.Namespace) -> int:
    """Run a command in several local processes that form one job.

    The first that fails ends the others, and its exit code is the job's.

    Example:
      towerjax launch --processes 2 --devices-per-process 4 -- python train.py

    train.py calls towerjax.cluster.initialize() before it uses JAX.

      towerjax launch --processes 2 --restarts 5 --hang-timeout 60 -- python train.py

    exit code: 0 if all processes returned 0; 75 if the job is to be started again; else
    that of the first that failed.
    """
    names = inspect.signature(launch_processes).parameters
    return launch_processes(**{k: x for k, x in vars(options).items() if k in names})


def _add_launch(commands: Any) -> None:
    add = add_command(commands, launch, as_json=False).add_argument
    number = functools.partial(add, type=int, metavar="N")
    number("--processes", required=True, help="how many")
    what = "CPU devices of each (default: JAX's choice of devices)"
    number("--devices-per-process", help=what)
    number("--port", help="where process 0 listens (default: free)")
    what = "go on after so many losses of a process, in those that are left"
    number("--restarts", help=what)
    what = (
        "of the program: devices that are left must divide it (default: as many"
        " processes are left as divide --processes)"
    )
    number("--towers", help=what)

    def seconds(name: str, dest: str, default: float, what: str) -> None:
        what += " (default: %(default)s)"
        add(f"--{name}", dest=dest, type=float, default=default, metavar="S", help=what)

    what = "from SIGTERM to SIGKILL when the job ends early"
    seconds("grace-seconds", "grace_s", 5.0, what)
    what = "a process without a sign of life for so long is lost"
    seconds("hang-timeout", "hang_timeout_s", math.inf, what)
    what = "of those that do steps, where none does one for so long"
    seconds("step-timeout", "step_timeout_s", math.inf, what)
    what = "until a lost process is tried again"
    seconds("regrow-seconds", "regrow_s", 60.0, what)
    add("command", nargs="+", help="after --, with its arguments")


def audit(options: argparse.Namespace) -> int:
    """Does a loss function give the same on any number of towers?

    It is compared on several numbers of towers with one, on one device.

    Example:
      towerjax audit train:loss_fn --params train:make_params --batch train:make_batch

    exit code: 0 if nothing depends on the split, 1 if something does, 2 for wrong
    arguments.
    """
    reduction = options.loss_reduction
    with here_importable():
        loss_fn = named(options.loss_fn)
        if not callable(loss_fn):
            raise ValueError(f"{options.loss_fn} is no function: {loss_fn!r}.")
        try:
            report = assert_replicates(
                loss_fn,
                made(options.params),
                made(options.batch),
                whole_numbers("--towers", options.towers),
                local=made(options.local),
                rng=options.rng,
                rtol=options.rtol,
                loss_reduction=reduction and Reduction(reduction),
                padding=options.padding,
            )
        except SplitError as error:
            found = [dataclasses.asdict(finding) for finding in error.findings]
            show(options, str(error), {"same": False, "findings": found})
            return NOT_SO
    show(options, str(report), {"same": True, **dataclasses.asdict(report)})
    return OK


def _add_audit(commands: Any) -> None:
    add = add_command(commands, audit).add_argument
    add("loss_fn", metavar="module:function")
    for name, what in (
        ("params", "the parameters"),
        ("batch", "the batch"),
        ("local", "tower-local variables"),
    ):
        what += ", or a function without arguments that makes them"
        add(f"--{name}", required=name != "local", metavar="module:name", help=what)
    what, default = "default: %(default)s", "1,2,3,4,8"
    add("--towers", default=default, metavar="N,N", help=what)
    add("--rtol", type=float, metavar="R", help="default: 1e-4")
    what = "what a bare scalar means"
    add("--loss-reduction", choices=("sum", "mean"), help=what)
    what = "leave out what is random"
    add("--ignore-random", dest="rng", action="store_const", const="ignore", help=what)
    what = "only even splits, without padding"
    add("--no-padding", dest="padding", action="store_false", help=what)


def report(options: argparse.Namespace) -> int:
    """What does a compiled step send, compute, hold and wait for?

    Example:
      towerjax report train:make_step --timed-calls 10
      towerjax report train:make_step --on h200:8

    where make_step() returns (step, state, batch), and with --on make_step(strategy)
    returns (step, params, batch), of which only shapes are asked.

    exit code: 0 if all went well, 2 for wrong arguments.
    """
    with here_importable():
        given = (Mirrored(devices=_absent(options.on)),) if options.on else ()
        found = called(options.make_step, *given)
        kinds = CompiledStep | InferenceStep
        if not (
            isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], kinds)
        ):
            raise ValueError(
                f"{options.make_step} must be a function that returns (step, state,"
                " batch)."
            )
        step, state, batch = found
        return _shown(
            step.report(state, batch, timed_calls=options.timed_calls), options
        )


def _absent(text: str) -> Absent:
    """``"h200:8"``, or a topology of TPUs."""
    if Absent.is_topology(text):
        return Absent(text)
    target, colon, number = text.rpartition(":")
    if not colon:
        raise ValueError(f"--on {text!r} says not how many; write --on {text}:8.")
    return Absent(target, *whole_numbers("--on", number))


def _add_report(commands: Any) -> None:
    parser = add_command(commands, report, as_json=False)
    add = parser.add_argument
    add("make_step", metavar="module:function")
    what = "time so many calls (default: none)"
    add("--timed-calls", type=int, default=0, metavar="N", help=what)
    what = "compile for devices that are not here: h200:8, a100:64, v5e:2x4 ..."
    add("--on", metavar="TARGET", help=what)
    _add_outputs(parser)


def plan(options: argparse.Namespace) -> int:
    """What would a step need on devices that are not here?

    Example:
      towerjax plan train:make_step --on h200 --towers 1,8,64

    where make_step(strategy) returns (step, params, batch), of which only shapes are
    asked.

    exit code: 0 if all went well, 2 for wrong arguments.
    """
    states: Any = options.states.split(",")
    with here_importable():
        planned = plan_of(
            functools.partial(called, options.make_step),
            on=options.on,
            towers=whole_numbers("--towers", options.towers),
            states=states,
            largest_batch=options.largest_batch,
            flop_rate=options.flop_rate,
            bandwidth=options.bandwidth,
        )
    return _shown(planned, options)


def _add_plan(commands: Any) -> None:
    parser = add_command(commands, plan, as_json=False)
    add = parser.add_argument
    add("make_step", metavar="module:function")
    what = "a100, h100, h200, b200 or a TPU topology (default: %(default)s)"
    add("--on", default="h200", metavar="TARGET", help=what)
    what, default = "default: %(default)s", "1,8,64,512,4096"
    add("--towers", default=default, metavar="N,N", help=what)
    states, what = ",".join(get_args(StateLayout)), "how state lies"
    add(
        "--states", default=states, metavar="S,S", help=f"{what} (default: %(default)s)"
    )
    what = "search for what fits; takes long"
    add("--largest-batch", action="store_true", help=what)
    for name, what in (("flop-rate", "products"), ("bandwidth", "bytes it sends")):
        what = f"of a device's {what} a second at most, for a bound of its time"
        add(f"--{name}", type=float, metavar="X", help=what)
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--html", metavar="FILE", help="write a page instead")


def _shown(found: StepReport | Plan, options: argparse.Namespace) -> int:
    if options.html is not None:
        page = f"<!doctype html><meta charset=utf-8>{as_html(found.tables())}\n"
        pathlib.Path(options.html).write_text(page, encoding="utf-8")
        return OK
    sys.stdout.write((found.to_json() if options.json else str(found)) + "\n")
    return OK


def bench(options: argparse.Namespace) -> int:
    """Time a grid of trials in turns with hand-written JAX.

    Example:
      towerjax bench 'models=["mlp"]' 'towers=[1, 2]' 'batches=[128]' --out a.jsonl
      towerjax bench grid.toml --out new.jsonl --compare old.jsonl

    grid.toml, of which each line may stand in the command as well:
      models = ["mlp", "mine:factory"]  # also cnn, transformer, embedding
      towers = [1, 2, 4, 8]
      devices = [2]  # where left out, one a tower
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

    What --out has is not run again.

    exit code: 0 if all trials ran, 1 if one failed or is slower than in --compare, 2
    for wrong arguments.
    """
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


def _add_bench(commands: Any) -> None:
    add = add_command(commands, bench).add_argument
    add("grid", nargs="+", help="a TOML file, or lines of one: 'towers=[1, 2]'")
    add("--out", required=True, metavar="FILE", help="the results, as JSON lines")
    add("--compare", metavar="OLD", help="judge against the results of another file")
    add("--retry-failed", action="store_true", help="run again what failed before")
    add("--trial-timeout", type=float, default=1800.0, metavar="S", help="seconds")
    add("--quiet", action="store_true", help="no progress")
