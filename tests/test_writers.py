"""What a run writes down: exact numbers, whole lines, once each, whatever happens."""

import io
import json
import math
import os
import pathlib
import re
import signal
import struct
import sys
import time
import types

import forked
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from tensorboardX.proto import event_pb2

import towerjax as tj
from towerjax.loop.files import append_line
from towerjax.loop.run import run
from towerjax.loop.writers import Record, json_value

RATE = 0.125


def loss_fn(params, batch, tower):
    loss = tj.Weighted.mean((params - batch) ** 2, tower.weight)
    rows = tower.weight.sum(keepdims=True)
    pair = tj.Weighted(jnp.stack([params, -params]) * rows, jnp.concat([rows, rows]))
    return tj.TowerOutput(loss, {"pair": pair, "step": tower.step})


def metric_fn(params, batch, tower):
    return {"gap": tj.Weighted.mean(params - batch, tower.weight)}


@pytest.fixture(scope="module")
def step():
    return build()


@pytest.fixture(scope="module")
def kept():
    """The same step, which leaves the states that it is given."""
    return build(donate=False)


@pytest.fixture(scope="module")
def evaluate():
    return tj.build_eval_step(metric_fn, tj.Mirrored())


def build(**options):
    options = {"remainder": "pad", **options}
    return tj.build_train_step(loss_fn, optax.sgd(RATE), tj.Mirrored(), **options)


def init(step):
    return step.init(jnp.float32(3.0))


def data(num_steps, start=0):
    """Batches of 5 examples, which 8 towers do not divide."""
    return [np.arange(5, dtype=np.float32) + i for i in range(start, num_steps)]


def oracle(num_steps):
    """Losses and parameters before each step, in float64."""
    w, losses, ws = 3.0, [], []
    for batch in data(num_steps):
        batch = batch.astype(np.float64)
        losses.append(np.mean((w - batch) ** 2))
        ws.append(w)
        w -= RATE * 2 * np.mean(w - batch)
    return losses, ws, w


