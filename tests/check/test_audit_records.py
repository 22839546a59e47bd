"""Records of audits: one for each program, read and written with care."""

import dataclasses
import errno
import functools
import json
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audited_losses import BATCH, PARAMS, errors
from first_calls import FOUR, evaluation, scaled, step_of, train

import towerjax as tj
from towerjax.check.audit import kept as audited
from towerjax.mesh.processes import Processes
from towerjax.prover.comparison import AuditReport

# What is not proved is audited, and said.
pytestmark = pytest.mark.filterwarnings("ignore:not proved")


@pytest.fixture
def cache():
    """Sets the folder of JAX's cache."""
    before = jax.config.jax_compilation_cache_dir
    yield functools.partial(jax.config.update, "jax_compilation_cache_dir")
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
def test_a_program_is_audited_once(counted, tmp_path, cache):
    cache(str(tmp_path))
    evaluate = evaluation(False)
    first = step_of()
    state = train(first)
    for _ in range(3):
        evaluate(state, BATCH)
        state, _ = first(state, BATCH)
    assert len(counted) == 1  # of the step: the evaluation is proved
    again = [step_of(), step_of(strategy=FOUR)]
    train(again[0]), train(again[1])
    assert len(counted) == 1 and all(step.is_audited for step in again)
    assert again[0].audit_report == first.audit_report == counted[0]
    # Another loss, another constant of it, other shapes and options are others.
    train(step_of(scaled(2.0)))
    train(step_of(scaled(3.0)))
    train(step_of(scaled(jnp.array([4.0]))))
    train(step_of(scaled(jnp.array([5.0]))))
    assert len(counted) == 5
    short = jax.tree.map(lambda x: x[:16], BATCH)
    train(step_of(), short), train(step_of(remainder="pad"))
    assert len(counted) == 7


@pytest.mark.slow
def test_an_audit_result_stays_beside_the_programs_of_a_cache(
    counted, tmp_path, monkeypatch, cache
):
    cache(str(tmp_path))
    train(step_of())
    step = step_of()
    train(step)
    assert len(counted) == 1 and step.audit_report == counted[0]
    [path] = (tmp_path / "audited").iterdir()
    # An audit result under another program's name, one that was changed, one cut short.
    train(step_of(scaled(2.0)))
    [other] = [x for x in (tmp_path / "audited").iterdir() if x != path]
    kept = json.loads(path.read_text())
    changed = {**kept, "report": {**kept["report"], "examples": 80}}
    for text in (other.read_text(), json.dumps(changed), path.read_text()[:-9]):
        path.write_text(text)
        counted.clear()
        train(step_of())
        assert len(counted) == 1
    # One of another version.
    counted.clear()
    monkeypatch.setattr(audited, "__version__", "0.0.1")
    train(step_of())
    assert len(counted) == 1


