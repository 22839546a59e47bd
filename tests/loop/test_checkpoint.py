"""A training that is stopped anywhere and goes on gives the bits of one that is not."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import resource
import signal
import threading
import time
import types

import checkpoint_model as model
import forked
import jax
import numpy as np
import optax
import pytest
from checkout import TESTS
from etils import epath
from saved_runs import Stop, bits_of_run, metrics_of, stopping_at, train

import towerjax as tj
from towerjax.data.stream import Source
from towerjax.loop.checkpoint import folder, record
from towerjax.loop.checkpoint.saving import Saving
from towerjax.loop.stopping import Point
from towerjax.step.state.nonfinite import nonfinite_leaves


@pytest.fixture(scope="module")
def other():
    """The same step on other devices."""
    return model.build(4)


@pytest.fixture(scope="module")
def undisturbed(step):
    after, losses = bits_of_run(step)
    assert len(set(after.local["mean"].value.tolist())) == 8
    return after, losses


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


@pytest.mark.slow
def test_a_clock_that_is_set_forward_ends_no_save(light, tmp_path):
    """Nor does a save that takes longer than 20 minutes."""
    real = time.time
    jumps = itertools.count()
    saving = tj.Checkpointer(tmp_path, every=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 1500 * next(jumps))
        train(light, saving, 2)
    assert next(jumps) > 4 and saving.steps == (1, 2)


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
