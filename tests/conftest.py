"""Eight CPU devices, no implicit broadcasting, warnings are errors."""

import importlib
import re

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


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