# Folders of JAX's cache that take no record, and what fails in a folder that does.
UNWRITTEN = {
    "below a file": ("file/cache", None),
    "of an unknown store": ("nowhere://bucket", None),
    "of a store whose library is absent": ("gs://bucket/cache", None),
    "of another user": ("cache", (pathlib.Path, "mkdir", PermissionError)),
    "full": ("cache", (pathlib.Path, "replace", OSError)),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_a_record_that_cannot_be_kept_is_a_line(tmp_path, monkeypatch, cache, name):
    folder, failure = UNWRITTEN[name]
    (tmp_path / "file").write_text("")
    cache(folder if "://" in folder else str(tmp_path / folder))
    if folder.startswith("gs:"):
        monkeypatch.setitem(sys.modules, "gcsfs", None)
    if failure is not None:
        where, what, kind = failure

        def fail(*_, **__):
            raise kind(errno.ENOSPC, "No space left")

        monkeypatch.setattr(where, what, fail)
    with pytest.warns(UserWarning, match="passed, but its record cannot be kept"):
        audited.keep("program", some_report(), audited.folders_of_records())
    assert known_audit_result() is None
    monkeypatch.undo()
    assert not [*tmp_path.rglob("*program*")]


def known_audit_result():
    here = Processes(tuple(jax.devices()))
    return audited.audit_result_of("program", audited.folders_of_records(), here)


def some_report():
    return AuditReport((2,), 12, 5, ("loss",), (), 1e-7, "loss")


def test_a_record_is_read_and_written_through_no_symbolic_link(tmp_path, cache):
    outside = tmp_path / "outside"
    folder = tmp_path / "cache" / "audited"
    cache(str(tmp_path / "other"))
    audited.keep("program", some_report(), audited.folders_of_records())
    record = (tmp_path / "other" / "audited" / "program.json").read_text()
    cache(str(tmp_path / "cache"))
    for link, target in (folder / "program.json", outside), (folder, tmp_path / "out"):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        (tmp_path / "out").mkdir(exist_ok=True)
        link.parent.mkdir(parents=True)
        outside.write_text(record)
        (tmp_path / "out" / "program.json").write_text(record)
        link.symlink_to(target)
        assert known_audit_result() is None
        outside.write_text("mine")
        (tmp_path / "out" / "program.json").write_text("mine")
        with pytest.warns(UserWarning, match="is a symbolic link"):
            audited.keep("program", some_report(), audited.folders_of_records())
        assert outside.read_text() == "mine"
        assert [x.read_text() for x in (tmp_path / "out").iterdir()] == ["mine"]


def sealed(**changes):
    """A record with the seal of its own fields; None leaves one out."""
    fields = json.loads(json.dumps(dataclasses.asdict(some_report()))) | changes
    fields = {name: x for name, x in fields.items() if x is not None}
    return json.dumps({"report": fields, "seal": audited._seal("program", fields)})


FORGED = [
    *[sealed(**{x.name: None}) for x in dataclasses.fields(AuditReport)],
    *[sealed(**{x.name: {"a": 1}}) for x in dataclasses.fields(AuditReport)],
    *[sealed(towers=x) for x in (2, ["2"], [2.0], [[2]], [True])],
    *[sealed(compared=x) for x in ("loss", [1], [None], ["loss", ["loss"]])],
    sealed(compared=["\x1b[2J"]),
    *[sealed(examples=x) for x in ("12", 12.5, True)],
    *[sealed(largest=x) for x in ("0", 1, [0.1])],
    *[sealed(by_rounding="loss"), sealed(more=1)],
    *["", "null", "[]", "3", '{"report": 1}', "[" * 100_000, "\0", "1" * 5000],
    json.dumps({"report": [], "seal": audited._seal("program", [])}),
    json.dumps({"report": None, "seal": audited._seal("program", None)}),
]


def test_a_malformed_record_is_none(tmp_path, cache):
    cache(str(tmp_path))
    path = tmp_path / "audited" / "program.json"
    path.parent.mkdir()
    for text in [*FORGED, sealed(), b"\xff"]:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        found = known_audit_result()
        assert found == (some_report() if text == sealed() else None), text
    path.unlink()
    os.mkfifo(path)
    assert known_audit_result() is None


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "rule"])
def test_of_a_program_with_a_callback_there_is_no_record(
    counted, where, tmp_path, cache
):
    """The function that it calls may have changed, which its program does not show."""
    cache(str(tmp_path))

    def step_with(factor):
        def call(x):
            return jax.pure_callback(
                lambda x: factor * x, x, x, vmap_method="expand_dims"
            )

        @jax.custom_vjp
        def scale(x):
            return x if where == "rule" else call(x)

        rule = call if where == "rule" else lambda g: g
        scale.defvjp(lambda x: (scale(x), None), lambda _, g: (rule(g),))

        def loss_fn(params, batch, tower):
            own = scale(errors(params, batch))
            return tj.Weighted.mean(own, tower.weight)

        return step_of(loss_fn)

    for factor in (1, 2, 2):
        train(step_with(np.float32(factor)))
    assert len(counted) == 3


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_audited_again(counted, tmp_path, capsys):
    def go(steps):
        step = step_of()
        how = {"checkpointer": tj.Checkpointer(str(tmp_path)), "steps": steps}
        data = tj.batches(BATCH, 24, epochs=None)
        tj.run(step, step.init(PARAMS), data, **how)
        return capsys.readouterr().err

    assert "audited in" in go(2)
    assert "audited before: 4 values are the same" in go(4)
    assert len(counted) == 1
    shutil.rmtree(tmp_path / "audited")
    go(6)
    assert len(counted) == 2
