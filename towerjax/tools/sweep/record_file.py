"""Keep the results of a sweep as lines of JSON, and show its progress."""

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from towerjax.loop.progress import Display, format_seconds
from towerjax.loop.writers import append_line, as_json, read_lines

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
        if self.path is not None:
            with self.path.open("ab", buffering=0) as file:
                append_line(file, record)
        self._records[key_text(record[self.key])] = record
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
