"""A training that is stopped anywhere and goes on gives the bits of one that is not."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import checkpoint_model as model
import chex
import containers
import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from checkout import TESTS
from etils import epath
from orbax.checkpoint import CheckpointManager
from orbax.checkpoint.args import PyTreeRestore
from orbax.checkpoint.checkpoint_utils import construct_restore_args

import towerjax as tj
from towerjax.data.stream import Position, Source
from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.checkpointer import Saving
from towerjax.loop.stopping import Point
from towerjax.step.state.nonfinite import nonfinite_leaves
from towerjax.types.trees import is_key

LOOP = pathlib.Path(tj.loop.__file__).parent


class Stop(Exception):
    pass


def stopping_at(number, error=Stop):
    def hook(at, _):
        if at == number:
            raise error

    return hook


def train(step, checkpointer, steps=model.STEPS, batches=None, state=None, **options):
    return tj.run(
        step,
        model.init(step) if state is None else state,
        model.batches() if batches is None else batches,
        steps=steps,
        checkpointer=checkpointer,
        progress=False,
        audit=False,  # the variables of the model are of each tower
        **options,
    )


@pytest.fixture(scope="module")
def step():
    return model.build(2)


@pytest.fixture(scope="module")
def other():
    """The same step on other devices."""
    return model.build(4)


@pytest.fixture(scope="module")
def light():
    """A step that compiles in a moment."""
    return model.build_light()


def bits_of_run(step, steps=model.STEPS, **options):
    """The bits of a run that nothing happened to, and its losses."""
    state, history = train(step, None, steps, **options)
    return model.bits(state), history.metrics["loss"]


@pytest.fixture(scope="module")
def undisturbed(step):
    after, losses = bits_of_run(step)
    assert len(set(after.local["mean"].value.tolist())) == 8
    return after, losses


@pytest.fixture(scope="module")
def light_bits(light):
    return bits_of_run(light)[0]


@pytest.fixture(scope="module")
def three(step, tmp_path_factory):
    """A folder with checkpoints of the steps 2, 3 and 4; no test changes it."""
    path = tmp_path_factory.mktemp("three")
    train(step, tj.Checkpointer(path, every=1), steps=4)
    return path


@pytest.fixture
def copied(three, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(three, tmp_path / "copied")


# The bits


@pytest.mark.slow
def test_a_state_holds_values_whose_class_checks_them(tmp_path):
    """Orbax maps names into a tree, which a mean of names would refuse."""

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean((w - batch) ** 2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.5), tj.Mirrored(towers=2))
    mean = tj.Weighted(np.float32(3), np.float32(2))
    extra = {"mean": mean, "b": (np.arange(3.0), None), "a": [np.int32(1)]}
    state = step.init(np.float32(0), extra=extra)
    saving = tj.Checkpointer(tmp_path)
    batches = [np.ones(2, np.float32)]
    state, _ = tj.run(step, state, batches, checkpointer=saving, progress=False)
    back = saving.restore(step, step.init(np.float32(5), extra=extra))
    chex.assert_trees_all_equal((back.params, back.extra), (state.params, state.extra))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*containers.KINDS, "equinox"])
def test_parameters_in_any_container_go_on_as_they_were(kind, tmp_path):
    def loss_fn(params, batch, tower):
        p = containers.as_dicts(params)
        errors = batch["x"] @ p["inner"]["w"] - batch["y"]
        return tj.Weighted.mean(errors**2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.adam(0.1), tj.OneDevice())
    first = {"inner": {"w": model.params()["w"]}, "unused": np.ones(2, np.float32)}
    start = containers.held(kind, first)
    how = {"batches": [*model.batches(epochs=1)]}
    how["batches"] = how["batches"][:2] * 2
    ends = [
        train(step, saving, steps, state=step.init(start), **how)[0]
        for saving, steps in ((None, 4), (tj.Checkpointer(tmp_path), 2))
    ]
    state, history = train(
        step, tj.Checkpointer(tmp_path), 4, state=step.init(start), **how
    )
    assert len(history.metrics["loss"]) == 2 and int(ends[1].step) == 2
    model.assert_same_bits(state, model.bits(ends[0]))
    assert jax.tree.structure(state.params) == jax.tree.structure(start)


@pytest.mark.slow
def test_a_finished_run_does_nothing_more(light, light_bits, tmp_path, capsys):
    saving = tj.Checkpointer(tmp_path)
    for _ in range(2):
        state, history = train(light, saving)
    assert len(history.metrics) == 0 and saving.steps == (8,)
    model.assert_same_bits(state, light_bits)
    train(light, saving, **metrics_of([3]))
    record = saving.record(8)
    assert (record.evaluation, record.batches["used"]) == ({"loss": 3}, 8)
    ended = tj.Checkpointer(tmp_path / "ended")
    for steps in (None, None, 2):  # of 6 that there are, and at an end that has passed
        state, history = tj.run(
            light, model.init(light), model.batches(epochs=2),
            steps=steps, checkpointer=ended,
        )  # fmt: skip
        assert int(state.step) == 6
    assert len(history.steps) == 0
    done = "nothing was left to do: finished after step 6"
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == f"{done}, and this run ends after step 2"
    assert told[told.index(done) - 1] == "goes on after step 6, from its checkpoint"


@pytest.mark.slow
def test_a_run_goes_on_after_2_to_the_31_steps(light, tmp_path):
    """The int32 of the state is negative then; numbers of steps are not."""
    start = model.init(light)
    saving = tj.Checkpointer(tmp_path / "run")
    state = light.place(dataclasses.replace(start, step=np.int32(2**31 - 2)))
    given = {"batches": [*itertools.islice(model.batches(), 3)]}
    for steps in (2, 3):
        given["state"] = light.place(state)
        state_after, history = train(light, saving, steps=steps, **given)
    assert saving.steps == (2**31, 2**31 + 1)
    assert int(state_after.step) == 1 - 2**31 and len(history.metrics["loss"]) == 1


@pytest.mark.slow
def test_what_is_saved_is_from_before_the_next_step_takes_it_over(
    step, tmp_path, compiled
):
    saving = tj.Checkpointer(tmp_path, every=1, keep=9)
    kept = {}
    state = model.init(step)
    batches = model.batches()
    for number in range(1, 4):
        state, _ = train(step, None, 1, batches, state)
        kept[number] = model.bits(state)
    tj.check_mirrored(state)
    assert nonfinite_leaves("params", state.params) == []
    compiled.clear()
    train(step, saving, 3)
    assert compiled == []
    for number, expected in kept.items():
        restored = saving.restore(step, model.init(step), number=number)
        model.assert_same_bits(restored, expected)


# Other towers


@pytest.mark.slow
def test_a_run_says_what_was_other_where_it_was_saved(
    light, tmp_path, monkeypatch, capsys
):
    saving = tj.Checkpointer(tmp_path)
    data = model.batches()
    train(light, saving, 2)
    four = model.build_light(tj.Mirrored(["cpu:0"], towers=4))
    versions = record.library_versions()
    monkeypatch.setattr(record, "library_versions", lambda: {**versions, "jax": "9.9"})
    state = four.init(np.float32(0))
    tj.run(four, state, data, steps=3, checkpointer=saving)
    told = (
        f"goes on after step 2, from its checkpoint; strategy was {light.strategy!r},"
        f" and is now {four.strategy!r}; jax was {jax.__version__}, and is now 9.9\n"
    )
    assert told in capsys.readouterr().err


def build_other(*, rate=0.1, power=2, devices=2, towers=4, jitted=False):
    def loss_fn(w, batch, tower):
        if jitted:
            jax.debug.callback(lambda x: None, w)
        return tj.Weighted.mean(w * batch**power, tower.weight)

    names = [f"cpu:{i}" for i in range(devices)]
    strategy = tj.Mirrored(names if devices > 2 else None, towers=towers)
    return tj.build_train_step(loss_fn, optax.sgd(rate), strategy, audit=False)


UPDATE = "the optimizer, its numbers or another part of the update changed since then"
LOSS = "the loss function or the shapes of its batches changed since then"
OTHERS = {
    "the same": ({}, 8, None),
    "a learning rate": ({"rate": 0.2}, 8, UPDATE),
    "a loss": ({"power": 3}, 8, LOSS),
    "batches": ({}, 16, LOSS),
    "both": ({"rate": 0.2, "power": 3}, 8, f"{LOSS}; {UPDATE}"),
    "Python in it": ({"jitted": True}, 8, None),
    "devices": ({"devices": 4, "power": 3}, 8, "strategy was"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_says_that_it_goes_on_as_another_experiment(name, tmp_path, capsys):
    options, rows, told = OTHERS[name]
    saving = tj.Checkpointer(tmp_path, batches="anew")

    def run(step, steps, rows):
        data = [np.ones(rows, np.float32)] * steps
        state = step.init(np.float32(0))
        tj.run(step, state, data, steps=steps, checkpointer=saving)
        return [x for x in capsys.readouterr().err.splitlines() if "goes on" in x]

    assert run(build_other(), 2, 8) == []
    first, *others = run(build_other(**options), 4, rows)
    assert first.startswith("goes on after step 2, from its checkpoint")
    if name == "devices":  # on which programs depend
        assert told in first and others == []
    else:
        assert others == ([f"goes on as another experiment: {told}"] if told else [])
    # What it saves is its own: the same run goes on in silence.
    assert run(build_other(**options), 6, rows)[1:] == []
    assert len(saving.record(6).programs["update"]) == 1


@pytest.mark.slow
def test_a_run_says_on_how_many_devices_it_was_saved(light, tmp_path):
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    saved = saving.record(1)
    fewer = dataclasses.replace(saved, devices=("gpu:0", "gpu:1"), towers=6)
    texts = record.what_was_other(fewer, light.strategy)
    here = len(light.strategy.placement.devices)
    devices = f"devices was 2 of gpu, and is now {here} of cpu"
    assert texts == [f"towers was 6, and is now {light.strategy.num_towers}", devices]
    assert record.what_was_other(saved, light.strategy) == []


@pytest.mark.slow
def test_other_towers_deal_out_what_was_there_and_go_on(step, tmp_path):
    """They go on at the ragged batch, which needs no program of its own."""
    saving = tj.Checkpointer(tmp_path, batches="count")
    state, _ = train(step, saving, 2)
    assert saving.record(2).batch_rows == (16,)
    old = model.bits(state)
    three = model.build(3, towers=3, max_programs=1)
    new = model.bits(saving.restore(three, model.init(three)))
    for part in ("params", "opt_state", "rng", "step"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(new, part), getattr(old, part)
        )
    assert old.local["rows"].value.sum() == 32
    assert new.local["rows"].value.tolist() == [11, 11, 10]
    mean = old.local["mean"].value.astype(np.float64).mean()
    np.testing.assert_allclose(new.local["mean"].value, [mean] * 3, rtol=1e-6)
    keys = old.local["key"].value
    assert (keys[0] != keys[1]).any()
    np.testing.assert_array_equal(new.local["key"].value, [keys[0]] * 3)
    batches = (batch for batch in model.batches())  # of which nobody knows the sizes
    state, _ = train(three, saving, batches=batches)
    assert int(state.step) == model.STEPS
    assert three.placer.batch_rows == {16}  # and not 18


def saved_at_once(step, saving, state):
    """A checkpoint of a state, without a run."""
    with contextlib.ExitStack() as stack:
        source = Source([])
        Saving(saving, step, state, source, stack).save(Point(state))


@pytest.mark.slow
def test_a_variable_without_one_value_stays_on_as_many_towers(step, other, tmp_path):
    def with_own(step, factor=0):
        numbers = np.arange(step.strategy.placement.num_towers, dtype=np.float32)
        local = {"own": tj.TowerLocal(np.float32(0), tj.Reduction.NONE)}
        state = step.init(model.params(), local=local)
        own = dataclasses.replace(state.local["own"], value=factor * numbers)
        return step.place(dataclasses.replace(state, local={"own": own}))

    saving = tj.Checkpointer(tmp_path)
    state = with_own(step, 3)
    saved_at_once(step, saving, state)
    restored = saving.restore(other, with_own(other))
    model.assert_same_bits(restored, model.bits(state))
    four = model.build(4, towers=4)
    with pytest.raises(tj.CheckpointError, match=r"\['own'\].*the 8 of the checkpoint"):
        saving.restore(four, with_own(four))


# Another model, another folder


def other_model(step, **changes):
    local = {"rows": tj.TowerLocal(np.zeros(3, np.int32), tj.Reduction.SUM)}
    return step.init({**model.params(), **changes}, local=local)


@pytest.mark.slow
def test_another_model_is_refused_before_training(three, monkeypatch):
    step = model.build(2)
    monkeypatch.setattr(type(step), "dispatch", None)
    state = other_model(step, w=np.zeros(4, np.float32), new=np.ones(1, np.float32))
    with pytest.raises(tj.CheckpointError) as error:
        train(step, tj.Checkpointer(three), state=state)
    text = str(error.value)
    assert "/4' belongs to another model" in text
    assert "state.opt_state[0].trace['new'] is absent, expected float32[1]" in text
    assert "tower-local ONLY_FIRST_TOWER, expected absent" in text
    assert "expected int32[3], tower-local SUM" in text
    state = model.init(step)
    half = {**state.params, "half": state.params["half"].astype(np.float32)}
    state = dataclasses.replace(state, params=half)
    with pytest.raises(
        tj.CheckpointError,
        match=r"params\['half'\] is bfloat16\[3\], expected float32\[3\]",
    ):
        train(step, tj.Checkpointer(three), state=state)


def test_a_folder_that_cannot_be_written_to_is_refused(light, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(tj.CheckpointError, match=r"written to.*\(E\w+\). Name a "):
            train(light, tj.Checkpointer(path))
    with pytest.raises(tj.CheckpointError, match=r"cannot be read.*ENAMETOOLONG"):
        print(tj.Checkpointer("long" * 99).steps)
    monkeypatch.setattr(
        folder.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=9)
    )
    with pytest.raises(tj.CheckpointError, match=r"MB are free in .* Make room"):
        train(light, tj.Checkpointer(tmp_path / "full"))
    with folder.lock(tj.Checkpointer(tmp_path / "just enough").path, needed=9):
        pass

    def full(_):
        raise OSError(errno.EDQUOT, "Over the quota")

    monkeypatch.setattr(folder.shutil, "disk_usage", full)
    with pytest.raises(tj.CheckpointError, match=r"quota \(EDQUOT\)\. Make room\."):
        train(light, tj.Checkpointer(tmp_path / "full"))


def no_room(where, fields):
    raise OSError(errno.ENOSPC, "No space left on device")


def no_room_and_ctrl_c(where, fields):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)  # the run waits again
    no_room(where, fields)


# How often it is saved, in how many steps, which one fails, how, and which ones stay.
UNWRITTEN = [
    pytest.param(2, 8, 4, no_room, (2,), id="between", marks=pytest.mark.slow),
    pytest.param(None, 2, 2, no_room, (), id="last", marks=pytest.mark.slow),
    pytest.param(None, 2, 2, no_room_and_ctrl_c, (), id="ctrl_c"),
]


@pytest.mark.parametrize("every, steps, at, fail, kept", UNWRITTEN)
def test_a_checkpoint_that_cannot_be_written_is_told_and_nothing_is_lost(
    light, tmp_path, monkeypatch, light_bits, capfd, every, steps, at, fail, kept
):
    saving = tj.Checkpointer(tmp_path, every=every)
    seal = folder.seal

    def sealed(where, fields):
        (fail if fields["step"] == at else seal)(where, fields)

    monkeypatch.setattr(folder, "seal", sealed)
    with pytest.raises((tj.CheckpointError, KeyboardInterrupt)) as failure:
        train(light, saving, steps)
    assert failure.type is tj.CheckpointError
    assert re.search(f"of step {at} could not.*No space", str(failure.value))
    note = "The run was ending because of KeyboardInterrupt()."
    notes = getattr(failure.value, "__notes__", [])
    assert (note in notes) == (fail is no_room_and_ctrl_c)
    assert int(failure.value.state.step) in (min(steps, at + 2), steps)
    assert saving.steps == kept and not folder.unfinished(tmp_path)
    monkeypatch.undo()
    state, _ = train(light, saving)
    model.assert_same_bits(state, light_bits)
    assert capfd.readouterr().err == ""  # what Orbax logs is in the error


@pytest.mark.slow
def test_an_old_checkpoint_that_cannot_be_removed_is_told_as_that(
    light, tmp_path, monkeypatch
):
    def refuse(path, missing_ok=False):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(type(epath.Path(tmp_path)), "rmtree", refuse)
    saving = tj.Checkpointer(tmp_path, every=1, keep=1)
    text = r"cannot be deleted from .* Directory not empty \(ENOTEMPTY\)"
    with pytest.raises(tj.CheckpointError, match=text):
        train(light, saving)
    assert saving.steps == (2,) and (tmp_path / folder.DELETED / "1").is_dir()
    monkeypatch.undo()
    train(light, saving)
    assert not (tmp_path / folder.DELETED).exists()


def told_without_room(path, bytes, after):
    """What a run is told where files may have so many bytes, as on a full disk."""
    step = model.build_light()
    saving = tj.Checkpointer(path, every=4)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def hook(number, _):
        if number == after:
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))

    hook(0, {})
    with pytest.raises(tj.CheckpointError) as error:
        train(step, saving, hooks=[hook])
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert saving.steps == ()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bytes, after, text",
    [(200, 2, "of step 4 could not be written"), (0, 0, r"File too large \(EFBIG\)")],
)
def test_a_system_that_refuses_to_write_is_told(tmp_path, bytes, after, text):
    told = forked.called(told_without_room, tmp_path, bytes, after)
    assert re.search(text, told)


@pytest.mark.slow
def test_a_state_beyond_the_checkpoints_is_gone_on_with(step, copied, undisturbed):
    state = model.init(step)
    batches = model.batches()
    state, _ = train(step, None, 6, batches, state)
    saving = tj.Checkpointer(copied)
    state, _ = train(step, saving, 2, batches, state)
    assert saving.steps == (3, 4, 8)
    model.assert_same_bits(state, undisturbed[0])
    other = dataclasses.replace(model.init(step), step=state.step, opt_state=())
    with pytest.raises(ValueError, match="made for another optimizer"):
        train(step, saving, 2, batches, other)


def test_two_runs_do_not_share_a_folder(light, tmp_path):
    saving = tj.Checkpointer(tmp_path)
    unfinished = tmp_path / "1.orbax-checkpoint-tmp"
    with folder.lock(saving.path):
        unfinished.mkdir()
        with pytest.raises(tj.CheckpointError, match="Another run is writing"):
            train(light, saving, 1)
        assert unfinished.is_dir()
    train(light, saving, 1)
    assert not unfinished.is_dir() and saving.steps == (1,)


@pytest.mark.slow
def test_threads_save_at_once_into_folders_of_their_own(light, tmp_path):
    def trains(name):
        saving = tj.Checkpointer(tmp_path / name, every=1)
        for steps in (3, 6):  # the second goes on
            train(light, saving, steps)
        saved[name] = saving.steps

    saved = {}
    threads = [threading.Thread(target=trains, args=(i,), daemon=True) for i in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert saved == dict.fromkeys("abc", (4, 5, 6))


# Damage


def files_of(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


def files_told_of(saved):
    """The files of a checkpoint without which it is not restored."""
    unread = ("_CHECKPOINT_METADATA", "commit_success.txt")
    return [path for path in files_of(saved) if path.name not in unread]


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


DAMAGES = {
    "cut": lambda x: x[:-1],
    "longer": lambda x: x + b"x",
    "flipped": lambda x: flipped(x, len(x) * 4),
    "empty": lambda x: b"",
    "zeros": lambda x: bytes(len(x)),
}
NO_FILE = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda path: path.symlink_to(path.with_name("outside")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["missing", *DAMAGES, *NO_FILE])
def test_every_file_that_is_damaged_is_named(step, copied, kind):
    """And never waited for, as a pipe is for who writes into it."""
    saving = tj.Checkpointer(copied)
    like = model.init(step)
    assert len(files_told_of(copied / "4")) > 8
    for path in files_told_of(copied / "4"):
        content = path.read_bytes()
        if kind in DAMAGES:
            path.write_bytes(DAMAGES[kind](content))
        else:
            path.unlink()
            NO_FILE.get(kind, lambda path: None)(path)
        with pytest.raises(tj.CheckpointError, match="/4' was changed after") as error:
            saving.restore(step, like)
        assert path.relative_to(copied / "4").as_posix() in str(error.value)
        path.rmdir() if kind == "folder" else path.unlink(missing_ok=True)
        path.write_bytes(content)
    saving.restore(step, like)


@pytest.mark.slow
def test_a_flipped_bit_is_told_or_harmless(tmp_path):
    """Of a large array, too, where Orbax alone reads another number."""
    step = model.build_light()
    numbers = np.random.default_rng(0)
    big = numbers.normal(size=30_000).astype(np.float32)
    state = step.init(np.float32(0), extra={"big": big})
    saving = tj.Checkpointer(tmp_path)
    state, _ = train(step, saving, 1, state=state)
    right = model.bits(state)
    record = saving.record(1)
    told = 0
    files = files_of(tmp_path / "1")
    sizes = np.array([path.stat().st_size for path in files])
    for place in numbers.choice(
        len(files), 60, p=sizes / sizes.sum() / 2 + 0.5 / len(sizes)
    ):
        content = files[place].read_bytes()
        files[place].write_bytes(flipped(content, numbers.integers(8 * len(content))))
        try:
            model.assert_same_bits(saving.restore(step, state), right)
            assert saving.record(1) == record
        except tj.CheckpointError:
            told += 1
        files[place].write_bytes(content)
    assert told > 30


@pytest.mark.slow
@pytest.mark.parametrize("name, code", [
    ("manifest.ocdbt", "ECONNRESET"), ("manifest.ocdbt", "EACCES"),
    (folder.TABLE, "EIO"), (folder.TABLE, "ESTALE"),
])  # fmt: skip
def test_what_cannot_be_read_now_is_not_called_damaged(
    step, three, monkeypatch, name, code
):
    """To whom it is called damaged deletes it."""
    kind = type(epath.Path(three))
    methods = {"open": kind.open, "read_bytes": kind.read_bytes}

    def refusing(method):
        def called(path, *args):
            if path.name == name:
                number = getattr(errno, code)
                raise OSError(number, os.strerror(number), str(path))
            return methods[method](path, *args)

        return called

    for method in methods:
        monkeypatch.setattr(kind, method, refusing(method))
    with pytest.raises(tj.CheckpointError) as error:
        tj.Checkpointer(three).restore(step, model.init(step))
    text = (
        f"/4': {os.strerror(getattr(errno, code))} ({code}). The files may be undamaged"
    )
    assert text in str(error.value) and "delete" not in str(error.value)


def test_a_lock_that_was_deleted_lets_the_first_run_write_no_more(light, tmp_path):
    """For others may write there now; the lock of an ended run hinders none."""

    def second(number, _):
        if number == 1:  # before the first has written anything
            (tmp_path / ".lock").unlink()
            train(light, tj.Checkpointer(tmp_path), 1)

    saving = tj.Checkpointer(tmp_path, every=2)
    with pytest.raises(tj.CheckpointError, match=r"\.lock', .* was deleted or repl"):
        train(light, saving, 4, hooks=[second])
    assert saving.steps == (1,)
    train(light, saving, 3)
    assert saving.steps == (1, 2, 3)


@pytest.mark.parametrize("kind", NO_FILE)
def test_a_lock_that_is_no_plain_file_is_refused(light, tmp_path, kind):
    """A run writes its name into the lock, and not where a link leads."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    NO_FILE[kind](tmp_path / ".lock")
    with pytest.raises(tj.CheckpointError, match=r"/\.lock', .* is a link.* Del"):
        train(light, tj.Checkpointer(tmp_path))
    assert outside.read_text() == "mine"


