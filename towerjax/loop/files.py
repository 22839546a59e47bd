"""Files and folders of a run, on this machine or at any address that `epath` knows."""

import contextlib
import json
import math
import os
import pathlib
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from io import FileIO
from typing import Any

from etils import epath

from towerjax.types.options import check_text, is_whole, refuse_option
from towerjax.types.refusals import printable

# What reading a forged line may raise.
_MISREAD = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# Matches an address such as "gs:/bucket": pathlib makes one slash of two. A scheme has
# two letters or more, unlike the drive of a Windows path.
_SCHEME = re.compile(r"[A-Za-z][\w+.-]+:/")


def checked_path(name: str, value: Any, kind: str) -> epath.Path:
    """Make the absolute path of a file or folder; raise unless it can be one."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    check_text(name, text, f"the path of {kind}")
    has_scheme = _SCHEME.match(text)
    path = None
    with contextlib.suppress(KeyError):  # epath does not know the scheme
        path = absolute_path(value)
    if path is None or "\0" in text or has_scheme and is_on_disk(path):
        where = (
            "on this machine, or an address that etils.epath knows, such as"
            " 'gs://bucket/run'. Write an address as text, because pathlib.Path makes"
            " one slash of two"
        )
        refuse_option(name, value, f"the path of {kind}: {where}")
    return path


def absolute_path(value: Any) -> epath.Path:
    """Make a local path absolute; leave an address as it is."""
    path = epath.Path(value)
    is_plain = isinstance(path, type(epath.Path("/"))) and "://" not in str(path)
    return epath.Path(os.path.abspath(value)) if is_plain else path


def is_on_disk(path: epath.Path) -> bool:
    """Return whether an absolute path is in this machine's file system."""
    return os.fspath(path).startswith("/")


def replace_file(path: epath.Path, content: bytes) -> None:
    """Write a file in one step, so that no reader finds half of it.

    On a disk the content is first written into a new file beside it, whose name is
    random, so that nobody can have put a link there.
    """
    if not is_on_disk(path):  # stores replace whole files
        path.write_bytes(content)
        return
    beside = pathlib.Path(path).with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


class StoredFile:
    """A file in a store that only replaces whole files, such as an object store.

    Written bytes are held in memory, and stored every ``flush_s`` seconds, or less
    often if storing takes long. `flush` and `close` store all of them.
    """

    def __init__(
        self, path: epath.Path, content: bytes = b"", flush_s: float = math.inf
    ) -> None:
        self._path = path
        self._bytes = bytearray(content)
        self._flush_s = flush_s
        self._next_s = time.monotonic() + flush_s

    def write(self, data: Any) -> int:
        """Add bytes to the file; store all of them if it is time."""
        self._bytes += data
        if time.monotonic() >= self._next_s:
            self.flush()
        return len(data)

    def truncate(self, size: int) -> None:
        """Cut the file to its first ``size`` bytes."""
        del self._bytes[size:]

    def flush(self) -> None:
        """Store the whole file."""
        start_s = time.monotonic()
        self._path.write_bytes(bytes(self._bytes))
        end_s = time.monotonic()
        self._next_s = end_s + max(self._flush_s, 10 * (end_s - start_s))

    close = flush


def opened_after(
    path: epath.Path, size: int | None = None, flush_s: float = math.inf
) -> FileIO | StoredFile:
    """Open a file for writing, and cut it off after ``size`` bytes; None keeps all."""
    if not is_on_disk(path):
        content = path.read_bytes() if path.exists() else b""
        return StoredFile(path, content[:size], flush_s)
    file = open(path, "ab", buffering=0)
    if size is not None and size < os.fstat(file.fileno()).st_size:
        file.truncate(size)
    return file


def read_lines(
    path: epath.Path, first: str, owner: str
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the JSON object of each complete line, and the line's size.

    Each object's first field must be named ``first``. ``owner`` names the file in
    errors.
    """
    head = f'{{"{first}": '.encode()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            is_ours = line.startswith(head[: len(line)])
            if is_torn(line) and (is_ours or not line.strip(b"\0")):
                refuse_whole(path, line, owner)
                return
            with telling_of_line(path, number, line, owner):
                if not is_ours:
                    raise ValueError(f"it does not begin with {head.decode()}")
                fields = json.loads(line)
            yield fields, len(line)


def is_torn(line: bytes) -> bool:
    """Return whether a kill, a full disk or a power cut tore a file's last line.

    After a power cut a file may end in zeros.
    """
    return not line.endswith(b"\n")


def refuse_whole(path: epath.Path, line: bytes, owner: str) -> None:
    """Raise if a line without its end is a whole JSON file, of another program."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return
    raise ValueError(
        f"{str(path)!r} ends with a whole object and no newline, so perhaps it is not a"
        f" file of {owner}. It was not changed. Use another path, or end it by a"
        " newline."
    )


@contextlib.contextmanager
def telling_of_line(
    path: epath.Path, number: int, line: bytes, owner: str
) -> Iterator[None]:
    """Raise a `ValueError` on a file's line if this block cannot read it."""
    try:
        yield
    except _MISREAD as why:
        kind = type(why).__name__
        raise ValueError(
            f"Line {number} of {str(path)!r} is not a line of {owner}: {line[:60]!r}"
            f" ({kind}: {printable(f'{why!s:.100}')}). The file was not changed. Use"
            " another path."
        ) from None


def whole_at_least_0(fields: Mapping[str, Any], name: str) -> int:
    """Read a field that counts; raise if it is something else."""
    number = fields[name]
    if not is_whole(number) or number < 0:
        raise ValueError(f"{name} is {number!r:.40}, and not a whole number >= 0")
    return number


def as_line(fields: Mapping[str, Any]) -> bytes:
    """Write an object as a line of JSON, in bytes."""
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def append_line(file: FileIO | StoredFile, fields: Mapping[str, Any]) -> None:
    """Write an object as a line of JSON to an open file."""
    append_bytes(file, as_line(fields))


def append_bytes(file: FileIO | StoredFile, content: bytes) -> None:
    """Write to an unbuffered file in one call, which a kill cannot split."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
