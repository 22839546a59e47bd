"""The folder of a run: its lock, its complete checkpoints, and their checksums.

Orbax writes, commits and deletes checkpoints. It does not notice a flipped bit of a
large array, so a table in each checkpoint has the checksums of its files.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from etils import epath

from towerjax.loop.files import checked_path, is_on_disk, replace_file
from towerjax.types.options import refuse_option
from towerjax.types.refusals import listed, printable

FORMAT = 1
TABLE = "towerjax.json"
ARRAYS = "default"  # Orbax's name for the single item of a checkpoint
# Orbax's index file, written after the processes' files are merged.
_MERGED = "manifest.ocdbt"
DELETED = ".deleted"  # the folder to which checkpoints are moved before deletion
_COMMITTED = "commit_success.txt"  # written last in stores that cannot rename
# Files that the table does not list. Orbax changes the second one after the table is
# written. Neither is needed to restore.
_NOT_READ = _COMMITTED, "_CHECKPOINT_METADATA"
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_UNFINISHED = re.compile(r"[0-9]+\.orbax-checkpoint-tmp.*")
_TO_WRITE = "Name a folder that this process may write to"
_REMEDIES = {
    "written to": _TO_WRITE,
    "deleted from": _TO_WRITE,
    "read from": "The files may be undamaged: try again, or let this process read them",
    "restored from": "The files themselves are unchanged",
}


class CheckpointError(ValueError):
    """A checkpoint or its folder cannot be used; names the file or leaf, and why."""


@contextlib.contextmanager
def explained(done: str, path: epath.Path) -> Iterator[None]:
    """Raise a `CheckpointError` if an operation in this block fails.

    ``done`` names the operation in the error, such as ``"written to"``.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # stores raise errors of many types
        code = getattr(error, "errno", None) or 0
        name = errno.errorcode.get(code, type(error).__name__)
        why = f"{error!s:.400}"
        is_full = name in ("ENOSPC", "EDQUOT", "EFBIG")
        remedy = "Make room" if is_full else _REMEDIES[done]
        raise CheckpointError(
            f"Checkpoints cannot be {done} {str(path)!r}:"
            f" {printable(getattr(error, 'strerror', None) or why)} ({name}). {remedy}."
        ) from error


def saved_steps(directory: epath.Path) -> tuple[int, ...]:
    """List the step numbers of the committed checkpoints, ascending."""
    with explained("read from", directory):
        try:
            paths = _those(directory, _NUMBER)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return tuple(sorted(int(x.name) for x in paths if _is_committed(x)))


def unfinished(directory: epath.Path) -> list[epath.Path]:
    """List the folders of checkpoints that are not complete.

    They are being written, or a killed process left them.
    """
    if is_on_disk(directory):
        return _those(directory, _UNFINISHED)
    return [path for path in _those(directory, _NUMBER) if not _is_committed(path)]


def _those(directory: epath.Path, pattern: re.Pattern[str]) -> list[epath.Path]:
    # fsspec caches the listings of a store, but other processes, and Orbax through
    # TensorStore, write there, too. So the cache is cleared.
    backend: Any = getattr(directory, "_backend", None)
    if hasattr(backend, "fs"):
        backend.fs(directory).invalidate_cache()
    return [path for path in directory.iterdir() if pattern.fullmatch(path.name)]


def _is_committed(path: epath.Path) -> bool:
    return path.is_dir() if is_on_disk(path) else (path / _COMMITTED).exists()


def empty_deleted(directory: epath.Path) -> None:
    """Delete for good the checkpoints that Orbax has moved to the folder `DELETED`."""
    if (directory / DELETED).exists():
        (directory / DELETED).rmtree()


# The functions below tell whether a run may use a folder.


