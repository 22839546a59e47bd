"""Wherever a run is stopped: what goes on has the bits and losses of one that was not.

An exception, Ctrl-C or SIGTERM stops it; it goes on with ``error.state`` and
``error.batches``, or is started again with its checkpointer.
"""

import functools
import inspect
import itertools
import pathlib
import signal
import sys
import time

import checkpoint_model as model
import numpy as np
import pytest

import towerjax as tj

# Where a signal may come: the lines of the loop, and those that take batches.
FILES = {str(x) for x in pathlib.Path(tj.loop.__file__).parent.glob("*.py")}
FILES.add(inspect.getsourcefile(tj.towers.InputContext))  # data/stream.py
STEPS = model.STEPS


class Stop(Exception):
    pass


def raises():
    raise Stop


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def sigterm():
    signal.raise_signal(signal.SIGTERM)


ENDS = {raises: Stop, ctrl_c: KeyboardInterrupt, sigterm: SystemExit}


@functools.cache
def step_of(name):
    """A step that compiles in a moment; or one that draws, on so many devices."""
    return model.build_light() if name == "light" else model.build(int(name))


def run(step, state, batches, **options):
    options = {"progress": False, "audit": False, **options}
    return tj.run(step, state, batches, **options)


def options_of(evaluates):
    """An evaluation whose loss is the number of the step, so that none is better."""
    of_state = model.Evaluation(lambda state: {"loss": np.float32(state.step)})
    early = tj.EarlyStopping("loss", patience=2)
    options = {"evaluate": of_state, "eval_batches": [0], "eval_every": 3}
    return {**options, "early_stopping": early} if evaluates else {}


@functools.cache
def undisturbed(name, evaluates):
    step = step_of(name)
    batches = model.batches()
    options = {"steps": STEPS, **options_of(evaluates)}
    state, history = run(step, model.init(step), batches, **options)
    assert len(set(history.metrics["loss"].tolist())) == STEPS
    assert bool(history.stopped) == evaluates
    return model.bits(state), history


def cut():
    return [*itertools.islice(model.batches(), STEPS + 3)]  # more than are used


def one_by_one():
    """Without a cursor; the buffer is written again for each batch."""
    buffer = {name: np.empty_like(x) for name, x in cut()[0].items()}
    for batch in cut():
        for name, x in batch.items():
            buffer[name][: len(x)] = x
        yield {name: buffer[name][: len(x)] for name, x in batch.items()}


class Rows:
    """Random access for Grain: batch after batch."""

    def __len__(self):
        return STEPS + 3

    def __getitem__(self, index):
        return cut()[index]

    def __repr__(self):
        return "Rows()"  # by which Grain knows them


def stream_of_grain():
    import grain

    return grain.MapDataset.source(Rows()).repeat().to_iter_dataset()


def loader_of_bytes():
    import grain

    sampler = grain.samplers.SequentialSampler(
        STEPS + 3, shard_options=grain.sharding.NoSharding()
    )
    return iter(grain.DataLoader(data_source=Rows(), sampler=sampler))


def distributed(source):
    return tj.OneDevice().distribute_dataset(source, remainder="pad")


SOURCES = {
    "batches": model.batches,
    "list": cut,
    "generator": one_by_one,
    "iterator": lambda: iter(cut()),
    "grain": stream_of_grain,
    "bytes": loader_of_bytes,
    "distributed, cursor": lambda: distributed(model.batches()),
    "distributed list": lambda: distributed(cut()),
    "distributed": lambda: distributed(one_by_one()),
}


class Acting:
    """An iterator that acts before its sixth batch, once."""

    def __init__(self, batches, act):
        self.batches = iter(batches)
        self.act = act
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number == 6:
            time.sleep(0.1)  # what came before is done
            self.act()
        return next(self.batches)


# Where a run is stopped: the options of `run` for it


def in_a_hook(act, step, patch):
    return {"hooks": [lambda number, _: number == 3 and act()]}


def in_a_later_hook(act, step, patch):
    return {"hooks": [lambda number, _: number == 6 and act()]}


def in_a_hook_with_state(act, step, patch):
    return {"hooks": [tj.loop.WithState(lambda *_: act(), every=4)]}


