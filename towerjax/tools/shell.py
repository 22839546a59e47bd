"""How does a command speak? One help, exit codes, JSON; what module:name names."""

import argparse
import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
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


def made(name: str | None) -> Any:
    """A value, or what a function of that name makes; None where none is named."""
    value = None if name is None else named(name)
    return called(str(name)) if callable(value) else value


def called(name: str, *strategy: Any) -> Any:
    """What a function of that name makes, of a strategy or of nothing."""
    function = named(name)
    given = "with a strategy" if strategy else "without arguments"
    try:
        inspect.signature(function).bind(*strategy)
    except TypeError as error:
        raise ValueError(
            f"{name} is called {given} here: {error}. Name a function for that."
        ) from error
    return function(*strategy)


def named(name: str) -> Any:
    """What ``module:name`` names."""
    module_name, colon, path = name.partition(":")
    is_file = module_name.endswith(".py") or os.sep in module_name
    is_relative = module_name.startswith(".") and not is_file
    if not (module_name and colon and path) or is_relative:
        raise ValueError(f"{name!r} is not of the form module:name, as train:loss_fn.")
    if is_file:
        folder, file = os.path.split(module_name)
        where = f", started in {folder}" if folder.strip(".") else ""
        raise ValueError(
            f"{name} names a file; name its module:"
            f" {file.removesuffix('.py')}:{path}{where}."
        )
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another
        raise ValueError(
            f"{name}: there is no module {error.name!r} here. Say where with"
            " PYTHONPATH, or start in its folder."
        ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{name}: {module_name} has no {path!r}.")
        value = getattr(value, part)
    return value


@contextlib.contextmanager
def here_importable() -> Iterator[None]:
    """As for ``python -m``: modules of the current folder can be named."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
