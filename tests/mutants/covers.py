"""Which lines of towerjax each test runs, and how long it takes (Python 3.12).

What the processes of `tests/forked.py` run counts for the test that started them, also
where they are killed; programs that are started in another way are not looked at.
"""

import contextlib
import functools
import multiprocessing
import os
import pathlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from .runner import PRELOAD, ROOT, first_in_children

PACKAGE = f"{ROOT / 'towerjax'}{os.sep}"


class Covered(NamedTuple):
    """What one test that passes runs.

    Attributes:
      seconds: How long it takes.
      lines: Pairs of a file's path below the root and a line's number.
    """

    seconds: float
    lines: frozenset[tuple[str, int]]


def _watch(run: Callable[[str, int], object]) -> None:
    """Call a function once for each line of towerjax that this process runs."""
    monitor = sys.monitoring
    tool = sys.monitoring.COVERAGE_ID

    def start(code: Any, _: int) -> object:
        if code.co_filename.startswith(PACKAGE):
            monitor.set_local_events(tool, code, monitor.events.LINE)
        return monitor.DISABLE

    def line(code: Any, number: int) -> object:
        run(code.co_filename.removeprefix(f"{ROOT}{os.sep}"), number)
        return monitor.DISABLE

    monitor.use_tool_id(tool, "towerjax")
    monitor.register_callback(tool, monitor.events.PY_START, start)
    monitor.register_callback(tool, monitor.events.LINE, line)
    monitor.set_events(tool, monitor.events.PY_START)


def watch_into(path: str) -> None:
    """Write each line of towerjax that this process runs into a file, at once."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def run(name: str, number: int) -> None:
        with contextlib.suppress(OSError):  # a test may forbid to write
            os.write(file, f"{number} {name}\n".encode())

    _watch(run)


class Lines:
    """A plugin of pytest: the lines that run between a test's setup and its end.

    Attributes:
      tests: What each test that passed runs, by node id.
    """

    def __init__(self) -> None:
        self.tests: dict[str, Covered] = {}
        self._lines: set[tuple[str, int]] = set()
        self._passed: set[str] = set()
        self._of_children = tempfile.NamedTemporaryFile("r")
        _watch(lambda name, number: self._lines.add((name, number)))

    def pytest_collection_finish(self) -> None:
        first_in_children(functools.partial(watch_into, self._of_children.name))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self._lines = set()
        self._of_children.read()
        sys.monitoring.restart_events()
        start = time.monotonic()
        yield
        if item.nodeid in self._passed:
            seconds = time.monotonic() - start
            of_children = (line.split() for line in self._of_children)
            lines = {(name, int(number)) for number, name in of_children}
            self.tests[item.nodeid] = Covered(seconds, frozenset(self._lines | lines))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._passed.discard(report.nodeid)


def _child(file: str, answer: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugin = Lines()
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    pytest.main([*options, file], plugins=[plugin])
    answer.send(plugin.tests)
    answer.close()
    os._exit(0)


def record(files: Sequence[pathlib.Path], workers: int) -> dict[str, Covered]:
    """Run files of tests, each in a process of its own."""
    if sys.version_info < (3, 12):
        raise SystemExit("Which test runs a line is known by Python 3.12 and later.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.mutants.runner"])

    def run(file: pathlib.Path) -> dict[str, Covered]:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(str(file), theirs))
        process.start()
        theirs.close()
        try:
            return mine.recv()
        except EOFError:
            return {}
        finally:
            process.kill()
            process.join()

    found: dict[str, Covered] = {}
    with ThreadPoolExecutor(workers) as pool:
        for tests in pool.map(run, files):
            found |= tests
    return found


def kept(file: str | None, workers: int) -> dict[str, Covered]:
    """What a file keeps of an earlier run, or the suite is run."""
    if file and os.path.exists(file):
        with open(file, "rb") as opened:
            found = pickle.load(opened)
        return {test: Covered(*values) for test, values in found.items()}
    covers = record(sorted((ROOT / "tests").rglob("test_*.py")), workers)
    if file:
        with open(file, "wb") as opened:
            pickle.dump(
                {test: tuple(values) for test, values in covers.items()}, opened
            )
    return covers
