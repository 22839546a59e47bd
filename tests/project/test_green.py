"""What has not changed since it was green is left out, and everything else is run."""

import json
import re
import shutil
import subprocess
import sys

import durations
import pytest
import reads
from checkout import TESTS
from durations import Took
from mutants.__main__ import keep_green
from mutants.mutant import Mutant
from mutants.runner import Job, Result

from tests import green

CHECKOUT = {
    "towerjax/sums.py": """def total(x):
    return sum(x)


def mean(x):
    pass
""",
    "tests/conftest.py": "SEED = 1\nconfig.import_plugin('plugin')\n",
    "tests/plugin.py": "EIGHT = 8\n",
    "tests/decks/rows.py": "ROWS = [1, 2]\n",
    "tests/decks/other.py": "OTHER = 1\n",
    "tests/helper.py": "import rows\n",
    "tests/room/test_a.py": """import helper
import pytest

N = 3


@pytest.mark.parametrize("n", [1, 2])
def test_one(n):
    assert n < N


@pytest.mark.slow
def test_two():
    pass
""",
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A function that gives the digest after a change of one file."""
    monkeypatch.setattr(reads, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(reads, "ROOT", tmp_path)

    def changed(name=None, old="", new=""):
        for path, text in CHECKOUT.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            changed = text.replace(old, new) if path == name else text
            assert path != name or changed != text
            (tmp_path / path).write_text(changed)
        for function in vars(reads).values():
            getattr(function, "cache_clear", lambda: None)()
        mutated = reads.function("towerjax.sums:total")
        return reads.digest(
            mutated, *reads.tests(["tests/room/test_a.py::test_one[1]"])
        )

    yield changed
    for function in vars(reads).values():
        getattr(function, "cache_clear", lambda: None)()


@pytest.mark.parametrize("change, is_seen", [
    (("towerjax/sums.py", "sum(x)", "sum(x) + 1"), True),
    (("towerjax/sums.py", "pass", "return 1"), False),  # of another function
    (("tests/room/test_a.py", "n < N", "n <= N"), True),
    (("tests/room/test_a.py", "[1, 2]", "[1, 3]"), True),
    (("tests/room/test_a.py", "N = 3", "N = 4"), True),  # what a test may use
    (("tests/room/test_a.py", "    pass", "    assert True"), False),
    (("tests/room/test_a.py", "@pytest.mark.slow\n", ""), False),  # of another test
    (("tests/conftest.py", "1", "2"), True),
    (("tests/plugin.py", "8", "9"), True),  # by its name, in conftest.py
    (("tests/decks/rows.py", "2", "3"), True),  # by way of a helper
    (("tests/decks/other.py", "1", "2"), False),
])  # fmt: skip
def test_what_a_mutant_reads(checkout, change, is_seen):
    before = checkout()
    assert checkout() == before
    assert (checkout(*change) != before) is is_seen


def test_a_function_that_is_gone_has_no_text(checkout):
    checkout()
    assert reads.function("towerjax.sums:gone") == reads.function("towerjax.no:x") == ""
    assert reads.function("towerjax.sums:mean") == "def mean(x):\n    pass"


def test_a_program_reads_the_modules_of_the_names_in_it():
    """Whose digest is another when one of these files is."""
    text = "import towerjax as tj\nstep = tj.build_train_step(f, o, tj.Mirrored())\n"
    train, strategies = (
        (TESTS.parent / "towerjax" / x).read_text()
        for x in ("make/train.py", "towers/strategies.py")
    )
    assert {*reads.package(text)} == {train, strategies}
    [found] = reads.package("from towerjax.contrib.train import train_step")
    assert found == (TESTS.parent / "towerjax/contrib/train.py").read_text()


def test_a_test_that_imports_a_namespace_reaches_all_of_it():
    def named_in(file):
        modules = reads._named_in(TESTS / "laws/refused" / file)
        return {x.relative_to(TESTS.parent / "towerjax").as_posix() for x in modules}

    contrib = {"contrib/__init__.py", "contrib/train.py", "contrib/diloco.py"}
    assert named_in("test_malformed.py") >= contrib
    assert "tf1/estimator/replicate.py" in named_in("test_all_or_nothing.py")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(green, "KEPT", tmp_path / "green.json")
    monkeypatch.setattr(durations, "TABLE", tmp_path / "durations.json")
    return tmp_path


def test_what_is_kept_is_what_was_green(kept):
    assert green.changed({"mutant a": "1", "mutant b": "2"}) == ["mutant a", "mutant b"]
    green.keep({"mutant a": "1"})
    green.keep({"benchmark c": "3"})
    assert green.changed({"mutant a": "1", "mutant b": "2"}) == ["mutant b"]
    assert green.changed({"mutant a": "2"}) == ["mutant a"]
    gone = green.forgotten("mutant", ["mutant b"])
    assert gone == ["mutant a"]
    green.keep({"mutant b": "2"}, gone)
    assert green.KEPT.read_text().count("mutant") == 1


def test_only_a_mutant_that_is_killed_and_whose_tests_pass_without_it_is_green(kept):
    killed, alive, unfair = (
        Mutant(id, "", "m:f", "a", "b", (f"tests/{id}.py::test",)) for id in "abc"
    )
    results = {
        Job("a, as it is", killed.killed_by, None): Result("passed", ""),
        Job("c, as it is", unfair.killed_by, None): Result("failed", ""),
        Job("a", killed.killed_by, killed): Result("killed", ""),
        Job("b", alive.killed_by, alive): Result("survived", ""),
        Job("c", unfair.killed_by, unfair): Result("killed", ""),
    }
    digests = {f"mutant {id}": id for id in "abc"}
    assert keep_green(results, digests) == 2
    assert green.changed(digests) == ["mutant b", "mutant c"]


FILE = """
import pytest

def texts(name):
    return [open(f"{name}.txt").read()]

@pytest.mark.reads(texts=texts)
@pytest.mark.parametrize("name", ["a", "b"])
def test_it(name):
    assert open(f"{name}.txt").read() != "bad"
"""


@pytest.mark.slow
def test_the_plugin_runs_what_has_changed_or_failed(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("reads.py", "green.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "tests/test_it.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = reads\n")

    def outcome(a, b, *flags):
        (tmp_path / "a.txt").write_text(a)
        (tmp_path / "b.txt").write_text(b)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.green", *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        last = done.stdout.splitlines()[-1]
        return {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)\b", last)}

    assert outcome("good", "bad") == {"passed": 1, "failed": 1}
    assert outcome("good", "bad") == {"skipped": 1, "failed": 1}
    assert outcome("good", "fair", "-n2") == {"skipped": 1, "passed": 1}
    assert outcome("good", "fair", "-n2") == {"skipped": 2}
    assert outcome("better", "fair") == {"skipped": 1, "passed": 1}
    assert outcome("better", "fair", "--all") == {"passed": 2}
    (tmp_path / "tests/test_it.py").write_text(FILE + "    assert name == 'a'\n")
    assert outcome("better", "fair") == {"passed": 1, "failed": 1}
    assert outcome("better", "fair") == {"skipped": 1, "failed": 1}


def test_a_table_of_durations_has_the_least_of_files_that_were_run(kept):
    fast = {"test_docs::test_x": 9, "test_no::test_y": 9}
    fast |= {f"test_green::test_{x}": 0.2 for x in ("a", "b", "gone")}
    files = {"test_green": {"slow": 7}, "test_no": {"slow": 1}}
    durations.TABLE.write_text(json.dumps({"fast": fast, "files": files}))
    (kept / "test_docs.py").touch()
    (kept / "test_green.py").touch()
    durations.keep([
        Took("test_green", "test_a", False, 0.5, 2.0),
        Took("test_green", "test_a", False, 0.1, 2.0),
        Took("test_green", "test_b", False, 0.01, 1.0),
        Took("test_green", "test_c", True, 3.0, 3.0),
    ])  # fmt: skip
    assert durations.table() == {
        "fast": {
            "test_docs::test_x": 9,
            "test_green::test_a": 0.2,
            "test_green::test_b": 0.01,
        },
        "files": {"test_green": {"fast": 5.0, "slow": 3.0}},
    }


def test_a_long_test_is_told_unless_a_mutant_names_it():
    seconds = {"test_green::test_x": 0.2, "test_green::test_y": 0.1}
    assert durations.too_long(seconds, 0.1) == {"test_green::test_x": 0.2}
    known = next(iter(durations.named()))
    assert durations.too_long({known: 9.0}, 0.1) == {}


def test_fast_tests_are_known_by_the_text_of_a_file():
    text = CHECKOUT["tests/room/test_a.py"]
    assert durations.fast_tests(text) == ["test_one"]
    assert durations.fast_tests(f"pytestmark = pytest.mark.slow\n\n\n{text}") == []


ROOM = """
import pathlib
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_cases(n):
    if n == 2 and pathlib.Path("is_bad").exists():
        raise AssertionError
"""


READER = """
import pathlib
import pytest

def test_reads():
    assert open("towerjax/b.py").read()

@pytest.mark.skipif(not pathlib.Path("a_browser").exists(), reason="no a_browser here")
def test_lacks():
    pass
"""


@pytest.mark.slow
def test_a_test_is_left_out_once_all_its_cases_passed(tmp_path):
    room = tmp_path / "tests" / "room"
    room.mkdir(parents=True)
    (tmp_path / "towerjax").mkdir()
    (tmp_path / "towerjax/__init__.py").touch()
    (tmp_path / "towerjax/a.py").write_text("A = 1\n")
    (tmp_path / "towerjax/b.py").write_text("B = 1\n")
    for name in ("reads.py", "green.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (room / "test_room.py").write_text(f"{ROOM}\nfrom towerjax.a import A\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = reads\n")

    def outcome(*flags):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.green", *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        last = done.stdout.splitlines()[-1]
        return {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)\b", last)}

    assert outcome("-k", "1") == {"passed": 1, "deselected": 1}
    (tmp_path / "is_bad").touch()
    assert outcome() == {"passed": 1, "failed": 1}  # one case was green, not all
    assert outcome() == {"passed": 1, "failed": 1}
    (tmp_path / "is_bad").unlink()
    assert outcome() == {"passed": 2}
    assert outcome() == {"skipped": 2}
    assert outcome("--all") == {"passed": 2}
    (tmp_path / "towerjax/b.py").write_text("B = 2\n")  # which nothing imports
    assert outcome() == {"skipped": 2}
    (tmp_path / "towerjax/a.py").write_text("A = 2\n")
    assert outcome() == {"passed": 2}
    (room / "test_reader.py").write_text(READER)
    assert outcome() == {"passed": 1, "skipped": 3}
    kept = json.loads((tmp_path / "tests/green.json").read_text())
    assert not any("test_lacks" in name for name in kept)
    assert outcome() == {"skipped": 4}
    (tmp_path / "towerjax/b.py").write_text("B = 3\n")  # which the reader opens
    assert outcome() == {"passed": 1, "skipped": 3}
    (tmp_path / "towerjax/c.py").write_text("C = 1\n")
    assert outcome() == {"passed": 1, "skipped": 3}
    (tmp_path / "a_browser").touch()  # another machine has what the test needs
    assert outcome() == {"passed": 1, "skipped": 3}
    assert outcome() == {"skipped": 4}
