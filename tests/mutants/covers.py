"""Which lines of towerjax each test runs, and how long it takes (Python 3.12)."""

import multiprocessing
import os
import pathlib
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from .runner import PRELOAD, ROOT

PACKAGE = f"{ROOT / 'towerjax'}{os.sep}"


class Covered(NamedTuple):
    """What one test that passes runs.

    Attributes:
      seconds: How much of a core it takes.
      lines: Pairs of a file's path below the root and a line's number.
    """

    seconds: float
    lines: frozenset[tuple[str, int]]


class _Lines:
    """A plugin of pytest: the lines that run between a test's setup and its end."""

    def __init__(self) -> None:
        self.tests: dict[str, Covered] = {}
        self._lines: set[tuple[str, int]] = set()
        self._passed: set[str] = set()
        self._monitor = monitor = sys.monitoring
        events = monitor.events
        monitor.use_tool_id(monitor.COVERAGE_ID, "towerjax")
        monitor.register_callback(monitor.COVERAGE_ID, events.PY_START, self._start)
        monitor.register_callback(monitor.COVERAGE_ID, events.LINE, self._line)
        monitor.set_events(monitor.COVERAGE_ID, events.PY_START)

    def _start(self, code: Any, _: int) -> object:
        if code.co_filename.startswith(PACKAGE):
            events = self._monitor.events.LINE
            self._monitor.set_local_events(self._monitor.COVERAGE_ID, code, events)
        return self._monitor.DISABLE

    def _line(self, code: Any, line: int) -> object:
        self._lines.add((code.co_filename.removeprefix(f"{ROOT}{os.sep}"), line))
        return self._monitor.DISABLE

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self._lines = set()
        self._monitor.restart_events()
        start = time.process_time()
        yield
        if item.nodeid in self._passed:
            seconds = time.process_time() - start
            self.tests[item.nodeid] = Covered(seconds, frozenset(self._lines))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.failed:
            self._passed.discard(report.nodeid)


def _child(file: str, options: list[str], answer: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugin = _Lines()
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", *options]
    pytest.main([*options, file], plugins=[plugin])
    answer.send(plugin.tests)
    answer.close()
    os._exit(0)


def record(workers: int, options: list[str]) -> dict[str, Covered]:
    """Run the suite, each file in a process of its own.

    Args:
      workers: How many at a time.
      options: More options of pytest.

    Returns:
      What each test that passes runs, by node id.
    """
    if sys.version_info < (3, 12):
        raise SystemExit("Which test runs a line is known by Python 3.12 and later.")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.mutants.runner"])

    def run(file: pathlib.Path) -> dict[str, Covered]:
        mine, theirs = context.Pipe(duplex=False)
        args = (str(file.relative_to(ROOT)), options, theirs)
        process = context.Process(target=_child, args=args)
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
    files = sorted((ROOT / "tests").glob("test_*.py"))
    with ThreadPoolExecutor(workers) as pool:
        for tests in pool.map(run, files):
            found |= tests
    return found


def kept(file: str | None, workers: int) -> dict[str, Covered]:
    """What a file keeps of an earlier run, or the suite is run.

    Args:
      file: The file, which is written if it is not there, or None.
      workers: How many processes at a time.

    Returns:
      What each test runs.
    """
    if file and os.path.exists(file):
        with open(file, "rb") as opened:
            found = pickle.load(opened)
        return {test: Covered(*values) for test, values in found.items()}
    covers = record(workers, [])
    if file:
        with open(file, "wb") as opened:
            pickle.dump(
                {test: tuple(values) for test, values in covers.items()}, opened
            )
    return covers
