"""The results of a sweep: their file, a table, the best member, learning curves."""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from towerjax.loop.progress import Display, format_seconds
from towerjax.loop.writers import append_line, as_json, read_lines
from towerjax.types.options import check_choice, require
from towerjax.types.tables import Shown, Table

Line: TypeAlias = dict[str, Any]
Config: TypeAlias = dict[str, Any]


class RecordFile:
    """A file of results, which a sweep continues; None keeps them in memory alone.

    ``key`` names the field that identifies a result, of which the last record counts.
    ``about`` has the fields that all records of one sweep share.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, key: str, about: Line
    ) -> None:
        self.path = None if path is None else pathlib.Path(path)
        self.key, self.about = key, about
        self._records: dict[str, Line] = {}
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            size = 0
            for record, length in read_lines(self.path, key, "a sweep"):
                self._check_same(record)
                self._records[key_text(record[key])] = record
                size += length
            if size < self.path.stat().st_size:
                os.truncate(self.path, size)

    def _check_same(self, record: Line) -> None:
        for name, value in self.about.items():
            if (old := record.get(name)) != value:
                why = f"holds results with the {name} {old}, and this sweep has {value}"
                raise ValueError(f"{str(self.path)!r} {why}. Use another path.")

    def get(self, key: Any) -> Any:
        """The record with that key, or None."""
        return self._records.get(key_text(key))

    def add(self, record: Line) -> Line:
        """Append a record to the file; return it as the file has it."""
        record = as_json({**record, **self.about})
        self._records[key_text(record[self.key])] = record
        if self.path is not None:
            with self.path.open("ab", buffering=0) as file:
                append_line(file, record)
        return record


def key_text(key: Any) -> str:
    """The key as the file has it: 0, 0.0 and False differ, two NaN do not."""
    return json.dumps(as_json(key), sort_keys=True)


def show_counts(
    display: Display, what: str, total: int, done: int
) -> Callable[[int, str], None]:
    """``show(done, text)`` of a sweep: which result is begun, and the time left."""
    before, start_s = done, time.monotonic()
    if done:
        display.note(f"{done} of {total} {what}s were done before")

    def show(done: int, text: str) -> None:
        text = f"{what} {min(done + 1, total)}/{total}  {text}"
        if before < done < total:
            each_s = (time.monotonic() - start_s) / (done - before)
            text += f"  {format_seconds(each_s * (total - done))} left"
        display.show(done, total, text)

    return show


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """One training of a sweep.

    Attributes:
      config: The arguments of ``build``.
      metrics: Name -> ``[n, ...]``, of each step.
      evaluation: What ``evaluate`` returned for its last state; empty if it failed.
      order: How it was trained: ``"together"``, ``"in_turn"``, or ``"alone"`` if no
        other member shared its program.
      seconds: How long its training took, compilation included; of members that were
        trained together each has an equal share.
    """

    config: Config
    metrics: dict[str, np.ndarray] = dataclasses.field(repr=False)
    evaluation: dict[str, Any]
    order: str
    seconds: float

    @classmethod
    def of(cls, record: dict[str, Any], config: Config) -> "Member":
        """Make a member from the record of a configuration, in which inf is a text."""
        metrics = {name: _to_numbers(x) for name, x in record["metrics"].items()}
        values = record["evaluation"] or {}
        found = {name: _to_numbers(x)[()] for name, x in values.items()}
        return cls(config, metrics, found, record["order"], record["seconds"])

    @property
    def final(self) -> dict[str, Any]:
        """The evaluation, and the last step's metrics of other names."""
        last = {name: x[-1] for name, x in self.metrics.items()}
        return {**last, **self.evaluation}


