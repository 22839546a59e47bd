"""The loop: the same numbers however it is cut, nothing lost, and what is shown."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import re
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import (
    LEARNING_RATE,
    W,
    batches,
    build_step,
    cut_of,
    eval_data,
    init,
    make_data,
    metric_fn,
    run,
    shown_on,
    step_with,
    train,
)

import towerjax as tj

evaluate = tj.evaluate
EPS = np.finfo(np.float32).eps


class Around:
    """A step whose `dispatch` is a function of that and its arguments."""

    def __init__(self, step, dispatch):
        self.step = step
        self.dispatch = functools.partial(dispatch, step.dispatch)

    def __getattr__(self, name):
        return getattr(self.step, name)


def raising(at):
    def hook(number, metrics):
        if number == at:
            raise LookupError("enough")

    return hook


def broken(row):
    """Five batches, the one at index `row` not finite."""
    cut = [dict(batch) for batch in cut_of(5)]
    cut[row]["y"] = np.full(16, np.nan, np.float32)
    return cut


def oracle(cut, skip=()):
    """Losses and last parameters of gradient descent in float64."""
    w = np.array([0.5, -1.0, 2.0])
    losses = []
    for row, batch in enumerate(cut):
        x = batch["x"].astype(np.float64)
        y = batch["y"].astype(np.float64)
        errors = x @ w - y
        losses.append(np.mean(errors**2))
        if row not in skip:
            w = w - LEARNING_RATE * 2 * x.T @ errors / len(y)
    return np.array(losses), w


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_run_equals_gradient_descent(prefetch, compiled):
    # 10 steps of 16 examples, the last of 9: rows of weight 0 fill it up.
    cut = list(batches(make_data(153), 16))
    step = build_step()
    state = init(step)
    compiled.clear()
    state, history = train(cut, state=state, step=step, prefetch=prefetch)
    assert len(compiled) == 1
    losses, w = oracle(cut)
    np.testing.assert_array_equal(history.steps, np.arange(1, 11))
    np.testing.assert_array_equal(history.metrics["step"], np.arange(10))
    # Ten steps, each of a few sums over at most 16 terms.
    bound = 10 * 16 * EPS
    np.testing.assert_allclose(history.metrics["loss"], losses, rtol=bound)
    np.testing.assert_allclose(state.params["w"], w, rtol=bound)
    assert history.metrics["bias"].shape == (10,)
    assert history.summary.examples == 153
    assert int(state.step) == 10


@pytest.mark.slow
def test_steps_end_a_run_of_endless_data_and_take_no_more():
    source = batches(make_data(32), 16, epochs=None)
    taken = []
    state, history = train((taken.append(1) or batch for batch in source), steps=5)
    assert int(state.step) == len(history.steps) == len(taken) == 5


def test_step_numbers_go_on_where_the_state_stopped(compiled):
    """And nothing is compiled again."""
    cut = cut_of(5)
    seen = []
    state, _ = train(cut[:2])
    compiled.clear()
    hook = lambda number, metrics: seen.append(number)  # noqa: E731
    state, history = train(cut[2:], state=state, hooks=[hook])
    assert seen == history.steps.tolist() == [3, 4, 5]
    assert compiled == [] and history.summary.compile_seconds < 0.05
    np.testing.assert_allclose(state.params["w"], oracle(cut)[1], rtol=80 * EPS)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_no_more_calls_than_in_flight_run_without_being_waited_for(
    train_step, in_flight
):
    lags = []
    dispatched = []

    def dispatch(dispatch, *args):
        dispatched.append(1)
        return dispatch(*args)

    hook = lambda number, metrics: lags.append(len(dispatched) - number)  # noqa: E731
    spy = Around(train_step, dispatch)
    train(cut_of(10), step=spy, in_flight=in_flight, hooks=[hook])
    assert max(lags) == in_flight - 1


def assert_exact(values, data, w, steps=1):
    """Within the rounding of sums over 16 rows, of as many steps."""
    x, y, weight = (data[name].astype(np.float64) for name in ("x", "y", "weight"))
    squares = (x @ np.asarray(w, np.float64) - y) ** 2
    mse = (weight * squares).sum() / weight.sum()
    np.testing.assert_allclose(values["mse"], mse, rtol=steps * 16 * EPS)
    np.testing.assert_allclose(values["column"], x.mean(axis=0), atol=len(x) * EPS)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("batch_size", [37, 16, 10])
def test_evaluation_is_exact_however_the_data_is_cut(eval_step, batch_size):
    data = eval_data(37)
    values = evaluate(eval_step, W, batches(data, batch_size))
    assert isinstance(values["mse"], float)
    assert_exact(values, data, W["w"])


@pytest.mark.slow
def test_batches_are_added_in_float64_and_what_cannot_be_merged_is_the_last():
    # In float32, 2**24 + 1 is 2**24: a sum over many batches would stand still.
    def metrics(params, batch, tower):
        return {
            "ones": tj.Weighted(batch.sum(), jnp.float32(0.5) + 0 * params),
            "nothing": tj.Weighted.mean(batch, 0 * tower.weight),
            "highest": tower.reduce(tj.Reduction.MEAN, batch.max()),
        }

    # The weight of "ones" is added for each tower, whatever its rows.
    step = tj.build_eval_step(metrics, tj.Mirrored(towers=2), audit=False)
    data = [np.full(8, 2.0**21, np.float32)] + [np.full(8, 0.125, np.float32)] * 4
    values = evaluate(step, jnp.float32(0), data)
    expected = {"ones": (2.0**24 + 4) / 5, "nothing": 0.0, "highest": 0.125}
    assert values == expected


@pytest.mark.slow
def test_an_evaluation_may_have_other_devices_and_another_number_of_towers(train_step):
    cut = cut_of(3)
    data = eval_data(16)
    build = functools.partial(tj.build_eval_step, metric_fn)
    evaluate = build(tj.Mirrored(("cpu:5",), towers=3))
    state, history = train(cut, evaluate=evaluate, eval_batches=[data])
    last = oracle(cut)[1]
    for given in (state, jax.device_get(state), state.params):
        values = evaluate(given, data)
        assert_exact({name: x.value for name, x in values.items()}, data, last, 7)
    assert_exact(history.final, data, last, 7)
    local = {"n": tj.TowerLocal(np.float32(0), tj.Reduction.SUM)}
    state = train_step.init(state.params, local=local)
    with pytest.raises(ValueError, match="than 3: .*tj.towers.restored_values") as told:
        evaluate(state, data)
    text = "tj.towers.saved_values(state)). For an evaluation in tj.run, do this in the"
    assert text in str(told.value)
    saved = tj.towers.saved_values(state)
    moved = tj.towers.restored_values(evaluate.strategy, state, saved)
    again = build(evaluate.strategy)(moved, data)
    np.testing.assert_array_equal(again["mse"].value, values["mse"].value)


def test_bad_arguments_are_refused_and_the_state_is_kept(train_step, eval_step):
    state = init(train_step)
    data = list(batches(eval_data(16), 16))
    one_shot = iter([eval_data(16)])
    table = [
        ({"steps": 0}, "steps=0 must be a whole number >= 1"),
        ({"prefetch": -1}, "prefetch=-1 must be a whole number >= 0"),
        ({"in_flight": 0}, "in_flight=0 must"),
        ({"in_flight": 10**30}, "0 must be a whole number <= 65536"),
        ({"in_flight": True}, "in_flight=True must be a whole number >= 1"),
        ({"evaluate": eval_step}, "only evaluate was given"),
        ({"eval_batches": data}, "only eval_batches was given"),
        ({"eval_every": 2}, "needs an evaluation, and there is none"),
        ({"evaluate": eval_step, "eval_batches": one_shot},
            "eval_batches is a list_iterator, which can be iterated only once"),
        ({"progress": "bar"}, "progress='bar' must be"),
        ({"eval_params": lambda s: s}, "needs an evaluation, and there is none"),
        ({"evaluate": eval_step, "eval_batches": make_data(8)},
            "eval_batches is one batch (a dict), but must be an iterable of batches"),
        ({"evaluate": eval_step, "eval_batches": data, "eval_params": "ema"},
            "eval_params='ema' is not a function; write def eval_params(state)"),
        ({"hooks": print}, "must be a list: write hooks=[<built-in function print>]."),
        ({"hooks": 3}, "hooks=3 must be a list: write hooks=[3]."),
        ({"hooks": ["print"]}, "hooks[0]='print' is not a function"),
    ]  # fmt: skip
    for arguments, message in table:
        with pytest.raises(ValueError, match=re.escape(message)):
            run(train_step, state, [], **arguments)
    assert int(state.step) == 0
    for data, text in [
        (lambda: None, r"batches\(\) is a NoneType, but must be"),
        ([], "no batches to evaluate"),
    ]:
        with pytest.raises(ValueError, match=text):
            evaluate(eval_step, W, data)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_that_a_function_makes_are_closed_and_others_are_not(
    eval_step, prefetch
):
    closed = []

    def made():
        try:
            yield from batches(eval_data(16), 16)
            yield {"x": 3.0}
        finally:
            closed.append(1)

    mine = made()
    for source in (made, mine):
        with pytest.raises(ValueError, match="batch") as caught:
            evaluate(eval_step, W, source, prefetch=prefetch)
        assert caught.value is not None  # its traceback holds the frames
    assert closed == [1]
    mine.close()
    assert closed == [1, 1]


def test_a_prediction_is_no_evaluation():
    predict = tj.build_predict_step(lambda p, batch, tower: batch, tj.Mirrored())
    with pytest.raises(ValueError, match="Pass a step of tj.build_eval_step"):
        evaluate(predict, jnp.float32(0), [np.ones(8, np.float32)])


class Unbegun:
    """A loader that cannot begin."""

    def __iter__(self):
        raise LookupError("no file")


def losing(dispatch, *args):
    dispatch(*args)
    raise RuntimeError("out of memory")


def returning(number, state, metrics):
    return state


def with_state(*every, hook=print):
    return [tj.loop.WithState(hook, every=n) for n in every]


AT_2 = {"hooks": [raising(2)], "in_flight": 1}
ENOUGH = LookupError("enough")
# fmt: off
# The data and options of a run, its error, the step that state and history are of;
# what its notes have in them, and what they have not.
NONE = ValueError(
    "batches is empty.* error.batches is empty if the run had done all its steps"
)
ENDS = {
    "a loader that cannot begin": (Unbegun, {}, LookupError("no file"), 0),
    "no data": (lambda: iter([]), {}, NONE, 0),
    "no data for 3 steps": (lambda: iter([]), {"steps": 3}, NONE, 0),
    "too little data": (lambda: cut_of(5), {"steps": 9},
        ValueError("after step 9, but .* ended after step 5"), 5),
    "another kind of batch": (lambda: [*cut_of(2), make_data(24)], {},
        ValueError("The batch has changed"), 2),
    "the last step": (lambda: cut_of(4), AT_2 | {"steps": 2}, ENOUGH, 2,
        "after step 2, the last. e"),
    "not the last step": (lambda: cut_of(4), AT_2 | {"steps": 3}, ENOUGH, 2,
        "after step 2; go on from"),
    "a hook with state was due": (  # step 4 was in flight when step 3 was looked at
        lambda: cut_of(10), {"hooks": [raising(3), *with_state(4, 5)]},
        ENOUGH, 4, r"every=4\) was due, but was not called", "every=5"),
    "a hook with state was called": (lambda: cut_of(10),
        {"hooks": [*with_state(2, hook=lambda *_: None), raising(3)], "in_flight": 1},
        ENOUGH, 3, "", "every=2"),
    "a hook returns a state": (
        lambda: cut_of(4), {"hooks": with_state(2, hook=returning)},
        ValueError("returned a state.* in pieces .*steps=2"), 2),
    "a state lost on the devices": (lambda: cut_of(1), {"dispatch": losing},
        RuntimeError("out of memory"), None, "The state is lost"),
}
# fmt: on


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_run_says_what_is_left(name):
    made, options, expected, number, *notes = ENDS[name]
    dispatch = options.get("dispatch", lambda dispatch, *args: dispatch(*args))
    options = {key: x for key, x in options.items() if key != "dispatch"}
    step = Around(step_with(), dispatch)
    data = made()
    with pytest.raises(type(expected), match=str(expected)) as caught:
        train(data, step=step, **options)
    error = caught.value
    if number is None:
        assert error.state is None
    else:
        assert int(error.state.step) == number
        assert np.isfinite(error.state.params["w"]).all()  # and it was not taken
    assert error.history.steps.tolist() == [*range(1, (number or 0) + 1)]
    assert made is not Unbegun or error.batches is data
    told = " ".join(getattr(error, "__notes__", []))
    assert all(re.search(x, told) for x in notes[:1])
    assert not any(x in told for x in notes[1:])


def test_a_run_without_an_end_says_so(train_step, capsys):
    data = batches(make_data(64), 16, epochs=None)
    with pytest.raises(LookupError):
        run(train_step, init(train_step), data, hooks=[raising(2)], audit=False)
    assert "endless: tj.batches(..., epochs=None) without" in capsys.readouterr().err


@pytest.mark.few_fast(1)
def test_a_hook_sees_the_state_before_the_next_step_takes_it():
    cut = cut_of(10)
    every = 3
    seen = []
    plain = []

    def hook(number, state, metrics):
        assert plain[-1] == number == int(state.step)
        seen.append((number, np.array(state.params["w"]), metrics["loss"], state))

    count = lambda number, metrics: plain.append(number)  # noqa: E731
    state, history = train(cut, hooks=[count, *with_state(every, hook=hook)])
    assert plain == list(range(1, 11))
    assert [number for number, *_ in seen] == list(range(every, 11, every))
    for number, w, loss, its_state in seen:
        losses, expected = oracle(cut[:number])
        np.testing.assert_allclose(w, expected, rtol=160 * EPS)
        np.testing.assert_allclose(loss, losses[-1], rtol=160 * EPS)
        # Not kept alive: the next step has taken it over.
        assert its_state.params["w"].is_deleted()
    assert not state.params["w"].is_deleted()


def test_no_step_is_waited_for_between_the_hooks_with_state(train_step):
    waits = []
    dispatched = []

    def waited(number, metrics):
        waits.append(len(dispatched))

    def dispatch(dispatch, *args):
        dispatched.append(1)
        return dispatch(*args)

    hooks = [waited, *with_state(4, hook=lambda number, state, metrics: None)]
    train(cut_of(8), step=Around(train_step, dispatch), hooks=hooks, in_flight=9)
    assert waits == [4] * 4 + [8] * 4


@pytest.mark.parametrize("as_state, every, expected", [
    (False, 3, [3, 6, 7]),
    (True, 7, [7]),  # not twice at the end
    (True, None, [7]),
], ids=["several", "whole", "unasked"])  # fmt: skip
def test_other_parameters_are_evaluated_and_the_state_is_the_last(
    train_step, eval_step, as_state, every, expected
):
    cut = cut_of(7)
    data = eval_data(20)

    def halved(state):
        params = jax.tree.map(lambda x: np.asarray(x / 2), state.params)
        if as_state:
            return train_step.place(dataclasses.replace(state, params=params))
        return params

    class OfState:
        """What a metric function reads of a state, it has."""

        place_batch = staticmethod(eval_step.place_batch)

        def __call__(self, state, batch):
            assert isinstance(state, tj.TrainState) and int(state.step) in expected
            return eval_step(state, batch)

    options = {"eval_batches": batches(data, 16), "eval_params": halved}
    state, history = train(cut, evaluate=OfState(), eval_every=every, **options)
    assert [number for number, _ in history.evaluations] == expected
    for number, values in history.evaluations:
        assert_exact(values, data, oracle(cut[:number])[1] / 2, steps=7)
    np.testing.assert_allclose(state.params["w"], oracle(cut)[1], rtol=7 * 16 * EPS)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_named_and_changes_nothing():
    seen = []
    with pytest.raises(tj.NonFiniteError, match="of step 3 was not finite") as caught:
        train(broken(2), hooks=[lambda number, metrics: seen.append(number)])
    error = caught.value
    assert error.step == 3 and {x.step for x in error.locations} == {3}
    assert seen == [1, 2]
    assert error.history.skipped == (3,)
    done = int(error.state.step)
    _, w = oracle(broken(2)[:done], skip={2})
    np.testing.assert_allclose(error.state.params["w"], w, rtol=80 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("policy, skipped", [("skip", (2, 4)), ("ignore", ())])
def test_a_step_that_is_not_finite_is_skipped_and_counted_or_counts(policy, skipped):
    cut = broken(1)
    cut[3] = cut[1]
    state, history = train(cut, step=step_with(on_nonfinite=policy))
    assert history.skipped == skipped
    _, w = oracle(cut, skip={number - 1 for number in skipped})
    assert np.isnan(w).all() == (policy == "ignore")
    np.testing.assert_allclose(state.params["w"], w, rtol=80 * EPS)
    alone = [False, True, False, True, False]
    from_there = [False, True, True, True, True]
    found = np.isnan(history.metrics["loss"]).tolist()
    assert found == (alone if policy == "skip" else from_there)


@pytest.mark.parametrize("at", [2, 6])  # the last is read when all are dispatched
def test_ctrl_c_that_a_garbage_collection_drops_ends_the_run(monkeypatch, at):
    dropped = []
    waiting = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    reporter = sys.unraisablehook

    def interrupt(phase, info):
        if waiting:
            signal.raise_signal(waiting.pop())

    def hook(number, metrics):
        if number == at:
            waiting.append(signal.SIGINT)
            gc.collect(0)

    gc.callbacks.append(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            train(cut_of(6), hooks=[hook])
    finally:
        gc.callbacks.remove(interrupt)
    assert at <= int(caught.value.state.step) <= 6
    assert KeyboardInterrupt in [found.exc_type for found in dropped]
    assert sys.unraisablehook is reporter


def test_ctrl_c_that_a_hook_catches_is_raised_once():
    def hook(number, metrics):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    _, history = train(cut_of(6), hooks=[hook])
    assert len(history.steps) == 6


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("where", ["_show", "stop", "_disable_redirect", "getsignal"])
def test_ctrl_c_twice_leaves_the_terminal_as_it_was(train_step, monkeypatch, where):
    """The second comes while the first has the bar closed, and signals put back."""
    screen = shown_on(monkeypatch)
    as_before = (screen, signal.getsignal(signal.SIGINT), sys.unraisablehook)
    ending = []

    def trace(frame, event, arg):
        names = frame.f_code.co_name.startswith(where)
        if ending and names and event == "call":
            ending.pop()
            signal.raise_signal(signal.SIGINT)

    def hook(number, metrics):
        ending.append(number)
        sys.settrace(trace)
        signal.raise_signal(signal.SIGINT)

    tracing = sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt):
            train(cut_of(4), step=train_step, progress=True, hooks=[hook])
    finally:
        sys.settrace(tracing)
    assert not ending
    after = (sys.stderr, signal.getsignal(signal.SIGINT), sys.unraisablehook)
    assert after == as_before
    assert "\x1b[?25l" not in screen.getvalue()  # the cursor is never hidden
    train(cut_of(4), step=train_step, progress=True)


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["own", "one"])
def test_threads_train_side_by_side_and_lose_no_state(owner):
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"))
    batch = np.ones(2, np.float32)

    def build():
        def loss_fn(w, b, tower):
            return tj.Weighted.mean((w - b) ** 2)

        return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)

    def train(step):
        state = step.init(jnp.float32(0))
        placed = step.place_batch(batch)
        for _ in range(600):
            state, _ = step(state, placed)
            take(predict(jnp.float32(2), placed))
        return state.params

    take = jax.jit(lambda x: x + 1, donate_argnums=0)
    predict = tj.build_predict_step(lambda w, b, tower: w * b, strategy)
    steps = [build()] * 3 if owner == "one" else [build() for _ in range(3)]
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            runs = [threads.submit(train, step) for step in steps]
    finally:
        sys.setswitchinterval(interval)
    assert [x.exception() for x in runs] == [None] * 3
    results = [x.result() for x in runs]
    np.testing.assert_allclose(results, [1 - 0.8**600] * 3, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("audit", [False, True])
def test_what_a_run_asks_of_audits_holds_for_a_ragged_batch_too(audit):
    """A last batch with another number of examples is another program to prove."""

    def loss_fn(params, batch, tower):
        drawn = jax.random.key_data(tower.rng)[0] / 2.0**32  # which no rule covers
        return tj.Weighted.mean((params - batch) ** 2 + drawn, tower.weight)

    strategy = tj.Mirrored(("cpu:0",), towers=2)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, remainder="pad")
    rows = np.arange(7, dtype=np.float32)
    data = [rows[:4], rows[4:]]
    if audit:
        with pytest.raises(tj.testing.NotProved):
            tj.run(step, step.init(np.float32(1)), data, audit=True, progress=False)
    else:
        tj.run(step, step.init(np.float32(1)), data, audit=False, progress=False)
        assert step.unproved is None
