"""What does ``towerjax launch`` do? It starts local processes as one job."""

import argparse
from typing import Any

from towerjax.mesh.cluster.launcher import launch
from towerjax.tools.shell import add_command

_EXAMPLE = """\
example:
  towerjax launch --processes 2 --devices-per-process 4 -- python train.py --steps 100

train.py calls towerjax.cluster.initialize() before it uses JAX.

exit code: 0 if all processes returned 0, else that of the first that failed.
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
    parser.add_argument("command", nargs="+", help="after --, with its arguments")


def _launch(options: argparse.Namespace) -> int:
    return launch(
        options.command,
        processes=options.processes,
        devices_per_process=options.devices_per_process,
        grace_s=options.grace_seconds,
        port=options.port,
    )
