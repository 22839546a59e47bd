"""The history of a run: its metrics, its evaluations, its rates."""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from towerjax.jaxprs.flops import Flops
from towerjax.loop.progress import format_value
from towerjax.loop.throughput import Throughput, flops_in_words
from towerjax.mesh.placement import Placement
from towerjax.types.notes import Named, explain_missing
from towerjax.types.options import require
from towerjax.types.tables import Table, as_text, by_rich, number_of, picture

_BY_NAME = (
    "Metrics have names: history.metrics['loss'] of all steps, history.final['loss'] of"
    " the last one."
)


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """How much a run did, and how fast.

    Attributes:
      towers: ``T``.
      devices: ``D``.
      steps: Steps done.
      examples: Examples in them, padding not counted.
      compile_seconds: How long the calls waited for compilation.
      steps_per_second: Without the time of the audit, compilation and evaluation.
      examples_per_second: Without the time of the audit, compilation and evaluation.
      rates: More such: ``tokens_per_second`` of a metric that ``per_second`` of `run`
        names; ``flops_per_second``, the model's FLOPs of all devices: of products, as
        `tj.tools.Flops` counts them; and ``mfu``, which part of the devices' peak that
        is, where the peak is known.
      uncounted: What those FLOPs leave out, with lines of code; usually nothing.

    Example:
      >>> for part in str(RunSummary(8, 4, 300, 9600, 1.25, 45.61, 1459.5)).split(": "):
      ...     print(part)
      300 steps, 9,600 examples on 8 towers, 4 devices
      45.61 steps/s, 1,460 examples/s, 1.2 s of compiling
    """

    towers: int
    devices: int
    steps: int
    examples: int
    compile_seconds: float
    steps_per_second: float
    examples_per_second: float
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    uncounted: tuple[str, ...] = ()

    def __str__(self) -> str:
        did = number_of(self.steps, "step"), number_of(self.examples, "example")
        there = number_of(self.towers, "tower"), number_of(self.devices, "device")
        flops = flops_in_words(self.rates, bool(self.uncounted))
        rates = [
            f"{self.steps_per_second:,.4g} steps/s",
            f"{self.examples_per_second:,.0f} examples/s",
            *[
                f"{rate:,.0f} {name.removesuffix('_per_second')}/s"
                for name, rate in self.rates.items()
                if name not in ("flops_per_second", "mfu")
            ],
            *([flops] if flops else []),
            f"{self.compile_seconds:.1f} s of compiling",
        ]
        return f"{', '.join(did)} on {', '.join(there)}: {', '.join(rates)}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class History:
    """The metrics and evaluations of `run`; ``n`` is the number of its steps.

    A step's number is how many steps the state had done after it, so the first
    step of a new state is 1.

    Attributes:
      steps: ``[n]`` int, the steps' numbers.
      metrics: Name -> ``[n, ...]``, row ``i`` for ``steps[i]``. A metric whose
        shape changed between steps is an array of objects.
      evaluations: ``(step number, {name: float or array})``, in order.
      skipped: The numbers of the steps that left the parameters as they were,
        because a loss or gradient was not finite; where towers train alone, for each
        time that they were merged, of the first step that one of them left out.
      input_wait_s: ``[n]``, seconds that this process waited for each step's batch,
        while dispatched calls ran.
      summary: How much and how fast.
      stopped: Why the run ended early, in words; None when all steps were done.
    """

    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    evaluations: tuple[tuple[int, dict[str, Any]], ...]
    skipped: tuple[int, ...]
    input_wait_s: np.ndarray
    summary: RunSummary
    stopped: str | None = None

    if not TYPE_CHECKING:
        __getattr__ = explain_missing(_BY_NAME)

        def __getitem__(self, name: Any) -> Any:
            raise TypeError(f"A history has no items. {_BY_NAME}")

    def __repr__(self) -> str:
        last = [f"{name} {format_value(x)}" for name, x in self.final.items()]
        return f"History({self.summary}{'; '.join(['', *last])})"

    @property
    def final(self) -> dict[str, Any]:
        """The metrics of the last step, and of the last evaluation.

        Where both have a name, such as ``loss``, it is the evaluation's.
        """
        last = {
            name: column[-1] for name, column in self.metrics.items() if len(column)
        }
        evaluated = self.evaluations[-1][1] if self.evaluations else {}
        return Named(last | evaluated, num_steps=len(self.steps))

    def table(self, *, rows: int = 20) -> str:
        """The history as a table of text.

        Args:
          rows: The most steps to show, evenly chosen; those with an evaluation
            are shown besides.

        Returns:
          A table with a row for each shown step and a column for each metric.
        """
        return as_text([self._table(rows)])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return by_rich([self._table(20)])

    def rows(self) -> list[dict[str, Any]]:
        """One mapping per step: number, metrics, and the evaluation after it."""
        by_step: dict[int, dict[str, Any]] = {}
        for place, number in enumerate(self.steps.tolist()):
            by_step[number] = {name: x[place] for name, x in self.metrics.items()}
        for number, values in self.evaluations:
            after = {f"evaluated {name}": value for name, value in values.items()}
            by_step[number] = by_step.get(number, {}) | after
        return [{"step": n} | by_step[n] | {"step": n} for n in sorted(by_step)]

    def to_pandas(self) -> Any:
        """The `rows` as a pandas table.

        Returns:
          A ``pandas.DataFrame``.

        Raises:
          ValueError: pandas is not installed.
        """
        pandas = require("pandas", "to_pandas(), unlike rows(),", "pandas")
        return pandas.DataFrame(self.rows())

    def plot(self) -> Any:
        """A picture of the metrics and evaluations over the steps; arrays are left out.

        Returns:
          A ``matplotlib.figure.Figure`` with a panel for each name, which a notebook
          shows.

        Raises:
          ValueError: Matplotlib is not installed.
        """
        curves: dict[str, list[Any]] = {
            name: [(self.steps, x, "-")]
            for name, x in self.metrics.items()
            if x.ndim == 1 and x.dtype != object
        }
        for name in dict.fromkeys(k for _, values in self.evaluations for k in values):
            pairs = [(n, v[name]) for n, v in self.evaluations if name in v]
            if all(np.ndim(value) == 0 for _, value in pairs):
                curves.setdefault(name, []).append((*zip(*pairs, strict=True), "o-"))
        made, panels = picture(len(curves))
        for panel, (name, lines) in zip(panels, curves.items(), strict=True):
            panel.set(xlabel="step", ylabel=name)
            for steps, values, form in lines:
                label = "a step's" if form == "-" else "evaluated"
                panel.plot(steps, values, form, markersize=3, lw=1, label=label)
            panel.legend(fontsize=7)
        return made

    def _table(self, rows: int) -> Table:
        """A row of texts for each shown step."""
        last = len(self.steps) - 1
        chosen = np.linspace(0, last, min(rows, last + 1)).astype(int)
        shown = {*self.steps[chosen].tolist(), *dict(self.evaluations)}
        evaluated = (f"evaluated {k}" for _, x in self.evaluations for k in x)
        names = dict.fromkeys(["step", *self.metrics, *evaluated])
        cells = [
            tuple(format_value(row[x]) if x in row else "" for x in names)
            for row in self.rows()
            if row["step"] in shown
        ]
        return Table(str(self.summary), tuple(names), tuple(cells))


