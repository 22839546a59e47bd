"""The functions of the loop, each by itself: stops, files, rates, what is shown."""

import io
import itertools
import json
import math
import os
import pathlib
import signal
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from test_writers import events_of, record

import towerjax as tj
from towerjax.loop import meetings, writers
from towerjax.loop import progress as shown
from towerjax.loop.files import StoredFile, append_line, checked_path
from towerjax.loop.history import HistoryLog, LogMark
from towerjax.loop.stopping import Watch
from towerjax.loop.throughput import Done, Throughput, flops_in_words
from towerjax.loop.writers import json_value
from towerjax.mesh.interrupt import InterruptGuard

Flops = tj.tools.Flops
NO_FLOPS = Flops(0, 0)


# When a run stops.


NAN = math.nan


INF = math.inf


def by_hand(values, patience, mode, min_delta):
    """The same count, from the definition."""
    best = INF if mode == "min" else -INF
    without = 0
    for number, value in enumerate(values, 1):
        gain = best - value if mode == "min" else value - best
        if value != value or value == best or not gain > min_delta:
            without += 1
        else:
            best = value
            without = 0
        if without == patience:
            return number
    return None


def watched(values, *arguments):
    """The number of the evaluation that ends a run."""
    watch = Watch([tj.EarlyStopping("x", *arguments)])
    for number, value in enumerate(values, 1):
        watch.add(number, {"x": value})
        if watch.stopped is not None:
            return number
    return None


def test_patience_of_any_values_is_as_counted_by_hand():
    rng = np.random.default_rng(0)
    for _ in range(300):
        values = rng.choice([NAN, INF, -INF, 0, 1, 2, 3, 4], size=12).tolist()
        arguments = int(rng.integers(1, 5)), str(rng.choice(["min", "max"]))
        arguments = (*arguments, float(rng.choice([0, 1, 2])))
        assert watched(values, *arguments) == by_hand(values, *arguments), values


# Step, loss and accuracy of the evaluations of the original's early stopping.
EVALUATED = [(1000, 0.8, 0.5), (2000, 0.7, 0.6), (3000, 0.4, 0.7), (3500, 0.41, 0.68)]


HOOKS = [
    (dict(metric="accuracy", goal=0.8), None),
    (dict(metric="accuracy", goal=0.6, min_steps=4000), None),
    (dict(metric="accuracy", goal=0.6), 2000),
    (dict(metric="accuracy", goal=0.7, min_steps=3000), 3000),
    (dict(metric="loss", goal=0.3), None),
    (dict(metric="loss", goal=0.5, min_steps=4000), None),
    (dict(metric="loss", goal=0.5), 3000),
    (dict(metric="accuracy", patience=2), None),
    (dict(metric="accuracy", patience=1, min_steps=4000), None),
    (dict(metric="accuracy", patience=1), 3500),
    (dict(metric="loss", patience=2), None),
    (dict(metric="loss", patience=1, min_steps=4000), None),
    (dict(metric="loss", patience=1, min_steps=3500), None),  # the first that counts
    (dict(metric="loss", patience=1), 3500),
    (dict(metric="loss", patience=2, goal=0.3), None),
    (dict(metric="loss", patience=2, goal=0.5), 3000),
    (dict(metric="loss", patience=1, goal=0.3), 3500),
    # It is reached, though by less than what counts as an improvement.
    (dict(metric="loss", patience=9, goal=0.7, min_delta=0.2), 2000),
    (dict(metric="loss", goal=-0.5), None),
]


ACCURATE = dict(metric="accuracy", goal=0.7)


SEVERAL = [  # any one ends the run
    ([dict(metric="loss", patience=2), dict(metric="loss", goal=0.3)], None),
    ([dict(metric="loss", patience=2), dict(metric="loss", goal=0.5)], 3000),
    ([dict(metric="loss", patience=1), dict(metric="loss", goal=0.3)], 3500),
    ([dict(metric="loss", patience=1), ACCURATE], 3000),
    ([ACCURATE | {"goal": 0.8}, dict(metric="loss", patience=1)], 3500),
    ([], None),
]


