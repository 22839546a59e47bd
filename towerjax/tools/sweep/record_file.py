"""Keep the results of a sweep as lines of JSON, and show its progress."""

import json
import os
import pathlib
import time
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


class SweepBar:
    """Shows which result of a sweep is being made, and the time left."""

    def __init__(self, display: Display, total: int, done: int, what: str) -> None:
        self._display, self._total, self._before = display, total, done
        self._done, self._start_s, self._what = done, time.monotonic(), what
        if done:
            display.note(f"{done} of {total} {what}s were done before")

    def start(self, text: str) -> None:
        """Show that a result is begun."""
        here, left = self._done - self._before, self._total - self._done
        number = min(self._done + 1, self._total)
        text = f"{self._what} {number}/{self._total}  {text}"
        if here and left:
            each_s = (time.monotonic() - self._start_s) / here
            text += f"  {format_seconds(each_s * left)} left"
        self._display.show(self._done, self._total, text)

    def end(self, note: str = "") -> None:
        """Count a result as done."""
        self._done += 1
        if note:
            self._display.note(note)
        if self._done == self._total:
            self.start("done")
