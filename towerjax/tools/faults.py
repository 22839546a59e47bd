"""The faults that a check found: shown on GitHub, and compared with a baseline."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from towerjax.prover.programs.programs import NOT_THE_SAME
from towerjax.prover.programs.words import Words

_SHOWN = 3  # the most faults of one kind that are shown
_LINE = re.compile(r"(\S+\.py):(\d+)")
_WORSE = 2  # A difference is a new fault if it is this many times that of the baseline.


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault that a check found.

    Attributes:
      kind: The check that found it: "proof", "equality" or "comparison".
      leaf: The leaf's name; "" if the program is wrong whatever it returns.
      text: The description of the fault.
      relative: The largest difference divided by the leaf's largest value; None for a
        proof.
      advice: Advice on all faults that were found together.
    """

    kind: str
    leaf: str
    text: str
    relative: float | None = None
    advice: str = ""

    def __str__(self) -> str:
        return "\n".join([self.text, *self.advice.splitlines()])

    def is_meant_by(self, entry: Mapping[str, Any]) -> bool:
        """Decide whether a baseline's entry is this fault, no worse than before.

        An entry of a baseline is a fault that is meant to stay.
        """
        if (self.kind, self.leaf) != (entry["kind"], entry["leaf"]):
            return False
        if self.relative is None:
            return _without_lines(self.text) == _without_lines(entry["text"])
        return self.relative <= _WORSE * entry["relative"]


def _without_lines(text: str) -> str:
    """Cut line numbers out of a text, so that moved code keeps its text."""
    return _LINE.sub(r"\1", text)


def told_of_faults(faults: Sequence[Fault], words: Words) -> Iterator[str]:
    """Yield a text for people about the faults of each kind."""
    heads = {
        "proof": NOT_THE_SAME,
        "equality": words.depends,
        "comparison": f"Results of a run depend on the number of {words.nouns.many}:",
    }
    for kind, head in heads.items():
        of_kind = [x for x in faults if x.kind == kind]
        lines = [f"  - {x.text}" for x in of_kind[:_SHOWN]]
        lines += [f"  and {len(of_kind) - _SHOWN} more"] * (len(of_kind) > _SHOWN)
        advice = dict.fromkeys(x.advice for x in of_kind if x.advice)
        if of_kind:
            yield "\n".join([head, *lines, *advice])


def annotations(faults: Iterable[Fault]) -> list[str]:
    """Write a line ``::error file=...::`` for each fault.

    GitHub shows such a line in the code.
    """
    return [_annotation(fault) for fault in faults]


def _annotation(fault: Fault) -> str:
    where = ""
    if match := _LINE.search(str(fault)):
        path = pathlib.Path(match[1])
        if path.is_file():
            root = os.environ.get("GITHUB_WORKSPACE", ".")
            file = _escaped(os.path.relpath(path, root), ":,")
            where = f" file={file},line={match[2]},title=towerjax check"
    return f"::error{where}::{_escaped(str(fault))}"


def _escaped(text: str, more: str = "") -> str:
    """Escape those characters of a text that end a GitHub message.

    They are line ends, and the characters in ``more``, which would end a property.
    """
    for sign in f"%\r\n{more}":
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def read_baseline(file: str, make: str) -> list[dict[str, Any]]:
    """Read the entries for a program in a file of faults that are meant to stay."""
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(
            f"There is no file {file}. Write it with --write-baseline {file}, check"
            " that its faults are meant, and commit it."
        )
    try:
        entries = json.loads(path.read_text())[make]
        assert all({"kind", "leaf", "text", "relative"} <= {*x} for x in entries)
    except KeyError:
        return []
    except (ValueError, TypeError, AssertionError):
        raise ValueError(
            f"{file} was not written by --write-baseline. Write it again."
        ) from None
    return entries


def write_baseline(file: str, make: str, faults: Sequence[Fault]) -> None:
    """Write these faults of a program as meant; entries of other programs stay."""
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
    """Split faults by a baseline's entries.

    Returns the faults that are not in the baseline, those that are, and the entries
    that no fault matches.
    """
    meant = [x for x in faults if any(x.is_meant_by(y) for y in entries)]
    left = [y for y in entries if not any(_is_of(x, y) for x in faults)]
    return [x for x in faults if x not in meant], meant, left


def _is_of(fault: Fault, entry: Mapping[str, Any]) -> bool:
    return (fault.kind, fault.leaf) == (entry["kind"], entry["leaf"])
