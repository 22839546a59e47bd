"""What can be done from a shell? ``towerjax launch``, ``audit``, ``report`` ..."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from towerjax.bench.command import add_bench
from towerjax.cluster.launcher import launch
from towerjax.report.command import add_plan, add_report
from towerjax.testing.command import add_audit

_CLOSED = 128 + 13  # as if SIGPIPE had ended this process
_NOT_STARTED = 126
_WRONG = 2

_EXAMPLE = """\
example:
  towerjax launch --processes 2 --devices-per-process 4 -- python train.py --steps 100

train.py calls towerjax.cluster.initialize() before it uses JAX.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a ``towerjax`` command.

    Args:
      arguments: What follows ``towerjax``; None takes this process' own.

    Returns:
      0 if all went well; 2 for wrong arguments; else the command's own code.
    """
    parser = argparse.ArgumentParser(
        prog="towerjax",
        description="Replicated training with JAX. What a command takes:"
        " towerjax command --help",
    )
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    _add_launch(commands)
    add_audit(commands)
    add_report(commands)
    add_plan(commands)
    add_bench(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:
        # Whoever read the output is gone; Python must not flush into it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED
    except (ValueError, OSError) as error:
        sys.stderr.write(f"towerjax {options.name}: {error}\n")
        return _WRONG if isinstance(error, ValueError) else _NOT_STARTED


def _add_launch(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="run a command in several local processes that form one job",
        description="Run a command in several local processes that form one job. The"
        " first that fails ends the others, and its exit code is the job's.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    parser.set_defaults(run=_launch)


def _launch(options: argparse.Namespace) -> int:
    return launch(
        options.command,
        processes=options.processes,
        devices_per_process=options.devices_per_process,
        grace_s=options.grace_seconds,
        port=options.port,
    )