@pytest.mark.parametrize(
    "rules, last", [([one], last) for one, last in HOOKS] + SEVERAL
)
def test_a_goal_and_steps_that_do_not_count(rules, last):
    early = [tj.EarlyStopping(**options) for options in rules]
    watch = Watch(early)
    ended = []
    for number, loss, accuracy in EVALUATED:
        watch.add(number, {"loss": loss, "accuracy": accuracy})
        ended += [number] * (watch.stopped is not None)
        again = Watch(early)  # a job that goes on from here
        again.go_on(watch.values)
        assert again.stopped == watch.stopped
        if ended:
            break
    assert ended == ([] if last is None else [last])


def stopped(rule, values):
    watch = Watch([rule])
    for number, value in values.items():
        watch.add(number, {rule.metric: value})
    return watch.stopped


LESS = """
    loss eval/Loss valRMSE cross_entropy train_loss_epoch val_loss_step error_rate
    relative_error max_error log_loss weighted_loss top-1-error loss_1 loss-1 test/wer
"""
MORE = """
    accuracy top5_acc acc1 val/AUC meanIoU f1 PSNR top-1-accuracy top_1-accuracy
    recall@1-val precision_at_1-val acc@1-dev f1_score accuracy_score dev_accuracy
    val-accuracy 5-shot-accuracy roc_auc_score balanced_accuracy
"""


@pytest.mark.parametrize("metric", LESS.split())
def test_less_of_a_loss_or_an_error_is_better_without_a_mode(metric):
    rule = tj.EarlyStopping(metric, patience=2)
    assert stopped(rule, {1: 3.0, 2: 2.0, 3: 1.0}) is None
    assert "best 1.000 after 1" in stopped(rule, {1: 1.0, 2: 2.0, 3: 3.0})


@pytest.mark.parametrize("metric", MORE.split())
def test_more_of_an_accuracy_is_better_without_a_mode(metric):
    rule = tj.EarlyStopping(metric, patience=2)
    assert stopped(rule, {1: 0.1, 2: 0.2, 3: 0.3}) is None
    assert "best 0.3000 after 1" in stopped(rule, {1: 0.3, 2: 0.2, 3: 0.1})


# Some mean what their other words do not say, and of the others it is not known.
UNCLEAR = """
    neg_log_loss neg_mean_squared_error neg_root_mean_squared_error negLogLoss NegMSE
    negative_mse_loss d2_log_loss_score loss_score inverse_loss minus_loss -loss
    eval/-loss 1-accuracy 1_-_accuracy 1.0-auc 1\N{MINUS SIGN}accuracy val_1-accuracy
    eval/1-accuracy (1-acc) 100-accuracy 100%-accuracy one_minus_accuracy -accuracy
    accuracy_drop accuracyGap accuracy_loss accuracy_delta accuracy_penalty
    loss_reduction error_reduction loss_improvement loss_decrease loss_gain
    accuracy_std std(accuracy) lossStd loss_variance accuracy_ci accuracy_disparity
    time_to_accuracy steps_to_accuracy epoch_to_accuracy seconds_to_auc
    fraction_within_error errors_corrected loss_scale loss_weight loss_ratio
    accuracy_threshold accuracy_rank fpr_at_95_recall FPR95-recall accuracy_forgetting
    error_detection_rate mse_skill loss_speedup latency_at_accuracy accuracy_half_life
"""


@pytest.mark.parametrize("metric", [*UNCLEAR.split(), "1 - accuracy", "eval 1 - acc"])
def test_a_name_with_such_a_word_needs_a_mode(metric):
    with pytest.raises(ValueError, match="does not tell .* Write mode='min' or"):
        tj.EarlyStopping(metric, patience=2)
    assert tj.EarlyStopping(metric, patience=2, mode="max").metric == metric


def test_counts_of_another_rule_are_not_gone_on_from():
    saved = Watch([tj.EarlyStopping("x", 1, "min")])
    for number in (1, 2):
        saved.add(number, {"x": float(number)})
    assert saved.stopped is not None
    for rule in (tj.EarlyStopping("y", 1, "min"), tj.EarlyStopping("x", 1, "max")):
        watch = Watch([rule])
        watch.go_on(saved.values)
        assert watch.stopped is None


