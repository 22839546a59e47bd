"""The original's portable cases, and which of our checks runs which.

`conformance/cases.json` holds them: `status` says whether the original's own tests
assert a case or its code implies it.
"""

import json
from pathlib import Path

import numpy as np

import towerjax as tj

FILE = Path(__file__).parent / "conformance" / "cases.json"
ALL_CASES = {case["id"]: case for case in json.loads(FILE.read_text())}


def is_under(id, prefix):
    """Is the case the prefix itself, or ``prefix.`` and more?"""
    return f"{id}.".startswith(f"{prefix}.")


class Table:
    """The cases of some prefixes: each has a check, or a reason to have none.

    A prefix may have several parts, such as ``rmf.split``. The cases in
    ``without_audit`` have a reason to be run with ``audit=False``: their numbers depend
    on the towers, as the original defined them. All others run with the defaults.
    """

    def __init__(self, prefixes, without_meaning, without_audit=None):
        self.prefixes = prefixes.split()
        self.without_meaning = without_meaning
        self.without_audit = without_audit or {}
        self.cases = {
            id: case for id, case in ALL_CASES.items() if self.prefixes_of(id)
        }
        self.functions = {}

    def prefixes_of(self, id):
        return [prefix for prefix in self.prefixes if is_under(id, prefix)]

    def checks(self, *ids):
        def register(fn):
            self.functions.update(dict.fromkeys(ids, fn))
            return fn

        return register

    def how(self, case):
        """The options with which a case is run."""
        return {"audit": False} if case["id"] in self.without_audit else {}

    def runs(self, towers_of):
        """Each case, and whether one device has all towers: every second time."""
        return [
            (id, number % 2 == 1 and towers_of(self.cases[id]) > 1)
            for number, id in enumerate(self.functions)
        ]

    def run(self, id, towers_of, one_device):
        case = self.cases[id]
        self.functions[id](case, mirrored(towers_of(case), one_device))

    def counts(self, results):
        """``(prefix, tested, passed, without meaning)`` of what was run."""
        for prefix in self.prefixes:
            tested = {id: out for id, out in results.items() if is_under(id, prefix)}
            passed = [id for id, out in tested.items() if set(out) == {"passed"}]
            without = [id for id in self.without_meaning if is_under(id, prefix)]
            yield prefix, len(tested), len(passed), len(without)

    def check_complete(self):
        """Every case of the file is run or has a reason, and not both."""
        found = [prefix for id in self.cases for prefix in self.prefixes_of(id)]
        assert set(found) == set(self.prefixes) and len(found) == len(self.cases)
        assert self.functions.keys() | self.without_meaning.keys() == self.cases.keys()
        assert not self.functions.keys() & self.without_meaning.keys()
        assert self.without_audit.keys() <= self.functions.keys()


def mirrored(towers, one_device=False):
    devices = 1 if one_device else towers
    return tj.tf1.MirroredStrategy(
        devices=[f"cpu:{i}" for i in range(devices)], towers=towers
    )


def assert_equal(actual, case, expected=None):
    """Within the file's `tol`; else to a few roundings of float32."""
    expected = case["expected"] if expected is None else expected
    tol = case.get("tol", 0)
    np.testing.assert_allclose(
        actual, expected, rtol=tol or 4 * np.finfo(np.float32).eps, atol=tol
    )
