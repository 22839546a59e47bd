"""Which checkpoints stay: the newest and the best, as the options say."""

import math
import os
import pathlib
import signal

import checkpoint_model as model
import numpy as np
import pytest
from saved_runs import Stop, metrics_of, train

import towerjax as tj

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


def test_the_best_is_one_real_number(light, tmp_path):
    one = np.float32(1)
    metrics = {"tree": tj.Weighted({"a": one}, one), "loss": one}
    options = {**metrics_of([]), "evaluate": model.Evaluation(lambda state: metrics)}
    with pytest.raises(ValueError, match="best='tree' must name a .* is a dict"):
        train(light, tj.Checkpointer(tmp_path, best="tree", mode="min"), 1, **options)


@pytest.mark.slow
def test_the_best_accuracy_is_the_greatest_without_a_mode(light, tmp_path):
    saving = tj.Checkpointer(tmp_path, keep=1, best="accuracy")
    values = iter(np.float32([0.5, 0.875, 0.859]))
    of_state = model.Evaluation(lambda state: {"accuracy": next(values)})
    options = {"evaluate": of_state, "eval_batches": [0], "eval_every": 1}
    train(light, saving, 3, **options)
    assert saving.best_step == 2 and saving.steps == (2, 3)


@pytest.mark.slow
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
