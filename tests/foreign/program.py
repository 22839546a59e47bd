"""A public program: where it is from, and what is expected of it."""

import dataclasses
import importlib
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any, ClassVar

DEPENDS = "depends"
THE_SAME = "the same"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A program of programs.toml.

    Attributes:
      name: Of it here.
      expects: What is expected to be said of it, a word for each thing that is asked.
      repository: ``owner/name`` at GitHub; none for a package as pip installs it.
      commit: Of its sources, as many digits as tell it.
      needs: Packages that it needs, as pip takes them.
    """

    name: str
    expects: tuple[str, ...]
    repository: str = ""
    commit: str = ""
    needs: str = ""
    KIND: ClassVar[str]
    HEAD: ClassVar[tuple[str, ...]]

    def ask(self, folder: pathlib.Path) -> Any:
        """What towerjax says of it, as JSON has it; ``folder`` holds the checkouts."""
        raise NotImplementedError

    def says(self, told: Any) -> list[str]:
        """That in the words of ``expects``."""
        raise NotImplementedError

    def rows(self, told: Any) -> list[list[str]]:
        """That as rows of a table, whose head is `HEAD`."""
        raise NotImplementedError

    @property
    def checkout(self) -> str:
        """The name of the folder of its sources."""
        return self.repository.partition("/")[2]


def root_of(program: Program, folder: pathlib.Path) -> pathlib.Path:
    """The checkout of a program; one at another commit is refused."""
    root = folder / program.checkout
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    found = subprocess.check_output(command, text=True).strip()
    if not found.startswith(program.commit):
        raise ValueError(f"{root} is at {found}, not at {program.commit}.")
    return root


def function(folder: str, name: str) -> Callable[..., Any]:
    """The function ``module.name`` of a folder here."""
    module, _, attribute = name.partition(".")
    return getattr(
        importlib.import_module(f"tests.foreign.{folder}.{module}"), attribute
    )
