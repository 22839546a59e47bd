"""The history of a run: its metrics, its evaluations and its rates."""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from towerjax.jaxprs.flops import Flops
from towerjax.loop.progress import format_value
from towerjax.loop.throughput import Done, Throughput, flops_in_words
from towerjax.mesh.placement import Placement
from towerjax.types.boundary import api_boundary
from towerjax.types.notes import Named, explain_missing
from towerjax.types.options import check_choice, require
from towerjax.types.tables import Table, as_text, by_rich, number_of, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BY_NAME = (
    "Write history.metrics['loss'] for the values of all steps, and"
    " history.final['loss'] for the last one."
)


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """How much a run did, and how fast it was.

    Attributes:
      towers: The number of towers ``T``.
      devices: The number of devices ``D``.
      steps: The number of steps.
      examples: The number of examples in these steps, without padding.
      compile_seconds: The time that calls waited for compilation, in seconds.
      steps_per_second: The steps' rate, without the time of the audit, compilation and
        evaluation.
      examples_per_second: The examples' rate in the same time.
      rates: More rates by name. ``tokens_per_second`` is the rate of a metric
        ``tokens`` that ``per_second`` of `run` names. ``flops_per_second`` is the rate
        of the model's FLOPs on all devices, counted as by `tj.tools.Flops`. ``mfu`` is
        its share of the devices' peak, if the peak is known.
      uncounted: The code that the FLOPs leave out, with its lines; usually empty.

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

    A step's number counts all steps that the state has done, so the first step of a new
    state has the number 1.

    Attributes:
      steps: The numbers of the steps, ``[n]`` int.
      metrics: The values of each metric by its name, ``[n, ...]`` with row ``i`` for
        ``steps[i]``. A metric whose shape changed between steps is an array of objects.
      evaluations: The evaluations in order, each ``(step number, {name: float or
        array})``.
      skipped: The numbers of the steps that left the parameters as they were, because a
        loss or gradient was not finite. If towers train alone between merges, it has
        for each merge the first step that a tower left out.
      input_wait_s: The seconds that this process waited for each step's batch while
        dispatched calls ran, ``[n]``.
      summary: How much the run did, and how fast.
      stopped: The reason why the run ended early, as text; None if it did all steps.
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
            raise TypeError(f"A history cannot be indexed. {_BY_NAME}")

    def __repr__(self) -> str:
        last = [f"{name} {format_value(x)}" for name, x in self.final.items()]
        return f"History({self.summary}{'; '.join(['', *last])})"

    @property
    def final(self) -> dict[str, Any]:
        """The metrics of the last step and of the last evaluation, by name.

        If both have a name, such as ``loss``, the value is the evaluation's.
        """
        last = {
            name: column[-1] for name, column in self.metrics.items() if len(column)
        }
        evaluated = self.evaluations[-1][1] if self.evaluations else {}
        return Named(last | evaluated, num_steps=len(self.steps))

    def table(self, *, rows: int = 20) -> str:
        """Write the history as a table of text.

        Args:
          rows: The largest number of steps to show, evenly chosen. Steps with an
            evaluation are always shown.

        Returns:
          A table with a row for each shown step and a column for each metric.
        """
        return as_text([self._table(rows)])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return by_rich([self._table(20)])

    def rows(self) -> list[dict[str, Any]]:
        """List a dict per step: its number, metrics, and the evaluation after it."""
        by_step: dict[int, dict[str, Any]] = {}
        for place, number in enumerate(self.steps.tolist()):
            by_step[number] = {name: x[place] for name, x in self.metrics.items()}
        for number, values in self.evaluations:
            after = {f"evaluated {name}": value for name, value in values.items()}
            by_step[number] = by_step.get(number, {}) | after
        return [{"step": n} | by_step[n] | {"step": n} for n in sorted(by_step)]

    def to_pandas(self) -> Any:
        """Make a pandas table of the `rows`.

        Returns:
          A ``pandas.DataFrame``.

        Raises:
          ValueError: pandas is not installed.
        """
        pandas = require("pandas", "to_pandas(), unlike rows(),", "pandas")
        return pandas.DataFrame(self.rows())

    @api_boundary
    def plot(self, *names: str) -> "Figure":
        """Draw the metrics and evaluations over the steps, without arrays.

        Args:
          *names: The names of those to draw; without any all are drawn.

        Returns:
          A ``matplotlib.figure.Figure`` with a panel for each name; a notebook shows
          it.

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
        if names:
            for name in names:
                check_choice("name", name, list(curves))
            curves = {name: curves[name] for name in names}
        figure, panels = picture(len(curves))
        for panel, (name, lines) in zip(panels, curves.items(), strict=True):
            panel.set(xlabel="step", ylabel=name)
            for steps, values, form in lines:
                label = "a step's" if form == "-" else "evaluated"
                panel.plot(steps, values, form, markersize=3, lw=1, label=label)
            panel.legend(fontsize=7)
        return figure

    def _table(self, rows: int) -> Table:
        """Make a `Table` of the history, with a row for each shown step."""
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


