"""Eight CPU devices, no implicit broadcasting, warnings are errors."""

import collections
import gc
import importlib
import itertools
import os
import re
import signal
import sys

import jax
import pytest

import towerjax  # noqa: F401, before JAX looks for devices, as programs do

# A shell that starts the suite in the background has it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Where bytecode is not kept, each process compiles anew all that it imports of ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def compiled():
    """The names of what is compiled for the devices, from here on."""
    names = []

    def listen(name, seconds, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def pairs_of(item):
    """Each two of a case's values, of arguments that are given apart."""
    values = item.callspec.params
    given = [mark.args[0] for mark in item.iter_markers("parametrize")]
    given = [re.findall(r"\w+", names) if isinstance(names, str) else names
             for names in given]  # fmt: skip
    chosen = [tuple((name, id(values[name])) for name in names) for names in given]
    return set(itertools.combinations(chosen, 2))


def covering(cases):
    """Cases that together have each pair of two arguments' values that all have."""
    left, kept = set().union(*map(pairs_of, cases)), []
    while left:
        kept.append(max(cases, key=lambda case: len(pairs_of(case) & left)))
        left -= pairs_of(kept[-1])
    return kept


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out cases of tests marked ``pairwise``, mark some of ``few_fast`` slow.

    Cases that are named on the command line stay.
    """
    cases = collections.defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    left_out = set()
    if not any("::" in argument for argument in config.args):
        for of_one_test in cases.values():
            if of_one_test[0].get_closest_marker("pairwise"):
                left_out |= {*of_one_test} - {*covering(of_one_test)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    for of_one_test in cases.values():
        mark_slow([item for item in of_one_test if item not in left_out])


def mark_slow(cases):
    """Of a test marked ``few_fast(n)``, mark all cases slow but ``n`` of them."""
    cases = [item for item in cases if not item.get_closest_marker("slow")]
    mark = cases and cases[0].get_closest_marker("few_fast")
    if mark:
        kept = {i * len(cases) // mark.args[0] for i in range(mark.args[0])}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What is imported stays: looking through it again and again takes a twentieth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_terminal_summary(terminalreporter):
    """The original's cases: how many were run, passed, and have no meaning here."""
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
    for module in sorted(results):
        table = importlib.import_module(module).TABLE
        rows += table.counts(results[module])
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    for name, tested, passed, without in rows:
        terminalreporter.line(f"{name:<20} {tested:6}  {passed:6}  {without:15}")
