"""What becomes of the files of a program: diffs that hold only what is added.

A diff, as of ``diff -n``, says which lines go by their numbers.
"""

import dataclasses
import difflib
import hashlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Diff:
    """What becomes of one file."""

    path: str
    blob: str  # git's hash of the file before
    removed: dict[int, int]  # first line -> how many
    added: dict[int, list[str]]  # the line before them -> lines

    def applied(self, text: bytes) -> bytes:
        """The file after; another file than the pinned one is refused."""
        if (blob := blob_of(text)) != self.blob:
            raise ValueError(f"{self.path} is not that of the pinned commit: {blob=}")
        lines = text.decode().splitlines(keepends=True)
        found = list[str]()
        gone = {n + i for n, count in self.removed.items() for i in range(count)}
        for number, line in enumerate(["", *lines]):
            found += [line] * (number not in gone) + self.added.get(number, [])
        return "".join(found).encode()


def blob_of(text: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()


def diffs_of(name: str) -> list[Diff]:
    """The diffs in a file here."""
    lines = iter((HERE / f"{name}.diff").read_text().splitlines(keepends=True))
    found: list[Diff] = []
    for line in lines:
        kind = line[0]
        rest = line[1:].split()
        if line.startswith("file "):
            found.append(Diff(rest[1], rest[2], {}, {}))
        elif kind == "d":
            found[-1].removed[int(rest[0])] = int(rest[1])
        elif kind == "a":
            added = [next(lines) for _ in range(int(rest[1]))]
            found[-1].added[int(rest[0])] = added
        elif kind != "#":
            raise ValueError(f"{name}.diff has the line {line!r}")
    return found


def counts(name: str) -> tuple[int, int]:
    """How many lines go and come."""
    diffs = diffs_of(name)
    removed = sum(sum(diff.removed.values()) for diff in diffs)
    return removed, sum(len(x) for diff in diffs for x in diff.added.values())


def write(name: str, root: pathlib.Path, commit: str) -> None:
    """Write a diff anew, of a checkout whose files were edited."""
    place = HERE / f"{name}.diff"
    lines = place.read_text().splitlines(keepends=True)
    found = "".join(line for line in lines if line.startswith("#"))
    for path in [diff.path for diff in diffs_of(name)]:
        said = ["git", "-C", str(root), "show", f"{commit}:{path}"]
        before = subprocess.run(said, stdout=subprocess.PIPE, check=True).stdout
        found += f"file {path} {blob_of(before)}\n"
        # Its status is 1 where files differ.
        command = ["diff", "-n", "-", str(root / path)]
        done = subprocess.run(command, input=before, stdout=subprocess.PIPE)
        found += done.stdout.decode()
    place.write_text(found)


def show(name: str, root: pathlib.Path) -> None:
    """Print a unified diff."""
    for diff in diffs_of(name):
        before = (root / diff.path).read_bytes()
        after = diff.applied(before)
        old, new = (x.decode().splitlines(keepends=True) for x in (before, after))
        sys.stdout.writelines(difflib.unified_diff(old, new, diff.path, diff.path))


def copies(
    name: str, parts: Sequence[str], root: pathlib.Path, into: pathlib.Path
) -> None:
    """Copy parts of a checkout to ``into/before`` and, changed, to ``after``."""
    for when in ("before", "after"):
        for part in parts:
            source = root / part
            place = into / when / part
            if source.is_dir():
                shutil.copytree(source, place)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
    for diff in diffs_of(name):
        path = into / "after" / diff.path
        path.write_bytes(diff.applied(path.read_bytes()))
