"""The folder of a run: who uses it, and which complete checkpoints it has.

Orbax writes, commits and deletes checkpoints. It reads a flipped bit of a large array
as another number, so a table in each has the checksums of its files.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from etils import epath

from towerjax.loop.files import is_on_disk
from towerjax.types.refusals import listed

FORMAT = 1
TABLE = "towerjax.json"
ARRAYS = "default"  # what Orbax's CheckpointManager calls the one item of a step
DELETED = ".deleted"  # where a checkpoint is moved, as a whole, before it is deleted
_COMMITTED = "commit_success.txt"  # the last file, where no folder can be renamed
# Orbax changes the second after the table is written, and restoring needs neither.
_NOT_READ = _COMMITTED, "_CHECKPOINT_METADATA"
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_UNFINISHED = re.compile(r"[0-9]+\.orbax-checkpoint-tmp.*")
_TO_WRITE = "Name a folder that this process may write to"
_REMEDIES = {
    "written to": _TO_WRITE,
    "deleted from": _TO_WRITE,
    "read from": "They need not be damaged: try again, or let this process read them",
    "restored from": "The files are those that were written",
}


class CheckpointError(ValueError):
    """A checkpoint or its folder cannot be used; says which file or leaf, and why."""


@contextlib.contextmanager
def explained(done: str, path: epath.Path) -> Iterator[None]:
    """Raise a `CheckpointError`: that checkpoints cannot be ``done``, and why."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of many kinds, where it is no local folder
        code = getattr(error, "errno", None) or 0
        name = errno.errorcode.get(code, type(error).__name__)
        why = f"{error!s:.400}"
        is_full = name in ("ENOSPC", "EDQUOT", "EFBIG")
        remedy = "Make room" if is_full else _REMEDIES[done]
        raise CheckpointError(
            f"Checkpoints cannot be {done} {str(path)!r}:"
            f" {getattr(error, 'strerror', None) or why} ({name}). {remedy}."
        ) from error


def saved_steps(directory: epath.Path) -> tuple[int, ...]:
    """The steps of the committed checkpoints, ascending."""
    with explained("read from", directory):
        try:
            paths = _those(directory, _NUMBER)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return tuple(sorted(int(x.name) for x in paths if _is_committed(x)))


def unfinished(directory: epath.Path) -> list[epath.Path]:
    """Folders of checkpoints that are being written, or were when a run was killed."""
    if is_on_disk(directory):
        return _those(directory, _UNFINISHED)
    return [path for path in _those(directory, _NUMBER) if not _is_committed(path)]


def _those(directory: epath.Path, pattern: re.Pattern[str]) -> list[epath.Path]:
    # fsspec keeps listings of a store, to which others write, and Orbax by TensorStore.
    backend: Any = getattr(directory, "_backend", None)
    if hasattr(backend, "fs"):
        backend.fs(directory).invalidate_cache()
    return [path for path in directory.iterdir() if pattern.fullmatch(path.name)]


def _is_committed(path: epath.Path) -> bool:
    return is_on_disk(path) or (path / _COMMITTED).exists()


def empty_deleted(directory: epath.Path) -> None:
    """Delete the checkpoints that Orbax has moved away."""
    if (directory / DELETED).exists():
        (directory / DELETED).rmtree()


# Whether a run may use it


@contextlib.contextmanager
def lock(directory: epath.Path, needed: int = 0) -> Iterator[Callable[[], None]]:
    """Make the directory; lock it against others until the block or process ends.

    What a killed process left is deleted. ``needed`` bytes must be free. Object stores
    have neither locks nor an end. Yields a function that raises if the lock is lost.
    """
    free = math.inf
    name = uuid.uuid4().hex
    is_local = is_on_disk(directory)
    with contextlib.ExitStack() as stack:
        with explained("written to", directory):
            directory.mkdir(parents=True, exist_ok=True)
            if is_local:
                file = _lock_locally(directory / ".lock", name)
                stack.callback(os.close, file)
                (probe := directory / f".{name}").mkdir()
                probe.rmdir()
            else:
                (directory / ".lock").write_text(name)
        with explained("deleted from", directory):
            paths = _those(directory, _NUMBER) if is_local else ()
            walks = (os.walk(path, onerror=_raise) for path in paths)
            for folder, _, _ in itertools.chain.from_iterable(walks):
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"{folder!r} is read-only")
            for path in paths:
                if bad := _no_files(path):  # at which Orbax would wait
                    raise _damaged(path, listed(bad))
            for path in unfinished(directory):
                path.rmtree()
            empty_deleted(directory)
        with explained("written to", directory):
            free = shutil.disk_usage(directory).free if is_local else free
        if free < needed:
            raise CheckpointError(
                f"A checkpoint takes up to {needed / 1e6:.1f} MB, but at"
                f" {str(directory)!r} only {free / 1e6:.1f} MB are free. Make room."
            )

        def check() -> None:
            is_ours = is_local and _is_at(file, directory / ".lock")
            if not is_ours and (is_local or owner(directory) != name):
                raise CheckpointError(
                    f"{str(directory / '.lock')!r}, by which this run has locked its"
                    " folder, was deleted or replaced, so another run may write here,"
                    " too. Nothing more is written. End the other one and start this"
                    " one again, or name another folder."
                )

        yield check


