"""Faults of a check: those that are meant, and where GitHub shows them."""

from towerjax.tools.faults import Fault, annotations, split_meant

FAULTS = [
    Fault("proof", "", "at train.py:3 (f): a"),
    Fault("equality", "result", "result: D times, at train.py:4 (f)"),
    Fault("comparison", "result", "result is 2", 0.5, "Look at train.py:5, 50% of it"),
]


def entries():
    names = "kind leaf text relative".split()
    return [{name: getattr(x, name) for name in names} for x in FAULTS]


def test_what_is_meant_is_no_fault_until_it_is_worse():
    assert split_meant(FAULTS, []) == (FAULTS, [], [])
    assert split_meant(FAULTS, entries()) == ([], FAULTS, [])
    moved = Fault("equality", "result", "result: D times, at train.py:9 (f)")
    other = Fault("equality", "result", "result: 1/D times, at train.py:4 (f)")
    assert moved.is_meant_by(entries()[1]) and not other.is_meant_by(entries()[1])
    larger = [Fault("comparison", "result", "", x) for x in (0.9, 1.1)]
    assert [x.is_meant_by(entries()[2]) for x in larger] == [True, False]
    wrong, meant, left = split_meant(FAULTS[:1], entries())
    assert (wrong, meant, left) == ([], FAULTS[:1], entries()[1:])


def test_github_is_told_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path.parent))
    before = annotations(FAULTS[2:])
    assert before == ["::error::result is 2%0ALook at train.py:5, 50%25 of it"]
    (tmp_path / "train.py").touch()
    [line] = annotations(FAULTS[2:])
    at = f"file={tmp_path.name}/train.py,line=5,title=towerjax check"
    assert line == f"::error {at}::result is 2%0ALook at train.py:5, 50%25 of it"