def read_lines(path):
    """Each line, by a parser that takes nothing but JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = pathlib.Path(path).read_bytes()
    assert text == b"" or text.endswith(b"\n")
    return [json.loads(x, parse_constant=refuse) for x in text.splitlines()]


def steps_of(lines, kind="train"):
    return [line["step"] for line in lines if line["kind"] == kind]


# JSON lines


@pytest.mark.slow
def test_what_is_written_is_the_history_and_gradient_descent(step, evaluate, tmp_path):
    path, before_s = tmp_path / "new" / "run.jsonl", time.time()
    _, history = run(
        step,
        init(step),
        data(10),
        evaluate=evaluate,
        eval_batches=data(2),
        eval_every=6,
        writers=[tj.JsonLines(path)],
        progress=False,
    )
    lines = read_lines(path)
    train = [line for line in lines if line["kind"] == "train"]
    losses, ws, w = oracle(10)
    assert steps_of(lines) == list(range(1, 11))
    assert [x["metrics"]["loss"] for x in train] == history.metrics["loss"].tolist()
    assert [x["metrics"]["step"] for x in train] == list(range(10))
    assert [x["metrics"]["pair"] for x in train] == history.metrics["pair"].tolist()
    bound = 10 * 5 * np.finfo(np.float32).eps
    written = [x["metrics"]["loss"] for x in train]
    np.testing.assert_allclose(written, losses, rtol=bound)
    np.testing.assert_allclose(
        [x["metrics"]["pair"][1] for x in train], np.negative(ws)
    )
    assert steps_of(lines, "eval") == [6, 10]
    for line, (_, values) in zip(
        [x for x in lines if x["kind"] == "eval"], history.evaluations, strict=True
    ):
        assert line["metrics"] == values
    np.testing.assert_allclose(values["gap"], w - 2.5, rtol=bound)
    times = [line["time_s"] for line in lines]
    assert before_s <= times[0] and times == sorted(times) and times[-1] <= time.time()
    # Evaluations stand where they were made.
    assert [x["step"] for x in lines] == sorted(x["step"] for x in lines)


@pytest.mark.slow
def test_what_is_not_finite_is_a_string_that_float_reads(tmp_path):
    step, path = build(on_nonfinite="skip"), tmp_path / "run.jsonl"
    cut = data(4)
    cut[1], cut[2] = np.full(5, np.nan, np.float32), np.full(5, np.inf, np.float32)
    options = {"writers": [tj.JsonLines(path)], "progress": False}
    _, history = run(step, init(step), cut, **options)
    losses = [line["metrics"]["loss"] for line in read_lines(path)]
    assert losses[1:3] == ["NaN", "Infinity"]
    np.testing.assert_array_equal([*map(float, losses)], history.metrics["loss"])


@pytest.mark.parametrize("value, written", [
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float64(0.1), 0.1),
    (ml_dtypes.bfloat16(0.1), 0.10009765625),
    (np.int32(-3), -3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (True, True),
    (np.bool_(False), False),
    (7.5, 7.5),
    (np.array([[1, 2], [3, 4]], np.int8), [[1, 2], [3, 4]]),
    (np.array([[0.5, -math.inf]], np.float16), [[0.5, "-Infinity"]]),
    (np.zeros((0, 2)), []),
])  # fmt: skip
def test_numbers_are_written_exactly(value, written):
    assert json_value("x", value) == written
    assert type(json_value("x", value)) is type(written)
    json.dumps(json_value("x", value), allow_nan=False)


def test_a_line_is_json_for_any_reader():
    append_line(file := io.BytesIO(), {"x": [1, "y"]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_line(file, {"x": math.nan})
    assert file.getvalue() == b'{"x": [1, "y"]}\n'


@pytest.mark.parametrize(
    "value", [np.complex64(1), np.array("text"), np.array(None), tj.Weighted(3.0, 2.0)]
)
def test_what_is_no_real_number_is_refused(value):
    with pytest.raises(ValueError, match="the metric 'x' is .*, not real numbers"):
        json_value("x", value)


@pytest.mark.slow
@pytest.mark.parametrize("torn", [b'{"ki', b'{"kind": "train", "step": 6, "ti'])
def test_steps_that_are_done_again_are_there_once(kept, evaluate, tmp_path, torn):
    step, path = kept, tmp_path / "run.jsonl"
    options = {"writers": [tj.JsonLines(path)], "progress": False}
    options |= {"evaluate": evaluate, "eval_batches": data(1), "eval_every": 2}
    at_two, _ = run(step, init(step), data(2), **options)
    run(step, at_two, data(5, 2), **options)
    first = path.read_bytes().splitlines()
    path.write_bytes(path.read_bytes() + torn)
    run(step, at_two, data(4, 2), **options)  # from what was saved after step 2
    lines = read_lines(path)
    assert steps_of(lines) == [1, 2, 3, 4]
    assert steps_of(lines, "eval") == [2, 4]
    assert path.read_bytes().splitlines()[:3] == first[:3]  # 1, 2, evaluated


def test_an_evaluation_that_is_done_again_is_there_once(tmp_path):
    path = tmp_path / "run.jsonl"

    def write(start, *kinds):
        writer = tj.JsonLines(path).open(start)
        for kind, number, value in kinds:
            record = Record(kind, number, 0.5, {"loss": value})
            writer.write(record)
        writer.close()

    write(0, ("train", 1, 5), ("train", 2, 4), ("eval", 2, 3))
    write(2, ("eval", 2, 7), ("train", 3, 2), ("eval", 3, 1))
    write(2, ("train", 3, 2))
    found = [(x["kind"], x["step"], x["metrics"]["loss"]) for x in read_lines(path)]
    train = [("train", 1, 5), ("train", 2, 4)]
    assert found == [*train, ("eval", 2, 7), ("train", 3, 2)]


@pytest.mark.slow
def test_a_new_run_does_not_write_over_an_old_one(step, tmp_path):
    path = tmp_path / "run.jsonl"
    writers, state = [tj.JsonLines(path)], init(step)
    run(step, state, data(3), writers=writers, progress=False)
    before, state = path.read_bytes(), init(step)
    with pytest.raises(ValueError, match="holds an earlier run up to step 3, but this"):
        run(step, state, data(2), writers=writers, progress=False)
    assert path.read_bytes() == before
    writers = [tj.JsonLines(path, replace=True)]
    run(step, state, data(2), writers=writers, progress=False)
    assert steps_of(read_lines(path)) == [1, 2]


@pytest.mark.parametrize(
    "text, line",
    [
        ("hello", 1),
        ("{}\n", 1),
        ('{"step": 3, "loss": 0.5}\n', 1),  # of another program
        ('{"kind": "train", "step": 1}\n{"step": 2}\n', 2),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path, text, line):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"Line {line} of .* is no line of a run"):
        tj.JsonLines(path, replace=True).open(2)
    assert path.read_text() == text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
def test_a_full_disk_ends_the_run_with_its_state(step):
    """A device may be written to; what it holds is never read."""
    with pytest.raises(OSError, match="No space left") as caught:
        run(
            step,
            init(step),
            data(3),
            writers=[tj.JsonLines("/dev/full")],
            progress=False,
        )
    assert caught.value.state is not None and len(caught.value.history.steps) >= 1


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "file").write_text("")
    for options in tj.JsonLines(tmp_path), tj.TensorBoard(tmp_path / "file"):
        with pytest.raises(
            ValueError, match=r"(path|logdir)='/.* cannot be written to"
        ):
            options.open(0)
    for path in (3, ""):
        with pytest.raises(ValueError, match="must be the path of a file"):
            tj.JsonLines(path)
    with pytest.raises(ValueError, match="replace='a' must be True or False"):
        tj.JsonLines("run.jsonl", "a")
    with pytest.raises(ValueError, match="replace=1 must be True or False"):
        tj.TensorBoard("logs", replace=1)


PROGRAM = """
import sys, numpy as np, optax, jax.numpy as jnp, towerjax as tj
def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch) ** 2, tower.weight)
step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored())
data = tj.batches(np.arange(16.0, dtype=np.float32), 8, epochs=None)
def hook(number, metrics):
    if number == 20:
        print("go", flush=True)
