"""How are results kept? One line of JSON each; a killed sweep goes on after them."""

import json
import os
import pathlib
from typing import Any, TypeAlias

from towerjax.loop.records import as_json

Record: TypeAlias = dict[str, Any]


class RecordFile:
    """A file of results that a sweep goes on in; None keeps them in memory alone.

    Attributes:
      path: The file.
      key: What of a record says of which result it is; the last one of each counts.
      about: What all records of one sweep have in common.
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
            # Unbuffered and in one call: a kill leaves whole lines, but for the last.
            with self.path.open("ab", buffering=0) as file:
                rest = memoryview(json.dumps(record, allow_nan=False).encode() + b"\n")
                while rest:
                    rest = rest[file.write(rest) :]
        self._found[_text(record[self.key])] = record
        return record


def read_records(path: str | os.PathLike[str], key: str) -> list[Record]:
    """The records in a file, the last of each key; a torn last line is left out."""
    return list(_read(pathlib.Path(path), key)[0].values())


def _read(path: pathlib.Path, key: str) -> tuple[dict[str, Record], int]:
    """The records, and how many bytes their whole lines have."""
    found: dict[str, Record] = {}
    kept = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # torn by a kill or a full disk
            try:
                record = json.loads(line)
                found[_text(record[key])] = record
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"Line {number} of {str(path)!r} is no result of a sweep:"
                    f" {line[:60]!r}. Nothing was changed; use another path."
                ) from error
            kept += len(line)
    return found, kept


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
