"""A mistake in a user's function shows the user's lines, and none of ours."""

import _thread
import itertools
import statistics
import subprocess
import sys
import traceback

import jax
import numpy as np
import optax
import pytest
from layouts import mirrored, with_verbs

import towerjax as tj

BATCH = {"x": np.ones((8, 3), np.float32)}
W = np.ones(4, np.float32)


def mistake(w, x):
    return x @ w.reshape(2, 2)


def loss_fn(w, batch, tower):
    return tj.Weighted.mean(mistake(w, batch["x"]), tower.weight)


def tower_fn(state, batch, tower):
    loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
    return {"loss": loss, "grads": grads}


def update_fn(state, merged):
    return mistake(state.params, np.ones((3, 3)))


def metric_fn(w, batch, tower):
    return {"m": loss_fn(w, batch, tower)}


def model_fn(variables, features, labels, mode, tower):
    return mistake(variables.params, features)


def train_step(**options):
    return tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(4, 2), **options)


def train(step):
    return step(step.init(W), BATCH)


def call_model():
    model = tj.estimator.replicate_model_fn(model_fn, devices=mirrored(2))
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))
    variables = tj.TrainState.create(W, optimizer)
    return model(variables, BATCH["x"], np.ones(8), tj.estimator.Mode.TRAIN)


def fn_under_jit():
    step = train_step()
    return jax.jit(step.fn)(step.init(W), BATCH)


ENTRIES = {
    "train": lambda: train(train_step()),
    "micro_batches": lambda: train(train_step(micro_batches=2)),
    "check": lambda: train_step().check(W, BATCH),
    "fn": fn_under_jit,
    "own": lambda: train(tj.build_step(tower_fn, update_fn, mirrored(4, 2, "scan"))),
    "update": lambda: train(tj.build_step(lambda *_: {}, update_fn, mirrored(2))),
    "eval": lambda: tj.build_eval_step(metric_fn, mirrored(2))(W, BATCH),
    "evaluate": lambda: tj.evaluate(
        tj.build_eval_step(metric_fn, mirrored(2)), W, [BATCH]
    ),
    "predict": lambda: tj.build_predict_step(
        lambda w, batch, tower: mistake(w, batch["x"]), tj.OneDevice()
    )(W, BATCH),
    "call": lambda: with_verbs(2).call_for_each_tower(
        lambda tower, x: mistake(W, x), BATCH["x"]
    ),
    "model": call_model,
    "run": lambda: tj.run(train_step(), train_step().init(W), [BATCH], progress=False),
    "audit": lambda: tj.testing.assert_replicates(loss_fn, W, BATCH),
}


@pytest.fixture
def filtering():
    """JAX's default, which the suite turns off."""
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", "off")


@pytest.mark.few_fast(5)
@pytest.mark.usefixtures("filtering")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_mistake_shows_the_users_lines_alone(name):
    with pytest.raises(TypeError) as caught:
        ENTRIES[name]()
    error = caught.value
    files = [x.filename for x in traceback.extract_tb(error.__traceback__)]
    assert {*files} == {__file__}
    assert files and traceback.extract_tb(error.__traceback__)[-1].name == "mistake"
    assert not error.__cause__ and not error.__context__
    shown = "".join(traceback.format_exception(error)).splitlines()
    others = [x for x in shown if not x.startswith("  ")]  # lines of no call
    of_run = name == "run"  # which says what error.state is
    assert len(others) <= 4 + of_run, "\n".join(shown)


@pytest.mark.usefixtures("filtering")
def test_a_refusal_shows_the_users_call_alone():
    step = train_step()
    refused = [
        lambda: step.init({"w": "no array"}),
        lambda: step("no state", BATCH),
        lambda: tj.run(step, None, [BATCH]),
        lambda: mirrored(2).reduce(None, 1.0),
    ]
    for call in refused:
        with pytest.raises(ValueError) as caught:
            call()
        found = traceback.extract_tb(caught.value.__traceback__)
        assert [x.name for x in found][1:] == ["<lambda>"], found


@pytest.mark.slow
@pytest.mark.usefixtures("filtering")
def test_ctrl_c_shows_the_users_line_alone():
    def batches():
        for number in itertools.count():
            if number == 4:  # in the thread that reads in advance
                _thread.interrupt_main()
            yield BATCH

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean(w * batch["x"], tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2))
    with pytest.raises(KeyboardInterrupt) as caught:
        tj.run(step, step.init(W[0]), batches(), progress=False, audit=False)
    found = traceback.extract_tb(caught.value.__traceback__)
    assert {x.filename for x in found} == {__file__}, found
    assert int(caught.value.state.step) == len(caught.value.history.steps)


@pytest.mark.usefixtures("filtering")
def test_an_error_of_jax_is_explained_where_its_own_frames_are_dropped():
    def tower_fn(state, batch, tower):
        return {"a": tj.Sum(batch.sum()), 0: tj.Sum(2.0)}

    step = tj.build_step(tower_fn, lambda state, _: (state, {}), mirrored(2))
    with pytest.raises(ValueError, match="^Comparator raised") as caught:
        step.check(np.ones(3, np.float32), np.ones((4, 3), np.float32))
    cure, of_frames = caught.value.__notes__  # JAX's own note comes last
    assert "make all keys strings" in cure and "internal frames" in of_frames


@pytest.mark.usefixtures("filtering")
def test_what_a_user_calls_of_python_is_shown():
    def loss_fn(w, batch, tower):
        return statistics.mean([w])

    with pytest.raises(TypeError) as caught:
        train(tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(2)))
    files = [x.filename for x in traceback.extract_tb(caught.value.__traceback__)]
    assert files[-1] == statistics.__file__ and files.count(__file__) == 3


def test_all_frames_are_kept_where_jax_keeps_its_own():
    with pytest.raises(TypeError) as caught:
        ENTRIES["train"]()
    files = [x.filename for x in traceback.extract_tb(caught.value.__traceback__)]
    assert sum("towerjax/step" in file for file in files) > 5
    assert sum("/jax/_src/" in file for file in files) > 5


@pytest.mark.slow
@pytest.mark.parametrize("way", [["-c"], ["-m", "IPython", "--colors=NoColor", "-c"]])
def test_a_script_and_a_notebook_show_a_dozen_lines(way, tmp_path):
    program = (
        "import jax, numpy as np, optax, towerjax as tj\n"
        "def loss_fn(w, batch, tower):\n"
        "    return tj.Weighted.mean(undefined * w, tower.weight)\n"
        "step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.OneDevice())\n"
        "state = step.init(1.0)\n"
        "step(state, np.ones(4))\n"
    )
    run = [sys.executable, *way, program]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    shown = [*(done.stdout + done.stderr).splitlines()]
    assert "NameError: name 'undefined' is not defined" in "\n".join(shown)
    assert "/towerjax/" not in "\n".join(shown)
    assert len(shown) <= (12 if way == ["-c"] else 20), "\n".join(shown)
