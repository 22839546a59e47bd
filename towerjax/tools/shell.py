"""How does a command speak? One help, exit codes, JSON, a sentence for an error."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from towerjax.loop.records import as_json

OK = 0
NOT_SO = 1  # the command ran, and the answer is no: a finding, a failed run
WRONG = 2  # wrong arguments, or a value that cannot be; nothing was done
NOT_STARTED = 126  # the system refused a file or a program
INTERRUPTED = 128 + 2  # Ctrl-C, as if SIGINT had ended the process
CLOSED = 128 + 13  # whoever read the output is gone, as if SIGPIPE had ended it


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """End the process with code 2."""
        self.exit(WRONG, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(
    commands: Any, run: Callable[[argparse.Namespace], int], *, as_json: bool = True
) -> argparse.ArgumentParser:
    """The parser of a command, which a function does: its docstring is the help."""
    text = inspect.getdoc(run) or ""
    parser = commands.add_parser(
        run.__name__,
        help=text.partition("\n")[0],
        description=text.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if as_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of an option such as ``--towers 1,2,4``."""
    try:
        return tuple(int(x) for x in text.split(","))
    except ValueError:
        raise ValueError(
            f"{option} {text!r} must be whole numbers with commas between: 1,2,4."
        ) from None


def show(options: argparse.Namespace, text: str, fields: Mapping[str, Any]) -> None:
    """Print a result, as text or as one JSON object."""
    if options.json:
        text = json.dumps(as_json(fields), indent=2, allow_nan=False)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def finished(options: argparse.Namespace) -> int:
    """The exit code of a parsed command, which is run.

    A ``ValueError`` is what the user can mend, and an ``OSError`` what the system
    refused: both are said without where they were raised, unless ``options.traceback``.
    """
    try:
        return options.run(options)
    except BrokenPipeError:
        # Whoever read the output is gone; Python must not flush into it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except KeyboardInterrupt:
        sys.stderr.write(f"towerjax {options.name}: interrupted\n")
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if options.traceback:
            raise
        sys.stderr.write(f"towerjax {options.name}: {error}\n")
        return WRONG if isinstance(error, ValueError) else NOT_STARTED
