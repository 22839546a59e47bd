"""What does ``module:name`` on a command line mean? Something in a module."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any


def named(name: str) -> Any:
    """What ``module:name`` names.

    Args:
      name: A module's name, a colon, and a name in it; dots go on.

    Returns:
      The value.

    Raises:
      ValueError: It is not of this form, or there is nothing of that name.

    Example:
      >>> named("math:pi")
      3.141592653589793
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"{name!r} is not of the form module:name, as train:loss_fn.")
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
