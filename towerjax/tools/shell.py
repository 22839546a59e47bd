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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from towerjax.loop.writers import as_json
from towerjax.types.options import check_takes

OK = 0
FAULT = 1  # the command ran, and found a fault or a failed run
USAGE = 2  # wrong arguments, or an invalid value; nothing was done
NOT_STARTED = 126  # the system refused a file or a program
INTERRUPTED = 128 + 2  # Ctrl-C, as if SIGINT had ended the process
CLOSED = 128 + 13  # the reader of the output has gone, as if SIGPIPE ended this

Option: TypeAlias = tuple[str, dict[str, Any]]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """End the process with code 2."""
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def option(
    name: str, kind: Any, what: str, dest: str | None = None, **more: Any
) -> Option:
    """An argument of a command, of a type; or a flag that gives the value ``kind``."""
    if callable(kind):
        more["type"] = kind
    else:
        more |= {"action": "store_const", "const": kind}
    return name, {"help": what, **({"dest": dest} if dest else {}), **more}


def add_command(
    commands: Any, run: Callable[..., int], options: Sequence[Option]
) -> None:
    """Add a command that calls ``run``, whose docstring is its help.

    Options that are not given are not passed: their defaults are those of ``run``.
    """
    text = inspect.getdoc(run) or ""
    parser = commands.add_parser(
        run.__name__,
        help=text.partition("\n")[0],
        description=text.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    for name, settings in options:
        parser.add_argument(name, **settings)
    parser.set_defaults(run=run)


def read_toml(*sources: str) -> dict[str, Any]:
    """The keys of TOML files and of lines such as ``"towers=[1, 2]"``, in order."""
    found: dict[str, Any] = {}
    for source in sources:
        text = source if "=" in source else pathlib.Path(source).read_text()
        try:
            found |= tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{source}: {error}") from error
    return found


def show(text: str, fields: Mapping[str, Any], in_json: bool) -> None:
    """Print a result, as text or as one JSON object."""
    if in_json:
        text = json.dumps(as_json(fields), indent=2, allow_nan=False)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


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
        sys.stderr.write(f"towerjax {name}: interrupted\n")
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if traceback:
            raise
        sys.stderr.write(f"towerjax {name}: {error}\n")
        return USAGE if isinstance(error, ValueError) else NOT_STARTED
    finally:
        sys.path.remove("")


def call_named(name: str, *strategy: Any) -> Any:
    """The result of the named function, called with a strategy or nothing."""
    form = f"{name.rpartition(':')[2]}({'strategy' if strategy else ''})"
    if not callable(function := resolve(name)):
        raise ValueError(f"{name} is no function: {function!r}.")
    check_takes(form, function, *strategy)
    return function(*strategy)


def resolve(name: str) -> Any:
    """The object that ``module:name`` names."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name) or ".py:" in name:
        raise ValueError(f"{name!r} is not of the form module:name, as train:loss_fn.")
    try:
        return pkgutil.resolve_name(name)
    except AttributeError as error:
        raise ValueError(f"{name}: {error}.") from error
    except ModuleNotFoundError as error:
        if not f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses another
        raise ValueError(f"{name}: {error}; set PYTHONPATH.") from error
