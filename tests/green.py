"""Run again what reads something new: ``green.json`` keeps what was green, and of what.

A mutant, a small run of a benchmark and a slow test, with all its cases, each have a
digest of what they read. While the digest is the one of its last green run, `.ci/run`
leaves it out; ``.ci/run --all`` runs everything. Each green run writes its digests, and
a commit keeps them. A test that is marked ``reads`` says itself what each case reads.

It is a plugin of pytest, ``-p tests.green``, and ``python -m tests.green`` runs
benchmarks. With ``--all`` both run what has not changed, too.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
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
    """Skip tests whose digest is kept: of each, or of all cases of one together."""
    before = _kept()
    for name, cases in _cases_by_name(items).items():
        value = _digest_of(cases)
        is_kept = before.get(name) == value and not config.getoption("--all")
        why = f"{UNCHANGED}; green.json has its digest, {value}"
        for item in cases:
            item.user_properties.append(("green", f"{value} {len(cases)} {name}"))
            item.add_marker(pytest.mark.skipif(is_kept, reason=why))


def _cases_by_name(items: Iterable[Any]) -> dict[str, list[Any]]:
    """Tests, by the name under which their digest is kept."""
    found = collections.defaultdict[str, list[Any]](list)
    for item in items:
        if item.get_closest_marker("reads"):
            found[f"test {item.path.stem}::{item.name}"].append(item)
        else:
            name = f"test {item.path.stem}::{item.originalname}{_with_jax()}"
            found[name].append(item)
    return found


def _with_jax() -> str:
    """What names JAX and what is switched on in it, each with its own digests."""
    version = ".".join(metadata.version("jax").split(".")[:2])
    flags = [x for x in ("remat3", "custom_vjp3") if os.environ.get(f"JAX_{x.upper()}")]
    return ", ".join([f" with JAX {version}", *flags])


def _digest_of(cases: Sequence[Any]) -> str:
    """A digest of what the cases of a test read, and of which cases there are."""
    first = cases[0]
    path = first.path.relative_to(reads.ROOT).as_posix()
    mark = first.get_closest_marker("reads")
    arguments = first.callspec.params if hasattr(first, "callspec") else {}
    given = mark.kwargs["texts"](**arguments) if mark else reads.by_imports(first.path)
    return reads.digest(*reads.tests([f"{path}::{x.name}" for x in cases]), *given)


class _Passed:
    def __init__(self) -> None:
        self._left: dict[tuple[str, str], int] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        text = dict(report.user_properties).get("green", "")
        if not text:
            return
        value, cases, name = text.split(" ", 2)
        # A test that is skipped stays new: another machine may have what it needs.
        is_right = report.passed or hasattr(report, "wasxfail")
        if report.failed:
            self._failed.add(name)
        elif report.when == "call" and is_right:
            left = self._left.get((name, value), int(cases))
            self._left[name, value] = left - 1

    def pytest_sessionfinish(self) -> None:
        green = {name: value for (name, value), left in self._left.items() if not left}
        if green or self._failed:
            passed = green.keys() - self._failed
            keep({name: green[name] for name in passed}, self._failed)


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
