"""What do the results look like? Small plots against the number of towers."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.protocol import Interval
from towerjax.tools.bench.results import Result
from towerjax.tools.bench.table import efficiency, over_hand
from towerjax.tools.sweep.pictures import figure, line_with_band

Number = Callable[[Result, Sequence[Result]], Interval | None]


def _step_ms(result: Result, _: Sequence[Result]) -> Interval | None:
    step = result.interval("step_s")
    return step and step.scaled(1e3)


PLOTS: tuple[tuple[str, str, str, Number], ...] = (
    ("step_time.png", "Step time", "ms", _step_ms),
    (
        "examples_per_s.png",
        "Examples per second",
        "examples/s",
        lambda x, _: x.examples_per_s,
    ),
    ("efficiency.png", "Scaling efficiency", "of the smallest trial", efficiency),
    (
        "communication.png",
        "Share of communication",
        "share of a step",
        lambda x, _: x.interval("communication"),
    ),
    ("over_hand.png", "Step over hand-written JAX", "ratio", over_hand),
)


def write_plots(
    results: Sequence[Result], folder: pathlib.Path
) -> list[tuple[str, str]]:
    """A picture for each figure that any trial has.

    A panel a model, a line for each set of trials that differ in ``T`` and ``D``
    alone; bands are intervals, which may leave the picture.
    """
    written = []
    for name, title, unit, number in PLOTS:
        values = [(result.trial, number(result, results)) for result in results]
        drawn = [(trial, value) for trial, value in values if value is not None]
        if drawn:
            _draw(drawn, title, unit, folder / name)
            written.append((name, title))
    return written


def _draw(
    values: Sequence[tuple[Trial, Interval]], title: str, unit: str, path: pathlib.Path
) -> None:
    models = list(dict.fromkeys(trial.model for trial, _ in values))
    label_of = _labels([trial for trial, _ in values])
    labels = list(dict.fromkeys(label_of(trial) for trial, _ in values))
    picture, panels = figure([f"T towers, {model}" for model in models], unit)
    values = sorted(values, key=lambda value: value[0].towers)
    for panel, model in zip(panels, models, strict=True):
        own = [(label_of(t), t.towers, x) for t, x in values if t.model == model]
        for label in dict.fromkeys(of for of, _, _ in own):
            at = [towers for of, towers, _ in own if of == label]
            found = [x for of, _, x in own if of == label]
            band = [x.low for x in found], [x.high for x in found]
            style = {"color": f"C{labels.index(label) % 10}", "marker": "o", "ms": 3}
            line_with_band(panel, at, [x.median for x in found], band, label, **style)
        panel.set_ylim(0, 1.5 * max(x.median for *_, x in own))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.legend(fontsize=6)
    picture.suptitle(title, fontsize=10)
    picture.savefig(path, metadata={"Software": None})


def _labels(trials: Sequence[Trial]) -> Callable[[Trial], str]:
    """What the points of a line have in common, without the model."""
    one_each = all(trial.devices == trial.towers for trial in trials)
    batches = {trial.batch for trial in trials}
    rows = {trial.batch // trial.towers for trial in trials}

    def label_of(trial: Trial) -> str:
        alike = dataclasses.replace(trial, towers=1, devices=1)
        words = alike.describe().removeprefix(f"{trial.model} ").split(" ")
        kept = words[3:]  # after B=, T= and D=
        if min(len(batches), len(rows)) > 1:
            by_batch = len(batches) <= len(rows)
            each = trial.batch // trial.towers
            kept = [f"B={trial.batch}" if by_batch else f"b={each}", *kept]
        return " ".join(["D=T" if one_each else f"D={trial.devices}", *kept])

    return label_of