def check_directory(name: str, directory: Any) -> None:
    """Raise unless Orbax can write checkpoints to this folder, and find them again."""
    path = checked_path(name, directory, "a folder")
    if not (is_on_disk(path) or os.fspath(path).startswith("gs://")):
        form = "a folder on this machine or gs://...; Orbax writes to no other"
        refuse_option(name, directory, form)
    # When Orbax merges files, it reads the whole path as a glob pattern.
    if unsafe := sorted({*os.fspath(path)} & {*"[\\"}):
        form = (
            f"a folder whose absolute path has no {' and no '.join(map(repr, unsafe))}."
            " Orbax takes them for a pattern, so nothing could be restored. Replace"
            " them, as in run_layers=64,64"
        )
        refuse_option(name, str(path), form)


@contextlib.contextmanager
def lock(directory: epath.Path, needed: int = 0) -> Iterator[Callable[[], None]]:
    """Create the directory, and lock it until the block or the process ends.

    Files that a killed process left are deleted. ``needed`` bytes must be free. Object
    stores have no locks and no limit of size. Yields a function that raises if the lock
    is lost.
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
            for path in paths:
                if not path.is_dir():
                    raise CheckpointError(
                        f"{str(path)!r} is not a folder, but the checkpoint of step"
                        f" {path.name} would have this name. Move it, or name another"
                        " folder."
                    )
            walks = (os.walk(path, onerror=_raise) for path in paths)
            for folder, _, _ in itertools.chain.from_iterable(walks):
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, f"{folder!r} is read-only")
            for path in paths:
                # Opening such a path would make Orbax wait for ever.
                if bad := _no_files(path):
                    raise _damaged(path, listed(bad))
            for path in unfinished(directory):
                path.rmtree()
            empty_deleted(directory)
        with explained("written to", directory):
            free = shutil.disk_usage(directory).free if is_local else free
        if free < needed:
            raise CheckpointError(
                f"A checkpoint needs up to {needed / 1e6:.1f} MB, but only"
                f" {free / 1e6:.1f} MB are free in {str(directory)!r}. Make room, or"
                " name another folder."
            )

        def check() -> None:
            is_ours = is_local and _is_at(file, directory / ".lock")
            if not is_ours and (is_local or owner(directory) != name):
                raise CheckpointError(
                    f"{str(directory / '.lock')!r}, the lock of this run's folder, was"
                    " deleted or replaced, so another run may write here, too. Nothing"
                    " more is written. End the other run and start this one again, or"
                    " name another folder."
                )

        yield check


def _is_at(file: int, path: epath.Path) -> bool:
    """Return whether ``path`` still names the open file, which may be deleted."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _raise(error: OSError) -> None:
    raise error


def _lock_locally(path: epath.Path, name: str) -> int:
    """Lock a folder by a file, and return this open file.

    The ``name`` of the owner is written into it.
    """
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise CheckpointError(
            f"{str(path)!r}, which must be the lock file of a run, is a link, a pipe or"
            " a folder. Delete it, or name another folder."
        )
    # The file is opened without a buffer. On a full disk a buffer would raise again
    # when the file is closed.
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
            f"Another run is writing its checkpoints to {str(path.parent)!r}. Wait"
            " until it ends, or name another folder."
        ) from None
    return file


def owner(directory: epath.Path) -> str:
    """Read in the folder's lock file who holds the `lock`."""
    with explained("read from", path := directory / ".lock"):
        return printable(path.read_text()) if path.exists() else "nobody"


# The functions below tell whether a checkpoint holds what was written.


def seal(folder: epath.Path, record: dict[str, Any]) -> None:
    """Write the table of a checkpoint, after all files that the table lists."""
    if not (folder / ARRAYS / _MERGED).exists():
        raise CheckpointError(
            f"Orbax did not finish {str(folder)!r}: there is no {ARRAYS}/{_MERGED}, so"
            " nothing could be restored from it. Name another folder, and please report"
            " this."
        )
    # If this file exists, Orbax's manager refuses to restore on other devices.
    (folder / ARRAYS / "_sharding").unlink(missing_ok=True)
    names = [x for x in _below(folder) if x.split("/")[-1] not in _NOT_READ]
    files = {name: _checksum(folder / name) for name in names}
    write_table(folder, {"format": FORMAT, "files": files, "record": record})