@pytest.mark.slow
def test_what_others_own_is_refused_before_the_first_step(step, copied, monkeypatch):
    """A checkpoint that cannot be deleted would end the run after its first save."""

    def dispatch(*_):
        raise AssertionError("a step was done")

    own = str(copied / "2" / "default")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != own)
    monkeypatch.setattr(type(step), "dispatch", dispatch)
    text = r"deleted from '.*copied': '.*/2/default' is read-only \(EACCES\)\. Name"
    with pytest.raises(tj.CheckpointError, match=text):
        train(step, tj.Checkpointer(copied), 6)


@pytest.mark.slow
def test_a_copy_under_another_steps_name_is_refused(step, copied):
    (copied / "4").rename(copied / "9")
    saving = tj.Checkpointer(copied)
    text = "/9' was saved after step 4.* Name it '4' or"
    for call in (
        lambda: saving.record(9),
        lambda: saving.restore(step, model.init(step)),
        lambda: train(step, saving),
    ):
        with pytest.raises(tj.CheckpointError, match=text):
            call()
    (copied / "04").mkdir()  # not a name that is given
    assert saving.steps == (2, 3, 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "default/more"])
@pytest.mark.parametrize("number", [2, 4])
def test_a_pipe_at_which_orbax_would_wait_is_refused(step, copied, name, number):
    """Of an older checkpoint, too: a manager reads all of them."""
    path = copied / str(number) / name
    saving = tj.Checkpointer(copied)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    text = f"/{number}' was changed after it was written: {name} is not a file. Rest"
    with pytest.raises(tj.CheckpointError, match=text):
        train(step, saving, 5)
    with pytest.raises(tj.CheckpointError, match=text):
        saving.restore(step, model.init(step), number=number)


