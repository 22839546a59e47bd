"""What a run writes down: exact numbers, whole lines, once each, whatever happens."""

import contextlib
import csv
import errno
import json
import math
import os
import pathlib
import struct
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto import event_pb2

import towerjax as tj

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
    """It leaves the states that it is given."""
    options = {"remainder": "pad", "donate": False}
    return tj.build_train_step(loss_fn, optax.sgd(RATE), tj.Mirrored(), **options)


@pytest.fixture(scope="module")
def evaluate():
    return tj.build_eval_step(metric_fn, tj.Mirrored())


def data(num_steps, start=0):
    """Batches of 5 examples, which 8 towers do not divide."""
    return [np.arange(5, dtype=np.float32) + i for i in range(start, num_steps)]


def run(step, batches, *writers, state=None, **options):
    state = step.init(jnp.float32(3.0)) if state is None else state
    return tj.run(step, state, batches, writers=writers, progress=False, **options)


def record(kind, step, time_s, metrics):
    """What a writer is given of a step, or of an evaluation."""
    return types.SimpleNamespace(
        kind=kind, step=step, time_s=time_s, metrics=metrics, rates={}
    )


# What each writer has written: (kind, step, number by curve), in order


def of_each_element(metrics):
    numbers = {}
    for name, value in metrics.items():
        for place, x in np.ndenumerate(np.asarray(value)):
            numbers["/".join([name, *map(str, place)])] = float(x)
    return numbers


