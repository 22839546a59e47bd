"""Is a folder whole, to the last byte? Every file's SHA-256, written last."""

import hashlib
import json
import os
import pathlib
from typing import Any

NAME = "manifest.json"
_ADVICE = (
    "Restore these files; or delete the whole folder to go on from the checkpoint"
    " before."
)


class CheckpointError(ValueError):
    """A checkpoint or its folder cannot be used; says which file or leaf, and why.

    Example:
      >>> issubclass(CheckpointError, ValueError)
      True
    """


def write_manifest(folder: pathlib.Path) -> None:
    """Say of every file in a folder how long it is, and what its SHA-256 is.

    Everything is on the disk when this returns, also for when the power fails.
    """
    files = {name: _sum_of(folder / name, flush=True) for name in _files_of(folder)}
    text = json.dumps({"files": files, "sha256": _sum_of_table(files)}, indent=1)
    write_whole(folder / NAME, text)
    for path in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        flush_folder(path)


def check_manifest(
    folder: pathlib.Path, what: str = "checkpoint", advice: str = _ADVICE
) -> None:
    """Raise unless a folder holds what its manifest says, and nothing else.

    Finds accidents, not forgers: who can write the files can write the manifest. No
    file outside of the folder is looked at, whatever the manifest names.
    """
    try:
        _check_files(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"The {what} {str(folder)!r} is not what was written: {error}. {advice}"
        ) from None


def _check_files(folder: pathlib.Path) -> None:
    files, problems = _read_table(folder), []
    there = set(_files_of(folder))
    for name, (size, digest) in files.items():
        if name not in there:
            problems.append(f"{name} is missing")
        elif (now := (folder / name).stat().st_size) != size:
            problems.append(f"{name} has {now} bytes instead of {size}")
        elif _sum_of(folder / name)[1] != digest:
            problems.append(f"{name} has been changed")
    problems += [f"{name} does not belong there" for name in sorted(there - {*files})]
    if problems:
        raise CheckpointError("; ".join(problems))


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file, and see it onto the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(path: pathlib.Path) -> None:
    """See a folder's names onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files_of(folder: pathlib.Path) -> list[str]:
    paths = [p for p in folder.rglob("*") if not p.is_dir() and p != folder / NAME]
    return sorted(p.relative_to(folder).as_posix() for p in paths)


def _sum_of(path: pathlib.Path, *, flush: bool = False) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
        return [os.fstat(file.fileno()).st_size, digest]


def _sum_of_table(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _read_table(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
    try:
        table = json.loads((folder / NAME).read_text(encoding="utf-8"))
        files, digest = table["files"], table["sha256"]
    except FileNotFoundError:
        raise CheckpointError(f"{NAME} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{NAME} is cut or changed") from None
    if _sum_of_table(files) != digest:
        raise CheckpointError(f"{NAME} has been changed")
    return files
