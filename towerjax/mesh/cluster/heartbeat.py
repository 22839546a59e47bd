"""Does a process of a job still run, and do steps? It tells its launcher by a pipe."""

import contextlib
import io
import os
import threading
import time

# Names the pipe: its number, and by which it is known that it is the launcher's.
VARIABLE = "TOWERJAX_HEARTBEAT"
ALIVE, STEP = b"alive\n", b"step\n"
_PERIOD_S = 0.1


def name_of(pipe: int) -> str:
    """What the variable says of a pipe."""
    return f"{pipe}:{os.fstat(pipe).st_ino}"


def tell(word: bytes) -> bool:
    """Tell the launcher; False where none listens to this very process."""
    name = os.environ.get(VARIABLE)
    if name is None:
        return False
    pipe = int(name.partition(":")[0])
    # What this process starts has the variable, and something else of that number.
    with contextlib.suppress(OSError):
        return name_of(pipe) == name and bool(os.write(pipe, word))
    return False


def begin() -> None:
    """Give signs of life from a thread of its own, as long as somebody listens."""

    def beat() -> None:
        while tell(ALIVE):
            time.sleep(_PERIOD_S)

    if VARIABLE in os.environ:
        threading.Thread(target=beat, name="towerjax-heartbeat", daemon=True).start()


class Heartbeat(io.TextIOBase):
    """What the launcher hears of one process, line by line."""

    def __init__(self) -> None:
        # When the last sign of life came, and the last step was begun.
        self.last = self.stepped = time.monotonic()
        self.steps = 0

    def write(self, text: str, /) -> int:
        """Note what came."""
        self.last = time.monotonic()
        if count := text.count(STEP.decode()):
            self.steps, self.stepped = self.steps + count, self.last
        return len(text)
