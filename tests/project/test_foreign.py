"""Public programs are called as they are, at their commit, and a table is made."""

import importlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks.foreign import __main__ as foreign
from benchmarks.foreign import adapt


def train(rate):
    def schedule(count):
        return rate * count

    def step(w, x):
        @jax.jit
        def loss(w):
            return ((x @ w) ** 2).mean()

        return w - rate * jax.grad(loss)(w)

    assert schedule(1) == rate
    return step


@pytest.mark.slow
def test_a_function_within_another_is_called_as_it_is():
    step = adapt.inner(train, "step", rate=0.5)
    w = np.ones(3, np.float32)
    x = np.eye(3, dtype=np.float32)
    np.testing.assert_array_equal(step(w, x), train(0.5)(w, x))
    with pytest.raises(KeyError, match="rate"):
        adapt.inner(train, "step")


def test_packages_that_a_step_does_not_use_are_empty(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, adapt.Absent(["of_logs"])])
    for name in ("of_logs", "of_logs.io.files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert importlib.import_module(name).anything("x").version.__version__
    with pytest.raises(ImportError):
        importlib.import_module("of_logs_too")


def test_sources_at_another_commit_are_refused(tmp_path):
    git = ["git", "-C", tmp_path / "brax"]
    (tmp_path / "brax").mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    commit = [*git, *who, "commit", "-q", "--allow-empty", "-m", "a"]
    subprocess.run(commit, check=True)
    with pytest.raises(ValueError, match="not at 0b96d05"):
        foreign.check(foreign.PROGRAMS[0], tmp_path)


def test_a_row_takes_the_place_of_its_last_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"a\n{foreign.START}{foreign.END}\nb\n")
    second = foreign.PROGRAMS[1]
    first = foreign.PROGRAMS[0]
    for program, value in ((second, 1.0), (first, 2.0), (second, 3.0)):
        told = {
            "prove": "shard_map or pmap over 'i': 0 results are the same, 2 split\n"
            "copies of a state that stay the same: 2\nnote: result['<a b>'][0].c and 2"
            " more: each device is given a copy",
            "depends": program is first,
            "hand": (value, value, 0.0),
        }
        foreign.write(page, program.name, foreign.row_of(program, told))
    *_, one, two, end, last = page.read_text().splitlines()
    assert first.name in one and "2, 2: 0.0e+00 apart" in one and last == "b"
    assert second.name in two and "3, 3: 0.0e+00 apart" in two and end == foreign.END
    assert "| 2 copies stay; 3 do not: each device is given a copy | depends |" in one
    assert "| the same |" in two