def test_a_table_that_names_a_file_outside_is_refused(light, tmp_path):
    saving = tj.Checkpointer(tmp_path / "run")
    train(light, saving, 1)
    (tmp_path / "x").write_text("outside")
    table = folder.read_table(saving.path / "1")
    size_and_crc = folder._checksum(epath.Path(tmp_path / "x"))
    table["files"]["../../x"] = size_and_crc
    folder.write_table(saving.path / "1", table)
    with pytest.raises(tj.CheckpointError, match=r"\.\./x is missing, or not a file"):
        saving.restore(light, model.init(light))


# Fields of the record that a forger changes, and their new values.
FORGED = {
    "step": [None, "1", [1], {}],
    "strategy": [3, None],
    "towers": ["x", None, -1],
    "devices": [3, [1], None],
    "leaves": [3, [], [3], [{}], [{"name": "x"}], {"a": 1}],
    "batches": [3, {}, {"used": "1", "cursor": None}, {"used": 1}],
    "batch_rows": [3, ["x"]],
    "evaluation": [3, {"loss": "x"}, {"loss": [1]}],
    "evaluation_due": [3, "no"],
    "stopping": [3, {"loss": 1}, {"loss": {"x": 1}}],
    "versions": [3, {"jax": 1}],
    "programs": [3, {"towers": 3}, {"towers": [1]}],
    "more": [1],
}


