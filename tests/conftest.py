"""Which tests are run, in which order, and what is told of them at the end."""

import collections
import gc
import importlib
import re
import signal
import sys

import durations
import pytest
from checkout import TESTS

# A shell that starts the suite in the background has it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Begin where tests run; the process that hands them out to others has no JAX."""
    if hasattr(config, "workerinput") or not getattr(config.option, "tx", None):
        gc.disable()  # until all files are imported, which takes a tenth less
        config.pluginmanager.import_plugin("in_process")


def is_fast_part(config):
    """Whether no slow test is asked for, so that none is made."""
    return config.option.markexpr == "not slow"


def pytest_ignore_collect(collection_path, config):
    """Import no file for the fast part of which all tests are slow."""
    if is_fast_part(config) and collection_path.match("test_*.py"):
        return not durations.fast_tests(collection_path.read_text()) or None
    return None


def pytest_pycollect_makeitem(collector, obj):
    """Make no cases of a slow test for the fast part."""
    marks = getattr(obj, "pytestmark", ())
    is_slow = isinstance(marks, list) and any(mark.name == "slow" for mark in marks)
    return [] if is_slow and is_fast_part(collector.config) else None


SAMPLED = (
    "ignore:(?s)not proved equal to one tower.*"
    "(A sample agreed|Another number of towers draws|Per-tower values may differ)"
)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked ``few_fast(n)``, mark all cases slow but ``n`` of them.

    Of the files of which a test is left, the longest stands first.
    """
    mark_slow(items)
    done = yield
    parts = {"slow" if x.get_closest_marker("slow") else "fast" for x in items}
    files = durations.table()["files"]
    seconds = {
        stem: sum(of.get(part, 0) for part in parts) for stem, of in files.items()
    }
    items.sort(key=lambda item: -seconds.get(item.path.stem, 0))
    return done


def mark_slow(items):
    """Mark what runs in the slow part, and what an audit's sample stands for."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            item.add_marker(pytest.mark.filterwarnings(SAMPLED))
        if not item.get_closest_marker("slow"):
            cases[item.nodeid.split("[")[0]].append(item)
    for of_one_test in cases.values():
        if mark := of_one_test[0].get_closest_marker("few_fast"):
            n = mark.args[0]
            kept = {i * len(of_one_test) // n for i in range(n)}
            for i, item in enumerate(of_one_test):
                if i not in kept:
                    item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter):
    """The original's cases: how many were run, passed, and have no meaning here."""
    if is_fast_part(terminalreporter.config):
        return  # of them it has few
    results = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            found = re.search(
                r"(test_conformance\w*).py::test_case\[([\w.]+)-", report.nodeid
            )
            if found and report.when == "call":
                module, id = found.groups()
                results.setdefault(module, {}).setdefault(id, []).append(outcome)
    if not results:
        return
    terminalreporter.section("conformance: the original's cases")
    terminalreporter.line(f"{'':20} tested  passed  without meaning")
    rows = []
    sys.path.insert(0, str(TESTS / "tf1"))  # this process has collected no test
    for module in sorted(results):
        table = importlib.import_module(module).TABLE
        rows += table.counts(results[module])
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    for name, tested, passed, without in rows:
        terminalreporter.line(f"{name:<20} {tested:6}  {passed:6}  {without:15}")
