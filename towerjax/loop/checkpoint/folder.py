"""Make, commit, check and remove the folders of checkpoints."""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from towerjax.loop.files import is_on_disk
from towerjax.types.leaves import listed

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "default"  # what Orbax's CheckpointManager calls the one item of a step
# Where no folder can be renamed, the last file of a checkpoint, as Orbax has it.
_COMMITTED = "commit_success.txt"
_UNREADABLE = OSError, ValueError, LookupError, TypeError, AttributeError
_UNREADABLE += (RecursionError,)
_WHOLE = re.compile(r"0|[1-9][0-9]*")
_PARTIAL = re.compile(r"[0-9]+\.partial")


class CheckpointError(ValueError):
    """A checkpoint or its folder cannot be used; says which file or leaf, and why."""


def commit(folder: epath.Path, target: epath.Path, record: Any) -> None:
    """Write the manifest of a folder and sync all to the disk; then let it count.

    The manifest has each file's length and SHA-256, and the record.
    """
    files = {name: _checksum(folder / name, sync=True) for name in _files_of(folder)}
    write_table(folder, {"format": FORMAT, "files": files, "record": record})
    if is_on_disk(target):
        for path in {folder, *((folder / name).parent for name in files)}:
            _sync_folder(path)
        folder.rename(target)
        _sync_folder(target.parent)
        return
    if folder != target:
        copy_files(folder, target, (*files, MANIFEST))
        folder.rmtree()
    (target / _COMMITTED).write_text("")


def copy_files(
    source: epath.Path, target: epath.Path, names: Iterable[str] = ()
) -> None:
    """Copy files into a folder, several at once; all but the manifest by default."""

    def copy(name: str) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with (source / name).open("rb") as old, (target / name).open("wb") as new:
            shutil.copyfileobj(old, new, 2**24)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(copy, names or _files_of(source)))


@contextlib.contextmanager
def for_orbax(folder: epath.Path, several: bool = False) -> Iterator[epath.Path]:
    """The folder, or a temporary one where TensorStore, Orbax's, has no driver for it.

    To copy what several processes wrote they would need a common folder.
    """
    if is_on_disk(folder) or os.fspath(folder).startswith("gs://"):
        yield folder
        return
    if several:
        raise CheckpointError(
            f"Several processes cannot save to {str(folder)!r}, which Orbax has no"
            " driver for. Name a folder that all see, or gs://."
        )
    with tempfile.TemporaryDirectory(prefix="towerjax-") as name:
        yield epath.Path(name)


def write_table(folder: epath.Path, table: dict[str, Any]) -> None:
    """Write a manifest, or replace it as a whole."""
    table = {**table, "sha256": _hash_of_table(table)}
    text = json.dumps(table, indent=1, allow_nan=False)
    if not is_on_disk(folder):  # where a file is replaced as a whole
        (folder / MANIFEST).write_text(text)
        return
    being_made = folder / (MANIFEST + ".partial")
    with open(being_made, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    being_made.replace(folder / MANIFEST)
    _sync_folder(folder)


def read_manifest(folder: epath.Path) -> dict[str, Any]:
    """The manifest of a folder; raise unless it is what was written."""
    path, digest, version = folder / MANIFEST, None, None
    with contextlib.suppress(*_UNREADABLE):
        table = json.loads(path.read_text() if _is_file(path) else "{}")
        digest, version = table.pop("sha256"), table["format"]
        if digest != _hash_of_table(table):
            digest = None
    if version not in (None, FORMAT):
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} has format {version!r:.200}, and this"
            f" towerjax reads format {FORMAT}. Use the towerjax that wrote it."
        )
    if version is None or digest is None:
        raise _damaged(folder, f"{MANIFEST} is missing, cut or changed")
    return table


def _damaged(folder: epath.Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(folder)!r} is not what was written: {how}. Restore these"
        " files; or delete the whole folder to go on from the checkpoint before."
    )


def check_manifest(folder: epath.Path) -> None:
    """Raise unless a folder holds the files of its manifest, and nothing else.

    This finds damage, not forgery: who can write the files can write the manifest.
    """
    files = read_manifest(folder)["files"]
    problems, there = [], set(_files_of(folder))
    for name, (size, digest) in files.items():
        if name not in there:
            problems.append(f"{name} is missing")
        elif not _is_file(folder / name):
            problems.append(f"{name} is a pipe, or a link to nothing")
        elif (now := _checksum(folder / name))[0] != size:
            problems.append(f"{name} has {now[0]} bytes instead of {size}")
        elif now[1] != digest:
            problems.append(f"{name} has been changed")
    problems += [f"{name} does not belong there" for name in there - files.keys()]
    if problems:
        raise _damaged(folder, listed(sorted(problems)))


