"""What can be done from a shell? The commands of ``towerjax``."""

from collections.abc import Sequence

from towerjax.tools.bench.command import add_bench
from towerjax.tools.doctor.command import add_doctor
from towerjax.tools.launch_command import add_launch
from towerjax.tools.report.command import add_plan, add_report
from towerjax.tools.shell import Parser, finished
from towerjax.tools.testing.command import add_audit
from towerjax.types.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a ``towerjax`` command."""
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
    every = (add_launch, add_audit, add_report, add_plan, add_bench, add_doctor)
    for add in every:
        add(commands)
    return finished(parser.parse_args(arguments))