class LogMark(NamedTuple):
    """How far a `HistoryLog` has come: numbers of entries, and the work done."""

    steps: int
    evaluations: int
    skipped: int
    done: Done


class HistoryLog:
    """The growing log of a run, from which its `History` is made."""

    def __init__(self, throughput: Throughput | None = None) -> None:
        self.throughput = throughput or Throughput()
        self.evaluations: list[tuple[int, dict[str, Any]]] = []
        self.compile_s = 0.0
        self.aside_s = 0.0  # seconds of audits and evaluations, which rates leave out
        self._start_s = time.perf_counter()
        self._columns: dict[str, list[Any]] = {}
        self.skipped: list[int] = []
        self._waits_s: list[float] = []

    @property
    def num_steps(self) -> int:
        """The number of steps added so far."""
        return len(self._waits_s)

    @property
    def _seconds(self) -> float:
        """The seconds so far, without compilation and evaluation."""
        return time.perf_counter() - self._start_s - self.compile_s - self.aside_s

    @property
    def steps_per_second(self) -> float:
        """The steps' rate so far, without the time of compilation and evaluation."""
        return self.num_steps / max(self._seconds, 1e-9)

    def evaluated(self, number: int) -> dict[str, Any] | None:
        """Find the evaluation after step ``number`` if it came last; else None."""
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
        """Add one step.

        ``refused`` is the number of the step that was refused, if any.
        """
        self._columns = self._columns or {name: [] for name in metrics}
        if metrics.keys() != self._columns.keys():
            raise ValueError(
                f"Step {number} has the metrics {sorted(metrics)}, but the steps before"
                f" had {sorted(self._columns)}. Return the same names in each step; a"
                " metric without a value can have weight 0."
            )
        self.throughput.add(self._seconds, metrics, examples, flops)
        for name, value in metrics.items():
            # On CPUs the value is a view, which would keep a JAX array alive. So it is
            # copied.
            self._columns[name].append(value.copy())
        self._waits_s.append(wait_s)
        if refused is not None:
            self.skipped.append(refused)

    def mark(self) -> "LogMark":
        """Mark how far the log has come, for `cut`."""
        steps = len(self._waits_s)
        return LogMark(
            steps, len(self.evaluations), len(self.skipped), self.throughput.done
        )

    def cut(self, mark: "LogMark") -> None:
        """Forget all that was added after a mark, because it is done again."""
        for column in (*self._columns.values(), self._waits_s):
            del column[mark.steps :]
        del self.evaluations[mark.evaluations :]
        del self.skipped[mark.skipped :]
        self.throughput.go_back(mark.done)

    def history(
        self, number: int, placement: Placement, stopped: str | None
    ) -> History:
        """Make the `History` of the steps so far; ``number`` is the last one's."""
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
