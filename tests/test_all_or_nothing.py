"""A step is all or nothing: what is used, what is given back, and what is lost."""

import dataclasses
import pathlib
import threading

import checkpoint_model as model
import forked
import jax
import numpy as np
import pytest

import towerjax as tj


def batches_of(number):
    return [batch for batch, _ in zip(model.batches(), range(number), strict=False)]


@pytest.fixture(scope="module")
def evaluate():
    def metric_fn(w, batch, tower):
        return {"w": tj.Weighted.mean(w + 0 * batch["y"], tower.weight)}

    return tj.build_eval_step(metric_fn, tj.OneDevice())


@pytest.mark.slow
def test_batches_are_set_back_where_a_run_stops_early(evaluate):
    step, source = model.build_light(), model.batches()
    state, history = tj.run(
        step,
        model.init(step),
        source,
        evaluate=evaluate,
        eval_batches=[model.data()],
        eval_every=2,
        early_stopping=tj.EarlyStopping("w", patience=1, min_delta=1e9),
        progress=False,
    )
    assert history.stopped and source.position == int(state.step) == 4


@pytest.mark.slow
def test_ctrl_c_in_an_evaluation_or_a_prediction_leaves_no_thread(evaluate):
    def interrupting():
        yield from batches_of(7)
        raise KeyboardInterrupt

    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        tj.evaluate(evaluate, np.float32(0), interrupting)
    names = [x.name for x in threading.enumerate() if x not in before]
    assert "towerjax-prefetch" not in names


@pytest.mark.slow
def test_memory_that_runs_out_in_a_donated_step_takes_the_state():
    """In a process whose memory is limited, by a program that needs far more."""
    worker = pathlib.Path(__file__).parent / "workers" / "memory.py"
    found = forked.printed(worker)
    assert found.endswith("RESOURCE_EXHAUSTED: Out of memory None None\n"), found


@pytest.mark.slow
def test_devices_that_fail_in_a_donated_step_say_why(monkeypatch):
    """As on the other processes of a job when one of them ends."""
    step = model.build_light()
    state, batch = model.init(step), step.place_batch(model.data())

    def fails(donated, *_):
        jax.tree.map(lambda x: x.delete(), donated)
        raise ValueError("Connection closed by peer")

    program = step.program(state, batch)
    fails.args_info = program.call.args_info
    broken = dataclasses.replace(program, call=fails)
    monkeypatch.setitem(step.programs.made, *step.programs.made, broken)
    with pytest.raises(ValueError, match="^Connection closed by peer") as caught:
        tj.run(step, state, [batch], progress=False)
    assert caught.value.state is None
    assert "The state is lost: the devices failed" in caught.value.__notes__[0]
