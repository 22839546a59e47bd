"""A step is all or nothing: what breaks changes nothing, and one goes on to the bit."""

import contextlib
import dataclasses
import itertools
import json
import pathlib
import signal
import sys
import threading
import time

import checkpoint_model as light
import chex
import forked
import grain
import jax
import numpy as np
import optax
import pytest
from checkpoint_model import data as make_data

import towerjax as tj
from towerjax.loop import loop

LOOP = pathlib.Path(loop.__file__).parent
STEPS, SIZE = 7, 16


def loss_fn(params, batch, tower):
    noise = jax.random.key_data(tower.rng)[0] / 2.0**32  # a draw compiles long
    errors = batch["x"] @ params["w"] - batch["y"] - 0.1 * noise
    counts = tower.local["counts"].at[batch["id"]].add(tower.weight)
    loss = tj.Weighted.mean(errors**2, tower.weight)
    return tj.TowerOutput(loss, local={"counts": counts})


def build(**options):
    options = {"remainder": "pad", **options}
    return tj.build_train_step(
        loss_fn, optax.sgd(0.1, momentum=0.9), tj.Mirrored(), **options
    )


@pytest.fixture(scope="module")
def step():
    return build()


def init(step):
    counts = tj.TowerLocal(np.zeros(light.N, np.float32), tj.Reduction.SUM)
    params, local = {"w": np.array([0.5, -1, 2], np.float32)}, {"counts": counts}
    return step.init(params, local=local, rng=jax.random.key(3))


def assert_seen(state, batches):
    """Each example was counted as often as it is in these batches."""
    ids = np.concatenate([batch["id"] for batch in batches])
    counts = tj.towers.read_local(state.local)["counts"]
    np.testing.assert_array_equal(counts, np.bincount(ids, minlength=light.N))


def shuffled():
    return tj.batches(make_data(), SIZE, epochs=None, seed=5)


def all_batches():
    return list(itertools.islice(shuffled(), STEPS))


def bits(state):
    state = jax.tree.map(
        lambda x: jax.random.key_data(x) if x.dtype == state.rng.dtype else x, state
    )
    return jax.device_get(state)


def assert_same_bits(state, expected):
    chex.assert_trees_all_equal(bits(state), expected, strict=True)


@pytest.fixture(scope="module")
def undisturbed(step):
    """The bits of a run that nothing happened to, and its losses."""
    before = init(step)
    first = bits(before)
    state, history = tj.run(step, before, shuffled(), steps=STEPS, progress=False)
    after = bits(state)
    assert (first.params["w"] != after.params["w"]).all()
    return after, history.metrics["loss"]


def assert_same_losses(losses, expected):
    """Where several steps are one program, their losses are rounded as there."""
    np.testing.assert_allclose(losses, expected, rtol=2.4e-7, atol=0)


def go_on(step, error, **options):
    """The line that goes on, and the losses of both parts."""
    left = STEPS - int(error.state.step)
    state, losses = error.state, list(error.history.metrics.get("loss", ()))
    if left:
        state, history = tj.run(
            step, state, error.batches, steps=left, progress=False, **options
        )
        losses += list(history.metrics["loss"])
    return state, losses


# Where a data set goes on


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_batches_go_on_anywhere(seed, drop_remainder):
    data = {"x": np.arange(11)}
    options = {"epochs": 3, "seed": seed, "drop_remainder": drop_remainder}
    whole = [b["x"].tolist() for b in tj.batches(data, 4, **options)]
    assert len(whole) == (6 if drop_remainder else 9)
    for position in range(len(whole) + 1):
        there = tj.batches(data, 4, **options).at(position)
        assert there.position == position
        cursor = json.loads(json.dumps(there.get_state()))
        other = tj.batches(data, 4, **options)
        other.set_state(cursor)
        assert [b["x"].tolist() for b in there] == whole[position:]
        assert [b["x"].tolist() for b in other] == whole[position:]


def test_a_cursor_of_other_batches_is_refused():
    source = tj.batches(np.arange(11), 4, seed=1)
    cursor = tj.batches(np.arange(11), 2, seed=2, epochs=5).get_state()
    text = "batch_size was 2 and is 4, seed was 2 and .*batches='anew'"
    with pytest.raises(ValueError, match=text):
        source.set_state(cursor)
    for position in (-1, 4, 1.0):
        with pytest.raises(ValueError, match="position=.* must be a whole number"):
            source.at(position)
    source.set_state(tj.batches(np.arange(11), 4, seed=1, epochs=5).get_state())


# Exceptions on the way, and going on


class BrokenError(Exception):
    pass