def in_a_writer(act, step, patch):
    return {"writers": [model.Calling(lambda record: record.step == 3 and act())]}


def in_an_evaluation(act, step, patch):
    def evaluate(state):
        act()
        raise AssertionError("not reached")

    of_state = model.Evaluation(evaluate)
    return {"evaluate": of_state, "eval_batches": [0], "eval_every": 3}


def at_a_call_of(name, number):
    def where(act, step, patch):
        method = getattr(step, name)
        calls = itertools.count(1)

        def called(*args, **options):
            # What is placed is looked at again, in another thread.
            if not hasattr(args[0], "signature") and next(calls) == number:
                act()
            return method(*args, **options)

        patch.setattr(step, name, called)
        return {}

    where.__name__ = f"at_call_{number}_of_{name}"
    return where


placing = at_a_call_of("place_batch", 2)
compiling = at_a_call_of("prepare", 1)


def in_the_loader(act, step, patch):
    return {"act": act}


HANDED_ON = [
    ("batches", in_a_hook, raises, {}),
    ("list", in_a_hook, raises, {}),
    ("generator", in_a_hook, raises, {}),
    ("generator", in_a_hook, raises, {"prefetch": 0}),
    ("grain", in_a_hook, raises, {}),
    ("distributed, cursor", in_a_hook, raises, {}),
    ("distributed list", in_a_hook, raises, {}),
    ("batches", in_a_hook, raises, {"step": "8"}),
    ("batches", in_a_hook_with_state, raises, {}),
    ("batches", in_a_writer, raises, {}),
    ("batches", in_an_evaluation, raises, {}),
    ("iterator", placing, raises, {}),
    ("iterator", in_the_loader, raises, {}),
    ("iterator", in_the_loader, raises, {"prefetch": 0}),
    ("iterator", in_the_loader, ctrl_c, {"prefetch": 0}),
    ("distributed", in_the_loader, ctrl_c, {}),
]
SAVED = [
    ("batches", in_a_hook, raises, {"every": 2, "step": "2", "then": "4"}),
    ("batches", in_a_later_hook, raises, {"every": 4}),
    ("generator", in_a_hook, raises, {"every": 2, "batches": "count"}),
    ("batches", in_a_hook, ctrl_c, {}),
    ("batches", in_a_hook, sigterm, {}),
    ("list", in_a_hook, sigterm, {}),
    ("generator", in_a_hook, sigterm, {"batches": "count"}),
    ("grain", in_a_hook, sigterm, {}),
    ("bytes", in_a_hook, sigterm, {}),
    ("distributed, cursor", in_a_hook, sigterm, {}),
    ("distributed list", in_a_hook, sigterm, {}),
    ("batches", in_an_evaluation, sigterm, {"exit_code": 3}),
    ("batches", compiling, sigterm, {}),
    ("iterator", in_the_loader, sigterm, {"batches": "count"}),
    ("batches", placing, raises, {"every": 1}),
    ("batches", in_a_hook, ctrl_c, {"evaluates": True}),
    ("batches", in_a_later_hook, raises, {"evaluates": True, "every": 4}),
    ("batches", in_an_evaluation, sigterm, {"evaluates": True}),
]
OF_SAVING = ("every", "batches", "exit_code")
ROWS = [(*row, False) for row in HANDED_ON] + [(*row, True) for row in SAVED]


def row_id(row):
    name, where, act, options, saved = row
    words = [f"{key}={x}" for key, x in options.items()] + ["saved"] * saved
    return " ".join([name, where.__name__, act.__name__, *words])


def losses_of(history):
    return history.metrics["loss"].tolist() if history.metrics else []


def gone_on(error, then, source, saving, **options):
    """The last state, what came from the first step done again on, and that step."""
    step = step_of(then)
    losses = []
    start = 0
    if saving:
        state = model.init(step)
        start = max(saving.steps)
        given = {"steps": STEPS, "checkpointer": saving}
    else:
        state = error.state
        source = error.batches
        losses += losses_of(error.history)
        given = {"steps": STEPS - int(state.step)}
    if not given["steps"]:
        return state, losses, error.history, start
    state, history = run(step, state, source, **given, **options)
    return state, losses + losses_of(history), history, start


