"""The score of the suite is itself tested: what is killed, and what only seems so."""

import dataclasses
import re
import sys

import durations
import numpy as np
import pytest
from mutants import runner
from mutants.catalogue import MUTANTS, REGISTRY
from mutants.covers import Covered, record
from mutants.equivalent import SAME
from mutants.generated import (
    OF_DEFAULTS,
    all_mutants,
    changes_of,
    rounds_of,
    run_rounds,
    sample,
)
from mutants.mutant import Mutant, MutantError, apply
from mutants.runner import ROOT, Job, jobs_of, run_all

import towerjax as tj
from towerjax.collectives import ops, reduce
from towerjax.prover.replication import analysis
from towerjax.towers.strategies import OneDevice
from towerjax.towers.tower import Tower

PACK_SIZES = "towerjax.collectives.ops:pack_sizes"
CUT = "towerjax.collectives.ops:split_into_packs"
REST = "[total - size * (num_packs - 1)]"

# What is changed, in which function, and what the score says of it.
CASES = {
    "killed": (PACK_SIZES, REST, "[size]", "test_rest"),
    "killed by an error of ours": (
        PACK_SIZES, "size = total // num_packs",
        "packed = Packed(num_packs=-1)\n    size = 1", "test_rest",
    ),
    "survived": (PACK_SIZES, REST, f"{REST} ", "test_rest"),
    "not live: never called": (CUT, "if end > start", "if False", "test_rest"),
    "not live: another branch": (
        "towerjax.collectives.ops:AllReduce.__post_init__",
        'raise ValueError(\n            f"{self!r}: num',
        'raise TypeError(\n            f"{self!r}: num',
        "test_positive",
    ),
    "killed in a child": (PACK_SIZES, REST, "[size]", "test_in_a_child"),
    "survived in a child": (PACK_SIZES, REST, f"{REST} ", "test_in_a_child"),
    "broken: it crashes": (PACK_SIZES, REST, "[total.size]", "test_rest"),
    "broken: the test crashes": (PACK_SIZES, REST, "[]", "test_last"),
    "broken: no such text": (PACK_SIZES, "no such text", "", "test_rest"),
    "broken: no such function": (f"{PACK_SIZES}s", REST, "", "test_rest"),
    "broken: no Python": (PACK_SIZES, REST, "[", "test_rest"),
    "broken: no such test": (PACK_SIZES, REST, "[size]", "test_gone"),
}  # fmt: skip