def test_a_forged_table_is_refused_in_words(light, tmp_path):
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    table = folder.read_table(saving.path / "1")
    forged = [{"record": 3}, {"record": None}, {"files": 3}, {"files": {"x": [1]}}]
    forged += [
        {"record": {**table["record"], name: value}}
        for name, values in FORGED.items()
        for value in values
    ]
    for change in forged:
        folder.write_table(saving.path / "1", {**table, **change})
        with pytest.raises(tj.CheckpointError):
            saving.restore(light, model.init(light))


def test_containers_that_have_no_leaves_belong_to_the_model(tmp_path):
    """AdamW's leaves are those of Adam, but not the tuples around them."""
    saving = tj.Checkpointer(tmp_path)

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch) ** 2, tower.weight)

    def run(optimizer, steps):
        step = tj.build_train_step(loss_fn, optimizer, tj.OneDevice())
        batches = [np.ones(8, np.float32)] * steps
        options = {"checkpointer": saving, "progress": False}
        return tj.run(step, step.init(np.float32(0)), batches, **options)

    run(optax.adam(0.1), 1)
    text = (
        r"another model: .* state\['opt_state'\] is a list of 2, expected a list of 3"
    )
    with pytest.raises(tj.CheckpointError, match=text):
        run(optax.adamw(0.1), 2)


