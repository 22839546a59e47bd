"""Where do checkpoints lie? One folder each, whole or of a name that does not count."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator

from towerjax.loop.checkpoint.manifest import CheckpointError, flush_folder

_WHOLE = re.compile(r"step-(\d+)")
_BEING_MADE = re.compile(r"step-\d+\.(saving|deleting)")


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
    """Let a checkpoint that is written count, in one go."""
    making(directory, number).rename(folder_of(directory, number))
    flush_folder(directory)


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
        for path in directory.iterdir():
            if _BEING_MADE.fullmatch(path.name):
                shutil.rmtree(path)
        probe = directory / ".probe"
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
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
    """Keep others from writing to the directory for the length of a block.

    The system lets go of it when the process ends, however it ends.
    """
    handle = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another run writes its checkpoints to {str(directory)!r}. Wait for"
                " its end, or name another folder."
            ) from None
        yield
    finally:
        os.close(handle)
