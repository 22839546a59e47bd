"""How much a run does in a second: in its history, its files, its report."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from test_writers import events_of

import towerjax as tj

ROWS = 12
LENGTH = 5


def loss_fn(params, batch, tower):
    weight = tower.weight[:, None] * batch["mask"]
    x, _ = jax.lax.scan(lambda x, w: (x, (x @ w)[..., 0]), batch["x"], params["w"])
    loss = tj.Weighted.mean((x @ params["v"])[..., 0] ** 2, weight)
    metrics = {"tokens": tj.Sum(weight.sum()), "both": tj.Sum(weight.sum(0))}
    return tj.TowerOutput(loss, metrics=metrics)


def params():
    draw = np.random.default_rng(0)
    shapes = {"w": (3, 4, 6), "v": (4, 1)}
    return {k: draw.normal(size=x).astype(np.float32) for k, x in shapes.items()}


def batches(count=7):
    draw = np.random.default_rng(1)
    for _ in range(count):
        x = draw.normal(size=(ROWS, LENGTH, 4)).astype(np.float32)
        lengths = draw.integers(1, LENGTH + 1, (ROWS, 1))
        yield {"x": x, "mask": (np.arange(LENGTH)[None] < lengths).astype(np.float32)}


def run(data, **options):
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"), towers=4)
    step = tj.build_train_step(loss_fn, optax.sgd(0.01), strategy)
    state = step.init(params())
    return step, *tj.run(step, state, data, **options, progress=False)


# Only the product with v is needed, forward and backward: a dot product for each token.
PRODUCTS = 2 * (2 * ROWS * LENGTH * 4)


@pytest.mark.slow
def test_a_history_has_rates_of_what_was_done(tmp_path):
    data = [*batches()]
    files = tj.JsonLines(tmp_path / "run.jsonl"), tj.TensorBoard(tmp_path / "logs")
    how = {"per_second": ["tokens"], "peak_flops": 2e9, "writers": files}
    step, state, history = run(data, **how)
    summary = history.summary
    tokens = sum(batch["mask"].sum() for batch in data)
    seconds = 7 / summary.steps_per_second
    rates = summary.rates
    assert [*rates] == ["tokens_per_second", "flops_per_second", "mfu"]
    assert summary.examples_per_second == pytest.approx(7 * ROWS / seconds)
    assert rates["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert rates["flops_per_second"] == pytest.approx(7 * PRODUCTS / seconds)
    assert rates["mfu"] == pytest.approx(7 * PRODUCTS / seconds / (2 * 2e9))
    assert summary.uncounted == ()
    for words in (" tokens/s, ", "FLOP/s (", " of the peak), "):
        assert words in str(history.summary)
    assert history.metrics.keys() == {"tokens", "both", "loss"}
    # The files have the last steps' rates, and metrics without them.
    lines = [json.loads(x) for x in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 8)]
    for line in lines:
        found = line["rates"]
        steps = found["steps_per_second"]
        assert [*found] == ["steps_per_second", "examples_per_second", *rates]
        assert found["examples_per_second"] == pytest.approx(ROWS * steps)
        assert found["flops_per_second"] == pytest.approx(PRODUCTS * steps)
        assert line["metrics"].keys() == history.metrics.keys()
    (path,) = (tmp_path / "logs").iterdir()
    events = [values for _, _, values, _ in events_of(path) if values]
    for line, values in zip(lines, events, strict=True):
        tagged = {f"rate/{name}": np.float32(x) for name, x in line["rates"].items()}
        assert tagged.items() <= values.items()


@pytest.mark.slow
def test_a_cpu_has_no_peak_and_a_report_says_the_same():
    step, state, history = run(batches(2))
    assert [*history.summary.rates] == ["flops_per_second"]
    found = step.report(state, next(batches(1)), timed_calls=2)
    assert found.counted == tj.tools.Flops(PRODUCTS, 0)
    assert found.peak_flops is None and found.mfu is None
    assert "model's products, all devices" in str(found)
    known = dataclasses.replace(found, peak_flops=2 * found.flops_per_second)
    assert known.mfu == 0.5 and "50.0%" in str(known)
    assert dataclasses.replace(found, timing=None).flops_per_second is None


BAD = {
    "no such metric": ({"per_second": ["words"]}, "per_second names 'words', but the"),
    "an array": ({"per_second": ["both"]}, "must name a metric that is a single"),
    "no name": ({"per_second": [3]}, "per_second=3 must be the name of a metric"),
    "one text": ({"per_second": "tokens"}, "per_second"),
    "no peak": ({"peak_flops": 0}, "peak_flops=0 must be FLOP/s of one device"),
    "nan": ({"peak_flops": float("nan")}, "peak_flops=nan must be FLOP/s of one"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_rates_that_cannot_be_had_are_refused(name):
    options, told = BAD[name]
    with pytest.raises(ValueError) as caught:
        run(batches(1), **options)
    assert told in str(caught.value)
