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
import uuid
from collections.abc import Iterator
from typing import Any

from towerjax.types.leaves import listed

FORMAT = 1
MANIFEST = "manifest.json"
_REPAIR = (
    "Restore these files; or delete the whole folder to go on from the checkpoint"
    " before."
)
# What a manifest holds: a kind, a list of one form, or a dict of forms.
_MANIFEST_FORM = {"format": int, "files": dict, "record": dict}
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
_WHOLE = re.compile(r"step-(0|[1-9][0-9]*)")


class CheckpointError(ValueError):
    """A checkpoint or its folder cannot be used; says which file or leaf, and why.

    Example:
      >>> issubclass(CheckpointError, ValueError)
      True
    """


def commit(folder: pathlib.Path, target: pathlib.Path, record: Any) -> None:
    """Write the manifest of a folder, sync all to the disk, and rename the folder.

    The manifest has each file's length and SHA-256, and the record.
    """
    files = {name: _checksum(folder / name, sync=True) for name in _files_of(folder)}
    for path in [p for p in folder.rglob("*") if p.is_dir()]:
        _sync_folder(path)
    _write_table(folder, {"format": FORMAT, "files": files, "record": record})
    folder.rename(target)
    _sync_folder(target.parent)


def replace_record(folder: pathlib.Path, record: Any) -> None:
    """Replace the record of a manifest, atomically."""
    _write_table(folder, {**read_manifest(folder), "record": record})


def fits(value: Any, form: Any) -> bool:
    """Whether what was read of JSON has a form; True and False are no numbers."""
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(x, form[0]) for x in value)
    if isinstance(form, dict):
        same = isinstance(value, dict) and value.keys() == form.keys()
        return same and all(fits(value[name], form[name]) for name in form)
    is_kind = isinstance(value, form)
    return is_kind and (form is not int or not isinstance(value, bool))


def _write_table(folder: pathlib.Path, table: dict[str, Any]) -> None:
    being_made = folder / (MANIFEST + ".partial")
    with being_made.open("w", encoding="utf-8") as file:
        table = {**table, "sha256": _hash_of_table(table)}
        file.write(json.dumps(table, indent=1, allow_nan=False))
        file.flush()
        os.fsync(file.fileno())
    being_made.replace(folder / MANIFEST)
    _sync_folder(folder)


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a folder; raise unless it is what was written."""
    path, digest, version = folder / MANIFEST, None, None
    with contextlib.suppress(*_UNREADABLE):
        # To open a pipe would wait for who writes into it.
        table = json.loads(path.read_text(encoding="utf-8") if path.is_file() else "{}")
        digest, version = table.pop("sha256"), table["format"]
        if digest != _hash_of_table(table) or not fits(table, _MANIFEST_FORM):
            digest = None
    if version not in (None, FORMAT):
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} has format {version!r:.200}, and this"
            f" towerjax reads format {FORMAT}. Use the towerjax that wrote it."
        )
    if version is None or digest is None:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is not what was written: {MANIFEST} is"
            f" missing, cut or changed. {_REPAIR}"
        )
    return table


def check_manifest(folder: pathlib.Path) -> None:
    """Raise unless a folder holds the files of its manifest, and nothing else.

    This finds damage, not forgery: who can write the files can write the manifest. No
    file outside of the folder is read, whatever the manifest names.
    """
    files = read_manifest(folder)["files"]
    problems, there = [], set(_files_of(folder))
    for name, written in files.items():
        size, digest = written if fits(written, list) and len(written) == 2 else (0, 0)
        if name not in there:
            problems.append(f"{name} is missing")
        elif not (folder / name).is_file():
            problems.append(f"{name} is a pipe, or a link to nothing")
        elif (now := (folder / name).stat().st_size) != size:
            problems.append(f"{name} has {now} bytes instead of {size}")
        elif _checksum(folder / name)[1] != digest:
            problems.append(f"{name} has been changed")
    problems += [f"{name} does not belong there" for name in there - files.keys()]
    if problems:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is not what was written:"
            f" {listed(sorted(problems))}. {_REPAIR}"
        )


def _sync_folder(path: pathlib.Path) -> None:
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


def _hash_of_table(table: Any) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def path_of(directory: pathlib.Path, number: int) -> pathlib.Path:
    """The folder of a checkpoint."""
    return directory / f"step-{number}"


def partial_path_of(directory: pathlib.Path, number: int) -> pathlib.Path:
    """The folder of a checkpoint that is being written or deleted."""
    return directory / f"step-{number}.partial"


def saved_steps(directory: pathlib.Path) -> tuple[int, ...]:
    """The steps of the committed checkpoints, ascending."""
    try:
        if not directory.is_dir():
            return ()
        found = [_WHOLE.fullmatch(path.name) for path in directory.iterdir()]
    except OSError as error:
        raise _unusable("read from", directory, error) from error
    return tuple(sorted(int(match[1]) for match in found if match))


def remove(directory: pathlib.Path, number: int) -> None:
    """Delete a checkpoint; it is renamed first, so that none is ever partial."""
    path_of(directory, number).rename(partial_path_of(directory, number))
    shutil.rmtree(partial_path_of(directory, number))


@contextlib.contextmanager
def lock(directory: pathlib.Path, needed: int = 0) -> Iterator[None]:
    """Make the directory; lock it against others until the block or process ends.

    What a killed process left is deleted. ``needed`` bytes must be free.
    """
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Without a buffer, which a full disk would refuse again when it is closed;
            # and not waiting for who reads, if it is a pipe.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
            file = os.open(directory / ".lock", flags, 0o666)
            stack.callback(os.close, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(file, 0)
            os.write(file, uuid.uuid4().hex.encode())
            os.fsync(file)
            for path in directory.glob("step-*.partial"):
                shutil.rmtree(path)
            free = shutil.disk_usage(directory).free
        except BlockingIOError:
            raise CheckpointError(
                f"Another run writes its checkpoints to {str(directory)!r}. Wait for"
                " its end, or name another folder."
            ) from None
        except OSError as error:
            raise _unusable("written to", directory, error) from error
        if free < needed:
            raise CheckpointError(
                f"A checkpoint takes up to {needed / 1e6:.1f} MB, but at"
                f" {str(directory)!r} only {free / 1e6:.1f} MB are free. Make room."
            )
        yield


def _unusable(done: str, directory: pathlib.Path, error: OSError) -> CheckpointError:
    name = errno.errorcode.get(error.errno or 0, error.errno)
    is_full = name in ("ENOSPC", "EDQUOT", "EFBIG")
    remedy = "Make room" if is_full else "Name a folder that this process may write to"
    return CheckpointError(
        f"Checkpoints cannot be {done} {str(directory)!r}: {error.strerror} ({name})."
        f" {remedy}."
    )


def owner(directory: pathlib.Path) -> str:
    """Who holds the `lock`, as this process sees it."""
    path = directory / ".lock"
    return path.read_text(encoding="utf-8") if path.exists() else "nobody"
