"""The driver that asks about programs of others: its data, what it refuses, prints."""

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from checkout import ROOT

import towerjax as tj
from tests.foreign import __main__ as foreign
from tests.foreign import adapt, losses
from tests.foreign.conversions import DEVICES, diffs
from tests.foreign.losses import flax, given
from tests.foreign.losses import transformers as of_transformers
from tests.foreign.program import DEPENDS, THE_SAME, function

PAGE = (ROOT / "docs" / "evidence.md").read_text()
PROGRAMS = {(x.KIND, x.name): x for x in foreign.programs()}
FOLDERS = {"step": "steps", "loss": "losses"}
CONVERSIONS = [x for x in PROGRAMS.values() if x.KIND == "conversion"]


def test_each_program_has_its_function_and_an_answer_that_it_may_give():
    assert len(PROGRAMS) == len(foreign.programs()) == 15 + 16 + 3
    words = {DEPENDS, THE_SAME, "not proved"}
    asked = {"step": 1, "loss": 2, "conversion": 2}
    for (kind, name), program in PROGRAMS.items():
        assert {*program.expects} <= words and len(program.expects) == asked[kind], name
        assert program.needs and bool(program.repository) == bool(program.commit)
    makes = [x for x in PROGRAMS.values() if x.KIND != "conversion"]
    for program in makes:
        made = function(FOLDERS[program.KIND], program.make)
        known = inspect.signature(made).parameters
        options = program.without if program.KIND == "step" else program.given
        is_open = any(x.kind == inspect.Parameter.VAR_KEYWORD for x in known.values())
        assert is_open or {*options} <= {*known}, program.name


def test_packages_that_a_step_does_not_use_are_empty(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, adapt.Absent(["of_logs"])])
    for name in ("of_logs", "of_logs.io.files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert importlib.import_module(name).anything("x").version.__version__
    with pytest.raises(ImportError):
        importlib.import_module("of_logs_too")


@pytest.mark.parametrize("kind", ["step", "conversion"])
def test_sources_at_another_commit_are_refused(kind, tmp_path):
    git = ["git", "-C", tmp_path / "brax"]
    (tmp_path / "brax").mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    commit = [*git, *who, "commit", "-q", "--allow-empty", "-m", "a"]
    subprocess.run(commit, check=True)
    with pytest.raises(ValueError, match="not at 0b96d05"):
        PROGRAMS[kind, "brax_ppo"].ask(tmp_path)


def said_of_a_step(depends, value=1.0):
    return {
        "of": "A step.",
        "prove": "shard_map or pmap over 'i': 0 results are the same, 2 split\n"
        "copies of a state that stay the same: 2\nnote: result['<a b>'][0].c and 2"
        " more: each device is given a copy",
        "depends": depends,
        "hand": (value, value, 0.0),
    }


def test_a_row_takes_the_place_of_its_last_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"a\n{foreign.START}{foreign.END}\nb\n")
    first = PROGRAMS["step", "brax_ppo"]
    second = PROGRAMS["step", "brax_apg"]
    for program, value in ((second, 1.0), (first, 2.0), (second, 3.0)):
        told = said_of_a_step(program is first, value)
        foreign.write(page, program.name, foreign.line(*program.rows(told)))
    *_, one, two, end, last = page.read_text().splitlines()
    assert first.name in one and "| 0.0e+00 |" in one and last == "b"
    assert second.name in two and "| 0.0e+00 |" in two and end == foreign.END
    assert "| 2 stay, 3 do not | depends |" in one and "| the same |" in two


