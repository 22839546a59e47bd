"""What does ``towerjax audit`` do? It audits a loss function by its name."""

import argparse
import dataclasses
from typing import Any

from towerjax.tools.named import here_importable, made, named, whole_numbers
from towerjax.tools.shell import NOT_SO, OK, add_command, show
from towerjax.tools.testing.audit import assert_replicates
from towerjax.tools.testing.findings import SplitError
from towerjax.types import Reduction

_EXAMPLE = """\
example:
  towerjax audit train:loss_fn --params train:make_params --batch train:make_batch

exit code: 0 if nothing depends on the split, 1 if something does, 2 for wrong
arguments.
"""


def add_audit(commands: Any) -> None:
    """Add the command ``audit`` to those of ``towerjax``."""
    parser = add_command(
        commands,
        "audit",
        _audit,
        summary="does a loss function give the same on any number of towers?",
        description="Compare a loss function on several numbers of towers with one, on"
        " one device, and say what depends on the split.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("loss_fn", metavar="module:function")
    for name, what in (
        ("params", "the parameters"),
        ("batch", "the batch"),
        ("local", "tower-local variables"),
    ):
        parser.add_argument(
            f"--{name}",
            required=name != "local",
            metavar="module:name",
            help=f"{what}, or a function without arguments that makes them",
        )
    parser.add_argument(
        "--towers", default="1,2,3,4,8", metavar="N,N", help="default: %(default)s"
    )
    parser.add_argument("--rtol", type=float, metavar="R", help="default: 1e-4")
    parser.add_argument(
        "--loss-reduction", choices=("sum", "mean"), help="what a bare scalar means"
    )
    parser.add_argument(
        "--ignore-random", action="store_true", help="leave out what is random"
    )
    parser.add_argument(
        "--no-padding", action="store_true", help="only even splits, without padding"
    )


def _audit(options: argparse.Namespace) -> int:
    reduction = options.loss_reduction and Reduction(options.loss_reduction)
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
                rng="ignore" if options.ignore_random else None,
                rtol=options.rtol,
                loss_reduction=reduction,
                padding=not options.no_padding,
            )
        except SplitError as error:
            found = [dataclasses.asdict(finding) for finding in error.findings]
            show(options, str(error), {"same": False, "findings": found})
            return NOT_SO
    show(options, str(report), {"same": True, **dataclasses.asdict(report)})
    return OK