TINY = """
import forked
from towerjax.collectives.ops import AllReduce, Packed, pack_sizes

forked.PRELOAD = ["towerjax"]  # no more than is needed here

def test_rest():
    assert pack_sizes(10, 3) == [3, 3, 4]

def test_last():
    assert pack_sizes(10, 1)[0] == 10

def test_positive():
    assert Packed(1) == AllReduce(num_packs=1)

def test_wrong():
    assert pack_sizes(10, 3) == [4, 3, 3]

def test_in_a_child():
    assert forked.called(pack_sizes, 10, 3) == [3, 3, 4]
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("scored") / "test_tiny.py"
    file.write_text(TINY)
    jobs = [
        Job(name, (f"{file}::{test}",), Mutant(name, "", where, old, new, ()))
        for name, (where, old, new, test) in CASES.items()
    ]
    for name in ("test_rest", "test_wrong"):
        jobs.append(Job(name, (f"{file}::{name}",), None))
    seen = []
    found = run_all(jobs, 2, lambda job, result: seen.append(result))
    assert len(seen) == len(jobs)
    return dict(zip([job.name for job in jobs], found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of_a_mutant(results, name):
    outcome = re.match("killed|survived|not live|broken", name)[0]
    assert results[name].outcome == outcome, results[name]
    assert results[name].is_good == (outcome == "killed")
    assert results[name].detail


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring")
def test_lines_that_a_child_runs_are_of_the_test_that_started_it(tmp_path):
    (tmp_path / "test_tiny.py").write_text(TINY)
    lines = {
        test.rpartition("::")[2]: [number for _, number in sorted(covered.lines)]
        for test, covered in record([tmp_path / "test_tiny.py"], 1).items()
    }
    first = ops.pack_sizes.__code__.co_firstlineno
    assert first < lines["test_rest"][0] < lines["test_rest"][-1] < first + 30
    assert lines["test_in_a_child"] == lines["test_rest"] != lines["test_positive"]
    assert "test_wrong" not in lines


@pytest.mark.slow
def test_without_a_mutant_the_tests_pass(results):
    assert results["test_rest"].outcome == "passed"
    assert results["test_wrong"].outcome == "failed"
    assert "test_wrong: AssertionError" in results["test_wrong"].detail


def mutant(where, old, new):
    return Mutant("a", "", f"towerjax.{where}", old, new, ())


def test_the_original_is_replaced_wherever_it_is_looked_up():
    originals = (reduce.add_pairwise, analysis._RULES["cond"], vars(Tower)["rng"])
    rng = "towers.tower:Tower.rng"
    mutants = [
        mutant("collectives.reduce:add_pairwise", "return rows[0]", "return 7"),
        mutant("prover.replication.analysis:_cond", "ins[1:]", "ins[0:]"),
        mutant(rng, "return key", "return None"),
    ]
    for one in mutants[:2]:
        with pytest.MonkeyPatch.context() as patch:
            apply(one, patch, lambda: None)
            assert reduce.add_pairwise is ops.add_pairwise
            assert analysis._RULES["cond"] is analysis._cond
            held = (reduce.add_pairwise, analysis._cond, vars(Tower)["rng"])
            assert sum(x is not y for x, y in zip(held, originals, strict=True)) == 1
    # Of two places that have the text no one is chosen.
    with pytest.MonkeyPatch.context() as patch:
        with pytest.raises(MutantError, match="2 ti"):
            apply(mutant(rng, "return", ""), patch, print)
    assert (reduce.add_pairwise, analysis._cond, vars(Tower)["rng"]) == originals
    place = "tf1.reduce:map_elements"
    inner = tj.tf1.MirroredStrategy.map
    with pytest.MonkeyPatch.context() as patch:
        apply(mutant(place, "if not elements", "if True"), patch, print)
        with pytest.raises(ValueError, match="got no elements"):
            tj.tf1.MirroredStrategy(towers=2).map(np.sin, [1.0])
    assert tj.tf1.MirroredStrategy.map is inner
    # A decorator that registers the function has been undone, too.
    assert analysis._RULES["cond"] is analysis._cond
    assert not hasattr(ops, "_mutant_is_live_")


def test_a_statement_is_counted_where_it_stands():
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        sizes = mutant("collectives.ops:pack_sizes", REST, "[size]")
        apply(sizes, patch, lambda: counts.append(1))
        assert ops.pack_sizes(10, 3) == [3, 3, 3]
        assert ops.pack_sizes(5, 1) == [5]
    assert len(counts) == 2 and ops.pack_sizes(10, 3) == [3, 3, 4]
    cached = "towers.strategies:OneDevice.placement"
    with pytest.MonkeyPatch.context() as patch:
        apply(mutant(cached, "(names, 1", "(names, 2"), patch, print)
        assert OneDevice().placement.num_towers == 2


def test_the_catalogue_has_the_registry_and_more():
    ids = [mutant.id for mutant in MUTANTS]
    assert len(set(ids)) == len(ids)
    assert [x.id for x in REGISTRY] == [f"B{i:02}" for i in range(1, 41)]
    assert all(x.killed_by and x.old != x.new for x in MUTANTS)
    plain = [job for job in jobs_of(MUTANTS) if job.mutant is None]
    assert {test for job in plain for test in job.tests} == {
        test for mutant in MUTANTS for test in mutant.killed_by
    }


@pytest.mark.slow
def test_each_mutant_of_the_catalogue_can_be_made():
    for mutant in MUTANTS:
        with pytest.MonkeyPatch.context() as patch:
            apply(mutant, patch, lambda: None)


def test_each_test_that_the_catalogue_names_is_there():
    tests = {test.partition("[")[0] for x in MUTANTS for test in x.killed_by}
    for file, _, name in (test.partition("::") for test in tests):
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), (file, name)


FUNCTION = """
def chosen(x, least=2, *, deep=False):
    "Not a constant that is changed: 3."
    if x < least and x is not None:
        raise ValueError(f"{x} is below {least + 1}")
    found.seen = True
    if found is None:
        raise NotImplementedError
    found.add(sorted(x, key=len), strict=True)
    count: "2" = 1
    count += 1
    return count
