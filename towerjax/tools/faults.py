"""The faults that a check found: as annotations of GitHub, and those that are meant."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from towerjax.check.programs.programs import DEPENDS, NOT_THE_SAME

_HEADS = {
    "proof": NOT_THE_SAME,
    "equality": DEPENDS,
    "comparison": "What a run gave depends on the number of devices:",
}
_SHOWN = 3  # of one kind
_LINE = re.compile(r"(\S+\.py):(\d+)")
_WORSE = 2  # times the difference that is meant, and it is another fault


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that a check found wrong.

    Attributes:
      kind: Who found it: "proof", "equality" or "comparison".
      leaf: Its name; "" if the program is wrong whatever it returns.
      text: What is wrong.
      relative: The largest difference over the leaf's largest value; None: a proof.
      advice: What is said of all that was found with it.
    """

    kind: str
    leaf: str
    text: str
    relative: float | None = None
    advice: str = ""

    def __str__(self) -> str:
        return "\n".join([self.text, *self.advice.splitlines()])

    def is_meant_by(self, entry: Mapping[str, Any]) -> bool:
        """Whether an entry of a baseline is of this fault, and it is no worse."""
        if (self.kind, self.leaf) != (entry["kind"], entry["leaf"]):
            return False
        if self.relative is None:
            return _without_lines(self.text) == _without_lines(entry["text"])
        return self.relative <= _WORSE * entry["relative"]


def _without_lines(text: str) -> str:
    """A text that stays as it is where a line of code moves."""
    return _LINE.sub(r"\1", text)


def told_of_faults(faults: Sequence[Fault]) -> Iterator[str]:
    """For a person: a text for each kind of fault."""
    for kind, head in _HEADS.items():
        found = [x for x in faults if x.kind == kind]
        lines = [f"  - {x.text}" for x in found[:_SHOWN]]
        lines += [f"  and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
        advice = dict.fromkeys(x.advice for x in found if x.advice)
        if found:
            yield "\n".join([head, *lines, *advice])


def annotations(faults: Iterable[Fault]) -> list[str]:
    """A line for each fault, ``::error file=...::``, which GitHub shows in the code."""
    return [_annotation(fault) for fault in faults]


def _annotation(fault: Fault) -> str:
    where = ""
    if found := _LINE.search(str(fault)):
        path = pathlib.Path(found[1])
        if path.is_file():
            root = os.environ.get("GITHUB_WORKSPACE", ".")
            file = _escaped(os.path.relpath(path, root), ":,")
            where = f" file={file},line={found[2]},title=towerjax check"
    return f"::error{where}::{_escaped(str(fault))}"


def _escaped(text: str, more: str = "") -> str:
    """A text in which GitHub sees no end of a line, and no end of a property."""
    for sign in f"%\r\n{more}":
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def read_baseline(file: str, make: str) -> list[dict[str, Any]]:
    """The entries of a program in a file of faults that are meant."""
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(
            f"There is no {file}. Write it by --write-baseline {file}, look at what is"
            " meant there, and commit it."
        )
    try:
        entries = json.loads(path.read_text())[make]
        assert all({"kind", "leaf", "text", "relative"} <= {*x} for x in entries)
    except KeyError:
        return []
    except (ValueError, TypeError, AssertionError):
        raise ValueError(
            f"{file} is no file of --write-baseline: write it again."
        ) from None
    return entries


def write_baseline(file: str, make: str, faults: Sequence[Fault]) -> None:
    """Write these faults of a program as meant; those of others stay."""
    path = pathlib.Path(file)
    every = json.loads(path.read_text()) if path.is_file() else {}
    entries = [dataclasses.asdict(x) for x in faults]
    for entry in entries:
        del entry["advice"]
    every[make] = entries
    path.write_text(json.dumps(every, indent=2, sort_keys=True) + "\n")


def split_meant(
    faults: Sequence[Fault], entries: Sequence[Mapping[str, Any]]
) -> tuple[list[Fault], list[Fault], list[Mapping[str, Any]]]:
    """The faults that are not meant, those that are, and entries without a fault."""
    meant = [x for x in faults if any(x.is_meant_by(y) for y in entries)]
    left = [y for y in entries if not any(_is_of(x, y) for x in faults)]
    return [x for x in faults if x not in meant], meant, left


def _is_of(fault: Fault, entry: Mapping[str, Any]) -> bool:
    return (fault.kind, fault.leaf) == (entry["kind"], entry["leaf"])