def test_chunks_larger_than_their_leaf_are_refused(light, tmp_path):
    """TensorStore would ask for their memory, and the process would end."""
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    where = saving.path / "1"
    store = {"driver": "ocdbt", "base": f"file://{where}/default/"}
    files = tensorstore.KvStore.open(store).result()
    name = "rng/.zarray"
    fields = {**json.loads(files[name]), "chunks": [2**34]}
    files.write(name, json.dumps(fields).encode()).result()
    record_of = folder.read_table(where)["record"]
    (where / folder.TABLE).unlink()
    folder.seal(where, record_of)
    text = r"rng'\] has the shape \[2\], but chunks of \[17179869184\]. Restore the"
    with pytest.raises(tj.CheckpointError, match=text):
        saving.restore(light, model.init(light))


def test_a_link_at_the_name_of_a_table_that_is_written_leads_nowhere(light, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    saving = tj.Checkpointer(tmp_path / "run")
    train(light, saving, 1)
    (tmp_path / "run" / "1" / f"{folder.TABLE}.tmp").symlink_to(outside)
    folder.write_table(saving.path / "1", folder.read_table(saving.path / "1"))
    assert outside.read_text() == "mine"
    names = [path.name for path in (saving.path / "1").iterdir()]
    assert [name for name in names if name.startswith(folder.TABLE)] == [folder.TABLE]


def test_a_file_that_has_the_name_of_a_checkpoint_is_refused(light, tmp_path):
    (tmp_path / "10").write_text("notes")
    saving = tj.Checkpointer(tmp_path)
    with pytest.raises(tj.CheckpointError, match="/10' is not a folder, but the check"):
        train(light, saving, 1)
    assert saving.steps == () and (tmp_path / "10").read_text() == "notes"


def deleted_while_read(copied, monkeypatch, name):
    """Have 4 be saved and 3 be deleted as soon as a file of 3 is read."""
    (copied / "4").rename(copied / "later")
    read = getattr(folder, name)

    def reading(path, *args):
        if (copied / "later").exists():
            (copied / "later").rename(copied / "4")
            shutil.rmtree(copied / "3")
        return read(path, *args)

    monkeypatch.setattr(folder, name, reading)


@pytest.mark.slow
def test_what_is_deleted_while_it_is_read_is_not_called_damaged(
    step, copied, monkeypatch
):
    """An evaluator reads beside a training: the newest there is then."""
    saving = tj.Checkpointer(copied, best="loss")
    like = model.init(step)
    expected = model.bits(saving.restore(step, like))
    for name in ("_checksum", "read_table"):
        shutil.copytree(copied / "4", copied / "3", dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            deleted_while_read(copied, patch, name)
            model.assert_same_bits(saving.restore(step, like), expected)
    gone = [
        lambda: saving.restore(step, like, number=3),
        lambda: saving.record(3),
    ]
    for call in gone:
        shutil.copytree(copied / "4", copied / "3")
        with monkeypatch.context() as patch:
            deleted_while_read(copied, patch, "_is_file")
            with pytest.raises(tj.CheckpointError, match=r"no checkpoint of step 3 in"):
                call()
    shutil.copytree(copied / "4", copied / "3")
    with monkeypatch.context() as patch:
        deleted_while_read(copied, patch, "_is_file")
        assert saving.best_step is None


def test_a_run_moves_a_checkpoint_away_before_it_deletes_it(
    light, tmp_path, monkeypatch
):
    """So that what can be read under its number is whole."""
    deleted = []
    kind = type(epath.Path(tmp_path))
    rmtree = kind.rmtree
    monkeypatch.setattr(
        kind, "rmtree", lambda path, *args: deleted.append(path) or rmtree(path, *args)
    )
    train(light, tj.Checkpointer(tmp_path, every=1, keep=1), 4)
    assert {*deleted} == {epath.Path(tmp_path / folder.DELETED)} and len(deleted) == 3


@pytest.mark.slow
def test_what_a_killed_process_left_does_not_count(step, copied):
    for name in ("9.orbax-checkpoint-tmp", "1.orbax-checkpoint-tmp-7"):
        (copied / name).mkdir()
    (copied / "9.orbax-checkpoint-tmp" / folder.TABLE).write_text("{")
    (copied / "notes.orbax-checkpoint-tmp").write_text("mine")
    saving = tj.Checkpointer(copied)
    assert saving.steps == (2, 3, 4)
    train(step, saving, 5)
    assert saving.steps == (3, 4, 5)
    left = [path.name for path in copied.glob("*tmp*")]
    assert left == ["notes.orbax-checkpoint-tmp"]


def test_nothing_is_pickled(light, tmp_path, monkeypatch):
    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 1)
    saving.restore(light, model.init(light))
    for path in files_of(tmp_path):
        assert not path.read_bytes().startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04"))


# Without this library


@pytest.mark.slow
def test_a_plain_manager_lists_and_restores_every_step(step, three):
    saving = tj.Checkpointer(three)
    with CheckpointManager(three) as manager:
        assert manager.all_steps() == [2, 3, 4] == list(saving.steps)
        restored = [manager.restore(number) for number in saving.steps]
    with CheckpointManager(three) as manager:
        like = {"params": restored[-1]["params"]}
        own = construct_restore_args(like)
        some = PyTreeRestore(like, restore_args=own, partial_restore=True)
        part = manager.restore(4, args=some)
    for number, found in zip(saving.steps, restored, strict=True):
        state = model.bits(saving.restore(step, model.init(step), number=number))
        assert found["params"].pop("none") is None  # Orbax has no arrays of size 0
        params = {name: x for name, x in state.params.items() if x.size}
        chex.assert_trees_all_equal(found["params"], params, strict=True)
        assert found["step"] == number and found["rng"].tolist() == state.rng.tolist()
        assert (
            found["opt_state"][0]["trace"]["w"] == state.opt_state[0].trace["w"]
        ).all()
        local = {name: x.value for name, x in state.local.items()}
        found = {name: x["value"] for name, x in found["local"].items()}
        chex.assert_trees_all_equal(found, local, strict=True)
    assert part["params"].pop("none") is None
    chex.assert_trees_all_equal(part["params"], params, strict=True)
    assert saving.record(4).step == 4  # the manager has changed nothing
    saving.restore(step, model.init(step))


PLAIN = """
import sys, numpy as np, orbax.checkpoint as ocp
manager = ocp.CheckpointManager(sys.argv[1])
found = [manager.restore(number) for number in manager.all_steps()]
print([float(np.sum(x["local"]["rows"]["value"])) for x in found], len(sys.modules))
assert not any(name.startswith("towerjax") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_process_with_one_device_and_orbax_alone_restores_every_step(three):
    words = [sys.executable, "-c", PLAIN, str(three)]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.stdout.startswith("[32.0, 40.0, 56.0]"), done.stderr


def test_leaves_that_orbax_takes_for_one_are_refused(light, tmp_path):
    params = {"a.b": np.float32(1), "a": {"b": np.float32(2)}}
    step = tj.build_train_step(
        lambda params, batch, tower: tj.Weighted.mean(batch["y"], tower.weight),
        optax.sgd(0.1),
        tj.OneDevice(),
    )
    text = r"params\['a'\]\['b'\] and .*params\['a.b'\] would have the same name"
    with pytest.raises(tj.CheckpointError, match=text):
        train(step, tj.Checkpointer(tmp_path), state=step.init(params))


# The record


@pytest.mark.slow
def test_the_record_says_what_is_inside(step, three):
    record = tj.Checkpointer(three).record(4)
    assert record.towers == 8 and record.devices == ("cpu:0", "cpu:1")
    assert record.strategy == repr(step.strategy)
    assert record.versions["jax"] == jax.__version__
    assert record.versions["towerjax"] == tj.__version__
    assert record.batches["used"] == 4
    assert record.batches["cursor"]["position"] == 4
    leaves = {leaf.name: leaf for leaf in record.leaves}
    assert leaves["state.local['rows'].value"].reduction == "SUM"
    assert leaves["state.params['half']"].dtype == "bfloat16"
    assert leaves["state.rng"].dtype == "key of threefry2x32"


EIGHT_BITS = """float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn
    float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu""".split()
DTYPES = """bool int8 uint8 int16 uint16 int32 uint32 bfloat16 float16 float32
    complex64""".split()


def of_all_dtypes(number):
    """A leaf of each dtype that devices hold, and of each kind of key."""
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    keys = [jax.random.key(number, impl=kind) for kind in kinds]
    numbers = number * np.array([1.0, 2.0, 0.5])
    dtypes = DTYPES + EIGHT_BITS
    values = {name: numbers.astype(jnp.dtype(name)) for name in dtypes}
    return {"keys": [*keys, jax.random.split(keys[0], 3)], **values}


@pytest.mark.slow
def test_every_dtype_comes_back_with_its_bits(tmp_path):
    """Of values that all towers share, and of each tower's own."""

    def light_loss_fn(params, batch, tower):
        return tj.Weighted.mean((params - batch["y"]) ** 2, tower.weight)

    def init(number):
        values = of_all_dtypes(number)
        local = tj.TowerLocal(values, tj.Reduction.ONLY_FIRST_TOWER)
        return step.init(np.float32(0), extra=values, local=local)

    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"))
    step = tj.build_train_step(light_loss_fn, optax.sgd(0.1), strategy)
    saving = tj.Checkpointer(tmp_path)
    state = init(1)
    state, _ = tj.run(step, state, [model.data()], checkpointer=saving, progress=False)
    found = saving.restore(step, init(2))

    def shown(x):
        numbers = np.asarray(jax.random.key_data(x) if is_key(x) else x)
        return str(x.dtype), x.sharding, numbers.tobytes()

    assert jax.tree.map(shown, found) == jax.tree.map(shown, state)


@pytest.mark.slow
def test_a_later_format_is_refused(step, copied):
    path = copied / "4" / folder.TABLE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(tj.CheckpointError, match="has format 2, .* reads format 1"):
        train(step, tj.Checkpointer(copied))


# Where the data goes on


@pytest.mark.slow
def test_batches_that_do_not_know_where_they_are(light, light_bits, tmp_path):
    def generator():
        yield from model.batches()

    text = "no get_state and set_state. Write batches='count'"
    with pytest.raises(tj.CheckpointError, match=text):
        train(light, tj.Checkpointer(tmp_path), batches=generator())
    anew = tj.Checkpointer(tmp_path / "anew", batches="anew")
    train(light, anew, 3, generator())
    text = "checkpoint of step 3 did not. Pass batches like those, or write"
    with pytest.raises(tj.CheckpointError, match=text):
        train(light, tj.Checkpointer(tmp_path / "anew"), batches=model.batches())
    source = model.batches().at(3)
    state, _ = train(light, anew, batches=(b for b in source))
    model.assert_same_bits(state, light_bits)


@pytest.mark.slow
def test_a_list_that_ends_too_early_is_refused(light, tmp_path):
    source = model.batches()
    batches = [next(source) for _ in range(8)]
    saving = tj.Checkpointer(tmp_path)
    train(light, saving, 3, batches)
    copied = shutil.copytree(tmp_path, tmp_path / "copied")
    with pytest.raises(ValueError, match="An earlier run used 3 batches.* end after 2"):
        train(light, saving, None, batches[:2])
    with pytest.raises(ValueError, match="step 7, but batches ended after step 5"):
        train(light, tj.Checkpointer(copied), 7, batches[:5])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cursor", "count"])
def test_what_a_run_left_is_counted_from_the_first(light, light_bits, tmp_path, way):
    """The run that goes on with error.batches is ended, too; then a new process."""
    source = model.batches()
    batches = [next(source) for _ in range(8)]
    saving = tj.Checkpointer(tmp_path)
    saving = dataclasses.replace(saving, batches=way)
    made = (lambda: batches) if way == "cursor" else (lambda: (b for b in batches))
    with pytest.raises(Stop) as caught:
        train(light, saving, batches=made(), hooks=[stopping_at(2)])
    done = int(caught.value.state.step)
    left = {"batches": caught.value.batches, "state": caught.value.state}
    train(light, saving, 6 - done, **left)
    assert saving.record(6).batches["used"] == 6
    state, history = train(light, saving, batches=made())
    assert history.steps.tolist() == [7, 8]
    model.assert_same_bits(state, light_bits)


def test_no_batch_is_left_out_before_the_first_that_was_used():
    source = Source(iter(range(8)))
    stream = source.stream(lambda batch: batch, 0)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    used = stream.get_state()
    source.use(used)
    assert [next(stream), next(stream)] == [3, 4]
    left = source.rest()
    assert next(left) == 3  # by hand
    again = Source(left)
    again.go_to(Position(6))
    assert (again.last, next(again)) == (Position(6), 6)
    with pytest.raises(ValueError, match="2 batches, but these begin after 7"):
        Source(left).go_to(Position(2))


@pytest.mark.slow
def test_a_distributed_data_set_takes_no_other_cursor(light, tmp_path):
    with pytest.raises(ValueError, match="Pass the batches whose position was saved"):
        train(light, tj.Checkpointer(tmp_path), 2)
        batches = light.strategy.distribute_dataset(model.batches())
        train(light, tj.Checkpointer(tmp_path), 3, batches)


def test_bytes_among_a_cursors_fields():
    fields = {"elements": b"\0a", "rows": 2}
    for cursor in (fields, {"a": {"b": b"1"}, "c": None}, b"x"):
        encoded = json.loads(json.dumps(record.encode_cursor(cursor)))
        assert record.decode_cursor(encoded) == cursor
    for bad in ({1}, np.inf, (1, 2), np.arange(2), {"base64": "AA=="}, {1: 2}):
        with pytest.raises(
            tj.CheckpointError, match="get_state .* returned .* exactly"
        ):
            record.encode_cursor({"at": 1, "b": bad})


# Which ones stay


def metrics_of(values, eval_every=1):
    """An evaluation whose loss is the next one of the values."""
    left = iter(values)

    def metrics(state):
        return {"loss": tj.Weighted(np.float32(next(left)), np.float32(1))}

    options = {"eval_batches": [0], "eval_every": eval_every}
    return {"evaluate": model.Evaluation(metrics), **options}


# What a checkpointer is told, the values and the last step of each run into its
# folder, how often they are made, and which checkpoints stay.
NO_OTHER = {"every": 10, "keep": 2}
KEPT = {
    "min": ({}, [(5, [5, 1, 3, 1, 4])], 1, (2, 4, 5)),
    "max": ({"mode": "max"}, [(4, [5, 9, 3, np.nan])], 1, (2, 3, 4)),
    "worse": ({}, [(3, [5, 4, 3])], 1, (2, 3)),
    "inf": ({"mode": "max"}, [(4, [5, np.inf, 3, 4])], 1, (2, 3, 4)),
    "the last": ({"every": 2, "keep": 3}, [(4, [3, 1])], 3, (2, 3, 4)),
    "two runs": (NO_OTHER, [(3, [3, 1, 2]), (5, [1.5, 1.25])], 1, (2, 3, 5)),
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", KEPT)
def test_the_newest_and_the_best_stay(light, tmp_path, name):
    options, runs, eval_every, kept = KEPT[name]
    options = {"every": 1, "keep": 2, "best": "loss", **options}
    saving = tj.Checkpointer(tmp_path, **options)
    numbers = []
    for steps, values in runs:
        train(light, saving, steps, **metrics_of(values, eval_every))
        numbers += values
    assert saving.steps == kept
    row = np.nanargmax(numbers) if saving.mode == "max" else np.nanargmin(numbers)
    best = min(eval_every * (row + 1), steps)
    assert saving.best_step == best
    assert saving.record(best).evaluation == {"loss": numbers[row]}


@pytest.mark.slow
def test_what_is_due_is_saved_before_the_loader_is_heard(light, tmp_path):
    def loader():
        yield from model.batches(epochs=1).at(1)
        raise Stop

    saving = tj.Checkpointer(tmp_path, every=2, batches="count")
    with pytest.raises(Stop):
        train(light, saving, batches=loader())
    assert saving.steps == (2,)


def test_a_record_has_the_real_numbers_of_an_evaluation():
    values = {
        "loss": 0.5,
        "half": jnp.bfloat16(1.5),
        "count": np.int64(3),
        "tree": {"a": 1.0},
        "pair": (1.0, [2.0, 3.0]),
        "turned": 1j,
        "column": np.ones(2),
        "nan": np.nan,
        "large": np.inf,
    }
    kept = {"loss": 0.5, "half": 1.5, "count": 3.0, "large": math.inf}
    assert record.real_scalars(values) == kept


def test_the_best_is_one_real_number(light, tmp_path):
    one = np.float32(1)
    metrics = {"tree": tj.Weighted({"a": one}, one), "loss": one}
    options = {**metrics_of([]), "evaluate": model.Evaluation(lambda state: metrics)}
    with pytest.raises(ValueError, match="best='tree' must name a .* is a dict"):
        train(light, tj.Checkpointer(tmp_path, best="tree", mode="min"), 1, **options)


def test_the_best_accuracy_is_the_greatest_without_a_mode(light, tmp_path):
    saving = tj.Checkpointer(tmp_path, keep=1, best="accuracy")
    values = iter(np.float32([0.5, 0.875, 0.859]))
    of_state = model.Evaluation(lambda state: {"accuracy": next(values)})
    options = {"evaluate": of_state, "eval_batches": [0], "eval_every": 1}
    train(light, saving, 3, **options)
    assert saving.best_step == 2 and saving.steps == (2, 3)


def test_nothing_is_better_than_infinity_in_a_resumed_run_either(light, tmp_path):
    saving = tj.Checkpointer(tmp_path)
    early = tj.EarlyStopping("loss", 3, mode="max")
    train(light, saving, 3, early_stopping=early, **metrics_of([math.inf, 1, 2]))
    options = {"early_stopping": early, **metrics_of([3, 4, 5])}
    state, history = train(light, saving, 6, **options)
    assert int(state.step) == 4 and "best inf after 1" in history.stopped


@pytest.mark.slow
def test_early_stopping_counts_an_evaluation_once(light, tmp_path):
    saving = tj.Checkpointer(tmp_path)
    early = tj.EarlyStopping("loss", 1)
    for _ in range(2):  # a finished run evaluates once more
        options = {"early_stopping": early, **metrics_of([1], eval_every=2)}
        _, history = train(light, saving, 2, **options)
        assert history.stopped is None and len(history.evaluations) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_the_best_is_known_of_a_run_that_was_ended_beside_it(light, tmp_path, kind):
    """SIGTERM comes before the evaluation that is due, or at its end."""

    def kill(record):
        if (record.kind, record.step) == (kind, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    saving = tj.Checkpointer(tmp_path, keep=1, best="loss")
    options = metrics_of([1, 2] if kind == "eval" else [1, 2, 3], eval_every=2)
    with pytest.raises(SystemExit):
        train(light, saving, 6, writers=[model.Calling(kill)], **options)
    assert saving.steps == (2,)
    assert saving.record(2).evaluation_due == (kind == "train")
    train(light, saving, 4, **options)
    assert saving.steps == (2, 4) and saving.best_step == 2
    assert saving.record(2).evaluation == {"loss": 1}


def test_a_checkpoint_that_orbax_did_not_merge_is_not_sealed(
    light, tmp_path, monkeypatch
):
    monkeypatch.setattr(folder, "check_directory", lambda name, directory: None)
    saving = tj.Checkpointer(tmp_path / "layers=[64,64]")
    with pytest.raises(tj.CheckpointError, match="no default/manifest.ocdbt, so noth"):
        train(light, saving, 2)
    assert saving.steps == ()


# Options


@pytest.mark.parametrize("change, text", [
    ({"directory": ""}, "directory='' must be the path of a folder"),
    ({"directory": "ftp://bucket/run"}, "directory='ftp://.* address that etils.epath"),
    ({"directory": pathlib.Path("s3://bucket")}, "as text, because pathlib.Path"),
    ({"directory": "s3://bucket/run"}, "Orbax writes to no other"),
    ({"directory": "runs/layers=[64,64]"}, r"whose absolute path has no '\['\. Orbax"),
    ({"directory": "gs://bucket/a[1]"}, r"has no '\['\. .* as in run_layers=64,64"),
    ({"directory": "a\\b"}, "path has no .* pattern, so nothing could be restored"),
    ({"directory": "a\0b"}, "must be the path of a folder: on this machine"),
    ({"every": 0}, "every=0"),
    ({"keep": 0}, "keep=0"),
    ({"best": 3}, "best=3 must be the name"),
    ({"mode": "less"}, "mode='less' must be one of"),
    ({"batches": "skip"}, "batches='skip' must be one of"),
    ({"exit_code": 0}, "exit_code=0"),
])  # fmt: skip
def test_options_that_cannot_be(change, text):
    with pytest.raises(ValueError, match=text):
        tj.Checkpointer(**{"directory": "folder", **change})


@pytest.mark.slow
def test_what_is_restored_says_where_it_shall_lie(step, tmp_path):
    state = model.init(step)
    saving = tj.Checkpointer(tmp_path)
    host = jax.tree.map(np.asarray, state.params)
    host = dataclasses.replace(state, params=host)
    (tmp_path / "12").mkdir()
    for into, given, number, text in (
        (step, None, 12, "The state is a NoneType"),
        (step, host, 12, r"params\['w'\] is on the host.*Move it with step.place"),
        (model.loss_fn, state, 12, "step=.* cannot be used here"),
        (step, state, 12.0, "no checkpoint of step 12.0"),
    ):
        with pytest.raises(ValueError, match=text):
            saving.restore(into, given, number=number)


def test_options_that_do_not_fit_together(light, tmp_path):
    saving = tj.Checkpointer(tmp_path, best="loss")
    with pytest.raises(ValueError, match="needs an evaluation, and there is none"):
        train(light, saving)
    with pytest.raises(
        TypeError, match=r"checkpointer=tj\.Checkpointer\(folder, best="
    ):
        train(light, None, best="loss", **metrics_of([1]))
    with pytest.raises(ValueError, match="must be None or a tj.Checkpointer"):
        train(light, str(tmp_path))
    with pytest.raises(ValueError, match="not a metric of .*which has \\['loss'\\]"):
        train(
            light, tj.Checkpointer(tmp_path, best="hits", mode="max"), **metrics_of([1])
        )
    with pytest.raises(tj.CheckpointError, match="There is no checkpoint in"):
        tj.Checkpointer(tmp_path / "empty").restore(light, model.init(light))
    with pytest.raises(tj.CheckpointError, match="no checkpoint of step 7"):
        saving.record(7)


# Being asked to end


def kill_at(number, sign=signal.SIGTERM):
    def hook(at, _):
        if at == number:
            os.kill(os.getpid(), sign)

    return hook


def test_sigterm_twice_is_one_and_its_handler_is_put_back(light, tmp_path):
    saving = tj.Checkpointer(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(light, saving, hooks=[kill_at(3), kill_at(4)])
    assert ended.value.code == 75 and signal.getsignal(signal.SIGTERM) is before
    number = int(ended.value.state.step)
    assert saving.steps == (number,) and f"step {number}" in ended.value.__notes__[0]


def ctrl_c_at_3(record):
    if record.step == 3:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"hooks": [kill_at(2)]},
    # once it is in the history, before it is raised
    {"writers": [model.Calling(ctrl_c_at_3)]},
], ids=["sigterm", "ctrl_c"])  # fmt: skip
def test_a_step_that_is_refused_is_not_saved_over(light, tmp_path, options):
    saving = tj.Checkpointer(tmp_path)
    source = model.batches(drop_remainder=True)
    bad = [next(source) for _ in range(3)]
    bad[2] = {**bad[2], "y": bad[2]["y"] * np.nan}
    with pytest.raises((tj.NonFiniteError, KeyboardInterrupt)) as ended:
        train(light, saving, 3, bad, in_flight=8, **options)
    assert ended.type is tj.NonFiniteError and saving.steps == ()


def test_an_error_saves_nothing_and_sigterm_before_it_is_obeyed_after_it(
    light, tmp_path
):
    heard = []
    saving = tj.Checkpointer(tmp_path)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        for signals in ([], [kill_at(3)]):
            with pytest.raises(Stop) as error:
                train(light, saving, hooks=[*signals, stopping_at(3)])
            assert saving.steps == () and int(error.value.state.step) >= 3
            assert heard == [signal.SIGTERM] * len(signals)
    finally:
        signal.signal(signal.SIGTERM, before)


# A model function


@pytest.mark.slow
def test_train_and_evaluate_goes_on(tmp_path):
    optimizer = tj.estimator.TowerOptimizer(optax.adam(0.1))

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(params):
            errors = features @ params["w"] - labels
            return tj.Weighted.mean(errors**2, tower.weight)

        if mode is tj.estimator.Mode.EVAL:
            return tj.estimator.ModelSpec(mode, loss=loss_fn(variables.params))
        loss, train_op = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    data = model.data()
    pairs = (data["x"], data["y"])

    def go(made, checkpointer, **options):
        start = tj.TrainState.create({"w": np.ones(3, np.float32)}, optimizer)
        return tj.estimator.train_and_evaluate(
            made,
            lambda: tj.batches(pairs, model.SIZE, seed=1),
            variables=start,
            epochs=3,
            checkpointer=checkpointer,
            progress=False,
            **options,
        )[0]

    made = tj.estimator.replicate_model_fn(
        model_fn,
        devices=tj.Mirrored(towers=2, cross_tower_ops=tj.PinnedTree()),
        variable_placement=tj.estimator.VariablePlacement.ROUND_ROBIN,
    )
    saving = tj.Checkpointer(tmp_path, every=4)
    expected = model.bits(go(made, None))
    with pytest.raises(Stop):
        go(made, saving, hooks=[stopping_at(5)])
    assert saving.steps == (4,)
    model.assert_same_bits(go(made, saving), expected)


# In other processes


@pytest.mark.slow
def test_two_go_on_to_the_same_bits_and_sigterm_to_one_ends_both(tmp_path):
    """After the same step, where one has stopped."""
    step = model.build(2)
    saving = tj.Checkpointer(tmp_path)
    train(step, saving, 3)
    worker = TESTS / "workers" / "checkpoint_run.py"
    flags = (str(tmp_path), "90")
    forked.told_by_all(forked.program, str(worker), str(tmp_path), flags, code=75)
    number = saving.steps[-1]
    assert 5 <= number < 90 and len(saving.record(number).devices) == 4
    expected, _ = train(step, None, number)
    restored = saving.restore(step, model.init(step))
    model.assert_same_bits(restored, model.bits(expected))


@pytest.mark.slow
def test_killed_at_many_moments_of_saving():
    worker = TESTS / "workers" / "checkpoint_kill.py"
    found = json.loads(forked.printed(worker, "20").splitlines()[-1])
    assert found["kills"] == 20 and found["bad"] == []
    # Some were killed between two checkpoints, some in the middle of one.
    assert found["left"] >= 3 and found["newest"] >= 8
