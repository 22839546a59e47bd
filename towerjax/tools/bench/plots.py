"""What do the results look like? Small plots against the number of towers."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.protocol import Interval
from towerjax.tools.bench.results import Result
from towerjax.tools.bench.table import efficiency, over_hand

Figure = Callable[[Result, Sequence[Result]], Interval | None]


def _step_ms(result: Result, _: Sequence[Result]) -> Interval | None:
    step = result.interval("step_s")
    return step and step.scaled(1e3)


def _rate(result: Result, _: Sequence[Result]) -> Interval | None:
    return result.examples_per_s


def _share(result: Result, _: Sequence[Result]) -> Interval | None:
    return result.interval("communication")


PLOTS: tuple[tuple[str, str, str, Figure], ...] = (
    ("step_time.png", "Step time", "ms", _step_ms),
    ("examples_per_s.png", "Examples per second", "examples/s", _rate),
    ("efficiency.png", "Scaling efficiency", "of the smallest trial", efficiency),
    ("communication.png", "Share of communication", "share of a step", _share),
    ("over_hand.png", "Step over hand-written JAX", "ratio", over_hand),
)


def write_plots(
    results: Sequence[Result], folder: pathlib.Path
) -> list[tuple[str, str]]:
    """A picture for each figure that any trial has.

    A panel a model, a line for each set of trials that differ in ``T`` and ``D``
    alone; bars are intervals, which may leave the picture.
    """
    check_matplotlib()
    written = []
    for name, title, unit, figure in PLOTS:
        values = [(result.trial, figure(result, results)) for result in results]
        drawn = [(trial, value) for trial, value in values if value is not None]
        if drawn:
            _draw(drawn, title, unit, folder / name)
            written.append((name, title))
    return written


def check_matplotlib() -> None:
    """Raise where plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            "A report has plots, and Matplotlib is not installed. Install"
            " 'towerjax[examples]', or leave out --report."
        ) from None


def _draw(
    values: Sequence[tuple[Trial, Interval]], title: str, unit: str, path: pathlib.Path
) -> None:
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(trial.model for trial, _ in values))
    label_of = _labels([trial for trial, _ in values])
    labels = list(dict.fromkeys(label_of(trial) for trial, _ in values))
    size = (max(5.0, 3.2 * len(models)), 3.0 + 0.12 * -(-len(labels) // 3))
    picture = Figure(figsize=size, layout="constrained", dpi=70)
    panels = picture.subplots(1, len(models), squeeze=False)[0]
    drawn: dict[str, Any] = {}
    for panel, model in zip(panels, models, strict=True):
        for i, label in enumerate(labels):
            points = [v for v in values if v[0].model == model]
            points = [(t.towers, x) for t, x in points if label_of(t) == label]
            if points:
                drawn[label] = _line(panel, sorted(points, key=lambda p: p[0]), i)
        towers = sorted({trial.towers for trial, _ in values})
        panel.set_xscale("log", base=2)
        panel.set_xticks(towers, [str(n) for n in towers])
        panel.set_ylim(0, 1.5 * max(x.median for t, x in values if t.model == model))
        panel.set_title(model, fontsize=9)
        panel.set_xlabel("T towers")
    panels[0].set_ylabel(unit)
    lines, names = list(drawn.values()), list(drawn)
    picture.legend(lines, names, fontsize=6, ncols=3, loc="outside lower center")
    picture.suptitle(title, fontsize=10)
    picture.savefig(path, metadata={"Software": None})


def _line(panel: Any, points: Sequence[tuple[int, Interval]], number: int) -> Any:
    towers = [point[0] for point in points]
    medians = [value.median for _, value in points]
    lower = [value.median - value.low for _, value in points]
    upper = [value.high - value.median for _, value in points]
    style = {"marker": "os^Dvx"[number // 10 % 6], "ms": 3, "capsize": 2, "lw": 1}
    color = f"C{number % 10}"
    return panel.errorbar(towers, medians, [lower, upper], color=color, **style)


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
