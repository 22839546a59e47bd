"""Public programs as published and as written with towerjax, on 1, 2 and 4 devices.

A diff beside this file is applied to a copy of a checkout. Both programs run a few
steps in float64, on data that are made here: the same rows a step, whatever the
devices.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import ClassVar, TypeAlias

from tests.foreign.conversions.diffs import copies
from tests.foreign.program import DEPENDS, THE_SAME, Program, root_of

ROOT = pathlib.Path(__file__).parents[3]
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
DEVICES = (1, 2, 4)
Numbers: TypeAlias = dict[str, float]
Told: TypeAlias = dict[str, list[Numbers]]
"""``"before"`` and ``"after"``: what was printed on each of `DEVICES`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfConversion(Program):
    """A program, before its diff and after.

    Attributes:
      name: Of its diff, and of the module here that runs it.
      parts: Of the checkout, that are copied.
      towers: How many the conversion has.
      exact: Numbers which, converted, are those of one device as published.
    """

    parts: tuple[str, ...]
    towers: int
    exact: tuple[str, ...]
    KIND: ClassVar = "conversion"
    HEAD: ClassVar = (
        "program",
        "number",
        *(f"{when}, D={d}" for when in ("before", "after") for d in DEVICES),
        "apart before",
        "after",
    )

    def ask(self, folder: pathlib.Path) -> Told:
        """The numbers that it prints."""
        root = root_of(self, folder)
        with tempfile.TemporaryDirectory() as name:
            into = pathlib.Path(name)
            copies(self.name, self.parts, root, into)
            return {
                when: [numbers(self, into / when, d) for d in DEVICES]
                for when in ("before", "after")
            }

    def says(self, told: Told) -> list[str]:
        """Before and after: do numbers depend on the number of devices?"""
        before, after = told["before"], told["after"]
        published = {name: before[0][name] for name in self.exact}
        is_exact = all(apart([x, after[0][n]]) < 1e-6 for n, x in published.items())
        return [
            THE_SAME if is_same(before) else DEPENDS,
            THE_SAME if is_same(after) and is_exact else DEPENDS,
        ]

    def rows(self, told: Told) -> list[list[str]]:
        """A row for each number."""
        found = []
        for name in told["before"][0]:
            before, after = ([x[name] for x in told[when]] for when in told)
            shown = [f"{x:.7g}" for x in [*before, *after]]
            far = f"{apart(before):.1e}", f"{apart(after):.0e}"
            found.append([self.checkout, name, *shown, *far])
        return found


def is_same(runs: list[Numbers]) -> bool:
    """Are the numbers the same on any devices?"""
    return all(apart([run[name] for run in runs]) < 1e-6 for name in runs[0])


def apart(values: list[float]) -> float:
    """How far numbers are from the first, relative to it."""
    return max(abs(x - values[0]) for x in values) / abs(values[0])


def numbers(program: OfConversion, folder: pathlib.Path, devices: int) -> Numbers:
    """What the program prints last, in a process of its own."""
    towers = program.towers if folder.name == "after" else 0
    module = f"tests.foreign.conversions.{program.name}"
    done = subprocess.run(
        [sys.executable, "-m", module, str(devices), str(towers)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": QUICK},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{program.name}, {devices} devices: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