def test_the_driver_ends_with_the_programs_that_say_another_thing(monkeypatch, capsys):
    """Of two steps that are asked about, one says what is expected."""
    told = {"brax_ppo": said_of_a_step(True), "brax_apg": said_of_a_step(False)}

    def run(command, **_):
        name = command[-1]
        return subprocess.CompletedProcess(command, 0, f"\n{json.dumps(told[name])}\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"than expected: \['brax_apg'\]"):
        foreign.main(["programs", "--kind", "step", "--only", "brax"])
    said = capsys.readouterr()
    assert "brax_ppo: depends; " in said.err and "brax_apg: the same; " in said.err
    assert said.out.splitlines()[1:3] == foreign.head(foreign.OfStep).splitlines()
    told["brax_apg"] = said_of_a_step(True)
    foreign.main(["programs", "--kind", "step", "--only", "brax"])


def test_commands_that_fetch_are_printed_once(capsys):
    foreign.main(["--checkouts", "--kind", "step", "--only", "brax"])
    clone, checkout, install = capsys.readouterr().out.splitlines()
    assert clone == "git clone https://github.com/google/brax"
    assert checkout == "git -C brax checkout -q 0b96d05"
    assert install.startswith("pip install brax dm-tree ")


SOURCE = """
import flax.linen as nn

def model(latents):
    return Autoencoder(latents)

class Autoencoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x, key):
        z = nn.Dense(self.latents)(x)
        return nn.Dense(x.shape[-1])(z), z, 0.1 * z
"""


@pytest.mark.slow
def test_a_loss_of_a_checkout_is_proved(tmp_path):
    folder = tmp_path / "examples" / "vae"
    folder.mkdir(parents=True)
    (folder / "models.py").write_text(SOURCE)
    loss = flax.vae(tmp_path)
    assert "models" not in sys.modules and str(folder) not in sys.path
    for padded in (False, True):
        assert [x.says for x in losses.said_of(loss, padded)] == ["proved"]


@pytest.mark.slow
def test_a_loss_that_depends_on_the_split_is_not_proved():
    def loss_fn(params, batch, tower):
        found = (batch["x"] - tower.local) ** 2 * params
        return tj.Weighted.mean(found - found.max(), tower.weight)

    batch = {"x": given.floats()}
    loss = given.Loss(loss_fn, np.float32(1.0), batch, np.float32(0.0))
    told = [losses.asked(loss, padded) for padded in (False, True)]
    program = PROGRAMS["loss", "Flax ppo"]
    assert tuple(program.says(told)) == program.expects
    full, padded = program.rows(told)
    assert full[:4] == ["Flax ppo", "full", "1", "0"] and padded[1] == "padded"
    assert "unknown: " in full[-1] and full[-1].endswith(program.remedy)


def test_names_of_clip_are_those_of_older_versions():
    found = of_transformers.clip(np.arange(4.0), a_max=2.0)
    np.testing.assert_array_equal(found, [0.0, 1.0, 2.0, 2.0])
    assert isinstance(found, jax.Array)


def test_a_diff_removes_and_adds_lines_of_the_pinned_file_alone():
    text = b"one\ntwo\nthree\nfour\n"
    diff = diffs.Diff(
        "a.py",
        diffs.blob_of(text),
        removed={2: 2},
        added={0: ["zero\n"], 3: ["2\n", "3\n"]},
    )
    assert diff.applied(text) == b"zero\none\n2\n3\nfour\n"
    assert diff.blob == "f384549cbeb481e437091320de6d1f2e15e11b4a"  # git hash-object
    with pytest.raises(ValueError, match=r"a\.py is not that of the pinned commit"):
        diff.applied(text + b"\n")


@pytest.mark.parametrize("program", CONVERSIONS, ids=lambda x: x.name)
def test_a_page_counts_the_lines_of_each_diff(program):
    removed, added = diffs.counts(program.name)
    [row] = [x for x in PAGE.splitlines() if x.startswith(f"| {program.checkout} | ")][
        :1
    ]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == [program.commit[:8], str(program.towers), str(removed), str(added)]
    assert removed and all(
        "towerjax" not in diff.path for diff in diffs.diffs_of(program.name)
    )


def test_a_conversion_is_right_where_it_has_the_published_numbers_of_one_device():
    program = dataclasses.replace(CONVERSIONS[0], exact=("a",))
    before = [{"a": 1.0, "b": 5.0}, {"a": 1.1, "b": 5.0}, {"a": 1.2, "b": 5.0}]
    after = [{"a": 1.0, "b": 6.0}] * len(DEVICES)
    told = {"before": before, "after": after}
    assert program.says(told) == [DEPENDS, THE_SAME]
    first, second = program.rows(told)
    assert first[1:3] == ["a", "1"] and first[-2:] == ["2.0e-01", "0e+00"]
    assert len(first) == len(second) == len(program.HEAD)
    told["after"] = [{"a": 1.01, "b": 6.0}] * len(DEVICES)  # others than published
    assert program.says(told) == [DEPENDS, DEPENDS]
    assert program.says({"before": after, "after": after}) == [THE_SAME, THE_SAME]
