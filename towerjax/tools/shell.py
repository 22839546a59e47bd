"""What all commands share: help, exit codes, JSON, and objects by ``module:name``."""

import argparse
import inspect
import json
import os
import pathlib
import pkgutil
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from towerjax.loop.writers import as_json

OK = 0
FAULT = 1  # the command ran, and found a fault or a failed run
USAGE = 2  # wrong arguments, or an invalid value; nothing was done
NOT_STARTED = 126  # the system refused a file or a program
INTERRUPTED = 128 + 2  # Ctrl-C, as if SIGINT had ended the process
CLOSED = 128 + 13  # the reader of the output has gone, as if SIGPIPE ended this


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """End the process with code 2."""
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_command(commands: Any, run: Callable[..., int], options: Iterable[Any]) -> None:
    """Add a command that calls ``run``, whose docstring is its help.

    An option is ``(name, type, text)`` and more by name; ``--name=dest`` is passed as
    ``dest``, and a flag has its value in place of a type. Others are not passed.
    """
    text = inspect.getdoc(run) or ""
    parser = commands.add_parser(
        run.__name__,
        help=text.partition("\n")[0],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    for name, kind, what, *more in options:
        flag = {"action": "store_const", "const": kind}
        how = {"type": kind} if callable(kind) else flag
        name, _, dest = name.partition("=")
        how |= {"dest": dest} if dest else {}
        parser.add_argument(name, help=what, **how, **dict(*more))
    parser.set_defaults(run=run)


def read_toml(*sources: str) -> dict[str, Any]:
    """The keys of TOML files and of lines such as ``"towers=[1, 2]"``, in order."""
    settings: dict[str, Any] = {}
    for source in sources:
        text = source if "=" in source else pathlib.Path(source).read_text()
        try:
            settings |= tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{source}: {error}") from error
    return settings


def show(result: Any, fields: Mapping[str, Any], in_json: bool, code: int = OK) -> int:
    """Print a result, as text or as one JSON object; return the code."""
    text = json.dumps(as_json(fields), indent=2, allow_nan=False) if in_json else result
    print(text, flush=True)
    return code


def run_parsed(options: argparse.Namespace) -> int:
    """Run a parsed command; return its exit code.

    It can import modules of the current folder, as with ``python -m``. A ``ValueError``
    is a mistake of the user, an ``OSError`` a refusal of the system: both are printed
    without a traceback, unless ``options.traceback``.
    """
    given = vars(options)
    name, run, traceback = (given.pop(x) for x in ("name", "run", "traceback"))
    sys.path.insert(0, "")
    try:
        return run(**given)
    except BrokenPipeError:
        # The reader has gone: Python must not flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except KeyboardInterrupt:
        print(f"towerjax {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if traceback:
            raise
        print(f"towerjax {name}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ValueError) else NOT_STARTED
    finally:
        sys.path.remove("")


class NoSuchName(ValueError):
    """A module is there, and has no such name; or a name is mistyped."""


def resolve(name: str, example: str) -> Any:
    """The object that ``module:name`` names, such as the example."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name) or ".py:" in name:
        raise NoSuchName(f"{name!r} is not of the form module:name, as {example}.")
    try:
        return pkgutil.resolve_name(name)
    except AttributeError as error:
        raise NoSuchName(f"{name}: {error}.") from error
    except ModuleNotFoundError as error:
        if not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another
        raise ValueError(f"{name}: {error}; set PYTHONPATH.") from error