class HistoryLog:
    """Collects a `History` while the run is under way."""

    def __init__(self, throughput: Throughput | None = None) -> None:
        self.throughput = throughput or Throughput()
        self.evaluations: list[tuple[int, dict[str, Any]]] = []
        self.compile_s = self.aside_s = 0.0  # of audits and evaluations
        self._start_s = time.perf_counter()
        self._columns: dict[str, list[Any]] = {}
        self.skipped: list[int] = []
        self._waits_s: list[float] = []

    @property
    def num_steps(self) -> int:
        """How many steps were added so far."""
        return len(self._waits_s)

    @property
    def _seconds(self) -> float:
        """The time so far, without that of compilation and evaluation."""
        return time.perf_counter() - self._start_s - self.compile_s - self.aside_s

    @property
    def steps_per_second(self) -> float:
        """The rate so far, without the time of compilation and evaluation."""
        return self.num_steps / max(self._seconds, 1e-9)

    def evaluated(self, number: int) -> dict[str, Any] | None:
        """The evaluation after a step, if that was the last one; or None."""
        after, values = self.evaluations[-1] if self.evaluations else (None, None)
        return values if after == number else None

    def add(
        self,
        number: int,
        metrics: Mapping[str, Any],
        refused: int | None,
        examples: int,
        wait_s: float,
        flops: Flops,
    ) -> None:
        """Add one step, and the number of the one that is known to be refused."""
        self._columns = self._columns or {name: [] for name in metrics}
        if metrics.keys() != self._columns.keys():
            raise ValueError(
                f"Step {number} has the metrics {sorted(metrics)}, but those"
                f" before had {sorted(self._columns)}. One without a value can have"
                " weight 0."
            )
        self.throughput.add(self._seconds, metrics, examples, flops)
        for name, value in metrics.items():
            # A copy, since on CPUs an array is a view that keeps a JAX array alive.
            self._columns[name].append(value.copy())
        self._waits_s.append(wait_s)
        if refused is not None:
            self.skipped.append(refused)

    def history(
        self, number: int, placement: Placement, stopped: str | None
    ) -> History:
        """The `History` of the steps added so far, of which this is the last."""
        done = dataclasses.replace(self.throughput.done, seconds=self._seconds)
        rates = self.throughput.rates(done)
        steps = self.num_steps
        columns = {name: _column(x) for name, x in self._columns.items()}
        summary = RunSummary(
            towers=placement.num_towers,
            devices=len(placement.devices),
            steps=steps,
            examples=done.examples,
            compile_seconds=self.compile_s,
            steps_per_second=rates.pop("steps_per_second"),
            examples_per_second=rates.pop("examples_per_second"),
            rates=rates,
            uncounted=self.throughput.uncounted,
        )
        return History(
            np.arange(number - steps, number) + 1,
            Named(columns, num_steps=steps),
            tuple(self.evaluations),
            tuple(self.skipped),
            np.array(self._waits_s),
            summary,
            stopped,
        )


def _column(values: list[Any]) -> np.ndarray:
    if len({np.shape(value) for value in values}) == 1:
        return np.stack(values)
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = value
    return column
