"""Make, commit, check and remove the folders of checkpoints."""

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
import uuid
from collections.abc import Iterator
from typing import Any

from towerjax.types.leaves import listed

MANIFEST = "manifest.json"
_REPAIR = (
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
    """Write each file's length and SHA-256; sync the whole folder to the disk."""
    files = {name: _checksum(folder / name, sync=True) for name in _files_of(folder)}
    text = json.dumps({"files": files, "sha256": _hash_of_table(files)}, indent=1)
    write_synced(folder / MANIFEST, text)
    for path in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        sync_folder(path)


def check_manifest(
    folder: pathlib.Path, what: str = "checkpoint", advice: str = _REPAIR
) -> None:
    """Raise unless a folder holds the files of its manifest, and nothing else.

    This finds damage, not forgery: who can write the files can write the manifest. No
    file outside of the folder is read, whatever the manifest names.
    """
    if problems := _differences(folder):
        raise CheckpointError(
            f"The {what} {str(folder)!r} is not what was written:"
            f" {listed(problems)}. {advice}"
        )


def _differences(folder: pathlib.Path) -> list[str]:
    """How a folder differs from its manifest, in sentences."""
    try:
        table = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, of_table = table["files"], table["sha256"]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"]
    except (ValueError, KeyError, TypeError):
        return [f"{MANIFEST} is cut or changed"]
    if _hash_of_table(files) != of_table:
        return [f"{MANIFEST} has been changed"]
    problems, there = [], set(_files_of(folder))
    for name, (size, digest) in files.items():
        if name not in there:
            problems.append(f"{name} is missing")
        elif (now := (folder / name).stat().st_size) != size:
            problems.append(f"{name} has {now} bytes instead of {size}")
        elif _checksum(folder / name)[1] != digest:
            problems.append(f"{name} has been changed")
    return problems + [
        f"{name} does not belong there" for name in sorted(there - {*files})
    ]


def write_synced(path: pathlib.Path, text: str) -> None:
    """Write a file and sync it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: pathlib.Path) -> None:
    """Sync the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files_of(folder: pathlib.Path) -> list[str]:
    paths = [p for p in folder.rglob("*") if not p.is_dir() and p != folder / MANIFEST]
    return sorted(p.relative_to(folder).as_posix() for p in paths)


def _checksum(path: pathlib.Path, *, sync: bool = False) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
        return [os.fstat(file.fileno()).st_size, digest]


def _hash_of_table(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


_WHOLE = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-\d+\.(saving|deleting|replaced)")


def folder_of(directory: pathlib.Path, number: int) -> pathlib.Path:
    """The folder of a checkpoint."""
    return directory / f"step-{number}"


def saved_steps(directory: pathlib.Path) -> tuple[int, ...]:
    """The steps of the committed checkpoints, ascending."""
    if not directory.is_dir():
        return ()
    found = (_WHOLE.fullmatch(path.name) for path in directory.iterdir())
    return tuple(sorted(int(match[1]) for match in found if match))


def make_folder(directory: pathlib.Path, number: int) -> pathlib.Path:
    """Make an empty folder to write a checkpoint into; `commit` renames it."""
    path = unfinished_folder(directory, number)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def unfinished_folder(directory: pathlib.Path, number: int) -> pathlib.Path:
    """The folder of a checkpoint before `commit`."""
    return directory / f"step-{number}.saving"


def commit(directory: pathlib.Path, number: int) -> None:
    """Rename a written checkpoint to its final name; replace an older one."""
    path, before = folder_of(directory, number), directory / f"step-{number}.replaced"
    if path.exists():
        path.rename(before)  # `prepare_directory` undoes this after a kill here
    unfinished_folder(directory, number).rename(path)
    sync_folder(directory)
    shutil.rmtree(before, ignore_errors=True)


def discard(path: pathlib.Path, *, patience_s: float = 2.0) -> None:
    """Delete a folder that other threads may still write into."""
    deadline_s = time.monotonic() + patience_s
    while path.exists() and time.monotonic() < deadline_s:
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.01)


def remove(directory: pathlib.Path, number: int) -> None:
    """Delete a checkpoint; it is renamed first, so that none is ever partial."""
    leaving = directory / f"step-{number}.deleting"
    shutil.rmtree(leaving, ignore_errors=True)
    folder_of(directory, number).rename(leaving)
    shutil.rmtree(leaving)


def prepare_directory(directory: pathlib.Path, needed: int) -> None:
    """Check that checkpoints can be written; clean up after a killed process."""
    with _explaining(directory):
        for path in directory.glob("step-*.replaced"):
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
        for path in directory.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path)
        probe = directory / ".probe"
        write_synced(probe, "\0" * 4096)
        probe.unlink()
        free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"A checkpoint takes up to {needed / 1e6:.1f} MB, but at"
            f" {str(directory)!r} only {free / 1e6:.1f} MB are free. Make room, or name"
            " another folder."
        )


@contextlib.contextmanager
def _explaining(directory: pathlib.Path) -> Iterator[None]:
    """Raise an error of the system as one that names the directory."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints cannot be written to {str(directory)!r}: {error.strerror}"
            f" ({errno.errorcode.get(error.errno or 0, error.errno)}). Name a folder"
            " that this process may write to."
        ) from error


@contextlib.contextmanager
def lock(directory: pathlib.Path) -> Iterator[None]:
    """Make the directory; lock it against others until the block or process ends."""
    with contextlib.ExitStack() as stack:
        with _explaining(directory):
            directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((directory / ".lock").open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"Another run writes its checkpoints to {str(directory)!r}. Wait"
                    " for its end, or name another folder."
                ) from None
            file.truncate(0)
            file.write(uuid.uuid4().hex.encode())
            file.flush()
            os.fsync(file.fileno())
        yield


def owner(directory: pathlib.Path) -> str:
    """Who holds the `lock`, as this process sees it."""
    path = directory / ".lock"
    return path.read_text(encoding="utf-8") if path.exists() else "nobody"
