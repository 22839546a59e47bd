"""What a run shows: bars, lines, histories and traces."""

import functools
import re
import sys
import time
import types
import warnings

import jax
import numpy as np
import pytest
from runs import batches, build_step, cut_of, eval_data, make_data, shown_on, train


@pytest.mark.slow
def test_rates_leave_out_compiling_and_evaluating(eval_step):
    def slow():
        time.sleep(0.3)
        return batches(eval_data(16), 16)

    step = build_step()
    start_s = time.perf_counter()
    _, history = train(cut_of(20), step=step, evaluate=eval_step, eval_batches=slow)
    seconds = time.perf_counter() - start_s
    summary = history.summary
    assert summary.compile_seconds > 0
    training_s = summary.steps / summary.steps_per_second
    assert training_s < seconds - 0.3 - summary.compile_seconds
    examples_per_second = 16 * summary.steps_per_second
    np.testing.assert_allclose(summary.examples_per_second, examples_per_second)


@pytest.mark.slow
def test_every_step_is_named_in_a_trace(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        train(cut_of(6))
    [path] = tmp_path.rglob("*.xplane.pb")
    with warnings.catch_warnings(action="ignore"):  # its classes have no module
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        events = [e for plane in planes for line in plane.lines for e in line.events]
        stats = [dict(event.stats) for event in events if event.name == "train"]
    assert sorted(int(each["step_num"]) for each in stats) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_lines_without_a_terminal(train_step, eval_step, capsys):
    evaluated = {"evaluate": eval_step, "eval_batches": [eval_data(16)]}
    train(cut_of(5), step=train_step, steps=5, progress=None, **evaluated)
    out, err = capsys.readouterr()
    assert out == ""
    # The first and the last one: between two lines there are seconds.
    for line, expected in zip(
        err.splitlines(),
        [
            "step 1: compiling",
            r"step 1/5  loss [\d.]+  [\d.]+ steps/s  \S+ left",
            r"step 5/5  loss [\d.]+  [\d.]+ steps/s",
            r"evaluation after step 5  (\S+ \S+  )*mse [\d.]+.*",
        ],
        strict=True,
    ):
        assert re.fullmatch(expected, line)


KINDS = {"batches": lambda x: x, "list": list, "generator": lambda x: (y for y in x)}


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bar_shows_the_last_step(train_step, monkeypatch, steps, kind):
    screen = shown_on(monkeypatch)
    data = KINDS[kind](batches(make_data(64), 16))
    train(data, step=train_step, steps=steps, progress=True)
    text = screen.getvalue()
    is_known = steps is not None or kind != "generator"
    assert f"step 4{'/4' if is_known else ''}  loss " in text
    assert "steps/s" in text
    assert "\x1b[?25l" not in text  # the cursor is not hidden


def test_a_bar_is_closed_by_an_exception(train_step, monkeypatch):
    screen = shown_on(monkeypatch)

    def loader():
        yield from cut_of(4)
        raise LookupError

    with pytest.raises(LookupError):
        train(loader(), step=train_step, progress=True)
    assert "step 4  loss" in screen.getvalue()
    assert sys.stderr is screen


def test_a_notebook_gets_a_bar_in_its_place(train_step, monkeypatch, capsys):
    shown = []

    class Handle:
        def update(self, bundle, raw):
            shown.append(bundle["text/plain"] * raw)

    def display(bundle, raw, display_id):
        assert display_id is True and "<progress" not in bundle["text/html"]
        shown.append(bundle["text/plain"] * raw)
        return Handle()

    fake = types.SimpleNamespace(
        get_ipython=lambda: types.SimpleNamespace(kernel=object()),
        display=types.SimpleNamespace(display=display),
    )
    monkeypatch.setitem(sys.modules, "IPython", fake)
    train(cut_of(4), step=train_step, steps=4, progress=None)
    assert shown[0].strip() == "starting" and "step 1: compiling" in shown[1]
    assert re.match("━{30} +step 4/4  loss", shown[-1])
    assert capsys.readouterr().out == ""


def test_a_bar_leaves_what_is_piped_alone(train_step, monkeypatch, capsys):
    """Rich would print it above the bar, and so to stderr."""
    screen = shown_on(monkeypatch)
    hook = lambda number, metrics: print("done", number)  # noqa: E731
    train(cut_of(2), step=train_step, progress=True, hooks=[hook])
    assert capsys.readouterr().out == "done 1\ndone 2\n"
    assert "step 2" in screen.getvalue()


def test_metrics_are_shown_that_are_asked_for(train_step, capsys):
    show = functools.partial(train, cut_of(2), step=train_step)
    _, history = show(progress=["bias"])
    last = capsys.readouterr().err.splitlines()[-1]
    bias = f"{history.metrics['bias'][1]:#.4g}"
    assert re.match(rf"step 2/2  loss \S+  bias {re.escape(bias)}  ", last)
    for wrong, text in [
        (["mean"], "names 'mean', but the metrics of step 1 are"),
        ([], r"progress=\[\] must be None, True"),
        ([1], r"progress=\[1\] must be None, True"),
    ]:
        with pytest.raises(ValueError, match=text):
            show(progress=wrong)


def test_the_last_metrics_are_final(eval_step):
    _, history = train(cut_of(2))
    assert history.final == {k: v[-1] for k, v in history.metrics.items()}
    evaluated = {"evaluate": eval_step, "eval_batches": [eval_data(16)]}
    _, history = train(cut_of(2), **evaluated)
    assert history.final.keys() == {"loss", "bias", "step", "mse", "column"}
    assert history.final["mse"] == history.evaluations[-1][1]["mse"]


def evaluated_run(eval_step, epochs, eval_every):
    data = batches(make_data(16), 16, epochs=epochs)
    evaluated = {"evaluate": eval_step, "eval_batches": [eval_data(16)]}
    return train(data, eval_every=eval_every, **evaluated)[1]


def test_a_history_is_a_table(eval_step, monkeypatch):
    history = evaluated_run(eval_step, epochs=50, eval_every=33)
    text = history.table(rows=5)
    first_column = re.findall(r"^  \s*(\d+)  ", text, re.MULTILINE)
    # Five even steps and the evaluated 33; the evaluated 50 is among the five.
    assert [int(n) for n in first_column] == [1, 13, 25, 33, 37, 50]
    assert "evaluated mse" in text
    assert f"{history.metrics['loss'][12]:.4g}" in text
    assert f"{history.evaluations[0][1]['mse']:.4g}" in text
    assert "50 steps, 800 examples on 8 towers, 8 devices" in str(history.summary)
    shown = history._repr_mimebundle_(include=None, exclude=None)
    assert "evaluated mse" in shown["text/plain"] and "<table" not in shown["text/html"]
    rows = history.rows()
    assert [row["step"] for row in rows] == history.steps.tolist()
    assert [row["loss"] for row in rows] == history.metrics["loss"].tolist()
    found = {r["step"]: r["evaluated mse"] for r in rows if "evaluated mse" in r}
    assert found == {n: values["mse"] for n, values in history.evaluations}
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    assert history.to_pandas() == rows
    (line,) = f"{history}".splitlines()
    assert line.startswith("History(50 steps, 800 examples on 8 towers")
    assert f"mse {history.final['mse']:#.4g}" in line


@pytest.mark.slow
def test_a_history_is_a_picture(eval_step, monkeypatch):
    history = evaluated_run(eval_step, epochs=6, eval_every=3)
    pytest.importorskip("matplotlib")
    axes = history.plot().axes
    assert {panel.get_xlabel() for panel in axes} == {"step"}
    panels = {panel.get_ylabel(): panel.lines for panel in axes}
    (loss,) = panels["loss"]
    np.testing.assert_array_equal(loss.get_xdata(), history.steps)
    np.testing.assert_array_equal(loss.get_ydata(), history.metrics["loss"])
    (evaluated,) = panels["mse"]
    assert [*evaluated.get_xdata()] == [3, 6]
    expected = [values["mse"] for _, values in history.evaluations]
    np.testing.assert_allclose(evaluated.get_ydata(), expected)
    made = history.plot()
    assert made.get_size_inches().tolist() == [max(6.4, 3.2 * len(axes)), 4.0]
    assert made._repr_png_().startswith(b"\x89PNG")  # without %matplotlib inline


@pytest.mark.few_fast(1)
def test_the_wait_for_each_batch_is_in_the_history():
    def slow_at_the_third():
        for number, batch in enumerate(batches(make_data(16), 16, epochs=5)):
            time.sleep(0.2 * (number == 2))
            yield batch

    _, history = train(slow_at_the_third(), prefetch=0)
    assert history.input_wait_s.shape == (5,)
    assert history.input_wait_s.argmax() == 2 and history.input_wait_s[2] >= 0.2
