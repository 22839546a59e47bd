"""Does a process of a job still run? It says so, until something stops all of it."""

import contextlib
import io
import os
import threading
import time
from collections.abc import MutableMapping

# Names the pipe to a launcher that listens.
VARIABLE = "TOWERJAX_HEARTBEAT"
_PERIOD_S = 0.1


def begin(environ: MutableMapping[str, str]) -> None:
    """Give signs of life to the launcher that listens, from a thread of its own."""
    pipe = environ.pop(VARIABLE, None)  # what this process starts has not got the pipe
    if pipe is None:
        return

    def beat() -> None:
        with contextlib.suppress(BrokenPipeError):
            while True:
                os.write(int(pipe), b".\n")
                time.sleep(_PERIOD_S)

    threading.Thread(target=beat, name="towerjax-heartbeat", daemon=True).start()


class Heartbeat(io.TextIOBase):
    """Where signs of life are written to: when did the last one come?

    Attributes:
      last: By ``time.monotonic``; at first, the start.
    """

    def __init__(self) -> None:
        self.last = time.monotonic()

    def write(self, text: str, /) -> int:
        """Note a sign."""
        self.last = time.monotonic()
        return len(text)
