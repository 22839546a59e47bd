"""Report signs of life and steps of a process to its launcher through a pipe."""

import contextlib
import os
import threading
import time
from typing import Any

# The environment variable with the pipe's file descriptor and inode number.
VARIABLE = "TOWERJAX_HEARTBEAT"
ALIVE = b"alive\n"
STEP = b"step\n"
_PERIOD_S = 0.1


def pipe_name(pipe: int) -> str:
    """Write the value of `VARIABLE` that names this pipe: descriptor and inode."""
    return f"{pipe}:{os.fstat(pipe).st_ino}"


def notify_launcher(word: bytes) -> bool:
    """Send a word, such as `ALIVE`, to the launcher; return False if none listens."""
    name = os.environ.get(VARIABLE)
    if name is None:
        return False
    pipe = int(name.partition(":")[0])
    # A child process inherits the variable but not the pipe: in the child, the
    # descriptor may be that of another file, with another inode number.
    with contextlib.suppress(OSError):
        return pipe_name(pipe) == name and bool(os.write(pipe, word))
    return False


def start(begun: Any = None) -> None:
    """Send signs of life from a daemon thread, until the launcher stops reading.

    The thread also reports the steps that ``begun.steps`` counts.
    """

    def beat() -> None:
        reported = 0
        while notify_launcher(ALIVE):
            if begun is not None and (new := begun.steps - reported) > 0:
                notify_launcher(STEP * new)
                reported += new
            time.sleep(_PERIOD_S)

    if VARIABLE in os.environ:
        threading.Thread(target=beat, name="towerjax-heartbeat", daemon=True).start()
