"""What do ``towerjax report`` and ``plan`` do? They print what Python gives."""

import argparse
import pathlib
import sys
from typing import Any

import jax

from towerjax.collectives.written import ops_of
from towerjax.step.compiled_step import CompiledStep
from towerjax.step.inference import InferenceStep
from towerjax.step.report.step_report import StepReport
from towerjax.step.report.tables import as_html
from towerjax.tools.named import (
    here_importable,
    made,
    named,
    whole_numbers,
    without_arguments,
)
from towerjax.tools.report.plan import plan
from towerjax.tools.report.plan_report import Plan
from towerjax.tools.shell import OK, add_command
from towerjax.types import Reduction

_REPORT = """\
example:
  towerjax report train:make_step --timed-calls 10

where make_step() returns (step, state, batch).

exit code: 0 if all went well, 2 for wrong arguments.
"""
_PLAN = """\
example:
  towerjax plan train:loss_fn --params train:make_params --batch train:make_batch \\
      --towers 1,8,64 --hardware H200

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
    _add_outputs(parser)


def add_plan(commands: Any) -> None:
    """Add the command ``plan`` to those of ``towerjax``."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        summary="how would a step do on other machines?",
        description="Trace a step, and say what it would need and take on more towers.",
        epilog=_PLAN,
        as_json=False,
    )
    parser.add_argument("loss_fn", metavar="module:function")
    for name, what in (("params", "parameters"), ("batch", "one tower's batch")):
        parser.add_argument(
            f"--{name}",
            required=True,
            metavar="module:name",
            help=f"the {what}, arrays or shapes, or a function that makes them, of"
            " which only shapes are asked",
        )
    _add_model(parser)
    _add_outputs(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """What the times depend on."""
    parser.add_argument(
        "--optimizer",
        metavar="module:name",
        help="an optax transformation, or a function that makes it (default: Adam)",
    )
    parser.add_argument(
        "--towers",
        default="1,8,64,512,4096",
        metavar="N,N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--hardware",
        default="H100",
        metavar="NAME",
        help="A100, H100, H200, 'TPU v5e', here (measured), or module:name of a"
        " tj.tools.Hardware (default: %(default)s)",
    )
    parser.add_argument(
        "--scaling",
        choices=("weak", "strong"),
        default="weak",
        help="strong: --batch is the global one (default: %(default)s)",
    )
    parser.add_argument("--micro-batches", type=int, default=1, metavar="A")
    parser.add_argument(
        "--cross-tower-ops",
        default="AllReduce()",
        metavar="OP",
        help="how sums travel, such as 'Packed(num_packs=2)' (default: %(default)s)",
    )
    parser.add_argument(
        "--local",
        metavar="module:name",
        help="tower-local variables, or a function that makes them",
    )
    parser.add_argument(
        "--loss-reduction", choices=("sum", "mean"), help="what a bare scalar means"
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    outputs = parser.add_mutually_exclusive_group()
    outputs.add_argument("--json", action="store_true", help="print one JSON object")
    outputs.add_argument("--html", metavar="FILE", help="write a page instead")


def _report(options: argparse.Namespace) -> int:
    with here_importable():
        found = made(options.make_step)
        kinds = CompiledStep | InferenceStep
        if not (
            isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], kinds)
        ):
            raise ValueError(
                f"{options.make_step} must be a function without arguments that returns"
                " (step, state, batch)."
            )
        step, state, batch = found
        report = step.report(state, batch, timed_calls=options.timed_calls)
    return _shown(report, options)


def _plan(options: argparse.Namespace) -> int:
    with here_importable():
        hardware: Any = options.hardware
        planned = plan(
            named(options.loss_fn),
            _shapes(options.params),
            _shapes(options.batch),
            towers=whole_numbers("--towers", options.towers),
            hardware=made(hardware) if ":" in hardware else hardware,
            optimizer=made(options.optimizer),
            scaling=options.scaling,
            cross_tower_ops=ops_of(options.cross_tower_ops),
            micro_batches=options.micro_batches,
            loss_reduction=options.loss_reduction and Reduction(options.loss_reduction),
            local=made(options.local),
        )
    return _shown(planned, options)


def _shapes(name: str) -> Any:
    """Of a function only the shapes are asked: a model that fits nowhere has them."""
    value = named(name)
    if not callable(value):
        return value
    return jax.eval_shape(without_arguments(name, value))


def _shown(found: StepReport | Plan, options: argparse.Namespace) -> int:
    if options.html is not None:
        page = f"<!doctype html><meta charset=utf-8>{as_html(found.tables())}\n"
        pathlib.Path(options.html).write_text(page, encoding="utf-8")
        return OK
    sys.stdout.write((found.to_json() if options.json else str(found)) + "\n")
    return OK
