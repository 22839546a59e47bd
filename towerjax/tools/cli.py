"""The commands of ``towerjax``; the docstring of each is its help."""

import argparse
import dataclasses
import functools
import inspect
import math
import pathlib
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
from towerjax.tools.plans import Plan
from towerjax.tools.plans import plan as plan_of
from towerjax.tools.shell import (
    FAULT,
    OK,
    Parser,
    add_command,
    call_named,
    importing_from_here,
    resolve,
    resolve_value,
    run_parsed,
    show,
    whole_numbers,
)
from towerjax.tools.testing.audit import SplitError, assert_replicates
from towerjax.towers.strategies import Mirrored, StateLayout
from towerjax.types import Reduction
from towerjax.types.tables import as_html, as_text
from towerjax.types.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a ``towerjax`` command; return its exit code."""
    parser = Parser(
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
    for add_to in (_add_launch, _add_audit, _add_report, _add_plan, _add_bench):
        add_to(commands)
    add = add_command(commands, doctor).add_argument
    what = "what each device adds and receives (default: %(default)s)"
    add("--mebibytes", type=int, default=4, metavar="N", help=what)
    return run_parsed(parser.parse_args(arguments))


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
    add = add_command(commands, launch, has_json=False).add_argument
    number = functools.partial(add, type=int, metavar="N")
    number("--processes", required=True, help="how many")
    what = "CPU devices of each (default: JAX's choice of devices)"
    number("--devices-per-process", help=what)
    number("--port", help="where process 0 listens (default: free)")
    what = "restart after so many losses of a process, in those that are left"
    number("--restarts", help=what)
    what = (
        "the program's towers, which the devices left must divide (default: the"
        " processes left divide --processes)"
    )
    number("--towers", help=what)

    def seconds(name: str, dest: str, default: float, what: str) -> None:
        what += " (default: %(default)s)"
        add(f"--{name}", dest=dest, type=float, default=default, metavar="S", help=what)

    what = "from SIGTERM to SIGKILL when the job ends early"
    seconds("grace-seconds", "grace_s", 5.0, what)
    what = "a process without a sign of life for so long is lost"
    seconds("hang-timeout", "hang_timeout_s", math.inf, what)
    what = "the processes with the fewest steps are lost if none does one for so long"
    seconds("step-timeout", "step_timeout_s", math.inf, what)
    what = "until a lost process is tried again"
    seconds("regrow-seconds", "regrow_s", 60.0, what)
    add("command", nargs="+", help="after --, with its arguments")


def audit(options: argparse.Namespace) -> int:
    """Check that a loss is the same on any number of towers.

    Several numbers of towers are compared with one tower, on one device.

    Example:
      towerjax audit train:loss_fn --params train:make_params --batch train:make_batch

    exit code: 0 if nothing depends on the split, 1 if something does, 2 for wrong
    arguments.
    """
    reduction = options.loss_reduction
    with importing_from_here():
        loss_fn = resolve(options.loss_fn)
        if not callable(loss_fn):
            raise ValueError(f"{options.loss_fn} is no function: {loss_fn!r}.")
        try:
            report = assert_replicates(
                loss_fn,
                resolve_value(options.params),
                resolve_value(options.batch),
                whole_numbers("--towers", options.towers),
                local=resolve_value(options.local),
                extra=resolve_value(options.extra),
                rng=options.rng,
                rtol=options.rtol,
                loss_reduction=reduction and Reduction(reduction),
                padding=options.padding,
            )
        except SplitError as error:
            found = [dataclasses.asdict(finding) for finding in error.findings]
            show(options, str(error), {"same": False, "findings": found})
            return FAULT
    show(options, str(report), {"same": True, **dataclasses.asdict(report)})
    return OK


def _add_audit(commands: Any) -> None:
    add = add_command(commands, audit).add_argument
    add("loss_fn", metavar="module:function")
    for name, what in (
        ("params", "the parameters"),
        ("batch", "the batch"),
        ("local", "tower-local variables"),
        ("extra", "the extra state"),
    ):
        what += ", or a function without arguments that makes them"
        needed = name in ("params", "batch")
        add(f"--{name}", required=needed, metavar="module:name", help=what)
    what, default = "default: %(default)s", "1,2,3,4,8"
    add("--towers", default=default, metavar="N,N", help=what)
    add("--rtol", type=float, metavar="R", help="default: 1e-4")
    what = "what a bare scalar means"
    add("--loss-reduction", choices=("sum", "mean"), help=what)
    what = "leave out values that change with the random key"
    add("--ignore-random", dest="rng", action="store_const", const="ignore", help=what)
    what = "only even splits, without padding"
    add("--no-padding", dest="padding", action="store_false", help=what)


def report(options: argparse.Namespace) -> int:
    """Show what a compiled step sends, computes, holds and waits for.

    Example:
      towerjax report train:make_step --timed-calls 10
      towerjax report train:make_step --on h200:8

    where make_step() returns (step, state, batch), and with --on make_step(strategy)
    returns (step, params, batch), of which only the shapes are used.

    exit code: 0 if all went well, 2 for wrong arguments.
    """
    with importing_from_here():
        given = (Mirrored(devices=_devices_of(options.on)),) if options.on else ()
        found = call_named(options.make_step, *given)
        kinds = CompiledStep | InferenceStep
        if not (
            isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], kinds)
        ):
            raise ValueError(
                f"{options.make_step} must be a function that returns (step, state,"
                " batch)."
            )
        step, state, batch = found
        return _show_tables(
            step.report(state, batch, timed_calls=options.timed_calls), options
        )


def _devices_of(text: str) -> Absent:
    """The absent devices of ``"h200:8"``, or of a TPU topology, ``"v5e:2x4"``."""
    if Absent.is_topology(text):
        return Absent(text)
    target, colon, number = text.rpartition(":")
    if not colon:
        raise ValueError(f"--on {text!r} says not how many; write --on {text}:8.")
    return Absent(target, *whole_numbers("--on", number))


def _add_report(commands: Any) -> None:
    parser = add_command(commands, report, has_json=False)
    add = parser.add_argument
    add("make_step", metavar="module:function")
    what = "time so many calls (default: none)"
    add("--timed-calls", type=int, default=0, metavar="N", help=what)
    what = "compile for devices that are not here: h200:8, a100:64, v5e:2x4 ..."
    add("--on", metavar="TARGET", help=what)
    _add_outputs(parser)


def plan(options: argparse.Namespace) -> int:
    """Show what a step would need on devices that are not here.

    Example:
      towerjax plan train:make_step --on h200 --towers 1,8,64

    where make_step(strategy) returns (step, params, batch), of which only the shapes
    are used.

    exit code: 0 if all went well, 2 for wrong arguments.
    """
    states: Any = options.states.split(",")
    with importing_from_here():
        planned = plan_of(
            functools.partial(call_named, options.make_step),
            on=options.on,
            towers=whole_numbers("--towers", options.towers),
            states=states,
            largest_batch=options.largest_batch,
            flop_rate=options.flop_rate,
            bandwidth=options.bandwidth,
        )
    return _show_tables(planned, options)


def _add_plan(commands: Any) -> None:
    parser = add_command(commands, plan, has_json=False)
    add = parser.add_argument
    add("make_step", metavar="module:function")
    what = "a100, h100, h200, b200 or a TPU topology (default: %(default)s)"
    add("--on", default="h200", metavar="TARGET", help=what)
    what, default = "default: %(default)s", "1,8,64,512,4096"
    add("--towers", default=default, metavar="N,N", help=what)
    states = ",".join(get_args(StateLayout))
    what = "layouts of the state (default: %(default)s)"
    add("--states", default=states, metavar="S,S", help=what)
    what = "search for the largest batch that fits; takes long"
    add("--largest-batch", action="store_true", help=what)
    for name, what in (("flop-rate", "FLOPs"), ("bandwidth", "bytes sent")):
        what = f"the most {what} a second of a device, for a bound of the step's time"
        add(f"--{name}", type=float, metavar="X", help=what)
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--html", metavar="FILE", help="write a page instead")


def _show_tables(found: StepReport | Plan, options: argparse.Namespace) -> int:
    if options.html is not None:
        page = f"<!doctype html><meta charset=utf-8>{as_html(found.tables())}\n"
        pathlib.Path(options.html).write_text(page, encoding="utf-8")
        return OK
    show(options, str(found), dataclasses.asdict(found))
    return OK


def bench(options: argparse.Namespace) -> int:
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
    return FAULT if failed or any(c.is_worse for c in compared) else OK


def _add_bench(commands: Any) -> None:
    add = add_command(commands, bench).add_argument
    add("grid", nargs="+", help="a TOML file, or lines of one: 'towers=[1, 2]'")
    add("--out", required=True, metavar="FILE", help="the results, as JSON lines")
    add("--compare", metavar="OLD", help="judge against the results of another file")
    add("--retry-failed", action="store_true", help="run again what failed before")
    add("--trial-timeout", type=float, default=1800.0, metavar="S", help="seconds")
    add("--quiet", action="store_true", help="no progress")