tj.run(step, step.init(jnp.float32(0)), data, steps=10**7, progress=False,
       writers=[tj.JsonLines(sys.argv[1])], hooks=[hook])
"""


@pytest.mark.slow
def test_a_killed_process_leaves_whole_lines(step, tmp_path):
    path = tmp_path / "run.jsonl"
    program, output = tmp_path / "train.py", tmp_path / "output"
    program.write_text(PROGRAM)
    output.write_text("")
    of_program = str(program), str(tmp_path), (str(path),)
    process = forked.process(forked.in_child, str(output), forked.program, *of_program)
    process.start()
    while output.read_text() != "go\n":
        assert process.is_alive() or output.read_text() == "go\n"
        time.sleep(0.01)
    time.sleep(0.0571)
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    steps = steps_of(read_lines(path))
    # Step 20 was told to the hook, so its line was there.
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 20


# TensorBoard


def events_of(path):
    """``(step, wall time, {tag: value}, is it the mark of a start?)`` of a file."""
    data, at, events = path.read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16
        values = {value.tag: value.simple_value for value in event.summary.value}
        is_start = event.session_log.status == event_pb2.SessionLog.START
        events.append((event.step, event.wall_time, values, is_start))
    return events


def test_the_event_file_holds_the_history(step, evaluate, tmp_path):
    before_s = time.time()
    _, history = run(
        step,
        init(step),
        data(7),
        evaluate=evaluate,
        eval_batches=data(2),
        eval_every=3,
        writers=[tj.TensorBoard(tmp_path / "new" / "logs")],
        progress=False,
    )
    [path] = (tmp_path / "new" / "logs").iterdir()
    version, mark, *events = events_of(path)
    assert b"brain.Event:2" in path.read_bytes()[:60]
    assert (mark[0], mark[3]) == (1, True)
    train = [event for event in events if "train/loss" in event[2]]
    assert [event[0] for event in train] == history.steps.tolist()
    names = ["train/loss", "train/pair/0", "train/pair/1", "train/step"]
    assert all(sorted(event[2]) == names for event in train)
    columns = history.metrics
    for i, (_, wall, values, _) in enumerate(train):
        assert values["train/loss"] == columns["loss"][i]
        pair = [values["train/pair/0"], values["train/pair/1"]]
        assert pair == columns["pair"][i].tolist()
        assert values["train/step"] == i
        assert before_s <= wall <= time.time()
    np.testing.assert_allclose(
        [event[2]["train/loss"] for event in train], oracle(7)[0], rtol=1e-5
    )
    evaluated = [(e[0], e[2]) for e in events if "eval/gap" in e[2]]
    assert evaluated == [
        (number, {"eval/gap": np.float32(values["gap"])})
        for number, values in history.evaluations
    ]
    assert len(events) == 7 + 3


@pytest.mark.slow
def test_a_resumed_run_marks_where_it_goes_on(kept, tmp_path):
    step, writers = kept, [tj.TensorBoard(tmp_path)]
    at_two, _ = run(step, init(step), data(2), writers=writers, progress=False)
    run(step, at_two, data(5, 2), writers=writers, progress=False)
    run(step, at_two, data(4, 2), writers=writers, progress=False)
    # Within a second, and still three files; TensorBoard reads them by name.
    first, second, third = sorted(
        tmp_path.iterdir(), key=lambda p: p.name.split(".")[-1]
    )
    assert [e[0] for e in events_of(second) if e[2]] == [3, 4, 5]
    mark, *rest = events_of(third)[1:]
    assert (mark[0], mark[3]) == (3, True)
    assert [e[0] for e in rest] == [3, 4]


def test_a_new_run_does_not_mix_with_an_old_one(step, tmp_path):
    run(step, init(step), data(2), writers=[tj.TensorBoard(tmp_path)], progress=False)
    state = init(step)
    with pytest.raises(ValueError, match="holds event files of an earlier run, but"):
        run(step, state, data(2), writers=[tj.TensorBoard(tmp_path)], progress=False)
    writers = [tj.TensorBoard(tmp_path, replace=True)]
    run(step, state, data(2), writers=writers, progress=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_extreme_scalars_and_arrays(tmp_path):
    writer = tj.TensorBoard(tmp_path, max_elements=4).open(0)
    values = {"nan": math.nan, "huge": 1e300, "low": -math.inf, "half": np.float16(0.5)}
    values |= {"matrix": np.arange(4).reshape(2, 2), "none": np.zeros(0), "yes": True}
    writer.write(Record("eval", 1, 2.0, values))
    with pytest.raises(ValueError, match="'train/big' has 5 elements.* may have 4"):
        writer.write(Record("train", 2, 2.0, {"big": np.zeros(5)}))
    with pytest.raises(ValueError, match="'train/z' is complex64.*, not real"):
        writer.write(Record("train", 2, 2.0, {"z": np.complex64(1)}))
    writer.close()
    [path] = tmp_path.iterdir()
    _, _, (_, _, told, _) = events_of(path)
    assert math.isnan(told.pop("eval/nan"))
    matrix = {f"eval/matrix/{i}/{j}": 2.0 * i + j for i in (0, 1) for j in (0, 1)}
    scalars = {"eval/huge": math.inf, "eval/low": -math.inf, "eval/half": 0.5}
    assert told == {**scalars, **matrix, "eval/yes": 1.0}


def test_events_are_flushed_with_each_evaluation_and_in_time(tmp_path):
    writer = tj.TensorBoard(tmp_path, flush_s=1e6).open(0)
    [path] = tmp_path.iterdir()
    writer.write(Record("train", 1, 1.0, {"x": 1.0}))
    assert path.stat().st_size == 0
    writer.write(Record("eval", 1, 1.0, {"x": 1.0}))
    assert len(events_of(path)) == 4
    writer.close()
    writer = tj.TensorBoard(tmp_path, flush_s=0).open(1)
    writer.write(Record("train", 2, 1.0, {"x": 1.0}))
    assert sum(len(events_of(path)) for path in tmp_path.iterdir()) == 4 + 3
    writer.close()


def test_without_tensorboardx_it_says_what_to_install(step, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    state = init(step)
    with pytest.raises(ValueError, match=r"tensorboardX.*towerjax\[tensorboard\]"):
        writers = [tj.JsonLines(tmp_path / "a"), tj.TensorBoard(tmp_path / "logs")]
        run(step, state, data(1), writers=writers, progress=False)
    assert not (tmp_path / "logs").exists()
    assert int(state.step) == 0


@pytest.mark.parametrize(
    "options, text",
    [
        ({"logdir": ""}, "TensorBoard.logdir='' must be the path of a folder"),
        ({"logdir": "x", "max_elements": 0}, "max_elements=0 must be a whole number"),
        ({"logdir": "x", "flush_s": -1}, "flush_s=-1 must be seconds >= 0"),
    ],
)
def test_bad_options_of_tensorboard_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        tj.TensorBoard(**options).open(0)


# Weights & Biases


class Runs(types.ModuleType):
    """Stands in for ``wandb``: what it was asked to do."""

    def __init__(self):
        super().__init__("wandb")
        self.calls = []

    def init(self, **given):
        self.calls.append(("init", given))
        return self

    def log(self, numbers, step):
        self.calls.append((step, numbers))

    def finish(self):
        self.calls.append("finish")


def test_wandb_has_every_number_by_its_step(step, evaluate, monkeypatch):
    wandb = Runs()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    asked = {"project": "digits", "id": "a"}
    options = {"evaluate": evaluate, "eval_batches": data(1), "progress": False}
    options["writers"] = [tj.loop.WandB(asked)]
    state, history = run(step, init(step), data(2), **options)
    begun, *told, end = wandb.calls
    assert begun == ("init", asked) and end == "finish"
    losses = [float(x) for x in history.metrics["loss"]]
    trained = [(n, x["train/loss"]) for n, x in told if "train/loss" in x]
    assert trained == list(zip([1, 2], losses, strict=True))
    [(_, values)] = history.evaluations
    assert told[-1] == (2, {"eval/gap": values["gap"]})
    run(step, state, data(1), **options)  # goes on with the run of that id
    assert ("init", {**asked, "resume": "allow"}) in wandb.calls


def test_wandb_has_a_curve_for_each_element(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := Runs())
    writer = tj.loop.WandB().open(0)
    writer.write(Record("eval", 3, 2.0, {"x": np.arange(2), "y": np.nan}))
    with pytest.raises(ValueError, match="WandB: the metric 'eval/x' has 65 elements"):
        writer.write(Record("eval", 4, 2.0, {"x": np.zeros(65)}))
    [(step, numbers)] = wandb.calls[1:]
    assert step == 3 and math.isnan(numbers.pop("eval/y"))
    assert numbers == {"eval/x/0": 0.0, "eval/x/1": 1.0}


def test_bad_options_of_wandb_and_no_wandb_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="WandB.init='digits' must be the arguments"):
        tj.loop.WandB("digits")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="needs wandb.*pip install wandb"):
        tj.loop.WandB().open(0)


# Whatever happens


class Spy:
    """A writer that notes what it is given, and may fail."""

    def __init__(self, fail_at=None, failing="write"):
        self.records, self.closed, self.started = [], 0, []
        self.fail_at, self.failing = fail_at, failing
        self.error = OSError("disk full")

    def open(self, start):
        if self.failing == "open":
            raise self.error
        self.started.append(start)
        return self

    def write(self, record):
        assert not self.closed
        if self.failing == "write" and record.step == self.fail_at:
            raise self.error
        self.records.append((record.kind, record.step))

    def close(self):
        self.closed += 1
        if self.failing == "close":
            raise self.error


def failing_data(num_steps, error):
    yield from data(num_steps)
    raise error


def hook_that_fails(at, error):
    def hook(number, metrics):
        if number == at:
            raise error

    return hook


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loader", "interrupt", "evaluation", "none"])
def test_writers_have_the_history_and_are_closed(step, evaluate, where):
    spy, other, error = Spy(), Spy(), LookupError("gone")
    error = KeyboardInterrupt() if where == "interrupt" else error
    batches = failing_data(7, error) if where == "loader" else data(7)
    hooks = [hook_that_fails(3, error)] if where == "interrupt" else []

    def eval_batches():
        if where == "evaluation":
            raise error
        return data(1)

    options = {"evaluate": evaluate, "eval_batches": eval_batches, "eval_every": 6}
    options |= {"in_flight": 3, "hooks": hooks}
    options |= {"writers": [spy, other], "progress": False}
    if where == "none":
        state, history = run(step, init(step), batches, **options)
    else:
        with pytest.raises(type(error)) as caught:
            run(step, init(step), batches, **options)
        assert caught.value is error
        state, history = error.state, error.history
    assert spy.records == other.records
    assert (spy.closed, other.closed, spy.started) == (1, 1, [0])
    trained = [number for kind, number in spy.records if kind == "train"]
    assert trained == history.steps.tolist() == list(range(1, int(state.step) + 1))
    evaluated = [number for kind, number in spy.records if kind == "eval"]
    assert evaluated == [number for number, _ in history.evaluations]


@pytest.mark.few_fast(1)
def test_a_writer_that_fails_loses_neither_state_nor_the_others_records(step):
    spy, failing, last = Spy(), Spy(fail_at=3), Spy()
    options = {"in_flight": 3, "progress": False}
    with pytest.raises(OSError, match="disk full") as caught:
        run(step, init(step), data(20), writers=[spy, failing, last], **options)
    done = int(caught.value.state.step)
    assert caught.value.history.steps.tolist() == list(range(1, done + 1))
    assert spy.records == last.records == [("train", i + 1) for i in range(done)]
    assert failing.records == [("train", 1), ("train", 2)]
    assert (spy.closed, failing.closed, last.closed) == (1, 1, 1)
    state, history = run(step, caught.value.state, data(20, done), progress=False)
    np.testing.assert_allclose(float(state.params), oracle(20)[2], rtol=1e-5)


def test_a_second_failure_is_a_note_of_the_first(step):
    error, failing = LookupError("gone"), Spy(failing="close")
    with pytest.raises(LookupError) as caught:
        run(step, init(step), failing_data(2, error), writers=[failing], progress=False)
    assert "Besides, a writer failed: OSError: disk full." in caught.value.__notes__


def test_a_writer_that_does_not_open_changes_nothing(step):
    spy, state = Spy(), init(step)
    with pytest.raises(OSError, match="disk full"):
        run(step, state, data(2), writers=[spy, Spy(failing="open")], progress=False)
    assert spy.closed == 1
    assert float(state.params) == 3.0


@pytest.mark.slow
def test_a_refused_step_is_written_before_the_error(step):
    spy = Spy()
    cut = data(4)
    cut[2] = np.full(5, np.nan, np.float32)
    options = {"in_flight": 1, "progress": False}
    with pytest.raises(tj.NonFiniteError) as caught:
        run(step, init(step), cut, writers=[spy], **options)
    trained = [number for _, number in spy.records]
    assert trained == caught.value.history.steps.tolist()
    assert trained[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    "writers, text",
    [
        ("run.jsonl", "writers='run.jsonl' must be a list: write"),
        (3, "writers=3 must be a list"),
        (["run.jsonl"], "one of writers='run.jsonl' of type str cannot be used here"),
        ([tj.JsonLines], "is a class, not an object of it"),
    ],
)
def test_what_is_no_writer_is_refused(step, writers, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        run(step, init(step), data(1), writers=writers, progress=False)