# What is written.


@pytest.mark.parametrize("value, written", [
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float64(0.1), 0.1),
    (ml_dtypes.bfloat16(0.1), 0.10009765625),
    (np.int32(-3), -3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (True, True),
    (np.bool_(False), False),
    (7.5, 7.5),
    (np.float32(np.nan), "NaN"),
    (math.inf, "Infinity"),
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
    assert file.getvalue() == b'{"x": [1, "y"]}\n'


def test_what_is_no_json_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_line(io.BytesIO(), {"x": math.nan})


@pytest.mark.parametrize(
    "flush_s, kind, flushed", [(1e6, "train", 0), (1e6, "eval", 3), (0, "train", 3)]
)
def test_events_are_flushed_with_each_evaluation_and_in_time(
    tmp_path, monkeypatch, flush_s, kind, flushed
):
    monkeypatch.setattr(writers, "_FLUSHED_EVERY_S", flush_s)
    writer = tj.TensorBoard(tmp_path).open(0)
    writer.write(record(kind, 1, 1.0, {"x": 1.0}))
    [path] = tmp_path.iterdir()
    assert len(events_of(path)) == flushed
    writer.close()
    assert [e[1] for e in events_of(path)][-1] == 1.0 and len(events_of(path)) == 3


def test_a_local_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("run", pathlib.Path("run"), epath.Path("run")):
        assert checked_path("x", path, "a file") == epath.Path(tmp_path / "run")


def test_storing_takes_a_tenth_of_the_time_at_most(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Slow:
        stored = []

        def write_bytes(self, data):
            self.stored.append(data)
            now[0] += 3

    file = StoredFile(Slow(), b"a", flush_s=10)
    for at in (9, 10, 42, 44, math.inf):
        now[0] = at
        file.write(b"b")
    assert [len(data) for data in Slow.stored] == [3, 5, 6]


# What is kept and shown.


def test_a_history_holds_no_arrays_of_devices_and_any_shapes():
    own = jnp.arange(3.0)
    alive = weakref.ref(own)
    log = HistoryLog()
    log.add(1, {"own": np.asarray(own)}, None, 4, 0.0, NO_FLOPS)  # a view, on CPUs
    del own
    assert alive() is None
    log.add(2, {"own": np.ones(1)}, None, 4, 0.0, NO_FLOPS)
    history = log.history(2, tj.Mirrored().placement, None)
    assert [row.shape for row in history.metrics["own"]] == [(3,), (1,)]
    with pytest.raises(ValueError, match=r"Step 3 has the metrics \['x'\], but th"):
        log.add(3, {"x": np.ones(1)}, None, 4, 0.0, NO_FLOPS)


def test_ipython_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert shown.in_notebook() is False
    assert "IPython" not in sys.modules
    assert shown.choose_display(None).seconds_between == 5


@pytest.mark.slow
def test_what_is_shown_is_thinned_out(monkeypatch):
    texts = []
    display = shown.Display(0.1, lambda done, total, text: texts.append(text))
    monkeypatch.setattr(shown, "choose_display", lambda progress: display)
    progress = shown.Progress(None, 0, None)
    start_s = time.monotonic()
    for number in itertools.count(1):
        progress.step(number, {"loss": 1.0}, 1e4)
        if time.monotonic() - start_s > 0.35:
            break
    progress.close()
    assert len(texts) <= 5
    assert texts[-1].startswith(f"step {number} ")


def test_a_dumb_terminal_gets_lines(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    for term, seconds in (("dumb", 5), ("xterm", 0.1)):
        monkeypatch.setenv("TERM", term)
        display = shown.choose_display(None)
        display.close()
        assert display.seconds_between == seconds
    assert shown.choose_display(True).close() is None  # a bar, where it is asked for
    # Of several processes the first, unless each is asked for or is no job of JAX.
    for index, progress, job, shows in [
        (0, None, True, True), (1, None, True, False), (1, None, False, True),
        (2, False, True, False), (0, False, False, False), (1, True, True, True),
    ]:  # fmt: skip
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda job=job: job)
        display = shown.choose_display(progress)
        assert (display != shown.Display()) == shows, (index, progress, job)
        display.close()


def test_rates_beside_a_step_are_those_of_the_last_twenty():
    log = Throughput(["tokens"], peak=50.0)
    assert log.now()["steps_per_second"] == 0
    for number in range(1, 41):
        # One second a step, of the last twenty half a second.
        seconds = number if number <= 20 else 20 + (number - 20) / 2
        metrics = {"tokens": np.int32(3)}
        log.add(seconds, metrics, 2, Flops(10, 0, ("x",) * (number == 9)))
    assert log.now() == {
        "steps_per_second": 2,
        "examples_per_second": 4,
        "tokens_per_second": 6,
        "flops_per_second": 20,
        "mfu": 0.4,
    }
    assert log.rates(log.done)["tokens_per_second"] == 120 / 30
    assert log.uncounted == ("x",)
    assert flops_in_words(log.now(), True) == "at least 20 FLOP/s (40.0% of the peak)"
    assert flops_in_words({"steps_per_second": 2.0}, True) == ""
    assert "flops_per_second" not in Throughput().rates(Done(1.0, 1, 2))


# A run that goes on without lost processes.


def test_meetings_are_a_second_apart_and_copies_take_a_hundredth():
    """Steps of 0.1 s; a copy takes 0.05 s, so that 5 s must lie between two."""
    pace = meetings.Pace(copy_s=0.05)
    number, now_s, copies = 0, 0.0, []
    for _ in range(60):
        at, is_copied = pace.next_meeting(number, now_s)
        assert number < at <= number + 10
        number, now_s = at, now_s + 0.1 * (at - number)
        if is_copied:
            copies.append(now_s)
            pace.copied_s = now_s
    between = np.diff(copies)
    assert len(copies) > 3 and between.min() >= 4.99 and between.max() < 7


def test_copies_after_each_given_step():
    pace = meetings.Pace(every=7)
    number, met = 0, []
    while number < 30:
        at, is_copied = pace.next_meeting(number, 0.05 * number)
        assert is_copied == (at % 7 == 0)
        met.append(at)
        number = at
    assert {7, 14, 21, 28} <= {*met}


def test_a_run_that_goes_back_meets_at_the_next_step():
    pace = meetings.Pace(every=50)
    for number in (0, 1, 3, 7, 15):
        pace.next_meeting(number, 0.01 * number)
    assert pace.next_meeting(4, 9.0) == (5, False)


def log_of(numbers, log=None):
    log = log or HistoryLog(Throughput(["tokens"]))
    for number in numbers:
        metrics = {"loss": np.float32(number), "tokens": np.float32(10 * number)}
        refused = number if number % 3 == 0 else None
        log.add(number, metrics, refused, number, 0.0, Flops(number, 0))
        if number % 2 == 0:
            log.evaluations.append((number, {"loss": 2.0 * number}))
    return log


def test_a_history_that_is_cut_has_each_step_once():
    log = log_of(range(1, 5))
    mark = log.mark()
    log_of([5, 6, 7], log)
    log.cut(mark)
    log_of([5, 6], log)
    placement = tj.OneDevice("cpu:0").placement
    once = log_of(range(1, 7))
    found, expected = (x.history(6, placement, None) for x in (log, once))
    assert found.steps.tolist() == expected.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.metrics["loss"].tolist() == expected.metrics["loss"].tolist()
    assert found.evaluations == expected.evaluations
    assert found.skipped == expected.skipped == (3, 6)
    assert found.summary.examples == expected.summary.examples == 21
    assert log.throughput.done.counts == (210.0,)
    assert log.throughput.done.products == 21
    log.cut(LogMark(0, 0, 0, Done()))
    assert log.num_steps == 0 and log.throughput.done.counts == (0.0,)


def test_a_sigterm_is_held_for_a_run_that_asks_for_it():
    guard = InterruptGuard(75)

    def body():
        guard.hold_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.is_told_to_end
        guard.forget_sigterm()
        return "saved"

    assert guard.call(body) == "saved"
