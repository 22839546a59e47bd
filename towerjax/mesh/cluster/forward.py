"""How does the output of many processes become lines that say whose they are?"""

import io
import os
import re
from typing import IO, TextIO, TypeAlias

Target: TypeAlias = TextIO | io.TextIOBase
# What JAX's transport on CPUs prints for each connection, on stdout and for no reader.
# Several threads may print to one line.
_TRANSPORT = re.compile(
    rb"(?=.*(\[Gloo\]|peer ranks))(\s*(\[Gloo\]|Rank|\d+|is connected to|peer ranks\.|"
    rb"Expected number of connected peer ranks is :))+\s*"
)


def split_lines(text: bytes) -> tuple[list[bytes], bytes]:
    r"""The complete lines of a text, with their ends, and what follows the last one."""
    *lines, rest = text.split(b"\n")
    return [line + b"\n" for line in lines], rest


class LineForwarder:
    """Reads a process' pipe without waiting, and writes complete lines of it.

    All of them but the transport's own "[Gloo] Rank 0 is connected ...".

    Attributes:
      source: The pipe, which this object closes at its end.
      is_open: Whether more may come.
    """

    def __init__(self, source: IO[bytes], target: Target, prefix: str) -> None:
        self.source = source
        self.is_open = True
        self._target = target
        self._prefix = prefix.encode()
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def forward(self) -> bool:
        """Pass on what there is now; False where there was nothing."""
        if not self.is_open:
            return False
        try:
            chunk = os.read(self.source.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        lines, self._rest = split_lines(self._rest + chunk)
        if not chunk:
            lines = [self._rest + b"\n"] if self._rest else []
            self.close()
        shown = [line for line in lines if not _TRANSPORT.fullmatch(line)]
        write(self._target, b"".join(self._prefix + line for line in shown))
        return True

    def close(self) -> None:
        """Read no more. May be called twice."""
        self.is_open = False
        self.source.close()


def write(target: Target, text: bytes) -> None:
    """Write bytes as they are, at once; as text where the stream takes only that."""
    if not text:
        return
    raw = getattr(target, "buffer", None)
    if raw is None:
        target.write(text.decode(errors="replace"))
    else:
        target.flush()
        raw.write(text)
    target.flush()
