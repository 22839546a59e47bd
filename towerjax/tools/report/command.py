"""What do ``towerjax report`` and ``plan`` do? They print what Python gives."""

import argparse
import functools
import pathlib
import sys
from typing import Any, get_args

from towerjax.mesh.absent import Absent
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.inference import InferenceStep
from towerjax.step.report.step_report import StepReport
from towerjax.step.report.tables import as_html
from towerjax.tools.named import called, here_importable, whole_numbers
from towerjax.tools.report.plan import Plan, plan
from towerjax.tools.shell import OK, add_command
from towerjax.towers.strategies import Mirrored, StateLayout

_REPORT = """\
example:
  towerjax report train:make_step --timed-calls 10
  towerjax report train:make_step --on h200:8

where make_step() returns (step, state, batch), and with --on make_step(strategy)
returns (step, params, batch), of which only shapes are asked.

exit code: 0 if all went well, 2 for wrong arguments.
"""
_PLAN = """\
example:
  towerjax plan train:make_step --on h200 --towers 1,8,64

where make_step(strategy) returns (step, params, batch), of which only shapes are asked.

exit code: 0 if all went well, 2 for wrong arguments.
"""


def add_report(commands: Any) -> None:
    """Add the command ``report`` to those of ``towerjax``."""
    parser = add_command(
        commands,
        "report",
        _report,
        summary="what did the compiler make of a step?",
        description="Compile a step, and say what it sends, computes, holds and waits"
        " for.",
        epilog=_REPORT,
        as_json=False,
    )
    parser.add_argument("make_step", metavar="module:function")
    parser.add_argument(
        "--timed-calls",
        type=int,
        default=0,
        metavar="N",
        help="time so many calls (default: none)",
    )
    parser.add_argument(
        "--on",
        metavar="TARGET",
        help="compile for devices that are not here: h200:8, a100:64, v5e:2x4 ...",
    )
    _add_outputs(parser)


def add_plan(commands: Any) -> None:
    """Add the command ``plan`` to those of ``towerjax``."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        summary="what would a step need on devices that are not here?",
        description="Compile a step for them, and say what it holds and sends there.",
        epilog=_PLAN,
        as_json=False,
    )
    parser.add_argument("make_step", metavar="module:function")
    parser.add_argument(
        "--on",
        default="h200",
        metavar="TARGET",
        help="a100, h100, h200, b200 or a TPU topology (default: %(default)s)",
    )
    parser.add_argument(
        "--towers",
        default="1,8,64,512,4096",
        metavar="N,N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--states",
        default=",".join(get_args(StateLayout)),
        metavar="S,S",
        help="how state lies (default: %(default)s)",
    )
    parser.add_argument(
        "--largest-batch", action="store_true", help="search for what fits; takes long"
    )
    for name, what in (("flop-rate", "products"), ("bandwidth", "bytes it sends")):
        parser.add_argument(
            f"--{name}",
            type=float,
            metavar="X",
            help=f"of a device's {what} a second at most, for a bound of its time",
        )
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    outputs = parser.add_mutually_exclusive_group()
    outputs.add_argument("--json", action="store_true", help="print one JSON object")
    outputs.add_argument("--html", metavar="FILE", help="write a page instead")


def _report(options: argparse.Namespace) -> int:
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
        report = step.report(state, batch, timed_calls=options.timed_calls)
    return _shown(report, options)


def _absent(text: str) -> Absent:
    """``"h200:8"``, or a topology of TPUs."""
    if Absent.is_topology(text):
        return Absent(text)
    target, colon, number = text.rpartition(":")
    if not colon:
        raise ValueError(f"--on {text!r} says not how many; write --on {text}:8.")
    return Absent(target, *whole_numbers("--on", number))


def _plan(options: argparse.Namespace) -> int:
    states: Any = options.states.split(",")
    with here_importable():
        planned = plan(
            functools.partial(called, options.make_step),
            on=options.on,
            towers=whole_numbers("--towers", options.towers),
            states=states,
            largest_batch=options.largest_batch,
            flop_rate=options.flop_rate,
            bandwidth=options.bandwidth,
        )
    return _shown(planned, options)


def _shown(found: StepReport | Plan, options: argparse.Namespace) -> int:
    if options.html is not None:
        page = f"<!doctype html><meta charset=utf-8>{as_html(found.tables())}\n"
        pathlib.Path(options.html).write_text(page, encoding="utf-8")
        return OK
    sys.stdout.write((found.to_json() if options.json else str(found)) + "\n")
    return OK
