"""Which folders are checkpoints, whole, and just as they were written?"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

from towerjax.types.leaves import listed

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
    """Say of each file its length and SHA-256; all is on the disk when this returns."""
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
        raise CheckpointError(listed(problems))


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


_WHOLE = re.compile(r"step-(\d+)")
_BEING_MADE = re.compile(r"step-\d+\.(saving|deleting|replaced)")


def folder_of(directory: pathlib.Path, number: int) -> pathlib.Path:
    """The folder of a checkpoint."""
    return directory / f"step-{number}"


def saved_steps(directory: pathlib.Path) -> tuple[int, ...]:
    """After which steps there are checkpoints."""
    if not directory.is_dir():
        return ()
    found = (_WHOLE.fullmatch(path.name) for path in directory.iterdir())
    return tuple(sorted(int(match[1]) for match in found if match))


def begin(directory: pathlib.Path, number: int) -> pathlib.Path:
    """A new folder to write a checkpoint into; it does not count yet."""
    path = making(directory, number)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def making(directory: pathlib.Path, number: int) -> pathlib.Path:
    """Where `begin` makes a checkpoint."""
    return directory / f"step-{number}.saving"


def commit(directory: pathlib.Path, number: int) -> None:
    """Let a checkpoint that is written count, in one go; also instead of another."""
    path, before = folder_of(directory, number), directory / f"step-{number}.replaced"
    if path.exists():
        path.rename(before)  # `prepare` takes it back, if this process is killed here
    making(directory, number).rename(path)
    flush_folder(directory)
    shutil.rmtree(before, ignore_errors=True)


def discard(path: pathlib.Path, *, patience_s: float = 2.0) -> None:
    """Delete what could not be written, while other threads may still write into it."""
    deadline_s = time.monotonic() + patience_s
    while path.exists() and time.monotonic() < deadline_s:
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.01)


def remove(directory: pathlib.Path, number: int) -> None:
    """Delete a checkpoint, which at no moment is half there."""
    leaving = directory / f"step-{number}.deleting"
    shutil.rmtree(leaving, ignore_errors=True)
    folder_of(directory, number).rename(leaving)
    shutil.rmtree(leaving)


def prepare(directory: pathlib.Path, needed: int) -> None:
    """See that checkpoints can be written; clear away what a killed process left."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("step-*.replaced"):
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
        for path in directory.iterdir():
            if _BEING_MADE.fullmatch(path.name):
                shutil.rmtree(path)
        probe = directory / ".probe"
        write_whole(probe, "\0" * 4096)
        probe.unlink()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints cannot be written to {str(directory)!r}: {error.strerror}"
            f" ({errno.errorcode.get(error.errno or 0, error.errno)}). Name a folder"
            " that this process may write to."
        ) from error
    if free < needed:
        raise CheckpointError(
            f"A checkpoint takes up to {needed / 1e6:.1f} MB, but at"
            f" {str(directory)!r} only {free / 1e6:.1f} MB are free. Make room, or name"
            " another folder."
        )


@contextlib.contextmanager
def held(directory: pathlib.Path) -> Iterator[None]:
    """Keep others from writing to the directory until a block, or the process, ends."""
    with (directory / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another run writes its checkpoints to {str(directory)!r}. Wait for"
                " its end, or name another folder."
            ) from None
        yield