def write_table(folder: epath.Path, table: dict[str, Any]) -> None:
    """Write a table, or replace it in one step, so that no reader finds half of it."""
    text = json.dumps({**table, "crc32": _of_table(table)}, indent=1, allow_nan=False)
    for path in folder.iterdir() if is_on_disk(folder) else ():
        if path.name.startswith(f"{TABLE}."):  # a killed process left it
            path.unlink()
    replace_file(folder / TABLE, text.encode())


def read_table(folder: epath.Path) -> dict[str, Any]:
    """Read the table of a checkpoint; raise if the table was changed."""
    table = {}
    content = None
    with explained("read from", folder):
        if _is_file(folder / TABLE):
            text = (folder / TABLE).read_bytes()
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                table = dict(json.loads(text))
                content = table.pop("crc32", None)
    if table.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} has format {table['format']!r:.200}, but"
            f" this towerjax reads format {FORMAT}. Use the version of towerjax that"
            " wrote it."
        )
    if content != _of_table(table):
        raise _damaged(folder, f"{TABLE} is missing, cut or changed")
    return table


def check_files(folder: epath.Path) -> None:
    """Raise unless a checkpoint holds exactly the files of its table.

    This finds damage, and not forgery: whoever can write the files can write the table.
    """
    with telling_of_forgery(folder):
        known = {name: (size, crc) for name, (size, crc) in _files_of(folder)}
    with explained("read from", folder):
        problems = _no_files(folder)
        there = {*_below(folder)}
    for name, (size, crc) in known.items():
        # A forged name may be ../../x.
        is_there = name in there and _is_file(folder / name)
        with explained("read from", folder):
            actual = _checksum(folder / name) if is_there else None
        if actual is None:
            problems.append(f"{name} is missing, or not a file")
        elif actual[0] != size:
            problems.append(f"{name} has {actual[0]} bytes instead of {size}")
        elif actual[1] != crc:
            problems.append(f"{name} has been changed")
    if problems:
        raise _damaged(folder, listed(problems))


def _files_of(folder: epath.Path) -> Iterable[tuple[str, Any]]:
    return read_table(folder)["files"].items()


@contextlib.contextmanager
def telling_of_forgery(folder: epath.Path) -> Iterator[None]:
    """Raise a `CheckpointError` if this block meets wrong fields or types.

    The table has the right checksum, so a program other than towerjax wrote it.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as why:
        kind = type(why).__name__
        forgery = f"{TABLE} was not written by towerjax ({kind}: {why!s:.200})"
        raise _damaged(folder, forgery) from why


def _damaged(folder: epath.Path, fault: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(folder)!r} was changed after it was written:"
        f" {printable(fault)}."
        " Restore these files; or delete the whole folder, and the run goes on from the"
        " checkpoint before."
    )


def _is_file(path: epath.Path) -> bool:
    """Return whether a file is at ``path``, without opening it.

    Opening a pipe would wait for its writer.
    """
    return pathlib.Path(path).is_file() if is_on_disk(path) else path.exists()


def _no_files(folder: epath.Path) -> list[str]:
    """Write a text for each path that is neither a file nor a folder."""
    if not is_on_disk(folder):  # in a store each path is a file
        return []
    return [f"{x} is not a file" for x in _below(folder) if not _is_file(folder / x)]


def _below(folder: epath.Path) -> Iterator[str]:
    """Yield the names of all files below a folder."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from (f"{path.name}/{name}" for name in _below(path))
        else:
            yield path.name


def _checksum(path: epath.Path) -> list[int]:
    """Measure a file: its length in bytes, and its CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while part := file.read(2**24):
            size = size + len(part)
            crc = zlib.crc32(part, crc)
    return [size, crc]


def _of_table(table: Any) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())
