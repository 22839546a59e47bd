"""The parts that both sweeps share: a grid, a file of results, and a table."""

import contextlib
import datetime
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from etils import epath

from towerjax.loop.files import (
    append_line,
    checked_path,
    opened_after,
    read_lines,
    telling_of_line,
)
from towerjax.loop.progress import choose_display
from towerjax.loop.writers import as_json
from towerjax.sweeps.turns import Interval
from towerjax.types.options import check_choice, check_list, check_methods, require
from towerjax.types.refusals import a_type, printable
from towerjax.types.tables import Shown, Table

Line: TypeAlias = dict[str, Any]
Config: TypeAlias = dict[str, Any]
Grid: TypeAlias = Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]]


def configs_of(grid: Any) -> list[Config]:
    """List the configurations of a grid, checked and without repetitions."""
    if isinstance(grid, Mapping):
        lists = (check_list(f"grid[{name!r}]", x) for name, x in grid.items())
        product = itertools.product(*lists)
        grid = [dict(zip(grid, values, strict=True)) for values in product]
    grid = check_list("grid", grid, "{'rate': [0.1, 0.01]}")
    for i, config in enumerate(grid):
        check_methods(f"grid[{i}]", config, "items keys", "such as {'rate': 0.1}")
    configs = [{name: _as_plain(name, x) for name, x in dict(c).items()} for c in grid]
    if len({frozenset(config) for config in configs}) != 1 or not configs[0]:
        raise ValueError(
            "grid must be {name: [values]}, or configurations that all have the same"
            f" names, but has {len(configs)} with {list(map(list, configs))}."
        )
    return list({key_text(config): config for config in configs}.values())


def _as_plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic | jax.Array) and not value.ndim:
        value = value.item()
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(
            f"grid: {name}={value!r} is {a_type(value)}, but must be a number, a text,"
            " a bool or None. Write a text, and look the object up in build."
        )
    return value


def describe(config: Config) -> str:
    """Describe a configuration, as in ``"towers=2, batch=64"``."""
    return ", ".join(f"{name}={value}" for name, value in config.items())


def key_text(key: Any) -> str:
    """Write a configuration as the text by which its record is found.

    The numbers 0 and 0.0 and False give different texts, while two NaN give the same.
    """
    return json.dumps(as_json(key), sort_keys=True)


class RecordFile:
    """A file of results, which a later sweep continues.

    If the path is None, results stay in memory. A record's ``config`` identifies it. If
    several records have one ``config``, the last counts. ``about`` has the fields that
    all records of one sweep share. ``check`` raises for a record that was forged.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        about: Line,
        check: Callable[[Line], Any] = dict,
    ) -> None:
        self.path: epath.Path | None = None
        self.about = about
        self._records = {}
        size = 0
        if path is None:
            return
        self.path = checked_path("results", path, "a file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            lines = read_lines(self.path, "config", "a sweep")
            for number, (record, length) in enumerate(lines, 1):
                self._check_same(record)
                text = json.dumps(record).encode()
                with telling_of_line(self.path, number, text, "a sweep"):
                    check(record)
                self._records[key_text(record["config"])] = record
                size += length
        opened_after(self.path, size).close()

    def _check_same(self, record: Line) -> None:
        for name, value in self.about.items():
            if (old := record.get(name)) != value:
                raise ValueError(
                    f"{str(self.path)!r} holds results with the {name}"
                    f" {printable(str(old))}, but this sweep has {value}. Use another"
                    " path."
                )

    def get(self, config: Config) -> Any:
        """Look up the record of a configuration; None if there is none."""
        return self._records.get(key_text(config))

    def add(self, record: Line) -> Line:
        """Append a record to the file, and return it as the file has it."""
        record = as_json({**record, **self.about})
        self._records[key_text(record["config"])] = record
        if self.path is not None:
            with contextlib.closing(opened_after(self.path)) as file:
                append_line(file, record)
        return record


@contextlib.contextmanager
def counted(
    progress: bool | None, noun: str, done: int, total: int
) -> Iterator[tuple[Callable[[int, str], None], Callable[[str], None]]]:
    """Yield two functions that show the progress.

    ``show(done, text)`` shows how much is done, and ``note(text)`` adds a line.
    """
    check_choice("progress", progress, (None, True, False))
    before = done
    start_s = time.monotonic()

    def show(done: int, text: str) -> None:
        text = f"{noun} {min(done + 1, total)}/{total}  {text}"
        if before < done < total:
            each_s = (time.monotonic() - start_s) / (done - before)
            left = datetime.timedelta(seconds=int(each_s * (total - done)))
            text += f"  {left} left"
        display.show(done, total, text)

    with contextlib.closing(choose_display(progress)) as display:
        if done:
            display.note(f"{done} of {total} {noun}s were done before")
        yield show, display.note
        show(total, "done")


class RowTable(Shown):
    """A base class of a sweep's results, shown as a table with one row per result."""

    title = "results"
    _rows: Callable[[], list[Line]]  # each subclass has this method

    def rows(self) -> list[Line]:
        """Map, for each result, names to its configuration and its numbers.

        The ends of an interval follow its median: ``"ms", "ms low", "ms high"``.
        """
        rows = list[Line]()
        for row in self._rows():
            rows.append({})
            for name, x in row.items():
                ends = ("low", "high") if isinstance(x, Interval) else ()
                rows[-1][name] = x.median if ends else x
                rows[-1] |= {f"{name} {end}": getattr(x, end) for end in ends}
        return rows

    def tables(self) -> tuple[Table, ...]:
        """Make the table that is shown; its last column has each result's time."""
        rows = self._rows()
        names = [*dict.fromkeys(name for row in rows for name in row)]
        names.sort(key=("order", "seconds").count)

        def text(x: Any) -> Any:
            return f"{x:.4g}" if isinstance(x, float) else str(x)

        cells = tuple(tuple(text(row.get(name, "")) for name in names) for row in rows)
        return (Table(f"{len(rows)} {self.title}", tuple(names), cells),)

    def to_pandas(self) -> Any:
        """Make a ``pandas.DataFrame`` of the rows."""
        pandas = require("pandas", "to_pandas(), unlike rows(),", "pandas")
        return pandas.DataFrame(self.rows())
