"""What does ``module:name`` in a command mean? A value of the user's, imported."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any


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
    if not (module_name and colon and path):
        raise ValueError(f"{name!r} is not of the form module:name, as train:loss_fn.")
    if module_name.endswith(".py") or os.sep in module_name:
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
