"""What is kept and told of results? A line of JSON each, and how long is left."""

import json
import os
import pathlib
import time
from typing import Any, TypeAlias

from towerjax.loop.progress import Display, format_seconds
from towerjax.loop.records import append_line, as_json, lines_of

Record: TypeAlias = dict[str, Any]


class RecordFile:
    """A file of results that a sweep goes on in; None keeps them in memory alone.

    ``key`` names what of a record says of which result it is; the last one of each
    counts. ``about`` is what all records of one sweep have in common.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, key: str, about: Record
    ) -> None:
        self.path = None if path is None else pathlib.Path(path)
        self.key, self.about = key, about
        self._found: dict[str, Record] = {}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path is not None and self.path.exists():
            self._found, kept = _read(self.path, key)
            for record in self._found.values():
                self._check_same(record)
            if kept < self.path.stat().st_size:
                os.truncate(self.path, kept)

    def _check_same(self, record: Record) -> None:
        for name, value in self.about.items():
            if (old := record.get(name)) != value:
                raise ValueError(
                    f"{str(self.path)!r} holds results with the {name} {old}, and this"
                    f" sweep has {value}. Use another path."
                )

    def get(self, key: Any) -> Record | None:
        """What is known of a result."""
        return self._found.get(_text(key))

    def add(self, record: Record) -> Record:
        """Append a line."""
        record = as_json({**record, **self.about})
        if self.path is not None:
            with self.path.open("ab", buffering=0) as file:
                append_line(file, record)
        self._found[_text(record[self.key])] = record
        return record


def read_records(path: str | os.PathLike[str], key: str) -> list[Record]:
    """The records in a file, the last of each key; a torn last line is left out."""
    return list(_read(pathlib.Path(path), key)[0].values())


def _read(path: pathlib.Path, key: str) -> tuple[dict[str, Record], int]:
    """The records, and how many bytes their whole lines have."""
    found, kept = {}, 0
    for record, length in lines_of(path, key, "a sweep"):
        found[_text(record[key])] = record
        kept += length
    return found, kept


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)


class News:
    """Tells of each result of a sweep as it begins and ends."""

    def __init__(self, display: Display, total: int, done: int, what: str) -> None:
        self._display, self._total, self._before = display, total, done
        self._done, self._start_s, self._what = done, time.monotonic(), what
        if done:
            display.note(f"{done} of {total} {what}s were done before")

    def starts(self, text: str) -> None:
        """One begins."""
        here = self._done - self._before
        number = min(self._done + 1, self._total)
        words = [f"{self._what} {number}/{self._total}  {text}"]
        if 0 < here and self._done < self._total:
            each_s = (time.monotonic() - self._start_s) / here
            left_s = each_s * (self._total - self._done)
            words.append(f"{format_seconds(left_s)} left")
        self._display.show(self._done, self._total, "  ".join(words))

    def ends(self, note: str = "") -> None:
        """One is done."""
        self._done += 1
        if note:
            self._display.note(note)
        if self._done == self._total:
            self.starts("done")

    def close(self) -> None:
        """Leave the screen in order."""
        self._display.close()
