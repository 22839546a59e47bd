"""What came out of a sweep? A table, the best, learning curves with their bands."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from towerjax.tools.sweep.grid import Config
from towerjax.types.options import check_choice, optional
from towerjax.types.tables import Shown, Table


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """One training of a sweep.

    Attributes:
      config: What `build` was given.
      metrics: Name -> ``[n, ...]``, of each step.
      evaluation: What ``evaluate`` returned of its last state.
      order: How it was trained: ``"together"``, ``"in_turn"``, or ``"alone"`` where no
        other shared its program.
      seconds: How long its training took, compiling included; of members that were
        trained together, their share.
    """

    config: Config
    metrics: dict[str, np.ndarray] = dataclasses.field(repr=False)
    evaluation: dict[str, Any]
    order: str
    seconds: float

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Member":
        """The member that a line holds."""
        metrics = {name: _array(x) for name, x in record["metrics"].items()}
        found = {name: _array(x)[()] for name, x in record["evaluation"].items()}
        about = record["order"], record["seconds"]
        return cls(record["config"], metrics, found, *about)

    @property
    def final(self) -> dict[str, Any]:
        """The evaluation, and the last step's metrics that it does not have."""
        last = {name: x[-1] for name, x in self.metrics.items()}
        return {**last, **self.evaluation}


def _array(values: Any) -> np.ndarray:
    array = np.asarray(values)
    return array if array.dtype.kind in "biu" else array.astype(float)


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep(Shown):
    """The members of a sweep, in the grid's order.

    Printed it is a table of text, in a notebook HTML, with ``rich.print`` a rich table.

    Attributes:
      members: Each a `Member`.
    """

    members: tuple[Member, ...]

    @property
    def configs(self) -> list[Config]:
        """What the members were built of."""
        return [member.config for member in self.members]

    def tables(self) -> tuple[Table, ...]:
        """What is shown: a row a member."""
        rows = self.rows()
        cells = [
            tuple(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values())
            for row in rows
        ]
        return (Table(f"{len(rows)} members", tuple(rows[0]), tuple(cells)),)

    def rows(self) -> list[dict[str, Any]]:
        """A mapping a member: configuration, last numbers, how it was trained."""
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
        needs = "to_pandas(), which gives what rows() does,"
        return optional("pandas", needs, "pandas").DataFrame(self.rows())

    def best(self, metric: str, *, mode: str = "min") -> Member:
        """The member whose last number is best; one that is not finite never is.

        Args:
          metric: A name of the evaluation, or else of a step's metrics.
          mode: ``"min"`` or ``"max"``.

        Returns:
          A `Member`.

        Raises:
          ValueError: There is no such number.
        """
        check_choice("mode", mode, ("min", "max"))
        self._check_name(metric, self.members[0].final)
        sign = 1 if mode == "min" else -1
        costs = [sign * float(member.final[metric]) for member in self.members]
        costs = np.where(np.isfinite(costs), costs, np.inf)
        return self.members[int(costs.argmin())]

    def _check_name(self, name: str, names: Any) -> None:
        if name not in names:
            raise ValueError(f"{name!r} is none of {', '.join(names)}.")

    def curves(
        self, metric: str = "loss", *, over: str | Sequence[str] = "seed"
    ) -> dict[str, np.ndarray]:
        """Learning curves, those that differ in ``over`` alone next to each other.

        Args:
          metric: A name of a step's metrics.
          over: Names of the configuration, such as seeds.

        Returns:
          What the members of a curve have in common -> ``[members, n]``.

        Raises:
          ValueError: There is no such name.
        """
        self._check_name(metric, self.members[0].metrics)
        over, configs = [over] if isinstance(over, str) else over, self.configs
        for name in over:
            self._check_name(name, configs[0])
        differ = [k for k in configs[0] if any(c[k] != configs[0][k] for c in configs)]
        names = [name for name in differ if name not in over]
        found: dict[str, list[np.ndarray]] = {}
        for member in self.members:
            label = ", ".join(f"{name}={member.config[name]}" for name in names)
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
        figures = optional("matplotlib.figure", "plot()", "'towerjax[examples]'")
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