"""


def test_what_is_generated_of_a_function():
    found = {}
    for kind, old, new in changes_of(FUNCTION):
        found.setdefault(kind, []).append((old, new))
    assert {kind: sorted(changes) for kind, changes in found.items()} == {
        "constant": [("1", "2"), ("1", "2"), ("2", "3")]
        + [("False", "True"), ("True", "False")],
        "flipped": [
            ("found is None", "found is not None"),
            ("x < least", "x <= least"),
            ("x < least and x is not None", "(x < least or x is not None)"),
            ("x is not None", "x is None"),
        ],
        "deleted": [
            ("count += 1", "pass"),
            ("found.add(sorted(x, key=len), strict=True)", "pass"),
            ("found.seen = True", "pass"),
            ('raise ValueError(f"{x} is below {least + 1}")', "pass"),
        ],
        "dropped": [("sorted(x, key=len)", "sorted(x)")],
    }


@pytest.mark.slow
def test_generated_mutants_can_be_made_and_run_what_covers_their_line():
    mutants = all_mutants("towerjax/collectives")
    assert sample(mutants, 5, 1) == sample(mutants, 5, 1) != sample(mutants, 5, 2)
    for mutant in sample(mutants, 20, 0):
        with pytest.MonkeyPatch.context() as patch:
            apply(mutant, patch, lambda: None)
    file, *_, first, last = mutant.killed_by
    here = {(file, int(first))}
    there = {(file, int(last) + 1)}

    def lines(number):
        return frozenset(here | {(file, -i) for i in range(number)})

    covers = {f"a.py::{i}": Covered(1, lines(i)) for i in range(9, -1, -1)}
    covers["b.py::x"] = Covered(0, frozenset(there))
    assert rounds_of(mutant, {"b.py::x": covers["b.py::x"]}) == []
    [job] = rounds_of(mutant, covers)
    assert job.tests == tuple(f"a.py::{i}" for i in range(10))
    many = {f"a.py::{i:02}": Covered(25, lines(i)) for i in range(56)}
    assert [len(job.tests) for job in rounds_of(mutant, many)] == [10, 40, 2, 2, 2]
    # Of a default, one looks at the signature at last.
    default = dataclasses.replace(mutant, killed_by=(file, "0", first, last))
    assert rounds_of(default, covers)[0].tests == (*job.tests, OF_DEFAULTS)


def test_the_lines_of_a_mutant_are_those_that_run_with_it():
    expected = {
        ("towerjax/collectives/ops.py", "flipped: end > start"): ("return [", "]"),
        ("towerjax/sweeps/bench.py", "constant: 11"): ('"""Time a', "return "),
    }
    for (file, change), (begin, end) in expected.items():
        [mutant] = [x for x in all_mutants(file) if x.bug.startswith(f"{change} -> ")]
        first, last = map(int, mutant.killed_by[2:])
        lines = (ROOT / file).read_text().splitlines()[first - 1 : last]
        assert lines[0].strip().startswith(begin) and lines[-1].strip().startswith(end)


@pytest.mark.slow
@pytest.mark.parametrize("sizes, new, became", [
    ("3, 3, 4", "[size]", "killed"),
    ("4, 3, 3", "[size]", "survived"),
    ("3, 3, 4", "[__import__('time').sleep(99)]", "killed"),
])  # fmt: skip
def test_a_test_that_fails_anyway_kills_nothing(
    tmp_path, monkeypatch, sizes, new, became
):
    """What only a mutant's tests do not end with is killed, too."""
    monkeypatch.setattr(runner, "TIMEOUT_S", 12.0)
    file = tmp_path / "test_tiny.py"
    call = "from towerjax.collectives.ops import pack_sizes as sizes"
    file.write_text(f"{call}\ndef test_all():\n    assert sizes(10, 3) == [{sizes}]\n")
    mutant = Mutant("a", "", PACK_SIZES, REST, new, ("ops.py", "1", "1", "1"))
    covers = {f"{file}::test_all": Covered(0, frozenset([("ops.py", 1)]))}
    assert run_rounds([mutant], covers, 1, lambda *_: None) == {became: [mutant]}


@pytest.mark.slow
def test_what_is_called_equivalent_is_generated_once():
    found = [(mutant.where, mutant.bug) for mutant in all_mutants()]
    assert {same: found.count(same) for same in SAME} == dict.fromkeys(SAME, 1)


def rooms_of_fast_tests():
    """``{stem::function: room}`` of the tests that are not marked slow."""
    return {
        f"{path.stem}::{name}": path.parent.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in durations.fast_tests(path.read_text())
    }


def test_a_fast_test_is_named_by_a_mutant_or_takes_a_tenth_of_a_second():
    """Of a core, at the last measurement; each room has one that a mutant names."""
    rooms = rooms_of_fast_tests()
    fast = durations.table()["fast"]
    assert len(rooms) > 500 and len(fast.keys() & rooms.keys()) > 50
    long = durations.too_long(fast, durations.MOST_S)
    assert not {name: long[name] for name in long.keys() & rooms.keys()}
    named = {rooms[name] for name in durations.named() & rooms.keys()}
    assert named == {*rooms.values()}