def assert_as_undisturbed(found, expected):
    state, losses, history, start = found
    bits, whole = expected
    model.assert_same_bits(state, bits)
    expected = whole.metrics["loss"].tolist()[start:]
    np.testing.assert_allclose(losses, expected, rtol=2.4e-7, atol=0)
    after = [x for x in whole.evaluations if x[0] >= start]
    assert [*history.evaluations] in (after, after[1:])
    assert history.stopped == whole.stopped


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_what_goes_on_has_the_bits_of_an_undisturbed_run(row, tmp_path, monkeypatch):
    name, where, act, options, saved = row
    options = dict(options)
    first = options.pop("step", "light")
    then = options.pop("then", first)
    kept = {x: options.pop(x) for x in OF_SAVING if x in options}
    saving = tj.Checkpointer(tmp_path, **kept) if saved else None
    step = step_of(first)
    source = SOURCES[name]()
    evaluates = options.pop("evaluates", False)
    options |= options_of(evaluates)
    with monkeypatch.context() as patch:
        stop = where(act, step, patch)
        if "act" in stop:
            source = Acting(source, stop.pop("act"))
        with pytest.raises(ENDS[act]) as caught:
            given = {"checkpointer": saving, **options, **stop}
            run(step, model.init(step), source, steps=STEPS, **given)
    error = caught.value
    done = int(error.state.step)
    assert done < STEPS or saved, "the run was to be stopped before its end"
    if saved:
        assert act is raises or max(saving.steps) == done
    if act is sigterm:
        assert error.code == kept.get("exit_code", 75)
    if name == "batches" and not saved:
        assert error.batches is source and source.position == done
    again = SOURCES[name]() if saved else None
    found = gone_on(error, then, again, saving, **options)
    assert_as_undisturbed(found, undisturbed(first, evaluates))


def signalled_at(event_number, act, run):
    """What ends a run, with a signal as the loop comes to its n-th line."""
    count = 0
    ended = None

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            count += 1
            if count == event_number:
                act()
        return trace

    def nobody(number, frame):
        raise SystemExit("not the run's")

    before = signal.signal(signal.SIGTERM, nobody)
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except (SystemExit, KeyboardInterrupt) as error:
        ended = error
    finally:
        sys.settrace(previous)
        signal.signal(signal.SIGTERM, before)
    return count, ended


@pytest.mark.slow
@pytest.mark.parametrize("act, name, options", [
    (ctrl_c, "batches", {}),
    (ctrl_c, "iterator", {"prefetch": 0}),
    (sigterm, "batches", {}),
], ids=["ctrl_c", "ctrl_c without a thread", "sigterm"])  # fmt: skip
def test_a_signal_at_many_lines_of_the_loop_loses_no_bits(act, name, options, tmp_path):
    step = step_of("light")
    expected = undisturbed("light", False)

    def stopped_at(event_number):
        saving = None
        source = SOURCES[name]()
        state = model.init(step)
        if act is sigterm:
            saving = tj.Checkpointer(tmp_path / str(event_number), every=3)
        given = {"steps": STEPS, "checkpointer": saving, **options}
        count, error = signalled_at(
            event_number, act, lambda: run(step, state, source, **given)
        )
        if error is None:  # a thread in advance makes the lines of a run vary a little
            assert event_number == 0 or count < event_number
            return count, 0
        inside = hasattr(
            error, "state"
        )  # not before the first step, nor after the last
        is_saved = bool(saving and saving.steps)
        if is_saved:
            assert not inside or max(saving.steps) == int(error.state.step)
        # In the loop, and not yet where it saves: then no step is lost.
        assert is_saved or not (saving and inside) or not error.state.step
        if is_saved or (inside and not saving):
            found = gone_on(error, "light", SOURCES[name](), saving, **options)
        else:
            state, history = run(step, model.init(step), SOURCES[name](), **given)
            found = state, losses_of(history), history, 0
        assert_as_undisturbed(found, expected)
        return count, inside

    last, _ = stopped_at(0)
    assert last > 300
    inside = [stopped_at(number)[1] for number in range(3, last, last // 7)]
    assert sum(inside) >= 4