def _sync_folder(path: epath.Path) -> None:
    """Sync the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_file(path: epath.Path) -> bool:
    """Whether a path is a file; to open a pipe would wait for who writes into it."""
    return pathlib.Path(path).is_file() if is_on_disk(path) else path.exists()


def _files_of(folder: epath.Path) -> list[str]:
    """The files below a folder, without those that say that it is whole."""
    return sorted({*_files_below(folder)} - {MANIFEST, _COMMITTED})


def _files_below(folder: epath.Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir() and not (is_on_disk(path) and os.path.islink(path)):
            yield from (f"{path.name}/{name}" for name in _files_below(path))
        else:
            yield path.name


def _checksum(path: epath.Path, *, sync: bool = False) -> list[Any]:
    with path.open("rb") as opened:
        file: Any = opened
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync and is_on_disk(path):
            os.fsync(file.fileno())
        return [file.seek(0, os.SEEK_END), digest]


def _hash_of_table(table: Any) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def path_of(directory: epath.Path, number: int) -> epath.Path:
    """The folder of a checkpoint, which has the name that Orbax gives it."""
    return directory / str(number)


def partial_path_of(directory: epath.Path, number: int) -> epath.Path:
    """The folder of a checkpoint that is being written or deleted."""
    return directory / (f"{number}.partial" if is_on_disk(directory) else str(number))


def _is_partial(path: epath.Path) -> bool:
    if is_on_disk(path):
        return bool(_PARTIAL.fullmatch(path.name))
    return bool(_WHOLE.fullmatch(path.name)) and not _is_committed(path)


def _is_committed(path: epath.Path) -> bool:
    return is_on_disk(path) or (path / _COMMITTED).exists()


def discard(directory: epath.Path, number: int) -> None:
    """Delete what was written of a checkpoint, unless that counts."""
    path = partial_path_of(directory, number)
    if _is_partial(path):
        path.rmtree(missing_ok=True)


def saved_steps(directory: epath.Path) -> tuple[int, ...]:
    """The steps of the committed checkpoints, ascending."""
    try:
        paths = [path for path in directory.iterdir() if _WHOLE.fullmatch(path.name)]
        return tuple(sorted(int(path.name) for path in paths if _is_committed(path)))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except Exception as error:  # of many kinds, where it is no local folder
        raise _unusable("read from", directory, error) from error


def remove(directory: epath.Path, number: int) -> None:
    """Delete a checkpoint, which first ceases to count."""
    path, partial = path_of(directory, number), partial_path_of(directory, number)
    path.rename(partial) if is_on_disk(path) else (path / _COMMITTED).unlink()
    partial.rmtree()


@contextlib.contextmanager
def lock(directory: epath.Path, needed: int = 0) -> Iterator[None]:
    """Make the directory; lock it against others until the block or process ends.

    What a killed process left is deleted. ``needed`` bytes must be free. Object stores
    have neither locks nor an end.
    """
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            free, name = math.inf, uuid.uuid4().hex
            if is_on_disk(directory):
                free = _lock_locally(directory / ".lock", name, stack)
            else:
                (directory / ".lock").write_text(name)
            for path in filter(_is_partial, list(directory.iterdir())):
                path.rmtree()
        except BlockingIOError:
            raise CheckpointError(
                f"Another run writes its checkpoints to {str(directory)!r}. Wait for"
                " its end, or name another folder."
            ) from None
        except Exception as error:  # of many kinds, where it is no local folder
            raise _unusable("written to", directory, error) from error
        if free < needed:
            raise CheckpointError(
                f"A checkpoint takes up to {needed / 1e6:.1f} MB, but at"
                f" {str(directory)!r} only {free / 1e6:.1f} MB are free. Make room."
            )
        yield


def _lock_locally(path: epath.Path, name: str, stack: contextlib.ExitStack) -> int:
    """Lock a file until the stack is closed; how many bytes are free there."""
    # Without a buffer, which a full disk would refuse again when it is closed; and not
    # waiting for who reads, if it is a pipe.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
    file = os.open(path, flags, 0o666)
    stack.callback(os.close, file)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.truncate(file, 0)
    os.write(file, name.encode())
    os.fsync(file)
    return shutil.disk_usage(path.parent).free


def _unusable(done: str, directory: epath.Path, error: Exception) -> CheckpointError:
    code = getattr(error, "errno", None) or 0
    name, why = errno.errorcode.get(code, type(error).__name__), f"{error!s:.400}"
    is_full = name in ("ENOSPC", "EDQUOT", "EFBIG")
    remedy = "Make room" if is_full else "Name a folder that this process may write to"
    return CheckpointError(
        f"Checkpoints cannot be {done} {str(directory)!r}:"
        f" {getattr(error, 'strerror', None) or why} ({name}). {remedy}."
    )


def owner(directory: epath.Path) -> str:
    """Who holds the `lock`, as this process sees it."""
    path = directory / ".lock"
    return path.read_text() if path.exists() else "nobody"