def lines_of(path):
    """Each line, by a parser that takes nothing but JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = pathlib.Path(path).read_bytes()
    assert text == b"" or text.endswith(b"\n")
    lines = [json.loads(x, parse_constant=refuse) for x in text.splitlines()]
    times = [line["time_s"] for line in lines]
    assert times == sorted(times) and (not times or times[-1] <= time.time())
    return [(x["kind"], x["step"], of_each_element(x["metrics"])) for x in lines]


def rows_of(path):
    """Each record, by the reader of the standard library; it has no rates."""
    text = pathlib.Path(path).read_bytes()
    assert text.endswith(b"\n")
    found = {}
    for row in csv.DictReader(text.decode().splitlines()):
        assert [*row] == ["kind", "step", "time_s", "name", "value"]
        if row["kind"] == "rate":
            assert float(row["value"]) >= 0
            continue
        numbers = found.setdefault((row["kind"], int(row["step"])), {})
        assert row["name"] not in numbers
        numbers[row["name"]] = float(row["value"])
    return [(*place, numbers) for place, numbers in found.items()]


def events_of(path):
    """``(step, wall time, {tag: value}, is it the mark of a start?)`` of a file."""
    data = path.read_bytes()
    at = 0
    events = []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16
        values = {value.tag: value.simple_value for value in event.summary.value}
        is_start = event.session_log.status == event_pb2.SessionLog.START
        events.append((event.step, event.wall_time, values, is_start))
    return events


def shown_by_tensorboard(logdir):
    """It reads files by name, and hides at a mark what came from that step on."""
    shown = []
    for path in sorted(logdir.iterdir(), key=lambda path: path.name.split(".")[-1]):
        assert b"brain.Event:2" in path.read_bytes()[:60]
        for number, _, values, is_start in events_of(path)[1:]:
            if is_start:
                shown = [x for x in shown if x[1] < number]
            elif values:
                values = {k: x for k, x in values.items() if k[:5] != "rate/"}
                kinds, names = zip(*(x.split("/", 1) for x in values), strict=True)
                by_name = dict(zip(names, values.values(), strict=True))
                assert len({*kinds}) == 1
                shown.append((kinds[0], number, by_name))
    return shown


JSON = (lambda path: tj.JsonLines(path / "new" / "run.jsonl"),
    lambda path: lines_of(path / "new" / "run.jsonl"))  # fmt: skip
BOARD = (lambda path: tj.TensorBoard(path / "new" / "logs"),
    lambda path: shown_by_tensorboard(path / "new" / "logs"))  # fmt: skip
TABLE = (lambda path: tj.loop.Csv(path / "new" / "run.csv"),
    lambda path: rows_of(path / "new" / "run.csv"))  # fmt: skip
EXACT = JSON[0], TABLE[0]
each_file = pytest.mark.parametrize(
    "made, read", [JSON, BOARD, TABLE], ids=["json", "board", "csv"]
)


@pytest.mark.slow
@each_file
def test_what_is_written_is_the_history(step, evaluate, tmp_path, made, read):
    options = {"evaluate": evaluate, "eval_batches": data(2), "eval_every": 6}
    _, history = run(step, data(10), made(tmp_path), **options)
    columns = history.metrics
    expected = [
        ("train", n, of_each_element({name: x[n - 1] for name, x in columns.items()}))
        for n in history.steps.tolist()
    ]
    for number, values in reversed(history.evaluations):  # where they were made
        expected.insert(number, ("eval", number, of_each_element(values)))
    found = read(tmp_path)
    as_there = float if made in EXACT else np.float32
    assert found == [
        (kind, number, {name: as_there(x) for name, x in values.items()})
        for kind, number, values in expected
    ]


@pytest.mark.slow
def test_the_reader_of_tensorboard_reads_the_history(step, evaluate, tmp_path):
    """Its own: steps that a later run does again are there once."""
    package = "tensorboard.backend.event_processing.event_accumulator"
    reader = pytest.importorskip(package)
    board = tj.TensorBoard(tmp_path)
    options = {"evaluate": evaluate, "eval_batches": data(2), "eval_every": 2}
    at_two, _ = run(step, data(2), board, **options)
    run(step, data(5, 2), board, state=at_two, **options)
    _, history = run(step, data(4, 2), board, state=at_two, **options)
    found = reader.EventAccumulator(str(tmp_path)).Reload()
    tags = found.Tags()["scalars"]
    assert {"train/loss", "eval/gap", "rate/steps_per_second"} <= {*tags}
    losses = {x.step: np.float32(x.value) for x in found.Scalars("train/loss")}
    assert [*losses] == [1, 2, 3, 4]
    assert [losses[n] for n in (3, 4)] == history.metrics["loss"].tolist()
    evaluated = {x.step: np.float32(x.value) for x in found.Scalars("eval/gap")}
    assert evaluated[4] == np.float32(dict(history.evaluations)[4]["gap"])
    assert all(x.value > 0 for x in found.Scalars("rate/examples_per_second"))


@pytest.mark.slow
@pytest.mark.parametrize("torn", [b'{"ki', b'{"kind": "train", "step": 6, "ti'])
@each_file
def test_steps_that_are_done_again_are_there_once(
    step, evaluate, tmp_path, made, read, torn
):
    writer = made(tmp_path)
    options = {"evaluate": evaluate, "eval_batches": data(1), "eval_every": 2}
    at_two, _ = run(step, data(2), writer, **options)
    run(step, data(5, 2), writer, state=at_two, **options)
    first = read(tmp_path)
    if made in EXACT:
        with open(writer.path, "ab") as file:
            file.write(torn)
    run(step, data(4, 2), writer, state=at_two, **options)  # from what was saved then
    places = [(kind, number) for kind, number, _ in read(tmp_path)]
    train = [("train", n) for n in (1, 2, 3, 4)]
    assert places == [*train[:2], ("eval", 2), *train[2:], ("eval", 4)]
    assert read(tmp_path)[:3] == first[:3]


@pytest.mark.few_fast(1)
@each_file
def test_a_new_run_does_not_write_over_an_old_one(step, tmp_path, made, read):
    writer = made(tmp_path)
    run(step, data(3), writer)
    before = read(tmp_path)
    state = step.init(jnp.float32(3.0))
    with pytest.raises(ValueError, match="holds .*an earlier run.*, but this run"):
        run(step, data(2), writer, state=state)
    assert read(tmp_path) == before and int(state.step) == 0
    place = next(iter(vars(writer).values()))
    run(step, data(2), type(writer)(place, replace=True), state=state)
    assert [number for _, number, _ in read(tmp_path)] == [1, 2]


@pytest.mark.parametrize("options, read", [
    (tj.JsonLines, lines_of), (tj.loop.Csv, rows_of)])  # fmt: skip
def test_an_evaluation_that_is_done_again_is_there_once(tmp_path, options, read):
    path = tmp_path / "run"

    def write(start, *records):
        with contextlib.closing(options(path).open(start)) as writer:
            for kind, number, value in records:
                metrics = {"loss": value, "pair": np.array([value, 1])}
                writer.write(record(kind, number, 0.5, metrics))
                told = (kind, number, of_each_element(metrics))
                assert read(path)[-1:] == [told]  # whole, whoever is killed

    write(0, ("train", 1, 5), ("train", 2, 4), ("eval", 2, 3))
    write(2, ("eval", 2, 7), ("train", 3, 2), ("eval", 3, 1))
    write(2, ("train", 3, 2))
    found = [(kind, number, values["loss"]) for kind, number, values in read(path)]
    train = [("train", 1, 5), ("train", 2, 4)]
    assert found == [*train, ("eval", 2, 7), ("train", 3, 2)]


def test_a_function_gets_the_numbers_of_steps_and_evaluations(step, evaluate):
    given = []
    curves = tj.loop.Curves(lambda number, values: given.append((number, values)))
    tenth = tj.loop.Curves(lambda number, _: given.append(number), every=2)
    options = {"evaluate": evaluate, "eval_batches": data(2), "eval_every": 3}
    _, history = run(step, data(3), curves, tenth, **options)
    assert [x for x in given if isinstance(x, int)] == [2, 3]  # the last evaluates
    found = [pair for pair in given if isinstance(pair, tuple)]
    assert [number for number, _ in found] == [1, 2, 3, 3]
    for (_, values), number in zip(found, history.steps.tolist(), strict=False):
        rates = {k: values.pop(k) for k in [*values] if k[:5] == "rate/"}
        assert rates.keys() == {"rate/steps_per_second", "rate/examples_per_second"}
        row = {name: x[number - 1] for name, x in history.metrics.items()}
        expected = {f"train/{name}": x for name, x in of_each_element(row).items()}
        assert values == expected
        assert {type(x) for x in values.values()} == {float}
    assert found[-1][1] == {"eval/gap": history.evaluations[-1][1]["gap"]}


def test_a_function_that_fails_ends_the_run(step):
    def fail(number, values):
        raise OSError("no network")

    with pytest.raises(OSError, match="no network") as caught:
        run(step, data(3), tj.loop.Curves(fail))
    assert int(caught.value.state.step) >= 1


@pytest.mark.slow
def test_pandas_reads_the_table(step, tmp_path):
    pandas = pytest.importorskip("pandas")
    _, history = run(step, data(3), tj.loop.Csv(tmp_path / "run.csv"))
    table = pandas.read_csv(tmp_path / "run.csv").query("kind == 'train'")
    table = table.pivot(index="step", columns="name", values="value")
    assert table["loss"].tolist() == history.metrics["loss"].tolist()


def test_extreme_scalars_and_arrays_are_curves(tmp_path):
    values = {"nan": math.nan, "huge": 1e300, "low": -math.inf, "half": np.float16(0.5)}
    values |= {"matrix": np.arange(4).reshape(2, 2), "none": np.zeros(0), "yes": True}
    with contextlib.closing(tj.TensorBoard(tmp_path, max_elements=4).open(0)) as writer:
        writer.write(record("eval", 1, 2.0, values))
    [(_, _, told)] = shown_by_tensorboard(tmp_path)
    assert math.isnan(told.pop("nan"))
    matrix = {f"matrix/{i}/{j}": 2.0 * i + j for i in (0, 1) for j in (0, 1)}
    assert told == {"huge": math.inf, "low": -math.inf, "half": 0.5, "yes": 1, **matrix}


@pytest.mark.parametrize("made, read", [JSON, TABLE], ids=["json", "csv"])
@pytest.mark.parametrize("whole", [0, 1, 2])
@pytest.mark.parametrize("kept", [0, 9])
def test_a_file_that_a_power_cut_filled_with_zeros_is_cut(
    tmp_path, made, read, whole, kept
):
    """Whole lines stay, then comes a part of a line, or none, and then zeros."""
    options = made(tmp_path)
    with contextlib.closing(options.open(0)) as writer:
        for step in (1, 2, 3):
            writer.write(record("train", step, 2.0, {"loss": 0.5}))
    path = pathlib.Path(options.path)
    lines = path.read_bytes().splitlines(keepends=True)
    is_table = len(lines) == 4
    part = lines[whole][:kept]
    path.write_bytes(b"".join(lines[:whole]) + part + bytes(4096))
    with contextlib.closing(options.open(3)) as writer:
        writer.write(record("train", 4, 2.0, {"loss": 0.25}))
    steps = [step for _, step, _ in read(tmp_path)]
    assert steps == [*range(1, whole + 1 - is_table), 4]


@pytest.mark.parametrize("name", ["a\nb", "a\r\nb", "a\x1b[31mb", "a\u2028b"])
def test_a_metric_may_have_a_name_of_several_lines(tmp_path, name):
    options = tj.loop.Csv(tmp_path / "run.csv")
    for start in (0, 1):
        with contextlib.closing(options.open(start)) as writer:
            writer.write(record("train", start + 1, 2.0, {name: 0.5}))
    rows = [("train", n, {repr(name)[1:-1]: 0.5}) for n in (1, 2)]
    assert rows_of(options.path) == rows


@pytest.mark.parametrize("call", ["write_event", "flush"])
def test_a_full_disk_names_the_folder_of_tensorboard(tmp_path, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = tj.TensorBoard(tmp_path).open(0)
    text = f"TensorBoard.logdir='{tmp_path}' cannot be written to: No space left"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"tensorboardX.event_file_writer.EventsWriter.{call}", full)
        with pytest.raises(ValueError, match=text):
            writer.write(record("eval", 1, 2.0, {"loss": 0.5}))
        if call == "flush":  # closing flushes, too
            with pytest.raises(ValueError, match=text):
                writer.close()
    writer.close()


def writing(options, metrics):
    def write(path):
        with contextlib.closing(options(path).open(0)) as writer:
            writer.write(record("train", 2, 2.0, metrics))

    return write


def in_a_table(path):
    return tj.loop.Csv(path / "run.csv")


def in_lines(path):
    return tj.JsonLines(path / "run.jsonl")


def a_table_of(text):
    return a_file_of(text, tj.loop.Csv)


def a_file_of(text, options=tj.JsonLines):
    """It is left alone."""

    def open_it(path):
        path = path / "notes.txt"
        path.write_text(text)
        try:
            options(path, replace=True).open(2)
        finally:
            assert path.read_text() == text

    return open_it


def in_a_file(path):
    (path / "file").write_text("")
    tj.TensorBoard(path / "file").open(0)


def without_tensorboardx(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
        try:
            tj.TensorBoard(path / "logs").open(0)
        finally:
            assert not (path / "logs").exists()


def given(writers):
    """Before the state is taken over."""

    def call(path):
        step = tj.build_train_step(loss_fn, optax.sgd(RATE), tj.Mirrored())
        state = step.init(jnp.float32(3.0))
        try:
            tj.run(step, state, data(1), writers=writers, progress=False)
        finally:
            assert float(state.params) == 3.0

    return call


NO_LINE = "Line {} of .* is not a line of a run"
NO_NUMBER = "the metric 'x' is .* real"
REFUSED = [
    *[(writing(in_lines, {"x": x}), NO_NUMBER)
        for x in (np.complex64(1), np.array("a"), np.array(None), tj.Weighted(3, 2))],
    (a_file_of("hello"), NO_LINE.format(1)),
    (a_file_of("{}\n"), NO_LINE.format(1)),
    (a_file_of('{"step": 3, "loss": 0.5}\n'), NO_LINE.format(1)),  # of another program
    (a_file_of('{"kind": "train", "step": 1}\n{"step": 2}\n'), NO_LINE.format(2)),
    (a_file_of('{"kind": "Pod", "spec": {}}'), "ends with a whole object and no newl"),
    *[(a_file_of(f'{{"kind": "train"{fields}}}\n'), f"{NO_LINE.format(1)}.*{why}")
        for fields, why in (
            ("", "KeyError: 'step'"), (', "step": "1"', "step is '1', and not a whole"),
            (', "step": -1', "step is -1"), (', "step": 1e3', "step is 1000.0"),
            (', "step": true', "step is True"), (', "step": 1' + "0" * 5000, "Error"),
            (', "step": ' + "[" * 100_000, "RecursionError"))],
    (lambda path: tj.JsonLines(path).open(0), "path='/.* cannot be written to"),
    (in_a_file, "logdir='/.* cannot be written to"),
    *[(a_table_of(text), "Line 1 of .* is not a line of tj.loop.Csv")
        for text in ("hello\n", "hello", "kind,step\n", "kind,step!")],
    *[(a_table_of(f"kind,step,time_s,name,value\ntrain,{x},1,a,2\n"), "Line 2 of ")
        for x in ("-1", "1.0", "1_0", "\N{SUPERSCRIPT TWO}", "9" * 5000, "")],
    (a_table_of("kind,step,time_s,name,value\nx,y\n"), "Line 2 of .* not a line of tj"),
    (writing(in_a_table, {"x": np.complex64(1)}), "Csv: the metric .* is .*real"),
    (lambda _: tj.loop.Csv(""), "must be the path of a file"),
    (lambda _: tj.loop.Curves(3), "Curves.function=3 is not a function"),
    (lambda _: tj.loop.Curves(print, every=0), "every=0 must be"),
    (writing(lambda _: tj.loop.Curves(print, max_elements=1), {"x": np.zeros(2)}),
        "Curves: the metric 'train/x' has 2 elements"),
    (lambda _: tj.JsonLines(3), "must be the path of a file"),
    (lambda _: tj.JsonLines(""), "must be the path of a file"),
    (lambda _: tj.JsonLines("a", "b"), "replace='b' must be True or False"),
    (lambda _: tj.TensorBoard("a", replace=1), "replace=1 must be True or False"),
    (lambda _: tj.TensorBoard(""), "TensorBoard.logdir='' must be the path of"),
    (lambda _: tj.TensorBoard("a", 0), "max_elements=0 must be a whole number"),
    (writing(lambda x: tj.TensorBoard(x, 4), {"big": np.zeros(5)}),
        "'train/big' has 5 elements.* is 4"),
    (writing(tj.TensorBoard, {"z": np.complex64(1)}), "'train/z' is complex64.*real n"),
    (without_tensorboardx, r"tensorboardX.*'\.\[tensorboard\]'"),
    (given("run.jsonl"), "writers='run.jsonl' must be a list: write"),
    (given(3), "writers=3 must be a list"),
    (given(["run.jsonl"]), "one of writers='run.jsonl' of type str cannot be used"),
    (given([tj.JsonLines]), "is a class, not an object"),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_what_cannot_be_written_is_refused(tmp_path, row):
    call, text = REFUSED[row]
    with pytest.raises(ValueError, match=text):
        call(tmp_path)


class Spy:
    """A writer that notes what it is given, and may fail, saying so."""

    def __init__(self, **failing):
        self.records = []
        self.closed = 0
        self.failing = failing

    def fail(self, doing, number=True):
        if self.failing.get(doing) == number:
            raise OSError(self.failing.get("says", "disk full"))

    def open(self, start):
        self.fail("open")
        assert start == 0
        return self

    def write(self, record):
        assert not self.closed
        self.fail("write", record.step)
        self.records.append((record.kind, record.step))

    def close(self):
        self.closed += 1
        self.fail("close")


def ended(where, error):
    """The batches and options of a run that ends so."""
    batches = data(7)
    options = {"eval_batches": lambda: data(1)}

    def fail(*_):
        raise error

    def loader():
        yield from data(7)
        fail()

    if where == "refused":
        batches[2] = np.full(5, np.nan, np.float32)
    if where == "interrupt":
        options["hooks"] = [lambda number, _: fail() if number == 3 else None]
    if where == "evaluation":
        options["eval_batches"] = fail
    return loader() if where == "loader" else batches, options


ENDS = {"loader": LookupError, "interrupt": KeyboardInterrupt, "none": None}
ENDS |= {"evaluation": LookupError, "refused": tj.NonFiniteError}


@pytest.mark.slow
@pytest.mark.parametrize("where", ENDS)
def test_writers_have_the_history_and_are_closed(step, evaluate, where):
    spies = [Spy(), Spy()]
    error = LookupError("gone")
    error = KeyboardInterrupt() if where == "interrupt" else error
    batches, options = ended(where, error)
    options |= {"evaluate": evaluate, "eval_every": 6, "in_flight": 3}
    if where == "none":
        state, history = run(step, batches, *spies, **options)
    else:
        with pytest.raises(ENDS[where]) as caught:
            run(step, batches, *spies, **options)
        state = caught.value.state
        history = caught.value.history
    assert [spy.closed for spy in spies] == [1, 1]
    assert spies[0].records == spies[1].records
    trained = [number for kind, number in spies[0].records if kind == "train"]
    assert trained == history.steps.tolist() and len(trained) >= 3
    assert where == "refused" or int(state.step) == len(trained)
    evaluated = [number for kind, number in spies[0].records if kind == "eval"]
    assert evaluated == [number for number, _ in history.evaluations]


@pytest.mark.few_fast(1)
def test_a_writer_that_fails_loses_neither_state_nor_the_others_records(step):
    spy = Spy()
    failing = Spy(write=3)
    last = Spy()
    with pytest.raises(OSError, match="disk full") as caught:
        run(step, data(20), spy, failing, last, in_flight=3)
    done = int(caught.value.state.step)
    assert caught.value.history.steps.tolist() == list(range(1, done + 1))
    assert spy.records == last.records == [("train", i + 1) for i in range(done)]
    assert failing.records == [("train", 1), ("train", 2)]
    assert (spy.closed, failing.closed, last.closed) == (1, 1, 1)
    state, _ = run(step, data(20, done), state=caught.value.state)
    whole, _ = run(step, data(20))
    assert float(state.params) == float(whole.params)


FAILURES = [
    ([{"write": 2, "says": "first"}, {"write": 2, "says": "second"}], "first"),
    ([{"write": 2, "close": True, "says": "first"}, {"close": True}], "first"),
    ([{}, {"close": True, "says": "first"}, {"close": True, "says": "last"}], "first"),
    ([{}, {"open": True, "says": "not open"}, {"open": True}], "not open"),
]


@pytest.mark.parametrize("writers, told", FAILURES)
def test_of_several_failures_the_first_is_told(step, writers, told):
    spies = [Spy(**failing) for failing in writers]
    with pytest.raises(OSError, match=told):
        run(step, data(3), *spies, in_flight=1)
    assert [spy.closed for spy in spies if "open" not in spy.failing] == [1] * sum(
        "open" not in failing for failing in writers
    )


def test_a_failure_besides_another_error_is_a_note_of_that(step):
    batches, _ = ended("loader", LookupError("gone"))
    with pytest.raises(LookupError) as caught:
        run(step, batches, Spy(close=True))
    assert "A writer failed, too: OSError: disk full." in caught.value.__notes__


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
def test_a_full_disk_ends_the_run_with_its_state(step):
    """A device may be written to; what it holds is never read."""
    text = r"JsonLines.path='/dev/full' cannot be written to: No space left on device"
    with pytest.raises(ValueError, match=text) as caught:
        run(step, data(3), tj.JsonLines("/dev/full"))
    assert caught.value.state is not None and len(caught.value.history.steps) >= 1


def test_two_writers_of_one_file_are_refused(step, tmp_path):
    pair = [tj.JsonLines(tmp_path / x) for x in ("a.jsonl", "b/../a.jsonl")]
    with pytest.raises(ValueError, match="two JsonLines write to .*a.jsonl', so that"):
        run(step, data(1), *pair)
    assert not (tmp_path / "a.jsonl").exists()


def test_a_path_in_place_of_writers_is_told_what_to_write(step):
    batches = data(1)
    text = r"write writers=\[tj.JsonLines\('run.jsonl'\)\]"
    with pytest.raises(ValueError, match=text):
        tj.run(step, step.init(0.0), batches, writers="run.jsonl", progress=False)
