"""What can be done from a shell? The commands of ``towerjax``."""

from collections.abc import Sequence

from towerjax.bench.command import add_bench
from towerjax.cluster.command import add_launch
from towerjax.doctor.command import add_doctor
from towerjax.loop.command import add_train
from towerjax.report.command import add_plan, add_report
from towerjax.shell import Parser, finished
from towerjax.testing.command import add_audit
from towerjax.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a ``towerjax`` command.

    Args:
      arguments: What follows ``towerjax``; None takes this process' own.

    Returns:
      One of ``towerjax.shell.codes``, or the command's own.
    """
    parser = Parser(
        prog="towerjax",
        description="Replicated training with JAX. What a command takes:"
        " towerjax command --help",
    )
    parser.add_argument(
        "--version", action="version", version=f"towerjax {__version__}"
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error was raised"
    )
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    every = (
        add_train,
        add_launch,
        add_audit,
        add_report,
        add_plan,
        add_bench,
        add_doctor,
    )
    for add in every:
        add(commands)
    return finished(parser.parse_args(arguments))
