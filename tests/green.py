"""Run again what reads something new: ``green.json`` keeps what was green, and of what.

A mutant, a small run of a benchmark, or a test that is marked ``reads`` has a digest of
what it reads. While the digest is the one of its last green run, `.ci/run` leaves it
out; ``.ci/run --all`` runs everything. Each green run writes its digests, and a commit
keeps them.

It is a plugin of pytest, ``-p tests.green``, and ``python -m tests.green`` runs
benchmarks. With ``--all`` both run what has not changed, too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from . import reads

KEPT = reads.TESTS / "green.json"
UNCHANGED = "what it reads is what it was when it passed; --all runs it"


def _kept() -> dict[str, str]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def changed(digests: Mapping[str, str]) -> list[str]:
    """Return the names that were not green with these digests."""
    before = _kept()
    return [name for name, value in digests.items() if before.get(name) != value]


def keep(green: Mapping[str, str], gone: Iterable[str] = ()) -> None:
    """Write digests of what was green, and forget names."""
    found = _kept() | dict(green)
    for name in gone:
        found.pop(name, None)
    KEPT.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def forgotten(kind: str, there: Iterable[str]) -> list[str]:
    """Return the names of a kind that are kept and are no longer there."""
    names = {*there}
    return [x for x in _kept() if x.startswith(f"{kind} ") and x not in names]


# The plugin of pytest.


def pytest_addoption(parser: Any) -> None:
    """Add the option ``--all``."""
    parser.addoption("--all", action="store_true", help="what has not changed, too")


def pytest_configure(config: Any) -> None:
    """Begin to note what passes, in the process that hears of all tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Passed(), "tests.green.passed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Skip tests that are marked ``reads`` and whose digest is kept."""
    found = {item: _of_test(item) for item in items if item.get_closest_marker("reads")}
    before = _kept()
    for item, (name, value) in found.items():
        item.user_properties.append(("green", f"{value} {name}"))
        if before.get(name) == value and not config.getoption("--all"):
            item.add_marker(pytest.mark.skip(reason=UNCHANGED))


def _of_test(item: Any) -> tuple[str, str]:
    texts = item.get_closest_marker("reads").kwargs["texts"]
    arguments = item.callspec.params if hasattr(item, "callspec") else {}
    given = texts(**arguments)
    path = item.path.relative_to(reads.ROOT).as_posix()
    own = reads.tests([f"{path}::{item.name}"])
    return f"test {item.path.stem}::{item.name}", reads.digest(*own, *given)


class _Passed:
    def __init__(self) -> None:
        self._green: dict[str, str] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        text = dict(report.user_properties).get("green", "")
        value, _, name = text.partition(" ")
        if name and report.failed:
            self._failed.add(name)
        elif name and report.passed and report.when == "call":
            self._green[name] = value

    def pytest_sessionfinish(self) -> None:
        if self._green or self._failed:
            keep(self._green, self._failed)


# Benchmarks.


def main() -> None:
    """Make a small run of each benchmark that has changed; stop where one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.green")
    parser.add_argument("benchmarks", nargs="+", metavar="BENCHMARK")
    parser.add_argument("--all", action="store_true", help="what has not changed, too")
    options = parser.parse_args()
    digests = {f"benchmark {x}": _of_benchmark(x) for x in options.benchmarks}
    todo = [*digests] if options.all else changed(digests)
    print(f"{len(todo)} of {len(digests)} benchmarks read something new", flush=True)
    for name in todo:
        print(f"\n== a small run of {name}; its figures are not judged", flush=True)
        module = f"benchmarks.{name.removeprefix('benchmark ')}"
        keep({}, [name])
        subprocess.run([sys.executable, "-m", module, "--small"], check=True)
        keep({name: digests[name]})


def _of_benchmark(name: str) -> str:
    texts = reads.files([reads.ROOT / "benchmarks" / f"{name}.py"])
    return reads.digest(*texts, *reads.package(*texts))


if __name__ == "__main__":
    main()