def _to_numbers(values: Any) -> np.ndarray:
    array = np.asarray(values)
    return array if array.dtype.kind in "biu" else array.astype(float)


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep(Shown):
    """The members of a sweep, in the grid's order.

    It prints as a table.

    Attributes:
      members: A tuple of `Member`.
    """

    members: tuple[Member, ...]

    @property
    def configs(self) -> list[Config]:
        """The configurations of the members."""
        return [member.config for member in self.members]

    def tables(self) -> tuple[Table, ...]:
        """The shown table, with a row for each member."""
        rows = self.rows()
        names = [*dict.fromkeys(name for row in rows for name in row)]
        names.sort(key=("order", "seconds").count)  # these last
        texts = [
            tuple(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells)
            for cells in ([row.get(name, "") for name in names] for row in rows)
        ]
        return (Table(f"{len(rows)} members", tuple(names), tuple(texts)),)

    def rows(self) -> list[dict[str, Any]]:
        """A mapping for each member: configuration, last numbers, order, seconds."""
        return [
            {
                **member.config,
                **{k: x for k, x in member.final.items() if np.ndim(x) == 0},
                "order": member.order,
                "seconds": member.seconds,
            }
            for member in self.members
        ]

    def to_pandas(self) -> Any:
        """The rows as a pandas table.

        Returns:
          A ``pandas.DataFrame``.

        Raises:
          ValueError: pandas is not installed.
        """
        pandas = require("pandas", "to_pandas(), unlike rows(),", "pandas")
        return pandas.DataFrame(self.rows())

    def best(self, metric: str, *, mode: str = "min") -> Member:
        """The member whose last number is best; no number or one not finite is worst.

        Args:
          metric: A name of the evaluation, or of a step's metrics.
          mode: ``"min"`` or ``"max"``.

        Returns:
          A `Member`.

        Raises:
          ValueError: The members have no metric of that name.
        """
        check_choice("mode", mode, ("min", "max"))
        finals = [member.final for member in self.members]
        check_choice("metric", metric, list({k: 0 for final in finals for k in final}))
        sign = 1 if mode == "min" else -1
        costs = [sign * float(final.get(metric, np.nan)) for final in finals]
        costs = np.where(np.isfinite(costs), costs, np.inf)
        return self.members[int(costs.argmin())]

    def curves(
        self, metric: str = "loss", *, over: str | Sequence[str] = "seed"
    ) -> dict[str, np.ndarray]:
        """Learning curves, of which those that differ in ``over`` alone are stacked.

        Args:
          metric: A name of a step's metrics; members without it have no curve.
          over: Names of the configuration, such as seeds.

        Returns:
          The other configuration values, as text -> ``[members, n]``.

        Raises:
          ValueError: There is no such name.
        """
        names = {name: 0 for member in self.members for name in member.metrics}
        check_choice("metric", metric, list(names))
        over, first = [over] if isinstance(over, str) else over, self.configs[0]
        for name in over:
            check_choice("over", name, list(first))
        shown = [
            name
            for name, value in first.items()
            if name not in over and any(c[name] != value for c in self.configs)
        ]
        found: dict[str, list[np.ndarray]] = {}
        for member in self.members:
            if metric in member.metrics:
                label = ", ".join(f"{name}={member.config[name]}" for name in shown)
                found.setdefault(label, []).append(member.metrics[metric])
        return {label: np.stack(rows) for label, rows in found.items()}

    def plot(self, metric: str = "loss", *, over: str | Sequence[str] = "seed") -> Any:
        """A picture of `curves`: means, and bands of a standard deviation each way.

        Args:
          metric: A name of a step's metrics.
          over: Names of the configuration, such as seeds.

        Returns:
          A ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
          ValueError: There is no such name, or no Matplotlib.
        """
        figures = require("matplotlib.figure", "plot()", "'towerjax[examples]'")
        picture = figures.Figure(figsize=(5.0, 3.4), layout="constrained", dpi=70)
        panel = picture.subplots()
        panel.set(xlabel="step", ylabel=metric)
        for label, rows in self.curves(metric, over=over).items():
            mean, spread = rows.mean(axis=0), rows.std(axis=0)
            steps = np.arange(1, len(mean) + 1)
            panel.plot(steps, mean, label=label)
            panel.fill_between(steps, mean - spread, mean + spread, alpha=0.2, lw=0)
        panel.legend(fontsize=7)
        return picture