def one_by_one():
    """A source without a cursor, whose buffer is written again for each batch."""
    cut = all_batches() + all_batches()[:3]  # more than are used
    buffer = {
        name: np.empty((SIZE, *x.shape[1:]), x.dtype) for name, x in cut[0].items()
    }
    for batch in cut:
        for name, x in batch.items():
            buffer[name][: len(x)] = x
        yield {name: buffer[name][: len(x)] for name, x in batch.items()}


class Rows:
    """Random access for Grain: batch after batch."""

    def __init__(self):
        self.cut = all_batches()

    def __len__(self):
        return len(self.cut)

    def __getitem__(self, index):
        return self.cut[index]


SOURCES = {
    "batches": shuffled,
    "list": lambda: all_batches() * 2,
    "generator": one_by_one,
    "grain": lambda: grain.MapDataset.source(Rows()).repeat().to_iter_dataset(),
    "distributed, cursor": lambda: tj.Mirrored().distribute_dataset(
        shuffled(), remainder="pad"
    ),
    "distributed": lambda: tj.Mirrored().distribute_dataset(
        all_batches() * 2, remainder="pad"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps_per_call", "prefetch"), [
    ("batches", 3, 2),
    ("list", 1, 2),
    ("generator", 3, 2),
    ("generator", 1, 0),
    ("grain", 1, 2),
    ("distributed, cursor", 3, 2),
    ("distributed", 1, 2),
])  # fmt: skip
def test_after_a_hook_that_raises_the_bits_are_those_of_an_undisturbed_run(
    step, undisturbed, name, steps_per_call, prefetch
):
    def hook(number, metrics):
        if number == 3:
            raise BrokenError

    options = {"steps_per_call": steps_per_call, "prefetch": prefetch}
    source = SOURCES[name]()
    with pytest.raises(BrokenError) as caught:
        tj.run(step, init(step), source, hooks=[hook], progress=False, **options)
    error = caught.value
    assert 3 <= int(error.state.step) < STEPS
    state, losses = go_on(step, error, **options)
    assert_same_bits(state, undisturbed[0])
    assert_same_losses(losses, undisturbed[1])


@pytest.mark.slow
def test_batches_with_a_cursor_are_set_back_themselves(step, undisturbed):
    source = shuffled()
    with pytest.raises(BrokenError) as caught:
        tj.run(
            step,
            init(step),
            source,
            progress=False,
            hooks=[lambda number, metrics: raises(BrokenError)],
        )
    state = caught.value.state
    assert caught.value.batches is source
    assert source.position == int(state.step)
    left = STEPS - source.position
    state, _ = tj.run(step, state, source, steps=left, progress=False)
    assert_same_bits(state, undisturbed[0])
    assert source.position == STEPS
    assert_seen(state, all_batches())


def raises(kind):
    raise kind


class Writer:
    def open(self, start):
        return self

    def write(self, record):
        if record.step == 2:
            raise BrokenError

    def close(self):
        pass


def evaluation(params, batch, tower):
    return {"w": tj.Weighted.mean(params["w"].sum() + 0 * batch["y"], tower.weight)}


def broken_evaluation():
    yield make_data()
    raise BrokenError


@pytest.mark.slow
def test_a_broken_writer_or_evaluation_loses_nothing(step, undisturbed):
    evaluate = tj.build_eval_step(evaluation, tj.Mirrored())
    table = [
        {"writers": [Writer()]},
        {"evaluate": evaluate, "eval_batches": broken_evaluation, "eval_every": 2},
    ]
    for options in table:
        with pytest.raises(BrokenError) as caught:
            tj.run(step, init(step), shuffled(), progress=False, **options)
        state, losses = go_on(step, caught.value)
        assert_same_bits(state, undisturbed[0])
        assert_same_losses(losses, undisturbed[1])


@pytest.mark.slow
def test_batches_are_set_back_where_a_run_stops_early(step):
    source = shuffled()
    state, history = tj.run(
        step,
        init(step),
        source,
        evaluate=tj.build_eval_step(evaluation, tj.Mirrored()),
        eval_batches=[make_data()],
        eval_every=2,
        early_stopping=tj.EarlyStopping("w", patience=1, min_delta=1e9),
        progress=False,
    )
    assert history.stopped and source.position == int(state.step) == 4


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_batch_that_cannot_be_placed_comes_first_again(
    step, undisturbed, steps_per_call, monkeypatch
):
    source = itertools.chain(all_batches())
    state = init(step)
    name = "place_batch" if steps_per_call == 1 else "place_batches"
    placing, numbers = getattr(step, name), itertools.count()

    def fails_once(*args):
        if next(numbers) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return placing(*args)

    monkeypatch.setattr(step, name, fails_once)
    with pytest.raises(RuntimeError, match="RESOURCE") as caught:
        tj.run(step, state, source, steps_per_call=steps_per_call, progress=False)
    assert int(caught.value.state.step) == steps_per_call
    state, _ = go_on(step, caught.value, steps_per_call=steps_per_call)
    assert_same_bits(state, undisturbed[0])


