"""The functions of the commands: faults that are meant, what is named and shown."""

import json

import numpy as np
import pytest

from towerjax.loop.writers import as_json
from towerjax.tools.cli import resolve, show
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


def test_what_is_not_finite_is_json_too(capsys):
    text = json.dumps(as_json({"a": (1.5, np.inf, [-np.inf]), "b": None, "c": np.nan}))
    show("for a person", {"a": np.nan}, True)
    assert json.loads(capsys.readouterr().out) == {"a": "NaN"}
    assert text == '{"a": [1.5, "Infinity", ["-Infinity"]], "b": null, "c": "NaN"}'


def test_what_a_named_module_misses_is_no_wrong_name(tmp_path, monkeypatch):
    (tmp_path / "needs_other.py").write_text("import towerjax_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="towerjax_of_nobody"):
        resolve("needs_other:value", "")
    with pytest.raises(ValueError, match="of_nobody.*; set PYTHONPATH"):
        resolve("towerjax_of_nobody:value", "")
