"""What does ``towerjax launch`` do? It starts local processes as one job."""

import argparse
from typing import Any

from towerjax.mesh.cluster.launcher import launch
from towerjax.tools.shell import add_command

_EXAMPLE = """\
example:
  towerjax launch --processes 2 --devices-per-process 4 -- python train.py --steps 100

train.py calls towerjax.cluster.initialize() before it uses JAX.

  towerjax launch --processes 2 --restarts 5 --hang-timeout 60 -- python train.py

exit code: 0 if all processes returned 0; 75 if the job is to be started again; else
that of the first that failed.
"""


def add_launch(commands: Any) -> None:
    """Add the command ``launch`` to those of ``towerjax``."""
    parser = add_command(
        commands,
        "launch",
        _launch,
        summary="run a command in several local processes that form one job",
        description="Run a command in several local processes that form one job. The"
        " first that fails ends the others, and its exit code is the job's.",
        epilog=_EXAMPLE,
        as_json=False,
    )
    parser.add_argument(
        "--processes", type=int, required=True, metavar="N", help="how many"
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="CPU devices of each (default: JAX's choice of devices)",
    )
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="from SIGTERM to SIGKILL when the job ends early (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, metavar="P", help="where process 0 listens (default: free)"
    )
    _add_going_on(parser)
    parser.add_argument("command", nargs="+", help="after --, with its arguments")


def _add_going_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="go on after so many losses of a process, in those that are left",
    )
    parser.add_argument(
        "--towers",
        type=int,
        metavar="T",
        help="of the program: devices that are left must divide it (default: as many"
        " processes are left as divide --processes)",
    )
    for name, what in (
        ("--hang-timeout", "a process without a sign of life for so long is lost"),
        ("--step-timeout", "of those that do steps, where none does one for so long"),
    ):
        parser.add_argument(
            name,
            type=float,
            default=float("inf"),
            metavar="S",
            help=f"{what} (default: never)",
        )
    parser.add_argument(
        "--regrow-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="until a lost process is tried again (default: %(default)s)",
    )


def _launch(options: argparse.Namespace) -> int:
    return launch(
        options.command,
        processes=options.processes,
        devices_per_process=options.devices_per_process,
        grace_s=options.grace_seconds,
        port=options.port,
        restarts=options.restarts,
        towers=options.towers,
        hang_timeout_s=options.hang_timeout,
        step_timeout_s=options.step_timeout,
        regrow_s=options.regrow_seconds,
    )