def _is_at(file: int, path: epath.Path) -> bool:
    """Whether an open file is the one of a path, which may have been deleted."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _raise(error: OSError) -> None:
    raise error


def _lock_locally(path: epath.Path, name: str) -> int:
    """Lock a file, and write a name into it: the open file."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise CheckpointError(
            f"{str(path)!r}, by which a run locks its folder, is no plain file but a"
            " link, a pipe or a folder. Delete it, or name another folder."
        )
    # Without a buffer, which a full disk would refuse again when it is closed.
    file = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666
    )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(file, 0)
        os.write(file, name.encode())
    except OSError as error:
        os.close(file)
        if not isinstance(error, BlockingIOError):
            raise
        raise CheckpointError(
            f"Another run writes its checkpoints to {str(path.parent)!r}. Wait for its"
            " end, or name another folder."
        ) from None
    return file


def owner(directory: epath.Path) -> str:
    """Who holds the `lock`, as this process sees it."""
    with explained("read from", path := directory / ".lock"):
        return path.read_text() if path.exists() else "nobody"


# Whether a checkpoint is what was written


def seal(folder: epath.Path, record: dict[str, Any]) -> None:
    """Write the table of a checkpoint, as its last file."""
    # With it a manager refuses to restore on any but the same devices.
    (folder / ARRAYS / "_sharding").unlink(missing_ok=True)
    names = [x for x in _below(folder) if x.split("/")[-1] not in _NOT_READ]
    files = {name: _checksum(folder / name) for name in names}
    write_table(folder, {"format": FORMAT, "files": files, "record": record})


def write_table(folder: epath.Path, table: dict[str, Any]) -> None:
    """Write a table, or replace it in one operation."""
    text = json.dumps({**table, "crc32": _of_table(table)}, indent=1, allow_nan=False)
    being_made = folder / f"{TABLE}.tmp" if is_on_disk(folder) else folder / TABLE
    being_made.write_text(text)
    if is_on_disk(folder):
        being_made.replace(folder / TABLE)


def read_table(folder: epath.Path) -> dict[str, Any]:
    """The table of a checkpoint; raise if it was changed."""
    table = {}
    kept = None
    with explained("read from", folder):
        if _is_file(folder / TABLE):
            text = (folder / TABLE).read_bytes()
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                table = dict(json.loads(text))
                kept = table.pop("crc32", None)
    if table.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} has format {table['format']!r:.200}, and"
            f" this towerjax reads format {FORMAT}. Use the towerjax that wrote it."
        )
    if kept != _of_table(table):
        raise _damaged(folder, f"{TABLE} is missing, cut or changed")
    return table


def check_files(folder: epath.Path) -> None:
    """Raise unless a checkpoint holds the files of its table.

    This finds damage, not forgery: who can write the files can write the table.
    """
    known = read_table(folder)["files"]
    with explained("read from", folder):
        problems = _no_files(folder)
        there = {*_below(folder)}
    for name, (size, crc) in known.items():
        is_there = name in there and _is_file(folder / name)  # a name may be ../../x
        with explained("read from", folder):
            actual = _checksum(folder / name) if is_there else None
        if actual is None:
            problems.append(f"{name} is missing, or no file")
        elif actual[0] != size:
            problems.append(f"{name} has {actual[0]} bytes instead of {size}")
        elif actual[1] != crc:
            problems.append(f"{name} has been changed")
    if problems:
        raise _damaged(folder, listed(problems))


def _damaged(folder: epath.Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(folder)!r} is not what was written: {how}. Restore these"
        " files; or delete the whole folder to go on from the checkpoint before."
    )


def _is_file(path: epath.Path) -> bool:
    """Whether there is a file; to open a pipe would wait for who writes into it."""
    return pathlib.Path(path).is_file() if is_on_disk(path) else path.exists()


def _no_files(folder: epath.Path) -> list[str]:
    """A line for each path that is neither a file nor a folder."""
    if not is_on_disk(folder):  # where each look would be a request, and all are files
        return []
    return [f"{x} is no file" for x in _below(folder) if not _is_file(folder / x)]


def _below(folder: epath.Path) -> Iterator[str]:
    """The names of all but folders below a folder."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from (f"{path.name}/{name}" for name in _below(path))
        else:
            yield path.name


def _checksum(path: epath.Path) -> list[int]:
    """The length of a file and its CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while part := file.read(2**24):
            size = size + len(part)
            crc = zlib.crc32(part, crc)
    return [size, crc]


def _of_table(table: Any) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())