def test_what_one_step_a_call_left_several_steps_take(step):
    """A run of one step a call leaves batches that it had placed, then the rest."""
    batches = all_batches()[:3]  # the last is ragged
    for is_placed in ([1, 0, 0], [0, 1, 0], [1, 1, 1]):
        left = [
            step.place_batch(batch) if placed else batch
            for batch, placed in zip(batches, is_placed, strict=True)
        ]
        got, expected = step.place_batches(left, 4), step.place_batches(batches, 4)
        np.testing.assert_array_equal(got.counts, expected.counts)
        chex.assert_trees_all_equal(got.args, expected.args, strict=True)


# Ctrl-C at any moment


@contextlib.contextmanager
def interrupt_at(event_number):
    """Ctrl-C as the loop comes to its n-th line; yields how many it came to."""
    count = [0]

    def trace(frame, event, arg):
        if pathlib.Path(frame.f_code.co_filename).parent != LOOP:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == event_number:
                signal.raise_signal(signal.SIGINT)
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(previous)


def run_of_the_sweep(step, state, source, **options):
    return tj.run(step, state, source, steps=STEPS, progress=False, **options)


def interrupted(step, undisturbed, event_number, **options):
    """Was the run interrupted there? If so, it is gone on with."""
    source, state = shuffled(), init(step)
    try:
        with interrupt_at(event_number) as count:
            state, _ = run_of_the_sweep(step, state, source, **options)
    except KeyboardInterrupt as error:
        if not hasattr(error, "state"):  # before the first step, or after the last
            assert not any(x.is_deleted() for x in jax.tree.leaves(state))
            assert source.position == int(state.step)
            state, _ = run_of_the_sweep(step, state, source)
        else:
            state, losses = go_on(step, error)
            assert_same_losses(losses, undisturbed[1])
    else:
        assert count[0] < event_number
    assert_same_bits(state, undisturbed[0])
    return count[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"steps_per_call": 3}], ids=str
)
def test_ctrl_c_at_many_lines_of_the_loop_loses_nothing(step, undisturbed, options):
    last = interrupted(step, undisturbed, 10**9, **options)
    assert last > 300
    for event_number in range(1, last, last // 6):
        interrupted(step, undisturbed, event_number, **options)


@pytest.mark.slow
def test_ctrl_c_while_distributed_data_is_waited_for_loses_no_batch(step, undisturbed):
    def slow():
        yield from all_batches()[:2]
        time.sleep(0.05)  # both steps are done
        signal.raise_signal(signal.SIGINT)  # in the main thread
        yield from all_batches()[2:]

    source = step.strategy.distribute_dataset(slow(), remainder="pad")
    with pytest.raises(KeyboardInterrupt) as caught:
        run_of_the_sweep(step, init(step), source)
    state, losses = go_on(step, caught.value)
    assert_same_bits(state, undisturbed[0])
    assert_same_losses(losses, undisturbed[1])


@pytest.mark.slow
def test_ctrl_c_in_an_evaluation_or_a_prediction_leaves_no_thread(step):
    evaluate = tj.build_eval_step(evaluation, tj.Mirrored())
    state = init(step)

    def interrupting():
        yield from all_batches()
        raise KeyboardInterrupt

    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        tj.evaluate(evaluate, state, interrupting)
    names = [x.name for x in threading.enumerate() if x not in before]
    assert "towerjax-prefetch" not in names


# Devices that fail


@pytest.mark.slow
def test_memory_that_runs_out_in_a_donated_step_takes_the_state():
    """In a process whose memory is limited, by a program that needs far more."""
    worker = pathlib.Path(__file__).parent / "workers" / "memory.py"
    found = forked.printed(worker)
    assert found.endswith("RESOURCE_EXHAUSTED: Out of memory None None\n"), found


@pytest.mark.slow
def test_devices_that_fail_in_a_donated_step_say_why(step, monkeypatch):
    """As on the other processes of a job when one of them ends."""
    state, batch = init(step), step.place_batch(all_batches()[0])

    def fails(donated, *_):
        jax.tree.map(lambda x: x.delete(), donated)
        raise ValueError("Connection closed by peer")

    program = step.program(state, batch)
    fails.args_info = program.call.args_info
    broken = dataclasses.replace(program, call=fails)
    monkeypatch.setitem(step.programs.made, (batch.signature, 3, None), broken)
    with pytest.raises(ValueError, match="^Connection closed by peer") as caught:
        tj.run(step, state, [batch], progress=False)
    assert caught.value.state is None
    assert "The state is lost: the devices failed" in caught.value.__notes__[0]


# A NaN on one tower
