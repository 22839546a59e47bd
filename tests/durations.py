"""Seconds of a core that tests take: ``durations.json`` keeps them for a law.

A plugin of pytest, ``-p tests.durations``. It fails a run in which a fast test takes
far more than `MOST_S` and no mutant names it. With ``--keep-durations`` it writes the
table. Seconds of a core are hardly more on a machine that does something else, too.

The table has two parts. ``fast`` are functions of the fast part, with the seconds that
a case takes on the average; `tests/project/test_mutants.py` reads them. It keeps the
least that was measured: the first test of a process compiles for those after it.
``files`` are whole files by the clock; `tests/conftest.py` runs the longest first.
"""

import collections
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

TABLE = pathlib.Path(__file__).with_name("durations.json")
MOST_S = 0.1
"""Of a core, for a case of a fast test that no mutant names."""
FAR = 10
"""How much longer is told at once: other tests ran before, on another machine."""


ALL_SLOW = re.compile(r"^pytestmark = (?:\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def fast_tests(text: str) -> list[str]:
    """Return the tests of a file that are not marked slow, by its text alone."""
    found = []
    for block in () if ALL_SLOW.search(text) else text.split("\n\n\n"):
        decorators, _, rest = f"\n{block}".partition("\ndef test_")
        if rest and "\n@pytest.mark.slow\n" not in f"{decorators}\n":
            found.append(f"test_{rest.partition('(')[0]}")
    return found


class Took(NamedTuple):
    """What a case of a test took; its file goes by its stem."""

    file: str
    function: str
    is_slow: bool
    seconds: float
    clock_s: float


def table() -> dict[str, dict[str, Any]]:
    """Return the kept table."""
    return json.loads(TABLE.read_text())


def means(rows: list[Took]) -> dict[str, float]:
    """Return the seconds of a case, on the average, by functions of the fast part."""
    found = collections.defaultdict(list)
    for row in rows:
        if not row.is_slow:
            found[f"{row.file}::{row.function}"].append(row.seconds)
    return {name: sum(each) / len(each) for name, each in found.items()}


def named() -> set[str]:
    """Return the functions that mutants name, with their files' stems."""
    from tests.mutants.catalogue import MUTANTS

    ids = {test for mutant in MUTANTS for test in mutant.killed_by}
    parts = [id.partition("[")[0].split("::") for id in ids]
    return {f"{pathlib.Path(file).stem}::{name}" for file, name in parts}


def too_long(seconds: dict[str, float], most_s: float) -> dict[str, float]:
    """Return what takes longer, and no mutant names it."""
    known = named()
    return {x: s for x, s in seconds.items() if s > most_s and x not in known}


def keep(rows: list[Took]) -> None:
    """Write what the files that were run took, and their part of the suite.

    A function whose test was rewritten is measured anew once its entry is deleted.
    """
    kept = table() if TABLE.exists() else {"fast": {}, "files": {}}
    files: Any = collections.Counter()
    for row in rows:
        files[row.file, "slow" if row.is_slow else "fast"] += row.clock_s
    for (file, part), seconds in files.items():
        kept["files"].setdefault(file, {})[part] = round(seconds, 1)
    again = {file for file, part in files if part == "fast"}
    fast = {x: s for x, s in kept["fast"].items() if x.split("::")[0] not in again}
    for name, seconds in means(rows).items():
        rounded = round(seconds, 3)
        fast[name] = min(rounded, kept["fast"].get(name, rounded))
    there = {path.stem for path in TABLE.parent.rglob("test_*.py")}
    new = {
        "fast": {x: s for x, s in sorted(fast.items()) if x.split("::")[0] in there},
        "files": {x: s for x, s in sorted(kept["files"].items()) if x in there},
    }
    TABLE.write_text(json.dumps(new, indent=1) + "\n")


# The plugin.


def pytest_addoption(parser: Any) -> None:
    """Add the option ``--keep-durations``."""
    parser.addoption("--keep-durations", action="store_true", help="write the table")


def pytest_configure(config: Any) -> None:
    """Measure in each process that runs tests; gather in the one that ends last."""
    config.pluginmanager.register(_Measured(config), "tests.durations.measured")


def _seconds() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class _Measured:
    def __init__(self, config: Any) -> None:
        self._config = config
        self._rows: list[Took] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        start = _seconds()
        clock_s = time.monotonic()
        done = yield
        took = _seconds() - start, time.monotonic() - clock_s
        is_slow = item.get_closest_marker("slow") is not None
        name = item.name.partition("[")[0]
        self._rows.append(Took(item.path.stem, name, is_slow, *took))
        return done

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        rows = getattr(node, "workeroutput", {}).get("durations", [])
        self._rows += [Took(*row) for row in rows]

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: Any) -> Iterator[None]:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["durations"] = [tuple(x) for x in self._rows]
            return (yield)
        done = yield
        if too_long(means(self._rows), FAR * MOST_S):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return done

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if hasattr(self._config, "workeroutput"):
            return
        if self._config.getoption("--keep-durations"):
            keep(self._rows)
        total = sum(row.seconds for row in self._rows)
        terminalreporter.line(
            f"tests took {total:.0f} s of a core, all processes {_seconds():.0f} s"
        )
        for name, seconds in too_long(means(self._rows), FAR * MOST_S).items():
            terminalreporter.line(
                f"{name} is fast, takes {seconds:.2f} s of a core, and no mutant names"
                " it: mark it slow, or name it in a mutant"
            )
