"""What adapters need to call a program that nobody here wrote."""

import importlib.abc
import importlib.machinery
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

Made = tuple[Callable[..., Any], Sequence[Any]]
Devices = list[Any]  # of ``jax.Device``, which type checkers take for a variable


class Empty(mock.MagicMock):
    """Has any attribute, and does nothing."""

    __version__ = "4.9.9"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"unsafe": True})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for packages that a step does not use, if not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The spec of an empty module, for these packages."""
        if not self.names & {fullname, fullname.partition(".")[0]}:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        """A module that has any attribute."""
        return Empty(name=spec.name, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        """There is nothing to run."""


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Numbers that differ from row to row."""
    return jax.random.normal(jax.random.key(seed), shape)


def images(size: int = 8) -> tuple[jax.Array, jax.Array]:
    """Eight images, which differ from row to row, and labels of ten."""
    bright = 1 + jnp.arange(8.0)[:, None, None, None]
    return normal(8, size, size, 3) * bright, jnp.arange(8) % 10
